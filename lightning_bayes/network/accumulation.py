"""Float64 sums and decompositions: on the device, or on the host if the device lacks float64 (Apple's MPS)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def float64_device(device: torch.device) -> torch.device:
    """`device` if it supports float64, else the CPU."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def in_float64(t: Tensor) -> Tensor:
    """`t` in float64. If its device lacks float64, `t` is copied to the host before the cast."""
    return t.to(float64_device(t.device)).double()


def widest(t: Tensor) -> Tensor:
    """`t` in float64, or in float32 if its device lacks float64: a training step must not wait for a copy to the
    host."""
    return t.double() if float64_device(t.device) == t.device else t.float()


def cast_like(t: Tensor, like: Tensor) -> Tensor:
    """`t.to(like)` in an order that never creates float64 on a device without it, in the backward pass either."""
    if like.dtype == torch.float64:
        return t.to(like.device).to(like.dtype)
    return t.to(like.dtype).to(like.device)


def number_like(number: Any, like: Tensor) -> Tensor:
    """A number or tensor as a tensor with the dtype and device of `like`."""
    if isinstance(number, Tensor):
        return cast_like(number, like)
    return torch.as_tensor(number, dtype=like.dtype, device=like.device)


def running_sum(t: Tensor, dim: int) -> Tensor:
    """`t.cumsum(dim)`. CUDA has no deterministic kernel, so the host computes it if
    `torch.use_deterministic_algorithms` is on."""
    if torch.are_deterministic_algorithms_enabled() and t.device.type != "cpu":
        return t.cpu().cumsum(dim).to(t.device)
    return t.cumsum(dim)
