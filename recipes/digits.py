"""Scikit-learn's digits, 8 × 8 pixels: known digits to train on, unknown inputs to detect, and scores for both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_bayes import Prediction, metrics, plots

KNOWN = 8  # the digits 0–7
Predictor = Callable[[Tensor], Prediction]


@dataclass(frozen=True)
class Digits:
    """Images as rows `[N, 64]` from 0 to 1, and labels `[N]`; unknown images by their content."""

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
    """Letters in two matplotlib fonts, made like the digits: 32 × 32 dots, counted in blocks of 4 × 4.  # [104, 64]"""
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


def other_inputs() -> dict[str, Tensor]:
    """Tiles of scikit-learn's two photographs in grey, made like the digits, and noise.  # [520, 64] and [500, 64]"""
    images = torch.stack([torch.tensor(image) for image in load_sample_images().images]).float().mean(-1) / 255
    tiles = images[:, :416].unfold(1, 32, 32).unfold(2, 32, 32).flatten(0, 2)  # [520, 32, 32]
    noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(0))
    return {"photographs": F.avg_pool2d(tiles, 4).flatten(1), "noise": noise}


def judge(predict: Predictor, digits: Digits) -> dict[str, float]:
    """Scores of the probabilities on known digits, and how well entropy detects unknown inputs."""
    x, y = digits.test.tensors
    known, unknown = predict(x), digits.unknown.items()
    assert known.probs is not None
    return score(known.probs, y) | {f"AUROC {name}": auroc(known.entropy, predict(x).entropy) for name, x in unknown}


def score(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "NLL": float(metrics.functional.negative_log_likelihood(probs, y)),
        "accuracy": float((probs.argmax(1) == y).float().mean()),
        "ECE": float(metrics.functional.calibration_error(probs, y)),
    }


def auroc(inside: Tensor, outside: Tensor) -> float:
    return float(metrics.functional.ood_detection(*joined(inside, outside))["auroc"])


def draw_scores(scores: Mapping[str, Sequence[Tensor]], label: str = "entropy of the prediction") -> Figure:
    """Plot the scores of each method, given its predictions for known and unknown inputs."""
    figure = Figure(figsize=(4.6 * len(scores), 3.6), layout="constrained")
    for ax, (name, (known, unknown)) in zip(figure.subplots(1, len(scores)), scores.items(), strict=True):
        plots.ood_histogram(*joined(known, unknown), ax=ax)
        ax.set(title=name, xlabel=label)
    return figure


def draw_alarms(plain: Predictor, alarm: Callable[[Tensor], Tensor], digits: Digits) -> Figure:
    """Plot the image of median confidence of each kind, with the plain network's answer and the alarm."""
    kinds = {"a known digit": digits.test.tensors[0], **digits.unknown}
    figure = Figure(figsize=(10, 2.7), layout="constrained")
    for ax, (kind, images) in zip(figure.subplots(1, len(kinds)), kinds.items(), strict=True):
        image = images[plain(images).confidence.argsort()[len(images) // 2]][None]
        answer, said = plain(image), "unknown" if alarm(image) else "known"
        ax.imshow(image.view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        ax.set(title=kind, xticks=[], yticks=[])
        ax.set_xlabel(f"plain: a {int(answer.label)}, {float(answer.confidence):.0%} sure\nposterior: {said}")
        ax.spines[:].set(color={"known": "tab:green", "unknown": "tab:red"}[said], linewidth=3)
    return figure


def joined(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """The concatenated scores, and a mask of the unknown inputs."""
    score = torch.cat([inside, outside])
    return score, torch.arange(len(score)) >= len(inside)
