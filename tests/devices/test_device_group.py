"""Processes on a group as strict as NCCL find what one process finds, and what processes on Gloo find."""

from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases import CPU
from device_group_worker import run
from helpers.processes import launched, results

from lightning_bayes.network import Processes

WORKER = str(Path(__file__).with_name("device_group_worker.py"))


def assert_same(answers: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert answers.keys() == expected.keys()
    for name, values in expected.items():
        for key, value in values.items():
            torch.testing.assert_close(answers[name][key], value, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions")
def test_two_processes_find_what_one_finds(second: torch.device, tmp_path: Path) -> None:
    with launched(WORKER, tmp_path, 2, str(second)) as processes:
        expected = run(CPU, Processes())
        for answers in results(tmp_path, processes):
            assert_same(answers, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_processes_find_what_two_on_gloo_find(second: torch.device, tmp_path: Path) -> None:
    found = []
    for device in ("cpu", str(second)):
        folder = tmp_path / device.partition(":")[0]
        folder.mkdir()
        with launched(WORKER, folder, 2, device) as processes:
            found.append(results(folder, processes))
    for expected, answers in zip(*found, strict=True):
        assert_same(answers, expected, rtol=1e-5, atol=1e-6)
