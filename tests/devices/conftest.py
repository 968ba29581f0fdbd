"""The second device, or a skip."""

from collections.abc import Iterator

import pytest
import second_device
import torch
import torch.distributed as dist
from second_device import NAME, load, variant


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests do not see the device, and a Trainer of theirs may have left a process group, which lacks it."""
    monkeypatch.setattr(second_device, "visible", True)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def second() -> torch.device:
    if reason := load():
        pytest.skip(reason)
    return torch.device(NAME, 0)


@pytest.fixture
def no_float64(second: torch.device) -> Iterator[torch.device]:
    with variant(float64=False):
        yield second


@pytest.fixture
def default_device(second: torch.device) -> Iterator[torch.device]:
    """Where `torch.set_default_device` has put every new tensor."""
    torch.set_default_device(second)
    try:
        yield second
    finally:
        torch.set_default_device(None)


@pytest.fixture
def tf32(second: torch.device) -> Iterator[torch.device]:
    with variant(tf32=True):
        yield second
