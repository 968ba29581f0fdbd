"""What was fitted, in a few words and numbers, for the user and for the loggers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_bayes.arguments import some
from lightning_bayes.network.subset import layer_of
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.structures import Structure
from lightning_bayes.trainer.private import is_dev_run


def report(trainer: Trainer | None, name: str, what: str, numbers: dict[str, float]) -> None:
    """Say what was fitted, and log its numbers as those of the posterior `name`."""
    rank_zero_info(f"{name}: {what}; " + ", ".join(f"{key} {value:.6g}" for key, value in numbers.items()))
    log(trainer, {f"{key}_{name}": value for key, value in numbers.items()})


def log(trainer: Trainer | None, numbers: dict[str, float]) -> None:
    """To all loggers, also where no hook of Lightning's logs."""
    if trainer is not None and not is_dev_run(trainer):
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)
            logger.save()


def end_live_display(trainer: Trainer) -> None:
    """Rich's bar redraws itself below all that is printed, and a bar after it would print one line after the other."""
    display: Any = getattr(trainer.progress_bar_callback, "progress", None)
    if hasattr(display, "stop"):
        display.stop()


def describe(posterior: LaplacePosterior) -> dict[str, float]:
    """The numbers that a Laplace posterior is known by."""
    numbers = {}
    if posterior.curvature.knows_likelihood:
        numbers["log_evidence"] = float(posterior.log_marginal_likelihood())
    numbers["effective_parameters"] = float(posterior.effective_parameters)
    prior, layers = posterior.prior_precision, posterior.subset.layers
    if prior.ndim == 0:
        numbers["prior_precision"] = float(prior)
    elif len(layers) == len(prior):
        named = zip(layers, prior.tolist(), strict=True)
        numbers.update({f"prior_precision/{layer}": value for layer, value in named})
    noise = getattr(posterior.likelihood, "noise_std", None)
    if noise is not None and getattr(noise, "ndim", 0) == 0:
        numbers["noise_std"] = float(noise)
    return numbers


def block_summary(structure: Structure) -> str:
    """`"Kronecker: 4 layers; dense: 2 (net.1, net.4)"`; nothing for a matrix that is all of one kind."""
    layers: dict[type[Structure], list[str]] = {}
    for name, block in structure.named_blocks:
        layers.setdefault(type(block), []).append(layer_of(name))
    parts = []
    for kind, names in layers.items():
        distinct = list(dict.fromkeys(names))
        if not kind.is_exact:
            parts.append(f"{kind.__name__}: {len(distinct)} layer{'s' if len(distinct) > 1 else ''}")
        else:
            parts.append(f"{kind.__name__.lower()}: {len(distinct)} ({some(distinct)})")
    return "; ".join(parts)
