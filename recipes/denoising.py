"""How noisy was this pixel? A U-Net takes the noise off scenes of digits, with a predictive variance at every pixel.

Trained on scenes of the digits 0–7, of which a quarter is covered by a grey square: what is behind it has to be made
up. Tested on such scenes, and on scenes of letters. The table: RMSE and NLL per pixel, how often the truth is in the
95 % interval, and the rank correlation of the predictive variance with the squared error. A Gaussian with one noise for
all pixels (MAP, its noise fitted to the held-out scenes) stands beside the posterior.

    python recipes/denoising.py [seed]
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from scenes import SIDE, UNet, noisy, scenes
from support import QUIET, be_quiet, print_table, read_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, Prediction, metrics, plots

OUTPUT = Path("outputs/denoising")
EPOCHS, SCENES, HELD_OUT, SAMPLES, NOISE = 15, 800, 100, 20, 0.3
Pairs = tuple[Tensor, Tensor]


class Denoiser(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Pairs, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def validation_step(self, batch: Pairs, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def spoilt(image: Tensor, seed: int) -> Tensor:
    """With noise, and a square of half the side covered."""
    x = noisy(image, NOISE, seed)
    corners = torch.randint(SIDE // 2 + 1, (len(x), 2), generator=torch.Generator().manual_seed(seed))
    for picture, (row, column) in zip(x, corners.tolist(), strict=True):
        picture[:, row : row + SIDE // 2, column : column + SIDE // 2] = 0.5
    return x


def make_data(seed: int) -> tuple[TensorDataset, TensorDataset, dict[str, Pairs]]:
    """Spoilt scenes and the scenes: to train on, to hold out, and to test on."""
    digits = read_digits()
    letters = digits.unknown["letters"]
    things = (digits.train.tensors[0], digits.validation.tensors[0], digits.test.tensors[0], letters)
    pairs = []
    for number, x in enumerate(things):
        n = SCENES if number == 0 else HELD_OUT
        scene, _ = scenes(x, torch.ones(len(x), dtype=torch.long), n, seed=10 * seed + number)
        pairs.append((spoilt(scene, 10 * seed + number), scene))
    return TensorDataset(*pairs[0]), TensorDataset(*pairs[1]), {"digits": pairs[2], "letters": pairs[3]}


def judge(prediction: Prediction, y: Tensor) -> dict[str, float]:
    mean, variance = prediction.mean, prediction.variance
    assert mean is not None
    assert variance is not None
    error = (y - mean).square()
    ranks = torch.stack([t.flatten().double().argsort().argsort().double() for t in (variance, error)])
    return {
        "RMSE": float(error.mean().sqrt()),
        "NLL": float(metrics.functional.gaussian_nll(mean, variance, y)),
        "coverage": float(metrics.functional.interval_coverage(mean, variance, y)),
        "rank correlation": float(torch.corrcoef(ranks)[0, 1]) if variance.std() > 1e-6 else 0.0,
    }


def main(seed: int = 0) -> None:
    be_quiet()
    L.seed_everything(seed, verbose=False)
    train, validation, tests = make_data(seed)
    laplace = LaplaceCallback(likelihood="regression", samples=SAMPLES, save=False)
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[laplace], accelerator="cpu", **QUIET)
    trainer.fit(Denoiser(), DataLoader(train, 32, shuffle=True), DataLoader(validation, 50))
    posterior, table = laplace.posterior, {}
    plain = posterior.calibrate(DataLoader(validation, 50), "map")
    for name, (x, y) in tests.items():
        ours = posterior.predict(x, samples=SAMPLES, generator=torch.Generator().manual_seed(seed))
        table |= {f"MAP, {name}": judge(plain.predict(x, "map"), y), f"Laplace, {name}": judge(ours, y)}
    print_table(table)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    x, y = (torch.cat([pair[k][:2] for pair in tests.values()]) for k in (0, 1))
    figure, _ = plots.uncertainty_maps(x, posterior.predict(x, samples=SAMPLES), y)
    figure.savefig(OUTPUT / "maps.png", dpi=120)
    print(f"\nmaps.png is in {OUTPUT}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
