"""A first program: train a small network on digits as people do, then ask it what it does not know.

scikit-learn's digits 0–7 are what it is trained on, with early stopping on validation images. 8 and 9 it has never
seen, and letters even less. Five trainings are judged, each as it is (MAP), with a temperature found on the validation
images (what people do to calibrate a network), and by its Laplace posterior with default settings; and all five
together as an ensemble, which costs five times as much.

    python recipes/quickstart.py                # half a minute
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from string import ascii_letters

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import DeepEnsemble, GaussianPosterior, LaplaceCallback, Prediction, metrics, plots

KNOWN = 8  # the digits 0–7
METHODS = ("MAP", "MAP + temperature", "Laplace", "ensemble of 5")
Predictor = Callable[[Tensor], Prediction]


@dataclass(frozen=True)
class Digits:
    """8 × 8 images as rows `[N, 64]`: known digits to train, validate and test on, and unknown things."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    unknown: dict[str, Tensor]


def read_digits(seed: int, n_train: int = 800, n_validation: int = 200) -> Digits:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    known = (y < KNOWN).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
    parts = known.tensor_split([n_train, n_train + n_validation])
    train, validation, test = (TensorDataset(x[part], y[part]) for part in parts)
    return Digits(train, validation, test, {"8 and 9": x[y >= KNOWN], "letters": draw_letters()})


def draw_letters() -> Tensor:
    """Letters in two fonts of matplotlib, with as much ink as the digits and made alike: 32 × 32 dots, counted in
    4 × 4 fields."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = []
    for letter in ascii_letters:
        for family in ("sans-serif", "serif"):
            figure = Figure(figsize=(1, 1), dpi=32)
            canvas = FigureCanvasAgg(figure)
            figure.text(0.5, 0.5, letter, size=90, weight="bold", ha="center", va="center", family=family)
            canvas.draw()
            dots = (torch.tensor(memoryview(canvas.buffer_rgba()).tolist())[..., 0] < 128).float()  # [32, 32]
            rows.append(F.avg_pool2d(dots[None], 4).flatten())
    return torch.stack(rows)


class DigitNet(L.LightningModule):
    """An ordinary LightningModule: nothing in it is Bayesian."""

    def __init__(self, width: int = 100, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, KNOWN)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def train(digits: Digits, epochs: int, seed: int, folder: Path) -> GaussianPosterior:
    """The usual training; the callback adds one exact pass over the data, and chooses on the validation images."""
    L.seed_everything(seed, verbose=False)
    laplace = LaplaceCallback(likelihood="classification", save=str(folder / f"posterior_{seed}.pt"), progress=False)
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[laplace, EarlyStopping("val_loss", patience=5)],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = DataLoader(digits.train, 32, shuffle=True), DataLoader(digits.validation, 100)
    trainer.fit(DigitNet(), *loaders)
    return laplace.posterior


def predictors(posteriors: list[GaussianPosterior], digits: Digits) -> dict[str, list[Predictor]]:
    """For each method one predictor per network, or one for all of them."""
    validation = DataLoader(digits.validation, 100)
    tempered = [posterior.calibrate(validation, predictive="map") for posterior in posteriors]
    ensemble = DeepEnsemble(posteriors)
    return {
        "MAP": [lambda x, p=p: p.predict(x, "map", calibrated=False) for p in posteriors],  # type: ignore[misc]
        "MAP + temperature": [lambda x, p=p: p.predict(x, "map") for p in tempered],  # type: ignore[misc]
        "Laplace": [p.predict for p in posteriors],
        "ensemble of 5": [lambda x: ensemble.predict(x, "map")],
    }


def judge(predict: Predictor, digits: Digits) -> dict[str, float]:
    """How good the probabilities are on known digits, and whether entropy gives unknown things away."""
    x, y = digits.test.tensors
    known = predict(x)
    assert known.probs is not None
    scores = {
        "NLL": float(metrics.functional.negative_log_likelihood(known.probs, y)),
        "accuracy": float((known.probs.argmax(1) == y).float().mean()),
        "ECE": float(metrics.functional.calibration_error(known.probs, y)),
    }
    for name, images in digits.unknown.items():
        scores[f"AUROC {name}"] = float(metrics.functional.ood_detection(*ood_scores(known, predict(images)))["auroc"])
    return scores


def ood_scores(known: Prediction, unknown: Prediction) -> tuple[Tensor, Tensor]:
    score = torch.cat([known.entropy, unknown.entropy])
    return score, torch.arange(len(score)) >= len(known)


def format_table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Means over networks."""
    columns = list(next(iter(rows.values()))[0])
    lines = [" " * 18 + "".join(f"{name:>15}" for name in columns)]
    for name, each in rows.items():
        lines.append(f"{name:<18}" + "".join(f"{mean(row[column] for row in each):>15.4f}" for column in columns))
    return "\n".join(lines)


