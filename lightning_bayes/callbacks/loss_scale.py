"""The scale `c` of a training step's loss, which L2M's curvature contains squared: assumed, or recognised."""

from __future__ import annotations

import math

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior.l2m import default_loss_scale

_SAME = 0.01  # relative, of two scales


def recognise_scale(name: str, likelihood: Likelihood, c: float, given: float | None, n_targets: int) -> float | None:
    """The scale to use instead of the default: that of a sum or mean over the targets of an example. For any other `c`
    than the one that was `given`, or that torch's losses have, a warning and None."""
    assumed = default_loss_scale(likelihood, n_targets) if given is None else given
    if math.isclose(c, assumed, rel_tol=_SAME):
        return None
    loss = f"{name}: the loss of the training step is {c:.4g} times the mean negative log-likelihood"
    known = {scale / over for scale in likelihood.loss_scales for over in (1, n_targets)}
    fitting = [scale for scale in known if math.isclose(c, scale, rel_tol=_SAME)]
    if given is None and fitting:
        rank_zero_info(f"{loss}, a sum or mean over the {n_targets} targets of an example: taken as loss_scale=")
        return fitting[0]
    rank_zero_warn(
        f"{loss}, but loss_scale={assumed:.4g} is assumed, with which the curvature is {(c / assumed) ** 2:.4g} "
        f"times what it should be: pass loss_scale={c:.4g}, and return a mean over the examples of a batch"
    )
    return None
