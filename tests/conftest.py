"""What all tests share."""

import logging
import os
import random
import sys
from pathlib import Path

import pytest
import torch

DATA_VARIABLE = "LIGHTNING_BAYES_DATA"


def pytest_configure() -> None:
    # The tests' tensors are tiny: handing them to a second thread costs more than it saves.
    torch.set_num_threads(1)
    # Autograd's threads are those of the devices that there are at the first backward pass, which may be at an import.
    sys.path.append(str(Path(__file__).with_name("devices")))
    import second_device

    second_device.load()
    second_device.visible = False


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same numbers and hears all reports, whichever tests ran before it in the same process."""
    torch.manual_seed(0)
    random.seed(0)
    logging.disable(logging.NOTSET)  # programs such as the recipes turn reports off


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets, for tests that need more than scikit-learn's bundled ones."""
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        pytest.skip(f"set {DATA_VARIABLE} to the folder with the data sets (MNIST, UCI, …) to run this test")
    if not Path(folder).is_dir():
        pytest.skip(f"{DATA_VARIABLE} is {folder!r}, which is not a folder: set it to the folder with the data sets")
    return Path(folder)
