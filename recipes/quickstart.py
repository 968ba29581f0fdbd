"""A first program: train a small network on noisy digits, then ask it what it does not know.

The digits are scikit-learn's, with noise on the pixels: as they come they are too easy for a network to be
over-confident about, and there a posterior makes probabilities worse, not better (try --noise 0). Digits 0–7 are what
the network is trained on; 8 and 9 it has never seen. The same trained weights are then judged three times: as they are
(MAP), by the linearised network under a Laplace posterior (GLM), and by sampled weights (BNN).

    python recipes/quickstart.py                # about ten seconds
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, LaplacePosterior, Prediction, metrics, plots

KNOWN = 8  # the digits 0–7
PREDICTIVES = {"MAP": "map", "Laplace-GLM": "glm", "Laplace-BNN": "bnn"}


@dataclass(frozen=True)
class Digits:
    """8 × 8 images as rows `[N, 64]`: known digits to train and test on, and unknown ones."""

    train: TensorDataset
    x_test: Tensor
    y_test: Tensor
    x_unknown: Tensor


def read_digits(seed: int, n_train: int = 800, noise: float = 0.4) -> Digits:
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    x = x + noise * torch.randn(x.shape, generator=generator)
    known = (y < KNOWN).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=generator)]
    train, test = known[:n_train], known[n_train:]
    return Digits(TensorDataset(x[train], y[train]), x[test], y[test], x[y >= KNOWN])


class DigitNet(L.LightningModule):
    """An ordinary LightningModule: nothing in it is Bayesian."""

    def __init__(self, width: int = 100, lr: float = 1e-2, weight_decay: float = 1e-3) -> None:
        super().__init__()
        self.lr, self.weight_decay = lr, weight_decay
        self.net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, KNOWN))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)


def train(digits: Digits, epochs: int, folder: Path) -> LaplacePosterior:
    """The usual training; the callback adds one exact pass over the data and the prior that explains them best."""
    laplace = LaplaceCallback(likelihood="classification", structure="kron", tune="marglik")
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[laplace],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitNet(), DataLoader(digits.train, batch_size=64, shuffle=True))
    return laplace.posterior


def describe(posterior: LaplacePosterior) -> str:
    return (
        f"{posterior.subset.size} weights, of which the data determine {float(posterior.effective_parameters):.0f}; "
        f"prior precision {float(posterior.prior_precision):.2f}; "
        f"log evidence {float(posterior.log_marginal_likelihood()):.1f}"
    )


def predict(posterior: LaplacePosterior, x: Tensor, predictive: str, seed: int) -> Prediction:
    generator = torch.Generator().manual_seed(seed)
    return posterior.predict(x, predictive=predictive, samples=100, generator=generator)


def judge(known: Prediction, y: Tensor, unknown: Prediction) -> dict[str, float]:
    """How good the probabilities are on known digits, and whether entropy gives the unknown ones away."""
    score = torch.cat([known.entropy, unknown.entropy])
    return {
        "NLL": float(metrics.functional.negative_log_likelihood(known.probs, y)),
        "accuracy": float((known.probs.argmax(1) == y).float().mean()),
        "ECE": float(metrics.functional.calibration_error(known.probs, y)),
        "Brier": float(metrics.functional.brier_score(known.probs, y)),
        "OOD-AUROC": float(metrics.functional.ood_detection(score, is_unknown(known, unknown))["auroc"]),
    }


def is_unknown(known: Prediction, unknown: Prediction) -> Tensor:
    return torch.arange(len(known) + len(unknown)) >= len(known)


def format_table(rows: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [" " * 12 + "".join(f"{name:>11}" for name in columns)]
    lines += [f"{name:<12}" + "".join(f"{row[column]:>11.4f}" for column in columns) for name, row in rows.items()]
    return "\n".join(lines)


def save_pictures(known: dict[str, Prediction], y: Tensor, unknown: dict[str, Prediction], folder: Path) -> None:
    """MAP beside Laplace-GLM, in two pictures: are probabilities honest, and are unknown digits noticed?"""
    from matplotlib.figure import Figure

    names = ("MAP", "Laplace-GLM")
    reliability = Figure(figsize=(9, 5.6), dpi=100)
    for ax, name in zip(reliability.subplots(1, 2), names, strict=True):
        plots.reliability_diagram(known[name].probs, y, ax=ax)
        ax.set_title(name, y=1.3)
    reliability.subplots_adjust(left=0.06, right=0.98, bottom=0.09, top=0.74, wspace=0.16)
    reliability.savefig(folder / "reliability.png")

    ood = Figure(figsize=(9, 3.6), layout="constrained", dpi=100)
    for ax, name in zip(ood.subplots(1, 2, sharex=True), names, strict=True):
        score = torch.cat([known[name].entropy, unknown[name].entropy])
        plots.ood_histogram(score, is_unknown(known[name], unknown[name]), ax=ax)
        ax.set(title=name, xlabel="entropy of the prediction")
    ood.savefig(folder / "ood.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/quickstart"), help="folder for pictures and posterior"
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--noise", type=float, default=0.4, help="standard deviation on pixels from 0 to 1")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # a network this small is faster on one
    L.seed_everything(arguments.seed, verbose=False)
    arguments.output.mkdir(parents=True, exist_ok=True)

    digits = read_digits(arguments.seed, noise=arguments.noise)
    print(f"training on {len(digits.train)} images of the digits 0–7 for {arguments.epochs} epochs …")
    start = time.perf_counter()
    posterior = train(digits, arguments.epochs, arguments.output)
    print(f"trained and fitted in {time.perf_counter() - start:.1f} s: {describe(posterior)}")

    known = {name: predict(posterior, digits.x_test, word, arguments.seed) for name, word in PREDICTIVES.items()}
    unknown = {name: predict(posterior, digits.x_unknown, word, arguments.seed) for name, word in PREDICTIVES.items()}
    print(f"\n{len(digits.x_test)} test images of known digits, {len(digits.x_unknown)} of unknown ones (8 and 9):\n")
    print(format_table({name: judge(known[name], digits.y_test, unknown[name]) for name in PREDICTIVES}))
    save_pictures(known, digits.y_test, unknown, arguments.output)
    print(f"\nreliability.png, ood.png and the posterior itself are in {arguments.output}")


if __name__ == "__main__":
    main()
