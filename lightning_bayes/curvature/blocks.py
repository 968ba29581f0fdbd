"""Running sums of the curvature of one block, and the structures made from them.

For a layer with inputs `a` and output gradients `g` (format in `layers`), with `N` examples and `T` shared positions:

- exact:      `Σₙ Σ_k j jᵀ`, `j = Σ_t g [a 1]ᵀ`, the whole block (`DenseBlock`) or its diagonal (`DiagonalBlock`);
- Kronecker:  `G ⊗ A` with `A = Σ aaᵀ / (N·T)` and `G = Σ ggᵀ`, where every example–position pair counts once ("expand",
  Eschenhagen et al. 2023), or, with "reduce", `A = Σₙ āāᵀ / N` of mean inputs and `G = Σₙ ḡḡᵀ` of summed gradients;
- EKFAC:      the diagonal of the exact block in the eigenbasis `Q = Q_G ⊗ Q_A` of `G ⊗ A` (George et al. 2018),
  `Λ = diag(QᵀHQ) = Σₙ Σ_k (Q_Gᵀ j Q_A)²`. Either `a` and `g` are rotated, or `j`, whichever is smaller.

Only lower triangles are accumulated; `structure` mirrors them. A wide layer with few examples has fewer input rows than
columns. `InputSum` then keeps the inputs themselves: they need less memory than `A`, and their `n × n` products have
the eigenvalues of `A` (see `structures.factor`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.gradients import CACHE
from lightning_bayes.jacobian.layers import BatchAxis, Embedding, Rows, strip_products
from lightning_bayes.jacobian.plan import LayerUse
from lightning_bayes.network import Processes
from lightning_bayes.network.float64 import float64_device
from lightning_bayes.structures import EKFAC, Dense, Diagonal, Factor, Gram, Kronecker, Structure

PANEL = 128  # columns of a triangular product at a time
FULL = 1024  # number of rows from which a product is efficient
WIDE = 512  # number of columns from which a layer keeps its input rows, and its sums need many rows at a time
PART = 2  # a layer keeps at most `columns / PART` rows


class Block(ABC):
    """The running sum of one block."""

    label: str
    needs_examples = True  # whether it needs to know the example of each row
    needs_columns = True  # whether many columns at a time cost less than one after another
    n_factors = 0  # the number of factors to decompose

    def add_inputs(self, layer: LayerUse, calls: list[Call]) -> None:  # noqa: B027, optional
        """Add the inputs, once per batch."""

    @abstractmethod
    def add_gradients(self, layer: LayerUse, calls: list[Call], g: Tensor) -> None:
        """Add the gradients of one chunk of columns.  # g [K, G, B, T, O]"""

    @property
    @abstractmethod
    def sums(self) -> list[Tensor]:
        """The tensors to add over processes, in place."""

    @property
    def is_finite(self) -> bool:
        return all(_is_finite(t) for t in self.sums)

    def gather(self, processes: Processes) -> None:  # noqa: B027, optional
        """Prepare `sums` for the addition over processes."""

    def factors(self) -> list[Gram]:
        """The matrices whose decompositions `structure` needs."""
        return []

    @abstractmethod
    def structure(self, factors: list[Factor]) -> Structure: ...


def _is_finite(t: Tensor) -> bool:
    """Whether all entries are finite. A finite sum proves it, and is faster."""
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())


class DiagonalBlock(Block):
    label = "exact diagonal"

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.zeros(size, dtype=dtype, device=device)

    def add_gradients(self, layer: LayerUse, calls: list[Call], g: Tensor) -> None:
        if layer.kind == "embedding":
            self._values += embedding_diagonal(calls, g.to(self._values.dtype))
            return
        add_diagonal_(self._values.view(layer.layout.shape), partial(layer.strips, calls), g)

    def add_jacobian(self, J: Tensor) -> None:
        """Add per-example gradients.  # [K, B, p]"""
        self._values += J.to(self._values.dtype).square().sum((0, 1))

    @property
    def sums(self) -> list[Tensor]:
        return [self._values]

    def structure(self, factors: list[Factor]) -> Diagonal:
        return Diagonal(self._values)


