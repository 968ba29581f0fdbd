"""How long a step of Variational Laplace and of variational inference takes, in steps of MAP of the same network.

A step is everything from a batch to the next one in a Trainer: forward and backward passes, Adam for the weights and,
except for MAP, for log σ. The network is a pre-activation ResNet with softplus and batch norm. Memory is what training
adds to a process: weights, log σ, gradients, Adam's moments, activations; MAP's is measured in a separate process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F

from benchmarks.isolate import Job
from benchmarks.measure import Result
from benchmarks.networks import CLASSES, Batches, Network
from benchmarks.steps import STEPS, Comparison, Contender, Train, fastest_step, measure, plain_module

TITLE = "A step of Variational Laplace and variational inference"
MAP = "MAP"


@dataclass(frozen=True)
class Variational(Contender):
    mixin: str = ""
    options: dict[str, Any] = field(default_factory=dict)


LAPLACE, INFERENCE = "VariationalLaplaceMixin", "VariationalInferenceMixin"
CONTENDERS = {
    "VL": Variational(2.4, 2, LAPLACE),
    "VL, finite difference": Variational(mixin=LAPLACE, options={"method": "finite_difference"}),
    "VL, exact": Variational(mixin=LAPLACE, options={"method": "exact"}),
    "VI": Variational(1.1, 2, INFERENCE),
    "VI, local reparameterisation": Variational(mixin=INFERENCE, options={"local_reparameterization": True}),
}


def preact_resnet(width: int) -> nn.Module:
    from recipes.papers.variational_laplace.preact_resnet import PreActResNet

    return PreActResNet(3, CLASSES, width)


NETWORKS = {
    network.name: network
    for network in (
        Network("narrow PreActResNet-18", partial(preact_resnet, 16), (3, 32, 32), 64, STEPS * 64, STEPS * 8),
        Network("PreActResNet-18", partial(preact_resnet, 64), (3, 32, 32), 32, STEPS * 32, STEPS * 2),
    )
}
COMPARISON = Comparison("variational", MAP, CONTENDERS, NETWORKS, {"narrow PreActResNet-18": 30})
derived = COMPARISON.derived


def jobs(quick: bool) -> list[Job]:
    return COMPARISON.jobs(measure_step, quick)


def measure_step(network: str, contender: str, quick: bool) -> Result:
    return measure(NETWORKS[network], _trained(contender), _trained(MAP), quick)


def _trained(contender: str) -> Train:
    import lightning_bayes

    Plain = plain_module(lambda f, x, y: F.cross_entropy(f, y))

    def train(net: nn.Module, data: Batches) -> float:
        if contender == MAP:
            return fastest_step(Plain(net), data)
        chosen = CONTENDERS[contender]
        Bayes = type("Bayes", (getattr(lightning_bayes, chosen.mixin), Plain), {})
        given = {"beta": 0.1, "prior_std": "he", "n_data": len(data.dataset), **chosen.options}
        return fastest_step(Bayes(net, variational=given), data)

    return train
