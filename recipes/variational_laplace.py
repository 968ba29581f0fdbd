"""Variational Laplace and variational inference: the posterior is trained together with the network.

The digits 0–7, but few of them, so that a plain network is overconfident. The same LightningModule is trained as it
is (MAP), and with each of the two mixins; nothing else of it changes. Variational Laplace differentiates its own
gradient, so its activations must be smooth: softplus, not ReLU. β < 1 tempers the KL divergence.

    python recipes/variational_laplace.py    # a minute
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support import KNOWN, QUIET, Digits, Predictor, be_quiet, judge, print_table, read_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bayes import LogSigmaMultiplierMixin, VariationalInferenceMixin, VariationalLaplaceMixin, fit_laplace

OUTPUT = Path("outputs/variational_laplace")
N_TRAIN, EPOCHS = 200, 100
VARIATIONAL = {"likelihood": "classification", "beta": 0.01, "prior_std": "he"}


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
    """No samples: the likelihood's curvature, estimated by a squared gradient, stands in the loss."""


def train(digits: Digits, kind: type[DigitNet], **options: Any) -> DigitNet:
    L.seed_everything(0, verbose=False)
    model = kind(**options)
    trainer = L.Trainer(max_epochs=EPOCHS, accelerator="cpu", default_root_dir=OUTPUT, **QUIET)
    trainer.fit(model, DataLoader(digits.train, 20, shuffle=True))
    return model.eval()


def predictors(digits: Digits) -> dict[str, Predictor]:
    """log σ learns ten times as fast as the weights: at their rate Adam stops long before it has converged."""
    plain = fit_laplace(train(digits, DigitNet), DataLoader(digits.train, 100), structure="diag")
    vi, vl = (train(digits, kind, log_sigma_multiplier=10.0, variational=VARIATIONAL).posterior for kind in (VI, VL))
    return {
        "MAP": partial(plain.predict, predictive="map"),
        "VI, at the mean": partial(vi.predict, predictive="map"),
        "VI, 100 samples": partial(
            vi.predict, predictive="bnn", samples=100, generator=torch.Generator().manual_seed(0)
        ),
        "VL, at the mean": partial(vl.predict, predictive="map"),
        "VL": vl.predict,
    }


def main() -> None:
    be_quiet()
    digits = read_digits(N_TRAIN)
    print(f"training three networks on {N_TRAIN} images of the digits 0–7 …")
    print_table({name: judge(predict, digits) for name, predict in predictors(digits).items()})


if __name__ == "__main__":
    main()
