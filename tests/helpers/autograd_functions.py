"""Custom autograd functions, which torch cannot transform in every way."""

from typing import Any

import torch
from torch import Tensor


class Numpy(torch.autograd.Function):
    """Neither a batching rule nor forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.numpy() * 2)


class Cubed(torch.autograd.Function):
    """No forward mode, but a backward pass that autograd can follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g
