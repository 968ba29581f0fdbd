"""A Student-t with variance `σ²` and `ν > 2` degrees of freedom. Without `ν`, or if it is infinite, it is a Gaussian.

`ν` changes the shape and never the variance: with `e = (y - μ)²/σ²`,

    -log p(y) = ½ log π(ν - 2)σ² + log Γ(ν/2) - log Γ((ν + 1)/2) + ½ (ν + 1) log(1 + e/(ν - 2))
    entropy   = -log p(μ) + ½ (ν + 1) [ψ((ν + 1)/2) - ψ(ν/2)]

The textbook's `t = (y - μ)/τ` has the scale `τ = σ √((ν - 2)/ν)`. Given a precision `λ ~ Gamma(ν/2, ν/2)`, `t` is a
Gaussian with variance `1/λ`, so its distribution function is the mean of `Φ(t √λ)` over `λ`.
"""

import math
from functools import cache

import torch
from torch import Tensor

NODES = 200  # nodes of the mean over λ: only rounding errors remain
CHUNK = 2**12  # number of values that are processed at a time
FAR = 50.0  # above this argument the asymptotic series are exact up to rounding


def student_nll(error: Tensor, variance: Tensor, df: Tensor | None = None) -> Tensor:
    """`-log p(y)` from `e = (y - μ)²/σ²`, all of the same shape."""
    gaussian = 0.5 * ((2 * math.pi * variance).log() + error)
    if df is None:
        return gaussian
    is_gaussian, ν = df.isinf(), df.masked_fill(df.isinf(), 3.0)
    nll = 0.5 * (math.pi * (ν - 2) * variance).log() - log_gamma_step(ν / 2)
    return torch.where(is_gaussian, gaussian, nll + (ν + 1) / 2 * (error / (ν - 2)).log1p())


def student_entropy(variance: Tensor, df: Tensor) -> Tensor:
    """The differential entropy in nats."""
    ν = df.masked_fill(df.isinf(), 3.0)
    above = (ν + 1) / 2 * _digamma_step(ν / 2)
    return student_nll(torch.zeros_like(variance), variance, df) + torch.where(df.isinf(), 0.5, above)


def log_gamma_step(x: Tensor) -> Tensor:
    """`log Γ(x + ½) - log Γ(x)`, computed without subtracting two large numbers."""
    far = x.clamp(min=FAR)
    series = far.log() / 2 - 1 / (8 * far) + 1 / (192 * far**3) - 1 / (640 * far**5)
    return torch.where(x > FAR, series, (x + 0.5).lgamma() - x.lgamma())


def _digamma_step(x: Tensor) -> Tensor:
    """`ψ(x + ½) - ψ(x)`, the derivative of `log_gamma_step`."""
    far = x.clamp(min=FAR)
    series = 1 / (2 * far) + 1 / (8 * far**2) - 1 / (64 * far**4) + 1 / (128 * far**6)
    return torch.where(x > FAR, series, (x + 0.5).digamma() - x.digamma())


def student_cdf(z: Tensor, df: Tensor | None = None) -> Tensor:
    """The distribution function at `z = (y - μ)/σ`."""
    if df is None:
        return torch.special.ndtr(z)
    ν = df.masked_fill(df.isinf(), 3.0)
    t = z * (ν / (ν - 2)).sqrt()
    parts = zip(*(v.reshape(-1).split(CHUNK) for v in (t, ν)), strict=True)
    return torch.where(df.isinf(), torch.special.ndtr(z), torch.cat([_of_t(*part) for part in parts]).view_as(z))


def _of_t(t: Tensor, ν: Tensor) -> Tensor:
    """The distribution function by the trapezoid rule in `w = log λ`. The density of `w` is proportional to
    `exp ½ν(w - e^w)`, and the rule starts where the density is e^-40 of its maximum. The error falls exponentially in
    the number of nodes.  # [N], [N] -> [N]"""
    ν = ν.unsqueeze(1)
    reach = 80 / ν + (160 / ν).sqrt()
    w = -reach + torch.linspace(0, 1, NODES, dtype=t.dtype, device=t.device) * (reach + reach.log1p())  # [N, NODES]
    weights = (ν / 2 * (w - w.exp())).softmax(1)
    return (weights * torch.special.ndtr(t.unsqueeze(1) * (w / 2).exp())).sum(1)


def half_width(level: float, variance: Tensor, df: Tensor | None = None) -> Tensor:
    """Half the width of the central interval with probability `level`."""
    std = variance.sqrt()
    if df is None:
        return _half_width(level, math.inf) * std
    values, index = df.unique(return_inverse=True)
    return std.new_tensor([_half_width(level, ν) for ν in values.tolist()])[index] * std


@cache
def _half_width(level: float, df: float) -> float:
    """`half_width` for a variance of one."""
    p, ν = (1 + level) / 2, torch.tensor(df, dtype=torch.float64, device="cpu")
    if math.isinf(df):
        return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64, device="cpu")))
    low, high = 0.0, 1.0
    while float(student_cdf(ν.new_tensor(high), ν)) < p and high < math.inf:  # p may round to one
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(student_cdf(ν.new_tensor(middle), ν)) < p else (low, middle)
    return (low + high) / 2
