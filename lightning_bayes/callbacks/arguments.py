"""The arguments that callbacks share, checked when a callback is made and not when training has ended."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_bayes.arguments import count, flag, seed, shown, text, word
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.plots.style import require_matplotlib
from lightning_bayes.posterior.tuning import METHODS


def check_use(
    name: Any,
    likelihood: Likelihood,
    link: Any,
    samples: Any,
    network: Any,
    ood: Any,
    plots: Any,
    number: Any,
    error: type[Exception] = ValueError,
) -> None:
    """What a posterior's use is told; `number` is the seed."""
    check_name(name, error)
    likelihood.choose_link(link)
    count("samples", samples, error=error)
    if network is not None:
        text("network", network, "the dotted name of a submodule", error)
    flag("ood", ood, error)
    if flag("plots", plots, error):
        require_matplotlib()
    seed("seed", number, error)


def check_name(name: Any, error: type[Exception] = ValueError) -> None:
    """Of logged numbers, and of a file."""
    text("name", name, "a word that tells this posterior from others", error)
    if name == "map":
        raise error("name='map' is the name of the plain network's own scores: choose another")
    if "/" in name or "\\" in name:
        raise error(f"name must not hold a slash, got {name!r}")


def check_tuning(tune: Any, per_layer: Any, damping: str | None = None) -> None:
    word("tune", tune, (None, *METHODS))
    flag("per_layer", per_layer)
    if per_layer and tune == "grid":
        raise ValueError("tune='grid' tunes one prior for all layers: use tune='marglik' with per_layer=True")
    if per_layer and damping is not None and tune is not None:
        raise ValueError(f"damping={damping!r} takes one prior precision for all layers: leave out per_layer=True")
    if tune == "mackay" and damping is not None:
        raise ValueError(
            "tune='mackay' belongs to the exact sum with the prior: leave damping= out, or use tune='marglik'"
        )


def check_module(module: Any, trainer: Any) -> None:
    """What `fit_now` and `evaluate` are handed, of `lightning` or `pytorch_lightning`."""
    if not isinstance(module, nn.Module) or not hasattr(module, "transfer_batch_to_device"):
        raise TypeError(f"module must be a LightningModule, got {shown(module)}")
    if trainer is not None and not hasattr(trainer, "strategy"):
        raise TypeError(f"trainer must be a Trainer or None, got {shown(trainer)}")
