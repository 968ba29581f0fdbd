"""The Gaussian over outputs of the linearised network: `f(x) ~ N(f(x; θ*), J P⁻¹ Jᵀ)`, which is the law of
`f(x; θ*) + J(θ − θ*)` (GLM paper, eq. (10)) under the Laplace–GGN posterior (eq. (12)).

The Jacobian `[B, C, P]` is never built. A block `P⁻¹ = (Q_G ⊗ Q_A) diag(W) (Q_G ⊗ Q_A)ᵀ` of a layer with inputs `a` and
output gradients `g` contributes, with `ã = [a 1] Q_A` and `g̃ = g Q_G`,

    Σ_kl = Σ_o g̃_ko (Σ_i ã_i² W_oi) g̃_lo

where the layer has one position. A layer with shared positions contributes `Σ_oi J̃_koi W_oi J̃_loi` with its rotated
gradient `J̃ = Σ_t g̃ ãᵀ`, a few examples at a time. A diagonal posterior is the same with `Q = I`.
Since the prior changes only `W`, several priors cost one backward pass. A full matrix, or one whose blocks are not the
layers that are seen in this pass, takes the whole Jacobian after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.accumulate import JacobianRows
from lightning_bayes.curvature.gradients import CACHE, MEMORY, LayerGradients, ParameterGradients
from lightning_bayes.curvature.output_checks import check_examples_apart, check_output
from lightning_bayes.curvature.plan import Matched, Plan, Site
from lightning_bayes.curvature.recorder import Call, recording
from lightning_bayes.network import inputs
from lightning_bayes.structures import BlockDiagonal, Dense, Diagonal, Kronecker, Structure

FORMS = ("example", "joint", "marginal")


def output_gaussian(
    network: nn.Module, plan: Plan, precisions: Sequence[Structure], x: Any, form: str = "example"
) -> tuple[Tensor, list[Tensor]]:
    """Mean and, for each precision, covariance of the outputs. The network must be borrowed (see `preserve`).

    The covariance is that of each example's outputs `[B, C, C]`, that of all outputs of the batch ("joint")
    `[B·C, B·C]`, or the variances alone ("marginal") `[B, C]`, for which nothing of size `C²` is built.
    """
    parameters = plan.subset.parameters(network)
    B = inputs.batch_size(x)
    few = max(1, 4 * MEMORY // (8 * plan.n_outputs * max(plan.n_activations, 1)))
    if form in ("example", "marginal") and few < B:  # examples do not see each other: a few at a time bound the memory
        each = [inputs.take(network, x, slice(start, start + few)) for start in range(0, B, few)]
        pieces = [output_gaussian(network, plan, precisions, part, form) for part in each]
        means = torch.cat([mean for mean, _ in pieces])
        return means, [torch.cat(each) for each in zip(*(found for _, found in pieces), strict=True)]
    with recording(parameters) as calls:
        f = inputs.call(network, x)
    check_output(f, B)
    matched = plan.match(f, calls, parameters)
    if matched.mixed and B > 1:
        return _one_by_one(network, plan, precisions, x, form, f.detach())
    C = f[0].numel()
    wide = torch.promote_types(f.dtype, torch.float32)
    layer_gradients, leftover_gradients = LayerGradients(), ParameterGradients(network, parameters)
    add = _by_block if _fits(plan, matched, precisions[0]) else _dense
    # Variances need one column at a time, covariances all of them.
    size = LayerGradients.chunk_size(matched.used, f) if form == "marginal" else C
    parts = []
    for start in range(0, C, size):
        columns = _columns(f, start, min(start + size, C))
        grads = layer_gradients(f, matched.used, columns, matched.plain) if matched.used else []
        leftovers = _leftover_jacobians(leftover_gradients, matched.leftovers, x, columns)
        with torch.no_grad():
            terms = _Terms(B, len(columns), form, wide, f.device)
            parts.append(add(plan, precisions, matched.calls, grads, leftovers, terms))
    covariances = [each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in zip(*parts, strict=True)]
    return f.detach().to(wide), covariances


def _one_by_one(
    network: nn.Module, plan: Plan, precisions: Sequence[Structure], x: Any, form: str, f: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Where examples share rows of a layer: a single example owns all rows. Covariances between examples take the whole
    Jacobian."""
    each = [inputs.take(network, x, slice(n, n + 1)) for n in range(len(f))]
    if form != "joint":
        pieces = [output_gaussian(network, plan, precisions, x_n, form) for x_n in each]
        means = torch.cat([mean for mean, _ in pieces])
        check_examples_apart(network, means, f)
        return means, [torch.cat(covariances) for covariances in zip(*(found for _, found in pieces), strict=True)]
    jacobian = torch.cat([_jacobian(network, plan, x_n) for x_n in each], dim=1)  # [C, B, P]
    terms = _Terms(len(f), len(jacobian), form, jacobian.dtype, f.device)
    return f.to(jacobian.dtype), [terms.quadratic(precision, terms.arrange(jacobian)) for precision in precisions]


