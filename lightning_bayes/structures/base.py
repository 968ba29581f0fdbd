"""The contract of a structure: a symmetric positive semi-definite matrix `M` over `P` parameters; and `Layout`, the
positions of its blocks.

Structures are immutable values. Vectors are rows, so a stack of vectors is `[..., P]`. `H.add_prior(δ)` turns a
curvature `H` into a precision; `sample` then draws from the Gaussian with that precision, `N(0, M⁻¹)`.

To define a structure, write a frozen dataclass with the abstract methods, and give it a `name`, so that posteriors with
this structure can be saved. The inherited methods are correct for any matrix. Override `layer_blocks` and
`output_covariances` for faster predictions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from lightning_bayes.arguments import register
from lightning_bayes.network.subset import Subset
from lightning_bayes.structures.factor import Factor
from lightning_bayes.structures.output_covariance import CovarianceForm, layer_jacobian

PART = 2**20  # numbers drawn by one thread
Self = TypeVar("Self", bound="Structure")
T = TypeVar("T")


class StructureError(ValueError):
    """This form of matrix does not support the operation, or does not support these arguments."""


def positive(eigenvalues: Tensor) -> Tensor:
    """Check the eigenvalues of a matrix before it is inverted: a singular matrix raises an error."""
    if not (eigenvalues > 0).all():
        raise StructureError(
            f"the matrix is not positive definite (smallest eigenvalue {eigenvalues.min().item():.3g}): add a prior "
            "precision before solving or sampling, or increase it"
        )
    return eigenvalues


@dataclass(frozen=True)
class Piece:
    """A consecutive part of the flat vector, from `start`, that stores an array of this `shape`. After
    `permute(order)`, the first two dimensions of the array are the block's groups and rows, and the other dimensions
    are its columns."""

    start: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def permuted_shape(self) -> tuple[int, ...]:
        return self.shape if self.order is None else tuple(self.shape[d] for d in self.order)

    @property
    def columns(self) -> int:
        return prod(self.permuted_shape[2:])


@dataclass(frozen=True)
class Layout:
    """The positions of a block's entries in the flat vector: pieces whose columns, side by side, form `[g, O, I]`.

    The flat vector follows `named_parameters`: a layer's whole weight, then its bias. A Kronecker block needs the joint
    matrix `[W b]` of shape `[g, O, I + 1]`, row by row, and a transposed convolution stores its weight as `[I, O, k]`.
    Slices and permutations convert between the flat vector and the block without index vectors.

    >>> layout = Layout((Piece(0, (1, 2, 3)), Piece(6, (1, 2, 1))))  # a Linear(3, 2): weight first, then bias
    >>> layout.gather(torch.arange(8)).tolist()
    [0, 1, 2, 6, 3, 4, 5, 7]
    """

    pieces: tuple[Piece, ...]

    @staticmethod
    def vector(runs: list[tuple[int, int]]) -> Layout:
        """The layout of a block that is not a matrix: parts of the flat vector, each given as `(start, size)`."""
        return Layout(tuple(Piece(start, (1, 1, size)) for start, size in runs))

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        g, O = self.pieces[0].permuted_shape[:2]
        return g, O, sum(piece.columns for piece in self.pieces)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def gather(self, flat: Tensor) -> Tensor:
        """The block's entries, in the order of the block.  # [..., P] -> [..., g·O·I]"""
        lead = flat.ndim - 1
        columns = []
        for piece in self.pieces:
            part = flat[..., piece.start : piece.start + piece.size].unflatten(-1, piece.shape)
            if piece.order is not None:
                part = part.permute(*range(lead), *(lead + d for d in piece.order))
            columns.append(part.flatten(lead + 2))
        block = columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)
        return block.flatten(lead)

    def scatter(self, block: Tensor, flat: Tensor) -> None:
        """Write the block's entries to their positions in `flat`, in place.  # [..., g·O·I] into [..., P]"""
        lead = flat.ndim - 1
        parts = block.unflatten(-1, self.shape).split([piece.columns for piece in self.pieces], dim=-1)
        for piece, part in zip(self.pieces, parts, strict=True):
            part = part.unflatten(-1, piece.permuted_shape[2:])
            if piece.order is not None:
                inverse = sorted(range(len(piece.order)), key=piece.order.__getitem__)
                part = part.permute(*range(lead), *(lead + d for d in inverse))
            flat[..., piece.start : piece.start + piece.size] = part.flatten(lead)


@dataclass(frozen=True, eq=False)
class ParameterBlock:
    """A block of a matrix, the parameters it covers, and the positions of its entries in the matrix's vectors."""

    parameters: tuple[str, ...]
    matrix: Structure
    places: Tensor  # [size]


