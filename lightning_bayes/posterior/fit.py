"""`fit_laplace` fits a `LaplacePosterior`, `θ ~ N(θ*, (H/T + Λ)⁻¹)`, to a trained network and its data; see `laplace`.

`update` adds data to a posterior at the same weights. A fit stores sums over its data,

    H = Σₙ JₙᵀΛₙJₙ,    g = −Σₙ ∂ log p(yₙ | fₙ)/∂θ,    Σₙ log p(yₙ | fₙ),    Σₙ ‖(yₙ − fₙ)/σ‖²,    N,

and an update adds the sums of the new data to them. A Kronecker block adds the sums of its two factors and decomposes
them again, as one fit to all data would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, flag, plain_values, read_option
from lightning_bayes.curvature import Curvature, fit_curvature
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, SubsetError
from lightning_bayes.network.messages import warn
from lightning_bayes.network.output import read_as, wrap_output
from lightning_bayes.network.private import uncompiled
from lightning_bayes.network.subset import check_subset
from lightning_bayes.options.fit import (
    CurvatureWord,
    FisherMC,
    Full,
    Network,
    Prior,
    StructureOption,
    StructureWord,
    SubsetWord,
    curvature_estimate,
    output_option,
    prior_option,
    structure_option,
)
from lightning_bayes.options.predictive import GP
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior.at_mean import fingerprint
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import GaussianPrior, PriorError, check_fits, check_precision, check_prior
from lightning_bayes.posterior.subnetwork import Subnetwork
from lightning_bayes.posterior.training_points import PointSelection
from lightning_bayes.structures import LowRank


@dataclass(frozen=True, eq=False)
class LaplaceOptions:
    """The options that `fit_laplace` and `LaplaceCallback` share. Settings that work for no network raise an error."""

    structure: StructureOption
    subset: Any
    curvature: Any
    prior_precision: Any
    prior: Prior
    gp: GP | None = None

    @staticmethod
    def of(
        structure: Any, subset: Any, curvature: Any, prior_precision: Any, prior: Any, gp: Any = None
    ) -> LaplaceOptions:
        """Make the options from words or option objects."""
        chosen, subset = structure_option(structure), read_option("subset", subset, Subnetwork, lambda word: word)
        curvature = read_option("curvature", curvature, FisherMC, lambda word: word)
        if isinstance(subset, Subnetwork):  # single weights of a layer have no Kronecker form
            if chosen.kind == "ekfac":
                raise SubsetError(
                    "single weights of a layer have no EKFAC form: use structure='full' or 'diag' for a subnetwork"
                )
            chosen = Full() if chosen.kind in ("kron", "auto") else chosen
        given = prior_option(prior)
        if chosen.kind == "auto" and isinstance(given.posterior, GaussianPosterior):
            # The curvature gets the structure of the prior's precision, so the two can be added.
            chosen = structure_option(given.posterior.precision.word or "kron")
        if isinstance(subset, str) and subset == "auto" and (given.mean is not None or given.posterior is not None):
            subset = "all"  # the prior covers specific weights, so `auto` cannot choose
        δ = plain_values(prior_precision)
        points = gp if gp is None or isinstance(gp, GP) else GP(points=count("gp", gp))
        return LaplaceOptions(chosen, plain_values(subset), curvature, δ, given, points)

    def __post_init__(self) -> None:
        curvature_estimate(self.curvature, self.structure)
        check_subset("all" if isinstance(self.subset, Subnetwork) else self.subset)
        check_precision(self.prior_precision)
        check_prior(self.prior)
        damping, has_many = self.structure.damping, torch.as_tensor(self.prior_precision).numel() > 1
        if damping is not None and has_many:
            raise ValueError(
                f"damping={damping!r} needs one prior precision for all layers: pass one number as prior_precision"
            )
        posterior = self.prior.posterior
        if posterior is None:
            return
        if has_many:
            raise PriorError(
                "with a posterior as prior=, prior_precision is a factor on that posterior's precision: pass one number"
            )
        if self.gp is not None:
            raise ValueError(
                "gp= needs a prior with independent weights, so prior= cannot be a posterior: leave one of them out"
            )
        if damping is not None:
            raise ValueError(
                f"damping={damping!r} needs a plain prior precision, so prior= cannot be a posterior: leave one of "
                "them out"
            )
        if isinstance(posterior, (str, PathLike)) or self.structure.kind == "full":
            return
        if not self.structure.sums_with_prior or posterior.precision.word != self.structure.kind:
            raise PriorError(
                f"prior= has structure={posterior.precision.word!r}, which cannot be added to "
                f"structure={self.structure.kind!r}: fit both with 'kron' or both with 'diag', or this one with 'full'"
            )

    def with_prior(self, prior: Prior) -> LaplaceOptions:
        return replace(self, prior=prior)

    def check_tuning(self, tuning: Tuning | None, likelihood: Likelihood) -> None:
        """Raise an error before the fit if the posterior could not be tuned this way."""
        if tuning is None:
            return
        tune, damping, joins = tuning.method, self.structure.damping, self.prior.posterior is not None
        if tuning.groups is not None and (damping is not None or joins):
            why = (
                f"damping={damping!r} needs one prior precision"
                if damping
                else "prior= has one factor on its precision"
            )
            raise ValueError(f"{why} for all layers: leave out groups={tuning.groups!r}")
        if tuning.needs_exact_sum and (damping is not None or (joins and self.structure.kind == "kron")):
            why = f"damping={damping!r} changes it" if damping else "structure='kron' adds factors to those of prior="
            raise ValueError(
                f"tune={tune!r} needs the exact sum of curvature and prior, but {why}: use tune='marglik', or "
                "structure='full' or 'diag'"
            )
        if tune == "linear" and self.structure.is_truncated:
            raise ValueError(
                "tune='linear' needs the curvature in all directions of the gradient, but structure='lowrank' leaves "
                "some out: use tune='auto' or 'grid' with validation data, or tune='marglik'"
            )
        if tuning.iterate and not likelihood.is_convex:
            raise ValueError(
                f"iterate=True needs a loss that is convex in the outputs, unlike that of {type(likelihood).__name__}: "
                "use tune='marglik'"
            )


DETERMINED = 0.95  # a rank is too low if γ exceeds this share of the rank
COUNTS = 0.1  # an eigenvalue matters if it exceeds this share of the prior precision


def fit_laplace(
    network: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    *,
    structure: StructureWord | StructureOption = "auto",
    subset: SubsetWord | Sequence[str] | Tensor | Subnetwork = "all",
    curvature: CurvatureWord | FisherMC = "auto",
    prior_precision: float | Tensor | Sequence[float] = 1.0,
    prior: Prior | GaussianPosterior | None = None,
    gp: int | GP | None = None,
    output: str | int | Network | None = None,
    processes: Processes | None = None,
    probe: Any = None,
    seed: int = 0,
    progress: bool = False,
) -> LaplacePosterior:
    """Fit a Laplace posterior around the weights of a trained network, in one pass over `loader`, or more if the
    structure needs them.

    Args:
        network: maps x to f(x): logits, or the mean of a regression. It is not changed.
        loader: an iterable of `(x, y)`, of dicts with `labels`, or of graphs.
        likelihood: "classification", "binary", "regression", or a `Likelihood` such as `Gaussian(noise_std=0.3)`.
        structure: "kron", "ekfac" (a second pass), "diag", "full" or "lowrank" (several passes), or an option such as
            `Kron(rank="auto")`. "auto" is "full" for a regression with at most 2,000 weights, or at most 2,000 outputs
            over all training examples, and "kron" otherwise. For a `Subnetwork`, "kron" and "auto" are "full".
        subset: "all", "last_layer", "auto" (all weights, or only the last layer if the network has more than a million
            weights and a prediction would take more than about 20 forward passes), a list of parameter names, a mask
            over the weights, or a `Subnetwork`.
        curvature: "ggn", "fisher_mc" (or `FisherMC(samples=3)`), "empirical_fisher", or "auto": "ggn", but "fisher_mc"
            for outputs at many positions, such as images, where the exact GGN takes a backward pass for each output.
        prior_precision: a number, one per layer, or one per parameter. Weight decay `wd` of a mean loss corresponds to
            `prior_precision = N·wd`.
        prior: `Prior(mean=…, temperature=…)`, or another posterior over the same weights; `prior_precision` is then a
            factor on its precision.
        gp: training points to keep for `predict(x, "gp")`: a number, or `GP(points=…, outputs=…)`.
        output: the key, attribute or index of f in the network's return value, by default the value itself if it is a
            tensor, or its `logits`; or `Network(output=…, class_dim=…)`, where `class_dim` is the dimension of f that
            counts classes.
        processes: the processes that share the data; each has every `size`-th example, starting at its `rank`.
        probe: an input to trace the network on, for a process whose share of the data may be empty.
        seed: seed for all random draws.
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
    """`fit_laplace` with parsed options. A `dry_run` skips the expensive parts (see `fit_curvature`)."""
    read = output_option(output)
    network = read_as(uncompiled(network), read.output, read.class_dim)
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
    warn_of_rank(posterior, tuned=False)
    return posterior if points is None else points.put_into(posterior)


