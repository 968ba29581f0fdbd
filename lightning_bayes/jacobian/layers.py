"""Layers that are linear in their parameters, in one common form.

Every such layer computes `z[b, t] = W a[b, t] + bias` for examples `b` and shared positions `t`, once per group. So the
gradient of an output with respect to the parameters needs only the layer's input `a` and the gradient `g` with respect
to the layer's *output*:

    a  [G, B, T, I]      inputs: groups, batch, shared positions, features
    g  [K, G, B, T, O]   K output columns, back-propagated to z
    ∂/∂[W bias] = Σ_t g [a 1]ᵀ   [K, B, G, O, I + 1]

| layer                  | groups   | shared positions        | features                  |
|------------------------|----------|-------------------------|---------------------------|
| linear, `x @ W`        | 1        | all but batch and last  | inputs                    |
| bias alone, `z + b`    | 1        | all but batch and last  | none                      |
| (transposed) conv      | groups   | pixels                  | channel × kernel offset   |
| embedding              | 1        | tokens                  | one-hot of the vocabulary |
| norm (scale and shift) | channels | pixels or tokens        | the normalised input      |

`Rows` say which rows of a layer's output belong to which example: an axis or, if there is no pattern, an index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.jacobian.patches import Patches, pad, patch_gram, transposed_patches
from lightning_bayes.network.float64 import cast_like
from lightning_bayes.structures import Piece, layer_matrices

LARGEST_VOCABULARY = 4096  # the largest vocabulary for which a bag of words has a Kronecker block
STRIP = 2**23  # bytes of a convolution's patches that are built at a time


class Layer(ABC):
    """One call of a layer: its input, and the layout of its output and gradients."""

    kind: str  # for messages
    kronecker = True  # whether the curvature block is approximated by a Kronecker product
    batches = True  # whether PyTorch's batched backward pass is faster than a loop over columns

    @abstractmethod
    def inputs(self, axis: Rows) -> Tensor:
        """# [G, B, T, I]"""

    def strips(self, examples: slice, axis: Rows) -> Iterator[Tensor]:
        """The inputs, in strips of positions if they need much memory.  # [G, b, t, I]"""
        yield self.inputs(axis)[:, examples]

    def inputs_at(self, columns: Tensor, axis: Rows) -> Tensor:
        """The inputs at selected features.  # [G, B, T, columns]"""
        return self.inputs(axis).index_select(-1, columns)

    def inputs_times(self, Q: Tensor, bias: Tensor | None, axis: Rows) -> Tensor:
        """`aQ + bias` in one product for all examples; a batched product would copy `Q` for each example.
        # [G, I, k], [G, 1, k] -> [G, B, T, k]"""
        a = self.inputs(axis)
        rows = a.flatten(1, 2).to(Q.dtype)
        return (rows @ Q if bias is None else torch.baddbmm(bias, rows, Q)).reshape(*a.shape[:3], -1)

    def gradients(self, g: Tensor, axis: Rows) -> Tensor:
        """# [K, *z.shape] -> [K, G, B, T, O]; by default one group, with features last"""
        g = axis.split(g, lead=1)
        return g.reshape(g.shape[0], 1, g.shape[1], -1, g.shape[-1])

    def row_dims(self, ndim: int) -> int:
        """The number of leading dimensions of an output with `ndim` dimensions that index rows, not channels, pixels or
        features."""
        return ndim - 1

    @property
    @abstractmethod
    def weight(self) -> Piece:
        """How the weight is stored: as `(G, O, I…)`, or in another shape with the permutation to `(G, O, I…)`."""

    def input_gram(self) -> tuple[Tensor, Tensor, int] | None:
        """`Σ aaᵀ`, `Σ a` and the number of positions, or None if computing them from `inputs` is faster."""
        return None


