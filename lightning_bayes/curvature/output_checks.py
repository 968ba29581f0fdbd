"""What must hold of a network and its outputs, and whether two ways to the same numbers agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network import CurvatureError, DataError, inputs

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of two ways to compute the same number; 16-bit: 0.1


def check_output(f: Any, size: int) -> None:
    if not isinstance(f, Tensor):
        raise CurvatureError(
            f"the network must return one tensor, but it returned {type(f).__name__}: name the entry that is f with "
            "output="
        )
    if f.ndim == 0 or f.shape[0] != size:
        raise CurvatureError(
            f"the network's output must have one row per example, but {size} examples gave an output of shape "
            f"{tuple(f.shape)}"
        )
    if not f.requires_grad:
        raise CurvatureError(
            "the network's output does not depend on any chosen parameter: is it computed under torch.no_grad(), or "
            "detached, or is the subset not used?"
        )


def check_finite(f: Tensor, x: Any, batch: int) -> None:
    if not f.isfinite().all():
        culprit = "its input has" if inputs.has_nonfinite(x) else "its weights or activations overflow: it has"
        raise DataError(f"batch {batch}: the network's output is not finite; {culprit} NaN or infinite values")


def check_examples_apart(network: nn.Module, f: Tensor, beside: Tensor) -> None:
    """The first examples must give what they give beside others."""
    apart = torch.linalg.vector_norm((f - beside[: len(f)]).detach())
    if apart > TOLERANCE.get(f.dtype, 0.1) * f.detach().norm() + 1e-30:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        modules = network.named_modules()
        norms = [name for name, norm in modules if isinstance(norm, kinds) and norm.running_mean is None]
        culprit = f"{', '.join(norms)}: batch norm without running statistics" if norms else "or is it random?"
        raise CurvatureError(
            f"the output of {type(network).__name__} for one example depends on another example of the batch "
            f"({culprit}); curvature needs examples that do not see each other"
        )


def agree(sums: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, bool]:
    """Whether two ways to a sum of gradients gave the same, up to rounding: that of each parameter's gradient, or, of a
    gradient that is zero up to rounding, that of the largest."""
    norms = {name: float(torch.linalg.vector_norm(g)) for name, g in true.items()}
    largest = max(norms.values(), default=0.0)
    close = {}
    for name, g in true.items():
        tolerance = TOLERANCE.get(g.dtype, 0.1) * norms[name] + 100 * torch.finfo(g.dtype).eps * largest + 1e-30
        close[name] = bool(torch.linalg.vector_norm(sums[name] - g) <= tolerance)
    return close


def random_numbers(*shape: int, like: Tensor) -> Tensor:
    """Normal, and the same in every call: for checks, which must not depend on a generator nor move one."""
    return torch.empty(shape, device="cpu").normal_(generator=torch.Generator().manual_seed(0)).to(like)
