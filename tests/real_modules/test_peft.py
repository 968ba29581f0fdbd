"""LoRA adapters of `peft` on tiny models made from configs: fit, test, predict, save beside the adapter, load."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import TIGHT, seeded
from helpers.training import trainer
from real_frame import Ordinary
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, LaplaceCallback, fit_laplace
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.network import CurvatureError
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.structures import BlockDiagonal, Kronecker

transformers = pytest.importorskip("transformers", reason="Hugging Face models are the extra `real`")
peft = pytest.importorskip("peft", reason="LoRA adapters are the extra `real`")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROUNDED = {"rtol": 1e-3, "atol": 1e-6}  # Llama's norms compute in float32, whatever the weights are
CLASSES, TOKENS, VOCABULARY = 3, 5, 12


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **shared()))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 6, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, **shared()))


def llama() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=6, **shared())
    return transformers.LlamaForSequenceClassification(config)


def shared() -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "num_labels": CLASSES, "max_position_embeddings": 8, "pad_token_id": 0}


FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (bert, {"target_modules": ["query", "value"]}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),  # fused queries, keys and values
    "llama": (llama, {"target_modules": ["q_proj", "v_proj"]}),
}


def adapted(family: str, seed: int = 0, **options: Any) -> Any:
    """A model with a fresh adapter: A is random, B is zero."""
    make, targets = FAMILIES[family]
    torch.manual_seed(seed)
    return peft.get_peft_model(make(), peft.LoraConfig(task_type="SEQ_CLS", r=2, **targets, **options))


def moved(model: Any) -> Any:
    """Away from a fresh adapter, as training does."""
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.5)
    return model


def texts(n: int = 6) -> list[dict[str, Tensor]]:
    """Of different lengths, padded."""
    generator = seeded(1)
    ids = torch.randint(1, VOCABULARY, (n, TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.randint(2, TOKENS + 1, (n, 1), generator=generator)).long()
    return [{"input_ids": i * m, "attention_mask": m, "labels": i[0] % CLASSES} for i, m in zip(ids, mask, strict=True)]


def batch(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


class Tuned(Ordinary):
    """An ordinary module around a model with an adapter."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(**batch).loss


@pytest.mark.parametrize("family", FAMILIES)
def test_from_training_to_a_posterior_beside_the_adapter(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, loader = Tuned(adapted(family)), DataLoader(texts(), 4)
    frozen = {name: p.clone() for name, p in module.named_parameters() if not p.requires_grad}
    laplace = LaplaceCallback(network="model", tune=None, progress=False)
    runner = trainer(tmp_path, laplace, max_epochs=3)
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        runner.fit(module, loader)
    lines = [message for message in caplog.messages if message.startswith("curvature blocks")]
    named = set(re.findall(r"[\w.]+\.(?:weight|bias)", lines[-1]))
    trained = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert named == trained == set(laplace.posterior.subset.names)
    assert all("lora_" in name or "modules_to_save" in name for name in named)
    assert all(torch.equal(p, frozen[name]) for name, p in module.named_parameters() if name in frozen)
    predictions = torch.cat([prediction.probs for prediction in runner.predict(module, loader)])
    scores = runner.test(module, loader, verbose=False)[0]
    x, y = inputs_of(batch(texts())), batch(texts())["labels"]
    nll = {"laplace": F.nll_loss(predictions.log(), y), "map": module.eval().model(**x, labels=y).loss}
    assert {name: scores[f"test_nll_{name}"] for name in nll} == pytest.approx({n: v.item() for n, v in nll.items()})
    assert nll["laplace"] != nll["map"]

    folder = tmp_path / "adapter"
    module.model.save_pretrained(folder)
    laplace.posterior.save(folder / "posterior.pt")
    torch.manual_seed(0)  # the same base weights, which a user has from a hub
    fresh = peft.PeftModel.from_pretrained(FAMILIES[family][0](), folder)
    posterior = GaussianPosterior.load(folder / "posterior.pt", fresh)
    torch.testing.assert_close(posterior.predict(x).probs, predictions)
    torch.testing.assert_close(laplace.posterior.predict(x).probs, predictions)
    assert not any(p.requires_grad for p in fresh.parameters())  # as `from_pretrained` leaves them


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "biases": {"bias": "lora_only"},
}


