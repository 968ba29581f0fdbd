"""`Prior`: what the prior is around, and how much the data count against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_bayes.arguments import positive


@dataclass(frozen=True, eq=False)
class Prior:
    """The prior `N(mean, δ⁻¹)` of the weights, whose precision `δ` is `prior_precision=`.

    Args:
        mean: weights that the prior is around, by default zero: flat in the order of `posterior.mean`, the state dict
            of a pretrained network, or, for a callback, the file of one of these.
        temperature: `T` in the precision `P = H/T + δ`; below 1 the data count more.
    """

    mean: Any = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)
