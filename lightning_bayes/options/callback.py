"""Options of callbacks and mixins: how to use the posterior, and the memory of the online method."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_bayes.arguments import (
    between,
    flag,
    format_value,
    instance,
    not_negative,
    positive,
    read_option,
    seed,
    text,
    word,
)
from lightning_bayes.options.fit import Network
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.options.tuning import CalibrateWord

PredictStepWord = Literal["replace", "keep", "both"]
CurvatureAt = Literal["mean", "sample"]


@dataclass(frozen=True, kw_only=True)
class UseOptions:
    """The arguments of `PosteriorCallback`, which documents them."""

    name: str  # distinguishes several callbacks: suffix of logged numbers, and part of file names
    predictive: PredictiveOption
    network: Network = field(default_factory=Network)
    calibrate: CalibrateWord | None = "auto"
    ood: bool = False
    plots: bool = False
    save: bool | str | None = None
    predict_step: PredictStepWord = "replace"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        text("name", self.name, "a word that identifies this posterior")
        if self.name == "map":
            raise ValueError("name='map' is reserved for the scores of the plain network: choose another name")
        if "/" in self.name or "\\" in self.name:
            raise ValueError(f"name must not contain a slash, got {self.name!r}")
        word("calibrate", self.calibrate, (*get_args(CalibrateWord), None))
        flag("ood", self.ood)
        flag("plots", self.plots)
        word("predict_step", self.predict_step, get_args(PredictStepWord))
        seed("seed", self.seed)
        flag("progress", self.progress)
        save = self.save
        if not (save is None or isinstance(save, bool) or (isinstance(save, (str, os.PathLike)) and str(save).strip())):
            raise ValueError(
                f"save must be True, False, None, or the path of a file or folder, got {format_value(save)}"
            )


@dataclass(frozen=True)
class Memory:
    """`C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ)` and `H = scale · C + δ`, for a memory factor `α`.

    Args:
        average: multiply the new term by `α`: a moving average instead of a leaky sum.
        scale: factor of the curvature in the precision.
        extrapolate: multiply a batch's curvature by `N/b`, to estimate the curvature of the dataset.
        initial_curvature: the initial value `C₀` of the memory; the paper's code uses the number of training examples.
        curvature_at: measure the curvature at the "mean", or at the "sample" as the paper's code does (averaged over
            several samples).
        threshold: the largest number of features per example for which `hessian="mixed"` is exact.
    """

    average: bool = False
    scale: float = 1.0
    extrapolate: bool = True
    initial_curvature: float = 0.0
    curvature_at: CurvatureAt = "mean"
    threshold: float = 256

    def __post_init__(self) -> None:
        flag("average", self.average)
        positive("scale", self.scale)
        flag("extrapolate", self.extrapolate)
        not_negative("initial_curvature", self.initial_curvature)
        word("curvature_at", self.curvature_at, get_args(CurvatureAt))
        between("threshold", self.threshold, 0, math.inf)


def memory_option(memory: Any) -> Memory:
    """Convert `memory=` to an option."""
    if memory is None:
        return Memory()
    return read_option("memory", memory, Memory, lambda given: instance("memory", given, Memory, "a Memory(…) or None"))
