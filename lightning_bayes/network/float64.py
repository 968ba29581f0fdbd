"""Float64 sums and eigendecompositions: on the device, or on the host if the device lacks float64 (Apple's MPS).

An eigenvalue from a float32 decomposition is off by about `eps · λ_max`. If one input of a layer is much larger than
the others, that error exceeds everything the other inputs contribute, although the matrix itself still contains their
contribution. `eigh` therefore decomposes in float64. On one thread this takes 2.0, 1.9 and 1.9 times as long as float32
for 256, 785 and 1,153 columns (7, 98 and 296 ms) and 3.0 times as long for 2,305 (2.9 s), so wide matrices stay in
float32 if that loses little.

A factor of a Kronecker product `G ⊗ A` may stay in float32 if the error in the product, `eps · ‖A‖ ‖G‖`, is far below
any prior precision that is added to the product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.network.messages import warn

NARROW = 256  # maximum number of columns for which a float64 decomposition is fast
WIDE, VERY_WIDE = 700, 1200  # numbers of columns from which a float64 decomposition is slow, and very slow
NEGLIGIBLE = 0.01  # an error in the curvature that matters little beside a prior precision of about 1 or more


@cache
def float64_device(device: torch.device) -> torch.device:
    """`device` if it supports float64, else the CPU."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def in_float64(t: Tensor) -> Tensor:
    """`t` in float64. If its device lacks float64, `t` is copied to the host before the cast."""
    return t.to(float64_device(t.device)).double()


def widest(t: Tensor) -> Tensor:
    """`t` in float64, or in float32 if its device lacks float64: a training step must not wait for a copy to the
    host."""
    return t.double() if float64_device(t.device) == t.device else t.float()


def cast_like(t: Tensor, like: Tensor) -> Tensor:
    """`t.to(like)`. The order of cast and move never creates a float64 tensor on a device without float64, not even in
    the backward pass."""
    if like.dtype == torch.float64:
        return t.to(like.device).to(like.dtype)
    return t.to(like.dtype).to(like.device)


def number_like(number: Any, like: Tensor) -> Tensor:
    """A number or tensor as a tensor with the dtype and device of `like`."""
    if isinstance(number, Tensor):
        return cast_like(number, like)
    return torch.as_tensor(number, dtype=like.dtype, device=like.device)


def running_sum(t: Tensor, dim: int) -> Tensor:
    """`t.cumsum(dim)`. CUDA has no deterministic kernel, so the host computes it if
    `torch.use_deterministic_algorithms` is on."""
    if torch.are_deterministic_algorithms_enabled() and t.device.type != "cpu":
        return t.cpu().cumsum(dim).to(t.device)
    return t.cumsum(dim)


def eigh(
    matrix: Tensor, name: str = "a matrix", allow_float32: bool = True, multiplier: float | None = None
) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of PSD matrices `[..., d, d]`: values in float64 and never negative, vectors in the
    matrix's dtype. `name` appears in a warning, `allow_float32` allows the fast path for wide matrices, and
    `multiplier`, if known, is the factor from an error of the matrix to an error of the curvature, such as the norm of
    the other Kronecker factor.

    LAPACK and cuSOLVER do not always converge. The fallbacks are a decomposition on the host, a singular value
    decomposition, and a decomposition with a slightly larger diagonal. If all of them fail, the diagonal replaces the
    matrix, with a warning.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    attempts = [_decompose_in_float64, _decompose_by_svd, _decompose_with_jitter]
    if matrix.device.type != "cpu":
        attempts.insert(1, _decompose_on_host)
    if allow_float32 and matrix.dtype != torch.float64 and _loses_little_in_float32(matrix, multiplier):
        attempts.insert(0, torch.linalg.eigh)
    for attempt in attempts:
        try:
            values, vectors = attempt(matrix)
        except RuntimeError:  # LinAlgError, or the plain RuntimeError of cuSOLVER
            continue
        if values.isfinite().all() and vectors.isfinite().all():
            break
    else:
        warn(
            "no eigendecomposition of %s with %d columns converged: its diagonal is used instead, which drops all "
            "correlations of this block",
            name,
            matrix.shape[-1],
            from_all=True,
        )
        values, vectors = diagonal, torch.eye(matrix.shape[-1], device=matrix.device).expand_as(matrix)
    error = torch.finfo(values.dtype).eps / torch.finfo(matrix.dtype).eps
    vectors = cast_like(vectors, matrix)
    values = in_float64(values).to(float64_device(matrix.device))
    return clear_rounding(values, vectors, diagonal, error), vectors


