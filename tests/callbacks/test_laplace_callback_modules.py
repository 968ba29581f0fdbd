"""Third-party LightningModules: fit, test, predict, save and load."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchvision
from callback_cases import draw, laplace, same_numbers, trainer
from helpers.training import Lit
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GLM, GaussianPosterior, fit_laplace
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.inputs import call


def go_through(folder: Path, make: Any, arguments: dict[str, Any], train: Any, test: Any) -> tuple[Any, Any]:
    """Fit, test, predict, save and load; returns the callback and the module for further checks."""
    L.seed_everything(0, verbose=False)
    callback, checkpoint = laplace(**arguments), ModelCheckpoint(folder / "kept")
    model = make()
    fit = trainer(folder, callback, checkpoint, max_epochs=1, enable_checkpointing=True)
    fit.fit(model, train)
    (logged,) = fit.test(model, test, verbose=False)
    predictions = fit.predict(model, test)

    # The posterior is fit_laplace's, with the prior that was tuned.
    posterior, split = callback.posterior, getattr(model, "split_batch", lambda batch: batch)
    words = {key: value for key, value in arguments.items() if key != "predictive"}
    expected = fit_laplace(model, map(split, train), **words, prior_precision=float(posterior.prior_precision))
    if arguments.get("likelihood") == "regression":
        expected = expected.with_noise(posterior.likelihood.noise_std)
    assert posterior.n_data == len(train.dataset)
    torch.testing.assert_close(posterior.precision.logdet(), expected.precision.logdet(), rtol=1e-5, atol=0)

    # Saved: another Trainer with another module has the same numbers, and so has the file.
    again = trainer(folder, laplace(**arguments))
    (reloaded,) = again.test(make(), test, ckpt_path=checkpoint.best_model_path, verbose=False)
    same_numbers(reloaded, logged, rtol=1e-5)
    twin = make()
    twin.load_state_dict(model.state_dict())
    from_file = GaussianPosterior.load(callback.posterior_path, twin)
    x = split(next(iter(test)))[0]
    generator = torch.Generator().manual_seed(callback.seed)
    loaded = from_file.predict(x, callback.predictive, generator=generator)
    torch.testing.assert_close(loaded.entropy, predictions[0].entropy, rtol=1e-4, atol=1e-5)

    # Beside the posterior's, the network's own score.
    assert "test_nll_laplace" in logged
    if arguments.get("likelihood") != "regression":
        with torch.no_grad():
            losses = [
                F.cross_entropy(call(model.eval(), x), y, reduction="none").flatten() for x, y in map(split, test)
            ]
        assert logged["test_nll_map"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4)
    return callback, model


class Boring(BoringModel):
    """Lightning's BoringModel learns to return ones: its batch is x and holds no target."""

    def split_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return batch, torch.ones(len(batch), 2)


def test_lightnings_boring_model(tmp_path: Path) -> None:
    train, test = (DataLoader(RandomDataset(32, n), batch_size=8) for n in (64, 20))
    arguments = {"likelihood": "regression", "structure": "full"}
    callback, _ = go_through(tmp_path, Boring, arguments, train, test)
    # The model is linear and the likelihood Gaussian: the covariance is that of Bayesian linear regression.
    posterior = callback.posterior
    x = torch.cat([train.dataset.data, torch.ones(64, 1)], 1).double()
    σ, δ = float(posterior.likelihood.noise_std), float(posterior.prior_precision)
    covariance = torch.linalg.inv(x.T @ x / σ**2 + δ * torch.eye(33, dtype=torch.float64))
    at = torch.cat([test.dataset.data, torch.ones(20, 1)], 1).double()
    expected = (at @ covariance * at).sum(1)
    found = posterior.functional(test.dataset.data)[1]
    torch.testing.assert_close(found[:, 0, 0].double(), expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(found[:, 0, 1], torch.zeros(20), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:laplace. the loss of the training step")  # which is the sum of its outputs
def test_lightnings_demo_model(tmp_path: Path) -> None:
    class Demo(DemoModel):
        def split_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
            return batch, torch.ones(len(batch), 10)

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            pass

    train, test = (DataLoader(RandomDataset(32, n), batch_size=8) for n in (64, 20))
    go_through(tmp_path, Demo, {"likelihood": "regression", "structure": "diag"}, train, test)


class Translator(LightningTransformer):
    """Lightning's transformer, without its download, and with one output row per example instead of per token."""

    def __init__(self) -> None:
        super().__init__(vocab_size=7)

    def prepare_data(self) -> None:
        pass

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return super().forward(inputs, target).unflatten(0, inputs.shape).movedim(-1, 1)  # [B, V, T]

    def split_batch(self, batch: Any) -> tuple[Any, Tensor]:
        return (batch[0], batch[1]), batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.nll_loss(self(*batch), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass


def tokens(n: int, seed: int) -> DataLoader[Any]:
    text = torch.randint(0, 7, (n, 4), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=4)


def test_lightnings_transformer(tmp_path: Path) -> None:
    arguments = {"subset": "last_layer", "predictive": GLM(samples=20)}
    callback, _ = go_through(tmp_path, Translator, arguments, tokens(12, 0), tokens(6, 1))
    assert callback.posterior.subset.names == ("model.decoder.weight", "model.decoder.bias")


def test_lightnings_transformer_as_it_is_gives_one_row_per_token_and_the_error_says_so(tmp_path: Path) -> None:
    class AsItIs(LightningTransformer):
        prepare_data = Translator.prepare_data
        split_batch = Translator.split_batch

    with pytest.raises(CurvatureError, match=r"must return one row per example, but \d examples gave"):
        trainer(tmp_path, laplace(subset="last_layer"), max_epochs=1).fit(AsItIs(vocab_size=7), tokens(4, 0))


def vision(name: str) -> Lit:
    """Any torchvision classifier."""
    net = torchvision.models.get_model(name, num_classes=3)
    return Lit(net, optimizer=partial(torch.optim.SGD, lr=0.01))


def images(n: int, seed: int) -> DataLoader[Any]:
    labels = torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(draw(n, 3, 32, 32, seed=seed), labels), batch_size=4)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet18", {"subset": "last_layer"}),
        ("mobilenet_v3_small", {"subset": "last_layer"}),
        ("mobilenet_v3_small", {"subset": "all", "structure": "diag"}),
        pytest.param("resnet18", {"subset": "all", "structure": "diag"}, marks=pytest.mark.slow),
        pytest.param("resnet18", {"subset": ["net.conv1", "net.layer1", "net.fc"]}, marks=pytest.mark.slow),
        pytest.param("mobilenet_v3_small", {"subset": "all", "curvature": "fisher_mc"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{key}={word}" for key, word in value.items()),
)
def test_torchvision_models(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    callback, model = go_through(tmp_path, lambda: vision(name), arguments, images(8, 0), images(6, 1))
    chosen = ["net"] if arguments["subset"] == "all" else arguments["subset"]
    modules = [list(model.modules())[-1]] if chosen == "last_layer" else [model.get_submodule(name) for name in chosen]
    assert callback.posterior.subset.size == sum(p.numel() for module in modules for p in module.parameters())
