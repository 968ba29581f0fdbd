"""A diagonal matrix: one number per parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.subset import Subset, layer_of
from lightning_bayes.structures.base import Eigenbasis, Layout, ParameterBlock, Structure, positive
from lightning_bayes.structures.factor import Factor
from lightning_bayes.structures.output_covariance import CovarianceForm, rotated_covariances


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """`M = diag(values)`."""

    name: ClassVar[str] = "Diagonal"
    word: ClassVar[str] = "diag"

    values: Tensor  # [P]

    @property
    def size(self) -> int:
        return self.values.numel()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diagonal:
        return self._with(self.values.to(device=device, dtype=dtype))

    def to_dense(self) -> Tensor:
        return torch.diag(self.values)

    def diagonal(self) -> Tensor:
        return self.values

    def inverse_diagonal(self) -> Tensor:
        return positive(self.values).reciprocal()

    def __add__(self, other: Diagonal) -> Diagonal:
        self._check_same_form(other)
        return self._with(self.values + other.values)

    def scale(self, factor: float | Tensor) -> Diagonal:
        return self._with(self.values * factor)

    def add_prior(self, precision: float | Tensor) -> Diagonal:
        precision = self._check_prior(precision)
        if self.values.requires_grad or precision.requires_grad:
            return Diagonal(self.values + precision)
        return _LazySum(self.values, precision)

    def add_deferred(self, precision: Callable[[], Tensor]) -> Diagonal:
        """`add_prior` with a precision that is computed when the sum is first used."""
        return _LazySum(self.values, precision)

    def _with(self, values: Tensor) -> Diagonal:
        return Diagonal(values)

    def matmul(self, vectors: Tensor) -> Tensor:
        return vectors * self.values

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / positive(self.values)

    def root_solve(self, vectors: Tensor) -> Tensor:
        return vectors * positive(self.values).rsqrt()

    @property
    def floor(self) -> Tensor:
        return self.values.min()

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        values = in_float64(self.values)
        return Eigenbasis(values, values.new_ones(()), groups, None if vectors is None else in_float64(vectors))

    def trace_terms(self, other: Structure) -> Tensor:
        return other.diagonal() / positive(self.values)

    def input_factor(self, rows: Tensor) -> Factor:
        return Factor(None, self.values[rows.to(self.device)].sum(0, keepdim=True))

    def logdet(self) -> Tensor:
        return self.values.log().sum()

    @property
    def sizes(self) -> str:
        return f"{self.size}"

    def parameter_blocks(self, subset: Subset) -> list[ParameterBlock]:
        """One block for each layer."""
        blocks, index = [], self.layer_index(subset)
        by_layer = index.argsort(stable=True).split(index.bincount(minlength=len(subset.layers)).tolist())
        for layer, places in zip(subset.layers, by_layer, strict=True):
            names = tuple(name for name in subset.names if layer_of(name) == layer)
            blocks.append(ParameterBlock(names, Diagonal(self.values[places.to(self.device)]), places))
        return blocks

    def layer_index(self, subset: Subset) -> Tensor:
        """The layer of each entry.  # [P]"""
        return subset.layer_index

    def layer_blocks(self, subset: Subset) -> Callable[[Layout], Structure | None]:
        values = self.values
        if subset.mask is not None:  # weights outside a subnetwork are fixed: infinite precision
            values = values.new_full((subset.full_size,), torch.inf)
            values[subset.mask.to(values.device)] = self.values
        return lambda layout: Diagonal(layout.gather(values))

    @classmethod
    def output_covariances(
        cls, blocks: Sequence[Diagonal], a: Tensor, g: Tensor, form: CovarianceForm, in_basis: bool = False
    ) -> list[Tensor]:
        shape = g.shape[1], g.shape[4], a.shape[3]  # [G, O, I]
        return rotated_covariances([block.values.reshape(shape).reciprocal() for block in blocks], a, g, form)


class _LazySum(Diagonal):
    """`diag(values + δ)`, summed on first use: until then a posterior stores only its mean and curvature."""

    _terms: tuple[Tensor, Tensor | Callable[[], Tensor]]

    def __init__(self, values: Tensor, precision: Tensor | Callable[[], Tensor]) -> None:
        object.__setattr__(self, "_terms", (values, precision))

    @cached_property
    def values(self) -> Tensor:
        values, precision = self._terms
        with torch.inference_mode(False):  # an inference tensor could not be used with gradients later
            return values + (precision if isinstance(precision, Tensor) else precision())
