"""Outputs of a posterior's network at the mean, and of the network linearised there.

For a shift `v` of the weights the linearised network is `f(x) + J(x) v` (GLM paper, eq. (10)). It is computed without
forming the Jacobian (see `jacobian.products`).

`fingerprint` summarises a network's weights and buffers, so a posterior can check that they have not changed since the
fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bayes.jacobian.products import Jacobian
from lightning_bayes.network import Processes, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.float64 import float64_device, in_float64
from lightning_bayes.network.input_graph import double_backward_guard
from lightning_bayes.network.processes import distributed, local, reshard
from lightning_bayes.structures.sharded import ParameterShard

if TYPE_CHECKING:
    from lightning_bayes.posterior.gaussian import GaussianPosterior

_CACHED = 2**16  # float64 numbers converted at a time: half a megabyte


def fingerprint(network: nn.Module) -> Tensor:
    """Two sums over every floating-point weight and buffer `T`, in float64: the sum of squares, and `rᵀTc` with
    irregular `r` and `c`, which detects swapped hidden units, inputs or single weights.  # [n, 2]"""
    return _sums(_state(network))


def has_weights(network: nn.Module, then: Tensor, own: Sequence[Tensor], mean: Tensor) -> bool:
    """Whether the network has the weights with the fingerprint `then`. The posterior's `own` weights are compared with
    the `mean` directly, which is cheaper than computing their fingerprint. Every call reads all weights: PyTorch's
    version counters miss writes through `.data` or through memory shared with numpy."""
    state = _state(network)
    if len(state) != len(then):
        return False
    sharded = any(distributed(t) is not None for t in state)
    known = {id(t) for t in own} if own and not sharded and _is_flat(own, mean) else set()
    rows = [i for i, t in enumerate(state) if id(t) not in known]
    return not rows or same_weights(_sums([state[i] for i in rows]), then[rows])


def same_weights(now: Tensor, then: Tensor) -> bool:
    """Whether two fingerprints belong to the same weights, up to rounding."""
    if len(now) != len(then):
        return False
    squares = then[:, 1]
    moved = (now - then)[:, 0].abs() > 1e-6 * squares.sqrt() + 1e-12
    return not moved.any() and torch.allclose(now[:, 1], squares, rtol=1e-6, atol=1e-12)


def _state(network: nn.Module) -> list[Tensor]:
    network = inputs.whole_network(network)
    reshard(network)
    return [t for t in [*network.parameters(), *network.buffers()] if t.is_floating_point() and t.numel()]


def _is_flat(tensors: Sequence[Tensor], flat: Tensor) -> bool:
    """Whether the tensors, concatenated, equal a vector."""
    sizes = [t.numel() for t in tensors]
    if sum(sizes) != len(flat) or any(t.device != flat.device for t in tensors):
        return False
    pairs = list(zip((t.detach().reshape(-1) for t in tensors), flat.detach().split(sizes), strict=True))
    if flat.device.type == "cpu" and all(t.dtype == flat.dtype for t in tensors):
        return all(torch.equal(t, part) for t, part in pairs)
    return bool(torch.stack([(t == part).all() for t, part in pairs]).all())


def _sums(tensors: Sequence[Tensor]) -> Tensor:
    """# [n, 2]"""
    state = [t.detach() for t in tensors]
    shapes = [(len(t) if t.ndim else 1, t.shape[1:].numel()) for t in state]
    device = float64_device(state[0].device)
    r = _irregular(max(rows for rows, _ in shapes), 5**0.5, device)  # [rows]
    c = _irregular(max(columns for _, columns in shapes), 2**0.5, device)  # [columns]
    sums = []
    for t, (n_rows, n_columns) in zip(state, shapes, strict=True):
        if distributed(t) is not None:
            sums.append(_shard_sums(t, r, c))
            continue
        rows, square = _row_sums(t.reshape(n_rows, -1), c[:n_columns])
        sums.append(torch.stack((r[:n_rows].to(rows.device) @ rows, square)))
    pairs = torch.stack([pair.to(device) for pair in sums])
    if sharded := [i for i, t in enumerate(state) if distributed(t) is not None]:  # sum over all processes
        parts = pairs[sharded]
        Processes.current().sum_([parts])
        pairs[sharded] = parts
    return pairs.cpu()


def _shard_sums(t: Tensor, r: Tensor, c: Tensor) -> Tensor:
    """This process's part of the two sums over a sharded tensor.  # [2]"""
    shard, own = ParameterShard.of(t, 0), local(t)
    columns = torch.zeros(1, dtype=torch.long, device="cpu")
    for dim, indices in enumerate(shard.indices[1:], start=1):
        columns = (columns.unsqueeze(-1) + indices * shard.shape[dim + 1 :].numel()).flatten()
    rows = shard.indices[0]
    if not own.numel():
        return torch.zeros(2, dtype=torch.float64, device=r.device)
    sums, square = _row_sums(own.reshape(len(rows), -1), c[columns.to(c.device)])
    return torch.stack((r[rows.to(r.device)].to(sums) @ sums, square)) / shard.copies


def _irregular(n: int, step: float, device: torch.device) -> Tensor:
    """Distinct numbers in ±[½, 1], from the fractional parts of multiples of an irrational number.  # [n]"""
    fraction = torch.arange(1, n + 1, dtype=torch.float64, device=device).mul_(step).remainder_(1).sub_(0.5)
    return fraction + 0.5 * fraction.sign()


def _row_sums(t: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """`Tc` and the sum of all squares, a few rows at a time to keep their float64 copies in the processor's cache.
    # [rows, columns], [columns] -> [rows], []"""
    if t.numel() > _CACHED and len(t) > 1:
        parts = [_row_sums(part, c) for part in t.split(max(1, _CACHED // t.shape[1]))]
        return torch.cat([rows for rows, _ in parts]), torch.stack([square for _, square in parts]).sum()
    wide = in_float64(t)
    flat = wide.reshape(-1)
    return wide @ c.to(wide), flat @ flat


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
    """Borrow the network and yield `x` on the posterior's device. With `differentiable`, gradients flow to `x` only."""
    posterior.check_weights()
    x = inputs.contained(posterior.network, x)
    inputs.batch_size(x)  # raises if x holds no tensor
    with (
        torch.inference_mode(False),
        borrowed(posterior.network, ()),
        double_backward_guard() if differentiable else nullcontext(),
        torch.set_grad_enabled(differentiable),
    ):
        yield inputs.to_device(x, posterior.device)


def unflatten(posterior: GaussianPosterior, flat: Tensor) -> dict[str, Tensor]:
    """Split vectors over the subset into one tensor per parameter (or this process's shard of it), with zeros outside a
    subnetwork.  # [..., P] -> {name: [..., the parameter's shape]}"""
    reshard(posterior.network)
    return posterior.subset.unflatten(flat, posterior.subset.parameters(posterior.network))
