"""`Memory`: the details of the curvature that `OnlineLaplaceCallback` remembers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_bayes.arguments import between, flag, instance, not_negative, positive, word
from lightning_bayes.options.plain import from_mapping


@dataclass(frozen=True)
class Memory:
    """`C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ)` and `H = scale · C + δ`, for a memory factor `α`.

    Args:
        average: multiply the new term by `α`: a moving average instead of a leaky sum.
        scale: factor of the curvature in the precision.
        extrapolate: multiply a batch's curvature by `N/b`, to that of the dataset.
        initial_curvature: `C₀`; the paper's code starts at the number of examples.
        curvature_at: measure the curvature at the "mean", or at the "sample" as the paper's code does (with several
            samples, their average).
        threshold: features per example up to which `hessian="mixed"` is exact.
    """

    average: bool = False
    scale: float = 1.0
    extrapolate: bool = True
    initial_curvature: float = 0.0
    curvature_at: Literal["mean", "sample"] = "mean"
    threshold: float = 256

    def __post_init__(self) -> None:
        flag("average", self.average)
        positive("scale", self.scale)
        flag("extrapolate", self.extrapolate)
        not_negative("initial_curvature", self.initial_curvature)
        word("curvature_at", self.curvature_at, ("mean", "sample"))
        between("threshold", self.threshold, 0, math.inf)


def memory_option(memory: Any) -> Memory:
    """The option that `memory=` means."""
    if memory is None:
        return Memory()
    if isinstance(memory, Mapping):
        return from_mapping("memory", memory, Memory)
    return instance("memory", memory, Memory, "a Memory(…) or None")
