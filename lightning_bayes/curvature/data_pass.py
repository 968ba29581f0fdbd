"""The loop over the data that all fits share.

`DataPass` runs a network batch by batch: it checks outputs and targets, numbers the examples, sums what every fit
learns about the data (size, log-likelihood, squared error, gradient of the loss), adds all sums over processes, and
repeats the pass as often as the fit requires. A `BatchSum` sums one form of the curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_bayes.jacobian.checks import ORDER_REMEDY, SAME_ORDER, BatchChecks, PassOrder, check_output
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, Processes, Subset, inputs, private
from lightning_bayes.network.errors import not_finite
from lightning_bayes.network.float64 import float64_device, in_float64, number_like, widest
from lightning_bayes.network.messages import warn
from lightning_bayes.network.output import Output
from lightning_bayes.structures import Structure

EMPTY = "the loader is empty: pass at least one batch"
Batches = Callable[[str], Iterable[tuple[Any, Tensor]]]  # one pass over `(x, y)`; the string describes it
MakeSum = Callable[[Any, Tensor], "BatchSum"]  # makes the sum from the first batch


@dataclass(frozen=True, eq=False)
class Curvature:
    """`H = Σₙ JₙᵀΛₙJₙ` over `subset`, and what the same pass learns about the data."""

    structure: Structure
    subset: Subset
    likelihood: Likelihood
    kind: str
    n_data: int  # examples seen
    n_outputs: int  # the number of outputs of all examples; for coupled outputs, of their measurements
    # The next three fields are None if the fit did not compute them:
    log_likelihood: Tensor | None = None  # Σₙ log p(yₙ | fₙ), float64
    gradient: Tensor | None = None  # −Σₙ ∂ log p(yₙ | fₙ) / ∂θ [P]
    squared_error: Tensor | None = None  # Σₙ ‖(yₙ − fₙ)/σ‖², float64, for a Gaussian likelihood
    weight_sharing: str = "expand"  # this and the next three fields are options of the fit
    hessian: str = "exact"
    samples: int = 1
    seed: int = 0
    normalised: tuple[str, ...] | None = None  # the layers of the subset directly before a normalisation
    output: Output = field(default_factory=Output)  # how to read f from the network's output

    @property
    def knows_likelihood(self) -> bool:
        return self.log_likelihood is not None


@dataclass(frozen=True)
class Fisher:
    """The output curvature `Λₙ`: its kind, and the number and seed of sampled labels for "fisher_mc"."""

    kind: str = "ggn"
    samples: int = 1
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    x: Any
    y: Tensor  # invalid targets are zero until the checks raise an error
    f: Tensor  # outputs, with their graph
    recorded: Any  # what `BatchSum.forward` returned besides the outputs
    examples: Tensor  # indices of the examples in the order of all data [B]
    number: int = 0  # number of the batch in this pass
    counts: bool = True  # False if the batch is not added and only keeps this process in step with others

    @property
    def outputs(self) -> Tensor:
        return self.f.detach()


class BatchSum:
    """A sum over the batches of one or several passes. The base class sums no curvature."""

    learns_likelihood: ClassVar[bool] = True
    needs_same_labels: ClassVar[bool] = False  # whether labels that change between passes are an error

    def __init__(self, network: nn.Module, subset: Subset | None, likelihood: Likelihood, fisher: Fisher) -> None:
        self.network, self.likelihood, self.fisher, self._subset = network, likelihood, fisher, subset
        self.parameters = {} if subset is None else subset.parameters(network)
        first = next(iter(self.parameters.values()), torch.empty(0, device=inputs.device_of(network)))
        self.dtype, self.device = torch.promote_types(first.dtype, torch.float32), first.device

    @property
    def subset(self) -> Subset:
        assert self._subset is not None
        return self._subset

    def forward(self, x: Any) -> tuple[Tensor, Any]:
        """The network's output, and what `add` needs from the forward pass."""
        return inputs.call(self.network, x), None

    def checking(self) -> AbstractContextManager[None]:
        """The context in which a batch is checked, for passes in which all processes must fail together."""
        return nullcontext()

    def add(self, batch: Batch) -> None:
        """Add one batch."""

    def gather(self, processes: Processes) -> None:
        """Prepare `sums` for the addition over processes."""

    @property
    def sums(self) -> list[Tensor]:
        """The tensors to add over processes after each pass, in place."""
        return []

    def overflowing(self) -> str | None:
        """The name of a parameter whose sums are not finite, or None."""
        return None

    def end_pass(self, processes: Processes) -> str | None:
        """Use the sums over all processes. Returns a description of the next pass, or None after the last one."""
        return None

    def structure(self) -> Structure:
        """The curvature, after the last pass."""
        raise NotImplementedError


