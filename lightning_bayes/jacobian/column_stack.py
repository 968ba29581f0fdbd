"""One backward pass for several columns, through convolutions.

PyTorch's batched backward pass (`is_grads_batched`) calls a convolution and a batch norm once for each column. Here the
columns `[K, B, ...]` pass through the autograd graph as one tensor of shape `[B, ...]`, a `ColumnStack`. Each operation
of the backward pass then takes all columns:

- an elementwise operation broadcasts over them;
- a batch norm in evaluation mode multiplies by one factor per channel;
- a convolution of few pixels takes `K·B` examples at once, so that it prepares its weights once instead of `K` times.
  If its output has one pixel, it is a matrix product with the part of the weights that does not see padding;
- any other operation takes one column at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.network.private import is_mutable, plain_functions, pytree, wrapper_of

FEW_PIXELS = 16  # with more, the gradients of a single column fit better into the cache
_ATEN = torch.ops.aten
_ELEMENTWISE = {
    *(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.neg.default),
    *(_ATEN.threshold_backward.default, _ATEN.leaky_relu_backward.default, _ATEN.elu_backward.default),
    *(_ATEN.hardtanh_backward.default, _ATEN.hardswish_backward.default, _ATEN.hardsigmoid_backward.default),
    *(_ATEN.sigmoid_backward.default, _ATEN.tanh_backward.default, _ATEN.softplus_backward.default),
    *(_ATEN.gelu_backward.default, _ATEN.silu_backward.default, _ATEN.mish_backward.default),
}


class ColumnStack(Tensor):
    """`columns` `[K, *shape]` as one tensor of this shape."""

    columns: Tensor
    __torch_function__ = plain_functions  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, columns: Tensor) -> ColumnStack:
        stack = wrapper_of(cls, columns[0])
        stack.columns = columns
        return stack

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _elementwise if func in _ELEMENTWISE else _RULES.get(func)
        result = None if rule is None else rule(func, *args, **kwargs)
        return _one_by_one(func, args, kwargs) if result is None else result


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    # In place, the columns would overwrite a tensor that they share; `as_strided` refers to the storage of all columns.
    if is_mutable(func) or func is _ATEN.as_strided.default:
        raise RuntimeError(f"{func} has no rule for several columns")
    leaves, structure = pytree.tree_flatten((args, kwargs))
    K = next(len(leaf.columns) for leaf in leaves if isinstance(leaf, ColumnStack))
    parts = []
    for k in range(K):
        own = [leaf.columns[k] if isinstance(leaf, ColumnStack) else leaf for leaf in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(own, structure)
        results, form = pytree.tree_flatten(func(*own_args, **own_kwargs))
        parts.append(results)
    return pytree.tree_unflatten([_stacked(func, of_result) for of_result in zip(*parts, strict=True)], form)


def _stacked(func: Any, parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    if not isinstance(parts[0], Tensor):
        raise RuntimeError(f"{func} has no rule for several columns")
    return ColumnStack(torch.stack(list(parts)))


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> ColumnStack | None:
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    n = {t.ndim for t in tensors if isinstance(t, ColumnStack)}
    if len(n) > 1 or any(t.ndim > max(n) for t in tensors):
        return None  # the first dimension would not be that of the columns
    args = tuple(arg.columns if isinstance(arg, ColumnStack) else arg for arg in args)
    kwargs = {name: arg.columns if isinstance(arg, ColumnStack) else arg for name, arg in kwargs.items()}
    return ColumnStack(func(*args, **kwargs))


def _batch_norm(func: Any, g: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> Any:
    _, variance, _, _, is_training, eps, wanted = rest
    if is_training or any(wanted[1:]) or not isinstance(g, ColumnStack) or variance is None:
        return None
    factor = (variance + eps).rsqrt()
    factor = factor if weight is None else factor * weight
    if factor.dtype != g.columns.dtype:
        return None
    return ColumnStack(g.columns * factor.reshape(-1, *[1] * (x.ndim - 2))), None, None


def _convolution(func: Any, g: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    _, _, padding, dilation, transposed, _, groups, wanted = rest
    if any(wanted[1:]) or not isinstance(g, ColumnStack) or isinstance(x, ColumnStack):
        return None

    def of_input(g: Tensor, x: Tensor) -> Tensor:
        return func(g, x, weight, *rest)[0]

    columns, shape = g.columns, x.shape
    K, sizes, pixels = len(columns), shape[2:], columns.shape[3:].numel()
    # Whether the kernel of a single output pixel covers all pixels of the input.
    inside = all(p + n <= k for p, n, k in zip(padding, sizes, weight.shape[2:], strict=True))
    if pixels == 1 and inside and not transposed and groups == 1 and max(dilation) == 1:
        seen: Any = (..., *(slice(p, p + n) for p, n in zip(padding, sizes, strict=True)))
        kernel = weight[seen]
        return ColumnStack((columns.flatten(2).flatten(0, 1) @ kernel.flatten(1)).reshape(K, *shape)), None, None
    if sizes.numel() > FEW_PIXELS:
        result = columns.new_empty(K, *shape)
        for k, column in enumerate(columns):
            result[k] = of_input(column, x)
        return ColumnStack(result), None, None
    only_sizes = x.new_empty(K * shape[0], *shape[1:])  # the gradient does not depend on the input
    return ColumnStack(of_input(columns.flatten(0, 1), only_sizes).reshape(K, *shape)), None, None


_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN.native_batch_norm_backward.default: _batch_norm,
    _ATEN.convolution_backward.default: _convolution,
}
