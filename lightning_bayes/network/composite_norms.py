"""Normalisations made of elementary operators, for graphs that are differentiated once more than usual.

The backward pass of PyTorch's layer norm keeps the mean and the standard deviation as numbers. So does its forward
mode. The derivative of either is right only where a formula was written for it: the second one is, unless `vmap` took
the first; the gradient of a Jacobian product and the third one are not (PyTorch 2.15), and there is no error. Batch
norm by the statistics of the batch, of which instance norm is made, is the same. The elementary operators below have
right derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CompositeNorms(TorchFunctionMode):
    """While it lasts, `torch.nn.functional` has norms that can be differentiated any number of times."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        composite = _COMPOSITES.get(func)
        result = NotImplemented if composite is None else composite(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    if input.shape[-len(normalized_shape) :] != tuple(normalized_shape):
        return NotImplemented  # an error of PyTorch's own
    return _normalised(input, range(-len(normalized_shape), 0), weight, bias, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats or running_mean is not None or input[0, 0].numel() < 2:
        return NotImplemented  # constants, numbers to update, or an error of PyTorch's own
    return _normalised(input, range(2, input.ndim), _by_channel(weight, input), _by_channel(bias, input), eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or running_mean is not None or input[:, 0].numel() < 2:
        return NotImplemented
    dims = [dim for dim in range(input.ndim) if dim != 1]
    return _normalised(input, dims, _by_channel(weight, input), _by_channel(bias, input), eps)


_COMPOSITES: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
}


def _normalised(x: Tensor, dims: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Half precision is too coarse for the moments, as it is in PyTorch's own."""
    dims = tuple(dims)
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    z = z - z.mean(dims, keepdim=True)
    z = z * (z.square().mean(dims, keepdim=True) + eps).rsqrt()
    z = z if weight is None else z * weight
    return (z if bias is None else z + bias).to(x.dtype)


def _by_channel(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.view(-1, *[1] * (x.ndim - 2))  # [C, 1, …]
