"""`fit_laplace`: a trained network and its data to a `LaplacePosterior`, `θ ~ N(θ*, (H/T + Λ)⁻¹)`; see `laplace`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import keywords, positive, word
from lightning_bayes.curvature import Curvature, fit_curvature
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.output import read_as, wrap_output
from lightning_bayes.posterior.fingerprint import fingerprint
from lightning_bayes.posterior.gaussian import GaussianPosterior
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.options import FitOptions
from lightning_bayes.posterior.prior import Prior, Weights, check_fits, check_precision, check_prior
from lightning_bayes.posterior.subnetwork import Subnetwork, structure_for
from lightning_bayes.posterior.training_points import PointOptions, PointSelection
from lightning_bayes.structures import LowRank

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("lightning_bayes")

DETERMINED = 0.95  # the share of a low rank above which γ says that it is too low
COUNTS = 0.1  # the part of a prior precision that an eigenvalue must be to count
DAMPINGS = (None, "glm", "ritter")


def fit_laplace(
    network: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    structure: str = "kron",
    subset: str | Sequence[str] | Tensor | Subnetwork = "all",
    curvature: str = "ggn",
    prior_precision: float | Tensor | Sequence[float] = 1.0,
    progress: bool = False,
    *,
    temperature: float = 1.0,
    damping: str | None = None,
    hessian: str = "exact",
    rank: int | str | None = None,
    gp_points: int | None = 0,
    gp_selection: str = "random",
    gp_weighting: str = "prior",
    gp_outputs: str = "auto",
    output: str | int | None = None,
    class_dim: int | None = None,
    prior_mean: Weights | None = None,
    prior: GaussianPosterior | None = None,
    **options: Unpack[FitOptions],
) -> LaplacePosterior:
    """A Laplace posterior around the weights of a trained network: one pass over `loader`, or as many as the structure
    takes.

    Args:
        network: maps x to f(x): logits, or the mean of a regression. It is left as it was.
        loader: an iterable of `(x, y)`, of dicts with `labels`, or of graphs.
        likelihood: "classification", "binary", "regression", or a `Likelihood` such as `Gaussian(noise_std=0.3)`.
        structure: "kron", "ekfac", "diag", "full" or "lowrank". "ekfac" takes a second pass, for eigenvalues of its own
            in the basis of "kron", "lowrank" several. A `Subnetwork` has no Kronecker form: "kron" is then "full".
        subset: "all", "last_layer", a list of parameter names, a mask over the weights, or a `Subnetwork`.
        curvature: "ggn", "fisher_mc", "empirical_fisher", or "auto": "ggn", but "fisher_mc" for images and other
            outputs at many positions, where the exact GGN takes a backward pass for each.
        prior_precision: a number, one per layer, or one per parameter. A mean loss with weight decay `wd` is
            `prior_precision = N·wd`.
        progress: show a progress bar.
        temperature: of the likelihood, `P = H/T + δ`.
        damping: instead of the exact sum with the prior, `(A + √δ) ⊗ (G + √δ)` with `A` a mean and `G` a sum over the
            data ("glm"), or with `√N` in each factor ("ritter", Ritter et al. 2018).
        hessian: how `structure="diag"` of the GGN is computed: "exact", or by one backward pass "approx" (linear in the
            number of outputs and features), "mixed" (exact where layers are narrow), or "auto" (exact if all are).
        rank: how many eigenpairs of the curvature `structure="lowrank"` keeps, by several passes over `loader`; 100 by
            default. Of "kron", how many each factor keeps, beside a remainder: at most so many; or, "auto", of factors
            wider than 1,000 those that hold 99 % of the trace, up to a half. By default all.
        gp_points: how many training points to keep, for `predict(predictive="gp")`; None keeps all. They become part of
            the posterior's state and file.
        gp_selection: which: "random", or those with the largest "leverage", in a second pass; see `training_points`.
        gp_weighting: how they stand for all data: the "prior" precision counts N/M times, or the "data" do.
        gp_outputs: whether a network's outputs are "joint" or "independent" of each other; "auto" is joint while points
            times outputs are few.
        output: the key, attribute or index of f in what the network returns; by default a tensor, or its `logits`.
        class_dim: the dimension of f that counts classes; by default the shape of the targets says which it is.
        prior_mean: the weights that the prior is around, by default zero: flat in the order of `posterior.mean`, or the
            state dict of a pretrained network.
        prior: another posterior over the same weights, whose mean and precision are the prior's; `prior_precision` is
            then a factor on that precision. Exact for "full" and "diag"; "kron" adds factors, which is an
            approximation.
        options: of `fit_curvature`: `samples`, `seed`, `weight_sharing`, and `updatable`, for `posterior.update`.
    """
    keywords("fit_laplace", options, list(FitOptions.__annotations__))
    structure = structure_for(subset, structure)
    check_laplace(structure, prior_precision, temperature, damping)
    check_prior(prior, prior_mean, structure, gp_points != 0, damping, prior_precision)
    points = PointOptions(gp_points, gp_selection, gp_weighting, gp_outputs)
    network = read_as(unwrap(network), output, class_dim)
    chosen = PointSelection(points, network, options.get("seed", 0), options.get("processes"))
    fit = partial(
        fit_curvature, network, likelihood=likelihood, curvature=curvature, progress=progress,
        output=output, class_dim=class_dim, **options,
    )  # fmt: skip
    if isinstance(subset, Subnetwork):
        subset, prior_precision = subset.in_network(
            network,
            loader,
            prior_precision,
            lambda: fit(loader, structure="diag").structure.diagonal() / temperature,
            options.get("processes"),
        )
    check_fits(prior, prior_mean, network, subset)
    fitted = fit(chosen.watched(loader), structure=structure, subset=subset, hessian=hessian, rank=rank)
    given = Prior.of(prior, prior_mean, fitted.subset)
    posterior = from_curvature(network, fitted, prior_precision, temperature=temperature, damping=damping, prior=given)
    say_rounding(posterior)
    return chosen.put_into(posterior, loader, progress)


def from_curvature(
    network: nn.Module,
    curvature: Curvature,
    prior_precision: float | Tensor | Sequence[float] | Callable[[], Tensor | float] = 1.0,
    *,
    temperature: float = 1.0,
    damping: str | None = None,
    prior: Prior | None = None,
) -> LaplacePosterior:
    """The Laplace posterior around the network's present weights with this curvature."""
    network = network if curvature.output.is_default else wrap_output(network, curvature.output)
    with torch.inference_mode(False), torch.no_grad():
        mean = curvature.subset.flatten(network).to(curvature.structure.dtype)
        weights = fingerprint(network)
    return LaplacePosterior.around(network, mean, weights, curvature, prior_precision, temperature, damping, prior)


def check_laplace(structure: Any, prior_precision: Any, temperature: Any, damping: Any) -> None:
    """Refuse what is known to be wrong without a network or data."""
    positive("temperature", temperature)
    check_precision(prior_precision)
    word("damping", damping, DAMPINGS)
    if damping is not None and structure != "kron":
        raise ValueError(f"damping={damping!r} needs structure='kron', got structure={structure!r}")
    if damping is not None and torch.as_tensor(prior_precision).numel() > 1:
        raise ValueError(f"damping={damping!r} takes one prior precision for all layers, not a prior_precision of each")


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
