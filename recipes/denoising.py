"""How noisy was this pixel? A U-Net removes the noise from scenes of digits, with a predictive variance at every pixel.

The network trains on scenes of the digits 0–7. A grey square covers a quarter of each scene, and the network has to
fill it in. It is tested on such scenes and on scenes of letters. The table shows RMSE and NLL per pixel, how often the
truth is in the 95 % interval, and the rank correlation of the predictive variance with the squared error. The baseline
is a Gaussian with one noise for all pixels (MAP, with its noise fitted to the held-out scenes).

    python recipes/denoising.py    # two minutes; table and picture go to outputs/denoising/
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning as L
import torch
from digits import read_digits
from program import WITH_BAR, Run, start
from scenes import UNet, scenes, spoilt
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GLM, GaussianPosterior, LaplaceCallback, Prediction, metrics, plots

NOISE = 0.3
Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    epochs: int = 15
    scenes: int = 800
    held_out: int = 100
    samples: int = 20


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


def make_data(settings: Settings, seed: int) -> tuple[TensorDataset, TensorDataset, dict[str, Pairs]]:
    """Corrupted and clean scenes for training, validation and testing."""
    digits = read_digits()
    letters = digits.unknown["letters"]
    things = (digits.train.tensors[0], digits.validation.tensors[0], digits.test.tensors[0], letters)
    pairs = []
    for number, x in enumerate(things):
        n = settings.scenes if number == 0 else settings.held_out
        scene, _ = scenes(x, torch.ones(len(x), dtype=torch.long), n, seed=10 * seed + number)
        pairs.append((spoilt(scene, NOISE, 10 * seed + number), scene))
    return TensorDataset(*pairs[0]), TensorDataset(*pairs[1]), {"digits": pairs[2], "letters": pairs[3]}


def train(run: Run, data: TensorDataset, validation: TensorDataset) -> GaussianPosterior:
    L.seed_everything(run.seed, verbose=False)
    laplace = LaplaceCallback(likelihood="regression", save=False, predictive=GLM(samples=run.settings.samples))
    trainer = L.Trainer(max_epochs=run.settings.epochs, callbacks=[laplace], accelerator="cpu", **WITH_BAR)
    trainer.fit(Denoiser(), DataLoader(data, 32, shuffle=True), DataLoader(validation, 50))
    return laplace.posterior


def judge(prediction: Prediction, y: Tensor) -> dict[str, float]:
    mean, variance = prediction.mean, prediction.variance
    assert mean is not None
    assert variance is not None
    error = (y - mean).square()
    ranks = torch.stack([t.flatten().double().argsort().argsort().double() for t in (variance, error)])
    return {
        "RMSE": float(error.mean().sqrt()),
        "NLL": float(metrics.functional.gaussian_nll(mean, variance, y, prediction.df)),
        "coverage": float(metrics.functional.interval_coverage(mean, variance, y, prediction.df)),
        "rank correlation": float(torch.corrcoef(ranks)[0, 1]) if variance.std() > 1e-6 else 0.0,
    }


def main() -> None:
    run = start(__doc__, "denoising", {"default": Settings(), "fast": Settings(4, 64, 16, 4)}, threads=1)
    (data, validation, tests), table = make_data(run.settings, run.seed), {}
    posterior = run.posterior("training", Denoiser(), train, run, data, validation)
    plain = posterior.calibrate(DataLoader(validation, 50), "map")

    def predict(x: Tensor) -> Prediction:
        generator = torch.Generator().manual_seed(run.seed)
        return posterior.predict(x, GLM(samples=run.settings.samples), generator=generator)

    for name, (x, y) in tests.items():
        table |= {f"MAP, {name}": judge(plain.predict(x, "map"), y), f"Laplace, {name}": judge(predict(x), y)}
    run.save_table("table", table)
    x, y = (torch.cat([pair[k][:2] for pair in tests.values()]) for k in (0, 1))
    run.save_picture("maps", plots.uncertainty_maps(x, predict(x), y)[0], dpi=120)


if __name__ == "__main__":
    main()
