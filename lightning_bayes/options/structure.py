"""What the posterior's precision looks like (`structure=`), and how its curvature is estimated (`curvature=`).

A word stands for an option with its defaults: `structure="kron"` is `Kron()`, `curvature="fisher_mc"` is `FisherMC()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_bayes.arguments import count, flag, format_value, word
from lightning_bayes.options.plain import resolve

WeightSharing = Literal["expand", "reduce"]
DiagonalMethod = Literal["exact", "approx", "mixed", "auto"]
CurvatureWord = Literal["auto", "ggn", "fisher_mc", "empirical_fisher"]

WEIGHT_SHARINGS = ("expand", "reduce")
DAMPINGS = (None, "glm", "ritter")
DIAGONAL_METHODS = ("exact", "approx", "mixed", "auto")
CURVATURES = ("auto", "ggn", "fisher_mc", "empirical_fisher")


class StructureOption:
    """Base of the options for `structure=`. Attributes that a structure does not offer have their neutral value."""

    kind: ClassVar[str]
    passes_once: ClassVar[bool] = True  # whether one pass over the data is enough
    sums_with_prior: ClassVar[bool] = False  # whether another posterior of this structure can be the prior
    is_truncated: ClassVar[bool] = False  # whether curvature is missing in some directions

    rank: int | str | None = None
    weight_sharing: str = "expand"
    damping: str | None = None
    updatable: bool = False
    method: str = "exact"


@dataclass(frozen=True)
class Full(StructureOption):
    """One dense matrix over all weights."""

    kind = "full"


@dataclass(frozen=True)
class Kron(StructureOption):
    """A Kronecker product for each layer (KFAC).

    Args:
        rank: eigenpairs that each factor keeps beside a remainder: at most this many, or "auto" for those that hold
            99 % of the trace of factors wider than 1,000, up to half of them. By default all.
        weight_sharing: how layers that share weights over positions are summed, "expand" or "reduce".
        damping: None adds the prior exactly. "glm" uses `(A + √δ) ⊗ (G + √δ)` with `A` a mean and `G` a sum over the
            data; "ritter" puts `√N` into each factor (Ritter et al. 2018).
        updatable: keep the factors, so that `posterior.update` can add data.
    """

    kind = "kron"
    sums_with_prior = True

    rank: int | Literal["auto"] | None = None
    weight_sharing: WeightSharing = "expand"
    damping: Literal["glm", "ritter"] | None = None
    updatable: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, str) and self.rank != "auto":
            raise ValueError(
                f"rank must be a whole number of at least 1, 'auto' or None, got {format_value(self.rank)}"
            )
        if self.rank is not None and self.rank != "auto":
            count("rank", self.rank)
        word("weight_sharing", self.weight_sharing, WEIGHT_SHARINGS)
        word("damping", self.damping, DAMPINGS)
        flag("updatable", self.updatable)


@dataclass(frozen=True)
class EKFAC(StructureOption):
    """The eigenbasis of `Kron` with eigenvalues from a second pass over the data.

    Args:
        weight_sharing: as in `Kron`, for the eigenbasis.
    """

    kind = "ekfac"
    passes_once = False

    weight_sharing: WeightSharing = "expand"

    def __post_init__(self) -> None:
        word("weight_sharing", self.weight_sharing, WEIGHT_SHARINGS)


@dataclass(frozen=True)
class Diag(StructureOption):
    """The diagonal.

    Args:
        method: "exact" takes a backward pass for each output. One backward pass gives "approx" (linear in the number of
            outputs and features), "mixed" (exact where layers are narrow), or "auto" (exact if all layers are).
    """

    kind = "diag"
    sums_with_prior = True

    method: DiagonalMethod = "exact"

    def __post_init__(self) -> None:
        word("method", self.method, DIAGONAL_METHODS)


@dataclass(frozen=True)
class LowRank(StructureOption):
    """The leading eigenpairs of the whole matrix, by several passes over the data.

    Args:
        rank: how many eigenpairs to keep.
    """

    kind = "lowrank"
    passes_once = False
    is_truncated = True

    rank: int = 100

    def __post_init__(self) -> None:
        count("rank", self.rank)


@dataclass(frozen=True)
class FisherMC:
    """The Monte-Carlo estimate of the Fisher, from labels drawn from the network's own predictions.

    Args:
        samples: labels drawn for each example.
    """

    samples: int = 1

    def __post_init__(self) -> None:
        count("samples", self.samples)


STRUCTURES: dict[str, type[StructureOption]] = {kind.kind: kind for kind in (Kron, EKFAC, Diag, Full, LowRank)}


def register_structure(word: str, passes: int) -> None:
    """Make `structure=word` known for an accumulator that is defined elsewhere."""
    if word not in STRUCTURES:
        STRUCTURES[word] = type(word, (StructureOption,), {"kind": word, "passes_once": passes == 1})


def structure_option(structure: Any) -> StructureOption:
    """The option that `structure=` means."""
    return resolve("structure", structure, STRUCTURES)


def curvature_estimate(curvature: Any, structure: StructureOption) -> tuple[str, int]:
    """The word of the estimator, and the labels to draw for each example, if it suits the structure."""
    estimate, samples = curvature, 1
    if isinstance(curvature, FisherMC):
        estimate, samples = "fisher_mc", curvature.samples
    word("curvature", estimate, CURVATURES)
    if structure.method != "exact" and estimate not in ("auto", "ggn"):
        raise ValueError(f"{structure} is a diagonal of the GGN and needs curvature='ggn', got curvature={estimate!r}")
    return estimate, samples
