"""The cost of a subnetwork of fixed size in a growing network.

The exact GGN takes one forward pass and a backward pass for each of the ten outputs, and one for the gradient. These
passes are the unit of time, and the table compares their memory with the fit's. Any additional cost should depend on
the size of the subnetwork, not of the network. The weights are chosen at random, so that all layers have some. A last
layer is measured in plain epochs of the network.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import CLASSES, NETWORKS, Batches, Network, plain_epoch

TITLE = "Subnetworks"
SIZES = (500, 2000)
WIDTHS = {"MLP": (256, 512, 1024, 2048), "CNN": (16, 32, 64, 128)}
PASSES = "passes alone"  # measured for their memory


def mlp(width: int) -> nn.Module:
    layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))
    return nn.Sequential(nn.Flatten(), *layers)


def cnn(width: int) -> nn.Module:
    body = (nn.Conv2d(1, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(width * 11 * 11, CLASSES))


def case(kind: str, width: int) -> Network:
    return Network(kind, partial({"MLP": mlp, "CNN": cnn}[kind], width), (1, 28, 28), 128, 512, 128)


def jobs(quick: bool) -> list[Job]:
    queue = []
    for kind, widths in WIDTHS.items():
        for width in widths[:2] if quick else widths:
            size: dict[str, Any] = {"kind": kind, "width": width, "quick": quick}
            for n in (0, *SIZES):
                name = f"subnetwork/{kind}/{width}/{n or PASSES}"
                unit = "× the passes"
                queue.append(Job(name, measure, {**size, "n": n}, unit=unit, seconds=60, default=False))
    last = {"examples": 128 if quick else NETWORKS["CNN"].examples, "repeats": 1 if quick else 5}
    return [*queue, Job("subnetwork/last layer/CNN", measure_last_layer, last, unit="epochs", seconds=14)]


def measure_last_layer(examples: int, repeats: int) -> Result:
    """Measure a full covariance over the last layer of the CNN, compared with plain epochs of the whole CNN."""
    from lightning_bayes import fit_laplace

    cnn, small = NETWORKS["CNN"], NETWORKS["MLP"]
    data, words = cnn.data(examples), {"subset": "last_layer", "structure": "full"}
    fit_laplace(small.fresh(), small.data(2), **words)  # what is imported at its first use
    epoch = partial(plain_epoch, cnn.fresh(), data)
    return side_by_side(lambda: partial(fit_laplace, cnn.fresh(), data, **words), epoch, repeats)


def measure(kind: str, width: int, quick: bool, n: int) -> Result:
    """Measure a fit over `n` weights; for 0, compare the passes with themselves."""
    from lightning_bayes import Subnetwork, fit_laplace

    network = case(kind, width)
    data = network.data(network.quick_examples if quick else network.examples)
    reference = partial(passes, network.fresh(), data)
    if n == 0:
        return side_by_side(lambda: reference, reference, 1 if quick else 5)
    small = case(kind, 8)
    fit_laplace(small.fresh(), small.data(2), subset=Subnetwork(3, "random"))  # what is imported at its first use
    work = partial(fit_laplace, network.fresh(), data, subset=Subnetwork(n, "random"))
    return side_by_side(lambda: work, reference, 1 if quick else 5)


def passes(network: nn.Module, data: Batches) -> None:
    """One forward pass, and backward passes for all outputs and for the loss."""
    parameters = list(network.parameters())
    for x, y in data:
        f = network(x)
        for output in range(CLASSES):
            torch.autograd.grad(f[:, output].sum(), parameters, retain_graph=True)
        torch.autograd.grad(F.cross_entropy(f, y), parameters)