@dataclass(frozen=True)
class LinearLayer(Layer):
    x: Tensor  # [..., I]
    weight_shape: tuple[int, int]  # (O, I)
    kind = "linear"

    def inputs(self, axis: Rows) -> Tensor:
        x = axis.split(self.x)
        return x.reshape(1, x.shape[0], -1, x.shape[-1])

    @property
    def weight(self) -> Piece:
        return Piece(0, (1, *self.weight_shape))


@dataclass(frozen=True)
class MatrixProduct(LinearLayer):
    """`x @ W`: a linear layer whose weight is stored as (I, O)."""

    kind = "matrix product"

    @property
    def weight(self) -> Piece:
        return Piece(0, (1, *self.weight_shape), (0, 2, 1))


@dataclass(frozen=True)
class EmbeddingBag(MatrixProduct):
    """The sum or mean of word vectors: the product of a matrix `[B, V]`, the weight of each word in each bag, and the
    word vectors `[V, D]`."""

    kind = "bag of words"

    @property
    def kronecker(self) -> bool:  # type: ignore[override]
        """False for a large vocabulary: the input factor has an entry for each pair of words."""
        return self.weight_shape[0] <= LARGEST_VOCABULARY


@dataclass(frozen=True)
class Bias(Layer):
    """`z + b`: a vector along the last dimension, small enough for an exact block."""

    size: int
    kind = "bias"
    kronecker = False

    def inputs(self, axis: Rows) -> Tensor:
        raise AssertionError("a bias alone has no input")

    @property
    def weight(self) -> Piece:
        return Piece(0, (1, self.size, 0))


@dataclass(frozen=True)
class Patched(Layer):
    """A layer that sees its input in overlapping patches. The patches need many times the memory of the input, so `a`
    comes in strips."""

    x: Tensor  # [B, C, *S]
    weight_shape: tuple[int, ...]  # (O, C / groups, *kernel), transposed (C, O / groups, *kernel)
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    batches = False  # PyTorch would loop over columns; see `column_stack`

    @abstractmethod
    def patches(self) -> Patches:
        """The inputs that each output position sees."""

    def inputs(self, axis: Rows) -> Tensor:
        return _grouped_inputs(self.patches().of(self.x), self.groups, axis)

    def strips(self, examples: slice, axis: Rows) -> Iterator[Tensor]:
        if axis != PLAIN:
            yield from super().strips(examples, axis)
            return
        for strip in self.patches().strips(self.x[examples], STRIP):
            yield _grouped_inputs(strip, self.groups, axis)

    def gradients(self, g: Tensor, axis: Rows) -> Tensor:
        return _channels_to_groups(g, self.groups, axis)

    def row_dims(self, ndim: int) -> int:
        return 1