def _jacobian(network: nn.Module, plan: Plan, x: Any) -> Tensor:
    """Of a single example.  # [C, 1, P]"""
    parameters = plan.subset.parameters(network)
    with recording(parameters) as calls:
        f = inputs.call(network, x)
    matched = plan.match(f, calls, parameters)
    columns = _columns(f, 0, f.numel())
    grads = LayerGradients()(f, matched.used, columns, matched.plain) if matched.used else []
    leftovers = _leftover_jacobians(ParameterGradients(network, parameters), matched.leftovers, x, columns)
    with torch.no_grad():
        terms = _Terms(1, len(columns), "example", torch.promote_types(f.dtype, torch.float32), f.device)
        return _rows(plan, matched.calls, grads, leftovers, terms)


def _columns(f: Tensor, start: int, stop: int) -> Tensor:
    """Column k picks output `start + k` of every example.  # [K, *f.shape]"""
    C = f[0].numel()
    picks = torch.eye(C, dtype=f.dtype, device=f.device)[start:stop]
    return picks.reshape(-1, 1, *f.shape[1:]).expand(-1, *f.shape)


def _fits(plan: Plan, matched: Matched, precision: Structure) -> bool:
    """Whether every layer of this forward pass has a block of its own. A plan is made from a few examples; where these
    leave open how a layer is used (an expert that none of them needs, say), it may be another than that of the fit."""
    if not isinstance(precision, BlockDiagonal):
        return isinstance(precision, Diagonal)
    layouts = [site.layout for site, calls in zip(plan.sites, matched.calls, strict=True) if calls]
    layouts += [plan.leftover_layout(name) for name in matched.leftovers]
    return set(layouts) <= set(precision.layouts)


class _Terms:
    """The terms that add up to a covariance: per example, over the whole batch, or of each output alone."""

    def __init__(self, B: int, K: int, form: str, dtype: torch.dtype, device: torch.device) -> None:
        self.B, self.K, self.dtype, self.device = B, K, dtype, device
        self.joint, self.marginal = form == "joint", form == "marginal"

    def zeros(self) -> Tensor:
        shape = (
            (self.B * self.K,) * 2 if self.joint else (self.B, self.K) if self.marginal else (self.B, self.K, self.K)
        )
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def arrange(self, J: Tensor) -> Tensor:
        """Rows that belong together side by side.  # [K, B, p] -> [B, K, p] or [B·K, p]"""
        J = J.transpose(0, 1)
        return J.flatten(0, 1) if self.joint else J

    def quadratic(self, precision: Structure, J: Tensor) -> Tensor:
        """`J P⁻¹ Jᵀ`, or its diagonal."""
        return (J * precision.solve(J)).sum(-1) if self.marginal else precision.inverse_quadratic(J)

    def weighted(self, J: Tensor, W: Tensor) -> Tensor:
        """`J diag(W) Jᵀ`, or its diagonal."""
        return (J.square() * W).sum(-1) if self.marginal else (J * W) @ J.mT


def _dense(
    plan: Plan,
    precisions: Sequence[Structure],
    matched: list[list[Call]],
    grads: list[Tensor],
    leftovers: dict[str, Tensor],
    terms: _Terms,
) -> list[Tensor]:
    rows = terms.arrange(_rows(plan, matched, grads, leftovers, terms))
    return [terms.quadratic(precision, rows) for precision in precisions]


def _rows(
    plan: Plan, matched: list[list[Call]], grads: list[Tensor], leftovers: dict[str, Tensor], terms: _Terms
) -> Tensor:
    """The whole Jacobian.  # [K, B, P]"""
    jacobian = JacobianRows(plan, terms.dtype, terms.device)
    jacobian.begin(terms.K, terms.B)
    for index, calls in enumerate(matched):
        if calls:
            jacobian.add_site(index, calls, grads[: len(calls)])
            del grads[: len(calls)]
    for name, J in leftovers.items():
        jacobian.add_leftover(name, J, slice(None))
    return jacobian.rows


def _by_block(
    plan: Plan,
    precisions: Sequence[Structure],
    matched: list[list[Call]],
    grads: list[Tensor],
    leftovers: dict[str, Tensor],
    terms: _Terms,
) -> list[Tensor]:
    lookups = [_block_of(plan, precision) for precision in precisions]
    totals = [terms.zeros() for _ in precisions]
    for site, here in zip(plan.sites, matched, strict=True):
        if not here:
            continue
        g = site.gradients(here, grads[: len(here)]).to(terms.dtype)
        del grads[: len(here)]
        blocks = [lookup(site.layout) for lookup in lookups]
        if isinstance(blocks[0], Dense):
            _add_quadratic(totals, blocks, site.jacobian(_wide(site.inputs(here), terms.dtype), g), terms)
        elif g.shape[3] == 1 and not terms.joint:
            _add_unshared(totals, blocks, site, here, g, terms)
        else:
            _add_shared(totals, blocks, site, here, g, terms)
    for name, J in leftovers.items():
        blocks = [lookup(plan.leftover_layout(name)) for lookup in lookups]
        _add_quadratic(totals, blocks, J.to(terms.dtype), terms)
    return totals


