"""What a network returns, and what a batch is: every callback and mixin reads them alike.

The same token classifier returns its logits in several forms, from several kinds of batches; each gives the posterior
and predictions of the one that returns a tensor `[B, C, T]` for a pair.
"""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers.networks import made
from helpers.tensors import TIGHT, seeded
from helpers.training import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bayes import (
    GaussianPosterior,
    L2MCallback,
    LaplaceCallback,
    MarginalLikelihoodCallback,
    Network,
    OnlineLaplaceCallback,
    SWAGCallback,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    evaluate,
    fit_laplace,
)
from lightning_bayes.network import inputs
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.trainer import PosteriorCallback

WORDS, CLASSES, T = 7, 4, 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*times the mean negative log-likelihood"),
]


class TokenOutput(NamedTuple):
    hidden: Tensor
    logits: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {  # of logits [B, T, C] and a loss
    "dense": lambda f, loss: f.mT,
    "tensor": lambda f, loss: f,
    "dict": lambda f, loss: OrderedDict(loss=loss, logits=f),
    "attribute": lambda f, loss: TokenOutput(f * 0, f),
    "tuple": lambda f, loss: (loss, f),
}


class Tokens(L.LightningModule):
    def __init__(self, form: str = "dense") -> None:
        super().__init__()
        self.form = FORMS[form]
        self.body, self.head = made(lambda: nn.Embedding(WORDS, 5)), made(lambda: nn.Linear(5, CLASSES))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        f = self.head(torch.tanh(self.body(input_ids)))
        loss = None if labels is None else F.cross_entropy(f.mT, labels, reduction="sum") / len(labels)
        return self.form(f, loss)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = (batch["input_ids"], batch["labels"]) if isinstance(batch, dict) else batch
        returned = self(ids)
        f = returned if isinstance(returned, Tensor) else returned[1] if type(returned) is tuple else None
        if f is None:
            f = returned["logits"] if isinstance(returned, dict) else returned.logits
        f = f if self.form is FORMS["dense"] else f.mT
        return F.cross_entropy(f, labels, reduction="sum") / len(labels)

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


class VL(VariationalLaplaceMixin, Tokens):
    pass


class VI(VariationalInferenceMixin, Tokens):
    pass


METHODS: dict[str, Callable[..., PosteriorCallback]] = {
    "laplace": lambda **words: LaplaceCallback(progress=False, **words),
    "l2m": lambda **words: L2MCallback(loss_scale=1.0, prior_precision=1.0, **words),
    "online": lambda **words: OnlineLaplaceCallback("classification", memory_factor=0.1, **words),
    "marglik": lambda **words: MarginalLikelihoodCallback(progress=False, **words),
    "swag": lambda **words: SWAGCallback(start=0, **words),
}
MIXINS: dict[str, Any] = {"vl": VL, "vi": VI}


def examples(n: int, seed: int, as_dict: bool) -> list[Any]:
    ids, labels = (torch.randint(most, (n, T), generator=seeded(seed + most)) for most in (WORDS, CLASSES))
    labels[::4, 1] = -100
    if not as_dict:
        return list(zip(ids, labels, strict=True))
    return [
        {"input_ids": x, "labels": y, "number": number} for number, (x, y) in enumerate(zip(ids, labels, strict=True))
    ]


def run(folder: Path, method: str, form: str, as_dict: bool) -> tuple[dict[str, float], Any, GaussianPosterior]:
    words: dict[str, Any] = {"network": Network(output=1)} if form == "tuple" else {}
    if method in MIXINS:
        module, callbacks = MIXINS[method](form, variational=words), []
    else:
        module, callbacks = Tokens(form), [METHODS[method](**words)]
    fitting = trainer(folder, *callbacks, precision="64-true")
    train, test = (DataLoader(examples(n, n, as_dict), batch_size=4) for n in (10, 7))
    fitting.fit(module, train)
    scores = fitting.test(module, test, verbose=False)[0]
    posterior = callbacks[0].posterior if callbacks else module.posterior
    return scores, fitting.predict(module, test)[0], posterior


@pytest.mark.parametrize("method", [*METHODS, *MIXINS])
def test_every_form_gives_the_same_posterior_and_predictions(method: str, tmp_path: Path) -> None:
    scores, prediction, posterior = run(tmp_path, method, "dense", False)
    assert prediction.probs.shape == (4, CLASSES, T)
    others = [("tensor", True), ("attribute", False)] if method == "laplace" else []
    for form, as_dict in [("dict", True), ("tuple", True), *others]:
        other_scores, other_prediction, other = run(tmp_path, method, form, as_dict)
        assert other_scores == pytest.approx(scores), form
        torch.testing.assert_close(other_prediction.probs, prediction.probs, **TIGHT)
        torch.testing.assert_close(other.mean, posterior.mean, **TIGHT)
        torch.testing.assert_close(other.precision.to_dense(), posterior.precision.to_dense(), **TIGHT)


