"""The Gaussian over the outputs of the linearised network, `f(x) ~ N(f(x; θ*), J P⁻¹ Jᵀ)`: the distribution of
`f(x; θ*) + J(θ − θ*)` (GLM paper, eq. (10)) under the Laplace–GGN posterior (eq. (12)).

The Jacobian `[B, C, P]` is not built. Each layer's block of `P` adds a term that needs only the layer's inputs and
output gradients (see `structures.output_covariance`). A prior changes only eigenvalues, so several priors share one
backward pass. For a low-rank precision, the diagonal part gives such terms, and a few columns correct their sum
(`JacobianColumns`). Only a full matrix, or one whose blocks do not match the layers of this pass, needs the whole
Jacobian, a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.checks import check_examples_apart, check_output
from lightning_bayes.jacobian.gradients import LayerGradients, ParameterGradients
from lightning_bayes.jacobian.graph import check_norms, once_differentiable_functions
from lightning_bayes.jacobian.plan import LayerUse, Plan
from lightning_bayes.jacobian.products import Jacobian
from lightning_bayes.jacobian.rows import JacobianRows
from lightning_bayes.network import CurvatureError, inputs
from lightning_bayes.network.errors import no_second_derivative
from lightning_bayes.network.float64 import cast_like, in_float64
from lightning_bayes.network.input_graph import double_backward_guard
from lightning_bayes.structures import CovarianceForm, InverseTerms, JacobianColumns, Layout, Structure

LARGEST = 2**36  # maximum size of the covariances, in bytes
MEMORY = 2**29  # bytes of the gradients of one part of a batch, with copies: small parts slow a backward pass down
BlockFinder = Callable[[Layout], Structure | None]
Observer = Callable[["LayerJacobian"], None]


def output_gaussian(
    network: nn.Module,
    plan: Plan,
    precisions: Sequence[Structure],
    x: Any,
    form: str = "example",
    differentiable: bool = False,
    approximate: bool = False,
    observe: Observer | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The mean of the outputs and, for each precision, their covariance. The network must be borrowed.

    Args:
        form: "example" for covariances `[B, C, C]` of each example's outputs, "joint" for one `[B·C, B·C]` of all
            outputs of the batch, or "marginal" for variances `[B, C]`, which build nothing of size `C²`.
        differentiable: Whether the results keep their graph to `x` and to the weights.
        approximate: Whether several precisions that differ only by scalar priors share sums over groups of eigenvalues
            (see `structures.output_covariance`). Tens of precisions then cost less than two exact ones, with an error
            of a few tenths of a percent. Cases without such groups (EKFAC, grouped convolutions, one prior per
            parameter, "joint" covariances, a single precision) stay exact.
        observe: Called with every pass, in the order of the examples, before its backward pass.
    """
    B = inputs.batch_size(x)
    _check_size(B, plan.n_outputs, form)
    numbers = max(plan.n_activations, 1 if precisions[0].has_layer_blocks else plan.subset.size)
    few = max(1, MEMORY // (8 * plan.n_outputs * max(numbers, 1)))
    if form != "joint" and few < B:  # examples are independent, so running a few at a time limits the memory
        parts = [inputs.take(network, x, slice(start, start + few)) for start in range(0, B, few)]
        return _concatenated(
            [
                output_gaussian(network, plan, precisions, part, form, differentiable, approximate, observe)
                for part in parts
            ]
        )
    jacobian = LayerJacobian(network, plan, x, differentiable)
    f = jacobian.f if differentiable else jacobian.f.detach()
    if jacobian.matched.mixed and B > 1:
        return _one_by_one(network, plan, precisions, x, form, f, differentiable, approximate, observe)
    if observe is not None:
        observe(jacobian)
    # Variances need one column at a time, covariances need all columns at once.
    size = LayerGradients.chunk_size(jacobian.matched.used, jacobian.f) if form == "marginal" else jacobian.n_outputs
    chunks = []
    for start in range(0, jacobian.n_outputs, size):
        gradients = jacobian.gradients(start, start + size)
        with torch.set_grad_enabled(differentiable):
            chunks.append(gradients.covariances(precisions, CovarianceForm(form, approximate)))
    covariances = [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]
    return f.to(jacobian.dtype), covariances


def _check_size(B: int, outputs: int, form: str) -> None:
    """Raise if the covariances, for example of all pixels of an image, would exceed any memory."""
    needed = 4.0 * {"marginal": 0, "joint": B * B}.get(form, B) * outputs**2
    if needed > LARGEST:
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
    approximate: bool,
    observe: Observer | None,
) -> tuple[Tensor, list[Tensor]]:
    """Run examples that share rows of a layer one at a time, so that each owns all rows. Covariances between examples
    need the whole Jacobian."""
    examples = inputs.take_each(network, x)
    if form != "joint":
        means, covariances = _concatenated(
            [
                output_gaussian(network, plan, precisions, example, form, differentiable, approximate, observe)
                for example in examples
            ]
        )
        check_examples_apart(network, means, f)
        return means, covariances
    jacobians = []
    for example in examples:
        gradients = LayerJacobian(network, plan, example, differentiable).gradients(0, f[0].numel())
        with torch.set_grad_enabled(differentiable):
            jacobians.append(gradients.rows())
    rows = CovarianceForm(form).arrange(torch.cat(jacobians, dim=1))
    return f.to(rows.dtype), [CovarianceForm(form).quadratic(precision, rows) for precision in precisions]


