"""Small data, LightningModules as users write them, and a quiet Trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from helpers.training import Lit, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Categorical, LaplaceCallback

FEATURES, CLASSES = 4, 3


class Classifier(Lit):
    """What a user has: batch norm, dropout, Adam, and hyperparameters."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, CLASSES))
        )
        self.save_hyperparameters()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams["lr"])


class Regressor(Lit):
    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 2))
        super().__init__(net, F.mse_loss, partial(torch.optim.SGD, lr=0.05))


@dataclass(frozen=True)
class Temperate(Categorical):
    """A likelihood defined by the user, which no file can hold."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labelled(n: int, seed: int = 0) -> TensorDataset:
    x = draw(n, FEATURES, seed=seed)
    y = (x[:, :CLASSES] + 0.5 * draw(n, CLASSES, seed=seed + 1000)).argmax(1)
    return TensorDataset(x, y)


def measured(n: int, seed: int = 0) -> TensorDataset:
    x = draw(n, FEATURES, seed=seed)
    return TensorDataset(x, torch.sin(x[:, :2]) + 0.3 * draw(n, 2, seed=seed + 1000))


def train_loader(n: int = 37, batch_size: int = 8, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(labelled(n), batch_size=batch_size, shuffle=shuffle)


def plain_loader() -> DataLoader[Any]:
    return train_loader(shuffle=False)


def held_out(n: int = 11, batch_size: int = 4, seed: int = 5) -> DataLoader[Any]:
    return DataLoader(labelled(n, seed), batch_size=batch_size)


def laplace(**arguments: Any) -> LaplaceCallback:
    return LaplaceCallback(**{"progress": False, **arguments})


def by_evidence(**arguments: Any) -> LaplaceCallback:
    """A callback that does not use validation data."""
    return laplace(**{"tune": "marglik", "calibrate": None, **arguments})


def fitted(folder: Path, callback: LaplaceCallback, model: L.LightningModule | None = None, **arguments: Any) -> Any:
    """A module after a short fit with `callback`, and the Trainer."""
    L.seed_everything(0, verbose=False)
    model = Classifier() if model is None else model
    fit = trainer(folder, callback, **arguments)
    data = DataLoader(measured(37), batch_size=8) if isinstance(model, Regressor) else train_loader()
    fit.fit(model, data)
    return model, fit


def state_after(folder: Path, make: Any, *callbacks: L.Callback) -> dict[str, Any]:
    """The complete state after training, with the random state."""
    L.seed_everything(3, verbose=False)
    model, fit = make(), trainer(folder, *callbacks)
    fit.fit(model, train_loader(), DataLoader(labelled(9, 4), batch_size=4))
    optimizer = fit.optimizers[0].state_dict()["state"]
    return {
        "weights": model.state_dict(),
        "optimizer": {(i, key): value for i, state in optimizer.items() for key, value in state.items()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "trainable": [p.requires_grad for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": (torch.get_rng_state().tolist(), torch.rand(3).tolist()),
    }


def same_numbers(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    """Dictionaries of numbers that agree in every key."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            float(found[key]), float(value), rtol=rtol, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}"
        )


def same_posterior(found: Any, expected: Any, x: Tensor, rtol: float = 1e-5) -> None:
    """Equal in everything that does not depend on the choice of an eigenbasis."""
    close = {"rtol": rtol, "atol": rtol * 1e-2}
    assert found.n_data == expected.n_data
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=0)
    torch.testing.assert_close(found.prior_precision, expected.prior_precision, **close)
    torch.testing.assert_close(found.precision.logdet(), expected.precision.logdet(), **close)
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), **close)
    torch.testing.assert_close(found.functional(x)[1], expected.functional(x)[1], **close)


def error(call: Callable[[], Any]) -> str:
    """The type and message of the exception that a call raises, or "none"."""
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "none"
