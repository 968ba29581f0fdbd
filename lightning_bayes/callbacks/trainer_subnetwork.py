"""A `Subnetwork` whose weights another callback of the same Trainer chooses, `by="swag"` or `by="l2m"`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer

from lightning_bayes.callbacks.l2m import L2MCallback
from lightning_bayes.callbacks.swag import SWAGCallback
from lightning_bayes.network import SubsetError
from lightning_bayes.posterior.subnetwork import OF_TRAINER, Subnetwork
from lightning_bayes.trainer.posterior_callback import PosteriorCallback, posterior_callbacks

_KINDS: dict[str, type[PosteriorCallback]] = {"swag": SWAGCallback, "l2m": L2MCallback}


def asks_trainer(subset: Any) -> bool:
    """Whether a callback of the Trainer chooses."""
    return isinstance(subset, Subnetwork) and isinstance(subset.by, str) and subset.by in OF_TRAINER


def with_posterior(subset: Any, trainer: Trainer | None) -> Any:
    """The subset with that callback's posterior in place of the word."""
    return replace(subset, by=source_of(subset, trainer).posterior) if asks_trainer(subset) else subset


def source_of(subset: Subnetwork, trainer: Trainer | None) -> PosteriorCallback:
    kind = _KINDS[str(subset.by)]
    callbacks = [] if trainer is None else [c for c in posterior_callbacks(trainer) if isinstance(c, kind)]
    if len(callbacks) == 1:
        return callbacks[0]
    problem = "there is no Trainer" if trainer is None else f"the Trainer has {len(callbacks) or 'no'} {kind.__name__}"
    raise SubsetError(
        f"Subnetwork(by={subset.by!r}) needs the posterior of a {kind.__name__}, but {problem}: give the Trainer one, "
        "or pass by= a fitted posterior"
    )
