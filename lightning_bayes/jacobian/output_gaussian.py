"""The Gaussian over outputs of the linearised network: `f(x) ~ N(f(x; θ*), J P⁻¹ Jᵀ)`, which is the law of
`f(x; θ*) + J(θ − θ*)` (GLM paper, eq. (10)) under the Laplace–GGN posterior (eq. (12)).

The Jacobian `[B, C, P]` is never built. Each layer's block of `P` adds its own part, from the layer's inputs and output
gradients (see `structures.output_covariance`). A prior changes only eigenvalues, so that several priors cost one
backward pass. A matrix of low rank adds to the part of its diagonal what its few columns take away (`JacobianColumns`).
A full matrix, or one whose blocks are not the layers that this pass sees, takes the whole Jacobian, of a few examples
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.jacobian.checks import check_examples_apart, check_output
from lightning_bayes.jacobian.gradients import MEMORY, LayerGradients, ParameterGradients
from lightning_bayes.jacobian.graph import check_norms, once_differentiable_functions
from lightning_bayes.jacobian.plan import Plan, Site
from lightning_bayes.jacobian.recorder import Call
from lightning_bayes.jacobian.rows import JacobianRows
from lightning_bayes.network import CurvatureError, inputs
from lightning_bayes.network.accumulation import cast_like, in_float64
from lightning_bayes.network.errors import no_second_derivative
from lightning_bayes.network.input_graph import double_backward_guard
from lightning_bayes.structures import CovarianceForm, InverseTerms, JacobianColumns, Layout, Structure

MOST = 2**36  # bytes of covariances
BlockFinder = Callable[[Layout], Structure | None]


def output_gaussian(
    network: nn.Module,
    plan: Plan,
    precisions: Sequence[Structure],
    x: Any,
    form: str = "example",
    differentiable: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Mean and, for each precision, covariance of the outputs. The network must be borrowed (see `borrowed`).

    The covariance is that of each example's outputs `[B, C, C]`, that of all outputs of the batch ("joint")
    `[B·C, B·C]`, or the variances alone ("marginal") `[B, C]`, for which nothing of size `C²` is built. If they are
    `differentiable` they keep their graph, to `x` and to the weights.
    """
    B = inputs.batch_size(x)
    _check_size(B, plan.n_outputs, form)
    numbers = max(plan.n_activations, 1 if precisions[0].has_layer_blocks else plan.subset.size)
    few = max(1, 4 * MEMORY // (8 * plan.n_outputs * max(numbers, 1)))
    if form != "joint" and few < B:  # examples do not see each other: a few at a time bound the memory
        parts = [inputs.take(network, x, slice(start, start + few)) for start in range(0, B, few)]
        return _concatenated([output_gaussian(network, plan, precisions, part, form, differentiable) for part in parts])
    forward = ForwardPass(network, plan, x, differentiable)
    f = forward.f if differentiable else forward.f.detach()
    if forward.matched.mixed and B > 1:
        return _one_by_one(network, plan, precisions, x, form, f, differentiable)
    wanted = CovarianceForm(form)
    # Variances need one column at a time, covariances all of them.
    size = LayerGradients.chunk_size(forward.matched.used, forward.f) if form == "marginal" else forward.n_outputs
    chunks = []
    for start in range(0, forward.n_outputs, size):
        gradients = forward.gradients(start, start + size)
        with torch.set_grad_enabled(differentiable):
            chunks.append(gradients.covariances(precisions, wanted))
    covariances = [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]
    return f.to(forward.dtype), covariances


def _check_size(B: int, outputs: int, form: str) -> None:
    """Refuse covariances that no memory holds: those of all pixels of an image."""
    needed = 4.0 * {"marginal": 0, "joint": B * B}.get(form, B) * outputs**2
    if needed > MOST:
        raise CurvatureError(
            f"the covariance of {outputs} outputs per example takes {needed / 1e9:,.0f} GB: use predict, which draws "
            "functions instead"
        )


def _one_by_one(
    network: nn.Module,
    plan: Plan,
    precisions: Sequence[Structure],
    x: Any,
    form: str,
    f: Tensor,
    differentiable: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Where examples share rows of a layer: a single example owns all rows. Covariances between examples take the whole
    Jacobian."""
    examples = [inputs.take(network, x, slice(n, n + 1)) for n in range(len(f))]
    if form != "joint":
        means, covariances = _concatenated(
            [output_gaussian(network, plan, precisions, example, form, differentiable) for example in examples]
        )
        check_examples_apart(network, means, f)
        return means, covariances
    jacobians = []
    for example in examples:
        gradients = ForwardPass(network, plan, example, differentiable).gradients(0, f[0].numel())
        with torch.set_grad_enabled(differentiable):
            jacobians.append(gradients.rows())
    rows = CovarianceForm(form).arrange(torch.cat(jacobians, dim=1))
    return f.to(rows.dtype), [CovarianceForm(form).quadratic(precision, rows) for precision in precisions]


def _concatenated(parts: list[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, list[Tensor]]:
    """Means and covariances of several parts of a batch."""
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), [torch.cat(of_precision) for of_precision in zip(*covariances, strict=True)]


class ForwardPass:
    """The outputs at `x`, and what their gradients are taken from, which are `differentiable` or have no graph."""

    def __init__(self, network: nn.Module, plan: Plan, x: Any, differentiable: bool = False) -> None:
        self.plan, self._x, self._differentiable = plan, x, differentiable
        parameters = plan.subset.parameters(network)
        with (
            double_backward_guard(differentiable),
            plan.recorder(parameters, inputs.batch_size(x), differentiable) as recorder,
        ):
            self.f = inputs.call(network, x)
        check_output(self.f, inputs.batch_size(x))
        if differentiable:
            check_norms(self.f)
            if once := once_differentiable_functions(self.f):
                raise no_second_derivative(f"{once[0]} is once_differentiable")
        self.matched = plan.match(self.f, recorder.calls, parameters)
        self.n_outputs = self.f[0].numel()
        self.dtype = torch.promote_types(self.f.dtype, torch.float32)
        self._of_layers = LayerGradients(differentiable)
        self._of_parameters = ParameterGradients(network, parameters, differentiable)

    def gradients(self, start: int, stop: int) -> OutputGradients:
        """Of some outputs of every example."""
        f, matched = self.f, self.matched
        picks = torch.eye(self.n_outputs, dtype=f.dtype, device=f.device)[start:stop]
        columns = picks.reshape(-1, 1, *f.shape[1:]).expand(-1, *f.shape)  # column k picks output start + k
        of_layers = self._of_layers(f, matched.used, columns, matched.plain) if matched.used else []
        return OutputGradients(self, len(columns), of_layers, self._leftovers(columns))

    def _leftovers(self, columns: Tensor) -> dict[str, Tensor]:
        """The Jacobians of parameters without a layer rule.  # [K, B, p]"""
        jacobians: dict[str, list[Tensor]] = {name: [] for name in self.matched.leftovers}

        def keep(name: str, J: Tensor, _: slice) -> None:
            jacobians[name].append(J)

        if jacobians:
            with double_backward_guard(self._differentiable):
                self._of_parameters(self._x, columns, list(jacobians), keep)
        return {name: torch.cat(parts, dim=1) for name, parts in jacobians.items()}


class OutputGradients:
    """Of `K` outputs of every example. They are used once: a layer's are dropped as soon as they were."""

    def __init__(self, forward: ForwardPass, K: int, of_layers: list[Tensor], leftovers: dict[str, Tensor]) -> None:
        self._forward, self._plan, self._K = forward, forward.plan, K
        self._of_layers, self._leftovers = of_layers, leftovers

    def covariances(self, precisions: Sequence[Structure], form: CovarianceForm) -> list[Tensor]:
        terms = type(precisions[0]).inverse_terms(precisions)
        if terms is not None:
            return self._by_terms(terms, form)
        finders = [precision.layer_blocks(self._plan.subset) for precision in precisions]
        if self._fit(finders[0]):
            return self._by_block(finders, form, self._forward.dtype)
        rows = form.arrange(self.rows())
        return [form.quadratic(precision, rows) for precision in precisions]

    def rows(self) -> Tensor:
        """The whole Jacobian.  # [K, B, P]"""
        f = self._forward.f
        jacobian = JacobianRows(self._plan, self._forward.dtype, f.device)
        jacobian.begin_chunk(self._K, len(f))
        for index, calls in enumerate(self._forward.matched.calls):
            if calls:
                jacobian.add_site(index, calls, self._taken(calls))
        for name, J in self._leftovers.items():
            jacobian.add_leftover(name, J, slice(None))
        return jacobian.rows

    def _fit(self, block_of: BlockFinder) -> bool:
        """Whether every layer of this forward pass has a block of its own. A plan is made from a few examples; where
        these leave open how a layer is used (an expert that none of them needs, say), it may differ from the fit's."""
        layouts = [self._plan.leftover_layout(name) for name in self._leftovers]
        layouts += [site.layout for site, _ in self._layers()]
        return all(block_of(layout) is not None for layout in layouts)

    def _by_terms(self, terms: list[InverseTerms], form: CovarianceForm) -> list[Tensor]:
        """`scale · J D⁻¹ Jᵀ − (JV mix)(JV mix)ᵀ`, a difference, and so in float64."""
        subset = self._plan.subset
        diagonals = {id(term.diagonal): term.diagonal for term in terms}
        columns = {id(term.columns): JacobianColumns(term.columns, subset) for term in terms}
        finders = [D.layer_blocks(subset) for D in diagonals.values()]
        blocks = self._by_block(finders, form, torch.float64, list(columns.values()))
        by_diagonal = dict(zip(diagonals, blocks, strict=True))
        covariances = []
        for term in terms:
            total = columns[id(term.columns)].total
            assert isinstance(total, Tensor)  # at least one layer was called
            JV = total @ term.mix  # [K, B, k]
            taken = form.weighted(form.arrange(JV), torch.ones_like(JV[0, 0]))
            covariance = term.scale * by_diagonal[id(term.diagonal)] - taken
            covariances.append(covariance.to(self._forward.dtype).to(self._forward.f.device))
        return covariances

    def _by_block(
        self,
        finders: list[BlockFinder],
        form: CovarianceForm,
        dtype: torch.dtype,
        columns: Sequence[JacobianColumns] = (),
    ) -> list[Tensor]:
        """The sums over layers, of which `columns` have theirs, too."""
        f = self._forward.f
        like = in_float64(f.new_empty(0)) if dtype == torch.float64 else f.new_empty(0, dtype=dtype)
        totals = [form.zeros(len(f), self._K, like) for _ in finders]
        for site, calls in self._layers():
            g = cast_like(self._gradients(site, calls), like)
            blocks = _blocks(finders, site.layout)
            basis = None if columns else type(blocks[0]).input_basis(blocks, g)
            rotated = None if basis is None else site.inputs_times(calls, cast_like(basis, like))
            a = _inputs(site, calls, g) if rotated is None else rotated
            for own in columns:
                own.add(site.layout, a, g)
            terms = type(blocks[0]).output_covariances(blocks, a, g, form, in_basis=rotated is not None)
            for total, term in zip(totals, terms, strict=True):
                total += term
        for name, J in self._leftovers.items():
            rows = form.arrange(cast_like(J, like))
            for own in columns:
                own.add_rows(self._plan.leftover_layout(name), cast_like(J, like))
            for total, block in zip(totals, _blocks(finders, self._plan.leftover_layout(name)), strict=True):
                total += form.quadratic(block, rows)
        return totals

    def factors(self) -> dict[Layout, tuple[Tensor, Tensor]]:
        """Of each layer the inputs `a` `[G, B, T, I]`, with a one for its bias, and the gradients `g`
        `[K, G, B, T, O]`."""
        return {site.layout: self._factors(site, calls) for site, calls in self._layers()}

    def leftovers(self) -> dict[Layout, Tensor]:
        """The Jacobians of parameters without a layer rule.  # [K, B, p]"""
        return {self._plan.leftover_layout(name): J.to(self._forward.dtype) for name, J in self._leftovers.items()}

    def _factors(self, site: Site, calls: list[Call]) -> tuple[Tensor, Tensor]:
        g = self._gradients(site, calls)
        return _inputs(site, calls, g), g

    def _gradients(self, site: Site, calls: list[Call]) -> Tensor:
        """# [K, G, B, T, O]"""
        return site.gradients(calls, self._taken(calls)).to(self._forward.dtype)

    def _layers(self) -> list[tuple[Site, list[Call]]]:
        """Those that were called."""
        return [layer for layer in zip(self._plan.sites, self._forward.matched.calls, strict=True) if layer[1]]

    def _taken(self, calls: list[Call]) -> list[Tensor]:
        gradients = self._of_layers[: len(calls)]
        del self._of_layers[: len(calls)]
        return gradients


def _blocks(finders: list[BlockFinder], layout: Layout) -> list[Structure]:
    return [block for block_of in finders if (block := block_of(layout)) is not None]


def _inputs(site: Site, calls: list[Call], g: Tensor) -> Tensor:
    """`[a 1]` with the layer's bias.  # [G, B, T, I]"""
    a = site.inputs(calls)
    columns = ([] if a is None else [cast_like(a, g)]) + ([] if site.bias is None else [g.new_ones(*g.shape[1:4], 1)])
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)