def from_curvature(
    network: nn.Module,
    curvature: Curvature,
    prior_precision: float | Tensor | Sequence[float] | Callable[[], Tensor | float] = 1.0,
    *,
    temperature: float = 1.0,
    damping: str | None = None,
    prior: GaussianPrior | None = None,
) -> LaplacePosterior:
    """The Laplace posterior around the network's current weights with this curvature."""
    network = network if curvature.output.is_default else wrap_output(network, curvature.output)
    with torch.inference_mode(False), torch.no_grad():
        mean = curvature.subset.flatten(network).to(curvature.structure.dtype)
        weights = fingerprint(network)
    return LaplacePosterior.around(network, mean, weights, curvature, prior_precision, temperature, damping, prior)


def warn_of_rank(posterior: LaplacePosterior, tuned: bool = True) -> None:
    """Warn if a low rank omits eigenvalues that matter compared with the prior: eigenvalues lost to rounding or, after
    tuning, eigenvalues beyond the rank if the data determine all eigenpairs within the rank."""
    H = posterior.curvature.structure
    if not isinstance(H, LowRank) or not H.is_truncated or H.rank >= min(H.size, posterior.curvature.n_outputs):
        return
    lost, δ = H.rounding / posterior.temperature, float(posterior.prior_precision.min())
    if lost > COUNTS * δ:
        warn(
            "structure='lowrank' cannot distinguish eigenvalues below %.2g from rounding errors in %s. They matter "
            "at the prior precision of %.2g, so variances are too large: fit a float64 copy of the network, or use "
            "structure='full'",
            lost,
            str(H.dtype).removeprefix("torch."),
            δ,
        )
    elif tuned and (γ := float(posterior.effective_parameters)) > DETERMINED * H.rank:
        warn(
            "the rank %d of structure='lowrank' is too low: the data determine γ = %.1f directions, nearly as many. "
            "Variances and the evidence are too large without the others: raise rank=, or tune on validation data",
            H.rank,
            γ,
        )


