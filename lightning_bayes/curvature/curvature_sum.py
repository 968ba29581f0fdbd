"""The running sum of a fit, `Σₙ JₙᵀΛₙJₙ`, and what the same pass learns of the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.accumulate import STRUCTURES
from lightning_bayes.jacobian.checks import (
    ORDER_REMEDY,
    SAME_ORDER,
    BatchChecks,
    PassOrder,
    check_examples_apart,
    check_output,
)
from lightning_bayes.jacobian.gradients import LayerGradients, ParameterGradients
from lightning_bayes.jacobian.output_columns import output_columns, root_columns
from lightning_bayes.jacobian.plan import Plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, Processes, Subset, inputs
from lightning_bayes.network.accumulation import cast_like, float64_device, in_float64, widest
from lightning_bayes.network.errors import not_finite
from lightning_bayes.network.output import Output
from lightning_bayes.structures import Structure
from lightning_bayes.structures.factor import Rank

logger = logging.getLogger("lightning_bayes")

RootAt = Callable[
    [Any, Tensor, Tensor], Tensor
]  # a Fisher root, as a likelihood's, from x, y and the examples' numbers


@dataclass(frozen=True, eq=False)
class Curvature:
    """`H = Σₙ JₙᵀΛₙJₙ` over `subset`, with what the same pass learns of the data."""

    structure: Structure
    subset: Subset
    likelihood: Likelihood
    kind: str
    n_data: int  # examples seen
    n_outputs: int  # numbers that the network put out for them, or that were measured of these
    # What a fit without a pass over the data does not know:
    log_likelihood: Tensor | None = None  # Σₙ log p(yₙ | fₙ), float64
    gradient: Tensor | None = None  # −Σₙ ∂ log p(yₙ | fₙ) / ∂θ [P]
    squared_error: Tensor | None = None  # Σₙ ‖(yₙ − fₙ)/σ‖², float64, of a Gaussian likelihood
    weight_sharing: str = "expand"  # with which words it was fitted
    hessian: str = "exact"
    samples: int = 1
    seed: int = 0
    normalised: tuple[str, ...] | None = None  # the layers of the subset directly before a normalisation
    output: Output = field(default_factory=Output)  # how the network is read

    @property
    def knows_likelihood(self) -> bool:
        return self.log_likelihood is not None


class CurvatureSum:
    """The running sum: one forward pass per batch, and a few batched backward passes to the layers' outputs."""

    def __init__(
        self,
        network: nn.Module,
        plan: Plan,
        likelihood: Likelihood,
        structure: str = "diag",
        weight_sharing: str = "expand",
        curvature: str = "ggn",
        samples: int = 1,
        seed: int = 0,
        processes: Processes | None = None,
        root_at: RootAt | None = None,
        updatable: bool = False,
        first_example: int = 0,
        rank: Rank = None,
        checks: BatchChecks | None = None,
    ) -> None:
        self._network, self._plan, self._first = network, plan, first_example
        self._root_at = root_at  # instead of the likelihood's own at the network's outputs
        self._likelihood, self._curvature, self._samples, self._seed = likelihood, curvature, samples, seed
        self._processes, self._order = processes or Processes(), PassOrder(curvature)
        self._parameters = plan.subset.parameters(network)
        self._layer_gradients = LayerGradients()
        self._leftover_gradients = ParameterGradients(network, self._parameters)
        self._refits = False  # whether this is the second pass, which learns of the eigenvalues alone
        self._slow = False  # whether some batch had to be taken one example at a time
        self._batches = self._n_data = 0
        first = next(iter(self._parameters.values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._accumulator = STRUCTURES[structure](plan, weight_sharing, dtype, first.device)
        self._accumulator.keeps_factors, self._accumulator.rank = updatable, rank
        self._gradients = [torch.zeros_like(p, dtype=dtype) for p in self._parameters.values()]  # of the loss
        self._totals = torch.zeros(5, dtype=torch.float64, device=float64_device(first.device))  # see `data_totals`
        self._checks = checks or BatchChecks(likelihood, self._overflowing)

    def blocks(self) -> list[tuple[str, str]]:
        """Which parameter is in which kind of block, for the log."""
        return self._accumulator.blocks()

    def add(self, x: Any, y: Tensor) -> None:
        B = inputs.batch_size(x)
        examples = self._first + self._processes.examples(self._n_data, B, y.device)
        outputs, y = self._add(x, y, examples)
        self._order.add(outputs, examples)
        if not self._refits:
            self._totals += data_totals(self._likelihood, outputs, y)
        self._checks.end_batch()
        self._batches += 1
        self._n_data += B

    def _add(self, x: Any, y: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs and the targets, without those that are wrong."""
        B = inputs.batch_size(x)
        with self._plan.recorder(self._parameters, B) as recorder:
            f = inputs.call(self._network, x)
        check_output(f, B)
        outputs = f.detach()
        y = self._checks.add(x, outputs, y)
        matched = self._plan.match(f, recorder.calls, self._parameters)
        slow = matched.mixed + (matched.irregular if self._accumulator.needs_axes else ())
        if slow and B > 1:
            self._add_one_by_one(x, y, examples, outputs, slow)
            return outputs, y
        used = matched.used
        with torch.no_grad():
            self._accumulator.add_inputs(matched.calls)
        size = LayerGradients.chunk_size(used, f)
        drawn = (examples.to(f.device), self._samples, self._seed)
        if self._root_at is None:
            columns = output_columns(self._likelihood, self._curvature, outputs, y, size, *drawn)
        else:
            columns = root_columns(self._root_at(x, y, examples), size)
        for chunk in columns:
            self._accumulator.begin_chunk(len(chunk), B)
            grads = self._layer_gradients(f, used, chunk, matched.plain) if used else []
            with torch.no_grad():
                for site, calls in enumerate(matched.calls):
                    if calls:
                        self._accumulator.add_layer(site, calls, grads[: len(calls)])
                        del grads[: len(calls)]  # a layer's gradients are dropped as soon as they are used
            if matched.unmatched_parameters:
                self._leftover_gradients(x, chunk, matched.unmatched_parameters, self._accumulator.add_parameter)
            self._accumulator.end_chunk()
        if not self._refits:
            self._add_gradient(f, -self._likelihood.residual(outputs, y))
        return outputs, y

    def _add_one_by_one(self, x: Any, y: Tensor, examples: Tensor, outputs: Tensor, slow: tuple[str, ...]) -> None:
        """A single example owns all rows of every layer."""
        if not self._slow:
            self._slow = True
            what = f"share rows of {', '.join(slow)}"
            if isinstance(x, inputs.WholeInput):
                what = f"cannot be taken apart in an input of type {x.kind}"
            logger.warning(
                "batch %d: examples %s; such batches are taken one example at a time, which is exact for every "
                "structure and slow: structure='diag' or subset='last_layer' cost least",
                self._batches,
                what,
            )
        ones = [slice(n, n + 1) for n in range(len(y))]
        alone = [self._add(inputs.take(self._network, x, one), y[one], examples[one])[0] for one in ones]
        check_examples_apart(self._network, torch.cat(alone), outputs)

    def structure(self) -> Structure:
        """The sum of one process, without a look at what it has noted."""
        return self._accumulator.finish(Processes())

    def look(self) -> None:
        """Raise what was wrong with the batches so far."""
        self._checks.raise_pending()

    def finish(self, progress: bool = False) -> Curvature:
        self._accumulator.shows_progress = progress
        self._accumulator.gather(self._processes)
        gradient = self._plan.subset.narrow(torch.cat([g.flatten() for g in self._gradients]))
        self._processes.sum_([*self._accumulator.sums, gradient, self._totals])
        if self._totals[0] == 0:
            raise DataError("the loader is empty: curvature needs at least one batch")
        if (name := self._accumulator.overflowing()) is not None:
            raise not_finite(name)
        return Curvature(
            structure=self._accumulator.finish(self._processes),
            subset=self._plan.subset,
            likelihood=self._likelihood,
            kind=self._curvature,
            **name_totals(self._totals),
            gradient=gradient,
        )

    def refitted(self, fitted: Curvature, batches: Iterable[tuple[Any, Tensor]]) -> Curvature:
        """What `finish` gave, after a second pass over the same `batches`, if the structure takes one."""
        accumulator = self._accumulator.again(fitted.structure)
        if accumulator is None:
            return fitted
        self._accumulator, self._plan = accumulator, accumulator.plan
        self._refits, self._batches, self._n_data = True, 0, 0
        self._checks = BatchChecks(self._likelihood, self._overflowing)
        self._order.begin()
        with self._processes.raising_together():
            for x, y in batches:
                self.add(x, y)
            self._checks.raise_pending()
        seen = torch.tensor(self._n_data, dtype=torch.float64, device=self._totals.device)
        self._processes.sum_([*accumulator.sums, seen])
        if seen != fitted.n_data:
            raise DataError(
                f"the structure takes two passes over the data, but the second gave {int(seen)} examples and the first "
                f"{fitted.n_data}: pass a loader that gives all of them each time, such as a list or a DataLoader"
            )
        if not self._order.is_same(self._processes, self._totals.device):
            logger.warning(
                "curvature='fisher_mc' with two passes has labels that belong together only with %s; the eigenvalues "
                "are now those of other labels: %s",
                SAME_ORDER,
                ORDER_REMEDY,
            )
        if (name := accumulator.overflowing()) is not None:
            raise not_finite(name)
        return replace(fitted, structure=accumulator.finish(self._processes))

    def _overflowing(self) -> str | None:
        return self._accumulator.overflowing()

    def _add_gradient(self, f: Tensor, cotangent: Tensor) -> None:
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(f, parameters, cotangent.to(f.dtype), materialize_grads=True)
        torch._foreach_add_(self._gradients, gradients)


def data_totals(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Of a batch, in float64: examples, outputs, log-likelihood, squared error (NaN for a likelihood without one), and
    targets that count. Float64 from the outputs on: `log p` of a sure class rounds to zero in float32, and a large
    squared error is subtracted again when the noise is tuned. A device without float64 has the sums alone in it.
    # [5]"""
    f = widest(f)
    log_likelihood = in_float64(likelihood.log_likelihood_per_example(f, y)).sum()
    error = likelihood.squared_error(f, y)
    outputs = y.numel() if likelihood.couples_outputs else f.numel()
    totals = (len(f), outputs, log_likelihood, math.nan if error is None else error, likelihood.n_targets(y))
    like = log_likelihood
    return torch.stack([cast_like(n, like) if isinstance(n, Tensor) else like.new_tensor(n) for n in totals])


def name_totals(totals: Tensor) -> dict[str, Any]:
    n_data, n_outputs, log_likelihood, squared_error, n_targets = totals.cpu()
    if n_targets == 0:
        raise DataError(
            "no target counts: all are marked as unknown (ignore_index), and without targets there is nothing to fit"
        )
    return {
        "n_data": int(n_data),
        "n_outputs": int(n_outputs),
        "log_likelihood": log_likelihood,
        "squared_error": None if squared_error.isnan() else squared_error,
    }
