"""A Kronecker product in its eigenbasis, to which a prior is added exactly.

With `G = Q_G Λ_G Q_Gᵀ` and `A = Q_A Λ_A Q_Aᵀ`,

    G ⊗ A + δI = (Q_G ⊗ Q_A) diag(λ_G λ_Aᵀ + δ) (Q_G ⊗ Q_A)ᵀ,

so every operation is two small rotations and an elementwise product (tutorial, section 4; GLM paper, eq. (8)). A vector
is read as a row-major matrix `V` of shape `[O, I]`, and `(G ⊗ A) vec(V) = vec(G V A)`. A truncated factor has a frame
`E` instead of `Q` (see `factor`), with one eigenvalue for each column of the frame. A grouped layer is `g` independent
products of one size in a leading batch dimension: all arrays are `[g, O, I]`.

EKFAC (George et al. 2018) keeps the eigenvectors and refits the eigenvalues,

    M = (Q_G ⊗ Q_A) diag(Λ) (Q_G ⊗ Q_A)ᵀ,

where `Λ` `[g, O, I]` is any nonnegative array instead of the outer product `λ_G λ_Aᵀ`. Among all `Λ`, `diag(QᵀHQ)` has
the smallest Frobenius error for a block `H`, and preserves its trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bayes.network.float64 import cast_like, eigh, in_float64
from lightning_bayes.structures.base import (
    Eigenbasis,
    LayerMoves,
    Structure,
    StructureError,
    cached_outside_graphs,
    positive,
)
from lightning_bayes.structures.block_diagonal import BlockDiagonal
from lightning_bayes.structures.factor import Factor
from lightning_bayes.structures.output_covariance import (
    CovarianceForm,
    GroupedSpectrum,
    inputs_first,
    rotate_gradients,
    rotate_inputs,
    rotated_covariances,
)

NARROW = 64  # with at most this many columns, fewer multiplications save no time
FEW_POSITIONS = 16  # with more, draws of a layer's outputs take a draw of its weights
JITTER = 64  # times eps: relative to its largest variance, what a singular covariance of positions gets for its root
NEGLIGIBLE = 2**13  # times eps: draws ignore smaller λμ/δ, which in float32 changes standard deviations by up to .0005


@dataclass(frozen=True, eq=False)
class Kronecker(Structure):
    """`M = (Q_G ⊗ Q_A) diag(λ_G λ_Aᵀ + shift) (Q_G ⊗ Q_A)ᵀ`, one such matrix for each of `g` groups."""

    name: ClassVar[str] = "Kronecker"
    is_exact: ClassVar[bool] = False

    left: Factor  # G: [g, O]
    right: Factor  # A: [g, I]
    shift: Tensor | float = 0.0  # a scalar, or the shape of `values`
    rows: float | None = None  # the number of inputs that A averages, if known

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.left.values.shape[0], self.left.size, self.right.size

    @property
    def size(self) -> int:
        g, O, I = self.shape
        return g * O * I

    @property
    def can_add_data(self) -> bool:
        return self.left.can_add_data and self.right.can_add_data

    @property
    def products(self) -> Tensor:
        """`λ_G λ_Aᵀ`, with the remainder of a factor last.  # [g, O, I]"""
        return self.left.spectrum.unsqueeze(-1) * self.right.spectrum.unsqueeze(-2)

    @property
    def values(self) -> Tensor:
        """The eigenvalues.  # [g, O, I]"""
        return self.products + self.shift

    @property
    def sizes(self) -> str:
        g, factors = self.shape[0], (self.left, self.right)
        left, right = (f"{f.size}" if f.vectors is None else f"{f.size}×{f.values.shape[1]}" for f in factors)
        return f"{left} ⊗ {right}" if g == 1 else f"{g} of {left} ⊗ {right}"

    def rotate(self, vectors: Tensor) -> Tensor:
        """Into the eigenbasis: `Q_Gᵀ V Q_A`.  # [..., P] -> [..., g, O, I], or larger for a frame"""
        return self.left.rotate(self.right.rotate(vectors.unflatten(-1, self.shape)), -2)

    def rotate_back(self, V: Tensor) -> Tensor:
        """Out of the eigenbasis: `Q_G V Q_Aᵀ`.  # [..., g, O, I] -> [..., P]"""
        return self.left.rotate_back(self.right.rotate_back(V), -2).flatten(-3)

    def to_dense(self) -> Tensor:
        return self.matmul(torch.eye(self.size, dtype=self.dtype, device=self.device))

    def diagonal(self) -> Tensor:
        return self._diagonal_of(self.values)

    def inverse_diagonal(self) -> Tensor:
        return self._diagonal_of(positive(self.values).reciprocal())

    def __add__(self, other: Kronecker) -> Kronecker:
        self._checked(other)
        if self.left.vectors is not other.left.vectors or self.right.vectors is not other.right.vectors:
            raise StructureError(
                "the sum of two Kronecker products in different bases is not a Kronecker product: "
                "sum their factors over the data first, then decompose once"
            )
        return replace(self, shift=self.shift + other.values)

    def add_approximately(self, other: Structure) -> Kronecker:
        """`(G + G') ⊗ (sA + s'A')` with the shares `s = tr G / tr(G + G')`. This Kronecker product approximates the sum
        `M + M'` (Ritter et al. 2018), has the same trace, and equals `M'` if `M` is zero."""
        other = self._checked(other)
        trace = self.left.trace  # [g, 1]
        share = trace / (trace + other.left.trace).clamp(min=torch.finfo(self.dtype).tiny)
        return self._summed(other, share, 1 - share, keep_matrix=False)

    def add_data(self, other: Structure) -> Kronecker:
        """`(G + G') ⊗ (rA + r'A')/(r + r')`, where `A` averages `r` inputs and `A'` averages `r'`."""
        other = self._checked(other)
        if self.rows is None or other.rows is None:
            raise StructureError("the number of inputs in its factors is unknown: fit the posterior again")
        total = self.rows + other.rows
        share = self.rows / total if total else 0.0  # zero for a layer that no example has used
        return replace(self._summed(other, share, 1 - share, keep_matrix=True), rows=total)

    def _checked(self, other: Structure) -> Kronecker:
        self._check_same_form(other)
        assert isinstance(other, Kronecker)
        if self.shape != other.shape:
            raise StructureError(f"cannot add Kronecker products of shapes {self.shape} and {other.shape}")
        return other

    def _summed(self, other: Kronecker, share: float | Tensor, rest: float | Tensor, keep_matrix: bool) -> Kronecker:
        right = self.right.scale(share).plus(other.right.scale(rest), keep_matrix)
        return Kronecker(self.left.plus(other.left, keep_matrix), right, self.shift + other.shift)

    def scale(self, factor: float | Tensor) -> Kronecker:
        return replace(self, left=self.left.scale(factor), shift=self.shift * factor)

    def add_prior(self, precision: float | Tensor) -> Kronecker:
        precision = self._check_prior(precision)
        if precision.ndim and not (precision == precision[0]).all():
            raise StructureError(
                "a Kronecker block takes one prior precision for the whole layer: use a scalar or per-layer prior, or "
                "structure='diag' or 'full'"
            )
        left, right = self.left.without_matrix(), self.right.without_matrix()  # data cannot be added to a precision
        return replace(self, left=left, right=right, shift=self.shift + precision.flatten()[0])

    def add_damping(self, precision: Tensor, split: float = 1.0) -> Kronecker:
        """`(G/split + √δ) ⊗ (A·split + √δ)`, which differs from the exact sum by cross terms."""
        left, right = self.left.scale(1 / split), self.right.scale(split)
        return replace(self, left=left.damped(precision.sqrt()), right=right.damped(precision.sqrt()))

    def matmul(self, vectors: Tensor) -> Tensor:
        return self._multiply(self.values, vectors)

    def solve(self, vectors: Tensor) -> Tensor:
        return self._multiply(positive(self.values).reciprocal(), vectors)

    def root_solve(self, vectors: Tensor) -> Tensor:
        if self._partial_root is None:
            return self._multiply(self._inverse_roots, vectors)
        return self._partial_root.times(vectors.unflatten(-1, self.shape)).flatten(-3)

    def logdet(self) -> Tensor:
        log_values = self.right.times_multiplicity(self.values.log(), -1)
        return self.left.times_multiplicity(log_values, -2).sum()

    def eigenbasis(self, vectors: Tensor | None = None, groups: Tensor | None = None) -> Eigenbasis | None:
        if not self._is_one_group(groups):
            return None
        values = in_float64(self._expand(self.values).flatten())
        counts = self.left.column_counts.unsqueeze(-1) * self.right.column_counts  # [O, I]
        rotated = None if vectors is None else in_float64(self.rotate(cast_like(vectors, self.left.values)).flatten(-3))
        groups = None if groups is None else groups[:1].expand(len(values))
        return Eigenbasis(values, counts.to(values).repeat(self.shape[0], 1, 1).flatten(), groups, rotated)

    def trace_terms(self, other: Structure) -> Tensor:
        """The diagonal of `QᵀM'Q`, divided by the eigenvalues."""
        other = self._checked(other)
        G, A = other.left.spectrum_in(self.left), other.right.spectrum_in(self.right)
        terms = (G.unsqueeze(-1) * A.unsqueeze(-2) + other.shift) / positive(self.values)
        return self.left.expand(self.right.expand(terms, -1, frame=False), -2, frame=False).flatten()

    @cached_outside_graphs
    def _inverse_roots(self) -> Tensor:
        """The inverse roots of the eigenvalues. Cached, because every draw needs them and `positive` waits for the
        device."""
        return positive(self.values).rsqrt()

    @cached_outside_graphs
    def _partial_root(self) -> PartialRoot | None:
        """`M^(-1/2)` by the eigenvectors that the data determine, or None if a full rotation costs less, or if `δ` is
        not a positive scalar."""
        left, right, δ = self.left, self.right, torch.as_tensor(self.shift).to(self.left.values)
        if left.vectors is None or right.vectors is None or δ.ndim or not δ > 0 or self._is_in_graph:
            return None
        seen = (self.products > NEGLIGIBLE * torch.finfo(δ.dtype).eps * δ).any(0)  # [O, I]
        columns = _most_first(seen.sum(0))
        numbers = torch.arange(1, len(columns) + 1, device=seen.device)
        widths = (seen[:, columns] * numbers).amax(1) if len(columns) else seen.sum(1)
        rows = _most_first(widths)
        if any(len(n) and n.max() >= f.values.shape[-1] for n, f in ((rows, left), (columns, right))):
            return None  # the remainder is too large to be ignored
        changes = self._inverse_roots[:, rows][..., columns] - δ.rsqrt()
        root = PartialRoot.of(left.vectors[..., rows], right.vectors[..., columns], changes, widths[rows], δ.rsqrt())
        return root if root.work < (left.size + right.size) * left.size * right.size else None

    @cached_outside_graphs
    def _inverse_values(self) -> Tensor:
        """The inverse eigenvalues. Cached, because every prediction needs them."""
        return self.left.expand(self.values.reciprocal(), -2)

    @classmethod
    def _on_nonzero_inputs(cls, blocks: Sequence[Kronecker], a: Tensor) -> tuple[Sequence[Kronecker], Tensor]:
        """The blocks and inputs without the input coordinates that are zero both in the training data and in this
        batch."""
        right = blocks[0].right
        live, nonzero = right.live.to(a.device), a.ne(0).flatten(0, 2).any(0)
        rows = live | nonzero
        restricted = None if _is_most(rows) else right.on_live if not (nonzero & ~live).any() else right.on(rows)
        if restricted is None:
            return blocks, a
        factor, columns = restricted
        if factor.remainder is not None:  # the remainder is the last column of `values`
            columns = torch.cat([columns, columns.new_tensor([right.values.shape[-1]])])
        return [block._with_inputs(factor, columns) for block in blocks], a[..., rows]

    def _with_inputs(self, right: Factor, columns: Tensor) -> Kronecker:
        scaled = replace(right, values=self.right.values[:, columns[: right.values.shape[-1]]])
        shift = self.shift[..., columns] if isinstance(self.shift, Tensor) and self.shift.ndim else self.shift
        return replace(self, right=scaled, shift=shift)

    @classmethod
    def input_basis(cls, blocks: Sequence[Kronecker], g: Tensor) -> Tensor | None:
        first = blocks[0].right
        same = all(block.right.vectors is first.vectors and block.right.remainder is None for block in blocks)
        return first.vectors if same and inputs_first(g) and first.is_mostly_live else None

    @classmethod
    def output_covariances(
        cls, blocks: Sequence[Kronecker], a: Tensor, g: Tensor, form: CovarianceForm, in_basis: bool = False
    ) -> list[Tensor]:
        left, right = blocks[0].left, blocks[0].right
        if any(block.left.vectors is not left.vectors for block in blocks):  # the blocks have different bases
            return [cls.output_covariances([block], a, g, form, in_basis)[0] for block in blocks]
        if not in_basis and right.vectors is not None and not right.is_mostly_live:
            blocks, a = cls._on_nonzero_inputs(blocks, a)
            right = blocks[0].right
        if form.approximate and not form.joint and cls._differ_by_shifts(blocks):
            shifts = torch.stack([torch.as_tensor(block.shift) for block in blocks])
            λ, μ = (factor.expand(factor.spectrum, -1)[0] for factor in (left, right))
            spectrum = GroupedSpectrum.of(λ, μ, shifts)
            a = a if in_basis else rotate_inputs(a, right.rotate)
            return spectrum.covariances(a, rotate_gradients(g, left.rotate), form)
        variances = [block._inverse_values for block in blocks]
        tail = 1 if right.remainder is None else right.size
        return rotated_covariances(variances, a, g, form, left.rotate, None if in_basis else right.rotate, tail)

    def layer_moves(self, a: Tensor, shape: tuple[int, ...]) -> LayerMoves:
        """With few positions, `V a` of one example is a small Gaussian: with `ã = E_Aᵀ a`, the rows of `E_Gᵀ V a` are
        independent, and row `o` has the covariance `S_o = Σ_i W_oi ã_i ã_iᵀ` `[T, T]`. The draws are
        `E_G (L_o (E_Gᵀ ε)_o)` with `L_o L_oᵀ = S_o`; they need `G·T·O` random numbers instead of `G·O·I`."""
        O, T = self.shape[1], a.shape[2]
        live = None if self.right.vectors is None else self.right.live
        I = self.right.size if live is None else int(live.sum())
        if T > FEW_POSITIONS or T + O > I + I * (O + I) // (64 * T):  # per draw, with weights for 64 examples
            return super().layer_moves(a, shape)
        (block,), a = ([self], a) if live is None or _is_most(live) else self._on_nonzero_inputs([self], a)
        right = block.right
        roots = _position_roots(rotate_inputs(a, right.rotate), right.expand(block._inverse_values, -1))

        def moves(noise: Tensor) -> Tensor:
            ε = noise.unflatten(-1, (shape[0], T, O)).transpose(0, 1)  # [G, n, T, O]
            z = self.left.rotate(ε.flatten(1, 2)).unflatten(1, ε.shape[1:3])
            if T == 1:
                z = roots.unsqueeze(1) * z.unsqueeze(2)  # [G, n, B, 1, O]
            else:
                z = (roots @ z.permute(0, 3, 2, 1).unsqueeze(1)).permute(0, 4, 1, 3, 2)  # [G, n, B, T, O]
            return self.left.rotate_back(z.flatten(1, 3)).unflatten(1, z.shape[1:4]).transpose(0, 1)

        return LayerMoves(shape[0] * T * O, moves)

    def input_factor(self, rows: Tensor) -> Factor:
        values = self.left.times_multiplicity(self.values, -2).sum(-2)  # [g, I]
        k = self.right.values.shape[-1]
        return Factor(self.right.vectors, values[:, :k], None, values[:, k:] if k < values.shape[-1] else None)

    @classmethod
    def _differ_by_shifts(cls, blocks: Sequence[Kronecker]) -> bool:
        """Whether several blocks of one group are `G ⊗ A + δI` with the same factors."""
        first = blocks[0]
        return (
            len(blocks) > 1
            and first.shape[0] == 1
            and not any(isinstance(block, EKFAC) or torch.as_tensor(block.shift).ndim for block in blocks)
            and all(first.left.equals(block.left) and first.right.equals(block.right) for block in blocks[1:])
        )

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "left": self.left.to_list(), "right": self.right.to_list()}

    @classmethod
    def from_parts(cls, parts: dict[str, Any]) -> Kronecker:
        return cls(**{**parts, "left": Factor(*parts["left"]), "right": Factor(*parts["right"])})

    def _expand(self, values: Tensor) -> Tensor:
        """Expand `values` to one number for each pair of columns of the two frames."""
        return self.left.expand(self.right.expand(values, -1), -2)

    def _multiply(self, values: Tensor, vectors: Tensor) -> Tensor:
        """`(Q_G ⊗ Q_A) diag(values) (Q_G ⊗ Q_A)ᵀ v`. The remainder of `A` has one value for each eigenvalue of `G`. If
        that remainder is zero, these values are all equal, and the part outside of the eigenvectors of `A` needs no
        rotation.  # [..., P]"""
        V, Q, k = vectors.unflatten(-1, self.shape), self.right.vectors, self.right.values.shape[-1]
        if Q is None or self.right.remainder is None:
            return self.rotate_back(self.rotate(vectors) * self._expand(values))
        inside = V @ Q
        rest = V - inside @ Q.mT
        is_constant = self.right.is_complete and not (isinstance(self.shift, Tensor) and self.shift.ndim)
        rest = rest * values[..., :1, k:] if is_constant else self._multiply_left(values[..., k:], rest)
        return (self._multiply_left(values[..., :k], inside) @ Q.mT + rest).flatten(-3)

    def _multiply_left(self, values: Tensor, V: Tensor) -> Tensor:
        """`Q_G (values ∘ Q_Gᵀ V)`.  # [..., g, O, n]"""
        return self.left.rotate_back(self.left.rotate(V, -2) * self.left.expand(values, -2), -2)

    def _diagonal_of(self, values: Tensor) -> Tensor:
        """The diagonal of `(Q_G ⊗ Q_A) diag(values) (Q_G ⊗ Q_A)ᵀ`, by squared eigenvectors.  # [P]"""
        if self.right.vectors is not None:
            values = values @ self.right.squares.mT
        if self.left.vectors is not None:
            values = self.left.squares @ values
        return values.flatten()


