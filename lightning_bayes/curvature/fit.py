"""`fit_curvature`: one pass over the data that adds up `H = Σₙ JₙᵀΛₙJₙ` in the chosen structure.

`Λₙ` is the exact output Fisher (`ggn`), its Monte-Carlo estimate (`fisher_mc`) or the outer product of the example's
own gradient (`empirical_fisher`); the sum is over data, never a mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm  # Lightning's own progress bar, and so always installed

from lightning_bayes.arguments import count, flag, instance, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.curvature.accumulate import SHARINGS, STRUCTURES, Accumulator, BlockAccumulator, make_accumulator
from lightning_bayes.curvature.gradients import LayerGradients, ParameterGradients
from lightning_bayes.curvature.output_checks import check_examples_apart, check_finite, check_output
from lightning_bayes.curvature.output_columns import CURVATURES, output_columns
from lightning_bayes.curvature.plan import Plan, describe, find_last_layer, make_plan
from lightning_bayes.curvature.recorder import Call, recording
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed, preserved_rng, unwrap
from lightning_bayes.network.checks import check_loader, check_network, check_real
from lightning_bayes.network.errors import DataError
from lightning_bayes.network.processes import Processes
from lightning_bayes.network.subset import Subset, check_subset, resolve_subset
from lightning_bayes.structures import Structure

HESSIANS = ("auto", "exact", "approx", "mixed")
logger = logging.getLogger("lightning_bayes")


@dataclass(frozen=True, eq=False)
class Curvature:
    """`H = Σₙ JₙᵀΛₙJₙ` over `subset`, with what the same pass learns of the data."""

    structure: Structure
    subset: Subset
    likelihood: Likelihood
    kind: str
    n_data: int  # examples seen
    n_outputs: int  # numbers that the network put out for them
    log_likelihood: Tensor  # Σₙ log p(yₙ | fₙ), float64; NaN where no data were passed over
    gradient: Tensor | None = None  # −Σₙ ∂ log p(yₙ | fₙ) / ∂θ [P]; None where no data were passed over
    squared_error: Tensor | None = None  # Σₙ ‖(yₙ − fₙ)/σ‖², float64, of a Gaussian likelihood

    @property
    def knows_likelihood(self) -> bool:
        return not bool(self.log_likelihood.isnan())


def fit_curvature(
    network: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    structure: str = "kron",
    subset: str | Sequence[str] | Tensor = "all",
    curvature: str = "ggn",
    *,
    samples: int = 1,
    seed: int = 0,
    weight_sharing: str = "expand",
    hessian: str = "exact",
    progress: bool = False,
    processes: Processes | None = None,
    probe: Any = None,
) -> Curvature:
    """The curvature of `network`'s loss, summed over the `(x, y)` batches of `loader`.

    Args:
        network: maps x to f(x): logits, or the mean of a regression. It is run in eval mode and left as it was.
        loader: an iterable of pairs; x may be a tuple or dict of tensors for a network with several inputs.
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        structure: "full", "diag" or "kron".
        subset: "all" trainable parameters, the "last_layer", a list of parameter or module names, or a mask over (or
            positions of) the trainable weights.
        curvature: "ggn", "fisher_mc" or "empirical_fisher".
        samples: labels drawn per example for "fisher_mc".
        seed: of those labels; each example has its own random numbers, whatever batch it comes in.
        weight_sharing: how "kron" treats weights that are shared over positions: "expand" or "reduce".
        hessian: how the diagonal of the GGN is computed: "exact" (a backward pass for each output), or by one backward
            pass "approx", "mixed" or "auto"; see `lightning_bayes.curvature.backprop`.
        progress: show a progress bar.
        processes: those that share the data, each with every `size`-th example from its `rank`; the sums are then
            over all of them.
        probe: an input to trace the network on, for a process whose own share of the data may be empty; by default
            the first batch.
    """
    check_options(structure, subset, curvature, samples, seed, weight_sharing, progress, processes, hessian)
    likelihood = resolve(likelihood)
    network = check_network(unwrap(network))
    check_loader(loader)
    total: CurvatureSum | None = None
    with ExitStack() as stack:
        stack.enter_context(preserved_rng())
        stack.enter_context(torch.inference_mode(False))
        bar = stack.enter_context(tqdm(loader, desc=f"{structure} {curvature}", disable=not progress, unit="batch"))

        def begin(x: Any) -> CurvatureSum:
            chosen = choose_subset(network, x, subset)
            stack.enter_context(borrowed(network, chosen.names))
            plan = make_plan(network, x, chosen)
            first = next(iter(chosen.parameters(network).values()))
            dtype = torch.promote_types(first.dtype, torch.float32)
            accumulator = make_accumulator(structure, plan, weight_sharing, dtype, first.device)
            sharing = processes or Processes()
            if hessian != "exact":
                from lightning_bayes.curvature.backprop.diagonal_sum import DiagonalSum  # which builds on this module

                assert isinstance(accumulator, BlockAccumulator)
                describe([(name, f"{hessian} diagonal") for name in chosen.names])
                return DiagonalSum(network, plan, accumulator, likelihood, hessian, sharing)
            describe(accumulator.blocks())
            return CurvatureSum(network, plan, accumulator, likelihood, curvature, samples, seed, sharing)

        if probe is not None:
            total = begin(inputs.to_device(probe, _device(network)))
        for batch in bar:
            x, y = _prepare(network, batch)
            total = total or begin(x)
            total.add(x, y)
        if total is None:
            raise DataError("the loader is empty: curvature needs at least one batch")
        return total.finish()


def check_options(
    structure: Any,
    subset: Any,
    curvature: Any,
    samples: Any = 1,
    seed: Any = 0,
    weight_sharing: Any = "expand",
    progress: Any = False,
    processes: Any = None,
    hessian: Any = "exact",
) -> None:
    """Refuse what is known to be wrong without a network or data."""
    word("structure", structure, tuple(STRUCTURES))
    word("curvature", curvature, tuple(CURVATURES))
    word("hessian", hessian, HESSIANS)
    if hessian != "exact" and (structure, curvature) != ("diag", "ggn"):
        raise ValueError(
            f"hessian={hessian!r} is a diagonal of the GGN and needs structure='diag' and curvature='ggn', got "
            f"structure={structure!r} and curvature={curvature!r}"
        )
    word("weight_sharing", weight_sharing, tuple(SHARINGS))
    check_subset(subset)
    count("samples", samples)
    check_seed("seed", seed)
    flag("progress", progress)
    check_processes(processes)


def check_processes(processes: Any) -> None:
    if processes is not None:
        instance("processes", processes, Processes, "Processes(rank, size)")


def log_likelihood(
    network: nn.Module, loader: Iterable[Any], likelihood: Likelihood, processes: Processes | None = None
) -> dict[str, Any]:
    """What a pass over the data learns beside the curvature: its size, log-likelihood and squared error."""
    check_loader(loader)
    check_processes(processes)
    totals = torch.zeros(5, dtype=torch.float64, device=_device(network))
    with preserved_rng(), torch.inference_mode(False), borrowed(network, ()), torch.no_grad():
        for batch in loader:
            x, y = _prepare(network, batch)
            f = inputs.call(network, x)
            likelihood.check(f, y)
            here = [inputs.batch_size(x), f.numel(), *_fit_of(likelihood, f, y)]
            totals += torch.tensor(here, dtype=torch.float64, device=totals.device)
    (processes or Processes()).sum_([totals])
    if totals[0] == 0:
        raise DataError("the loader is empty: a log-likelihood needs at least one batch")
    return _numbers(totals)


def choose_subset(network: nn.Module, x: Any, subset: str | Sequence[str] | Tensor) -> Subset:
    """The parameters that `subset` means; the last layer is found by tracing `network` on `x`."""
    last_layer: tuple[str, ...] = ()
    if isinstance(subset, str) and subset == "last_layer":
        with borrowed(network, [name for name, _ in network.named_parameters()]):
            last_layer = find_last_layer(network, x)
    chosen = resolve_subset(network, subset, last_layer)
    check_real(chosen.parameters(network))
    return chosen


class CurvatureSum:
    """The running sum: one forward pass per batch, and a few batched backward passes to the layers' outputs."""

    def __init__(
        self,
        network: nn.Module,
        plan: Plan,
        accumulator: Accumulator,
        likelihood: Likelihood,
        curvature: str,
        samples: int,
        seed: int,
        processes: Processes,
    ) -> None:
        self._network, self._plan, self._accumulator = network, plan, accumulator
        self._likelihood, self._curvature, self._samples, self._seed = likelihood, curvature, samples, seed
        self._processes = processes
        self._parameters = plan.subset.parameters(network)
        self._layer_gradients = LayerGradients()
        self._leftover_gradients = ParameterGradients(network, self._parameters)
        self._slow = False  # whether some batch had to be taken one example at a time
        self._batches = self._n_data = self._n_outputs = 0
        self._fit = [0.0, 0.0, 0.0]  # see `_fit_of`
        first = next(iter(self._parameters.values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._gradient = torch.zeros(plan.subset.full_size, dtype=dtype, device=first.device)

    def add(self, x: Any, y: Tensor) -> None:
        B = inputs.batch_size(x)
        outputs = self._add(x, y, self._processes.examples(self._n_data, B, y.device))
        if inputs.has_nonfinite(x) and (name := self._accumulator.overflowing()) is not None:
            raise DataError(
                f"batch {self._batches}: its input has NaN or infinite values, with which the curvature of {name} is "
                "not finite"
            )
        self._batches += 1
        self._n_data += B
        self._n_outputs += outputs.numel()
        self._fit = [a + b for a, b in zip(self._fit, _fit_of(self._likelihood, outputs, y), strict=True)]

    def _add(self, x: Any, y: Tensor, examples: Tensor) -> Tensor:
        """Returns the outputs."""
        B = inputs.batch_size(x)
        with recording(self._parameters) as calls:
            f = inputs.call(self._network, x)
        check_output(f, B)
        outputs = f.detach()
        check_finite(outputs, x, self._batches)
        self._likelihood.check(outputs, y)
        matched = self._plan.match(f, calls, self._parameters)
        slow = matched.mixed + (matched.irregular if self._accumulator.needs_axes else ())
        if slow and B > 1:
            self._add_one_by_one(x, y, examples, outputs, slow)
            return outputs
        used = matched.used
        with torch.no_grad():
            self._accumulator.add_inputs(matched.calls)
        size = LayerGradients.chunk_size(used, f)
        drawn = (examples.to(f.device), self._samples, self._seed)
        for chunk in output_columns(self._likelihood, self._curvature, outputs, y, size, *drawn):
            self._accumulator.begin_chunk(len(chunk), B)
            self._add_sites(matched.calls, self._layer_gradients(f, used, chunk, matched.plain) if used else [])
            if matched.leftovers:
                self._leftover_gradients(x, chunk, matched.leftovers, self._add_leftovers)
            self._accumulator.end_chunk()
        self._add_gradient(f, -self._likelihood.residual(outputs, y))
        return outputs

    def _add_one_by_one(self, x: Any, y: Tensor, examples: Tensor, outputs: Tensor, slow: tuple[str, ...]) -> None:
        """A single example owns all rows of every layer."""
        if not self._slow:
            self._slow = True
            logger.warning(
                "batch %d: examples share rows of %s; such batches are taken one example at a time, which is exact and "
                "slow",
                self._batches,
                ", ".join(slow),
            )
        each = [slice(n, n + 1) for n in range(len(y))]
        alone = [self._add(inputs.take(self._network, x, n), y[n], examples[n]) for n in each]
        check_examples_apart(self._network, torch.cat(alone), outputs)

    def finish(self) -> Curvature:
        numbers = [float(self._n_data), float(self._n_outputs), *self._fit]
        totals = torch.tensor(numbers, dtype=torch.float64, device=_device(self._network))
        self._processes.sum_([*self._accumulator.sums, self._gradient, totals])
        if totals[0] == 0:
            raise DataError("the loader is empty: curvature needs at least one batch")
        return Curvature(
            structure=self._accumulator.structure(self._processes),
            subset=self._plan.subset,
            likelihood=self._likelihood,
            kind=self._curvature,
            **_numbers(totals),
            gradient=self._plan.subset.narrow(self._gradient),
        )

    def _add_gradient(self, f: Tensor, cotangent: Tensor) -> None:
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(f, parameters, cotangent.to(f.dtype), allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        self._gradient += torch.cat([part.detach().reshape(-1) for part in parts])

    @torch.no_grad()
    def _add_sites(self, matched: list[list[Call]], grads: list[Tensor]) -> None:
        for site, calls in enumerate(matched):
            if calls:
                self._accumulator.add_site(site, calls, grads[: len(calls)])
                del grads[: len(calls)]  # a layer's gradients are dropped as soon as they are used

    def _add_leftovers(self, gradients: dict[str, Tensor], examples: slice) -> None:
        for name, J in gradients.items():
            self._accumulator.add_leftover(name, J, examples)


def _fit_of(likelihood: Likelihood, f: Tensor, y: Tensor) -> list[float]:
    """Log-likelihood and squared error of a batch, summed in float64 (NaN for a likelihood without the second), and the
    number of targets that count."""
    error = likelihood.squared_error(f, y)
    return [
        likelihood.log_likelihood_per_example(f, y).double().sum().item(),
        math.nan if error is None else error.item(),
        float(likelihood.n_targets(y)),
    ]


def _numbers(totals: Tensor) -> dict[str, Any]:
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


def _prepare(network: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    return inputs.to_device(inputs.split_targets(batch), _device(network))


def _device(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))
