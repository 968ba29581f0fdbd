"""`Prior`: what the prior is around, and how much the data count against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_bayes.arguments import positive
from lightning_bayes.options.plain import from_mapping


@dataclass(frozen=True, eq=False)
class Prior:
    """The prior of the weights, whose strength is `prior_precision=`.

    Args:
        mean: weights that the prior is around, by default zero: flat in the order of `posterior.mean`, the state dict
            of a pretrained network, or, for a callback, the file of one of these, such as a checkpoint.
        temperature: `T` in the precision `P = H/T + Λ`; below 1 the data count more.
        posterior: another posterior over the same weights (for a callback, or its file), whose mean and precision are
            the prior's. `prior_precision=` is then a factor on that precision. The sum with the curvature is exact for
            "full" and "diag"; "kron" adds factors, which is an approximation.
    """

    mean: Any = None
    temperature: float = 1.0
    posterior: Any = None

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)
        if self.mean is not None and self.posterior is not None:
            raise ValueError("a prior that is a posterior brings its own mean: leave mean= out, or pass mean= alone")


def prior_option(prior: Any) -> Prior:
    """The option that `prior=` means: an object, a posterior, or the file of one."""
    if prior is None or isinstance(prior, Prior):
        return prior or Prior()
    if isinstance(prior, Mapping):
        return from_mapping("prior", prior, Prior)
    return Prior(posterior=prior)
