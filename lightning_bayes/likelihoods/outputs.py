"""The layouts of network outputs, and the operations on outputs that all likelihoods share.

A network's output `f` has one of the layouts

- `[B]`                   one output per example;
- `[B, C]`                `C` outputs (classes, labels, channels) per example;
- `[B, C, *positions]`    dense: `C` outputs at each position; targets at different positions are independent given
                          `f`.

A Gaussian over outputs is a mean `m` in one of these layouts, with variances of the same shape or, for `[B, C]` only,
covariances `Σ` `[B, C, C]`. Results are computed and returned in at least float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, format_value, instance


class LikelihoodError(ValueError):
    """Outputs, targets or settings do not fit the likelihood."""


class UnknownLikelihoodError(LikelihoodError):
    """No likelihood has the requested name."""


def widen(t: Tensor) -> Tensor:
    """`t` in at least float32, because float16 and bfloat16 are too coarse for sums and tails."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def sum_per_example(t: Tensor) -> Tensor:
    """The sum over all dimensions but the batch: `[B, …]` to `[B]`."""
    return t.flatten(1).sum(1) if t.ndim > 1 else t


def diagonal_root(d: Tensor) -> Tensor:
    """The columns `[C, B, C, …]` of the root `diag(d)` at each example and position; `[1, B]` for `d` of shape `[B]`.

    >>> diagonal_root(torch.tensor([[2.0, 3.0]]))
    tensor([[[2., 0.]],
    <BLANKLINE>
            [[0., 3.]]])
    """
    if d.ndim == 1:
        return d.unsqueeze(0)  # [1, B]
    C = d.shape[1]
    eye = torch.eye(C, dtype=d.dtype, device=d.device).view(C, 1, C, *[1] * (d.ndim - 2))
    return eye * d  # [C, B, C, *positions]


def standard_normal(uniform: Tensor) -> Tensor:
    """Standard normal draws by inverse CDF. `torch.rand` can return exactly 0, which must not become −∞."""
    eps = torch.finfo(uniform.dtype).eps
    return torch.special.ndtri(uniform.clamp(eps, 1 - eps))


def marginal_variance(mean: Tensor, covariance: Tensor) -> Tensor:
    """The variances, in the shape of `mean`, of a Gaussian given by its variances or by covariances `[B, C, C]`."""
    if covariance.shape == mean.shape:
        return _clamp_rounding(covariance)
    if mean.ndim == 2 and covariance.shape == (*mean.shape, mean.shape[1]):
        return _clamp_rounding(covariance.diagonal(dim1=1, dim2=2))  # [B, C]
    full = f" or covariances of shape {[*mean.shape, mean.shape[1]]}" if mean.ndim == 2 else ""
    raise LikelihoodError(
        f"an output mean of shape {list(mean.shape)} needs variances of the same shape{full}, "
        f"got shape {list(covariance.shape)}."
    )


def _clamp_rounding(variance: Tensor) -> Tensor:
    """Clamp variances, or eigenvalues of a covariance, that rounding made negative; larger negative values raise an
    error."""
    is_exported = torch.compiler.is_compiling()  # an exported program cannot read values
    if not is_exported and variance.numel() and bool(variance.amin() < -1e-3 * variance.abs().amax()):
        raise LikelihoodError(
            f"the covariance of the outputs must be positive semi-definite, but has a variance of "
            f"{variance.amin().item():.3g}; pass a covariance, not its negative or a precision."
        )
    return variance.clamp_min(0)


def draw_gaussian(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` draws from the Gaussian over outputs. All examples share the noise, so the draws of an example do not
    depend on its batch.  # [S, B, …]"""
    count("samples", samples, error=LikelihoodError)
    device = mean.device if generator is None else generator.device
    noise = torch.randn((samples, 1, *mean.shape[1:]), generator=generator, device=device, dtype=mean.dtype)
    return _at_noise(mean, covariance, noise.to(mean.device))


def gaussian_nodes(mean: Tensor, covariance: Tensor, samples: int) -> Tensor:
    """`samples` points of equal weight that represent the Gaussian over outputs. They are deterministic: the same
    standard normal points are shifted and scaled for each example and position.  # [S, B, …]"""
    outputs = mean.shape[1:2]  # empty, or C
    nodes = _standard_nodes(samples, outputs.numel()).to(mean.dtype).to(mean.device)
    return _at_noise(mean, covariance, nodes.view(samples, 1, *outputs, *[1] * (mean.ndim - 2)))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _standard_nodes(S: int, C: int) -> Tensor:
    """Standard normal Sobol points with mean zero and, if `S > C`, identity covariance: the variance of any linear
    function of the outputs is then exact.  # [S, C]"""
    engine = torch.quasirandom.SobolEngine(min(C, torch.quasirandom.SobolEngine.MAXDIM), scramble=True, seed=0)
    z = standard_normal(engine.draw(S, dtype=torch.float64))
    z = z[:, torch.arange(C, device="cpu") % engine.dimension]  # repeated beyond MAXDIM
    z = z - z.mean(0)
    if S <= C:
        return z
    return torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z / S), z.mT, upper=False).mT


def _at_noise(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """`m + L ε` with `LLᵀ = Σ`.  # noise [S, 1, …] -> [S, B, …]"""
    variance = marginal_variance(mean, covariance)
    if covariance.shape == mean.shape:
        return mean + variance.sqrt() * noise  # [S, B, …]
    return mean + torch.einsum("bij,sj->sbi", _triangular_root(covariance), noise.squeeze(1))  # [S, B, C]


def _triangular_root(covariance: Tensor) -> Tensor:
    """`L` with `LLᵀ = Σ`, independently for each example. A singular covariance, such as that of a common shift of all
    logits, gets the smallest jitter (relative to its largest variance) for which the decomposition succeeds. Without
    any variance `L` is zero and has no gradient.  # [B, C, C]"""
    C, eps = covariance.shape[-1], torch.finfo(covariance.dtype).eps
    eye = torch.eye(C, dtype=covariance.dtype, device=covariance.device)
    scale = covariance.detach().abs().amax((-2, -1), keepdim=True)  # [B, 1, 1]
    usable = (scale > 0) & scale.isfinite()
    unit = torch.where(usable, covariance / scale.where(usable, 1), eye)
    jitter = torch.full_like(scale, max(8 * eps, 1e-12))
    while True:
        L, info = torch.linalg.cholesky_ex(unit + jitter * eye)
        failed = info > 0  # [B]
        if not failed.any():
            return L * scale.sqrt()
        if jitter.amax() > 1e-3 * C:  # a jitter larger than rounding errors: the covariance may be wrong
            _clamp_rounding(torch.linalg.eigvalsh(covariance[failed]))
        jitter = torch.where(failed[:, None, None], 10 * jitter, jitter)


def vector(name: str, value: Any, error: type[Exception]) -> Tensor:
    """A real number, or a vector of real numbers, as a tensor."""
    try:
        if isinstance(value, bool):
            raise TypeError
        numbers = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise error(f"{name} must be a number or a vector of numbers, got {format_value(value)}") from None
    if numbers.ndim > 1 or not numbers.numel() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise error(f"{name} must be a number or a vector of numbers, got {format_value(value)}")
    return numbers


def check_generator(generator: Any) -> None:
    meaning = "a torch.Generator, such as torch.Generator().manual_seed(0)"
    instance("generator", generator, (torch.Generator, type(None)), meaning)
