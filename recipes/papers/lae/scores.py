"""Four scores of an autoencoder that should be larger outside of its data, and how well they detect such images."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes import metrics
from recipes.papers.lae.autoencoders import BATCH, Method

SCORES = ("log-likelihood", "typicality", "latent σ", "output σ")
Scores = dict[str, tuple[Tensor, Tensor]]


def scores_of(method: Method, train: Tensor, inside: Tensor, outside: Tensor, samples: int, seed: int) -> Scores:
    """Each score inside and outside the distribution; an autoencoder without samples has only two of the four."""
    some = train[: len(inside)]
    typical = measure(method, some, samples, seed)["error"].mean()
    both = [measure(method, x, samples, seed) for x in (inside, outside)]
    scores = {"log-likelihood": tuple(measured["error"] for measured in both)}
    scores["typicality"] = tuple((measured["error"] - typical).abs() for measured in both)
    if method.stochastic:
        scores |= {name: tuple(measured[name] for measured in both) for name in SCORES[2:]}
    return scores  # type: ignore[return-value]


def measure(method: Method, x: Tensor, samples: int, seed: int) -> dict[str, Tensor]:
    """The squared error and standard deviations of every image.  # each [N]"""
    measured: dict[str, list[Tensor]] = {"error": [], "latent σ": [], "output σ": []}
    for part in x.split(BATCH):
        drawn = method.draw(part, samples, seed)
        assert drawn.samples is not None
        assert drawn.variance is not None
        assert drawn.latent_variance is not None
        measured["error"].append((drawn.samples - part).square().flatten(2).sum(2).mean(0))
        measured["latent σ"].append((drawn.latent_variance + 1e-5).sqrt().sum(1))
        measured["output σ"].append((drawn.variance + 1e-5).sqrt().flatten(1).sum(1))
    return {name: torch.cat(parts) for name, parts in measured.items()}


def auroc(inside: Tensor, outside: Tensor) -> float:
    return detection(inside, outside)["auroc"]


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    return {name: float(v) for name, v in metrics.functional.ood_detection(*joined(inside, outside)).items()}


def joined(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    score = torch.cat([inside, outside])
    return score, torch.arange(len(score)) >= len(inside)


def roc(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """False and true positive rates over all thresholds; images from outside are positive."""
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    rates = [1 - torch.searchsorted(part.sort().values, thresholds) / len(part) for part in (inside, outside)]
    return tuple(torch.cat([torch.zeros(1), rate]) for rate in rates)  # type: ignore[return-value]
