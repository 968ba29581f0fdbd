"""Prior precisions: one number, one per layer, or one per parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihoods.outputs import vector
from lightning_bayes.network import Subset
from lightning_bayes.network.accumulation import number_like
from lightning_bayes.network.subset import layer_of


class PriorError(ValueError):
    """A prior precision of the wrong size or sign."""


def check_precision(prior: Any) -> None:
    """Refuse a prior precision that fits no network."""
    _check_values(vector("prior_precision", prior, PriorError))


def _check_values(precision: Tensor) -> None:
    least, most = precision.detach().aminmax()
    if not (least > 0 and most < math.inf):  # nor NaN
        bad = least if not least > 0 else most
        raise PriorError(f"prior_precision must be positive and finite, got {bad.item():g}")


def as_precision(prior: float | Tensor | Sequence[float], subset: Subset, like: Tensor) -> Tensor:
    """A checked tensor: a scalar, `[layers]` or `[P]`, in the dtype and on the device of `like`."""
    vector("prior_precision", prior, PriorError)
    precision = number_like(prior, like)
    _check_values(precision)
    precision = precision.reshape(()) if precision.numel() == 1 else precision
    if precision.shape not in ((), (len(subset.layers),), (subset.size,)):
        raise PriorError(
            f"a prior precision of shape {tuple(precision.shape)} is neither a number, one for each of the "
            f"{len(subset.layers)} layers ({', '.join(subset.layers[:4])}{', …' if len(subset.layers) > 4 else ''}), "
            f"nor one for each of the {subset.size} parameters"
        )
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
