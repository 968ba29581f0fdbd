"""How long a step of IVON takes, in steps of AdamW of the same network.

A step is everything from a batch to the next one in a Trainer: for IVON also drawing the sample and restoring the mean.
Memory is what training adds to a process: weights, gradients, the optimizer's state, activations; AdamW's is measured
in a separate process.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.isolate import Job
from benchmarks.measure import Result
from benchmarks.networks import Batches
from benchmarks.steps import Comparison, Contender, Train, fastest_step, measure, plain_module
from benchmarks.variational import NETWORKS

TITLE = "A step of IVON"
PLAIN = "AdamW"
CONTENDERS = {"IVON": Contender(1.15), "IVON, 2 samples": Contender()}
COMPARISON = Comparison("ivon", PLAIN, CONTENDERS, NETWORKS, {"narrow PreActResNet-18": 20})


def jobs(quick: bool) -> list[Job]:
    return COMPARISON.jobs(measure_step, quick)


def measure_step(network: str, contender: str, quick: bool) -> Result:
    return measure(NETWORKS[network], _trained(contender), _trained(PLAIN), quick)


def _trained(contender: str) -> Train:
    from lightning_bayes import IVON, IVONCallback

    class Plain(plain_module(lambda f, x, y: F.cross_entropy(f, y))):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-4)

    def train(net: nn.Module, data: Batches) -> float:
        class Sampled(Plain):
            def configure_optimizers(self) -> torch.optim.Optimizer:
                return IVON(self.parameters(), 1e-3, n_data=len(data.dataset))

        if contender == PLAIN:
            return fastest_step(Plain(net), data)
        return fastest_step(Sampled(net), data, IVONCallback(train_samples=2 if "2" in contender else 1))

    return train