class DataPass:
    """Passes over the data of all `processes`; `first_example` is the index of the first example in the order of all
    data."""

    def __init__(self, likelihood: Likelihood, processes: Processes | None = None, first_example: int = 0) -> None:
        self._likelihood, self._processes, self._first_example = likelihood, processes or Processes(), first_example
        self._n_passes = 0
        self._gradient: Tensor | None = None
        self.n_data = self.n_outputs = 0  # over all processes, after the first pass

    def fit(self, batches: Batches, make_sum: MakeSum, total: BatchSum | None = None) -> Curvature:
        """Run all passes; `make_sum` creates the `BatchSum` from the first batch, unless `total` is given."""
        total = self.run(batches, make_sum, total)
        return Curvature(
            structure=total.structure(),
            subset=total.subset,
            likelihood=self._likelihood,
            kind=total.fisher.kind,
            gradient=self._gradient,
            **self.learned(),
        )

    def run(self, batches: Batches, make_sum: MakeSum | None = None, total: BatchSum | None = None) -> BatchSum:
        description: str | None = ""
        while description is not None:
            with self._processes.raising_together():
                if total is not None:
                    self.begin(total)
                for x, y in batches(description):
                    if total is None:
                        assert make_sum is not None
                        total = make_sum(x, y)
                        self.begin(total)
                    self.add(x, y)
                if total is None:
                    raise DataError(EMPTY)
                self.raise_pending()
            self.end()
            description = total.end_pass(self._processes)
        assert total is not None
        return total

    def begin(self, total: BatchSum) -> None:
        """Begin a pass."""
        self._total, self._checks = total, BatchChecks(self._likelihood, total.overflowing)
        self._n_batches = self._n_examples = self._n_numbers = 0  # of this process
        self._n_passes += 1
        if self._n_passes == 1:
            self._order = PassOrder(total.fisher.kind)
            learning = total.parameters.values() if total.learns_likelihood else ()
            self._gradients = [torch.zeros_like(p, dtype=total.dtype) for p in learning]
            self._totals = torch.zeros(3, dtype=torch.float64, device=float64_device(total.device))
        else:
            self._order.begin()

    def add(self, x: Any, y: Tensor, counts: bool = True) -> None:
        """Add a batch. With `counts=False` the batch only keeps this process in step with the other processes."""
        B = inputs.batch_size(x)
        examples = self._first_example + self._processes.examples(self._n_examples, B, y.device)
        f, recorded = self._total.forward(x)
        with self._total.checking():
            if self._total.parameters:
                check_output(f, B)
            y = self._checks.add(x, f.detach(), y)
            self._checks.end_batch()
        batch = Batch(x, y, f, recorded, examples, self._n_batches, counts)
        self._total.add(batch)
        self._order.add(batch.outputs, examples)
        if self._n_passes == 1 and self._total.learns_likelihood:
            self._learn(batch)
        self._n_batches += 1
        if counts:
            self._n_examples += B
            self._n_numbers += (y if self._likelihood.couples_outputs else f).numel()

    def raise_pending(self) -> None:
        """Raise an error for the first invalid batch since the last check."""
        self._checks.raise_pending()

    def end(self) -> None:
        """End a pass: add the sums over processes and check them."""
        total = self._total
        total.gather(self._processes)
        counts = self._totals.new_tensor([self._n_examples, self._n_numbers])
        learned = []
        if self._n_passes == 1 and total.learns_likelihood:
            learned.append(self._totals)
            if self._gradients:
                self._gradient = total.subset.join(self._gradients)
                learned.append(self._gradient)
        self._processes.sum_([*total.sums, counts, *learned])
        self._check_counts(*map(int, counts.tolist()))
        if (name := total.overflowing()) is not None:
            raise not_finite(name)
        if self._n_passes > 1 and not self._order.is_same(self._processes, self._totals.device):
            if total.needs_same_labels:
                raise DataError(f"curvature='fisher_mc' needs {SAME_ORDER}: {ORDER_REMEDY}")
            warn(
                "curvature='fisher_mc' needs %s to draw the same labels again, but the second pass drew others: %s",
                SAME_ORDER,
                ORDER_REMEDY,
            )

    def learned(self) -> dict[str, Any]:
        """The fields of `Curvature` that every fit learns about the data."""
        log_likelihood, squared_error, n_targets = self._totals.cpu()
        if n_targets == 0:
            raise DataError("all targets are equal to ignore_index, so there is nothing to fit")
        return {
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "log_likelihood": log_likelihood,
            "squared_error": None if squared_error.isnan() else squared_error,
        }

    def _check_counts(self, n_data: int, n_outputs: int) -> None:
        if self._n_passes == 1:
            self.n_data, self.n_outputs = n_data, n_outputs
            if n_data == 0:
                raise DataError(EMPTY)
        elif n_data != self.n_data:
            raise DataError(
                f"pass {self._n_passes} over the data gave {n_data} examples, but the first gave {self.n_data}: use a "
                "list or a DataLoader that gives the same examples each time"
            )

    def _learn(self, batch: Batch) -> None:
        """Add log-likelihood, squared error (NaN for a likelihood without one), the number of valid targets, and the
        gradient of the loss. Totals are computed in float64, beginning with the outputs: in float32, `log p` of a
        confident class rounds to zero, and tuning the noise takes a large squared error out of the
        log-likelihood again."""
        f, y, likelihood = widest(batch.outputs), batch.y, self._likelihood
        log_likelihood = in_float64(likelihood.log_likelihood_per_example(f, y)).sum()
        error = likelihood.squared_error(f, y)
        numbers = (log_likelihood, math.nan if error is None else error, likelihood.n_targets(y))
        self._totals += torch.stack([number_like(number, log_likelihood) for number in numbers])
        if self._gradients:
            cotangent = -likelihood.residual(batch.outputs, y).to(batch.f.dtype)
            parameters = list(self._total.parameters.values())
            gradients = torch.autograd.grad(batch.f, parameters, cotangent, materialize_grads=True)
            private.foreach_add_(self._gradients, gradients)
