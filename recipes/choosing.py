"""Choosing a method: the scores and the costs of twelve methods on the same few digits.

A network that has seen 200 images of the digits 0–7 is overconfident. Which posterior helps, if any? Known digits test
its probabilities (NLL, ECE); 8 and 9 and letters test whether entropy detects unknown inputs (AUROC). "fit" and
"predict" are seconds in addition to training, including the choice of prior and temperature on validation images; IVON,
the variational last layer and the ensemble need other training runs. Results are means over three networks.

    python recipes/choosing.py    # a minute; table and picture go to outputs/choosing/
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
from bayes_digits import IVONDigits, VariationalLastLayerDigits
from digits import KNOWN, Digits, Predictor, judge, read_digits
from lit_digits import LitDigits
from matplotlib.figure import Figure
from program import QUIET, averaged, progress, start
from torch.utils.data import DataLoader

from lightning_bayes import DeepEnsemble, GaussianPosterior, IVONCallback, L2MCallback, SWAGCallback, fit

SCORES = ("NLL", "ECE", "AUROC 8 and 9", "AUROC letters")
COLUMNS = (*SCORES, "trainings", "fit", "predict")


@dataclass(frozen=True)
class Settings:
    networks: int = 3
    epochs: int = 60
    n_train: int = 200


def train(digits: Digits, seed: int, epochs: int) -> GaussianPosterior:
    """Train with L2M, which reads Adam's second moments. Most other methods start from the trained weights."""
    L.seed_everything(seed, verbose=False)
    return trained(LitDigits(classes=KNOWN), digits, epochs, L2MCallback())


def trained(module: Any, digits: Digits, epochs: int, *callbacks: L.Callback) -> GaussianPosterior:
    """The posterior of a callback, or of the module itself."""
    trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu", **QUIET)
    trainer.fit(module, DataLoader(digits.train, 20, shuffle=True), DataLoader(digits.validation, 100))
    return (callbacks[0] if callbacks else module).posterior


def compare(l2m: GaussianPosterior, digits: Digits, seed: int, epochs: int) -> list[dict[str, Any]]:
    """Return a row per method. `fit` chooses prior and temperature on the validation images, unless `tune` is set."""
    L.seed_everything(seed, verbose=False)
    loaders = DataLoader(digits.train, 100), DataLoader(digits.validation, 100)
    network, swag, ivon = l2m.network, SWAGCallback(start=0), IVONCallback()
    laplace = partial(fit, network, *loaders, progress=False)
    methods = {
        "MAP": lambda: partial(l2m.predict, predictive="map", calibrated=False),
        "MAP + temperature": lambda: partial(l2m.calibrate(loaders[1], predictive="map").predict, predictive="map"),
        "Laplace": lambda: laplace().predict,
        "Laplace, evidence": lambda: laplace(tune="marglik").predict,
        "Laplace, diagonal": lambda: laplace(structure="diag").predict,
        "Laplace, last layer": lambda: laplace(subset="last_layer", structure="full").predict,
        "Laplace, weight samples": lambda: partial(laplace(predictive="bnn").predict, predictive="bnn"),
        "L2M": lambda: l2m.predict,
        "SWAG": lambda: partial(trained(copy.deepcopy(network).train(), digits, 20, swag).predict, predictive="bnn"),
        "IVON": lambda: partial(trained(IVONDigits(classes=KNOWN), digits, epochs, ivon).predict, predictive="bnn"),
        "variational last layer": lambda: trained(VariationalLastLayerDigits(classes=KNOWN), digits, epochs).predict,
    }
    return [judged(name, make, digits) for name, make in methods.items()]


def judged(name: str, make: Callable[[], Predictor], digits: Digits, trainings: int = 1) -> dict[str, Any]:
    started = time.perf_counter()
    predict = make()
    fitted = time.perf_counter()
    predict(digits.test.tensors[0])
    cost = {"trainings": trainings, "fit": fitted - started, "predict": time.perf_counter() - fitted}
    return {"method": name, **judge(predict, digits), **cost}


def draw(table: dict[str, dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, score in zip(figure.subplots(1, len(SCORES), sharey=True), SCORES, strict=True):
        axes.plot([row[score] for row in table.values()], list(table), "o")
        axes.axvline(table["MAP"][score], color="grey", linestyle=":")
        axes.set_title(f"{score} ({'more' if 'AUROC' in score else 'less'} is better)", fontsize=9)
    axes.invert_yaxis()
    return figure


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(networks=1, epochs=15)}
    run = start(__doc__, "choosing", scales, threads=1)
    digits, posteriors, epochs = read_digits(run.settings.n_train), [], run.settings.epochs
    for seed in progress(run.seeds(run.settings.networks), "networks"):
        posteriors.append(run.posterior(f"{seed}", LitDigits(classes=KNOWN), train, digits, seed, epochs))
        run.collect("scores", f"{seed}", compare, posteriors[-1], digits, seed, epochs)
    together, n = partial(DeepEnsemble(posteriors).predict, predictive="map"), len(posteriors)
    run.collect("scores", "ensemble", lambda: [judged(f"ensemble of {n}", lambda: together, digits, n)])
    table: dict[str, Any] = {}
    for row in run.rows("scores"):
        table.setdefault(row["method"], []).append({column: row[column] for column in COLUMNS})
    run.save_table("table", table := {method: averaged(rows) for method, rows in table.items()})
    run.save_picture("methods", draw(table))


if __name__ == "__main__":
    main()
