"""The second device as Lightning sees a device, and a module to train on it."""

from typing import Any

import torch
from device_cases import LIKELIHOODS, batches, network
from helpers.training import LitNet
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from second_device import NAME
from torch.utils.data import DataLoader, TensorDataset

N = 24


class SecondAccelerator(Accelerator):
    def setup_device(self, device: torch.device) -> None:
        assert device.type == NAME

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0) for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


def on_device(device: torch.device) -> dict[str, Any]:
    """The arguments of a Trainer that trains there."""
    if device.type == "cpu":
        return {"accelerator": "cpu", "devices": 1}
    return {"strategy": SingleDeviceStrategy(device, accelerator=SecondAccelerator()), "accelerator": "auto"}


class Lit(LitNet):
    decay = 0.0

    def __init__(self, task: str) -> None:
        super().__init__(task)
        self.net = network(task)


def variational(kind: Any, task: str, **options: Any) -> Any:
    return kind(task, variational={"likelihood": LIKELIHOODS[task], **options})


def loader(task: str, seed: int, n: int = N) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*batches(task, seed, n), strict=True))
    return DataLoader(TensorDataset(x, y), 7)