def test_a_posterior_keeps_how_its_network_is_read(tmp_path: Path) -> None:
    network, data = Tokens("tuple").double(), DataLoader(examples(9, 0, True), batch_size=4)
    posterior = fit_laplace(network, data, output=1)
    posterior.save(tmp_path / "posterior.pt")
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", network)
    x = {"input_ids": torch.randint(WORDS, (2, T))}
    torch.testing.assert_close(loaded.predict(x).probs, posterior.predict(x).probs)
    assert evaluate(loaded, data) == pytest.approx(evaluate(posterior, data))
    # Nothing is added to the user's own module, which still returns what it did.
    assert type(network(**x)) is tuple
    assert set(vars(network)) == set(vars(Tokens("tuple")))


def test_classes_are_where_the_caller_says() -> None:
    """With as many positions as classes, the shape of the targets is ambiguous."""
    network = Tokens("tensor").double()
    ids, labels = torch.randint(WORDS, (5, CLASSES)), torch.randint(CLASSES, (5, CLASSES))
    named = fit_laplace(network, [(ids, labels)], output=Network(class_dim=-1))
    reference = fit_laplace(Tokens("dense").double(), [(ids, labels)], output=Network(class_dim=1))
    torch.testing.assert_close(named.precision.to_dense(), reference.precision.to_dense(), **TIGHT)
    with pytest.warns(BayesWarning, match=r"Network\(class_dim=-1\)"):
        guessed = fit_laplace(network, [(ids, labels)])
    assert not torch.allclose(guessed.precision.to_dense(), named.precision.to_dense())
    from_dict = fit_laplace(Tokens("dict").double(), [(ids, labels)])  # whose logits have classes last
    torch.testing.assert_close(from_dict.precision.to_dense(), reference.precision.to_dense(), **TIGHT)


@pytest.mark.parametrize("likelihood", ["regression", "binary"])
def test_one_output_may_have_a_dimension_of_its_own(likelihood: str, tmp_path: Path) -> None:
    """`[B, 1]` for targets `[B]`, as models with one label of Hugging Face have it, and most binary classifiers."""
    network = made(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    x = torch.randn(9, 2, generator=seeded(0), dtype=torch.float64)
    y = (x[:, 0] > 0).double()
    posterior = fit_laplace(network, [(x[:5], y[:5]), (x[5:], y[5:])], likelihood)
    reference = fit_laplace(nn.Sequential(network, nn.Flatten(0)), [(x, y)], likelihood)
    torch.testing.assert_close(posterior.precision.to_dense(), reference.precision.to_dense(), **TIGHT)
    prediction, expected = posterior.predict(x), reference.predict(x)
    torch.testing.assert_close(prediction.epistemic, expected.epistemic, **TIGHT)
    assert prediction.epistemic.shape == (9,)


class TinyLMHeadModel(Tokens):
    """Named like a causal language model of Hugging Face, whose loss shifts the labels."""


def test_labels_of_a_language_model_are_those_of_the_next_token() -> None:
    ids = torch.tensor([[3, 1, 4, 1], [5, 2, 6, 0]])
    own = torch.where(ids == 0, -100, ids)  # without padding
    shifted = torch.tensor([[1, 4, 1, -100], [2, 6, -100, -100]])
    for network in (TinyLMHeadModel(), nn.Sequential(TinyLMHeadModel())):
        assert torch.equal(inputs.split(network, {"input_ids": ids, "labels": own})[1], shifted)
        # What is not a copy of the inputs is of tags, or has been shifted before.
        assert torch.equal(inputs.split(network, {"input_ids": ids, "labels": shifted})[1], shifted)
    assert torch.equal(inputs.split(Tokens(), {"input_ids": ids, "labels": own})[1], own)


class OfDict(Tokens):
    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(batch["input_ids"])


def test_a_network_may_take_the_dict_as_it_is() -> None:
    data = DataLoader(examples(9, 0, True), batch_size=4)
    whole, parts = (fit_laplace(kind("dict").double(), data) for kind in (OfDict, Tokens))
    torch.testing.assert_close(whole.precision.to_dense(), parts.precision.to_dense(), **TIGHT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "must return one tensor, but it returned tuple.*output="),
        (
            {"network": Network(output="scores")},
            "^output='scores' finds no tensor in the network's return value",
        ),
        ({"network": Network(output=1, class_dim=3)}, "^class_dim=3 is not a dimension after the first"),
        ({"network": Network(output=1, class_dim=1)}, "or set the class dimension with class_dim="),
    ],
)
def test_a_wrong_output_is_an_error_before_training(words: dict[str, Any], message: str, tmp_path: Path) -> None:
    module = Tokens("tuple")
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises((RuntimeError, ValueError), match=message):
        trainer(tmp_path, LaplaceCallback(progress=False, **words)).fit(
            module, DataLoader(examples(8, 0, True), batch_size=4)
        )
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
