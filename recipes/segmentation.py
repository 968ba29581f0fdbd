"""Which digit is this pixel? A U-Net on noisy scenes of digits, and the uncertainty of its outputs at every pixel.

Trained on the digits 0–7, tested on scenes that also show an unknown thing: an 8, a 9 or a letter, whose pixels have no
label. The table has all labelled pixels: NLL, accuracy, ECE, and how often the true class is in the smallest set of
classes with 95 % of the probability; and how well the entropy and the epistemic variance of a pixel tell unknown things
from known digits. The picture: where the network does not know, and where nobody can.

    python recipes/segmentation.py [seed]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import lightning as L
import torch
from scenes import UNet, noisy, scenes
from support import KNOWN, QUIET, auroc, be_quiet, print_table, read_digits, score
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, Prediction, plots

OUTPUT = Path("outputs/segmentation")
EPOCHS, SCENES, HELD_OUT, SAMPLES, NOISE = 15, 800, 100, 20, 0.1
UNKNOWN = -100  # the label of pixels without one


class Segmentation(L.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = UNet(1, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=1e-4)


def make_data(seed: int) -> tuple[TensorDataset, TensorDataset, Tensor, Tensor]:
    """Scenes to train on and to hold out, and those to test on, with one known and one unknown thing."""
    digits = read_digits()
    parts = []
    for number, (part, n) in enumerate(((digits.train, SCENES), (digits.validation, HELD_OUT))):
        x, y = scenes(part.tensors[0], part.tensors[1] + 1, n, seed=10 * seed + number)
        parts.append(TensorDataset(noisy(x, NOISE, seed), y))
    known, labels = digits.test.tensors
    unknown = torch.cat(list(digits.unknown.values()))
    unknown = unknown[torch.randperm(len(unknown), generator=torch.Generator().manual_seed(seed))[: len(known)]]
    # As many unknown things as known ones: a scene of two has one of each in the mean.
    things = torch.cat([known[: len(unknown)], unknown])
    marks = torch.cat([labels[: len(unknown)] + 1, torch.full((len(unknown),), UNKNOWN)])
    x, y = scenes(things, marks, HELD_OUT, seed=10 * seed + 2)
    return *parts, noisy(x, NOISE, seed + 1), y


def coverage(probs: Tensor, y: Tensor, level: float = 0.95) -> float:
    """How often the smallest set of classes with this probability has the true one.  # [N, C], [N]"""
    before = probs.sort(dim=1, descending=True)
    mass_before = before.values.cumsum(1) - before.values
    place = (before.indices == y[:, None]).long().argmax(1, keepdim=True)
    return float((mass_before.gather(1, place) < level).double().mean())


def judge(prediction: Prediction, y: Tensor) -> dict[str, float]:
    assert prediction.probs is not None
    labelled = y != UNKNOWN
    probs, labels = prediction.probs.movedim(1, -1)[labelled], y[labelled]
    numbers = score(probs, labels) | {"coverage": coverage(probs, labels)}
    for name, values in (("entropy", prediction.entropy), ("epistemic", prediction.epistemic.sum(1))):
        numbers[f"AUROC {name}"] = auroc(values[y > 0], values[y == UNKNOWN])
    return numbers


def main(seed: int = 0) -> None:
    be_quiet()
    L.seed_everything(seed, verbose=False)
    train, validation, x, y = make_data(seed)
    laplace = LaplaceCallback(likelihood="classification", samples=SAMPLES, save=False)
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[laplace], accelerator="cpu", **QUIET)
    trainer.fit(Segmentation(KNOWN + 1), DataLoader(train, 32, shuffle=True), DataLoader(validation, 50))
    posterior = laplace.posterior
    ours = partial(posterior.predict, samples=SAMPLES, generator=torch.Generator().manual_seed(seed))
    print_table({"MAP": judge(posterior.predict(x, "map", calibrated=False), y), "Laplace": judge(ours(x), y)})
    OUTPUT.mkdir(parents=True, exist_ok=True)
    both = [n for n in range(len(y)) if (y[n] == UNKNOWN).sum() > 60 and (y[n] > 0).sum() > 60][:4]
    figure, _ = plots.uncertainty_maps(x[both], ours(x[both]), y[both])
    figure.savefig(OUTPUT / "maps.png", dpi=120)
    print(f"\nmaps.png is in {OUTPUT}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