@dataclass(frozen=True, eq=False)
class InverseTerms:
    """`M⁻¹ = scale · D⁻¹ + sign · (V mix)(V mix)ᵀ`, in float64 if the two terms may nearly cancel."""

    diagonal: Structure  # D
    scale: Tensor | float
    columns: Tensor  # V [P, k]
    mix: Tensor  # [k, k]
    sign: int = -1


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """`M = E diag(values) Eᵀ` with `EEᵀ = I`, in float64. `E` may have more columns than rows (see `factor`)."""

    values: Tensor  # [n]
    counts: Tensor  # the number of dimensions each column represents; 1 if `E` is a basis. [] or [n]
    groups: Tensor | None  # the parameter group of each column [n]
    vectors: Tensor | None = None  # Eᵀv for each vector v that was passed [k, n]

    def without_zeros(self) -> Eigenbasis:
        """The columns whose values are not zero, without vectors."""
        kept = self.values != 0
        counts = self.counts[kept] if self.counts.ndim else self.counts
        return Eigenbasis(self.values[kept], counts, None if self.groups is None else self.groups[kept])


@dataclass(frozen=True, eq=False)
class LayerMoves:
    """Random changes of a layer's outputs, as a function of standard normal numbers."""

    size: int  # numbers per draw
    moves: Callable[[Tensor], Tensor]  # [n, size] -> [n, G, B, T, O]


