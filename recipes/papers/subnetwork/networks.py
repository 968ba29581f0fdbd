"""The classifiers of rotated MNIST: a small convolutional network, and the paper's ResNet-18, both with dropout."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

RATES = {"cnn": 0.05, "resnet18": 0.1}


class LitNet(L.LightningModule):
    """An ordinary LightningModule; `constant` is the learning rate of the epochs for SWAG."""

    def __init__(self, network: str, classes: int, epochs: int, x: Tensor, constant: float | None = None) -> None:
        super().__init__()
        self.net = small_cnn(classes, x) if network == "cnn" else grey_resnet18(classes)
        self.rate, self.epochs, self.constant = RATES[network], epochs, constant

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), self.constant or self.rate, momentum=0.9, weight_decay=1e-4)
        if self.constant is not None:
            return sgd
        return [sgd], [torch.optim.lr_scheduler.CosineAnnealingLR(sgd, self.epochs)]


def small_cnn(classes: int, x: Tensor) -> nn.Sequential:
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()),
        *(nn.LazyLinear(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes)),
    )
    with torch.no_grad():
        network(x)  # gives the lazy layer its size
    return network


def grey_resnet18(classes: int) -> nn.Module:
    network = resnet18(num_classes=classes)
    network.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    network.fc = nn.Sequential(nn.Dropout(0.1), nn.Linear(512, classes))
    return network
