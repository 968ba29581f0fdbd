"""A mixture of predictions, `p(y | x) = Σₘ wₘ pₘ(y | x)`, of an ensemble's members or of several views of an input.

Its moments follow from those of its parts by the law of total variance, where the choice of the part is a further
unknown:

    μ         = Σₘ wₘ μₘ                                  (for classes, the probabilities)
    epistemic = Σₘ wₘ epistemicₘ + Σₘ wₘ (μₘ − μ)²        within the parts, and between them
    aleatoric = Σₘ wₘ aleatoricₘ

For classes, `epistemic + aleatoric = μ(1 − μ)`, as for the parts. The entropy of classes is that of the mixture, and
its epistemic part is `Σₘ wₘ Iₘ + (H[μ] − Σₘ wₘ H[μₘ])`. A regression's mixture is reported and scored as the Gaussian
with its mean and variance, which has the largest entropy for that variance, or as a Student-t with the parts' tails,
`1/ν = Σₘ wₘ/νₘ`. `log_prob` is the density of the mixture.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.likelihoods import ClassPredictive, Likelihood
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.predictive.prediction import Prediction, mean_of

PREDICTORS = "a posterior or a predictor such as a DeepEnsemble"  # for error messages


class Predictor(ABC):
    """What predicts like a posterior: `evaluate` and `conformalize` accept it."""

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The network that reads batches."""

    @abstractmethod
    def predict(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The predictive distribution at `x`; for the arguments see `GaussianPosterior.predict`."""


class Mixture(Predictor):
    """Predicts with the mixture of several predictions."""

    @property
    @abstractmethod
    def part_weights(self) -> Sequence[float]:
        """The weights of the parts, which sum to one."""

    @abstractmethod
    def predict_each(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> list[Prediction]:
        """The prediction of each part at `x`."""

    def predict(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The mixture of the predictions of all parts at `x`; for the arguments see `GaussianPosterior.predict`."""
        return mix(self.predict_each(x, predictive, generator=generator), self.part_weights, self.likelihood)

    def log_prob(
        self,
        x: Any,
        y: Tensor,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`log Σₘ wₘ pₘ(y)` of each real target, in the shape of y."""
        parts = self.predict_each(x, predictive, generator=generator)
        if parts[0].probs is not None:
            raise PosteriorError("log_prob is a density of real targets; for classes take the log of predict(x).probs")
        log_p = torch.stack([part.log_prob(y) for part in parts])  # [M, B, …]
        return (_like(log_p, self.part_weights).log() + log_p).logsumexp(0)


def mix(parts: Sequence[Prediction], weights: Sequence[float], likelihood: Likelihood) -> Prediction:
    """The mixture of predictions of the same inputs, with weights that sum to one."""
    means = torch.stack([mean_of(part) for part in parts])  # [M, B, …]
    w = _like(means, weights)
    mean = (w * means).sum(0)
    within = (w * torch.stack([part.epistemic for part in parts])).sum(0)
    between = (w * (means - mean).square()).sum(0)
    aleatoric = (w * torch.stack([part.aleatoric for part in parts])).sum(0)
    mixture = likelihood.predictive(mean, within + between, aleatoric)
    known = [part.mutual_information for part in parts if part.mutual_information is not None]
    if isinstance(mixture, ClassPredictive) and len(known) == len(parts):
        entropies = torch.stack([part.entropy for part in parts])  # [M, B, …]
        w = _like(entropies, weights)
        disagreement = (mixture.entropy - (w * entropies).sum(0)).clamp_min(0)
        mixture = replace(mixture, mutual_information=(w * torch.stack(known)).sum(0) + disagreement)
    per_input = {}
    for name in ("novelty", "energy"):
        values = [getattr(part, name) for part in parts]
        if all(value is not None for value in values):
            per_input[name] = (_like(torch.stack(values), weights) * torch.stack(values)).sum(0)
    df: float | Tensor = math.inf
    if any(part.df is not None for part in parts):
        tails = torch.stack([torch.zeros_like(mean) if part.df is None else 1 / part.df for part in parts])
        df = 1 / (_like(tails, weights) * tails).sum(0)
    return replace(Prediction.from_predictive(mixture, df), **per_input)


def check_shapes(predictions: Sequence[Prediction], parts: str, way_out: str) -> None:
    """Raise an error if the predictions of all `parts` do not have one shape."""
    first = mean_of(predictions[0])
    for number, prediction in enumerate(predictions):
        if mean_of(prediction).shape != first.shape:
            part = parts.removesuffix("s")
            raise PosteriorError(
                f"{parts} must have outputs of the same shape, but {part} 0 has shape {list(first.shape)} and {part} "
                f"{number} has shape {list(mean_of(prediction).shape)}: {way_out}"
            )


@contextmanager
def naming(which: str) -> Iterator[None]:
    """Add the name of a part to its errors."""
    try:
        yield
    except PosteriorError as error:
        raise PosteriorError(f"{which}: {error}") from error


def _like(values: Tensor, weights: Sequence[float]) -> Tensor:
    """# [M, 1, …]"""
    return torch.tensor(weights, dtype=values.dtype, device=values.device).view(-1, *[1] * (values.ndim - 1))
