"""Guarantees: which digits to hand to a person, and sets of digits that hold the true one.

A small network, trained on 150 digits, is wrong about one in twelve others. Digits that were used for nothing else turn
its probabilities into promises: a threshold of confidence above which at most 3 % are wrong, with 90 % certainty, and
sets that hold the true digit in 95 % of all cases. They hold for MAP and for the posterior alike, which here differ
little. "aps" makes larger sets than "lac" and holds more of the hard digits, the fifth that the network is least sure
of. Means over five trainings, each with digits of its own.

    python recipes/conformal.py    # half a minute; the picture goes to outputs/conformal/
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from support import QUIET, averaged, be_quiet, print_table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Conformal, GaussianPosterior, LaplaceCallback, Prediction, metrics

OUTPUT = Path("outputs/conformal")
SEEDS, EPOCHS = 5, 40
PARTS = (150, 300, 900)  # to train on, to tune on, held out; the rest is to test on
RISK, DELTA, LEVEL = 0.03, 0.1, 0.95


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(seed: int) -> tuple[GaussianPosterior, TensorDataset, TensorDataset]:
    """A tuned and calibrated posterior, held-out digits that it has not seen, and others to test on."""
    L.seed_everything(seed, verbose=False)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    parts = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).tensor_split(PARTS)
    digits, validation, held_out, test = (TensorDataset(x[part].float() / 16, y[part]) for part in parts)
    laplace = LaplaceCallback(network="net", progress=False)
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[laplace], accelerator="cpu", **QUIET)
    trainer.fit(Net(), DataLoader(digits, 30, shuffle=True), DataLoader(validation, 150))
    return laplace.posterior, held_out, test


def judge(known: Prediction, y: Tensor, new: Prediction, y_new: Tensor) -> dict[str, float]:
    """On new digits, after a look at known ones."""
    right = new.label == y_new
    kept = new.confidence > metrics.functional.threshold_for_risk(known.confidence, known.label == y, RISK, DELTA)
    row = {"accuracy": right.float().mean(), "kept": kept.float().mean()}
    row["wrong of kept"] = 1 - right[kept].float().mean()
    hard = new.confidence <= new.confidence.quantile(0.2)
    for method in ("aps", "lac"):
        sets = Conformal.fit(known, y, LEVEL, method).sets(new)  # [N, 10]
        holds = sets.gather(1, y_new[:, None]).squeeze(1).float()
        row |= {f"{method} holds": holds.mean(), f"{method} holds hard": holds[hard].mean()}
        row[f"{method} size"] = sets.sum(1).float().mean()
    return {name: float(value) for name, value in row.items()}


def save_picture(predictions: dict[str, Prediction], x: Tensor, y: Tensor, sets: Tensor) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for name, prediction in predictions.items():
        coverage, risk = metrics.functional.risk_coverage_curve(prediction.confidence, prediction.label == y)
        axes.plot(coverage, risk, label=name)
    axes.axhline(RISK, color="grey", linestyle=":")
    axes.set(xlabel="share of digits that are kept", ylabel="share of them that is wrong")
    axes.legend()
    largest = sets.sum(1).argsort(descending=True)[:18]
    for panel, n in zip(right.subplots(3, 6).flat, largest, strict=True):
        panel.imshow(x[n].reshape(8, 8).numpy(), cmap="gray_r")
        panel.set_axis_off()
        panel.set_title(" ".join(str(int(c)) for c in sets[n].nonzero()), fontsize=8)
    figure.savefig(OUTPUT / "conformal.png")


def main() -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, float]]] = {"MAP": [], "Laplace": []}
    for seed in range(SEEDS):
        posterior, held_out, test = train(seed)
        (x, y), (x_new, y_new), new = held_out.tensors, test.tensors, {}
        for name, predictive in (("MAP", "map"), ("Laplace", "glm")):
            known, new[name] = (posterior.predict(inputs, predictive) for inputs in (x, x_new))
            rows[name].append(judge(known, y, new[name], y_new))
    print_table({name: averaged(of_seeds) for name, of_seeds in rows.items()})
    conformal = posterior.conformalize(DataLoader(held_out, 100), LEVEL)  # the same sets in one call
    save_picture(new, x_new, y_new, conformal.predict(x_new))
    print(f"\nconformal.png is in {OUTPUT}")


if __name__ == "__main__":
    main()
