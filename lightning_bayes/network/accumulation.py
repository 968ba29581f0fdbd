"""Where sums and decompositions in float64 are computed: on the device, or on the host if the device has no float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def float64_device(device: torch.device) -> torch.device:
    """The device itself if it has float64, else the CPU. Apple's MPS has none."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def in_float64(t: Tensor) -> Tensor:
    """`t` in float64; on the host if its device has no float64, where the copy must come before the cast."""
    return t.to(float64_device(t.device)).double()


def widest(t: Tensor) -> Tensor:
    """`t` in float64, or in float32 if its device has no float64: for a training step, which must not wait for a copy
    to the host."""
    return t.double() if float64_device(t.device) == t.device else t.float()


def cast_like(t: Tensor, like: Tensor) -> Tensor:
    """`t.to(like)`, which a device without float64 can follow both ways: the gradient goes back by the same steps."""
    if like.dtype == torch.float64:
        return t.to(like.device).to(like.dtype)
    return t.to(like.dtype).to(like.device)


def number_like(number: Any, like: Tensor) -> Tensor:
    """A number or tensor as a tensor in the dtype and on the device of `like`."""
    if isinstance(number, Tensor):
        return cast_like(number, like)
    return torch.as_tensor(number, dtype=like.dtype, device=like.device)


def running_sum(t: Tensor, dim: int) -> Tensor:
    """`t.cumsum(dim)`; on the host under `torch.use_deterministic_algorithms`, for which CUDA has no kernel."""
    if torch.are_deterministic_algorithms_enabled() and t.device.type != "cpu":
        return t.cpu().cumsum(dim).to(t.device)
    return t.cumsum(dim)