def clear_rounding(values: Tensor, vectors: Tensor, diagonal: Tensor, error: float = 0.0) -> Tensor:
    """Set eigenvalues of a PSD matrix `M` to zero if they are only rounding errors.

    Rounding changes an entry by about `eps √(M_ii M_jj)`. An eigenvalue with the vector `q` is therefore off by a small
    multiple of `eps · qᵀ diag(M) q`, plus the error of the decomposition, `error · eps · λ_max`. Relative to this
    scale, all errors in a null space have the same size, whatever the scales of the parameters. Half of these errors
    are negative, so the most negative eigenvalue shows their size. The positive errors must be removed: they would
    count as data once the factor `1/σ²` of the noise lifts them above the prior precision.
    # [..., d]
    """
    if not values.numel():
        return values
    scale = in_float64((vectors.square().mT @ diagonal.unsqueeze(-1)).squeeze(-1))  # qᵀ diag(M) q [..., d]
    scale = scale + error * values.amax(-1, keepdim=True)
    relative = values / scale.clamp(min=torch.finfo(scale.dtype).tiny)
    noise = 2 * (-relative).amax(-1, keepdim=True).clamp(min=2 * torch.finfo(diagonal.dtype).eps)
    return values.masked_fill(relative <= noise, 0.0)


def _decompose_in_float64(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(in_float64(matrix))


def _decompose_on_host(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(matrix.cpu().double())


def _decompose_by_svd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`M = U diag(s) Vᵀ`, where `U = V` up to signs in the null space; ascending, like `torch.linalg.eigh`."""
    U, s, _ = torch.linalg.svd(matrix.cpu().double())
    return s.flip(-1), U.flip(-1)


def _decompose_with_jitter(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a different small number to each diagonal entry, which separates equal eigenvalues."""
    matrix = matrix.cpu().double()
    d = matrix.shape[-1]
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)  # [..., 1]
    jitter = 1e-10 * mean * torch.arange(1, d + 1, dtype=torch.float64, device="cpu") / d
    values, vectors = torch.linalg.eigh(matrix + torch.diag_embed(jitter))
    return values - 1e-10 * mean, vectors


def _loses_little_in_float32(matrix: Tensor, multiplier: float | None) -> bool:
    d = matrix.shape[-1]
    if multiplier is not None and d > NARROW:
        error = torch.finfo(matrix.dtype).eps * torch.linalg.matrix_norm(matrix) * multiplier
        if bool((error <= NEGLIGIBLE).all()):
            return True
    return d > WIDE and not _is_badly_scaled(matrix) and (d > VERY_WIDE or not _has_dominant_directions(matrix))


def _is_badly_scaled(matrix: Tensor) -> bool:
    """Whether the rounding error of a number as large as the trace, which bounds the largest eigenvalue, exceeds a
    tenth of the smallest diagonal entry. Zero entries (dead units) are ignored."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)  # [..., d]
    smallest = diagonal.masked_fill(diagonal <= 0, torch.inf).amin(-1)
    return bool((torch.finfo(matrix.dtype).eps * diagonal.sum(-1) > 0.1 * smallest).any())


def _has_dominant_directions(matrix: Tensor) -> bool:
    """Whether the rounding errors of the largest eigenvalues exceed those of the entries, as for inputs with a large
    mean: `‖M‖ > 4 √d max(diag M)`."""
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)
    return bool((torch.linalg.matrix_norm(matrix) > 4 * matrix.shape[-1] ** 0.5 * largest).any())
