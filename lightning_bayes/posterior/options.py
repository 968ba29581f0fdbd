"""Further arguments of `fit_laplace` and `tune_prior`, by name and type."""

from __future__ import annotations

from typing import Any, TypedDict

from lightning_bayes.network import Processes


class FitOptions(TypedDict, total=False):
    """Of `fit_laplace`; see `fit_curvature`."""

    samples: int
    seed: int
    weight_sharing: str
    updatable: bool
    processes: Processes | None
    probe: Any
    dry_run: bool


class TuningOptions(TypedDict, total=False):
    """Of `tune_prior`; each method takes some of them, and has their defaults."""

    noise: bool  # "marglik", "mackay", "linear": whether to tune a regression's noise, too
    steps: int  # the same three: at most
    tolerance: float  # "mackay" and, iterated, "linear": of the logarithms, where it ends
    prior_groups: str | None  # the same three: "layers", or "normalised", one prior for each layer before a norm
    iterate: bool  # "linear": in the linearised network itself, by passes over the training data, and with the next:
    passes: int  # at most
    fisher: str  # where the outputs' Fisher is taken, at the "weights" or the "optimum"
    progress: bool
    processes: Processes | None  # those that share the data
    at: str  # "marglik": where the evidence is taken, "weights" or "optimum"
    predictive: str  # "auto", "grid": as in `predict`, like the next two
    link: str | None
    samples: int
    seed: int  # "auto", "grid": of what is drawn
    of: str  # "auto": the temperature's place, as in `calibrate`
    calibrate: bool  # "auto": whether to keep the temperature
    metric: Any  # "grid": a torchmetrics metric; by default the negative log-likelihood
    low: float  # "grid": its bounds, and how many priors it has
    high: float
    size: int
