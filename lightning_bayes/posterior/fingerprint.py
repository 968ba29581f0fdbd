"""The fingerprint of a network's weights and buffers, by which a posterior knows the ones that it was fitted to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_CACHED = 2**16  # numbers in float64, half a megabyte


def fingerprint(network: nn.Module) -> Tensor:
    """Two sums over every floating-point weight and buffer `T`, in float64: `rᵀTc` with scattered numbers `r` and `c`,
    because hidden units, inputs or single weights may have changed places, and the sum of squares.  # [n, 2]"""
    return _sums(_state(network))


def has_weights(network: nn.Module, then: Tensor, own: Sequence[Tensor], mean: Tensor) -> bool:
    """Whether the network has the weights with the fingerprint `then`. Where its `own` ones are the `mean` itself,
    number by number, which costs less than their sums, the others alone are summed. All are looked at each time:
    PyTorch's version counters do not see what is written through `.data` or through memory shared with numpy."""
    state = _state(network)
    if len(state) != len(then):
        return False
    known = {id(t) for t in own} if own and _is_flat(own, mean) else set()
    rows = [i for i, t in enumerate(state) if id(t) not in known]
    return not rows or same_weights(_sums([state[i] for i in rows]), then[rows])


def same_weights(now: Tensor, then: Tensor) -> bool:
    """Whether two fingerprints are those of the same weights, up to rounding. Of those of older versions, `[n, 3]`, the
    squares alone, which stand in the same column, can be compared."""
    if len(now) != len(then):
        return False
    squares = then[:, 1]
    moved = now.shape[1] == then.shape[1] == 2 and ((now - then)[:, 0].abs() > 1e-6 * squares.sqrt() + 1e-12).any()
    return not moved and torch.allclose(now[:, 1], squares, rtol=1e-6, atol=1e-12)


def _state(network: nn.Module) -> list[Tensor]:
    return [t for t in [*network.parameters(), *network.buffers()] if t.is_floating_point() and t.numel()]


def _is_flat(tensors: Sequence[Tensor], flat: Tensor) -> bool:
    """Whether these tensors, one after the other, are a vector."""
    sizes = [t.numel() for t in tensors]
    if sum(sizes) != len(flat) or any(t.device != flat.device for t in tensors):
        return False
    pairs = list(zip((t.detach().reshape(-1) for t in tensors), flat.detach().split(sizes), strict=True))
    if flat.device.type == "cpu" and all(t.dtype == flat.dtype for t in tensors):
        return all(torch.equal(t, part) for t, part in pairs)
    return bool(torch.stack([(t == part).all() for t, part in pairs]).all())


def _sums(tensors: Sequence[Tensor]) -> Tensor:
    """# [n, 2]"""
    state = [t.detach().reshape(len(t) if t.ndim else 1, -1) for t in tensors]
    r = _scattered(max(len(t) for t in state), 5**0.5, state[0].device)  # [rows]
    c = _scattered(max(t.shape[1] for t in state), 2**0.5, state[0].device)  # [columns]
    sums = []
    for t in state:
        rows, square = _row_sums(t, c[: t.shape[1]].to(t.device))
        sums.append(torch.stack((r[: len(t)].to(t.device) @ rows, square)))
    return torch.stack([pair.to(r.device) for pair in sums]).cpu()


def _scattered(n: int, step: float, device: torch.device) -> Tensor:
    """Numbers in ±[½, 1], no two of which are alike: from the fractions of the multiples of an irrational.  # [n]"""
    fraction = torch.arange(1, n + 1, dtype=torch.float64, device=device).mul_(step).remainder_(1).sub_(0.5)
    return fraction + 0.5 * fraction.sign()


def _row_sums(t: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """`Tc` and the sum of all squares, a few rows at a time, so that their float64 copies stay in the cache.
    # [rows, columns], [columns] -> [rows], []"""
    if t.numel() > _CACHED and len(t) > 1:
        parts = [_row_sums(part, c) for part in t.split(max(1, _CACHED // t.shape[1]))]
        return torch.cat([rows for rows, _ in parts]), torch.stack([square for _, square in parts]).sum()
    wide = t.double()
    flat = wide.reshape(-1)
    return wide @ c, flat @ flat
