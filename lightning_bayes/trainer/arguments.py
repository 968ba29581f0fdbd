"""The arguments that callbacks share, checked when a callback is made and not when training has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_bayes.arguments import flag, shown, word
from lightning_bayes.posterior.tuning import METHODS

CALIBRATIONS = ("auto", "outputs", "probs", None)


def check_tuning(
    tune: Any, per_layer: Any, calibrate: Any, damping: str | None = None, methods: Sequence[str] = METHODS
) -> None:
    word("tune", tune, (None, *methods))
    flag("per_layer", per_layer)
    word("calibrate", calibrate, CALIBRATIONS)
    if per_layer and tune in ("auto", "grid"):
        raise ValueError(f"tune={tune!r} tunes one prior for all layers: use tune='marglik' with per_layer=True")
    if per_layer and damping is not None and tune is not None:
        raise ValueError(f"damping={damping!r} takes one prior precision for all layers: leave out per_layer=True")
    if tune in ("mackay", "linear") and damping is not None:
        raise ValueError(
            f"tune={tune!r} belongs to the exact sum with the prior: leave damping= out, or use tune='marglik'"
        )


def check_module(module: Any, trainer: Any) -> None:
    """What `fit_now` and `evaluate` are handed, of `lightning` or `pytorch_lightning`."""
    if not isinstance(module, nn.Module) or not hasattr(module, "transfer_batch_to_device"):
        raise TypeError(f"module must be a LightningModule, got {shown(module)}")
    if trainer is not None and not hasattr(trainer, "strategy"):
        raise TypeError(f"trainer must be a Trainer or None, got {shown(trainer)}")
