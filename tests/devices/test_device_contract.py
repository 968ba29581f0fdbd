"""Every public call gives the CPU's numbers on another device, also where that has no float64, or is the default."""

from functools import cache
from typing import Any

import pytest
import torch
from device_cases import CASES, CPU, assert_same


@cache
def expected(case: str) -> Any:
    return CASES[case](CPU)


PLACES: dict[str, tuple[list[str], dict[str, float]]] = {
    "with float64": ([], {"rtol": 1e-4, "atol": 1e-5}),
    "without float64": (["no_float64"], {"rtol": 1e-3, "atol": 1e-4}),
    "default device, without float64": (["default_device", "no_float64"], {"rtol": 1e-3, "atol": 1e-4}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_the_second_device_gives_the_numbers_of_the_cpu(
    second: torch.device, request: pytest.FixtureRequest, case: str, place: str
) -> None:
    wanted = expected(case)
    fixtures, tolerance = PLACES[place]
    for name in fixtures:
        request.getfixturevalue(name)
    torch.manual_seed(0)
    assert_same(CASES[case](second), wanted, **tolerance)
