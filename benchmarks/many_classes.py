<<<<<<< HEAD
"""A thousand classes: a Monte-Carlo Kronecker fit of 64 images in fits with ten classes, and their GLM predictive.

With so many outputs the predictive is sampled. It is measured in forward passes of the same images, one per sample.
Networks are timm's, for images of 3×64×64 pixels; where it is not installed there is nothing to measure.
=======
"""A thousand classes: timm's ResNet-18 and ViT-Tiny, Monte-Carlo Kronecker fit and predictive of 64 images.

The fit is measured in plain steps of its images, with 10 and with 1,000 classes. The predictive draws functions of the
linearised network, and is measured in forward passes per sample, the drawing of the weights included; images have
3×64×64 pixels, or 3×224×224 on request. Where `timm` is not installed there is nothing to measure.
>>>>>>> predict
"""

from __future__ import annotations

<<<<<<< HEAD
=======
from collections.abc import Callable, Sequence
>>>>>>> predict
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
<<<<<<< HEAD
from benchmarks.rows import OURS

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
    posterior = _fit(net, x[:4], y[:4])

    def predict() -> Any:
        return posterior.predict(x, samples=SAMPLES, generator=torch.Generator().manual_seed(0))

    return side_by_side(lambda: predict, partial(_forward, net, x), repeats, scale=SAMPLES)


def _fit(net: nn.Module, x: Tensor, y: Tensor) -> Any:
    from lightning_bayes import fit_laplace

    posterior = fit_laplace(net, [(x, y)], "classification", "kron", curvature="fisher_mc")
    posterior.log_marginal_likelihood()  # with all eigendecompositions
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
=======
from benchmarks.networks import Batches, plain_epoch
from benchmarks.rows import OURS, Row

TITLE = "A thousand classes"
NETWORKS: dict[str, str] = {"ResNet-18": "resnet18", "ViT-Tiny": "vit_tiny_patch16_224"}
FEW, MANY = 10, 1000
IMAGES, SAMPLES = 64, 16
PIXELS = (64, 224)


def jobs(quick: bool) -> list[Job]:
    if find_spec("timm") is None:
        return []
    queue = []
    for network in NETWORKS:
        size = {"network": network, "images": 4 if quick else IMAGES}
        for classes in (FEW, MANY):
            name = f"many_classes/fit/{network}/{classes}/{OURS}"
            queue.append(Job(name, measure_fit, {**size, "classes": classes}, unit="steps", seconds=60))
        for pixels in PIXELS:
            arguments = {**size, "pixels": pixels, "samples": 4 if quick else SAMPLES}
            name = f"many_classes/predictive/{network}/{pixels}/{OURS}"
            job = Job(name, measure_predictive, arguments, unit="forward passes per sample", most=2.5, seconds=90)
            queue.append(replace(job, default=pixels == PIXELS[0], seconds=90 if pixels == PIXELS[0] else 600))
    return queue


def measure_fit(network: str, classes: int, images: int) -> Result:
    from lightning_bayes.curvature import fit_curvature

    module, data = _case(network, classes, PIXELS[0], images)
    work = partial(fit_curvature, module, data, "classification", "kron", curvature="fisher_mc")
    return side_by_side(lambda: work, partial(plain_epoch, _case(network, classes, PIXELS[0], 1)[0], data), 2)


def measure_predictive(network: str, pixels: int, images: int, samples: int) -> Result:
    from lightning_bayes import fit_laplace

    module, data = _case(network, MANY, pixels, images)
    posterior = fit_laplace(module, data, "classification", "kron", curvature="fisher_mc")
    x, _ = next(iter(data))
    return side_by_side(lambda: partial(posterior.predict, x, samples=samples), _forward(module, x), 2, scale=samples)


def _case(network: str, classes: int, pixels: int, images: int) -> tuple[nn.Module, Batches]:
    import timm

    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": pixels} if network.startswith("ViT") else {}
    module = timm.create_model(NETWORKS[network], num_classes=classes, **options)
    data = Batches(torch.randn(images, 3, pixels, pixels), torch.randint(classes, (images,)), images)
    return module, data


def _forward(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    @torch.no_grad()
    def forward() -> Tensor:
        f: Tensor = module.eval()(x)
        return f

    return forward


def derived(rows: Sequence[Row]) -> list[Row]:
    """What 1,000 classes cost in units of what 10 cost."""
    by_name, values = {row.name: row for row in rows}, []
    for network in NETWORKS:
        few, many = (by_name.get(f"many_classes/fit/{network}/{classes}/{OURS}") for classes in (FEW, MANY))
        if few and many and not (few.failure or many.failure):
            name = f"many_classes/fit/{network}/growth"
            values.append(Row(name, many.seconds / few.seconds, f"× {FEW} classes", most=2.0))
    return values
>>>>>>> predict
