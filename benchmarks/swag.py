"""The cost of a snapshot of SWAG, which updates the running mean and variance of the weights, in steps of Adam."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.networks import NETWORKS

TITLE = "SWAG"
NETWORK = "ResNet-18"


def jobs(quick: bool) -> list[Job]:
    size = {"network": "MLP" if quick else NETWORK, "repeats": 3 if quick else 40}
    return [Job(f"swag/snapshot/{NETWORK}", measure_snapshot, size, unit="steps of Adam", seconds=5)]


def measure_snapshot(network: str, repeats: int) -> Result:
    from lightning_bayes.posterior.moments import WeightMoments

    net = NETWORKS[network].fresh()
    adam, moments = torch.optim.Adam(net.parameters(), lr=1e-4), WeightMoments()
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    adam.step()
    moments.add(net)
    result = side_by_side(lambda: partial(moments.add, net), adam.step, repeats)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    kept = sum(t.numel() * t.element_size() for part in (moments.mean, moments.squares) for t in part.values())
    return replace(result, extra={"vectors kept": kept / weights})
