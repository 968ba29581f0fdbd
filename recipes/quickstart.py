"""A first program: train a small network as usual, then ask it what it does not know.

Five networks train on the digits 0–7, with early stopping. The digits 8 and 9 are new to them, and letters even more
so. Each is scored as a plain network (MAP), with a temperature (the usual calibration), and with its Laplace posterior
at default settings. All five together are scored as an ensemble, which costs five times as much.

    python recipes/quickstart.py    # half a minute; table, pictures and posteriors go to outputs/quickstart/
"""

from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
from digits import KNOWN, Digits, Predictor, joined, judge, read_digits
from lightning.pytorch.callbacks import EarlyStopping
from matplotlib.figure import Figure
from program import QUIET, Run, averaged, progress, start
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bayes import DeepEnsemble, GaussianPosterior, LaplaceCallback, plots


@dataclass(frozen=True)
class Settings:
    networks: int = 5
    epochs: int = 100  # at most


class DigitNet(L.LightningModule):
    """An ordinary LightningModule: nothing in it is Bayesian."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, KNOWN))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(run: Run, digits: Digits, seed: int) -> GaussianPosterior:
    """Train as usual. The callback adds one exact pass over the data and chooses the prior on validation images."""
    L.seed_everything(seed, verbose=False)
    laplace = LaplaceCallback("classification", save=str(run.output / f"posterior_{seed}.pt"), progress=False)
    callbacks = [laplace, EarlyStopping("val_loss", patience=5)]
    trainer = L.Trainer(max_epochs=run.settings.epochs, callbacks=callbacks, accelerator="cpu", **QUIET)
    trainer.fit(DigitNet(), DataLoader(digits.train, 32, shuffle=True), DataLoader(digits.validation, 100))
    return laplace.posterior


def predictors(posteriors: list[GaussianPosterior], digits: Digits) -> dict[str, list[Predictor]]:
    """For each method, one predictor per network, or one for all networks."""
    validation = DataLoader(digits.validation, 100)
    tempered = [posterior.calibrate(validation, predictive="map") for posterior in posteriors]
    return {
        "MAP": [partial(posterior.predict, predictive="map", calibrated=False) for posterior in posteriors],
        "MAP + temperature": [partial(posterior.predict, predictive="map") for posterior in tempered],
        "Laplace": [posterior.predict for posterior in posteriors],
        f"ensemble of {len(posteriors)}": [partial(DeepEnsemble(posteriors).predict, predictive="map")],
    }


def save_pictures(run: Run, methods: dict[str, list[Predictor]], digits: Digits) -> None:
    """The first network with and without its posterior: are the probabilities calibrated, and do letters stand out?"""
    x, y = digits.test.tensors
    honest, noticed = Figure(figsize=(9, 5.6)), Figure(figsize=(9, 3.6), layout="constrained")
    for name, top, bottom in zip(("MAP", "Laplace"), honest.subplots(1, 2), noticed.subplots(1, 2), strict=True):
        known, unknown = (methods[name][0](images) for images in (x, digits.unknown["letters"]))
        plots.reliability_diagram(known.probs, y, ax=top)
        top.set_title(name, y=1.3)
        plots.ood_histogram(*joined(known.entropy, unknown.entropy), ax=bottom)
        bottom.set(title=name, xlabel="entropy of the prediction")
    honest.subplots_adjust(left=0.06, right=0.98, bottom=0.09, top=0.74, wspace=0.16)
    run.save_picture("reliability", honest)
    run.save_picture("ood", noticed)


def verdict(table: dict[str, dict[str, float]]) -> str:
    """A sentence that summarises the table."""
    nll = table["Laplace"]["NLL"] - table["MAP + temperature"]["NLL"]
    size = "no better or worse" if abs(nll) < 0.005 else "better" if nll < 0 else "worse"
    gains = {name: table["Laplace"][f"AUROC {name}"] - table["MAP"][f"AUROC {name}"] for name in ("8 and 9", "letters")}
    noticed = ", ".join(f"{gain:+.3f} ({name})" for name, gain in gains.items())
    known = f"On known digits Laplace's probabilities are {size} than a temperature's;"
    return f"{known} noticing the unknown by entropy: {noticed} over MAP."


def main() -> None:
    run = start(__doc__, "quickstart", {"default": Settings(), "fast": Settings(2, 2)}, threads=1)
    digits, seeds = read_digits(), progress(run.seeds(run.settings.networks), "trainings")
    methods = predictors([run.posterior(f"{seed}", DigitNet(), train, run, digits, seed) for seed in seeds], digits)
    table = {name: averaged([judge(predict, digits) for predict in group]) for name, group in methods.items()}
    run.save_table("table", table)
    print(f"\n{verdict(table)}")
    save_pictures(run, methods, digits)


if __name__ == "__main__":
    main()
