"""Guarantees: which digits to pass to a person, and sets that contain the true digit.

A small network, trained on 150 digits, misclassifies one digit in twelve. Held-out digits, used for nothing else, turn
its probabilities into guarantees: a confidence threshold above which at most 3 % are wrong, with 90 % certainty, and
sets that contain the true digit in 95 % of all cases. The guarantees hold for MAP and for the posterior, which differ
little here. "aps" makes larger sets than "lac" and covers more of the hard digits (the fifth that the network is least
sure of). Results are means over five training runs, each with different digits.

    python recipes/conformal.py    # half a minute; table and picture go to outputs/conformal/
"""

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from program import QUIET, averaged, progress, start
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Conformal, GaussianPosterior, LaplaceCallback, Prediction, metrics

PARTS = (150, 300, 900)  # for training, tuning, calibration; the rest is for testing
EPOCHS, RISK, DELTA, LEVEL = 40, 0.03, 0.1, 0.95


@dataclass(frozen=True)
class Settings:
    trainings: int = 5


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def split(seed: int) -> list[TensorDataset]:
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    parts = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).tensor_split(PARTS)
    return [TensorDataset(x[part].float() / 16, y[part]) for part in parts]


def train(digits: TensorDataset, validation: TensorDataset, seed: int) -> GaussianPosterior:
    L.seed_everything(seed, verbose=False)
    laplace = LaplaceCallback(network="net", progress=False)
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[laplace], accelerator="cpu", **QUIET)
    trainer.fit(Net(), DataLoader(digits, 30, shuffle=True), DataLoader(validation, 150))
    return laplace.posterior


def judge(known: Prediction, y: Tensor, new: Prediction, y_new: Tensor) -> dict[str, float]:
    """Scores on new digits; the thresholds and sets come from held-out digits."""
    right = new.label == y_new
    kept = new.confidence > metrics.functional.threshold_for_risk(known.confidence, known.label == y, RISK, DELTA)
    hard, wrong = new.confidence <= new.confidence.quantile(0.2), 1 - right[kept].float().mean()
    row = {"accuracy": right.float().mean(), "kept": kept.float().mean(), "wrong of kept": wrong}
    for method in ("aps", "lac"):
        sets = Conformal.fit(known, y, LEVEL, method).sets(new)  # [N, 10]
        holds, size = sets.gather(1, y_new[:, None]).squeeze(1).float(), sets.sum(1).float()
        numbers = {"holds": holds.mean(), "holds hard": holds[hard].mean(), "size": size.mean()}
        row |= {f"{method} {name}": value for name, value in numbers.items()}
    return {name: float(value) for name, value in row.items()}


def draw(predictions: dict[str, Prediction], x: Tensor, y: Tensor, sets: Tensor) -> Figure:
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for name, prediction in predictions.items():
        coverage, risk = metrics.functional.risk_coverage_curve(prediction.confidence, prediction.label == y)
        axes.plot(coverage, risk, label=name)
    axes.axhline(RISK, color="grey", linestyle=":")
    axes.set(xlabel="share of digits kept", ylabel="share of these that is wrong")
    axes.legend()
    for panel, n in zip(right.subplots(3, 6).flat, sets.sum(1).argsort(descending=True)[:18], strict=True):
        panel.imshow(x[n].reshape(8, 8).numpy(), cmap="gray_r")
        panel.set_axis_off()
        panel.set_title(" ".join(str(int(c)) for c in sets[n].nonzero()), fontsize=8)
    return figure


def main() -> None:
    run = start(__doc__, "conformal", {"default": Settings(), "fast": Settings(trainings=2)}, threads=1)
    rows: dict[str, list[dict[str, float]]] = {"MAP": [], "Laplace": []}
    for seed in progress(run.seeds(run.settings.trainings), "trainings"):
        digits, validation, held_out, test = split(seed)
        posterior = run.posterior(f"{seed}", Net().net, train, digits, validation, seed)
        (x, y), (x_new, y_new), new = held_out.tensors, test.tensors, {}
        for name, predictive in (("MAP", "map"), ("Laplace", "glm")):
            known, new[name] = (posterior.predict(inputs, predictive) for inputs in (x, x_new))
            rows[name].append(judge(known, y, new[name], y_new))
    run.save_table("table", {name: averaged(of_seeds) for name, of_seeds in rows.items()})
    conformal = posterior.conformalize(DataLoader(held_out, 100), LEVEL)  # the same sets in one call
    run.save_picture("conformal", draw(new, x_new, y_new, conformal.predict(x_new)))


if __name__ == "__main__":
    main()