@dataclass(frozen=True, eq=False)
class PartialRoot:
    """`Σ (E_G ⊗ E_A) diag(c) (E_G ⊗ E_A)ᵀ + δ^(-1/2) I` with `c = (λμ + δ)^(-1/2) − δ^(-1/2)`. A `λμ` that is
    negligible beside `δ` counts as zero. Each step of the sum takes those eigenvectors `E_G` that are paired with about
    the same number of eigenvectors `E_A`: equal up to a factor of two, or at most `NARROW`."""

    steps: tuple[tuple[Tensor, Tensor, Tensor], ...]  # E_G [g, O, r], E_A [g, I, k] and c [g, r, k]
    inputs: Tensor | None  # coordinates where the E_A are not zero; None if most coordinates are
    scale: Tensor  # δ^(-1/2)

    @staticmethod
    def of(left: Tensor, right: Tensor, changes: Tensor, widths: Tensor, scale: Tensor) -> PartialRoot:
        """`changes` contains `c`. In each of its rows, only the first `widths` columns count. The widths are in
        descending order.  # [r]"""
        used, steps, start = right.ne(0).any(-1).any(0), [], 0
        inputs = None if _is_most(used) else used.nonzero().flatten()
        right = right if inputs is None else right[:, inputs]
        while start < len(widths):
            width = int(widths[start])
            stop = int((widths > (width // 2 if width > NARROW else 0)).sum())
            E_A = right[..., :width] if width > NARROW else right[..., :width].contiguous()
            steps.append((left[..., start:stop], E_A, changes[:, start:stop, :width]))
            start = stop
        return PartialRoot(tuple(steps), inputs, scale)

    @property
    def work(self) -> int:
        """Half of the number of multiplications in a product with a vector."""
        return sum(min(_work(E_G.mT, E_A)) for E_G, E_A, _ in self.steps)

    def times(self, V: Tensor) -> Tensor:
        """# [..., g, O, I]"""
        root, used = V * self.scale, V if self.inputs is None else V[..., self.inputs]
        for E_G, E_A, c in self.steps:
            change = _product(E_G, c * _product(E_G.mT, used, E_A), E_A.mT)
            root = root.add_(change) if self.inputs is None else root.index_add_(-1, self.inputs, change)
        return root


def _position_roots(a: Tensor, W: Tensor) -> Tensor:
    """`L_o` with `L_o L_oᵀ = Σ_i W_oi a_i a_iᵀ` for each example; `√S_o` for a single position.
    # [G, B, T, I], [G, O, I] -> [G, B, O, T, T], or [G, B, 1, O]"""
    T, W = a.shape[2], cast_like(W, a)
    if T == 1:
        return (a.square().squeeze(2) @ W.mT).sqrt().unsqueeze(2)
    S = a.new_empty(*a.shape[:2], W.shape[1], T, T)
    for t in range(T):
        pairs = a[:, :, t:] * a[:, :, t : t + 1]  # [G, B, u, I]
        S[..., t, t:] = S[..., t:, t] = (pairs.flatten(1, 2) @ W.mT).unflatten(1, pairs.shape[1:3]).mT
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.amax(-1, keepdim=True)
    diagonal += torch.where(scale > 0, JITTER * torch.finfo(S.dtype).eps * scale, 1)
    return torch.linalg.cholesky_ex(S).L * (scale > 0).unsqueeze(-1)


def _product(A: Tensor, V: Tensor, B: Tensor) -> Tensor:
    """`A V B`"""
    from_left, from_right = _work(A, B)
    return (A @ V) @ B if from_left <= from_right else A @ (V @ B)


def _work(A: Tensor, B: Tensor) -> tuple[int, int]:
    """The number of multiplications in `A V B` as `(A V) B` and as `A (V B)`."""
    (m, n), (p, q) = A.shape[-2:], B.shape[-2:]
    return m * p * (n + q), n * q * (p + m)


def _most_first(counts: Tensor) -> Tensor:
    """The indices of the positive counts, largest count first."""
    return counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]


def _is_most(rows: Tensor) -> bool:
    """Whether so many rows are marked that leaving out the unmarked rows saves little."""
    return 4 * int(rows.sum()) > 3 * len(rows)


@dataclass(frozen=True, eq=False)
class EKFAC(Kronecker):
    """`M = (Q_G ⊗ Q_A) diag(Λ + shift) (Q_G ⊗ Q_A)ᵀ`; only the eigenvectors of the two factors are used."""

    name: ClassVar[str] = "EKFAC"

    refitted: Tensor = field(kw_only=True)  # Λ [g, O, I]

    @property
    def products(self) -> Tensor:
        return self.refitted

    def _with_inputs(self, right: Factor, columns: Tensor) -> EKFAC:
        block = super()._with_inputs(right, columns)
        assert isinstance(block, EKFAC)
        return replace(block, refitted=self.refitted[..., columns])

    def scale(self, factor: float | Tensor) -> EKFAC:
        return replace(self, refitted=self.refitted * factor, shift=self.shift * factor)

    def add_approximately(self, other: Structure) -> EKFAC:
        raise StructureError(
            "refitted eigenvalues belong to one pair of factors and cannot be added: fit all data at once, or use "
            "structure='kron'"
        )

    def add_damping(self, precision: Tensor, split: float = 1.0) -> EKFAC:
        raise StructureError(
            "damping acts on Kronecker factors, which refitted eigenvalues no longer have: add the prior instead, or "
            "use structure='kron'"
        )


@dataclass(frozen=True, eq=False)
class PerOutput(Kronecker):
    """A dense matrix `M_o` for each output of a layer, stored as a group with one row each: the layer `[1, O, I]` is
    read as `[O, 1, I]`."""

    name: ClassVar[str] = "PerOutput"

    @staticmethod
    def from_covariance_roots(L: Tensor) -> PerOutput:
        """`M_o = (L_o L_oᵀ)⁻¹`.  # [O, I, I]"""
        roots = in_float64(L)
        values, Q = eigh(roots @ roots.mT, "a covariance", allow_float32=False)
        right = Factor(cast_like(Q, L), cast_like(positive(values).reciprocal(), L))
        return PerOutput(Factor(None, torch.ones_like(L[:, 0, :1])), right)

    @property
    def sizes(self) -> str:
        return f"{self.shape[0]} of {self.right.size}×{self.right.size}"

    @classmethod
    def input_basis(cls, blocks: Sequence[Kronecker], g: Tensor) -> Tensor | None:
        return None

    @classmethod
    def output_covariances(
        cls, blocks: Sequence[Kronecker], a: Tensor, g: Tensor, form: CovarianceForm, in_basis: bool = False
    ) -> list[Tensor]:
        O = blocks[0].shape[0]
        return super().output_covariances(blocks, a.expand(O, -1, -1, -1), g[:, 0].movedim(-1, 1).unsqueeze(-1), form)

    def layer_moves(self, a: Tensor, shape: tuple[int, ...]) -> LayerMoves:
        return Structure.layer_moves(self, a, shape)

    def input_factor(self, rows: Tensor) -> Factor:
        """`Σ_o M_o`"""
        Q = self.right.vectors
        assert Q is not None
        return Factor.from_matrix((Q * self.values @ Q.mT).sum(0, keepdim=True))

    def _summed(self, other: Kronecker, share: float | Tensor, rest: float | Tensor, keep_matrix: bool) -> Kronecker:
        total = super()._summed(other, share, rest, keep_matrix)
        return PerOutput(total.left, total.right, total.shift)


@dataclass(frozen=True, eq=False)
class EKFACBlockDiagonal(BlockDiagonal):
    """A block-diagonal matrix fitted by `structure="ekfac"`."""

    name: ClassVar[str] = "EKFACBlockDiagonal"
    word: ClassVar[str] = "ekfac"


@dataclass(frozen=True, eq=False)
class PerOutputBlockDiagonal(BlockDiagonal):
    """Layers with a dense matrix for each output."""

    name: ClassVar[str] = "PerOutputBlockDiagonal"
    word: ClassVar[str] = "full"
