"""One number found on held-out data, and the predictive it belongs to.

For class and binary labels it is a temperature `T`, in one of two places. That of the *outputs* divides them before
they are integrated over, `f/T`: a mean `m/T` and a covariance `Σ/T²`, so that no `T` makes up for a covariance that is
too wide. That of the *probabilities* comes after, `p^(1/T)`, and does. For real targets it is a factor on the
predictive variance. The weights, their posterior and its evidence do not know of it.
"""

from __future__ import annotations

from dataclasses import dataclass

PLACES = ("outputs", "probs")


@dataclass(frozen=True)
class Calibration:
    """What a prediction by `predictive` and `link` is corrected by."""

    predictive: str  # "glm", "gp", "bnn" or "map"
    link: str
    output_temperature: float = 1.0
    probs_temperature: float = 1.0
    variance_factor: float = 1.0
