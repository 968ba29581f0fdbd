"""Small networks gain nothing from threads; every test has its own fixed seed."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from lightning_bayes.network.slow_path import log_slow_path


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")  # PyTorch's own copy
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    log_slow_path.cache_clear()
