"""Outputs of a posterior's network at the mean, and of the network linearised there.

For a shift `v` of the weights the linearised network is `f(x) + J(x) v` (GLM paper, eq. (10)). It is computed without
forming the Jacobian (see `jacobian.products`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bayes.jacobian.products import Jacobian
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.input_graph import double_backward_guard
from lightning_bayes.network.processes import reshard

if TYPE_CHECKING:
    from lightning_bayes.posterior.gaussian import GaussianPosterior


def outputs(posterior: GaussianPosterior, x: Any, differentiable: bool = False) -> Tensor:
    """`f(x)` at the mean."""
    with at_mean(posterior, x, differentiable) as x:
        return inputs.call(posterior.network, x)


def linearised_outputs(posterior: GaussianPosterior, x: Any, shift: Tensor, differentiable: bool = False) -> Tensor:
    """`f(x) + J(x) v` for a shift `v` of the weights.  # [P] -> [B, ...]"""
    with at_mean(posterior, x, differentiable) as x:
        jacobian = Jacobian(posterior.network, posterior.subset, x, differentiable=differentiable)
        return jacobian.linearised(shift).to(posterior.mean)


@contextmanager
def at_mean(posterior: GaussianPosterior, x: Any, differentiable: bool = False) -> Iterator[Any]:
    """Borrow the network and yield `x` on its device. With `differentiable` the graph leads to `x` only."""
    posterior.check_weights()
    x = inputs.contained(posterior.network, x)
    inputs.batch_size(x)  # raises if x holds no tensor
    with (
        torch.inference_mode(False),
        borrowed(posterior.network, ()),
        double_backward_guard(differentiable),
        torch.set_grad_enabled(differentiable),
    ):
        yield inputs.to_device(x, posterior.device)


def unflatten(posterior: GaussianPosterior, flat: Tensor) -> dict[str, Tensor]:
    """Split vectors over the subset into one tensor per parameter (or this process's shard of it), with zeros outside a
    subnetwork.  # [..., P] -> {name: [..., the parameter's shape]}"""
    reshard(posterior.network)
    return posterior.subset.unflatten(flat, posterior.subset.parameters(posterior.network))
