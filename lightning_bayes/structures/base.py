"""The contract of a structure: a symmetric positive semi-definite matrix `M` over `P` parameters.

Structures are immutable values. Vectors are rows, so that a stack of them is `[..., P]`. A curvature `H` becomes a
precision by `H.add_prior(δ)`; `sample` then draws from the Gaussian with that precision, `N(0, M⁻¹)`.

A structure of your own needs the abstract methods, and a `name` if it is to be saved. All that it inherits is right for
any matrix; a `layer_blocks` and `output_covariances` of its own make predictions faster.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_bayes.arguments import register
from lightning_bayes.network.accumulation import cast_like, float64_device, in_float64
from lightning_bayes.network.subset import Subset
from lightning_bayes.structures.layout import Layout
from lightning_bayes.structures.output_covariance import CovarianceForm, layer_jacobian

logger = logging.getLogger("lightning_bayes")

Self = TypeVar("Self", bound="Structure")
_WIDE, _WIDER = 700, 1200  # columns from which on a decomposition in float64 costs time, and much


class StructureError(ValueError):
    """An operation that this form of matrix cannot do, or cannot do with these arguments."""


def positive(eigenvalues: Tensor) -> Tensor:
    """The eigenvalues of a matrix that is to be inverted: a singular one is refused, not answered with infinities."""
    if not (eigenvalues > 0).all():
        raise StructureError(
            f"the matrix is not positive definite (smallest eigenvalue {eigenvalues.min().item():.3g}): add a prior "
            "precision before solving or sampling, or raise the one there is"
        )
    return eigenvalues


def eigh(matrix: Tensor, name: str = "a matrix", wide: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric PSD matrices `[..., d, d]`: the values in float64 and never negative,
    the vectors in the matrix's dtype. `name` is for a warning.

    In float32 an eigenvalue is wrong by about `eps · λ_max`: of a layer with one raw-scaled input, all that belongs to
    the other inputs is lost, although the matrix itself still holds it. So float64 decomposes it. On one thread that
    takes 2.0, 1.9 and 1.9 times as long for 256, 785 and 1,153 columns (7, 98 and 296 ms), and 3.0 times for 2,305
    (2.9 s); a `wide` matrix is therefore left to float32 if little is lost.

    LAPACK and cuSOLVER do not always converge. A fit does not end there: the host tries next, then the singular values,
    then a matrix with a slightly larger diagonal, and at last the diagonal stands for the matrix, with a warning.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    attempts = [_decompose_in_float64, _decompose_by_svd, _decompose_with_jitter]
    if matrix.device.type != "cpu":
        attempts.insert(1, _decompose_on_host)
    if wide and matrix.dtype != torch.float64 and _loses_little(matrix):
        attempts.insert(0, torch.linalg.eigh)
    for attempt in attempts:
        try:
            values, vectors = attempt(matrix)
        except RuntimeError:  # LinAlgError, and what cuSOLVER raises instead
            continue
        if values.isfinite().all() and vectors.isfinite().all():
            break
    else:
        logger.warning(
            "no eigendecomposition of %s with %d columns converged: its diagonal is used instead, which leaves out all "
            "correlations of this block",
            name,
            matrix.shape[-1],
        )
        values, vectors = diagonal, torch.eye(matrix.shape[-1], device=matrix.device).expand_as(matrix)
    error = torch.finfo(values.dtype).eps / torch.finfo(matrix.dtype).eps
    vectors = cast_like(vectors, matrix)
    values = in_float64(values).to(float64_device(matrix.device))
    return without_rounding(values, vectors, diagonal, error), vectors


def without_rounding(values: Tensor, vectors: Tensor, diagonal: Tensor, error: float = 0.0) -> Tensor:
    """The eigenvalues of a PSD matrix `M` with zero for those that are only rounding.

    An entry is rounded by about `eps √(M_ii M_jj)`, so that an eigenvalue with the vector `q` is wrong by a small
    multiple of `eps · qᵀ diag(M) q`, and by what the decomposition itself adds, `error · eps · λ_max`. Relative to
    that, errors in a null space are of one size, whatever the scales of the parameters, and half of them are negative,
    which shows how large they are. Kept, the other half would count as data as soon as `1/σ²` lifts it over the prior.
    # [..., d]
    """
    if not values.numel():
        return values
    scale = in_float64((vectors.square().mT @ diagonal.unsqueeze(-1)).squeeze(-1))  # qᵀ diag(M) q [..., d]
    scale = scale + error * values.amax(-1, keepdim=True)
    relative = values / scale.clamp(min=torch.finfo(scale.dtype).tiny)
    noise = 2 * (-relative).amax(-1, keepdim=True).clamp(min=2 * torch.finfo(diagonal.dtype).eps)
    return values.masked_fill(relative <= noise, 0.0)


def _decompose_in_float64(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(in_float64(matrix))


def _decompose_on_host(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(matrix.cpu().double())


def _decompose_by_svd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`M = U diag(s) Vᵀ`, with `U = V` but for signs in a null space; in rising order, as `eigh` has it."""
    U, s, _ = torch.linalg.svd(matrix.cpu().double())
    return s.flip(-1), U.flip(-1)


