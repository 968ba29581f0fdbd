"""`LaplaceOptions`: the settings of a Laplace fit, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch

from lightning_bayes.arguments import plain_values
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import SubsetError
from lightning_bayes.network.subset import check_subset
from lightning_bayes.options.predictive import GP, points_option
from lightning_bayes.options.prior import Prior, prior_option
from lightning_bayes.options.structure import Full, StructureOption, curvature_estimate, structure_option
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior.prior import PriorError, check_precision, check_prior
from lightning_bayes.posterior.subnetwork import Subnetwork


@dataclass(frozen=True, eq=False)
class LaplaceOptions:
    """What `fit_laplace` and `LaplaceCallback` have in common. It raises for settings that no network could use."""

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
        """From words or option objects."""
        chosen = structure_option(structure)
        if isinstance(subset, Subnetwork):  # single weights of a layer have no Kronecker form
            if chosen.kind == "ekfac":
                raise SubsetError(
                    "single weights of a layer have no EKFAC form: use structure='full' or 'diag' for a subnetwork"
                )
            chosen = Full() if chosen.kind == "kron" else chosen
        δ = plain_values(prior_precision)
        return LaplaceOptions(chosen, plain_values(subset), curvature, δ, prior_option(prior), points_option(gp))

    def __post_init__(self) -> None:
        curvature_estimate(self.curvature, self.structure)
        check_subset("all" if isinstance(self.subset, Subnetwork) else self.subset)
        check_precision(self.prior_precision)
        check_prior(self.prior)
        damping, has_many = self.structure.damping, torch.as_tensor(self.prior_precision).numel() > 1
        if damping is not None and has_many:
            raise ValueError(
                f"damping={damping!r} takes one prior precision for all layers, not a prior_precision of each"
            )
        posterior = self.prior.posterior
        if posterior is None:
            return
        if has_many:
            raise PriorError(
                "with a posterior as prior=, prior_precision is one factor on its precision: pass one number"
            )
        if self.gp is not None:
            raise ValueError("gp= belongs to a prior with independent weights, not to prior= another posterior")
        if damping is not None:
            raise ValueError(f"damping={damping!r} is for one prior precision, not for prior= another posterior")
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
        """Raise, before a fit, for a tuning that its posterior could not do."""
        if tuning is None:
            return
        tune, damping, joins = tuning.method, self.structure.damping, self.prior.posterior is not None
        if tuning.groups is not None and (damping is not None or joins):
            why = (
                f"damping={damping!r} takes one prior precision"
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