FITTED = ("ggn", "fisher_mc", "empirical_fisher")
SUMS = ("log_likelihood", "gradient", "squared_error", "n_data", "n_outputs")
UPDATABLE = ("full", "diag", "kron")  # structures to which data can be added


@implements("update")
def update(
    posterior: LaplacePosterior, loader: Iterable[Any], progress: bool, processes: Processes | None, probe: Any
) -> LaplacePosterior:
    """See `LaplacePosterior.update`."""
    flag("progress", progress)
    posterior.check_weights()
    _check_updatable(posterior)
    old = posterior.curvature
    fields: dict[str, dict[str, Any]] = {
        "kron": {"weight_sharing": old.weight_sharing, "updatable": True},
        "diag": {"method": old.hessian},
    }
    kind = str(old.structure.word)
    new = fit_curvature(
        posterior.network,
        loader,
        likelihood=posterior.likelihood,
        structure=structure_option({"kind": kind, **fields.get(kind, {})}),
        subset=posterior.subset,
        curvature=FisherMC(old.samples) if old.kind == "fisher_mc" else cast(CurvatureWord, old.kind),
        seed=old.seed,
        progress=progress,
        processes=processes,
        probe=probe,
        first_example=old.n_data,
    )
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in SUMS}
    sums: Any = {name: None if a is None or b is None else a + b for name, (a, b) in pairs.items()}
    both = replace(old, structure=old.structure.add_data(new.structure), **sums)
    moved = replace(posterior, curvature=both, n_data=both.n_data, known_novelty=None)
    return moved.with_prior(posterior.prior_precision)


def _check_updatable(posterior: LaplacePosterior) -> None:
    H = posterior.curvature.structure
    if posterior.curvature.kind not in FITTED or posterior.curvature.gradient is None:
        raise PosteriorError("data can only be added to a posterior that was fitted to data: fit one with fit_laplace")
    if posterior.shift is not None:
        raise PosteriorError(
            "data cannot be added to a refined posterior: update the fitted posterior, then refine it again"
        )
    if posterior.points is not None:
        raise PosteriorError("the training points of predictive='gp' come from the original data: refit on all data")
    if H.word not in UPDATABLE:
        raise PosteriorError(
            f"data cannot be added to structure={H.word!r}, which takes several passes over all data: refit on the old "
            "and new data, or use 'full', 'diag' or 'kron'"
        )
    if not all(block.can_add_data for _, block in H.named_blocks):
        raise PosteriorError(
            "this Kronecker posterior stores only the decompositions of its factors: to add data, fit it with "
            "structure=Kron(updatable=True)"
        )