def _decompose_with_jitter(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers that differ from one entry of the diagonal to the next part equal eigenvalues."""
    matrix = matrix.cpu().double()
    d = matrix.shape[-1]
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)  # [..., 1]
    jitter = 1e-10 * mean * torch.arange(1, d + 1, dtype=torch.float64, device="cpu") / d
    values, vectors = torch.linalg.eigh(matrix + torch.diag_embed(jitter))
    return values - 1e-10 * mean, vectors


def _loses_little(matrix: Tensor) -> bool:
    """By a decomposition in float32."""
    d = matrix.shape[-1]
    return d > _WIDE and not _is_graded(matrix) and (d > _WIDER or not _is_ruled(matrix))


def _is_graded(matrix: Tensor) -> bool:
    """Whether rounding at the size of the trace, a bound of the largest eigenvalue, is a tenth of what the smallest
    diagonal entry is; entries of zero (dead units) have nothing to lose."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)  # [..., d]
    smallest = diagonal.masked_fill(diagonal <= 0, torch.inf).amin(-1)
    return bool((torch.finfo(matrix.dtype).eps * diagonal.sum(-1) > 0.1 * smallest).any())


def _is_ruled(matrix: Tensor) -> bool:
    """Whether a few eigenvalues are so large, as those of inputs with a mean are, that rounding at their size is well
    above that which the entries have themselves: `‖M‖ > 4 √d max(diag M)`."""
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)
    return bool((torch.linalg.matrix_norm(matrix) > 4 * matrix.shape[-1] ** 0.5 * largest).any())


@dataclass(frozen=True, eq=False)
class ParameterBlock:
    """A block of a matrix, the parameters that it is over, and its places in the matrix's own vectors."""

    parameters: tuple[str, ...]
    matrix: Structure
    places: Tensor  # [size]


@dataclass(frozen=True, eq=False)
class InverseTerms:
    """`M⁻¹ = scale · D⁻¹ − (V mix)(V mix)ᵀ`, in float64."""

    diagonal: Structure  # D
    scale: Tensor | float
    columns: Tensor  # V [P, k]
    mix: Tensor  # [k, k]


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """`M = E diag(values) Eᵀ` with `EEᵀ = I`, in float64. `E` may have more columns than rows (see `factor`)."""

    values: Tensor  # [n]
    counts: Tensor  # how many dimensions each column stands for: one in a basis [] or [n]
    groups: Tensor | None  # the group of parameters that a column belongs to [n]
    vectors: Tensor | None = None  # Eᵀv for each row [k, n]


