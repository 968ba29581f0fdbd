"""Prior precisions: one number, one per layer, or one per parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import Subset
from lightning_bayes.curvature.subset import layer_of


class PriorError(ValueError):
    """A prior precision of the wrong size or sign."""


def as_precision(prior: float | Tensor | list[float] | tuple[float, ...], subset: Subset, like: Tensor) -> Tensor:
    """A checked tensor: a scalar, `[layers]` or `[P]`, in the dtype and on the device of `like`."""
    try:
        precision = torch.as_tensor(prior, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError):
        raise PriorError(f"a prior precision must be a number or a vector of numbers, got {prior!r}") from None
    precision = precision.reshape(()) if precision.numel() == 1 else precision
    if precision.shape not in ((), (len(subset.layers),), (subset.size,)):
        raise PriorError(
            f"a prior precision of shape {tuple(precision.shape)} is neither a number, one for each of the "
            f"{len(subset.layers)} layers ({', '.join(subset.layers[:4])}{', …' if len(subset.layers) > 4 else ''}), "
            f"nor one for each of the {subset.size} parameters"
        )
    least, most = precision.detach().aminmax()
    if not (least > 0 and most < math.inf):  # nor NaN
        raise PriorError(f"a prior precision must be positive and finite, got {least.item():g}")
    return precision


def per_parameter(precision: Tensor, subset: Subset) -> Tensor:
    """`δ` of each parameter; a scalar stays a scalar.  # [] or [P]"""
    if precision.ndim == 0 or precision.shape == (subset.size,):
        return precision
    return precision[subset.layer_index.to(precision.device)]


def per_layer_sums(values: Tensor, subset: Subset) -> Tensor:
    """# [P] -> [layers]"""
    sums = values.new_zeros(len(subset.layers))
    if subset.mask is not None:
        return sums.index_add_(0, subset.layer_index.to(values.device), values)
    parts = values.split([shape.numel() for shape in subset.shapes])
    owners = [subset.layers.index(layer_of(name)) for name in subset.names]
    return sums.index_add_(0, torch.tensor(owners, device=sums.device), torch.stack([part.sum() for part in parts]))


def plain(precision: Tensor) -> Any:
    """A number or a list of numbers, for messages and logs."""
    return precision.tolist()