@dataclass(frozen=True)
class Convolution(Patched):
    padding: tuple[tuple[int, int], ...]  # before and after each dimension
    kind = "convolution"

    def patches(self) -> Patches:
        return Patches(self.weight_shape[2:], self.stride, self.padding, self.dilation)

    def inputs_at(self, columns: Tensor, axis: Rows) -> Tensor:
        if self.groups > 1:
            return super().inputs_at(columns, axis)
        size = prod(self.weight_shape[2:])
        channels, index = (columns // size).unique(return_inverse=True)
        few = replace(self, x=self.x.index_select(1, channels))
        return few.inputs(axis).index_select(-1, index * size + columns % size)

    def inputs_times(self, Q: Tensor, bias: Tensor | None, axis: Rows) -> Tensor:
        """A convolution with `Q` as its filters, which needs no patches."""
        if axis != PLAIN:
            return super().inputs_times(Q, bias, axis)
        filters = Q.mT.reshape(-1, *self.weight_shape[1:])  # [G·k, C/G, *kernel]
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        even = all(before == after for before, after in self.padding)
        x = self.x.to(Q.dtype) if even else pad(self.x.to(Q.dtype), self.padding)
        padding = tuple(before for before, _ in self.padding) if even else 0
        offset = None if bias is None else bias.flatten()
        z = convolve(x, filters, offset, self.stride, padding, self.dilation, self.groups)
        return z.flatten(2).unflatten(1, (self.groups, -1)).permute(1, 0, 3, 2)

    @property
    def weight(self) -> Piece:
        return Piece(0, (self.groups, self.weight_shape[0] // self.groups, prod(self.weight_shape[1:])))

    def input_gram(self) -> tuple[Tensor, Tensor, int] | None:
        kernel = self.weight_shape[2:]
        if self.groups > 1 or self.stride[0] > 1 or kernel[0] == 1:
            return None
        gram, total, positions = patch_gram(self.x, self.patches(), STRIP)
        return gram.unsqueeze(0), total.unsqueeze(0), positions


@dataclass(frozen=True)
class TransposedConvolution(Patched):
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    kind = "transposed convolution"

    def patches(self) -> Patches:
        kernel = self.weight_shape[2:]
        return transposed_patches(kernel, self.stride, self.padding, self.output_padding, self.dilation)

    @property
    def weight(self) -> Piece:
        C, O = self.weight_shape[:2]
        return Piece(0, (self.groups, C // self.groups, O, prod(self.weight_shape[2:])), (0, 2, 1, 3))


@dataclass(frozen=True)
class Embedding(Layer):
    tokens: Tensor  # [...], indices
    weight_shape: tuple[int, int]  # (V, D)
    padding_idx: int | None
    dtype: torch.dtype
    kind = "embedding"

    def inputs(self, axis: Rows) -> Tensor:
        """One-hot rows, zero for the padding token, whose vector gets no gradient."""
        tokens = self.token_grid(axis)
        one_hot = F.one_hot(tokens, self.weight_shape[0]).to(self.dtype).unsqueeze(0)  # [1, B, T, V]
        if self.padding_idx is not None:
            one_hot[..., self.padding_idx] = 0
        return one_hot

    def inputs_at(self, columns: Tensor, axis: Rows) -> Tensor:
        one_hot = (self.token_grid(axis).unsqueeze(-1) == columns).to(self.dtype)  # [B, T, columns]
        return (one_hot if self.padding_idx is None else one_hot * (columns != self.padding_idx)).unsqueeze(0)

    def gradients(self, g: Tensor, axis: Rows) -> Tensor:
        """The gradients, with zeros at padding tokens. These gradients affect no weight, but if a normalisation follows
        the embedding, they can be the largest ones."""
        g = super().gradients(g, axis)
        if self.padding_idx is None:
            return g
        return g.masked_fill((self.token_grid(axis) == self.padding_idx).unsqueeze(-1), 0)

    def token_grid(self, axis: Rows) -> Tensor:
        """# [B, T]"""
        return axis.split(self.tokens).flatten(1)

    @property
    def weight(self) -> Piece:
        return Piece(0, (1, *self.weight_shape), (0, 2, 1))


@dataclass(frozen=True)
class _Norm(Layer):
    """Scale and shift of a norm, with one group per channel or feature."""

    normalised: Callable[[], Tensor]  # computes the norm without scale and shift
    shape: tuple[int, ...]  # of scale and shift
    kind = "norm"
    kronecker = False

    def inputs(self, axis: Rows) -> Tensor:
        return self.gradients(self.normalised().unsqueeze(0), axis)[0]

    @property
    def weight(self) -> Piece:
        return Piece(0, (prod(self.shape), 1, 1))


@dataclass(frozen=True)
class ChannelNorm(_Norm):
    """Batch, group and instance norm: channels in dimension 1."""

    def gradients(self, g: Tensor, axis: Rows) -> Tensor:
        return _channels_to_groups(g, self.shape[0], axis)

    def row_dims(self, ndim: int) -> int:
        return 1


@dataclass(frozen=True)
class FeatureNorm(_Norm):
    """Layer and RMS norm: the normalised features are the last dimensions."""

    def gradients(self, g: Tensor, axis: Rows) -> Tensor:
        g = axis.split(g.flatten(g.ndim - len(self.shape)), lead=1)  # [K, B, r, ..., C]
        return g.reshape(*g.shape[:2], -1, g.shape[-1]).permute(0, 3, 1, 2).unsqueeze(-1)

    def row_dims(self, ndim: int) -> int:
        return ndim - len(self.shape)


@dataclass(frozen=True)
class BatchAxis:
    """The dimension of a layer's output that indexes examples. It may also contain `repeats` positions of each example,
    adjacent (`[B, T]` flattened) or `interleaved` (`[T, B]` flattened)."""

    dim: int
    repeats: int = 1
    interleaved: bool = False

    def split(self, t: Tensor, lead: int = 0) -> Tensor:
        """# [*lead, ..., B·repeats, ...] -> [*lead, B, repeats, ...]"""
        t = t.movedim(lead + self.dim, lead)
        if self.interleaved:
            return t.unflatten(lead, (self.repeats, -1)).transpose(lead, lead + 1)
        return t.unflatten(lead, (-1, self.repeats))


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Rows without a pattern, as for sets of different sizes or rows routed to experts. The first `dims` dimensions of
    the output count as one. Examples with fewer rows are padded with zeros, which add nothing to a gradient."""

    dims: int
    index: Tensor  # row numbers [B, T]; the total number of rows where an example has no more rows

    @staticmethod
    def from_owners(owners: Tensor, B: int, dims: int) -> RowIndex:
        """# owners [R], the example of each row, -1 for none"""
        counts = torch.bincount(owners[owners >= 0], minlength=B)
        index = owners.new_full((B, max(1, int(counts.max()))), len(owners))
        rows = owners.argsort(stable=True)[int((owners < 0).sum()) :]  # sorted by example
        places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[owners[rows]]
        index[owners[rows], places] = rows
        return RowIndex(dims, index)

    def split(self, t: Tensor, lead: int = 0) -> Tensor:
        """# [*lead, *rows, ...] -> [*lead, B, T, ...]"""
        rows = prod(t.shape[lead : lead + self.dims])
        t = t.reshape(*t.shape[:lead], rows, *t.shape[lead + self.dims :])
        t = torch.cat([t, t.new_zeros(*t.shape[:lead], 1, *t.shape[lead + 1 :])], dim=lead)
        return t.index_select(lead, self.index.flatten()).unflatten(lead, self.index.shape)


Rows = BatchAxis | RowIndex
PLAIN = BatchAxis(0)  # one row for each example


def strip_products(strips: Iterable[Tensor] | None, g: Tensor, bias: bool) -> list[Tensor]:
    """Per-example gradients: `Σ_t g aᵀ` of the weight `[G, B, K, O, I]`, for inputs in strips of positions, and `Σ_t g`
    of the bias `[G, B, K, O, 1]`."""
    total: Tensor | None = None
    start = 0
    for a in strips or ():
        T = a.shape[2]
        product = layer_matrices(cast_like(a, g), g[:, :, :, start : start + T])
        total = product if total is None else total.add_(product)
        start += T
    of_bias = [g.sum(3).permute(1, 2, 0, 3).unsqueeze(-1)] if bias else []
    return of_bias if total is None else [total, *of_bias]


def _grouped_inputs(a: Tensor, groups: int, axis: Rows) -> Tensor:
    """# [B·r, C, k, L] -> [G, B, r·L, C/G·k]"""
    a = a.unflatten(1, (groups, -1)).flatten(2, 3)  # [B·r, G, I, L]
    a = axis.split(a).permute(2, 0, 1, 4, 3)  # [G, B, r, L, I]
    return a.flatten(2, 3)


def _channels_to_groups(g: Tensor, groups: int, axis: Rows) -> Tensor:
    """# [K, B·r, G·O, *S] -> [K, G, B, r·S, O]"""
    g = g.unflatten(2, (groups, -1)).flatten(4) if g.ndim > 3 else g.unflatten(2, (groups, -1)).unsqueeze(-1)
    g = axis.split(g, lead=1).permute(0, 3, 1, 2, 5, 4)  # [K, G, B, r, S, O]
    return g.flatten(3, 4)