class Structure(ABC):
    """A symmetric positive semi-definite matrix `M` over `P` parameters."""

    name: ClassVar[str | None] = None  # under which files know it
    word: ClassVar[str | None] = None  # by which `structure=` means it, where it can be fitted again
    is_truncated: ClassVar[bool] = False  # whether it is zero in directions where the curvature is not
    is_exact: ClassVar[bool] = True  # whether the form itself leaves nothing out of the block it stands for

    NAMES: ClassVar[dict[str, type[Structure]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(Structure.NAMES, cls, "name")

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of parameters `P`."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def to(self: Self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same matrix on another device or in another dtype."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """`M` itself.  # [P, P]"""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """`diag(M)`.  # [P]"""

    @abstractmethod
    def inverse_diagonal(self) -> Tensor:
        """`diag(M⁻¹)`: the marginal variances where `M` is a precision.  # [P]"""

    @abstractmethod
    def __add__(self: Self, other: Self) -> Self:
        """`M + M'`, of two structures of the same form."""

    def joined(self, other: Structure) -> Structure:
        """`M + M'`, or a matrix of this form for it: Kronecker products add their factors."""
        return self + other

    def grown(self, other: Structure) -> Structure:
        """`M + M'` of two sets of data at the same weights: the matrix of one fit to both."""
        return self + other

    @abstractmethod
    def scale(self: Self, factor: float | Tensor) -> Self:
        """`factor · M`."""

    @abstractmethod
    def add_prior(self: Self, precision: float | Tensor) -> Self:
        """`M + diag(δ)` for a scalar `δ`, or one `δ` per parameter `[P]` (a per-layer prior is one that is constant
        within each layer); exact, and differentiable in `δ`."""

    def add_damping(self: Self, precision: Tensor, split: float = 1.0) -> Self:
        """A Kronecker product damps its factors instead of adding the prior; `split` moves scale between them."""
        return self.add_prior(precision)

    @abstractmethod
    def matmul(self, vectors: Tensor) -> Tensor:
        """`M v` for each row.  # [..., P] -> [..., P]"""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """`M⁻¹ v` for each row.  # [..., P] -> [..., P]"""

    @abstractmethod
    def root_solve(self, vectors: Tensor) -> Tensor:
        """`v R` for each row, with a root `RᵀR = M⁻¹` that the matrix alone determines: the symmetric one, which is the
        same in every basis in which it may have been diagonalised, or a triangular one.  # [..., P] -> [..., P]"""

    @abstractmethod
    def logdet(self) -> Tensor:
        """`log det M`, a scalar; `-inf` for a singular matrix."""

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        """The eigenbasis, in which also each `M + diag(δ)` is diagonal whose `δ` is one number for each of `groups` of
        parameters; None where there is none, or none that is known.  # [k, P], [P]"""
        return None

    def trace_terms(self, other: Structure) -> Tensor:
        """Of `tr(M⁻¹M')`: numbers whose sum over a block of both matrices is that block's own trace.  # [P]"""
        return self.solve(other.to_dense()).diagonal()

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """`n` draws from `N(0, M⁻¹)`.  # [n, P]"""
        device = self.device if generator is None else generator.device
        noise = torch.randn(n, self.size, generator=generator, device=device, dtype=self.dtype)
        return self.root_solve(noise.to(self.device))

    def quadratic(self, J: Tensor) -> Tensor:
        """`J M Jᵀ`.  # [..., K, P] -> [..., K, K]"""
        return J @ self.matmul(J).mT

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        """`J M⁻¹ Jᵀ`: the covariance of `Jθ` for `θ ~ N(0, M⁻¹)`.  # [..., K, P] -> [..., K, K]"""
        return J @ self.solve(J).mT

    @property
    def can_grow(self) -> bool:
        """Whether it has all that `grown` needs."""
        return True

    @property
    def floor(self) -> float | Tensor:
        """A number that is on the whole diagonal beside a PSD matrix, as a prior's: where that is small, it is kept
        apart from the matrix, whose rounding may be larger."""
        return 0.0

    @property
    def named_blocks(self) -> tuple[tuple[str, Structure], ...]:
        """The blocks that it is made of, with their names; none for a matrix that is all of one kind."""
        return ()

    @property
    def sizes(self) -> str:
        """Of what it stores, in a few signs."""
        return f"{self.size}×{self.size}"

    @property
    def has_layer_blocks(self) -> bool:
        """Whether predictions may go layer by layer, and need no Jacobian of all weights."""
        own = type(self)
        return own.layer_blocks is not Structure.layer_blocks or own.inverse_terms is not Structure.inverse_terms

    def parameter_blocks(self, subset: Subset) -> list[ParameterBlock]:
        """The blocks that it is made of; by default it is one itself."""
        return [ParameterBlock(subset.names, self, torch.arange(self.size, device="cpu"))]

    def layer_blocks(self, subset: Subset) -> Callable[[Layout], Structure | None]:
        """What finds the block of a layer by its layout in the concatenation of the subset's parameters; the answer is
        None where `M` does not keep that layer apart from all others."""
        return lambda layout: None

    @classmethod
    def inverse_terms(cls: type[Self], matrices: Sequence[Self]) -> list[InverseTerms] | None:
        """The inverses as a diagonal and a few columns, where they have that form; parts that several of them have in
        common (of several priors) are the same objects."""
        return None

    @classmethod
    def input_basis(cls: type[Self], blocks: Sequence[Self], g: Tensor) -> Tensor | None:
        """What `output_covariances` for these gradients would multiply the inputs with first, for a layer that has its
        own way to do so.  # [G, I, I]"""
        return None

    @classmethod
    def output_covariances(
        cls: type[Self], blocks: Sequence[Self], a: Tensor, g: Tensor, form: CovarianceForm, in_basis: bool = False
    ) -> list[Tensor]:
        """`J M⁻¹ Jᵀ` of one layer for several blocks `M` in one eigenbasis (several priors), from its inputs `a`
        `[G, B, T, I]` and the gradients `g` `[K, G, B, T, O]` of the network's outputs; see `output_covariance`. The
        inputs may be in their `input_basis` already."""
        rows = form.arrange(layer_jacobian(a, g))
        return [form.quadratic(block, rows) for block in blocks]

    def to_state(self) -> dict[str, Any]:
        """Its name and parts; a subclass without a name of its own is stored as its parent."""
        if self.name is None:
            raise StructureError(f"{type(self).__name__} cannot be saved: give the class a name")
        return {"type": self.name, **self.parts()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Structure:
        """The structure that `to_state` described."""
        parts = dict(state)
        name = parts.pop("type")
        if name not in Structure.NAMES:
            raise StructureError(f"no structure named {name!r} is known: import the file that defines it")
        return Structure.NAMES[name].from_parts(parts)

    def parts(self) -> dict[str, Any]:
        """What it is made of, as tensors, numbers, strings and lists of them; a dataclass's fields by default."""
        if not is_dataclass(self):
            raise StructureError(f"{type(self).__name__} cannot be saved: give it a method parts")
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_parts(cls: type[Self], parts: dict[str, Any]) -> Self:
        return cls(**parts)

    @staticmethod
    def _one_group(groups: Tensor | None) -> bool:
        return groups is None or bool((groups == groups[0]).all())

    def _check_same_form(self, other: Structure) -> None:
        same = isinstance(other, type(self)) or isinstance(self, type(other))
        if not same or self.size != other.size:
            raise StructureError(
                f"cannot add {type(other).__name__} of size {other.size} to {type(self).__name__} of size {self.size}: "
                "both must have the same form and size"
            )

    def _check_prior(self, precision: float | Tensor) -> Tensor:
        """The prior as a tensor, a scalar or `[P]`."""
        precision = torch.as_tensor(precision, dtype=self.dtype, device=self.device)
        if precision.shape not in ((), (1,), (self.size,)):
            raise StructureError(
                f"a prior precision of shape {tuple(precision.shape)} fits neither a scalar nor one value for each of "
                f"the {self.size} parameters"
            )
        return precision.reshape(()) if precision.shape == (1,) else precision