class DenseBlock(Block):
    label = "exact dense"

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._matrix = torch.zeros(1, size, size, dtype=dtype, device=device)

    def add_gradients(self, layer: LayerUse, calls: list[Call], g: Tensor) -> None:
        self.add_jacobian(layer.jacobian(calls, g.to(self._matrix.dtype)))

    def add_jacobian(self, J: Tensor) -> None:
        """Add per-example gradients.  # [K, B, p]"""
        add_gram_(self._matrix, J.flatten(0, 1).unsqueeze(0))

    @property
    def sums(self) -> list[Tensor]:
        return [self._matrix]

    def structure(self, factors: list[Factor]) -> Dense:
        return Dense(symmetric(self._matrix)[0])


class KroneckerBlock(Block):
    label = "Kronecker"

    def __init__(
        self, layer: LayerUse, sharing: str, dtype: torch.dtype, device: torch.device, keeps_rows: bool = True
    ) -> None:
        G, O, I = layer.layout.shape
        self._name = layer.name
        self._A: InputSum | None = None
        if layer.kind == "embedding" and sharing == "expand":
            self._tokens = torch.zeros(G, I, dtype=dtype, device=device)
            self._n_tokens = torch.zeros((), dtype=torch.float64, device=float64_device(device))
        else:
            self._A = InputSum((G, I), layer.bias is not None, dtype, device, keeps_rows)
        self._G = torch.zeros(G, O, O, dtype=dtype, device=device)
        self._reduce = self.needs_examples = sharing == "reduce"
        self.needs_columns = O > WIDE  # a product of few rows takes as long as reading and writing a large sum
        self.n_factors = 1 if self._A is None else 2

    def add_inputs(self, layer: LayerUse, calls: list[Call]) -> None:
        if self._A is None:
            for embedding, _ in _embeddings(calls):
                self._add_tokens(embedding)
            return
        if not self._reduce and layer.weight is not None and not self._A.keeps(self._count(layer, calls)):
            grams = [known for call in calls if (known := call.layer.input_gram()) is not None]
            if len(grams) == len(calls):
                for gram in grams:
                    self._A.add_product(*gram)
                return
        strips = layer.strips(calls)
        if strips is None:
            none = self._G.new_zeros(len(self._G), 0)
            self._A.add_product(none.unsqueeze(-1), none, self._count(layer, calls))
            return
        if self._reduce:
            self._A.add(_mean_input(a.to(self._G.dtype) for a in strips))
        for a in strips:  # empty if `_mean_input` has consumed the strips
            self._A.add(a.flatten(1, 2))  # [G, rows, I]

    def add_gradients(self, layer: LayerUse, calls: list[Call], g: Tensor) -> None:
        g = g.to(self._G.dtype)
        if self._reduce:
            g = g.sum(3, keepdim=True)
        G, O = g.shape[1], g.shape[4]
        if g.stride(-1) == 1 or g.shape[3] == 1:
            rows = g.transpose(0, 1).reshape(G, -1, O)
        else:  # channels before pixels: keep the pixels contiguous and let the product transpose them
            rows = g.permute(1, 4, 0, 2, 3).reshape(G, O, -1).mT
        add_gram_(self._G, rows)

    def gather(self, processes: Processes) -> None:
        if self._A is not None:
            self._A.gather(processes)

    @property
    def sums(self) -> list[Tensor]:
        return [self._G, *([self._tokens, self._n_tokens] if self._A is None else self._A.sums)]

    @property
    def is_finite(self) -> bool:
        products = [] if self._A is None else self._A.products
        return super().is_finite and all(map(_is_finite, products))

    def factors(self) -> list[Gram]:
        """`G`, and `A` unless it is diagonal."""
        G = Gram(symmetric(self._G), name=f"the output factor of {self._name}")
        if self._A is None:
            return [G]
        A = replace(self._A.gram(), name=f"the input factor of {self._name}")
        return [replace(G, multiplier=A.norm), replace(A, multiplier=G.norm)]

    def structure(self, factors: list[Factor]) -> Kronecker:
        n = self._n_tokens if self._A is None else self._A.count
        right = Factor(None, self._tokens / n.to(self._tokens).clamp(min=1)) if self._A is None else factors[1]
        return Kronecker(factors[0], right, rows=float(n))

    def _add_tokens(self, layer: Embedding) -> None:
        counts = torch.bincount(layer.tokens.flatten(), minlength=self._tokens.shape[1]).to(self._tokens)
        if layer.padding_idx is not None:
            counts[layer.padding_idx] = 0
        self._tokens += counts
        self._n_tokens += counts.sum()

    def _count(self, layer: LayerUse, calls: list[Call]) -> int:
        """The number of inputs that the calls add to `A`."""
        if self._reduce:
            axis = calls[0].rows
            assert isinstance(axis, BatchAxis)
            return calls[0].output_shape[axis.dim] // axis.repeats
        return sum(call.output_shape.numel() for call in calls) // (layer.layout.shape[0] * layer.layout.shape[1])


