"""Image classifiers of timm, the smallest of each family."""

from typing import Any

import lightning as L
import timm
import torch
import torch.nn.functional as F
from real_data import CLASSES, images
from real_frame import HELD_OUT, Real
from torch import Tensor


class TimmClassifier(L.LightningModule):
    def __init__(self, name: str, **words: Any) -> None:
        super().__init__()
        self.model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **words)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))

    validation_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def case(name: str, in_default: bool = False, **words: Any) -> Real:
    return Real(lambda: TimmClassifier(name, **words), images(), (HELD_OUT, CLASSES), {"structure": "diag"}, in_default)


CASES = {
    "timm resnet": case("test_resnet"),
    "timm vit": case("test_vit", img_size=32),
    "timm convnext": case("test_convnext"),
    "timm efficientnet": case("test_efficientnet", in_default=True),
    "timm byobnet": case("test_byobnet"),
    "timm nfnet": case("test_nfnet"),
    "timm mambaout": case("test_mambaout"),
}
