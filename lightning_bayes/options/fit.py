"""Options of a fit: `structure=`, `curvature=`, `prior=`, and where to find the network and the data.

A word stands for an option with its defaults: `structure="kron"` is `Kron()`, `curvature="fisher_mc"` is `FisherMC()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from lightning_bayes.arguments import (
    count,
    flag,
    format_value,
    integer,
    positive,
    read_option,
    resolve_option,
    text,
    word,
)

StructureWord = Literal["auto", "kron", "ekfac", "diag", "full", "lowrank"]
SubsetWord = Literal["auto", "all", "last_layer"]
CurvatureWord = Literal["auto", "ggn", "fisher_mc", "empirical_fisher"]
WeightSharing = Literal["expand", "reduce"]
Damping = Literal["glm", "ritter"]
DiagonalMethod = Literal["exact", "approx", "mixed", "auto"]


# For `structure="auto"`: the largest number of entries in the rows from which a full matrix is computed
LARGEST_FULL = 2**26


class StructureOption:
    """Base of the options for `structure=`. Fields that do not apply to a structure keep their neutral default
    values."""

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
class AutoStructure(StructureOption):
    """`Full` for a small regression, `Kron` otherwise. An exact matrix improves the tuned noise and prior of a
    regression, but does not improve class probabilities.

    Args:
        largest: a regression is small if it has at most this number of weights, or of outputs over all training
            examples.
    """

    kind = "auto"
    sums_with_prior = True

    largest: int = 2000

    def __post_init__(self) -> None:
        count("largest", self.largest)

    def resolve(self, scales_noise: bool, weights: int, outputs: int | None) -> StructureOption:
        """The structure for these numbers of weights and of outputs over all examples (None if unknown)."""
        n = min(weights, math.inf if outputs is None else outputs)
        return Full() if scales_noise and n <= self.largest and n * weights <= LARGEST_FULL else Kron()


@dataclass(frozen=True)
class Full(StructureOption):
    """One dense matrix over all weights."""

    kind = "full"


@dataclass(frozen=True)
class Kron(StructureOption):
    """A Kronecker product for each layer (KFAC).

    Args:
        rank: the largest number of eigenpairs that each factor keeps; a single number replaces all other eigenvalues.
            "auto" keeps 99 % of the trace of factors wider than 1,000, with at most half of their eigenpairs. By
            default all eigenpairs are kept.
        weight_sharing: how to sum over the positions that share a layer's weights, "expand" or "reduce".
        damping: None adds the prior exactly. "glm" uses `(A + √δ) ⊗ (G + √δ)` with `A` a mean and `G` a sum over the
            data; "ritter" puts `√N` into each factor (Ritter et al. 2018).
        updatable: keep the factors, so that `posterior.update` can add data.
    """

    kind = "kron"
    sums_with_prior = True

    rank: int | Literal["auto"] | None = None
    weight_sharing: WeightSharing = "expand"
    damping: Damping | None = None
    updatable: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, str) and self.rank != "auto":
            raise ValueError(
                f"rank must be a whole number of at least 1, 'auto' or None, got {format_value(self.rank)}"
            )
        if self.rank is not None and self.rank != "auto":
            count("rank", self.rank)
        word("weight_sharing", self.weight_sharing, get_args(WeightSharing))
        word("damping", self.damping, (None, *get_args(Damping)))
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
        word("weight_sharing", self.weight_sharing, get_args(WeightSharing))


@dataclass(frozen=True)
class Diag(StructureOption):
    """The diagonal.

    Args:
        method: "exact" takes a backward pass for each output. The other methods take one backward pass in total:
            "approx" (linear in the number of outputs and features), "mixed" (exact where layers are narrow) and "auto"
            (exact if all layers are narrow).
    """

    kind = "diag"
    sums_with_prior = True

    method: DiagonalMethod = "exact"

    def __post_init__(self) -> None:
        word("method", self.method, get_args(DiagonalMethod))


@dataclass(frozen=True)
class LowRank(StructureOption):
    """The leading eigenpairs of the whole matrix, from several passes over the data.

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


STRUCTURES: dict[str, type[StructureOption]] = {
    kind.kind: kind for kind in (AutoStructure, Kron, EKFAC, Diag, Full, LowRank)
}


def register_structure(word: str, passes: int) -> None:
    """Register `structure=word` for a user-defined accumulator, which makes this number of passes over the data."""
    if word not in STRUCTURES:
        STRUCTURES[word] = type(word, (StructureOption,), {"kind": word, "passes_once": passes == 1})


