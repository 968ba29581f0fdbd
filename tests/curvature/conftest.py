"""Every test has its own fixed seed."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from lightning_bayes.network.errors import log_slow_path


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")  # PyTorch's own copy
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    log_slow_path.cache_clear()
