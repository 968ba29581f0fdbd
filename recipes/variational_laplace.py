"""Variational Laplace and variational inference: train the posterior together with the network.

There are few images of the digits 0–7, so a plain network is overconfident. The same LightningModule is trained without
changes (MAP) and with each of the two mixins. Variational Laplace differentiates its gradient, so the activations must
be smooth: softplus, not ReLU. β < 1 tempers the KL divergence.

    python recipes/variational_laplace.py    # a minute; table and picture go to outputs/variational_laplace/
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from digits import KNOWN, Digits, draw_scores, judge, read_digits
from program import WITH_BAR, Run, start
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bayes import (
    BNN,
    GaussianPosterior,
    LogSigmaMultiplierMixin,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    fit_laplace,
)

VARIATIONAL = {"likelihood": "classification", "beta": 0.01, "prior_std": "he"}


@dataclass(frozen=True)
class Settings:
    images: int = 200
    epochs: int = 100


class DigitNet(L.LightningModule):
    """An ordinary LightningModule: nothing in it is Bayesian."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 100), nn.Softplus(), nn.Linear(100, 100), nn.Softplus(), nn.Linear(100, KNOWN)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class VI(LogSigmaMultiplierMixin, VariationalInferenceMixin, DigitNet):
    """A weight sample in every step."""


class VL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, DigitNet):
    """No samples: the loss contains the likelihood's curvature, estimated by a squared gradient."""


def make(kind: type[DigitNet]) -> Any:
    """log σ learns ten times as fast as the weights; at their rate it would not converge before training ends."""
    return kind() if kind is DigitNet else kind(log_sigma_multiplier=10.0, variational=VARIATIONAL)


def train(run: Run, digits: Digits, kind: type[DigitNet]) -> GaussianPosterior:
    L.seed_everything(run.seed, verbose=False)
    model = make(kind)
    trainer = L.Trainer(max_epochs=run.settings.epochs, accelerator="cpu", **WITH_BAR)
    trainer.fit(model, DataLoader(digits.train, 20, shuffle=True))
    if kind is DigitNet:
        return fit_laplace(model.eval(), DataLoader(digits.train, 100), structure="diag")
    return model.eval().posterior


def main() -> None:
    run = start(__doc__, "variational_laplace", {"default": Settings(), "fast": Settings(epochs=8)}, threads=1)
    digits = read_digits(run.settings.images)
    kinds = (DigitNet, VI, VL)
    plain, vi, vl = (run.posterior(kind.__name__, make(kind), train, run, digits, kind) for kind in kinds)
    generator = torch.Generator().manual_seed(run.seed)
    methods = {
        "MAP": partial(plain.predict, predictive="map"),
        "VI, at the mean": partial(vi.predict, predictive="map"),
        "VI, 100 samples": partial(vi.predict, predictive=BNN(samples=100), generator=generator),
        "VL, at the mean": partial(vl.predict, predictive="map"),
        "VL": vl.predict,
    }
    run.save_table("table", {name: judge(predict, digits) for name, predict in methods.items()})
    shown, images = ("MAP", "VI, 100 samples", "VL"), (digits.test.tensors[0], digits.unknown["letters"])
    run.save_picture("ood", draw_scores({name: [methods[name](x).entropy for x in images] for name in shown}))


if __name__ == "__main__":
    main()