def _concatenated(parts: list[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, list[Tensor]]:
    """Join the means and covariances of several parts of a batch."""
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), [torch.cat(of_precision) for of_precision in zip(*covariances, strict=True)]


def selected_covariances(network: nn.Module, plan: Plan, precision: Structure, x: Any, outputs: Tensor) -> Tensor:
    """The covariances of some outputs of each example, with the indices `outputs` `[B, m]`.  # [B, m, m]"""
    B, m = outputs.shape
    few = max(1, 4 * MEMORY // (8 * m * max(plan.n_activations, plan.n_outputs, 1)))
    if few < B:
        starts = range(0, B, few)
        parts = [(inputs.take(network, x, slice(n, n + few)), outputs[n : n + few]) for n in starts]
        return torch.cat([selected_covariances(network, plan, precision, *part) for part in parts])
    jacobian = LayerJacobian(network, plan, x)
    if jacobian.matched.mixed and B > 1:
        examples = zip(inputs.take_each(network, x), outputs.split(1), strict=True)
        return torch.cat([selected_covariances(network, plan, precision, *example) for example in examples])
    f = jacobian.f
    columns = nn.functional.one_hot(outputs.mT, plan.n_outputs).to(f.dtype).reshape(m, *f.shape)
    gradients = jacobian.gradients_along(columns)
    with torch.no_grad():
        return gradients.covariances([precision], CovarianceForm("example"))[0]


class LayerJacobian(Jacobian):
    """The Jacobian with a plan. It also computes the rows of `J`, and the layers' inputs and output gradients."""

    def __init__(self, network: nn.Module, plan: Plan, x: Any, differentiable: bool = False) -> None:
        B, parameters = inputs.batch_size(x), plan.subset.parameters(network)
        guard = double_backward_guard() if differentiable else nullcontext()
        with guard, plan.recorder(parameters, B, differentiable) as recorder:
            f = inputs.call(network, x)
        super().__init__(network, plan.subset, x, f, differentiable)
        check_output(f, B)
        if differentiable:
            check_norms(f)
            if once := once_differentiable_functions(f):
                raise no_second_derivative(f"{once[0]} is once_differentiable")
        self.plan = plan
        self.matched = plan.match(f, recorder.calls, parameters)
        self.n_outputs = f[0].numel()
        self.dtype = torch.promote_types(f.dtype, torch.float32)
        self._layer_gradients = LayerGradients(differentiable, stacks=True)
        self._parameter_gradients = ParameterGradients(network, parameters, differentiable)

    def gradients(self, start: int, stop: int) -> OutputGradients:
        """The gradients of the outputs `start:stop` of every example."""
        f = self.f
        picks = torch.eye(self.n_outputs, dtype=f.dtype, device=f.device)[start:stop]
        return self.gradients_along(picks.reshape(-1, 1, *f.shape[1:]).expand(-1, *f.shape))

    def gradients_along(self, columns: Tensor) -> OutputGradients:
        """The gradients of `K` weighted sums of every example's outputs, with the weights `[K, B, ...]`."""
        f, matched = self.f, self.matched
        of_layers = self._layer_gradients(f, matched.used, columns, matched.plain) if matched.used else []
        return OutputGradients(self, len(columns), of_layers, self._unmatched(columns))

    def layer_gradients(self, columns: Tensor) -> list[Tensor]:
        """The gradients of weighted sums of outputs at the output of every call.  # [K, B, ...] -> one [K, *z.shape]"""
        return self._layer_gradients(self.f, self.matched.used, columns, self.matched.plain)

    def _unmatched(self, columns: Tensor) -> dict[str, Tensor]:
        """The Jacobians of parameters without a layer rule.  # [K, B, p]"""
        jacobians: dict[str, list[Tensor]] = {name: [] for name in self.matched.unmatched_parameters}
        if jacobians:
            with double_backward_guard() if self._differentiable else nullcontext():
                self._parameter_gradients(
                    self._x, columns, list(jacobians), lambda name, J, _: jacobians[name].append(J)
                )
        return {name: torch.cat(parts, dim=1) for name, parts in jacobians.items()}


class OutputGradients:
    """The gradients of `K` outputs of every example. They can be used once: a layer's gradients are freed on use."""

    def __init__(self, jacobian: LayerJacobian, K: int, of_layers: list[Tensor], unmatched: dict[str, Tensor]) -> None:
        self._jacobian, self._plan, self._K = jacobian, jacobian.plan, K
        self._of_layers, self._unmatched = of_layers, unmatched

    def covariances(self, precisions: Sequence[Structure], form: CovarianceForm) -> list[Tensor]:
        terms = type(precisions[0]).inverse_terms(precisions)
        if terms is not None:
            return self._by_terms(terms, form)
        finders = [precision.layer_blocks(self._plan.subset) for precision in precisions]
        if self._has_blocks(finders[0]):
            return self._by_block(finders, form, self._jacobian.dtype)
        rows = form.arrange(self.rows())
        return [form.quadratic(precision, rows) for precision in precisions]

    def rows(self) -> Tensor:
        """The whole Jacobian.  # [K, B, P]"""
        f = self._jacobian.f
        jacobian = JacobianRows(self._plan, self._jacobian.dtype, f.device)
        jacobian.begin_chunk(self._K, len(f))
        for index, calls in enumerate(self._jacobian.matched.calls):
            if calls:
                jacobian.add_layer(index, calls, self._pop(calls))
        for name, J in self._unmatched.items():
            jacobian.add_parameter(name, J, slice(None))
        return jacobian.rows

    def factors(self) -> dict[Layout, tuple[Tensor, Tensor]]:
        """For each layer the inputs `a` `[G, B, T, I]`, with a one for its bias, and the gradients `g`
        `[K, G, B, T, O]`."""
        factors = {}
        for layer, calls in self._layers():
            g = self._gradients(layer, calls)
            factors[layer.layout] = (_inputs(layer, calls, g), g)
        return factors

    def parameter_jacobians(self) -> dict[Layout, Tensor]:
        """The Jacobians of parameters without a layer rule.  # [K, B, p]"""
        return {self._plan.parameter_layout(name): J.to(self._jacobian.dtype) for name, J in self._unmatched.items()}

    def _has_blocks(self, block_of: BlockFinder) -> bool:
        """Whether every layer of this pass has its own block. The plan of a prediction is made from a few examples; if
        they do not use a layer (such as an expert that none of them needs), this plan may differ from the plan of the
        fit."""
        layouts = [self._plan.parameter_layout(name) for name in self._unmatched]
        layouts += [layer.layout for layer, _ in self._layers()]
        return all(block_of(layout) is not None for layout in layouts)

    def _by_terms(self, terms: list[InverseTerms], form: CovarianceForm) -> list[Tensor]:
        """`scale · J D⁻¹ Jᵀ + sign · (JV mix)(JV mix)ᵀ`, in float64 if the two terms may nearly cancel."""
        subset = self._plan.subset
        diagonals = {id(term.diagonal): term.diagonal for term in terms}
        columns = {id(term.columns): JacobianColumns(term.columns, subset) for term in terms}
        finders = [D.layer_blocks(subset) for D in diagonals.values()]
        dtype = self._jacobian.dtype if all(term.sign > 0 for term in terms) else torch.float64
        blocks = self._by_block(finders, form, dtype, list(columns.values()))
        by_diagonal = dict(zip(diagonals, blocks, strict=True))
        covariances = []
        for term in terms:
            total = columns[id(term.columns)].total
            assert isinstance(total, Tensor)  # at least one layer was called
            JV = total @ term.mix  # [K, B, k]
            correction = form.product(form.arrange(JV), form.arrange(JV))
            covariance = term.scale * by_diagonal[id(term.diagonal)] + term.sign * correction
            covariances.append(covariance.to(self._jacobian.dtype).to(self._jacobian.f.device))
        return covariances

    def _by_block(
        self,
        finders: list[BlockFinder],
        form: CovarianceForm,
        dtype: torch.dtype,
        columns: Sequence[JacobianColumns] = (),
    ) -> list[Tensor]:
        """For each finder, the sum of the terms of all layers and parameters. Each layer and parameter is also added to
        the `columns`."""
        f = self._jacobian.f
        like = in_float64(f.new_empty(0)) if dtype == torch.float64 else f.new_empty(0, dtype=dtype)
        totals = [form.zeros(len(f), self._K, like) for _ in finders]

        def add_rows(layout: Layout, J: Tensor) -> None:
            for each in columns:
                each.add_rows(layout, J)
            blocks = _blocks(finders, layout)
            terms = type(blocks[0]).row_covariances(blocks, form.arrange(J), form)
            for total, term in zip(totals, terms, strict=True):
                total += term

        for layer, calls in self._layers():
            g = cast_like(self._gradients(layer, calls), like)
            if not layer.kronecker and layer.layout.shape[1] == 1:  # the Jacobian of a norm is smaller than `a` and `g`
                add_rows(layer.layout, layer.jacobian(calls, g))
                continue
            blocks = _blocks(finders, layer.layout)
            basis = None if columns else type(blocks[0]).input_basis(blocks, g)
            rotated = None if basis is None else layer.inputs_times(calls, cast_like(basis, like))
            a = _inputs(layer, calls, g) if rotated is None else rotated
            for each in columns:
                each.add(layer.layout, a, g)
            terms = type(blocks[0]).output_covariances(blocks, a, g, form, in_basis=rotated is not None)
            for total, term in zip(totals, terms, strict=True):
                total += term
        for name, J in self._unmatched.items():
            add_rows(self._plan.parameter_layout(name), cast_like(J, like))
        return totals

    def _gradients(self, layer: LayerUse, calls: list[Call]) -> Tensor:
        """# [K, G, B, T, O]"""
        return layer.gradients(calls, self._pop(calls)).to(self._jacobian.dtype)

    def _layers(self) -> list[tuple[LayerUse, list[Call]]]:
        """The layers that were called."""
        return [layer for layer in zip(self._plan.layers, self._jacobian.matched.calls, strict=True) if layer[1]]

    def _pop(self, calls: list[Call]) -> list[Tensor]:
        gradients = self._of_layers[: len(calls)]
        del self._of_layers[: len(calls)]
        return gradients


def _blocks(finders: list[BlockFinder], layout: Layout) -> list[Structure]:
    return [block for block_of in finders if (block := block_of(layout)) is not None]


def _inputs(layer: LayerUse, calls: list[Call], g: Tensor) -> Tensor:
    """`[a 1]`, with a one if the layer has a bias.  # [G, B, T, I]"""
    a = layer.inputs(calls)
    columns = ([] if a is None else [cast_like(a, g)]) + ([] if layer.bias is None else [g.new_ones(*g.shape[1:4], 1)])
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)
