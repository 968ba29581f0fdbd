"""Private names of Lightning are used in `trainer/private.py` alone, and each exists in the installed Lightning."""

import ast
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.private_names import ROOT, defined_names, foreign_names, private_names, read
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import multiprocessing
from torch import nn
from torch.utils.data import SubsetRandomSampler

from lightning_bayes.trainer import private

DOOR = ROOT / "trainer" / "private.py"
FOREACH = (name for name in dir(torch) if name.startswith("_foreach_"))  # by which torch's own optimizers work
TORCH = {
    *dir(nn.Conv2d(1, 1, 1)),
    *dir(torch.Tensor),
    *FOREACH,
    "_last_lr",
    "_schedulers",
}  # the last two of schedulers


def test_private_names_of_lightning_are_behind_one_door() -> None:
    ours = {name for source in read(".", without=DOOR).values() for name in defined_names(ast.parse(source))}
    assert foreign_names(read("trainer", "callbacks", "mixins", without=DOOR), ours | TORCH) == []


@pytest.mark.parametrize(
    "source",
    [
        "trainer._x",
        "a.b._x",
        "from torch import _x",
        "from torch._x import y",
        "f()._x",
        "getattr(plugin, '_x', None)",
        "hasattr(m, '_x')",
        "other[0]._x()",
    ],
)
def test_a_private_name_of_another_object_is_seen(source: str) -> None:
    assert foreign_names({"file": source}, set()) == ["file:1: _x"]
    assert foreign_names({"file": source}, {"_x"}) == []


@pytest.mark.parametrize("source", ["self._x", "cls._x", "super()._x", "a.x", "a.__dict__", "getattr(a, 'x')"])
def test_public_names_and_own_ones_are_free(source: str) -> None:
    assert foreign_names({"file": source}, set()) == []


EXISTS: dict[str, Callable[[], Any]] = {
    "_apply_batch_transfer_handler": lambda: pl.LightningModule._apply_batch_transfer_handler,
    "_on_before_batch_transfer": lambda: pl.LightningModule._on_before_batch_transfer,
    "_sampler": lambda: DistributedSamplerWrapper(SubsetRandomSampler([0]), num_replicas=1, rank=0).dataset._sampler,
    "_last_checkpoint_saved": lambda: ModelCheckpoint()._last_checkpoint_saved,
    "_last_global_step_saved": lambda: ModelCheckpoint()._last_global_step_saved,
    "_save_on_train_epoch_end": lambda: ModelCheckpoint()._save_on_train_epoch_end,
    "_check_on_train_epoch_end": lambda: EarlyStopping("loss")._check_on_train_epoch_end,
    "_step_supports_amp_scaling": lambda: (
        torch.optim.Adam([nn.Parameter(torch.ones(1))], fused=True)._step_supports_amp_scaling
    ),
    "_executor": lambda: AsyncCheckpointIO()._executor,
    "_compiler_ctx": lambda: pl.utilities.compile.from_compiled(torch.compile(pl.LightningModule()))._compiler_ctx,
    "_orig_mod": lambda: torch.compile(nn.Linear(1, 1))._orig_mod,
    "_compiled_call_impl": lambda: nn.Module._compiled_call_impl,
}


@pytest.mark.parametrize("name", EXISTS)
def test_each_private_name_exists(name: str) -> None:
    EXISTS[name]()


def test_every_private_name_is_known_to_exist() -> None:
    assert {name for _, name in private_names(ast.parse(DOOR.read_text(encoding="utf-8")))} == set(EXISTS)


def test_the_classes_that_are_known_by_name_exist() -> None:
    assert multiprocessing._MultiProcessingLauncher.__name__ == "_MultiProcessingLauncher"
    assert DistributedSamplerWrapper.__name__ == "DistributedSamplerWrapper"
    assert private.class_name(ModelCheckpoint(), {"Checkpoint"}) == Checkpoint.__name__
    kinds = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
    assert [kind.__name__ for kind in kinds] == ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"]
    assert private.class_name(DDPStrategy(), {kind.__name__ for kind in kinds}) is None


def test_the_untyped_attributes_of_a_trainer_exist() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, fast_dev_run=True, enable_progress_bar=False)
    assert private.is_dev_run(trainer)
    assert private.datamodule_of(trainer) is None
    callbacks = [*private.callbacks_of(trainer)]
    private.set_callbacks(trainer, callbacks)
    assert trainer.callbacks is callbacks
    assert callable(trainer.fit_loop.epoch_loop.val_loop.setup_data)
    assert not private.is_launched(trainer)
    assert private.gradient_scale(trainer) == 1.0
    assert {"forward_context", "convert_input"} <= set(dir(Precision))
    assert hasattr(MixedPrecision("bf16-mixed", "cpu"), "scaler")
    assert private.is_default_predict_step(pl.LightningModule().predict_step)
