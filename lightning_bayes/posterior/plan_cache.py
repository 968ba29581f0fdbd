"""The plans of a network, one for each shape of its inputs, made when they are first asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_bayes.curvature.plan import Plan, make_plan
from lightning_bayes.network import Subset, inputs


class PlanCache:
    """Plans do not depend on the weights' values: posteriors of one network and subset may share a cache."""

    def __init__(self) -> None:
        self._plans: dict[tuple[torch.Size, ...], Plan] = {}

    def plan_for(self, network: nn.Module, subset: Subset, x: Any) -> Plan:
        """For inputs like `x`. Positions may be merged with the batch, so that each shape of input has its own plan."""
        shapes = tuple(leaf.shape[1:] for leaf in inputs.tensors(x))
        if shapes not in self._plans:
            self._plans[shapes] = make_plan(network, x, subset)
        return self._plans[shapes]
