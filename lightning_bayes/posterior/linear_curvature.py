"""The curvature of the linearised network at weights `θ` of its own, `Σₙ JₙᵀΛ(h(θ, xₙ))Jₙ`: the network's Jacobians
with the Fisher of the linear model's outputs `h(θ, x) = f(x) + J(x)(θ − θ̃)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import Curvature
from lightning_bayes.curvature.accumulate import STRUCTURES
from lightning_bayes.curvature.curvature_sum import CurvatureSum, RootAt
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior


def curvature_at(
    posterior: LaplacePosterior,
    shift: Tensor,
    loader: Iterable[Any],
    root_at: RootAt | None = None,
) -> Curvature:
    """At `θ̃ + shift`, in the passes over all data `(x, y)` that the structure takes; `root_at` gives another root of
    the output Fisher."""
    from lightning_bayes.predictive.functions import linearised_outputs

    def own_root_at(x: Any, y: Tensor, examples: Tensor) -> Tensor:
        h = linearised_outputs(posterior, x, shift)
        if h.ndim > 2:
            raise PosteriorError(
                f"a curvature at the linear model's outputs is for outputs [B] and [B, C], but the network's have "
                f"shape {list(h.shape)}: use a network with one label per example"
            )
        return posterior.likelihood.fisher_root(h, y)

    word = posterior.curvature.structure.word
    assert word is not None
    total: CurvatureSum | None = None

    def batches() -> Iterator[tuple[Any, Tensor]]:
        for batch in loader:
            yield inputs.to_device(inputs.split_targets(posterior.network, batch), posterior.device)

    with torch.inference_mode(False), borrowed(posterior.network, posterior.subset.names):
        for x, y in batches():
            if total is None:
                with posterior.linearised(x) as (plan, _):
                    total = CurvatureSum(
                        posterior.network,
                        plan,
                        posterior.likelihood,
                        word,
                        posterior.curvature.weight_sharing,
                        root_at=root_at or own_root_at,
                    )
            total.add(x, y)
        if total is None:
            raise DataError("the loader is empty: a curvature needs the training data")
        known = posterior.curvature
        fitted = total.refitted(total.finish(), batches())
        return replace(fitted, normalised=known.normalised, weight_sharing=known.weight_sharing)


def check_refit(posterior: LaplacePosterior, who: str) -> None:
    """An error for a posterior whose curvature cannot be made again."""
    if posterior.curvature.structure.word is None:
        raise PosteriorError(
            f"{type(posterior.curvature.structure).__name__} does not say by which word of structure= it is fitted: "
            "give the class a word"
        )
    if posterior.curvature.structure.word not in STRUCTURES:
        raise PosteriorError(
            f"{who} makes the curvature again in one pass, which structure={posterior.curvature.structure.word!r} does "
            "not do: fit structure='kron', 'ekfac', 'diag' or 'full'"
        )
    if posterior.damping is not None or posterior.curvature.kind != "ggn":
        raise PosteriorError(f"{who} needs curvature='ggn' and the exact sum with the prior, without damping")
    if posterior.curvature.hessian != "exact":
        raise PosteriorError(f"{who} needs a fit with hessian='exact', not {posterior.curvature.hessian!r}")
