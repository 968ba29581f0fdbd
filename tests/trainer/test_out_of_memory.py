"""Running out of memory is reported as such, not as an unusable network or checkpoint."""

import pickle
import struct
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_bayes.network.borrowed import RandomState
from lightning_bayes.network.errors import is_missing_rule, is_out_of_memory
from lightning_bayes.trainer import checkpoints, dry_run
from lightning_bayes.trainer.module import ModuleError

FULL = torch.OutOfMemoryError("CUDA out of memory")


class Raising(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Any) -> Any:
        raise self.error


def quiet_trainer() -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_a_networks_own_error_names_the_network_and_out_of_memory_stays() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ModuleError, match="cannot be run on the x of a batch"):
        dry_run._run(Raising(KeyError("mask")), None, x, 2)
    with pytest.raises(torch.OutOfMemoryError):
        dry_run._run(Raising(FULL), None, x, 2)


def test_in_its_own_mode_a_network_may_fail_but_for_memory() -> None:
    x, rng = torch.ones(2, 3), RandomState.now(None)
    assert dry_run._training_outputs(Raising(ValueError("no")), x, rng, quiet_trainer()) is None
    with pytest.raises(torch.OutOfMemoryError):
        dry_run._training_outputs(Raising(FULL), x, rng, quiet_trainer())


@pytest.mark.parametrize(
    "error",
    [OSError("gone"), KeyError("state_dict"), pickle.UnpicklingError("torn"), struct.error("cut"), AssertionError()],
)
def test_a_checkpoint_that_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(checkpoints, "_read", raising(error))
    module = L.LightningModule()
    with (
        pytest.raises(checkpoints.CheckpointError, match="cannot be loaded"),
        checkpoints.weights_of(quiet_trainer(), module, "a.ckpt"),
    ):
        pass
    monkeypatch.setattr(checkpoints, "exists", lambda path: True)
    with pytest.warns(UserWarning, match="a.ckpt cannot be read and so gets no posterior"):
        assert checkpoints._read_or_warn(quiet_trainer(), "a.ckpt") is None


@pytest.mark.parametrize("error", [FULL, MemoryError()])
def test_out_of_memory_is_not_taken_for_an_unreadable_checkpoint(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(checkpoints, "_read", raising(error))
    monkeypatch.setattr(checkpoints, "exists", lambda path: True)
    with pytest.raises(type(error)):
        checkpoints._read_or_warn(quiet_trainer(), "a.ckpt")
    with pytest.raises(type(error)), checkpoints.weights_of(quiet_trainer(), L.LightningModule(), "a.ckpt"):
        pass


def raising(error: Exception) -> Any:
    def read(*_: Any) -> Any:
        raise error

    return read


@pytest.mark.parametrize(
    "report",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "MPS backend out of memory (MPS allocated: 5.05 GB)",
        "[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_a_librarys_report_of_full_memory_is_not_a_missing_rule(report: str) -> None:
    """A slow path would be taken for the rest of the run."""
    assert is_out_of_memory(RuntimeError(report))
    assert not is_missing_rule(RuntimeError(report))
