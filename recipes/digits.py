"""Scikit-learn's digits, 8 × 8 pixels, so that nothing is downloaded: known ones to train on, unknown things to be
noticed, and scores for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_bayes import Prediction, metrics, plots

KNOWN = 8  # the digits 0–7
Predictor = Callable[[Tensor], Prediction]


@dataclass(frozen=True)
class Digits:
    """Images as rows `[N, 64]` from 0 to 1, and labels `[N]`; unknown images by what they show."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    unknown: dict[str, Tensor]


def read_digits(n_train: int = 800, n_validation: int = 200) -> Digits:
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x, known = x.float() / 16, (y < KNOWN).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
    parts = known.tensor_split([n_train, n_train + n_validation])
    train, validation, test = (TensorDataset(x[part], y[part]) for part in parts)
    return Digits(train, validation, test, {"8 and 9": x[y >= KNOWN], "letters": draw_letters()})


def draw_letters() -> Tensor:
    """Letters in two fonts of matplotlib, made like the digits: 32 × 32 dots, counted in 4 × 4 fields.  # [104, 64]"""
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


def judge(predict: Predictor, digits: Digits) -> dict[str, float]:
    """How good the probabilities are on known digits, and whether entropy gives unknown things away."""
    x, y = digits.test.tensors
    known = predict(x)
    assert known.probs is not None
    return score(known.probs, y) | {
        f"AUROC {name}": auroc(known.entropy, predict(x).entropy) for name, x in digits.unknown.items()
    }


def score(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "NLL": float(metrics.functional.negative_log_likelihood(probs, y)),
        "accuracy": float((probs.argmax(1) == y).float().mean()),
        "ECE": float(metrics.functional.calibration_error(probs, y)),
    }


def auroc(inside: Tensor, outside: Tensor) -> float:
    return float(metrics.functional.ood_detection(*joined(inside, outside))["auroc"])


def draw_entropies(entropies: Mapping[str, Sequence[Tensor]]) -> Figure:
    """By method, those of predictions for known and for unknown things."""
    figure = Figure(figsize=(4.6 * len(entropies), 3.6), layout="constrained")
    for ax, (name, (known, unknown)) in zip(figure.subplots(1, len(entropies)), entropies.items(), strict=True):
        plots.ood_histogram(*joined(known, unknown), ax=ax)
        ax.set(title=name, xlabel="entropy of the prediction")
    return figure


def joined(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Scores one after the other, and which are of unknown things."""
    score = torch.cat([inside, outside])
    return score, torch.arange(len(score)) >= len(inside)
