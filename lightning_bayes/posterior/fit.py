"""`fit_laplace`: a trained network and its data to a `LaplacePosterior`, `θ ~ N(θ*, (H/T + Λ)⁻¹)`; see `laplace`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Curvature, fit_curvature
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.output import read_as, wrap_output
from lightning_bayes.options.network import Network, output_option
from lightning_bayes.options.predictive import GP
from lightning_bayes.options.prior import Prior
from lightning_bayes.options.structure import FisherMC, StructureOption
from lightning_bayes.posterior.fingerprint import fingerprint
from lightning_bayes.posterior.gaussian import GaussianPosterior
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.options import LaplaceOptions
from lightning_bayes.posterior.prior import GaussianPrior, check_fits
from lightning_bayes.posterior.subnetwork import Subnetwork
from lightning_bayes.posterior.training_points import PointSelection
from lightning_bayes.structures import LowRank

logger = logging.getLogger("lightning_bayes")

DETERMINED = 0.95  # the share of a low rank above which γ says that it is too low
COUNTS = 0.1  # the part of a prior precision that an eigenvalue must be to count


def fit_laplace(
    network: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    *,
    structure: str | StructureOption = "kron",
    subset: str | Sequence[str] | Tensor | Subnetwork = "all",
    curvature: str | FisherMC = "auto",
    prior_precision: float | Tensor | Sequence[float] = 1.0,
    prior: Prior | GaussianPosterior | None = None,
    gp: int | GP | None = None,
    output: str | int | Network | None = None,
    processes: Processes | None = None,
    probe: Any = None,
    seed: int = 0,
    progress: bool = False,
) -> LaplacePosterior:
    """A Laplace posterior around the weights of a trained network: one pass over `loader`, or as many as the structure
    takes.

    Args:
        network: maps x to f(x): logits, or the mean of a regression. It is left as it was.
        loader: an iterable of `(x, y)`, of dicts with `labels`, or of graphs.
        likelihood: "classification", "binary", "regression", or a `Likelihood` such as `Gaussian(noise_std=0.3)`.
        structure: "kron", "ekfac" (a second pass), "diag", "full" or "lowrank" (several passes), or an option such as
            `Kron(rank="auto")`. A `Subnetwork` has no Kronecker form: "kron" is then "full".
        subset: "all", "last_layer", a list of parameter names, a mask over the weights, or a `Subnetwork`.
        curvature: "ggn", "fisher_mc" (or `FisherMC(samples=3)`), "empirical_fisher", or "auto": "ggn", but "fisher_mc"
            for images and other outputs at many positions, where the exact GGN takes a backward pass for each.
        prior_precision: a number, one per layer, or one per parameter. A mean loss with weight decay `wd` is
            `prior_precision = N·wd`.
        prior: `Prior(mean=…, temperature=…)`, or another posterior over the same weights; `prior_precision` is then a
            factor on its precision.
        gp: training points to keep for `predict(x, "gp")`: a number, or `GP(points=…, selection=…)`.
        output: the key, attribute or index of f in what the network returns, by default a tensor, or its `logits`; or
            `Network(output=…, class_dim=…)`, where `class_dim` is the dimension of f that counts classes.
        processes: those that share the data, each with every `size`-th example from its `rank`.
        probe: an input to trace the network on, for a process whose share of the data may be empty.
        seed: of everything that is drawn.
        progress: show a progress bar.
    """
    options = LaplaceOptions.of(structure, subset, curvature, prior_precision, prior, gp)
    return fit_posterior(network, loader, likelihood, options, output, processes, probe, seed, progress)


def fit_posterior(
    network: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood,
    options: LaplaceOptions,
    output: str | int | Network | None = None,
    processes: Processes | None = None,
    probe: Any = None,
    seed: int = 0,
    progress: bool = False,
    dry_run: bool = False,
) -> LaplacePosterior:
    """`fit_laplace` with its options read. A `dry_run` leaves out the expensive parts (see `fit_curvature`)."""
    read = output_option(output)
    network = read_as(unwrap(network), read.output, read.class_dim)
    points = None if options.gp is None else PointSelection(options.gp, network, seed, processes)
    fit = partial(
        fit_curvature, network, likelihood=likelihood, curvature=options.curvature, output=output, processes=processes,
        probe=probe, seed=seed, progress=progress, dry_run=dry_run,
    )  # fmt: skip
    temperature, weights, δ = options.prior.temperature, options.subset, options.prior_precision
    if isinstance(weights, Subnetwork):
        weights, δ = weights.in_network(
            network, loader, δ, lambda: fit(loader, structure="diag").structure.diagonal() / temperature, processes
        )
    check_fits(options.prior, network, weights)
    fitted = fit(loader if points is None else points.watched(loader), structure=options.structure, subset=weights)
    given = GaussianPrior.of(options.prior, fitted.subset)
    damping = options.structure.damping
    posterior = from_curvature(network, fitted, δ, temperature=temperature, damping=damping, prior=given)
    say_rounding(posterior)
    return posterior if points is None else points.put_into(posterior, loader, progress)


def from_curvature(
    network: nn.Module,
    curvature: Curvature,
    prior_precision: float | Tensor | Sequence[float] | Callable[[], Tensor | float] = 1.0,
    *,
    temperature: float = 1.0,
    damping: str | None = None,
    prior: GaussianPrior | None = None,
) -> LaplacePosterior:
    """The Laplace posterior around the network's present weights with this curvature."""
    network = network if curvature.output.is_default else wrap_output(network, curvature.output)
    with torch.inference_mode(False), torch.no_grad():
        mean = curvature.subset.flatten(network).to(curvature.structure.dtype)
        weights = fingerprint(network)
    return LaplacePosterior.around(network, mean, weights, curvature, prior_precision, temperature, damping, prior)


def say_rank(posterior: LaplacePosterior) -> None:
    """A warning where the data determine all eigenpairs of a low rank: there may be more of them."""
    H = posterior.curvature.structure
    if not isinstance(H, LowRank) or not _may_have_more(posterior, H) or say_rounding(posterior):
        return
    γ = float(posterior.effective_parameters)
    if γ > DETERMINED * H.rank:
        logger.warning(
            "the data determine all %d eigenpairs of structure='lowrank' (γ = %.1f), and may determine more, without "
            "which variances are too large and the evidence too high: raise rank=, or tune on validation data",
            H.rank,
            γ,
        )


def say_rounding(posterior: LaplacePosterior) -> bool:
    """A warning where eigenvalues that count beside the prior were lost to rounding."""
    H = posterior.curvature.structure
    if not isinstance(H, LowRank) or not _may_have_more(posterior, H):
        return False
    lost, δ = H.rounding / posterior.temperature, float(posterior.prior_precision.min())
    if lost <= COUNTS * δ:
        return False
    logger.warning(
        "structure='lowrank' cannot tell eigenvalues below %.2g from rounding in %s, which is much beside the prior "
        "precision of %.2g, and makes variances too large: fit a float64 copy of the network, or use structure='full'",
        lost,
        str(H.dtype).removeprefix("torch."),
        δ,
    )
    return True


def _may_have_more(posterior: LaplacePosterior, H: LowRank) -> bool:
    return H.rank < min(H.size, posterior.curvature.n_outputs)
