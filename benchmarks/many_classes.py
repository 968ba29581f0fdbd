"""A thousand classes: a Monte-Carlo Kronecker fit of 64 images relative to ten classes, and their GLM predictive.

With so many outputs, the predictive is sampled. It is measured relative to one forward pass of the same images per
sample. Networks are timm's, for images of 3×64×64 pixels; without timm, nothing is measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.rows import OURS
from lightning_bayes import GLM

TITLE = "A thousand classes"
NETWORKS: dict[str, dict[str, Any]] = {
    "ResNet-18": {"model_name": "resnet18"},
    "ViT-Tiny": {"model_name": "vit_tiny_patch16_224", "img_size": 64},
}
MANY, FEW, IMAGES, SAMPLES = 1000, 10, 64, 20


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network in NETWORKS if find_spec("timm") else ():
        size = {"network": network, "images": 2 if quick else IMAGES, "repeats": 1 if quick else 3}
        fit = Job(f"many_classes/{network}/fit/{OURS}", measure_fit, size, unit=f"fits of {FEW} classes", most=2)
        unit = "forward passes per sample"
        predict = Job(f"many_classes/{network}/predictive/{OURS}", measure_predictive, size, unit=unit, most=2.5)
        queue += [fit, predict]
    return [replace(job, seconds=55) for job in queue]


def measure_fit(network: str, images: int, repeats: int) -> Result:
    many, few = (partial(_fit, _network(network, classes), *_data(images, classes)) for classes in (MANY, FEW))
    return side_by_side(lambda: many, few, repeats)


def measure_predictive(network: str, images: int, repeats: int) -> Result:
    net = _network(network, MANY)
    x, y = _data(images, MANY)
    posterior = _fit(net, x, y)

    def predict() -> Any:
        return posterior.predict(x, GLM(samples=SAMPLES), generator=torch.Generator().manual_seed(0))

    return side_by_side(lambda: predict, partial(_forward, net, x), repeats, scale=SAMPLES)


def _fit(net: nn.Module, x: Tensor, y: Tensor) -> Any:
    from lightning_bayes import fit_laplace

    posterior = fit_laplace(net, [(x, y)], "classification", curvature="fisher_mc", structure="kron")
    posterior.log_marginal_likelihood()  # includes all eigendecompositions
    return posterior


def _forward(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def _network(name: str, classes: int) -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(num_classes=classes, **NETWORKS[name]).eval()


def _data(images: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(images, 3, 64, 64, generator=generator), torch.randint(classes, (images,), generator=generator)
