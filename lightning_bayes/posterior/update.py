"""Adding data to a posterior at the same weights. A fit stores sums over its data,

    H = Σₙ JₙᵀΛₙJₙ,    g = −Σₙ ∂ log p(yₙ | fₙ)/∂θ,    Σₙ log p(yₙ | fₙ),    Σₙ ‖(yₙ − fₙ)/σ‖²,    N,

and an update adds the sums of the new data to them. A Kronecker block adds the sums of its two factors and decomposes
them again, as one fit to all data would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_bayes.arguments import flag
from lightning_bayes.curvature import Curvature, fit_curvature
from lightning_bayes.network import Processes
from lightning_bayes.options.structure import FisherMC, StructureOption, structure_option
from lightning_bayes.posterior.gaussian import PosteriorError

if TYPE_CHECKING:
    from lightning_bayes.posterior.laplace import LaplacePosterior

FITTED = ("ggn", "fisher_mc", "empirical_fisher")
SUMS = ("log_likelihood", "gradient", "squared_error", "n_data", "n_outputs")
UPDATABLE = ("full", "diag", "kron")  # structures to which data can be added


def update(
    posterior: LaplacePosterior, loader: Iterable[Any], progress: bool, processes: Processes | None, probe: Any
) -> LaplacePosterior:
    """See `LaplacePosterior.update`."""
    flag("progress", progress)
    posterior.check_weights()
    _check_updatable(posterior)
    old = posterior.curvature
    new = fit_curvature(
        posterior.network,
        loader,
        likelihood=posterior.likelihood,
        structure=_structure(old),
        subset=posterior.subset,
        curvature=FisherMC(old.samples) if old.kind == "fisher_mc" else old.kind,
        seed=old.seed,
        progress=progress,
        processes=processes,
        probe=probe,
        first_example=old.n_data,
    )
    both = _sum(old, new)
    return replace(posterior, curvature=both, n_data=both.n_data).with_prior(posterior.prior_precision)


def _structure(old: Curvature) -> StructureOption:
    """The option that the curvature was fitted with, keeping the factors of "kron"."""
    fields: dict[str, dict[str, Any]] = {"kron": {"weight_sharing": old.weight_sharing, "updatable": True}}
    fields["diag"] = {"method": old.hessian}
    kind = str(old.structure.word)
    return structure_option({"kind": kind, **fields.get(kind, {})})


def _sum(old: Curvature, new: Curvature) -> Curvature:
    """The sums over both sets of data; None if one of them is unknown."""
    totals: dict[str, Any] = {}
    for name in SUMS:
        a, b = getattr(old, name), getattr(new, name)
        totals[name] = None if a is None or b is None else a + b
    return replace(old, structure=old.structure.add_data(new.structure), **totals)


def _check_updatable(posterior: LaplacePosterior) -> None:
    H = posterior.curvature.structure
    if posterior.curvature.kind not in FITTED or posterior.curvature.gradient is None:
        raise PosteriorError("data can only be added to a posterior that was fitted to data: fit one with fit_laplace")
    if posterior.shift is not None:
        raise PosteriorError("a refined posterior belongs to its data: update the fitted one, and refine it again")
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
