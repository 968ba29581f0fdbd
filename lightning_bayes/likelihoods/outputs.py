"""Network outputs: their layouts, and the few operations on them that every likelihood shares.

A network's output `f` has one of the layouts

- `[B]`                   one output per example;
- `[B, C]`                `C` outputs (classes, labels, channels) per example;
- `[B, C, *positions]`    dense: `C` outputs at every position, the positions independent given `f`.

A Gaussian over outputs is a mean `m` in one of these layouts with either its variances (the same shape) or, for
`[B, C]` only, its covariances `Σ` `[B, C, C]`. Dense outputs never need a full covariance.
Half precision is widened: everything is computed, and returned, in at least float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, instance, shown


class LikelihoodError(ValueError):
    """Outputs, targets or settings that do not fit the likelihood; the message names the culprit and the way out."""


class UnknownLikelihoodError(LikelihoodError):
    """A name that no likelihood of this program has."""


def widen(t: Tensor) -> Tensor:
    """`t` in at least float32: float16 and bfloat16 are too coarse for sums and tails."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def sum_per_example(t: Tensor) -> Tensor:
    """The sum over everything but the batch: `[B, …]` to `[B]`."""
    return t.flatten(1).sum(1) if t.ndim > 1 else t


def diagonal_root(d: Tensor) -> Tensor:
    """The columns `[C, B, C, …]` of the root `diag(d)` at every example and position; `[1, B]` for `d` of shape `[B]`.

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
    """Standard normal draws by inverse CDF; `torch.rand` can return an exact 0, which must not become −∞."""
    eps = torch.finfo(uniform.dtype).eps
    return torch.special.ndtri(uniform.clamp(eps, 1 - eps))


def marginal_variance(mean: Tensor, covariance: Tensor) -> Tensor:
    """The variances, in the shape of `mean`, of a Gaussian given by its variances or by covariances `[B, C, C]`."""
    if covariance.shape == mean.shape:
        return _without_rounding(covariance)
    if mean.ndim == 2 and covariance.shape == (*mean.shape, mean.shape[1]):
        return _without_rounding(covariance.diagonal(dim1=1, dim2=2))  # [B, C]
    full = f" or covariances of shape {[*mean.shape, mean.shape[1]]}" if mean.ndim == 2 else ""
    raise LikelihoodError(
        f"an output mean of shape {list(mean.shape)} needs variances of the same shape{full}, "
        f"got shape {list(covariance.shape)}."
    )


def _without_rounding(variance: Tensor) -> Tensor:
    """Variances, or a covariance's eigenvalues: what rounding has left just below zero is zero, more is an error."""
    if variance.numel() and bool(variance.amin() < -1e-3 * variance.abs().amax()):
        raise LikelihoodError(
            f"the covariance of the outputs must be positive semi-definite, but has a variance of "
            f"{variance.amin().item():.3g}; pass a covariance, neither its negative nor a precision."
        )
    return variance.clamp_min(0)


def draw_gaussian(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` draws `[S, *mean.shape]` from the Gaussian over outputs, by the symmetric root of its covariance.

    The symmetric root exists for singular covariances and is unique, so equal noise gives equal draws on any machine.
    """
    count("samples", samples, error=LikelihoodError)
    check_generator(generator)
    device = mean.device if generator is None else generator.device
    noise = torch.randn((samples, *mean.shape), generator=generator, device=device, dtype=mean.dtype).to(mean.device)
    variance = marginal_variance(mean, covariance)
    if covariance.shape == mean.shape:
        return mean + variance.sqrt() * noise  # [S, B, …]
    root: Tensor = _SymmetricRoot.apply(covariance)  # [B, C, C]
    return mean + torch.einsum("bij,sbj->sbi", root, noise)  # [S, B, C]


class _SymmetricRoot(torch.autograd.Function):
    """`S` with `SS = Σ`. Its differential solves `S dS + dS S = dΣ`, in the eigenbasis `dS_ij = dΣ_ij/(√λ_i + √λ_j)`,
    also where eigenvalues are equal and have no differentiable vectors. A direction without variance gets no
    gradient: there is none."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor) -> Tensor:
        λ, Q = torch.linalg.eigh(covariance)
        roots = _without_rounding(λ).sqrt()
        S = (Q * roots.unsqueeze(-2)) @ Q.mT
        ctx.save_for_backward(S, roots, Q)
        return S

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        solution: Tensor = _Lyapunov.apply(*ctx.saved_tensors, gradient)
        return solution


class _Lyapunov(torch.autograd.Function):
    """`X` with `SX + XS = G`, where `S = Q diag(r) Qᵀ`. Its differential solves `S dX + dX S = dG − dS X − X dS`, an
    equation of the same form, so that derivatives of any order are right."""

    @staticmethod
    def forward(ctx: Any, S: Tensor, roots: Tensor, Q: Tensor, G: Tensor) -> Tensor:
        sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        least = torch.finfo(sums.dtype).eps ** 0.5 * sums.amax((-2, -1), keepdim=True)
        X = Q @ torch.where(sums > least, Q.mT @ G @ Q / sums, 0) @ Q.mT
        ctx.save_for_backward(S, roots, Q, X)
        return X

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor]:
        S, roots, Q, X = ctx.saved_tensors
        Y: Tensor = _Lyapunov.apply(S, roots, Q, gradient)
        return -(Y @ X.mT + X.mT @ Y), None, None, Y


def vector(name: str, value: Any, error: type[Exception]) -> Tensor:
    """A real number or a vector of them, as a tensor."""
    try:
        if isinstance(value, bool):
            raise TypeError
        numbers = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise error(f"{name} must be a number or a vector of numbers, got {shown(value)}") from None
    if numbers.ndim > 1 or not numbers.numel() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise error(f"{name} must be a number or a vector of numbers, got {shown(value)}")
    return numbers


def check_generator(generator: Any) -> None:
    if generator is not None:
        meaning = "a torch.Generator, such as torch.Generator().manual_seed(0)"
        instance("generator", generator, torch.Generator, meaning)
