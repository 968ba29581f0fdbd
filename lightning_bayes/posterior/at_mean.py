"""Outputs of a posterior's network at the mean, and of the network linearised there.

For a shift `v` of the weights the linearised network is `f(x) + J(x) v` (GLM paper, eq. (10)). It is computed without
forming the Jacobian (see `jacobian.linearised`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bayes.jacobian.linearised import Linearised
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.input_graph import kept_whole
from lightning_bayes.network.processes import local, reshard

if TYPE_CHECKING:
    from lightning_bayes.posterior.gaussian import GaussianPosterior


def outputs(posterior: GaussianPosterior, x: Any, differentiable: bool = False) -> Tensor:
    """`f(x)` at the mean."""
    with at_mean(posterior, x, differentiable) as x:
        return inputs.call(posterior.network, x)


def linearised_outputs(posterior: GaussianPosterior, x: Any, shift: Tensor, differentiable: bool = False) -> Tensor:
    """`f(x) + J(x) v` for a shift `v` of the weights.  # [P] -> [B, ...]"""
    with at_mean(posterior, x, differentiable) as x:
        network = Linearised(posterior.network, posterior.subset.parameters(posterior.network), x, differentiable)
        return network(unflatten(posterior, shift)).to(posterior.mean)


@contextmanager
def at_mean(posterior: GaussianPosterior, x: Any, differentiable: bool = False) -> Iterator[Any]:
    """Borrow the network and yield `x` on its device. With `differentiable` the graph leads to `x` only."""
    posterior.check_weights()
    x = inputs.contained(posterior.network, x)
    inputs.batch_size(x)  # raises if x holds no tensor
    with (
        torch.inference_mode(False),
        borrowed(posterior.network, ()),
        kept_whole(differentiable),
        torch.set_grad_enabled(differentiable),
    ):
        yield inputs.to_device(x, posterior.device)


def unflatten(posterior: GaussianPosterior, flat: Tensor) -> dict[str, Tensor]:
    """Split vectors over the subset into one tensor per parameter (or this process's shard of it), with zeros outside a
    subnetwork.  # [..., P] -> {name: [..., the parameter's shape]}"""
    reshard(posterior.network)
    subset, lead = posterior.subset, flat.shape[:-1]
    if subset.mask is not None:
        whole = flat.new_zeros(*lead, subset.full_size)
        whole[..., subset.mask.to(flat.device)] = flat
        flat = whole
    shards = {name: local(p) for name, p in subset.parameters(posterior.network).items()}
    parts = flat.split([shard.numel() for shard in shards.values()], dim=-1)
    named = zip(shards.items(), parts, strict=True)
    return {name: part.reshape(*lead, *t.shape).to(t.dtype) for (name, t), part in named}
