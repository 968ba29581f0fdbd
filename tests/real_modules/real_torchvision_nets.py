"""Classification and segmentation networks of torchvision."""

from typing import Any

import torch
import torch.nn.functional as F
from helpers.tensors import seeded
from real_data import BATCH, CLASSES, images
from real_frame import HELD_OUT, Classifier, Real
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

from lightning_bayes import GLM, Network

SIDE = 16


class Segmentation(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x)["out"], y)


def masks(n: int, seed: int) -> Any:
    x = torch.randn(n, 3, SIDE, SIDE, generator=seeded(seed))
    return DataLoader(TensorDataset(x, torch.randint(CLASSES, (n, SIDE, SIDE), generator=seeded(seed))), BATCH)


def classifier(name: str, in_default: bool = False) -> Real:
    def make() -> Classifier:
        return Classifier(models.get_model(name, weights=None, num_classes=CLASSES))

    return Real(make, images(), (HELD_OUT, CLASSES), {"subset": "last_layer"}, in_default)


def segmentation(name: str) -> Real:
    """Many outputs: samples of the linearised network, few of which are enough here."""

    def make() -> Segmentation:
        return Segmentation(models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES))

    words = {"subset": "last_layer", "network": Network(output="out"), "curvature": "fisher_mc", "tune": None}
    return Real(
        make, masks, (HELD_OUT, CLASSES, SIDE, SIDE), {**words, "predictive": GLM(samples=3), "calibrate": None}
    )


CASES = {
    "resnet18": classifier("resnet18", in_default=True),
    "mobilenet_v3_small": classifier("mobilenet_v3_small"),
    "lraspp_mobilenet_v3_large": segmentation("lraspp_mobilenet_v3_large"),
    "fcn_resnet50": segmentation("fcn_resnet50"),
    "deeplabv3_mobilenet_v3_large": segmentation("deeplabv3_mobilenet_v3_large"),
}
