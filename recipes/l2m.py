"""L2M: a posterior from the second moments that Adam already keeps, without a pass over the data.

The network trains on the digits 0–7 with AdamW and a falling learning rate. The diagonal posterior costs nothing beyond
training. It approximates a Laplace posterior with the empirical Fisher from a pass over the data, so the two are
compared. Both choose prior and temperature on the validation images; for digits the chosen prior is so strong that
their predictions agree. Two more training runs make an ensemble.

    python recipes/l2m.py    # half a minute; table, picture and posteriors go to outputs/l2m/
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from digits import KNOWN, Digits, judge, read_digits
from matplotlib.figure import Figure
from program import QUIET, Run, progress, start
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bayes import DeepEnsemble, L2MCallback, LaplacePosterior, fit_laplace


@dataclass(frozen=True)
class Settings:
    members: int = 3
    epochs: int = 40


class DigitNet(L.LightningModule):
    """An ordinary LightningModule: nothing in it is Bayesian."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, KNOWN))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        # β₂: the second moments cover the last 100 steps, not the whole training run.
        adamw = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.99))
        return [adamw], [torch.optim.lr_scheduler.CosineAnnealingLR(adamw, self.epochs)]


def train(run: Run, digits: Digits, seed: int) -> LaplacePosterior:
    """The callback reads the optimizer's state when training ends, and AdamW's weight decay is the prior."""
    L.seed_everything(seed, verbose=False)
    l2m = L2MCallback(likelihood="classification", save=str(run.output / f"posterior_{seed}.pt"))
    trainer = L.Trainer(max_epochs=run.settings.epochs, callbacks=[l2m], accelerator="cpu", **QUIET)
    module = DigitNet(run.settings.epochs)
    trainer.fit(module, DataLoader(digits.train, 32, shuffle=True), DataLoader(digits.validation, 100))
    return l2m.posterior


def draw(estimate: Tensor, by_pass: Tensor) -> Figure:
    """Compare the curvatures weight by weight where both are positive."""
    figure, seen = Figure(figsize=(4.5, 4.5), layout="constrained"), (estimate > 0) & (by_pass > 0)
    axes = figure.subplots()
    axes.loglog(by_pass[seen], estimate[seen], ".", markersize=2, alpha=0.3)
    axes.axline((1, 1), (10, 10), color="black", linewidth=1)
    axes.set(xlabel="curvature from a pass over the data", ylabel="curvature from L2M")
    return figure


def main() -> None:
    run = start(__doc__, "l2m", {"default": Settings(), "fast": Settings(2, 8)}, threads=1)
    digits, epochs, seeds = read_digits(), run.settings.epochs, run.seeds(run.settings.members)
    trainings = progress(seeds, "trainings")
    members = [run.posterior(f"{seed}", DigitNet(epochs), train, run, digits, seed) for seed in trainings]
    l2m, ensemble, n = members[0], DeepEnsemble(members), len(members)
    loader, validation = DataLoader(digits.train, 100), DataLoader(digits.validation, 100)
    by_pass = fit_laplace(l2m.network, loader, structure="diag", curvature="empirical_fisher")
    methods = {
        "MAP": partial(l2m.predict, predictive="map", calibrated=False),
        "L2M": l2m.predict,
        "empirical Fisher": by_pass.tune_prior("auto", loader=validation).predict,
        f"ensemble of {n}": partial(ensemble.predict, predictive="map"),
        f"L2M ensemble of {n}": ensemble.predict,
    }
    run.save_table("table", {name: judge(predict, digits) for name, predict in methods.items()})
    curvatures = [posterior.curvature.structure.diagonal() for posterior in (l2m, by_pass)]
    ratio = float((curvatures[0] / curvatures[1]).nanmedian())
    print(f"\nFor the median weight, L2M's curvature is {ratio:.2f} times that of the pass.")
    run.save_picture("curvature", draw(*curvatures))


if __name__ == "__main__":
    main()