def save_pictures(methods: dict[str, list[Predictor]], digits: Digits, folder: Path) -> None:
    """The first network, as it is and by its posterior: are probabilities honest, and are letters noticed?"""
    from matplotlib.figure import Figure

    x, y = digits.test.tensors
    names = ("MAP", "Laplace")
    reliability = Figure(figsize=(9, 5.6), dpi=100)
    ood = Figure(figsize=(9, 3.6), layout="constrained", dpi=100)
    tops, bottoms = reliability.subplots(1, 2), ood.subplots(1, 2, sharex=True)
    for top, bottom, name in zip(tops, bottoms, names, strict=True):
        known, unknown = methods[name][0](x), methods[name][0](digits.unknown["letters"])
        plots.reliability_diagram(known.probs, y, ax=top)
        top.set_title(name, y=1.3)
        plots.ood_histogram(*ood_scores(known, unknown), ax=bottom)
        bottom.set(title=name, xlabel="entropy of the prediction")
    reliability.subplots_adjust(left=0.06, right=0.98, bottom=0.09, top=0.74, wspace=0.16)
    reliability.savefig(folder / "reliability.png")
    ood.savefig(folder / "ood.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"), help="for pictures and posteriors")
    parser.add_argument("--epochs", type=int, default=100, help="at most; training stops early")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # a network this small is faster on one
    arguments.output.mkdir(parents=True, exist_ok=True)

    digits = read_digits(arguments.seed)
    print(f"training five networks on {len(digits.train)} images of the digits 0–7 …")
    posteriors = []
    for seed in range(arguments.seed, arguments.seed + 5):
        start = time.perf_counter()
        posteriors.append(train(digits, arguments.epochs, seed, arguments.output))
        print(f"  network {seed}: trained, fitted and tuned in {time.perf_counter() - start:.1f} s")
    methods = predictors(posteriors, digits)
    counts = ", ".join(f"{len(images)} of {name}" for name, images in digits.unknown.items())
    print(f"\n{len(digits.test)} test images of known digits; unknown: {counts}. Means over the networks:\n")
    rows = {name: [judge(predict, digits) for predict in methods[name]] for name in METHODS}
    print(format_table(rows))
    print(f"\n{verdict(rows)}")
    save_pictures(methods, digits, arguments.output)
    print(f"\nreliability.png, ood.png and the posteriors are in {arguments.output}")


def verdict(rows: dict[str, list[dict[str, float]]]) -> str:
    """What the table says, in a sentence made from its numbers."""

    def of(method: str, column: str) -> float:
        return mean(row[column] for row in rows[method])

    nll = of("Laplace", "NLL") - of("MAP + temperature", "NLL")
    size = "no better or worse" if abs(nll) < 0.005 else "better" if nll < 0 else "worse"
    gains = ", ".join(
        f"{of('Laplace', column) - of('MAP', column):+.3f} ({column.removeprefix('AUROC ')})"
        for column in rows["MAP"][0]
        if column.startswith("AUROC")
    )
    known = f"On known digits Laplace's probabilities are {size} than a temperature's"
    return f"{known}; noticing the unknown by entropy: {gains} over MAP."


if __name__ == "__main__":
    main()
