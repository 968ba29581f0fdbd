"""A loss whose gradient is known already.

What `training_step` returns is differentiated by Lightning, with the loss scale of mixed precision, accumulation and
the hooks of DDP. A gradient that was computed inside the step reaches the parameters by the same way: through a node of
the graph that has the value of the loss, and hands over the gradient times whatever comes from above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Gradients = dict[nn.Parameter, Tensor]


def hand_over(value: Tensor, gradients: Gradients) -> Tensor:
    """`value` with the given gradients; a parameter without one is not part of the graph.

    >>> w = nn.Parameter(torch.ones(2))
    >>> (3 * hand_over(torch.tensor(5.0), {w: torch.tensor([1.0, 2.0])})).backward()
    >>> w.grad
    tensor([3., 6.])
    """
    handed: Tensor = _Handed.apply(value.detach(), list(gradients.values()), *gradients)
    return handed


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(g * cotangent.to(g.dtype) for g in ctx.gradients))
