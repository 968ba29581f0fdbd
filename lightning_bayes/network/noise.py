"""Uniform random numbers that depend on an example, not on its batch.

Monte-Carlo labels must not depend on how the data are split into batches or over processes. A counter-based generator
(the SplitMix64 finaliser of Steele, Lea and Flood 2014) maps (seed, draw, example, output) directly to a number.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def uniforms(seed: int, draw: int, examples: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1), one for each output of each example.  # examples [B] -> [B, *shape]"""
    outputs = torch.arange(prod(shape), device=examples.device)
    key = _mix(_mix(examples.new_tensor(seed)) + draw)
    bits = _mix(_mix(key + examples.unsqueeze(-1)) + outputs)  # [B, C]
    return unit(bits, dtype).reshape(-1, *shape)


def hashed(bits: Tensor, seed: int = 0) -> Tensor:
    """A 64-bit hash of each row of integers.  # [B, n] -> [B]"""
    return _mix((bits * _odd_keys(bits.shape[1], seed, bits.device)).sum(1))


def as_bits(t: Tensor) -> Tensor:
    """Integers that identify the values; floats are cast to float32 and reinterpreted."""
    return ((t.float() + 0.0).view(torch.int32) if t.is_floating_point() else t).long()  # + 0.0 turns −0 into 0


def unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1). Float32 represents 23 bits plus one half exactly, and the half keeps an inverse CDF away from
    0 and 1."""
    return (_shift_right(bits, 41).to(dtype) + 0.5) / 2**23


@lru_cache(maxsize=64)
def _odd_keys(n: int, seed: int, device: torch.device) -> Tensor:
    return _mix(_mix(torch.tensor(seed, device=device)) + torch.arange(n, device=device)) | 1


def _mix(z: Tensor) -> Tensor:
    z = z + _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Unsigned shift; `>>` keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
