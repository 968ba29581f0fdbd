"""How long a Kronecker fit of timm's ResNet-18 takes: 11 million weights, images of 3×64×64 pixels.

The fit sees 64 images and decomposes factors of up to 4,608 columns. It is measured in plain epochs over 1,024 images,
of which an eighth is run. Without `timm`, nothing is measured.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import CLASSES, Network, plain_epoch
from benchmarks.rows import OURS
from lightning_bayes import Kron

TITLE = "Kronecker fit of a ResNet-18"
FITS: dict[str, dict[str, Any]] = {"exact factors": {}, "low rank": {"structure": Kron(rank="auto")}}
SECONDS = {"exact factors": 100, "low rank": 90}
IMAGES, EPOCH, PART = 64, 1024, 128


def resnet18() -> nn.Module:
    import timm

    return timm.create_model("resnet18", num_classes=CLASSES)


CASE = Network("ResNet-18", resnet18, (3, 64, 64), batch=64, examples=IMAGES, quick_examples=4)


def jobs(quick: bool) -> list[Job]:
    if find_spec("timm") is None:
        return []
    unit = f"epochs of {EPOCH:,} images"
    return [
        Job(f"resnet18/{fit}/{OURS}", measure, {"fit": fit, "quick": quick}, unit=unit, most=5, seconds=SECONDS[fit])
        for fit in FITS
    ]


def measure(fit: str, quick: bool) -> Result:
    from lightning_bayes.curvature import fit_curvature

    def work(network: nn.Module, examples: int) -> torch.Tensor:
        subset = {"subset": "last_layer"} if quick else {}
        fitted = fit_curvature(network, CASE.data(examples), "classification", **subset, **FITS[fit])
        return fitted.structure.add_prior(1.0).logdet()

    network, part = CASE.fresh(), 8 if quick else PART
    fit_curvature(nn.Linear(4, 3), [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))])  # import at first use
    epoch = partial(plain_epoch, CASE.fresh(), CASE.data(part))
    return side_by_side(lambda: partial(work, network, 4 if quick else IMAGES), epoch, 2, scale=EPOCH / part)
