"""`fit_curvature`: `H = Σₙ JₙᵀΛₙJₙ`, a sum over the data and never a mean, in the chosen structure.

A fit takes one pass over the data, two for "ekfac", and several for "lowrank".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, flag, instance
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.curvature.accumulate import ColumnSum, FactorOptions
from lightning_bayes.curvature.data_pass import BatchSum, Curvature, DataPass, Fisher
from lightning_bayes.curvature.diagonal import DiagonalSum
from lightning_bayes.curvature.low_rank import LowRankSum
from lightning_bayes.jacobian.cost import estimate_cost
from lightning_bayes.jacobian.gradients import choose_curvature
from lightning_bayes.jacobian.plan import describe, find_last_layer, make_plan, normalised_layers
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import CurvatureError, DataError, Processes, Subset, inputs
from lightning_bayes.network.adapters import Sequences
from lightning_bayes.network.borrowed import borrowed, check_network, preserved_rng
from lightning_bayes.network.inputs import WholeInput, explained
from lightning_bayes.network.loaders import ProgressLoader, check_loader, n_examples, reads_once
from lightning_bayes.network.messages import detail, warn
from lightning_bayes.network.output import output_of, read_as, unwrap_output, wrap_output
from lightning_bayes.network.subset import check_subset, resolve_subset
from lightning_bayes.options.fit import (
    AutoStructure,
    CurvatureWord,
    FisherMC,
    LowRank,
    Network,
    StructureOption,
    StructureWord,
    SubsetWord,
    curvature_estimate,
    output_option,
    structure_option,
)

AFFORDABLE = 20  # maximum cost of a prediction, in forward passes
SMALL = 10**6  # maximum number of weights of a network whose forward passes take little time


def fit_curvature(
    network: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    structure: StructureWord | StructureOption = "kron",
    subset: SubsetWord | Sequence[str] | Tensor | Subset = "all",
    curvature: CurvatureWord | FisherMC = "auto",
    *,
    seed: int = 0,
    progress: bool = False,
    processes: Processes | None = None,
    probe: Any = None,
    output: str | int | Network | None = None,
    first_example: int = 0,
    dry_run: bool = False,
) -> Curvature:
    """The curvature of `network`'s loss, summed over the `(x, y)` batches of `loader`.

    Args:
        network: maps x to f(x): logits, or the mean of a regression. It runs in eval mode and is left unchanged.
        loader: an iterable of pairs, of dicts with `labels`, or of graphs; x may be a tuple or dict of tensors for a
            network with several inputs.
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        structure: "full", "diag", "kron", "ekfac" (two passes over the loader), "lowrank" (several passes), or an
            option such as `Kron(rank="auto")`.
        subset: "all" trainable parameters, the "last_layer", "auto" (all, or the last layer if a network has more than
            a million weights and its predictions would take more than about 20 forward passes), a list of parameter or
            module names, a mask over (or positions of) the trainable weights, or the `subset` of a posterior.
        curvature: `Λₙ` is the exact output Fisher ("ggn"), its Monte-Carlo estimate ("fisher_mc", `FisherMC(samples)`)
            or the outer product of the gradient of the example's own label ("empirical_fisher"). "auto" is "ggn", but
            "fisher_mc" for images and other outputs at many positions.
        seed: for the labels drawn by "fisher_mc"; the labels of an example do not depend on its batch.
        progress: show a progress bar.
        processes: the processes that share the data. Each gets every `size`-th example, starting at the one with the
            index `rank`. Sums include all processes.
        probe: an input to trace the network on, for a process whose share of the data may be empty; by default the
            first batch. With a probe, the shape of the targets is not used.
        output: the key, attribute or index of f in the network's return value, by default the tensor itself or the
            entry `logits`; or `Network(output=…, class_dim=…)`.
        first_example: the number of examples that were fitted before; sampled labels depend on this number.
        dry_run: check the fit without its expensive parts: factors are not decomposed, a low rank is 1, and "ggn"
            becomes "fisher_mc" for many outputs. The result is not a curvature.
    """
    form = structure_option(structure)
    estimate, samples = curvature_estimate(curvature, form)
    if not isinstance(subset, Subset):
        check_subset(subset)
    flag("progress", progress)
    check_seed("seed", seed)
    check_processes(processes)
    count("first_example", first_example, least=0)
    flag("dry_run", dry_run)
    likelihood, read = resolve(likelihood), output_option(output)
    network = read_as(check_network(network), read.output, read.class_dim)
    check_loader(loader)
    check_passes(form, loader)
    normalised: tuple[str, ...] = ()
    with ExitStack() as stack:
        stack.enter_context(preserved_rng(inputs.device_of(network)))
        stack.enter_context(torch.inference_mode(False))

        def batches(description: str) -> Iterator[tuple[Any, Tensor]]:
            loaded = iter(ProgressLoader(loader, f"Laplace: curvature{description}", progress))
            stack.callback(loaded.close)  # even after an error
            for batch in loaded:
                yield _prepare(network, batch)

        def make_sum(x: Any, y: Tensor | None = None) -> BatchSum:
            nonlocal normalised, network, form
            chosen = choose_subset(network, x, subset)
            if y is not None:
                network = read_by_targets(network, x, y, likelihood)
            stack.enter_context(borrowed(network, chosen.names))
            plan = make_plan(network, x, chosen)
            if isinstance(form, AutoStructure):
                n = n_examples(loader, processes)
                scales_noise = likelihood.tunable_noise is not None and not likelihood.has_probs
                form = form.resolve(scales_noise, chosen.size, None if n is None else n * plan.n_outputs)
                detail("structure='auto' is %r for %d weights", form.kind, chosen.size)
            total: ColumnSum | DiagonalSum | LowRankSum
            if form.method != "exact":
                total = DiagonalSum(network, chosen, likelihood, form.method)
            else:
                fisher = Fisher(choose_curvature(estimate, likelihood, plan.output_shape, dry_run), samples, seed)
                if isinstance(form, LowRank):
                    total = LowRankSum(network, plan, likelihood, fisher, form.rank, dry_run)
                else:
                    factors = FactorOptions(form.updatable, form.rank, dry_run, progress)
                    kind, sharing = form.kind, form.weight_sharing
                    total = ColumnSum(network, plan, likelihood, kind, sharing, fisher, factors)
            describe(total.blocks())
            normalised = normalised_layers(network, x, chosen)
            return total

        total = None
        if probe is not None:
            probe = inputs.contained(network, probe)
            total = make_sum(inputs.to_device(probe, inputs.device_of(network)))
        fitted = DataPass(likelihood, processes, first_example).fit(batches, make_sum, total)
        return replace(
            fitted,
            normalised=normalised,
            output=output_of(network),
            weight_sharing=form.weight_sharing,
            hessian=form.method,
            samples=samples,
            seed=seed,
        )


def read_by_targets(network: nn.Module, x: Any, y: Tensor, likelihood: Likelihood) -> nn.Module:
    """A view of the network that matches the first batch: which output dimension indexes classes, whether only the
    output has a row per example, and whether the input is a list with one entry per example."""
    inputs.batch_size(x)  # raises an error if x contains no tensor
    output = replace(output_of(network), together=isinstance(x, WholeInput), listed=isinstance(x, Sequences))
    if output.class_dim is None:
        with borrowed(network, ()), torch.no_grad(), explained(network, x):
            copy = inputs.map_tensors(x, Tensor.clone)  # the network may write into its input
            args, kwargs = inputs.arguments(network, inputs.to_device(copy, inputs.device_of(network)))
            returned = unwrap_output(network)(*args, **kwargs)
        output = output.with_targets(returned, y, likelihood.chooses_one_class)
        if likelihood.chooses_one_class and output.is_ambiguous(returned, y):
            warn(
                "outputs for targets of shape %s have as many positions as classes, so dimension 1 is taken as the "
                "class dimension; if it is the last one, pass Network(class_dim=-1)",
                list(y.shape),
            )
    return wrap_output(network, output)


def check_passes(structure: StructureOption, loader: Any) -> None:
    """Raise an error for an iterator if the structure takes several passes."""
    if not structure.passes_once and reads_once(loader):
        raise DataError(
            f"structure={structure.kind!r} takes several passes over the data, but the loader is an iterator, which "
            "can be read only once: pass a list or a DataLoader"
        )


def check_processes(processes: Any) -> None:
    if processes is not None:
        instance("processes", processes, Processes, "Processes(rank, size)")


def log_likelihood(
    network: nn.Module, loader: Iterable[Any], likelihood: Likelihood, processes: Processes | None = None
) -> dict[str, Any]:
    """The size, log-likelihood and squared error of the data, from a pass without a curvature."""
    check_loader(loader)
    check_processes(processes)
    data = DataPass(likelihood, processes)
    with preserved_rng(inputs.device_of(network)), torch.inference_mode(False), borrowed(network, ()), torch.no_grad():
        nothing = BatchSum(network, None, likelihood, Fisher())
        data.run(lambda _: (_prepare(network, batch) for batch in loader), total=nothing)
    return data.learned()


def choose_subset(network: nn.Module, x: Any, subset: SubsetWord | Sequence[str] | Tensor | Subset) -> Subset:
    """Resolve `subset` to parameters; tracing `network` on `x` finds the last layer and the cost of "auto"."""
    if isinstance(subset, Subset):
        return subset
    if isinstance(subset, str) and subset == "auto":
        return _affordable_subset(network, x)
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


def _affordable_subset(network: nn.Module, x: Any) -> Subset:
    """All weights if the network is small or its predictions are estimated to be affordable, otherwise the last
    layer."""
    everything = choose_subset(network, x, "all")
    if everything.size <= SMALL or (passes := estimate_cost(network, x, everything).predict) <= AFFORDABLE:
        return everything
    last_layer = choose_subset(network, x, "last_layer")
    detail(
        "subset='auto' selects the last layer (%d weights): with all %d weights (set subset='all'), predict would "
        "cost about %.0f forward passes",
        last_layer.size,
        everything.size,
        passes,
    )
    return last_layer


def _prepare(network: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    return inputs.to_device(inputs.split_targets(network, batch), inputs.device_of(network))
