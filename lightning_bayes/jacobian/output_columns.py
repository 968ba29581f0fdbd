"""The curvature of the outputs as columns to back-propagate: `Λₙ = Σ_k r_k r_kᵀ`.

| curvature          | columns of example n                                         |
|--------------------|--------------------------------------------------------------|
| `ggn`              | a root of the output Fisher, exact                           |
| `fisher_mc`        | `∂ log p(ỹ | f) / ∂f / √S` for `S` labels `ỹ` from the model |
| `empirical_fisher` | `∂ log p(yₙ | f) / ∂f` for the example's own label           |

The positions of a dense output are independent given `f`, so the exact form needs a backward pass for each class of
each position. There `auto` means `fisher_mc`, which needs one pass, unless the outputs are few; elsewhere it means
`ggn`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.processes import uniforms

logger = logging.getLogger("lightning_bayes")

CURVATURES = ("auto", "ggn", "fisher_mc", "empirical_fisher")
FEW = 64  # outputs of an example with several positions up to which "auto" is exact
SLOW = 1000  # outputs of such an example from which exact columns are worth a warning


def choose_curvature(curvature: str, likelihood: Likelihood, shape: torch.Size, trial: bool = False) -> str:
    """The curvature that "auto" means for outputs of this shape. A `trial` does not wait for the exact columns of an
    image. Coupled outputs have one column per measurement, so they count as few."""
    dense, outputs = len(shape) > 2 and shape[2:].numel() > 1, shape[1:].numel()
    dense = dense and not likelihood.couples_outputs
    if curvature == "auto" and dense and outputs > FEW:
        logger.info("%d outputs per example: the curvature is 'fisher_mc', with one backward pass per batch", outputs)
        return "fisher_mc"
    if curvature == "ggn" and dense and outputs > SLOW:
        logger.warning(
            "curvature='ggn' needs about %d backward passes per batch, one for each output of an example: use "
            "curvature='fisher_mc', which needs one, or structure='diag' with hessian='approx'",
            outputs,
        )
        return "fisher_mc" if trial else "ggn"
    return "ggn" if curvature == "auto" else curvature


def output_columns(
    likelihood: Likelihood,
    curvature: str,
    f: Tensor,
    y: Tensor,
    size: int,
    examples: Tensor,
    samples: int,
    seed: int,
) -> Iterator[Tensor]:
    """Columns for the whole batch, at most `size` at a time.  # [k, *f.shape]"""
    if curvature == "ggn" and likelihood.has_diagonal_fisher:
        # One output per column, `√d`: the whole root would have the square of an image's size.
        root = likelihood.fisher_diagonal(f, y).sqrt().reshape(1, len(f), 1, -1)
        return (columns.reshape(-1, *f.shape) for columns in root_columns(root, size))
    if curvature == "ggn":
        return root_columns(likelihood.fisher_root(f, y), size, likelihood.couples_outputs)
    if curvature == "empirical_fisher":
        return iter([likelihood.residual(f, y).unsqueeze(0)])
    wide = torch.promote_types(f.dtype, torch.float32)

    def column(draw: int) -> Tensor:
        label = likelihood.sample(f, uniforms(seed, draw, examples, likelihood.noise_shape(f), wide), y)
        return likelihood.residual(f, label) / samples**0.5

    chunks = (range(start, min(start + size, samples)) for start in range(0, samples, size))
    return (torch.stack([column(draw) for draw in chunk]) for chunk in chunks)


def root_columns(S: Tensor, size: int, coupled: bool = False) -> Iterator[Tensor]:
    """The columns of a `fisher_root`. For a dense output each column is nonzero at one position, unless outputs are
    coupled."""
    if S.ndim <= 3 or coupled:
        yield from S.split(size)
        return
    flat = S.flatten(3)  # [K, B, C, R]
    K, _, _, R = flat.shape
    for ids in torch.arange(K * R, device=S.device).split(size):
        columns = flat.new_zeros(len(ids), *flat.shape[1:])
        columns[torch.arange(len(ids), device="cpu"), :, :, ids % R] = flat[ids // R, :, :, ids % R]
        yield columns.reshape(len(ids), *S.shape[1:])