class Structure(ABC):
    """A symmetric positive semi-definite matrix `M` over `P` parameters."""

    name: ClassVar[str | None] = None  # identifies the class in files
    word: ClassVar[str | None] = None  # the value of `structure=` with which a fit gives this structure
    # Whether the matrix is zero in some directions in which the curvature is not zero
    is_truncated: ClassVar[bool] = False
    is_exact: ClassVar[bool] = True  # whether this form represents every block of a curvature exactly

    NAMES: ClassVar[dict[str, type[Structure]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(Structure.NAMES, cls, "name")

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of parameters `P`."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """`M` itself.  # [P, P]"""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """`diag(M)`.  # [P]"""

    @abstractmethod
    def inverse_diagonal(self) -> Tensor:
        """`diag(M⁻¹)`: the marginal variances if `M` is a precision.  # [P]"""

    @abstractmethod
    def __add__(self: Self, other: Self) -> Self:
        """`M + M'` for two structures of the same form."""

    @abstractmethod
    def scale(self: Self, factor: float | Tensor) -> Self:
        """`factor · M`."""

    @abstractmethod
    def add_prior(self: Self, precision: float | Tensor) -> Self:
        """`M + diag(δ)` for a scalar `δ`, or one `δ` per parameter `[P]` (a per-layer prior is constant within each
        layer); exact, and differentiable in `δ`."""

    @abstractmethod
    def matmul(self, vectors: Tensor) -> Tensor:
        """`M v` for each row.  # [..., P] -> [..., P]"""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """`M⁻¹ v` for each row.  # [..., P] -> [..., P]"""

    @abstractmethod
    def root_solve(self, vectors: Tensor) -> Tensor:
        """`v R` for each row, with a root `RᵀR = M⁻¹` that depends only on `M`, not on the basis of a decomposition:
        the symmetric root, or a triangular one.  # [..., P] -> [..., P]"""

    @abstractmethod
    def logdet(self) -> Tensor:
        """`log det M`, a scalar; `-inf` for a singular matrix."""

    @property
    def dtype(self) -> torch.dtype:
        return next(_tensors_in(self)).dtype

    @property
    def device(self) -> torch.device:
        return next(_tensors_in(self)).device

    def to(self: Self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same matrix on another device or in another dtype."""

        def move(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple(map(move, part))
            return part.to(device=device, dtype=dtype) if hasattr(part, "to") else part

        return replace(self, **{name: move(part) for name, part in self._fields().items()})  # type: ignore[type-var]

    def add_approximately(self, other: Structure) -> Structure:
        """`M + M'`, or its approximation in this form: Kronecker products add their factors."""
        return self + other

    def add_data(self, other: Structure) -> Structure:
        """`M + M'` for the matrices of two datasets at the same weights: the matrix that one fit to both datasets would
        have."""
        return self + other

    @property
    def can_add_data(self) -> bool:
        """Whether this matrix stores everything that `add_data` needs."""
        return True

    def add_damping(self: Self, precision: Tensor, split: float = 1.0) -> Self:
        """Add the prior. A Kronecker product adds the root of the prior to each factor instead (damping); `split` moves
        scale between the two factors."""
        return self.add_prior(precision)

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        """A basis in which `M + diag(δ)` is diagonal for every `δ` that is constant within each of `groups` of
        parameters, or None if no such basis is known.  # [k, P], [P]"""
        return None

    def trace_terms(self, other: Structure) -> Tensor:
        """Terms of `tr(M⁻¹M')`, one per parameter. The terms of a block that both matrices have sum to the trace of
        this block.  # [P]"""
        return self.solve(other.to_dense()).diagonal()

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """`n` draws from `N(0, M⁻¹)`.  # [n, P]"""
        return self.root_solve(self._noise(n, generator))

    def _noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        """PyTorch draws in one thread, so each large part has its own generator, seeded by this one.  # [n, P]"""
        device = self.device if generator is None else generator.device
        if device.type != "cpu" or n * self.size <= PART:
            noise = torch.randn(n, self.size, generator=generator, device=device, dtype=self.dtype)
            return noise.to(self.device)
        with torch.inference_mode(False):  # threads may not write to inference tensors
            noise = torch.empty(n, self.size, dtype=self.dtype, device=device)
            parts = noise.flatten().split(PART)
        seed = int(torch.randint(2**32, (), generator=generator, device=device))

        def fill(i: int) -> None:
            parts[i].normal_(generator=torch.Generator(device).manual_seed(seed + i))

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, range(len(parts))))
        return noise.to(self.device)

    def quadratic(self, J: Tensor) -> Tensor:
        """`J M Jᵀ`.  # [..., K, P] -> [..., K, K]"""
        return J @ self.matmul(J).mT

    def inverse_quadratic(self, J: Tensor) -> Tensor:
        """`J M⁻¹ Jᵀ`: the covariance of `Jθ` for `θ ~ N(0, M⁻¹)`.  # [..., K, P] -> [..., K, K]"""
        return J @ self.solve(J).mT

    @property
    def floor(self) -> float | Tensor:
        """The part of the diagonal, such as a prior, that is stored apart from a PSD matrix. A small prior could be
        lost in the rounding of that matrix."""
        shift = getattr(self, "shift", 0.0)
        return shift.min() if isinstance(shift, Tensor) else shift

    @property
    def named_blocks(self) -> tuple[tuple[str, Structure], ...]:
        """The blocks of the matrix with their names; empty if it has no blocks."""
        return ()

    @property
    def sizes(self) -> str:
        """The sizes of the stored arrays, for summaries."""
        return f"{self.size}×{self.size}"

    @property
    def has_layer_blocks(self) -> bool:
        """Whether predictions can be computed layer by layer, without a Jacobian of all weights."""
        cls = type(self)
        return cls.layer_blocks is not Structure.layer_blocks or cls.inverse_terms is not Structure.inverse_terms

    def parameter_blocks(self, subset: Subset) -> list[ParameterBlock]:
        """The blocks of the matrix; by default one block with all parameters."""
        return [ParameterBlock(subset.names, self, torch.arange(self.size, device="cpu"))]

    def input_factor(self, rows: Tensor) -> Factor:
        """`Σ_o M_oo` over the rows of a layer's matrix, given the positions of its entries.  # [O, I] -> [1, I, I]"""
        total = torch.zeros(rows.shape[1], rows.shape[1], dtype=self.dtype, device=self.device)
        for row in rows.to(self.device):
            for start in range(0, len(row), step := max(1, 2**26 // self.size)):
                part = slice(start, start + step)
                units = total.new_zeros(len(row[part]), self.size)
                units[torch.arange(len(units), device=self.device), row[part]] = 1
                total[part] += self.matmul(units)[:, row]
        return Factor.from_matrix(total.unsqueeze(0))

    def layer_blocks(self, subset: Subset) -> Callable[[Layout], Structure | None]:
        """A function from a layer's layout, in the concatenation of the subset's parameters, to the layer's block. It
        returns None if `M` has entries between that layer and another."""
        return lambda layout: None

    @classmethod
    def inverse_terms(cls: type[Self], matrices: Sequence[Self]) -> list[InverseTerms] | None:
        """The inverse of each matrix as a diagonal and a few columns, or None if the inverses do not have this form. If
        several matrices share a part (as with several priors), the results share the same object for this part."""
        return None

    @classmethod
    def input_basis(cls: type[Self], blocks: Sequence[Self], g: Tensor) -> Tensor | None:
        """The matrix by which `output_covariances` would first multiply the inputs for these gradients. Some layers can
        compute this product faster themselves.  # [G, I, I]"""
        return None

    @classmethod
    def output_covariances(
        cls: type[Self], blocks: Sequence[Self], a: Tensor, g: Tensor, form: CovarianceForm, in_basis: bool = False
    ) -> list[Tensor]:
        """`J M⁻¹ Jᵀ` of one layer for several blocks `M` that share an eigenbasis (several priors), from the layer's
        inputs `a` `[G, B, T, I]` and the gradients `g` `[K, G, B, T, O]` of the network's outputs; see
        `output_covariance`. With `in_basis`, the inputs are already multiplied by `input_basis`."""
        return cls.row_covariances(blocks, form.arrange(layer_jacobian(a, g)), form)

    @classmethod
    def row_covariances(cls: type[Self], blocks: Sequence[Self], rows: Tensor, form: CovarianceForm) -> list[Tensor]:
        """`J M⁻¹ Jᵀ` for several blocks `M` that share an eigenbasis, from arranged rows of the Jacobian."""
        return [form.quadratic(block, rows) for block in blocks]

    def layer_moves(self, a: Tensor, shape: tuple[int, ...]) -> LayerMoves:
        """Draws of `V a` for a layer's weights `V ~ N(0, M⁻¹)` of this shape `(G, O, I)` and inputs `a` `[G, B, T, I]`.
        They have the right law for each example, not for several examples together."""

        def moves(noise: Tensor) -> Tensor:
            V = self.root_solve(noise).unflatten(-1, shape)  # [n, G, O, I]
            rows = V.permute(1, 3, 0, 2).flatten(2)  # [G, I, n·O]
            z = (a.flatten(1, 2) @ rows).unflatten(-1, (len(noise), shape[1])).unflatten(1, a.shape[1:3])
            return z.permute(3, 0, 1, 2, 4)

        return LayerMoves(self.size, moves)

    def to_state(self) -> dict[str, Any]:
        """The name and the parts, for a file. A subclass without its own name is stored as its parent class."""
        if self.name is None:
            raise StructureError(f"{type(self).__name__} cannot be saved: give the class a name")
        return {"type": self.name, **self.parts()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Structure:
        """The structure described by `to_state`."""
        parts = dict(state)
        name = parts.pop("type")
        if name not in Structure.NAMES:
            raise StructureError(f"unknown structure {name!r}: import the file that defines it")
        return Structure.NAMES[name].from_parts(parts)

    def parts(self) -> dict[str, Any]:
        """The fields as tensors, numbers, strings and lists of these."""
        return self._fields()

    @classmethod
    def from_parts(cls: type[Self], parts: dict[str, Any]) -> Self:
        return cls(**parts)

    def _fields(self) -> dict[str, Any]:
        if not is_dataclass(self):
            raise StructureError(f"{type(self).__name__} must be a dataclass, or define dtype, device, to and parts")
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def _is_in_graph(self) -> bool:
        return any(t.requires_grad for t in _tensors_in(self))

    @staticmethod
    def _is_one_group(groups: Tensor | None) -> bool:
        return groups is None or bool((groups == groups[0]).all())

    def _check_same_form(self, other: Structure) -> None:
        same = isinstance(other, type(self)) or isinstance(self, type(other))
        if not same or self.size != other.size:
            raise StructureError(
                f"cannot add {type(other).__name__} of size {other.size} to {type(self).__name__} of size {self.size}: "
                "both must have the same form and size"
            )

    def _check_prior(self, precision: float | Tensor) -> Tensor:
        """The prior precision as a tensor, a scalar or `[P]`."""
        precision = torch.as_tensor(precision, dtype=self.dtype, device=self.device)
        if precision.shape not in ((), (1,), (self.size,)):
            raise StructureError(
                f"a prior precision of shape {tuple(precision.shape)} is neither a scalar nor one value for each of "
                f"the {self.size} parameters"
            )
        return precision.reshape(()) if precision.shape == (1,) else precision


class cached_outside_graphs(Generic[T]):
    """A property of a structure that is computed once, unless the structure is part of an autograd graph: a value
    cached under `no_grad` would cut the graph. Inference tensors are not cached either."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._key = compute, f"cached {compute.__name__}"

    def __get__(self, structure: Structure, owner: type) -> T:
        if structure._is_in_graph:
            return self._compute(structure)
        values = structure.__dict__
        if self._key not in values:
            with torch.inference_mode(False):
                values[self._key] = self._compute(structure)
        return values[self._key]


def _tensors_in(part: Any) -> Iterator[Tensor]:
    """All tensors in the fields of a structure, in order."""
    if isinstance(part, Tensor):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors_in(getattr(part, field.name))
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors_in(item)
