"""Private names of Lightning are used in `trainer/private.py` alone, and each exists in the installed Lightning.

A private attribute is ours if a file of the package defines it: by `def`, by assignment, or as an annotated field.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import multiprocessing
from torch import nn
from torch.utils.data import SubsetRandomSampler

import lightning_bayes
from lightning_bayes.trainer import private

ROOT = Path(lightning_bayes.__file__).parent
DOOR = ROOT / "trainer" / "private.py"
FOREACH = (name for name in dir(torch) if name.startswith("_foreach_"))  # by which torch's own optimizers work
TORCH = {
    *dir(nn.Conv2d(1, 1, 1)),
    *dir(torch.Tensor),
    *FOREACH,
    "_last_lr",
    "_schedulers",
}  # the last two of schedulers


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private attributes of other objects that are read, also by `getattr` and `hasattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            name = node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = str(getattr(node.args[1], "value", ""))  # of a literal
        else:
            continue
        if name.startswith("_") and not name.startswith("__"):
            yield node.lineno, name


def is_own(value: ast.expr) -> bool:
    name = value.func if isinstance(value, ast.Call) else value
    return getattr(name, "id", "") in ("self", "cls", "super")


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (name for target in targets for name in ast.walk(target)):
                if isinstance(name, (ast.Name, ast.Attribute)) and isinstance(name.ctx, ast.Store):
                    yield name.id if isinstance(name, ast.Name) else name.attr


def foreign_names(sources: dict[str, str], ours: set[str]) -> list[str]:
    uses = ((place, *use) for place, source in sources.items() for use in private_names(ast.parse(source)))
    return [f"{place}:{line}: {name}" for place, line, name in uses if name not in ours]


def read(*folders: str) -> dict[str, str]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path != DOOR)
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_private_names_of_lightning_are_behind_one_door() -> None:
    ours = {name for source in read(".").values() for name in defined_names(ast.parse(source))}
    assert foreign_names(read("trainer", "callbacks", "mixins"), ours | TORCH) == []


@pytest.mark.parametrize(
    "source", ["trainer._x", "a.b._x", "f()._x", "getattr(plugin, '_x', None)", "hasattr(m, '_x')", "other[0]._x()"]
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
