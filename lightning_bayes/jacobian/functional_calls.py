"""Functional calls as layers: `F.conv2d(x, W, b, stride=2)` is a `Convolution`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.jacobian import layers
from lightning_bayes.jacobian.layers import Layer

_LINEAR = ("input", "weight", "bias")
_CONV = (*_LINEAR, "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_LINEAR, "stride", "padding", "output_padding", "groups", "dilation")
_BUILTINS = {  # functions without a Python signature
    "linear": _LINEAR,
    **{f"conv{n}d": _CONV for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)},
}
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
_PYTHON = ("embedding", "embedding_bag", "batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")
_OPERANDS = {"matmul": ("input", "other"), "mm": ("input", "mat2"), "addmm": ("input", "mat1", "mat2")}
_SUMS = ("add", "add_")
_SCALES = ("mul",)
_NAMES = {
    **{getattr(F, name): name for name in (*_BUILTINS, *_PYTHON) if hasattr(F, name)},
    **{
        getattr(own, name): name
        for own in (torch, Tensor)
        for name in (*_OPERANDS, *_SUMS, *_SCALES)
        if hasattr(own, name)
    },
}
CONVOLUTIONS = frozenset(_BUILTINS) - {"linear"}


def layer_of(func: Any, args: Any, kwargs: Any) -> Layer | None:
    """The layer that a call computes, or None if it has no rule."""
    arguments = layer_arguments(func, args, kwargs)
    return None if arguments is None else make_layer(func, arguments)


def layer_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """All arguments of a layer's function by name, or None for another function."""
    name = _NAMES.get(func)
    if name is None:
        return None
    if name in _OPERANDS:
        return _product_arguments({**dict(zip(_OPERANDS[name], args, strict=False)), **kwargs})
    if name in (*_SUMS, *_SCALES):
        return _vector_arguments(name in _SUMS, *args, **kwargs)
    if name in _BUILTINS:
        return {**_DEFAULTS, **dict(zip(_BUILTINS[name], args, strict=False)), **kwargs}
    return bind(func, args, kwargs).arguments


def bind(func: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def make_layer(func: Any, arguments: dict[str, Any], keep_graph: bool = False) -> Layer | None:
    """The layer, or None if the call has options that change its gradients. Its input is detached unless `keep_graph`
    is set."""
    name, x = _NAMES[func], arguments["input"]
    x = x if keep_graph else x.detach()
    if name in _SUMS:
        return layers.Bias(len(x))
    if name in _SCALES:
        return layers.FeatureNorm(lambda: x, (x.shape[-1],))
    if name in ("layer_norm", "rms_norm"):
        return layers.FeatureNorm(_without_affine(func, arguments, keep_graph), tuple(arguments["normalized_shape"]))
    if name.endswith("norm"):
        return layers.ChannelNorm(_without_affine(func, arguments, keep_graph), (x.shape[1],))
    weight: Tensor = arguments["weight"]
    if name in CONVOLUTIONS:
        return _convolution(x, tuple(weight.shape), arguments, name.startswith("conv_transpose"))
    if weight.ndim != 2:
        return None
    shape = (weight.shape[0], weight.shape[1])
    if name in _OPERANDS:
        return layers.MatrixProduct(x, shape)
    if name == "linear":
        return layers.LinearLayer(x, shape)
    if arguments["max_norm"] is not None or arguments["scale_grad_by_freq"] or arguments["sparse"]:
        return None
    padding_idx = arguments["padding_idx"]
    padding_idx = None if padding_idx is None else padding_idx % shape[0]
    if name == "embedding":
        return layers.Embedding(x, shape, padding_idx, weight.dtype)
    words = _bags_of_words(x, weight, arguments, padding_idx)
    return None if words is None else layers.EmbeddingBag(words if keep_graph else words.detach(), shape)


def as_tuple(value: Any, n: int) -> tuple[int, ...]:
    """An option with one number per dimension, or one for all `n`."""
    values = (value,) * n if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _bags_of_words(x: Tensor, weight: Tensor, arguments: dict[str, Any], padding_idx: int | None) -> Tensor | None:
    """The weight of each word in each bag.  # [B, V]"""
    if arguments["mode"] not in ("sum", "mean"):
        return None
    each, V = arguments["per_sample_weights"], len(weight)
    each = torch.ones_like(x, dtype=weight.dtype) if each is None else each
    if x.ndim == 2:
        B, bag = len(x), torch.arange(len(x), device=x.device).unsqueeze(1).expand_as(x)
    else:
        offsets = arguments["offsets"][:-1] if arguments["include_last_offset"] else arguments["offsets"]
        B, bag = len(offsets), torch.bucketize(torch.arange(len(x), device=x.device), offsets, right=True) - 1
    if padding_idx is not None:
        each = each * (x != padding_idx)
    words = torch.zeros(B * V, dtype=weight.dtype, device=x.device)
    words = words.index_add(0, (bag * V + x).flatten(), each.flatten()).view(B, V)
    return words / words.sum(1, keepdim=True).clamp_min(1) if arguments["mode"] == "mean" else words


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _product_arguments(given: dict[str, Any]) -> dict[str, Any] | None:
    """`x @ W`; what `addmm` adds to it is a bias if it is a vector."""
    if given.get("alpha", 1) != 1:
        return None
    if "mat1" not in given:
        x, W, b = given.get("input"), given.get("other", given.get("mat2")), None
    else:
        x, W, b = given["mat1"], given.get("mat2"), given.get("input")
    if not isinstance(x, Tensor) or not isinstance(W, Tensor):
        return None
    is_bias = isinstance(b, Tensor) and b.shape == W.shape[1:] and given.get("beta", 1) == 1
    return {"input": x, "weight": W, "bias": b if is_bias else None}


def _vector_arguments(is_sum: bool, input: Any, other: Any, alpha: float = 1, **_: Any) -> dict[str, Any] | None:
    """A sum `z + b` or a product `w * x`, in either order, with a vector along the last dimension: a bias, or the scale
    of a hand-written norm. A bias needs no input, so `z` is not kept."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor) or alpha != 1:
        return None
    x, vector = (other, input) if input.ndim == 1 else (input, other)
    if vector.ndim != 1 or x.ndim < 2 or x.shape[-1] != len(vector):
        return None
    return {"input": vector if is_sum else x, "weight": None if is_sum else vector, "bias": vector if is_sum else None}


def _without_affine(func: Any, arguments: dict[str, Any], keep_graph: bool) -> Callable[[], Tensor]:
    """The norm without scale and shift, to be run when its output is needed."""
    plain = {name: value for name, value in arguments.items() if name not in ("weight", "bias")}

    def normalised() -> Tensor:
        with torch.set_grad_enabled(keep_graph):
            return func(**plain)

    return normalised


def _convolution(x: Tensor, shape: tuple[int, ...], arguments: dict[str, Any], transposed: bool) -> Layer | None:
    n = len(shape) - 2
    if x.ndim != n + 2:  # one example without a batch dimension
        return None
    stride, dilation = (as_tuple(arguments[option], n) for option in ("stride", "dilation"))
    padding, groups = arguments["padding"], arguments["groups"]
    if transposed:
        output_padding = as_tuple(arguments["output_padding"], n)
        return layers.TransposedConvolution(x, shape, stride, dilation, groups, as_tuple(padding, n), output_padding)
    return layers.Convolution(x, shape, stride, dilation, groups, _around(padding, shape[2:], dilation))


def _around(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The padding before and after each dimension; "same" puts the odd zero after."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((r // 2, r - r // 2) for r in reach)
    return tuple((p, p) for p in as_tuple(padding, len(kernel)))
