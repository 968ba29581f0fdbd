"""`fit_curvature`: `H = Σₙ JₙᵀΛₙJₙ`, a sum over the data and never a mean, in the chosen structure: one pass over the
data, two for "ekfac", or several for a low rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, flag, instance
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.curvature.accumulate import Undecomposed
from lightning_bayes.curvature.curvature_sum import Curvature, CurvatureSum, data_totals, name_totals
from lightning_bayes.curvature.diagonal.batch_diagonal import DiagonalSum
from lightning_bayes.curvature.low_rank import LowRankSum
from lightning_bayes.jacobian.checks import BatchChecks
from lightning_bayes.jacobian.normalised import normalised_layers
from lightning_bayes.jacobian.output_columns import choose_curvature
from lightning_bayes.jacobian.plan import describe, find_last_layer, make_plan
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import CurvatureError, DataError, Processes, Subset, inputs
from lightning_bayes.network.accumulation import float64_device
from lightning_bayes.network.borrowed import borrowed, preserved_rng, unwrap
from lightning_bayes.network.checks import check_loader, check_network, explained, reads_once
from lightning_bayes.network.containers import Sequences, Together
from lightning_bayes.network.loaders import ShownLoader
from lightning_bayes.network.output import output_of, read_as, unviewed, viewed
from lightning_bayes.network.subset import check_subset, resolve_subset
from lightning_bayes.options.network import Network, output_option
from lightning_bayes.options.structure import FisherMC, LowRank, StructureOption, curvature_estimate, structure_option

logger = logging.getLogger("lightning_bayes")


def fit_curvature(
    network: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    structure: str | StructureOption = "kron",
    subset: str | Sequence[str] | Tensor | Subset = "all",
    curvature: str | FisherMC = "auto",
    *,
    seed: int = 0,
    progress: bool = False,
    processes: Processes | None = None,
    probe: Any = None,
    output: str | int | Network | None = None,
    first_example: int = 0,
) -> Curvature:
    """The curvature of `network`'s loss, summed over the `(x, y)` batches of `loader`.

    Args:
        network: maps x to f(x): logits, or the mean of a regression. It is run in eval mode and left as it was.
        loader: an iterable of pairs, of dicts with `labels`, or of graphs; x may be a tuple or dict of tensors for a
            network with several inputs.
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        structure: "full", "diag", "kron", "ekfac" (a second pass over the loader), "lowrank" (several passes), or an
            option such as `Kron(rank="auto")`.
        subset: "all" trainable parameters, the "last_layer", a list of parameter or module names, or a mask over (or
            positions of) the trainable weights, or the `subset` of a posterior.
        curvature: `Λₙ` is the exact output Fisher ("ggn"), its Monte-Carlo estimate ("fisher_mc", `FisherMC(samples)`)
            or the outer product of the example's own gradient ("empirical_fisher"). "auto" is "ggn", and "fisher_mc"
            for images and other outputs at many positions.
        seed: of the labels drawn for "fisher_mc"; each example has its own random numbers in any batch.
        progress: show a progress bar.
        processes: those that share the data, each with every `size`-th example from its `rank`; the sums are then
            over all of them.
        probe: an input to trace the network on, for a process whose own share of the data may be empty; by default
            that of the first batch. Then nothing is learned from the shape of the targets.
        output: the key, attribute or index of f in what the network returns, by default a tensor, or its `logits`; or
            `Network(output=…, class_dim=…)`.
        first_example: the number of the first example, for what is drawn: how many were fitted before these.
    """
    structure = structure_option(structure)
    estimate, samples = curvature_estimate(curvature, structure)
    if not isinstance(subset, Subset):
        check_subset(subset)
    flag("progress", progress)
    check_seed("seed", seed)
    check_processes(processes)
    count("first_example", first_example, least=0)
    likelihood, read = resolve(likelihood), output_option(output)
    network = read_as(check_network(unwrap(network)), read.output, read.class_dim)
    check_loader(loader)
    check_passes(structure, loader)
    total: CurvatureSum | LowRankSum | None = None
    normalised: tuple[str, ...] = ()
    with ExitStack() as stack:
        stack.enter_context(preserved_rng(inputs.device_of(network)))
        stack.enter_context(torch.inference_mode(False))

        def batches(which: str = "") -> Iterator[tuple[Any, Tensor]]:
            """Of one pass."""
            shown = iter(ShownLoader(loader, f"Laplace: curvature{which}", progress))
            stack.callback(shown.close)  # after an error as well
            for batch in shown:
                yield _prepare(network, batch)

        def begin(x: Any, y: Tensor | None = None) -> CurvatureSum | LowRankSum:
            nonlocal normalised, network
            chosen = choose_subset(network, x, subset)
            if y is not None:
                network = read_by_targets(network, x, y, likelihood)
            stack.enter_context(borrowed(network, chosen.names))
            plan = make_plan(network, x, chosen)
            begun: CurvatureSum | LowRankSum
            if structure.method == "exact":
                kind = choose_curvature(estimate, likelihood, plan.output_shape, isinstance(processes, Undecomposed))
                drawn = (kind, samples, seed, processes)
                if isinstance(structure, LowRank):
                    begun = LowRankSum(network, plan, likelihood, structure.rank, *drawn, batches)
                else:
                    options = (*drawn, None, structure.updatable, first_example, structure.rank)
                    begun = CurvatureSum(network, plan, likelihood, structure.kind, structure.weight_sharing, *options)
            else:
                begun = DiagonalSum(network, plan, likelihood, structure.method, processes)
            describe(begun.blocks())
            normalised = normalised_layers(network, x, chosen)
            return begun

        if probe is not None:
            probe = inputs.contained(network, probe)
            total = begin(inputs.to_device(probe, inputs.device_of(network)))
        with (processes or Processes()).raising_together():
            for x, y in batches():
                total = total or begin(x, y)
                total.add(x, y)
            if total is None:
                raise DataError("the loader is empty: curvature needs at least one batch")
            total.look()
        fitted = total.finish(progress)
        if isinstance(total, CurvatureSum):
            fitted = total.refitted(fitted, batches(", eigenvalues"))
        fitted = replace(fitted, normalised=normalised, output=output_of(network))
        return replace(
            fitted,
            weight_sharing=structure.weight_sharing,
            hessian=structure.method,
            samples=samples,
            seed=seed,
        )


def read_by_targets(network: nn.Module, x: Any, y: Tensor, likelihood: Likelihood) -> nn.Module:
    """The network, read as the first batch says: which dimension counts classes, and whether examples are rows of the
    output alone."""
    inputs.batch_size(x)  # an error where x holds no tensor
    output = replace(output_of(network), together=isinstance(x, Together), listed=isinstance(x, Sequences))
    if output.class_dim is None:
        with borrowed(network, ()), torch.no_grad(), explained(network, x):
            own = inputs.map_tensors(x, Tensor.clone)  # the network may write into its input
            args, kwargs = inputs.arguments(network, inputs.to_device(own, inputs.device_of(network)))
            returned = unviewed(network)(*args, **kwargs)
        output = output.with_targets(returned, y, likelihood.chooses_one_class)
        if likelihood.chooses_one_class and output.is_ambiguous(returned, y):
            logger.warning(
                "outputs for targets of shape %s have as many positions as classes: classes are taken to be in "
                "dimension 1; class_dim=-1 says that they are in the last",
                list(y.shape),
            )
    return viewed(network, output)


def check_passes(structure: StructureOption, loader: Any) -> None:
    """Raise for an iterator if the structure takes several passes."""
    if not structure.passes_once and reads_once(loader):
        raise DataError(
            f"structure={structure.kind!r} takes several passes over the data, but the loader is an iterator, which "
            "gives them once: pass a list or a DataLoader"
        )


def check_processes(processes: Any) -> None:
    if processes is not None:
        instance("processes", processes, Processes, "Processes(rank, size)")


def log_likelihood(
    network: nn.Module, loader: Iterable[Any], likelihood: Likelihood, processes: Processes | None = None
) -> dict[str, Any]:
    """What a pass over the data learns beside the curvature: its size, log-likelihood and squared error."""
    check_loader(loader)
    check_processes(processes)
    totals = torch.zeros(5, dtype=torch.float64, device=float64_device(inputs.device_of(network)))
    with preserved_rng(inputs.device_of(network)), torch.inference_mode(False), borrowed(network, ()), torch.no_grad():
        checks, processes = BatchChecks(likelihood), processes or Processes()
        with processes.raising_together():
            for batch in loader:
                x, y = _prepare(network, batch)
                f = inputs.call(network, x)
                totals += data_totals(likelihood, f, checks.add(x, f, y))
                checks.end_batch()
            checks.look()
    processes.sum_([totals])
    if totals[0] == 0:
        raise DataError("the loader is empty: a log-likelihood needs at least one batch")
    return name_totals(totals)


def choose_subset(network: nn.Module, x: Any, subset: str | Sequence[str] | Tensor | Subset) -> Subset:
    """The parameters that `subset` means; the last layer is found by tracing `network` on `x`."""
    if isinstance(subset, Subset):
        return subset
    last_layer: tuple[str, ...] = ()
    if isinstance(subset, str) and subset == "last_layer":
        with borrowed(network, [name for name, _ in network.named_parameters()]):
            last_layer = find_last_layer(network, x)
    chosen = resolve_subset(network, subset, last_layer)
    for name, p in chosen.parameters(network).items():
        if p.is_complex():
            raise CurvatureError(
                f"{name} is complex ({p.dtype}), but a posterior is over real weights: leave it out of the subset"
            )
    return chosen


def _prepare(network: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    return inputs.to_device(inputs.split_targets(network, batch), inputs.device_of(network))
