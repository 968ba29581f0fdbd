"""No method makes a training step wait for the device: after the first step, in which it checks what it was given, the
package reads no number from a tensor until the epoch ends."""

from typing import Any

import lightning as L
import pytest
from helpers.synchronisation import NoSynchronisation
from helpers.training import dataset, trainer
from test_callback_contract import METHODS
from torch.utils.data import DataLoader


class Watch(L.Callback):
    """From the second batch on, to the last but one: what an epoch's end needs may be read then."""

    def __init__(self) -> None:
        self.mode: NoSynchronisation | None = None
        self.watched = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if 0 < batch_idx < trainer.num_training_batches - 1:
            self.mode = NoSynchronisation(only_package=True)
            self.mode.__enter__()
            self.watched += 1

    def on_train_batch_end(self, *args: Any) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None

    def on_exception(self, *args: Any) -> None:
        self.on_train_batch_end()


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("method", METHODS)
def test_a_training_step_does_not_wait(method: str, task: str, tmp_path: Any) -> None:
    build, make = METHODS[method]
    watch = Watch()
    own = [] if make is None else [make(task)]
    data = DataLoader(dataset(task, n=20), batch_size=4)
    trainer(tmp_path, watch, *own, precision="64-true").fit(build(task), data)
    assert watch.watched == 6
