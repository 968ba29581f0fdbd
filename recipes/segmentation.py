"""Which digit is this pixel? A U-Net on noisy scenes of digits, and the uncertainty of its outputs at every pixel.

The network trains on the digits 0–7. Test scenes also show an unknown object: an 8, a 9 or a letter, whose pixels have
no label. For all labelled pixels, the table shows NLL, accuracy, ECE, and how often the true class is in the smallest
set of classes with 95 % of the probability. It also shows how well the entropy and the epistemic variance of a pixel
separate unknown objects from known digits. The figure maps both kinds of uncertainty.

    python recipes/segmentation.py    # two minutes; table and picture go to outputs/segmentation/
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
from digits import KNOWN, auroc, read_digits, score
from program import WITH_BAR, Run, start
from scenes import UNet, noisy, scenes
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import GLM, GaussianPosterior, LaplaceCallback, Prediction, plots

NOISE, UNKNOWN = 0.1, -100  # `UNKNOWN` marks pixels without a label


@dataclass(frozen=True)
class Settings:
    epochs: int = 15
    scenes: int = 800
    held_out: int = 100
    samples: int = 20


class Segmentation(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(1, KNOWN + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=1e-4)


def make_data(settings: Settings, seed: int) -> tuple[TensorDataset, TensorDataset, Tensor, Tensor]:
    """Scenes for training and validation, and test scenes with one known and one unknown object."""
    digits, parts = read_digits(), []
    for number, (part, n) in enumerate(((digits.train, settings.scenes), (digits.validation, settings.held_out))):
        x, y = scenes(part.tensors[0], part.tensors[1] + 1, n, seed=10 * seed + number)
        parts.append(TensorDataset(noisy(x, NOISE, seed), y))
    known, labels = digits.test.tensors
    unknown = torch.cat(list(digits.unknown.values()))
    unknown = unknown[torch.randperm(len(unknown), generator=torch.Generator().manual_seed(seed))[: len(known)]]
    # As many unknown objects as known ones: on average, a scene of two has one of each.
    things = torch.cat([known[: len(unknown)], unknown])
    marks = torch.cat([labels[: len(unknown)] + 1, torch.full((len(unknown),), UNKNOWN)])
    x, y = scenes(things, marks, settings.held_out, seed=10 * seed + 2)
    return *parts, noisy(x, NOISE, seed + 1), y


def coverage(probs: Tensor, y: Tensor, level: float = 0.95) -> float:
    """How often the smallest set of classes with this probability contains the true one.  # [N, C], [N]"""
    before = probs.sort(dim=1, descending=True)
    mass_before = before.values.cumsum(1) - before.values
    place = (before.indices == y[:, None]).long().argmax(1, keepdim=True)
    return float((mass_before.gather(1, place) < level).double().mean())


def train(run: Run, data: TensorDataset, validation: TensorDataset) -> GaussianPosterior:
    L.seed_everything(run.seed, verbose=False)
    laplace = LaplaceCallback(likelihood="classification", save=False, predictive=GLM(samples=run.settings.samples))
    trainer = L.Trainer(max_epochs=run.settings.epochs, callbacks=[laplace], accelerator="cpu", **WITH_BAR)
    trainer.fit(Segmentation(), DataLoader(data, 32, shuffle=True), DataLoader(validation, 50))
    return laplace.posterior


def judge(prediction: Prediction, y: Tensor) -> dict[str, float]:
    assert prediction.probs is not None
    labelled = y != UNKNOWN
    probs, labels = prediction.probs.movedim(1, -1)[labelled], y[labelled]
    numbers = score(probs, labels) | {"coverage": coverage(probs, labels)}
    for name, values in (("entropy", prediction.entropy), ("epistemic", prediction.epistemic.sum(1))):
        numbers[f"AUROC {name}"] = auroc(values[y > 0], values[y == UNKNOWN])
    return numbers


def main() -> None:
    run = start(__doc__, "segmentation", {"default": Settings(), "fast": Settings(3, 60, 16, 4)}, threads=1)
    data, validation, x, y = make_data(run.settings, run.seed)
    posterior = run.posterior("training", Segmentation(), train, run, data, validation)
    words = {"predictive": GLM(samples=run.settings.samples), "generator": torch.Generator().manual_seed(run.seed)}
    ours, plain = partial(posterior.predict, **words), posterior.predict(x, "map", calibrated=False)
    run.save_table("table", {"MAP": judge(plain, y), "Laplace": judge(ours(x), y)})
    both = [n for n in range(len(y)) if (y[n] == UNKNOWN).sum() > 60 and (y[n] > 0).sum() > 60][:4]
    run.save_picture("maps", plots.uncertainty_maps(x[both], ours(x[both]), y[both])[0], dpi=120)


if __name__ == "__main__":
    main()
