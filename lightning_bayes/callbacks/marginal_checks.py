"""What learning by the marginal likelihood asks of a Trainer, before training: callbacks that it can work beside,
monitors that see its numbers, and time enough to learn a prior."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_bayes.trainer.private import acts_at_validation, callbacks_of, class_name, is_dev_run

_OF_LAST_WEIGHTS = {  # what a callback does in training with the weights that training ends with
    "WeightAveraging": "averaged",
    "StochasticWeightAveraging": "averaged",
    "SWAGCallback": "averaged",
    "L2MCallback": "followed",
    "OnlineLaplaceCallback": "followed",
}
_LOGGED = ("log_evidence", "linear_evidence", "effective_parameters", "prior_precision", "noise_")


def check_companions(trainer: Trainer, keep: str) -> None:
    """One prior, and with `keep="best"` no callback whose own weights would be replaced."""
    callbacks = callbacks_of(trainer)
    if sum(class_name(callback, {"MarginalLikelihoodCallback"}) is not None for callback in callbacks) > 1:
        raise ValueError("a network has one prior: give the Trainer one MarginalLikelihoodCallback")
    names = [name for callback in callbacks if (name := class_name(callback, set(_OF_LAST_WEIGHTS)))]
    if names and keep == "best":
        raise ValueError(
            f"keep='best' would replace the weights that {names[0]} has {_OF_LAST_WEIGHTS[names[0]]} when training "
            "ends: use keep='last'"
        )


def monitors(callback: Any, name: str) -> bool:
    """Whether it asks for a number that is logged under `name`."""
    monitor = getattr(callback, "monitor", None)
    return isinstance(monitor, str) and monitor.startswith(_LOGGED) and monitor.endswith(f"_{name}")


def check_monitors(trainer: Trainer, name: str) -> None:
    """Refuse a monitor that is read at validation, when the numbers are still those of an epoch before."""
    for callback in callbacks_of(trainer):
        if monitors(callback, name) and acts_at_validation(trainer, callback):
            argument = "check" if class_name(callback, {"EarlyStopping"}) else "save"
            raise ValueError(
                f"{type(callback).__name__} reads {callback.monitor!r} at validation, but an epoch's evidence is known "
                f"at its end: use {argument}_on_train_epoch_end=True"
            )


def check_length(trainer: Trainer, burn_in_epochs: int, every_n_epochs: int) -> None:
    """Refuse a training that is known to end before the first prior is learned."""
    first, epochs = burn_in_epochs or every_n_epochs, trainer.max_epochs or 0
    if first > epochs > 0 and trainer.max_steps <= 0 and not is_dev_run(trainer):
        raise ValueError(
            f"burn_in_epochs={burn_in_epochs} and every_n_epochs={every_n_epochs} learn the first prior after {first} "
            f"epochs, but max_epochs={epochs}: lower them, or train longer"
        )
