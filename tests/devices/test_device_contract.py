"""Every public call gives the CPU's numbers on another device, also where that has no float64, or is the default."""

from functools import cache
from typing import Any

import pytest
import torch
from device_cases import CASES, CPU
from torch import Tensor


@cache
def expected(case: str) -> Any:
    return CASES[case](CPU)


def assert_same(actual: Any, wanted: Any, device: torch.device, **tolerance: float) -> None:
    if isinstance(wanted, dict):
        assert actual.keys() == wanted.keys()
        actual, wanted = list(actual.values()), list(wanted.values())
    if isinstance(wanted, (list, tuple)):
        assert len(actual) == len(wanted)
        for one, two in zip(actual, wanted, strict=True):
            assert_same(one, two, device, **tolerance)
    elif isinstance(wanted, Tensor) and wanted.is_floating_point():
        torch.testing.assert_close(actual.cpu().to(wanted), wanted, equal_nan=True, **tolerance)
    elif isinstance(wanted, Tensor):
        assert torch.equal(actual.cpu(), wanted)
    elif isinstance(wanted, float):
        assert actual == pytest.approx(wanted, rel=tolerance["rtol"], abs=tolerance["atol"])
    else:
        assert actual == wanted


def run(case: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    return CASES[case](device)


@pytest.mark.parametrize("case", CASES)
def test_on_a_device_with_float64(second: torch.device, case: str) -> None:
    wanted = expected(case)
    assert_same(run(case, second), wanted, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_on_a_device_without_float64(second: torch.device, request: pytest.FixtureRequest, case: str) -> None:
    wanted = expected(case)
    device = request.getfixturevalue("no_float64")
    assert_same(run(case, device), wanted, device, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_on_the_default_device(second: torch.device, request: pytest.FixtureRequest, case: str) -> None:
    wanted = expected(case)
    device = request.getfixturevalue("default_device")
    assert_same(run(case, device), wanted, device, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_on_the_default_device_without_float64(second: torch.device, request: pytest.FixtureRequest, case: str) -> None:
    wanted = expected(case)
    device = request.getfixturevalue("default_device")
    request.getfixturevalue("no_float64")
    assert_same(run(case, device), wanted, device, rtol=1e-3, atol=1e-4)