def _mean_input(strips: Iterable[Tensor]) -> Tensor:
    """The mean over the positions of each example.  # [G, B, t, I] each -> [G, B, I]"""
    sums, positions = zip(*((a.sum(2), a.shape[2]) for a in strips), strict=True)
    return torch.stack(sums).sum(0) / sum(positions)


def add_diagonal_(total: Tensor, strips: Callable[[slice], Iterator[Tensor] | None], g: Tensor) -> None:
    """`total += Σₙ Σ_k j²`; `strips` gives the inputs of some examples at a time, and `total` is `[G, O, I + 1]`, or
    `[G, O, I]` without a bias."""
    K, G, B, T, O = g.shape
    if T == 1:
        all_inputs = strips(slice(None))
        _add_unshared_diagonal(total, None if all_inputs is None else next(all_inputs), g)
        return
    chunk = max(1, CACHE // (G * total.shape[2] * (T + K * O) * total.element_size()))
    for start in range(0, B, chunk):
        part = slice(start, start + chunk)
        parts = strip_products(strips(part), g[:, :, part].to(total.dtype), bias=True)
        total += torch.cat([J.square_().sum((1, 2)) for J in parts], dim=-1)[..., : total.shape[2]]


def _add_unshared_diagonal(values: Tensor, a: Tensor | None, g: Tensor) -> None:
    """The diagonal for one position: `Σₙ (Σ_k g²) (a²)ᵀ` in one product, with the bias in the last column.
    # values [G, O, I + 1]"""
    g2 = g.squeeze(3).to(values.dtype).square().sum(0)  # [G, B, O]
    I = 0 if a is None else a.shape[3]
    if a is not None:
        a2 = a.squeeze(2).to(values.dtype).square()  # [G, B, I]
        if len(values) == 1:
            values[0, :, :I].addmm_(g2[0].mT, a2[0])
        else:
            values[..., :I].baddbmm_(g2.mT, a2)
    if values.shape[2] > I:
        values[..., I] += g2.sum(1)


def embedding_diagonal(calls: list[Call], g: Tensor) -> Tensor:
    """The diagonal of an embedding. Gradients of a token that an example repeats are summed before they are squared.
    # [p]"""
    embeddings = _embeddings(calls)
    layer = embeddings[0][0]
    V, D = layer.weight_shape
    tokens = torch.cat([layer.token_grid(rows) for layer, rows in embeddings], dim=1)  # [B, T]
    pairs = tokens + V * torch.arange(len(tokens), device=tokens.device).unsqueeze(-1)  # (example, token)
    unique, inverse = pairs.flatten().unique(return_inverse=True)
    summed = g.new_zeros(len(g), len(unique), D)
    summed.index_add_(1, inverse, g[:, 0].reshape(len(g), -1, D))
    return g.new_zeros(V, D).index_add_(0, unique % V, summed.square().sum(0)).mT.flatten()


def _embeddings(calls: list[Call]) -> list[tuple[Embedding, Rows]]:
    """The layers of an embedding's calls, with the rows of each example."""
    return [(call.layer, call.rows) for call in calls if isinstance(call.layer, Embedding)]


class EigenvalueBlock(Block):
    label = "EKFAC"

    def __init__(self, basis: Kronecker, spans_gradients: bool) -> None:
        self._basis, self._spans_gradients = basis, spans_gradients
        self._values = torch.zeros(basis.shape, dtype=basis.dtype, device=basis.device)  # Λ [G, O, I]

    def add_gradients(self, layer: LayerUse, calls: list[Call], g: Tensor) -> None:
        g, T = g.to(self._values.dtype), g.shape[3]
        Q_G, Q_A = self._basis.left.vectors, self._basis.right.vectors
        if Q_A is None and layer.kind == "embedding":
            self._values += embedding_diagonal(calls, _rotated_gradients(g, Q_G)).view_as(self._values)
        elif T == 1:
            add_diagonal_(self._values, lambda part: _strips(layer, calls, part, Q_A), _rotated_gradients(g, Q_G))
        else:
            self._add_shared(layer, calls, g)

    def _add_shared(self, layer: LayerUse, calls: list[Call], g: Tensor) -> None:
        """Add layers with shared positions, a few examples at a time."""
        (K, G, B, T, O), I = g.shape, self._values.shape[2]
        Q_G, Q_A = self._basis.left.vectors, self._basis.right.vectors
        of_inputs = Q_A if layer.weight is not None and T < K * O else None  # rotate the inputs if they are smaller
        if T < I:
            g, Q_G = _rotated_gradients(g, Q_G), None
        chunk = max(1, CACHE // (G * I * (T + K * O) * g.element_size()))
        for start in range(0, B, chunk):
            part = slice(start, start + chunk)
            strips = _strips(layer, calls, part, of_inputs)
            has_ones = layer.bias is not None and of_inputs is None
            parts = strip_products(strips, g[:, :, part], has_ones)  # of weight and bias [G, b, K, O, …]
            J = parts.pop() if len(parts) == 1 else torch.cat(parts, dim=-1)  # [G, b, K, O, I]
            if of_inputs is None:
                J = _rotated(J, Q_A)
            self._values += _rotated(J.mT, Q_G).square_().sum((1, 2)).mT

    @property
    def sums(self) -> list[Tensor]:
        return [self._values]

    def structure(self, factors: list[Factor]) -> EKFAC:
        left, right, values = self._basis.left, self._basis.right, self._values
        if self._spans_gradients:  # gradients are zero where a factor's eigenvalue is zero: any value is rounding
            values = values.masked_fill(((left.values == 0).unsqueeze(-1) | (right.values == 0).unsqueeze(-2)), 0)
        return EKFAC(left, right, refitted=values)


def _rotated(rows: Tensor, Q: Tensor | None) -> Tensor:
    """`rows Q`, in one product for each group: a batched product would copy `Q` for each row.
    # [G, ..., d] -> [G, ..., d']"""
    return rows if Q is None else (rows.flatten(1, -2) @ Q).reshape(*rows.shape[:-1], -1)


def _rotated_gradients(g: Tensor, Q: Tensor | None) -> Tensor:
    """`g Q_G`.  # [K, G, B, T, O]"""
    return _rotated(g.transpose(0, 1), Q).transpose(0, 1)


def _strips(layer: LayerUse, calls: list[Call], examples: slice, Q: Tensor | None) -> Iterator[Tensor] | None:
    """`[a 1] Q_A` in strips of positions, or strips of `a` if `Q` is None.  # [G, b, t, I + 1]"""
    strips = layer.strips(calls, examples)
    if strips is None or Q is None:
        return strips
    I = Q.shape[1] - (layer.bias is not None)
    ones = Q[:, I:].sum(1)[:, None, None]  # the rotated 1 of the bias; zero without a bias
    return (_rotated(a.to(Q.dtype), Q[:, :I]) + ones for a in strips)


class InputSum:
    """The lower triangle of `Σ [a 1][a 1]ᵀ`, or the rows `[a 1]` themselves while they are few.

    Args:
        shape: groups and columns, including the column of the bias.
        bias: whether the last column is a one.
        keeps_rows: whether a wide layer keeps its rows while they are few.
    """

    def __init__(
        self, shape: tuple[int, int], bias: bool, dtype: torch.dtype, device: torch.device, keeps_rows: bool = True
    ) -> None:
        (self._groups, self._columns), self._bias = shape, bias
        self._dtype, self._device = dtype, device
        self._most = self._columns // PART if keeps_rows and self._columns >= WIDE else 0
        self._sum: Tensor | None = None  # [G, I, I]
        self._pending: list[Tensor] = []  # rows of small batches: one large product is faster than many small ones
        self.count = torch.zeros((), dtype=torch.float64, device=float64_device(device))  # the number of rows

    def add(self, a: Tensor) -> None:
        """Add rows `a`, without the one of the bias.  # [G, rows, I]"""
        self._pending.append(a.to(self._dtype, copy=self._most > 0))  # a copy, if rows may outlive the batch
        if self._n_pending >= max(FULL, self._most + 1):
            self._add_pending()

    def add_product(self, gram: Tensor, total: Tensor, rows: int) -> None:
        """Add `Σ aaᵀ`, `Σ a` and the number of rows.  # [G, I, I], [G, I]"""
        I = total.shape[1]
        self._whole[:, :I, :I] += gram
        self._add_border(total, rows)

    def keeps(self, rows: int) -> bool:
        """Whether `rows` more rows would be kept, instead of being added to the sum."""
        return 0 < self._n_pending + rows <= self._most and self._sum is None

    def gather(self, processes: Processes) -> None:
        """Place the rows among those of all processes, or sum their products."""
        n = self._n_pending if self._sum is None else self._most + 1
        counts = torch.zeros(processes.size, dtype=torch.int64, device=self._device)
        counts[processes.rank] = n
        if self._most > 0:
            processes.sum_([counts])
        total = int(counts.sum())
        if total > self._most or self._most == 0:
            self._add_pending()
            self._sum = self._whole
            return
        rows = torch.zeros(self._groups, total, self._columns, dtype=self._dtype, device=self._device)
        start = int(counts[: processes.rank].sum())
        for a in self._pending:
            rows[:, start : start + a.shape[1], : a.shape[2]] = a
            if self._bias:
                rows[:, start : start + a.shape[1], -1] = 1
            start += a.shape[1]
        self._pending = [rows]
        self.count += n

    @property
    def sums(self) -> list[Tensor]:
        """The tensors to add over processes after `gather`; before it, the sums so far."""
        return [*self._pending, *([] if self._sum is None else [self._sum]), self.count]

    @property
    def products(self) -> list[Tensor]:
        """Tensors that show whether `A` is finite."""
        return [self._sum] if self._sum is not None else [a.square().sum() for a in self._pending]

    def gram(self) -> Gram:
        """`A`, after `gather`. Frees the sums."""
        n = self.count.to(self._device, self._dtype).clamp(min=1)
        if self._sum is None:
            return Gram(self._pending.pop() / n.sqrt(), is_rows=True)
        total, self._sum = self._sum, None
        return Gram(symmetric(total / n))

    @property
    def _n_pending(self) -> int:
        return sum(part.shape[1] for part in self._pending)

    @property
    def _whole(self) -> Tensor:
        """# [G, I, I]"""
        if self._sum is None:
            shape = (self._groups, self._columns, self._columns)
            self._sum = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self._sum

    def _add_pending(self) -> None:
        if not self._pending:
            return
        a = torch.cat(self._pending, dim=1)
        self._pending.clear()
        I = a.shape[2]
        add_gram_(self._whole[:, :I, :I], a)
        self._add_border(a.sum(1), a.shape[1])

    def _add_border(self, total: Tensor, rows: int) -> None:
        """Add the number of inputs, and their products with the 1 of the bias.  # total [G, I]"""
        I = total.shape[1]
        if self._bias:
            self._whole[:, I, :I] += total
            self._whole[:, I, I] += rows
        self.count += rows


def add_gram_(total: Tensor, x: Tensor) -> None:
    """`total += xᵀx`; wide matrices get only the lower triangle, panel by panel.  # [G, D, D], [G, N, D]"""
    x = x.to(total.dtype)
    D = x.shape[2]
    if len(x) > 1 or D < 2 * PANEL:
        total.baddbmm_(x.mT, x)
        return
    for start in range(0, D, PANEL):
        panel = slice(start, start + PANEL)
        total[0, start:, panel].addmm_(x[0, :, start:].mT, x[0, :, panel])


def symmetric(lower: Tensor) -> Tensor:
    """Mirror the lower triangle."""
    return lower.tril() + lower.tril(-1).mT
