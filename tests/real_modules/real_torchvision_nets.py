"""Classification and segmentation networks of torchvision."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from real_data import BATCH, CLASSES, images, seeded
from real_frame import HELD_OUT, Real
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

from lightning_bayes import GLM, Network

SIDE = 16


class Classifier(L.LightningModule):
    def __init__(self, name: str, **words: Any) -> None:
        super().__init__()
        self.model = models.get_model(name, weights=None, num_classes=CLASSES, **words)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))

    validation_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Segmentation(L.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x)["out"], y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))

    validation_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def masks(n: int, seed: int) -> Any:
    x = torch.randn(n, 3, SIDE, SIDE, generator=seeded(seed))
    return DataLoader(TensorDataset(x, torch.randint(CLASSES, (n, SIDE, SIDE), generator=seeded(seed))), BATCH)


LAST: dict[str, Any] = {"subset": "last_layer"}
# Many outputs: samples of the linearised network, few of which are enough here.
FEW: dict[str, Any] = {"curvature": "fisher_mc", "predictive": GLM(samples=3), "tune": None, "calibrate": None}
DENSE: dict[str, Any] = {**LAST, **FEW, "network": Network(output="out")}
OF_IMAGE, OF_PIXELS = (HELD_OUT, CLASSES), (HELD_OUT, CLASSES, SIDE, SIDE)
CASES = {
    "resnet18": Real(lambda: Classifier("resnet18"), images(), OF_IMAGE, LAST, in_default=True),
    "mobilenet_v3_small": Real(lambda: Classifier("mobilenet_v3_small"), images(), OF_IMAGE, LAST),
    "lraspp_mobilenet_v3_large": Real(lambda: Segmentation("lraspp_mobilenet_v3_large"), masks, OF_PIXELS, DENSE),
    "fcn_resnet50": Real(lambda: Segmentation("fcn_resnet50"), masks, OF_PIXELS, DENSE),
    "deeplabv3_mobilenet_v3_large": Real(lambda: Segmentation("deeplabv3_mobilenet_v3_large"), masks, OF_PIXELS, DENSE),
}
