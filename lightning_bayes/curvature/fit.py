"""`fit_curvature`: one pass over the data that adds up `H = Σₙ JₙᵀΛₙJₙ` in the chosen structure.

`Λₙ` is the exact output Fisher (`ggn`), its Monte-Carlo estimate (`fisher_mc`) or the outer product of the example's
own gradient (`empirical_fisher`); the sum is over data, never a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm  # Lightning's own progress bar, and so always installed

from lightning_bayes.arguments import count, flag, instance, word
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.curvature import inputs
from lightning_bayes.curvature.accumulate import SHARINGS, STRUCTURES, Accumulator, make_accumulator
from lightning_bayes.curvature.checks import check_loader, check_network, check_real
from lightning_bayes.curvature.errors import DataError
from lightning_bayes.curvature.gradients import LayerGradients, ParameterGradients
from lightning_bayes.curvature.plan import Plan, check_finite, check_output, describe, find_last_layer, make_plan
from lightning_bayes.curvature.preserve import borrowed, preserved_rng, unwrap
from lightning_bayes.curvature.processes import Processes
from lightning_bayes.curvature.recorder import Call, recording
from lightning_bayes.curvature.roots import CURVATURES, output_columns
from lightning_bayes.curvature.subset import Subset, check_subset, resolve_subset
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.structures import Structure


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
        progress: show a progress bar.
        processes: those that share the data, each with every `size`-th example from its `rank`; the sums are then
            over all of them.
        probe: an input to trace the network on, for a process whose own share of the data may be empty; by default
            the first batch.
    """
    check_options(structure, subset, curvature, samples, seed, weight_sharing, progress, processes)
    likelihood = resolve(likelihood)
    network = check_network(unwrap(network))
    check_loader(loader)
    total: Sum | None = None
    with ExitStack() as stack:
        stack.enter_context(preserved_rng())
        stack.enter_context(torch.inference_mode(False))
        bar = stack.enter_context(tqdm(loader, desc=f"{structure} {curvature}", disable=not progress, unit="batch"))

        def begin(x: Any) -> Sum:
            chosen = choose_subset(network, x, subset)
            stack.enter_context(borrowed(network, chosen.names))
            plan = make_plan(network, x, chosen)
            first = next(iter(chosen.parameters(network).values()))
            dtype = torch.promote_types(first.dtype, torch.float32)
            accumulator = make_accumulator(structure, plan, weight_sharing, dtype, first.device)
            describe(accumulator.blocks())
            return Sum(network, plan, accumulator, likelihood, curvature, samples, seed, processes or Processes())

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
) -> None:
    """Refuse what is known to be wrong without a network or data."""
    word("structure", structure, tuple(STRUCTURES))
    word("curvature", curvature, tuple(CURVATURES))
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
    """What a pass over the data learns beside the curvature: `n_data`, `n_outputs` and `log_likelihood`."""
    check_loader(loader)
    check_processes(processes)
    totals = torch.zeros(3, dtype=torch.float64, device=_device(network))
    with preserved_rng(), torch.inference_mode(False), borrowed(network, ()), torch.no_grad():
        for batch in loader:
            x, y = _prepare(network, batch)
            f = inputs.call(network, x)
            likelihood.check(f, y)
            here = [inputs.batch_size(x), f.numel(), likelihood.log_likelihood(f, y).item()]
            totals += torch.tensor(here, dtype=torch.float64, device=totals.device)
    (processes or Processes()).sum_([totals])
    if totals[0] == 0:
        raise DataError("the loader is empty: a log-likelihood needs at least one batch")
    return {"n_data": int(totals[0]), "n_outputs": int(totals[1]), "log_likelihood": totals[2].cpu()}


def choose_subset(network: nn.Module, x: Any, subset: str | Sequence[str] | Tensor) -> Subset:
    """The parameters that `subset` means; the last layer is found by tracing `network` on `x`."""
    last_layer: tuple[str, ...] = ()
    if isinstance(subset, str) and subset == "last_layer":
        with borrowed(network, [name for name, _ in network.named_parameters()]):
            last_layer = find_last_layer(network, x)
    chosen = resolve_subset(network, subset, last_layer)
    check_real(chosen.parameters(network))
    return chosen


class Sum:
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
        leftovers = {name: self._parameters[name] for name in plan.leftovers}
        self._leftover_gradients = ParameterGradients(network, leftovers) if leftovers else None
        self._batches = self._n_data = self._n_outputs = 0
        self._log_likelihood = torch.zeros((), dtype=torch.float64)

    def add(self, x: Any, y: Tensor) -> None:
        B = inputs.batch_size(x)
        with recording(self._parameters) as calls:
            f = inputs.call(self._network, x)
        check_output(f, B)
        outputs = f.detach()
        check_finite(outputs, x, self._batches)
        self._likelihood.check(outputs, y)
        examples = self._processes.examples(self._n_data, B, f.device)

        matched = self._plan.match(calls)
        used = [call for here in matched for call in here]
        with torch.no_grad():
            self._accumulator.add_inputs(matched)
        size = LayerGradients.chunk_size(used, f)
        drawn = (examples, self._samples, self._seed)
        for chunk in output_columns(self._likelihood, self._curvature, outputs, y, size, *drawn):
            self._accumulator.begin_chunk(len(chunk), B)
            self._add_sites(matched, self._layer_gradients(f, used, chunk) if used else [])
            if self._leftover_gradients is not None:
                self._leftover_gradients(x, chunk, self._add_leftovers)
            self._accumulator.end_chunk()

        self._batches += 1
        self._n_data += B
        self._n_outputs += f.numel()
        self._log_likelihood += self._likelihood.log_likelihood(outputs, y).double().cpu()

    def finish(self) -> Curvature:
        numbers = [float(self._n_data), float(self._n_outputs), self._log_likelihood.item()]
        totals = torch.tensor(numbers, dtype=torch.float64, device=_device(self._network))
        self._processes.sum_([*self._accumulator.sums, totals])
        if totals[0] == 0:
            raise DataError("the loader is empty: curvature needs at least one batch")
        return Curvature(
            structure=self._accumulator.structure(self._processes),
            subset=self._plan.subset,
            likelihood=self._likelihood,
            kind=self._curvature,
            n_data=int(totals[0]),
            n_outputs=int(totals[1]),
            log_likelihood=totals[2].cpu(),
        )

    @torch.no_grad()
    def _add_sites(self, matched: list[list[Call]], grads: list[Tensor]) -> None:
        for site, here in enumerate(matched):
            self._accumulator.add_site(site, here, grads[: len(here)])
            del grads[: len(here)]  # a layer's gradients are dropped as soon as they are used

    def _add_leftovers(self, gradients: dict[str, Tensor], examples: slice) -> None:
        for name, J in gradients.items():
            self._accumulator.add_leftover(name, J, examples)


def _prepare(network: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    return inputs.to_device(inputs.split_targets(batch), _device(network))


def _device(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))
