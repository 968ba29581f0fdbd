"""Image classifiers of timm, the smallest of each family."""

from typing import Any

import timm
from real_data import CLASSES, images
from real_frame import HELD_OUT, Classifier, Real


def case(name: str, in_default: bool = False, **words: Any) -> Real:
    def make() -> Classifier:
        return Classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES, **words))

    return Real(make, images(), (HELD_OUT, CLASSES), {"structure": "diag"}, in_default)


CASES = {
    "timm resnet": case("test_resnet"),
    "timm vit": case("test_vit", img_size=32),
    "timm convnext": case("test_convnext"),
    "timm efficientnet": case("test_efficientnet", in_default=True),
    "timm byobnet": case("test_byobnet"),
    "timm nfnet": case("test_nfnet"),
    "timm mambaout": case("test_mambaout"),
}
