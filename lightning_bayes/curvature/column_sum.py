"""The curvature from columns of the output Fisher, `Λₙ = Σ_k r_k r_kᵀ`, back-propagated to the outputs of the layers.

Each batch takes one forward pass and a few batched backward passes. An `Accumulator` turns the gradients at the layers'
outputs into the sums of its structure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.accumulate import STRUCTURES, FactorOptions
from lightning_bayes.curvature.data_pass import Batch, BatchSum, Fisher
from lightning_bayes.jacobian.checks import check_examples_apart, check_output
from lightning_bayes.jacobian.gradients import LayerGradients, ParameterGradients
from lightning_bayes.jacobian.output_columns import output_columns, root_columns
from lightning_bayes.jacobian.plan import Matched, Plan
from lightning_bayes.jacobian.recorder import Call
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, inputs
from lightning_bayes.structures import Structure

logger = logging.getLogger("lightning_bayes")

FisherRoot = Callable[[Any, Tensor, Tensor], Tensor]  # from x, y and the numbers of the examples; see `fisher_root`


class ColumnSum(BatchSum):
    """The curvature in the given `structure`; `fisher_root` replaces the likelihood's root at the network's outputs."""

    def __init__(
        self,
        network: nn.Module,
        plan: Plan,
        likelihood: Likelihood,
        structure: str = "diag",
        weight_sharing: str = "expand",
        fisher: Fisher = Fisher(),  # noqa: B008, immutable
        factors: FactorOptions = FactorOptions(),  # noqa: B008, immutable
        fisher_root: FisherRoot | None = None,
    ) -> None:
        super().__init__(network, plan.subset, likelihood, fisher)
        self._plan, self._fisher_root = plan, fisher_root
        self._layer_gradients = LayerGradients()
        self._leftover_gradients = ParameterGradients(network, self.parameters)
        self._accumulator = STRUCTURES[structure](plan, weight_sharing, self.dtype, self.device)
        self._accumulator.factor_options = factors
        self._structure: Structure | None = None
        self._warned = False

    def blocks(self) -> list[tuple[str, str]]:
        """The kind of block of each parameter, for the log."""
        return self._accumulator.blocks()

    def forward(self, x: Any) -> tuple[Tensor, list[Call]]:
        with self._plan.recorder(self.parameters, inputs.batch_size(x)) as recorder:
            f = inputs.call(self.network, x)
        return f, recorder.calls

    def add(self, batch: Batch) -> None:
        matched = self._plan.match(batch.f, batch.recorded, self.parameters)
        shared = matched.mixed + (matched.irregular if self._accumulator.needs_axes else ())
        if shared and len(batch.f) > 1:
            self._add_one_by_one(batch, shared)
        else:
            self._add_columns(batch, matched)

    def _add_columns(self, batch: Batch, matched: Matched) -> None:
        f, used = batch.f, matched.used
        with torch.no_grad():
            self._accumulator.add_inputs(matched.calls)
        for columns in self._columns(batch, LayerGradients.chunk_size(used, f)):
            self._accumulator.begin_chunk(len(columns), len(f))
            grads = self._layer_gradients(f, used, columns, matched.plain) if used else []
            with torch.no_grad():
                for site, calls in enumerate(matched.calls):
                    if calls:
                        self._accumulator.add_layer(site, calls, grads[: len(calls)])
                        del grads[: len(calls)]  # frees a layer's gradients after their use
            if matched.unmatched_parameters:
                self._leftover_gradients(
                    batch.x, columns, matched.unmatched_parameters, self._accumulator.add_parameter
                )
            self._accumulator.end_chunk()

    def _columns(self, batch: Batch, size: int) -> Iterator[Tensor]:
        if self._fisher_root is not None:
            return root_columns(self._fisher_root(batch.x, batch.y, batch.examples), size)
        sampled = (batch.examples.to(batch.f.device), self.fisher.samples, self.fisher.seed)
        return output_columns(self.likelihood, self.fisher.kind, batch.outputs, batch.y, size, *sampled)

    def _add_one_by_one(self, batch: Batch, shared: tuple[str, ...]) -> None:
        """A single example owns all rows of every layer."""
        if not self._warned:
            self._warned = True
            what = f"share rows of {', '.join(shared)}"
            if isinstance(batch.x, inputs.WholeInput):
                what = f"cannot be taken apart in an input of type {batch.x.kind}"
            logger.warning(
                "batch %d: examples %s; such batches run one example at a time, which is exact but slow: "
                "structure='diag' or subset='last_layer' cost least",
                batch.number,
                what,
            )
        outputs = []
        for n in range(len(batch.y)):
            one = slice(n, n + 1)
            x = inputs.take(self.network, batch.x, one)
            f, calls = self.forward(x)
            check_output(f, 1)
            outputs.append(f.detach())
            self.add(replace(batch, x=x, y=batch.y[one], f=f, recorded=calls, examples=batch.examples[one]))
        check_examples_apart(self.network, torch.cat(outputs), batch.outputs)

    def gather(self, processes: Processes) -> None:
        self._accumulator.gather(processes)

    @property
    def sums(self) -> list[Tensor]:
        return self._accumulator.sums

    def overflowing(self) -> str | None:
        return self._accumulator.overflowing()

    def end_pass(self, processes: Processes) -> str | None:
        self._structure = self._accumulator.finish(processes)
        second_pass = self._accumulator.second_pass(self._structure)
        if second_pass is None:
            return None
        self._accumulator, self._plan = second_pass, second_pass.plan
        return ", eigenvalues"

    def structure(self) -> Structure:
        assert self._structure is not None
        return self._structure
