"""The output's curvature as columns to back-propagate: `Λₙ = Σ_k r_k r_kᵀ`.

| curvature          | columns of example n                                         |
|--------------------|--------------------------------------------------------------|
| `ggn`              | a root of the output Fisher, exact                           |
| `fisher_mc`        | `∂ log p(ỹ | f) / ∂f / √S` for `S` labels `ỹ` from the model |
| `empirical_fisher` | `∂ log p(yₙ | f) / ∂f` for the example's own label           |

Positions of a dense output are independent given `f`, so the exact form has its columns at every position.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_bayes.curvature.noise import uniforms
from lightning_bayes.likelihoods import Likelihood

CURVATURES = ("ggn", "fisher_mc", "empirical_fisher")


def output_columns(
    likelihood: Likelihood, curvature: str, f: Tensor, y: Tensor, examples: Tensor, samples: int, seed: int
) -> Tensor:
    """Columns for the whole batch; those of a dense GGN share positions, see `chunks`.  # [K, *f.shape]"""
    if curvature == "ggn":
        return likelihood.fisher_root(f, y)
    if curvature == "empirical_fisher":
        return likelihood.residual(f, y).unsqueeze(0)
    wide = torch.promote_types(f.dtype, torch.float32)
    draws = [uniforms(seed, draw, examples, f.shape[1:], wide) for draw in range(samples)]
    labels = [likelihood.sample(f, uniform, y) for uniform in draws]
    return torch.stack([likelihood.residual(f, label) for label in labels]) / samples**0.5


def chunks(columns: Tensor, curvature: str, size: int) -> Iterator[Tensor]:
    """At most `size` columns at a time, each column of a dense GGN at one position alone.  # [k, *f.shape]"""
    if curvature != "ggn" or columns.ndim <= 3:
        yield from columns.split(size)
        return
    flat = columns.flatten(3)  # [K, B, C, R]
    K, _, _, R = flat.shape
    for start in range(0, K * R, size):
        ids = torch.arange(start, min(start + size, K * R), device=columns.device)
        alone = flat.new_zeros(len(ids), *flat.shape[1:])
        alone[torch.arange(len(ids)), :, :, ids % R] = flat[ids // R, :, :, ids % R]
        yield alone.reshape(len(ids), *columns.shape[1:])