def _block_of(plan: Plan, precision: Structure) -> Any:
    """The block of `precision` at a layout."""
    if isinstance(precision, BlockDiagonal):
        blocks = dict(zip(precision.layouts, precision.blocks, strict=True))
        return blocks.__getitem__
    assert isinstance(precision, Diagonal)
    # Weights outside a subnetwork are known exactly: infinite precision.
    values = precision.values
    if plan.subset.mask is not None:
        values = values.new_full((plan.subset.full_size,), torch.inf)
        values[plan.subset.mask.to(values.device)] = precision.values
    return lambda layout: Diagonal(layout.gather(values))


def _add_quadratic(totals: list[Tensor], blocks: list[Structure], J: Tensor, terms: _Terms) -> None:
    rows = terms.arrange(J)
    for total, block in zip(totals, blocks, strict=True):
        total += terms.quadratic(block, rows)


def _add_unshared(
    totals: list[Tensor], blocks: list[Any], site: Site, calls: list[Call], g: Tensor, terms: _Terms
) -> None:
    """One position: the input enters only through `Σ_i ã_i² W_oi`."""
    a, g = _rotated(blocks[0], site, calls, g)
    a2 = a.squeeze(2).square()  # [G, B, I]
    g = g.squeeze(3).permute(1, 2, 0, 3)  # [G, B, K, O]
    for total, block in zip(totals, blocks, strict=True):
        w = a2 @ _variances(block, site).mT  # [G, B, O]
        total += terms.weighted(g, w.unsqueeze(2)).sum(0)


def _add_shared(
    totals: list[Tensor], blocks: list[Any], site: Site, calls: list[Call], g: Tensor, terms: _Terms
) -> None:
    """Shared positions: the rotated gradient of the layer, a few examples at a time."""
    a, g = _rotated(blocks[0], site, calls, g)
    G, B, _, I = a.shape
    K, O = g.shape[0], g.shape[4]
    variances = [_variances(block, site) for block in blocks]  # [G, O, I]
    # Pieces that stay in the cache: a few examples at a time, and of a large layer a few outputs.
    examples = B if terms.joint else max(1, CACHE // (G * K * O * I * a.element_size()))
    outputs = max(1, CACHE // (G * K * I * a.element_size()))
    for start, low in product(range(0, B, examples), range(0, O, outputs)):
        part, rows = slice(start, start + examples), slice(low, low + outputs)
        gradient = g[:, :, part, :, rows].permute(1, 2, 0, 4, 3)  # [G, b, K, o, T]
        J = (gradient.flatten(2, 3) @ a[:, part]).reshape(*gradient.shape[:3], -1)  # [G, b, K, o·I]
        if terms.joint:
            J = J.flatten(1, 2)
        for total, W in zip(totals, variances, strict=True):
            here = W[:, rows].reshape(G, *[1] * (J.ndim - 2), J.shape[-1])
            term = terms.weighted(J, here).sum(0)
            if terms.joint:
                total += term
            else:
                total[part] += term


def _rotated(block: Structure, site: Site, calls: list[Call], g: Tensor) -> tuple[Tensor, Tensor]:
    """`ã = [a 1] Q_A` and `g̃ = g Q_G`.  # [G, B, T, I], [K, G, B, T, O]"""
    a = site.inputs(calls)
    ones = g.new_ones(*g.shape[1:4], 1)
    columns = ([] if a is None else [a.to(g.dtype)]) + ([] if site.bias is None else [ones])
    a = torch.cat(columns, dim=-1)
    if isinstance(block, Kronecker):
        # One product for all examples: a batched one would run over a copy of the eigenvectors for each.
        if block.right.vectors is not None:
            a = (a.flatten(1, 2) @ block.right.vectors).reshape(a.shape)
        if block.left.vectors is not None:
            rows = g.transpose(0, 1)  # [G, K, B, T, O]
            g = (rows.flatten(1, 3) @ block.left.vectors).reshape(rows.shape).transpose(0, 1)
    return a, g


def _variances(block: Structure, site: Site) -> Tensor:
    """`W`, the inverse eigenvalues.  # [G, O, I]"""
    values = block.values if isinstance(block, (Kronecker, Diagonal)) else block.diagonal()
    return values.reshape(site.layout.shape).reciprocal()


def _wide(a: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if a is None else a.to(dtype)


def _leftover_jacobians(
    gradients_of: ParameterGradients, names: Sequence[str], x: Any, columns: Tensor
) -> dict[str, Tensor]:
    jacobians: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(gradients: dict[str, Tensor], _: slice) -> None:
        for name, J in gradients.items():
            jacobians[name].append(J)

    if names:
        gradients_of(x, columns, names, keep)
    return {name: torch.cat(parts, dim=1) for name, parts in jacobians.items()}
