"""What a GPU has of its own: kernels without a deterministic form, free memory, copies that need not wait, TF32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases import CASES, CPU, batches, laplace, network
from device_training import Lit, loader, on_device
from helpers.training import trainer
from torch.overrides import TorchFunctionMode

from lightning_bayes import LaplaceCallback, fit_laplace
from lightning_bayes.network import CurvatureError

DETERMINISTIC = [
    "fit kron classification",
    "fit full fisher_mc",
    "conformal classification",
    "conformal raps",
    *(name for name in CASES if name.startswith("metric ")),
]


@pytest.mark.parametrize("case", DETERMINISTIC)
def test_deterministic_algorithms_are_enough(second: torch.device, case: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        CASES[case](second)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_full_matrix_is_compared_with_the_free_memory(
    second: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a terabyte 2 kB are free, and 3 kB are held by torch and unused: too little for matrices of 43 weights."""
    module = torch.get_device_module(second)
    numbers = {"mem_get_info": (2_000, 10**12), "memory_reserved": 5_000, "memory_allocated": 2_000}
    for name, value in numbers.items():
        monkeypatch.setattr(module, name, lambda device, value=value: value, raising=False)
    fit = trainer(tmp_path, LaplaceCallback(structure="full", progress=False), **on_device(second))
    with pytest.raises(CurvatureError, match=r"needs 1.48e-05 GB, but second:0 has 5e-06 GB"):
        fit.fit(Lit("classification"), loader("classification", 1))


class Moves(TorchFunctionMode):
    """Copies of some tensors, and whether they wait."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._places = {t.data_ptr() for t in tensors}
        self.blocking: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[0].device.type == "cpu" and args[0].data_ptr() in self._places:
            self.blocking.append(not (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_batches_are_copied_without_waiting(second: torch.device) -> None:
    net, data = network().to(second), batches()[:1]
    with Moves(data[0]) as moves:
        fit_laplace(net, data, structure="diag")
    assert moves.blocking == [False, False]


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_tf32_changes_variances_by_a_percent_at_most(second: torch.device, tf32: torch.device, structure: str) -> None:
    x = batches(seed=9)[0][0]
    wanted = laplace(CPU, "classification", structure).functional(x)[1].diagonal(dim1=1, dim2=2)
    rounded = laplace(tf32, "classification", structure).functional(x.to(tf32))[1].diagonal(dim1=1, dim2=2).cpu()
    assert not torch.equal(rounded, wanted)
    torch.testing.assert_close(rounded, wanted, rtol=0.01, atol=0.0)
