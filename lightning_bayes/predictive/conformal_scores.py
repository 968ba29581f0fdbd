"""How badly a target conforms to its prediction: the scores that conformal sets are made of.

A *score* of class `c` is larger the less likely `c` is. With the classes in the order of falling probability, `k` the
rank of `c`, and `u` a uniform number that belongs to the example:

- `"aps"`: `p₍₁₎ + … + p₍ₖ₋₁₎ + u·p₍ₖ₎` (Romano, Sesia & Candès 2020, "Classification with valid and adaptive
  coverage"), or `u = 1` where sets are not randomised;
- `"raps"`: the same plus `λ max(k − k₀, 0)` (Angelopoulos et al. 2021, "Uncertainty sets for image classifiers using
  conformal prediction"), which keeps unlikely classes out of sets: `λ` is `penalty`, `k₀` is `free_classes`;
- `"lac"`: `1 − p_c` (Sadinle, Lei & Wasserman 2019, "Least ambiguous set-valued classifiers"): the smallest sets on
  average, which may fail the difficult examples to serve the easy ones.

Where the classes before `c` have all probability but a millionth, `"aps"` would tell the rest apart by rounding alone,
and a network that is wrong and certain in many cases would get sets of all classes. There `10⁻⁶ k` is added.

A real target `y` has the score `|y − m| / s`, with the mean and standard deviation of its prediction.

`u` is computed from the bits of the example's own log-probabilities, rounded to half precision, and a seed. So a score
is a function of the example: the same in any batch, and exchangeable wherever examples are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bayes.arguments import count, flag, not_negative, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.likelihoods.predictive import log_probability
from lightning_bayes.metrics.functional.inputs import accumulation_dtype
from lightning_bayes.network.accumulation import running_sum
from lightning_bayes.network.noise import as_bits, hashed, unit
from lightning_bayes.predictive.prediction import Prediction

METHODS = ("aps", "raps", "lac")
CERTAIN = 1e-6  # the probability that is left where ranks count, and what each counts


@dataclass(frozen=True)
class ClassScore:
    """The score of classes, with its settings."""

    method: str = "aps"
    randomised: bool = True
    penalty: float = 0.01
    free_classes: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        word("method", self.method, METHODS)
        flag("randomised", self.randomised)
        not_negative("penalty", self.penalty)
        count("free_classes", self.free_classes, 0)
        check_seed("seed", self.seed)

    def of_classes(self, probs: Tensor) -> Tensor:
        """Of every class.  # [..., C] -> [..., C]"""
        if self.method == "lac":
            return 1 - probs
        p, order = probs.sort(dim=-1, descending=True, stable=True)
        u = self._uniform(probs).unsqueeze(-1) if self.randomised else 1.0
        before = running_sum(p, -1) - p
        rank = torch.arange(1, p.shape[-1] + 1, dtype=p.dtype, device=p.device)
        scores = before + u * p + CERTAIN * rank * (before > 1 - CERTAIN)
        if self.method == "raps":
            scores = scores + self.penalty * (rank - self.free_classes).clamp_min(0)
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def _uniform(self, probs: Tensor) -> Tensor:
        rows = log_probability(probs).half().reshape(-1, probs.shape[-1])
        return unit(hashed(as_bits(rows), self.seed), probs.dtype).reshape(probs.shape[:-1])


def class_probs(prediction: Prediction) -> Tensor:
    """The probabilities as `[B, K, R, C]`: `K` labels by themselves (one, for classes) at `R` positions."""
    probs = prediction.probs
    assert probs is not None
    probs = probs.to(accumulation_dtype(probs.device))
    if prediction.kind == "classification":
        return probs.flatten(2).mT.unsqueeze(1) if probs.ndim > 2 else probs[:, None, None]
    p = by_output(probs)
    return torch.stack([1 - p, p], dim=-1)


def by_output(t: Tensor) -> Tensor:
    """Outputs as `[B, K, R]`: `K` in dimension 1, at `R` positions."""
    return t.flatten(2) if t.ndim > 2 else t.reshape(*t.shape, *[1] * (3 - t.ndim))


def n_outputs(prediction: Prediction) -> int:
    """How many have a quantile each: the classes of one label share theirs."""
    main = prediction.mean if prediction.probs is None else prediction.probs
    assert main is not None
    return 1 if prediction.kind == "classification" or main.ndim == 1 else main.shape[1]
