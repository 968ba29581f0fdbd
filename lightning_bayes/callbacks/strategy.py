"""Which of Lightning's strategies a callback can work with."""

from __future__ import annotations

from lightning.pytorch import Trainer

_SHARDED = {"FSDPStrategy", "XLAFSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


def refuse_sharded(trainer: Trainer, who: str) -> None:
    """Raise under a strategy that leaves no process with the whole network."""
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _SHARDED:
            raise RuntimeError(
                f"{who} needs every process to hold the whole network, which {kind.__name__} does not: use "
                "strategy='ddp' or a single device"
            )