def structure_option(structure: Any) -> StructureOption:
    """Convert `structure=` to an option."""
    return resolve_option("structure", structure, STRUCTURES)


def curvature_estimate(curvature: Any, structure: StructureOption) -> tuple[str, int]:
    """The name of the estimator and the number of labels to draw for each example. Raise an error if the structure does
    not support it."""
    estimate, samples = curvature, 1
    if isinstance(curvature, FisherMC):
        estimate, samples = "fisher_mc", curvature.samples
    word("curvature", estimate, get_args(CurvatureWord))
    if structure.method != "exact" and estimate not in ("auto", "ggn"):
        raise ValueError(f"{structure} is a diagonal of the GGN and needs curvature='ggn', got curvature={estimate!r}")
    return estimate, samples


@dataclass(frozen=True, eq=False)
class Prior:
    """The prior of the weights. `prior_precision=` sets its strength.

    Args:
        mean: the mean of the prior, by default zero: a flat vector in the order of `posterior.mean`, the state dict of
            a pretrained network, or, for a callback, the path of a file with one of these, such as a checkpoint.
        temperature: `T` in the precision `P = H/T + Λ`; with a temperature below 1 the data count more.
        posterior: another posterior over the same weights (for a callback, also the path of its file). The prior takes
            its mean and precision. `prior_precision=` is then a factor on that precision. The sum with the curvature is
            exact for "full" and "diag"; "kron" adds factors, which is an approximation.
    """

    mean: Any = None
    temperature: float = 1.0
    posterior: Any = None

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)
        if self.mean is not None and self.posterior is not None:
            raise ValueError("posterior= already sets the prior's mean: pass either posterior= or mean=")


def prior_option(prior: Any) -> Prior:
    """Convert `prior=`, which may be a posterior or its file, to an option."""
    return read_option("prior", prior, Prior, lambda posterior: Prior(posterior=posterior))


@dataclass(frozen=True)
class Network:
    """The network `x ↦ f(x)` in a LightningModule.

    Args:
        name: the dotted name of the submodule; by default the module's own `forward`.
        output: the key, attribute or index of f in the network's return value. By default f is the returned tensor, or
            the entry `logits`.
        class_dim: the class dimension of f; by default the shape of the targets determines it.
    """

    name: str | None = None
    output: str | int | None = None
    class_dim: int | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            text("the name of the network", self.name, "the dotted name of a submodule")
        if self.output is not None and (isinstance(self.output, bool) or not isinstance(self.output, (str, int))):
            raise ValueError(f"output must be a key, an attribute's name or an index, got {format_value(self.output)}")
        if self.output == "":
            raise ValueError("output must name an entry of the network's return value, got an empty string")
        if self.class_dim is not None and integer("class_dim", self.class_dim) == 0:
            raise ValueError("class_dim=0 is the batch dimension: use 1, or -1 for the last")


@dataclass(frozen=True, eq=False)
class FitData:
    """The data of a fit after training.

    Args:
        loader: a DataLoader, or the name of a method or attribute of the data module or module, used instead of the
            training data, for example the same examples without augmentation.
        max_batches: end the pass after this many batches. By default the pass covers all training data, even with
            `limit_train_batches`. If the data have no length and training did not exhaust them, the pass takes as many
            batches as an epoch of training.
    """

    loader: Any = None
    max_batches: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loader, str):
            text("the loader of data", self.loader, "a loader, or the name of a method that returns one")
        if self.max_batches is not None:
            count("max_batches", self.max_batches)


def network_option(network: Any) -> Network:
    """Convert `network=` to an option."""
    return read_option("network", network, Network, Network)


def output_option(output: Any) -> Network:
    """Convert `output=` to an option, for functions whose argument is the network itself instead of a
    LightningModule."""
    if not isinstance(output, Network):
        return Network(output=output)
    if output.name is not None:
        raise ValueError(f"output= cannot name a submodule: pass the submodule {output.name!r} itself")
    return output


def data_option(data: Any) -> FitData:
    """Convert `data=` to an option. A dictionary with other keys is a dictionary of loaders, as in Lightning."""
    is_loader = isinstance(data, Mapping) and not set(data) <= {"loader", "max_batches"}
    return FitData(data) if is_loader else read_option("data", data, FitData, FitData)
