"""More data for a posterior at the same weights. What a fit knows of its data are sums,

    H = Σₙ JₙᵀΛₙJₙ,    g = −Σₙ ∂ log p(yₙ | fₙ)/∂θ,    Σₙ log p(yₙ | fₙ),    Σₙ ‖(yₙ − fₙ)/σ‖²,    N,

so those of the new data are added. A Kronecker block adds the sums of its two factors and decomposes them again, as one
fit to all data would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_bayes.arguments import flag
from lightning_bayes.curvature import Curvature, fit_curvature
from lightning_bayes.network import Processes
from lightning_bayes.options.structure import FisherMC, StructureOption, structure_option
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.implementation import implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.used_data import UsedData

FITTED = ("ggn", "fisher_mc", "empirical_fisher")
GROWING = ("full", "diag", "kron")  # structures to which data can be added


@implements("update")
def update(
    posterior: LaplacePosterior, loader: Iterable[Any], progress: bool, processes: Processes | None, probe: Any
) -> LaplacePosterior:
    """See `LaplacePosterior.update`."""
    flag("progress", progress)
    posterior.check_weights()
    _check(posterior)
    old = posterior.curvature
    used = UsedData(posterior.network, loader, "fit", processes)
    new = fit_curvature(
        posterior.network,
        used.watched,
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
    known = replace(posterior, curvature=both, n_data=both.n_data).with_prior(posterior.prior_precision)
    return used.noted(known)


def _structure(old: Curvature) -> StructureOption:
    """The option that the curvature was fitted with, keeping the factors of "kron"."""
    fields: dict[str, dict[str, Any]] = {"kron": {"weight_sharing": old.weight_sharing, "updatable": True}}
    fields["diag"] = {"method": old.hessian}
    kind = str(old.structure.word)
    return structure_option({"kind": kind, **fields.get(kind, {})})


def _sum(old: Curvature, new: Curvature) -> Curvature:
    """Of both sets of data; what one of them does not know, neither does the sum."""

    def plus(a: Any, b: Any) -> Any:
        return None if a is None or b is None else a + b

    sums = ("log_likelihood", "gradient", "squared_error", "n_data", "n_outputs")
    totals = {name: plus(getattr(old, name), getattr(new, name)) for name in sums}
    return replace(old, structure=old.structure.grown(new.structure), **totals)


def _check(posterior: LaplacePosterior) -> None:
    H = posterior.curvature.structure
    if posterior.curvature.kind not in FITTED or posterior.curvature.gradient is None:
        raise PosteriorError(
            "this posterior was not fitted in a pass over data, so that none can be added: fit one with fit_laplace"
        )
    if posterior.shift is not None:
        raise PosteriorError("a refined posterior belongs to its data: update the fitted one, and refine it again")
    if posterior.points is not None:
        raise PosteriorError("the training points of predictive='gp' are of the first data: fit again to all of them")
    if H.word not in GROWING:
        raise PosteriorError(
            f"data cannot be added to structure={H.word!r}, which takes several passes over all of them: fit it again "
            "to the old and new data, or use 'full', 'diag' or 'kron'"
        )
    if not all(block.can_grow for _, block in H.named_blocks):
        raise PosteriorError(
            "this Kronecker posterior has kept the decompositions of its factors alone: to add data, fit it with "
            "structure=Kron(updatable=True)"
        )
