"""The Jacobian rows of a chunk of columns for the entries of a subset, `[K, B, P]`, assembled layer by layer.

A subnetwork never needs the gradient of a whole layer. With a layer's inputs `a` and output gradients `g` (format in
`layers`), the weight from input `i` to output `o` of group `γ` has the gradient

    J[k, b] = Σ_t g[k, γ, b, t, o] · a[γ, b, t, i],

so `n` chosen weights need `n` columns of `g` and of `a`. If the chosen weights fill a good part of the rectangle of
their inputs and outputs, one matrix product over that rectangle is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.gradients import CACHE
from lightning_bayes.jacobian.plan import Plan
from lightning_bayes.structures import Layout, layer_jacobian

FILLED = 1 / 16  # share of chosen weights in the rectangle from which one matrix product is faster


class JacobianRows:
    """Fills `rows` `[K, B, P]`: call `begin_chunk`, then `add_layer` for each layer and `add_parameter` for each other
    parameter."""

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        self._plan, self._dtype, self._device = plan, dtype, device
        mask = plan.subset.mask
        self._mask = None if mask is None else mask.to(device)
        self._chosen: dict[Layout, ChosenWeights] = {}

    def begin_chunk(self, columns: int, examples: int) -> None:
        self.rows = torch.zeros(columns, examples, self._plan.subset.size, dtype=self._dtype, device=self._device)

    def add_layer(self, index: int, calls: list[Call], grads: list[Tensor]) -> None:
        layer = self._plan.layers[index]
        g = layer.gradients(calls, grads).to(self._dtype)
        if self._mask is None:
            layer.layout.scatter(layer.jacobian(calls, g), self.rows)
        else:
            chosen = self._chosen_in(layer.layout, self._mask)
            if len(chosen.places):  # a layer whose weights are packed with others may have no chosen weight
                chosen.put(layer.inputs_at(calls, chosen.columns, g), g, self.rows)

    def add_parameter(self, name: str, J: Tensor, examples: slice) -> None:
        layout, rows = self._plan.parameter_layout(name), self.rows[:, examples]
        if self._mask is None:
            layout.scatter(J.to(self._dtype), rows)
        else:
            chosen = self._chosen_in(layout, self._mask)
            rows[..., chosen.places] = J[..., chosen.columns[chosen.column]].to(self._dtype)

    def _chosen_in(self, layout: Layout, mask: Tensor) -> ChosenWeights:
        if layout not in self._chosen:
            self._chosen[layout] = ChosenWeights.of(layout, mask)
        return self._chosen[layout]


@dataclass(frozen=True, eq=False)
class ChosenWeights:
    """The weights of a subnetwork in one layer. Their outputs and inputs are numbered among those that have a chosen
    weight."""

    places: Tensor  # [n] in the flat vector of the subnetwork
    group: Tensor  # [n]
    row: Tensor  # [n] index into `rows`
    column: Tensor  # [n] index into `columns`
    rows: Tensor  # sorted outputs of the layer that have a chosen weight
    columns: Tensor  # sorted inputs of the layer that have a chosen weight; the bias is the last input

    @staticmethod
    def of(layout: Layout, mask: Tensor) -> ChosenWeights:
        """# mask [P], sorted positions"""
        places, groups, rows, columns = [], [], [], []
        before = 0
        for piece in layout.pieces:
            first, last = torch.searchsorted(mask, mask.new_tensor([piece.start, piece.start + piece.size])).tolist()
            stored = torch.unravel_index(mask[first:last] - piece.start, piece.shape)
            group, row, *rest = stored if piece.order is None else [stored[d] for d in piece.order]
            column = torch.zeros_like(row)
            for size, index in zip(piece.permuted_shape[2:], rest, strict=True):
                column = column * size + index
            places.append(torch.arange(first, last, device=mask.device))
            groups.append(group)
            rows.append(row)
            columns.append(column + before)
            before += piece.columns
        row_numbers, row_index = torch.cat(rows).unique(return_inverse=True)
        column_numbers, column_index = torch.cat(columns).unique(return_inverse=True)
        return ChosenWeights(torch.cat(places), torch.cat(groups), row_index, column_index, row_numbers, column_numbers)

    def put(self, a: Tensor, g: Tensor, into: Tensor) -> None:
        """# a [G, B, T, i] at the chosen columns, g [K, G, B, T, O] at all rows, into [K, B, P]"""
        K, G, B, T, _ = g.shape
        n, rectangle = len(self.places), G * len(self.rows) * len(self.columns)
        g = g if len(self.rows) == g.shape[-1] else g.index_select(-1, self.rows)
        filled = n >= FILLED * rectangle
        size = K * (rectangle if filled else T * n) * g.element_size()  # bytes of one example
        step = max(1, CACHE // size)
        for start in range(0, B, step):
            part = slice(start, start + step)
            put = self._from_rectangle if filled else self._one_by_one
            put(a[:, part].to(g.dtype), g[:, :, part], into[:, part])

    def _from_rectangle(self, a: Tensor, g: Tensor, into: Tensor) -> None:
        index = (self.group * len(self.rows) + self.row) * len(self.columns) + self.column
        into[..., self.places] = layer_jacobian(a, g).index_select(-1, index)

    def _one_by_one(self, a: Tensor, g: Tensor, into: Tensor) -> None:
        outputs = g.permute(0, 2, 3, 1, 4).flatten(3)  # [K, b, T, G·o]
        inputs = a.permute(1, 2, 0, 3).flatten(2)  # [b, T, G·i]
        most = max(1, CACHE // (prod(outputs.shape[:3]) * g.element_size()))  # weights at a time
        group, row, column = self.group, self.row, self.column
        from_output, from_input = group * len(self.rows) + row, group * len(self.columns) + column
        for entries in torch.arange(len(self.places), device=a.device).split(most):
            terms = outputs.index_select(-1, from_output[entries])  # [K, b, T, n]
            terms.mul_(inputs.index_select(-1, from_input[entries]))
            into[..., self.places[entries]] = terms.sum(2)