@pytest.mark.parametrize(
    ("family", "variant", "fresh"),
    [*((family, "plain", fresh) for family in FAMILIES for fresh in (False, True))]
    + [("bert", variant, False) for variant in list(VARIANTS)[1:]],
)
def test_posterior_is_that_of_a_dense_matrix(family: str, variant: str, fresh: bool) -> None:
    """`P = Σₙ JₙᵀΛₙJₙ + δI` by one backward pass per output, over the adapter alone. In a fresh adapter B is zero."""
    model = adapted(family, **VARIANTS[variant])
    network = (model if fresh else moved(model)).double()
    data = batch(texts())
    x, y = inputs_of(data), data["labels"]
    loader = [{key: value[part] for key, value in data.items()} for part in (slice(0, 1), slice(1, 6))]
    f, J = jacobian(network, x)
    close = ROUNDED if family == "llama" else TIGHT
    p = f.softmax(1)
    H = sum(J[n].mT @ (p[n].diag() - torch.outer(p[n], p[n])) @ J[n] for n in range(len(y)))
    assert H.abs().max() > 1e-6
    full = fit_laplace(network, loader, structure="full", prior_precision=0.7)
    P = H + 0.7 * torch.eye(len(H), dtype=H.dtype)
    torch.testing.assert_close(full.precision.to_dense(), P, **close)
    torch.testing.assert_close(full.functional(x)[1], J @ torch.linalg.solve(P, J.mT), **close)
    diagonal = fit_laplace(network, loader, structure="diag", prior_precision=0.7)
    torch.testing.assert_close(diagonal.precision.to_dense(), P.diagonal().diag(), **close)
    kron = fit_laplace(network, loader, prior_precision=0.7)
    covariance = J @ torch.linalg.solve(kron.precision.to_dense(), J.mT)
    torch.testing.assert_close(kron.functional(x)[1], covariance, **close)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_matrices_of_an_adapter_have_kronecker_blocks(family: str) -> None:
    """`G ⊗ A`, with `A = Σ aaᵀ/(N·T)` and `G = Σ ggᵀ` as hooks see the layers."""
    network = moved(adapted(family)).double().eval()
    data = batch(texts())
    structure = fit_curvature(network, [data]).structure
    assert isinstance(structure, BlockDiagonal)
    adapters = {n: m for n, m in network.named_modules() if re.search(r"lora_[AB]\.default$", n)}
    assert len(adapters) == 4  # A and B of two layers
    close = ROUNDED if family == "llama" else TIGHT
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in adapters.items():
        layer.register_forward_hook(lambda _, args, z, name=name: seen.update({name: (args[0].detach(), z)}))
    f = network(**inputs_of(data)).logits
    p = f.detach().softmax(1)
    roots = torch.stack([p[:, c].sqrt()[:, None] * (torch.eye(CLASSES)[c] - p) for c in range(CLASSES)])
    for name in adapters:
        a, z = seen[name]
        g = [torch.autograd.grad(f, z, root, retain_graph=True)[0].flatten(0, -2) for root in roots]
        A, G = a.flatten(0, -2), torch.cat(g)
        block = structure.blocks[structure.names.index(f"{name}.weight")]
        assert isinstance(block, Kronecker)
        torch.testing.assert_close(block.to_dense(), torch.kron(G.mT @ G, A.mT @ A / len(A)), **close)


def test_of_several_adapters_the_active_one_is_fitted() -> None:
    model = adapted("bert")
    model.add_adapter("other", peft.LoraConfig(task_type="SEQ_CLS", r=3))
    data = batch(texts())
    for active in ("default", "other", "default"):
        model.set_adapter(active)
        posterior = fit_laplace(model, [data])
        assert all(f".{active}." in name for name in posterior.subset.names)
        assert sum("lora_" in name for name in posterior.subset.names) == 4


def test_merged_adapter_is_refused_until_it_is_unmerged() -> None:
    network = moved(adapted("bert")).double()
    data = batch(texts())
    x = inputs_of(data)
    posterior = fit_laplace(network, [data])
    expected = posterior.predict(x).probs
    network.merge_adapter()
    with pytest.raises(CurvatureError, match=r"unmerge_adapter\(\)"):
        fit_laplace(network, [data])
    with pytest.raises(PosteriorError, match="weights are not those"):
        posterior.predict(x)
    network.unmerge_adapter()
    torch.testing.assert_close(posterior.predict(x).probs, expected)
    merged = copy.deepcopy(network).merge_and_unload()
    names = fit_laplace(merged, [data]).subset.names  # what is left to train
    assert names == ("classifier.weight", "classifier.bias")


def jacobian(network: nn.Module, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of what trains, example by example and output by output.  # [B, C], [B, C, P]"""
    network = copy.deepcopy(network).eval()
    weights = [p for p in network.parameters() if p.requires_grad]
    outputs, rows = [], []
    for n in range(len(x["input_ids"])):
        (f,) = network(**{key: value[n : n + 1] for key, value in x.items()}).logits
        outputs.append(f.detach())
        grads = [torch.autograd.grad(c, weights, retain_graph=True, materialize_grads=True) for c in f]
        rows.append(torch.stack([torch.cat([g.flatten() for g in by_weight]) for by_weight in grads]))
    return torch.stack(outputs), torch.stack(rows)
