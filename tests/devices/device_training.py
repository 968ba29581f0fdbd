"""The second device as Lightning sees a device, and a module to train on it."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from device_cases import LIKELIHOODS, batches, network
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from second_device import NAME
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Gaussian

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


class Lit(L.LightningModule):
    def __init__(self, task: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.task = task
        self.net = network(task)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(*batch)

    def nll(self, x: Tensor, y: Tensor) -> Tensor:
        if self.task == "classification":
            return F.cross_entropy(self(x), y)
        likelihood = LIKELIHOODS[self.task]
        assert isinstance(likelihood, Gaussian)
        return -torch.distributions.Normal(self(x), likelihood.noise_std).log_prob(y).sum(1).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.nll(*batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.nll(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.02, betas=(0.8, 0.9), weight_decay=0.0)


def variational(kind: Any, task: str, **options: Any) -> Any:
    return kind(task, variational={"likelihood": LIKELIHOODS[task], **options})


def loader(task: str, seed: int, n: int = N) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*batches(task, seed, n), strict=True))
    return DataLoader(TensorDataset(x, y), 7)
