"""Scores and calibration of a Gaussian predictive N(μ, σ²), or of a Student-t with the same mean and variance.

`variance` is the variance of the observation: epistemic plus noise. `df`, one number or one per element, is the degrees
of freedom ν > 2 of a Student-t (see `student_t`); None or infinity is a Gaussian. If examples have several outputs,
scores are averaged over outputs and examples.

**Negative log-likelihood** in nats:

    NLL = (1/N) Σₙ ½ [log 2πσₙ² + (yₙ - μₙ)²/σₙ²]

**Continuous ranked probability score**, in the unit of the target (Gneiting & Raftery, 2007, eq. 21, with the sign that
makes smaller better). It is strictly proper like the log score, but grows linearly in the error; for σ → 0 it becomes
the absolute error.

    CRPS(N(μ, σ²), y) = ∫ (F(t) - 1[t ≥ y])² dt = σ [z (2Φ(z) - 1) + 2φ(z) - 1/√π],  z = (y - μ)/σ

and for a Student-t with density f and distribution function F of t = (y - μ)/τ (Jordan, Krüger & Lerch, 2019),

    CRPS = τ [t (2F(t) - 1) + (2f(t)(ν + t²) - 2√ν B(½, ν - ½)/B(½, ν/2)²) / (ν - 1)],  τ = σ √((ν - 2)/ν)

**Central prediction intervals** (Khosravi et al., 2011). Report coverage and width together: an infinitely wide
interval always covers the target.

    I(level) = [μ - zσ, μ + zσ],  z = F⁻¹((1 + level)/2) of the standardised forecast
    coverage = (1/N) Σₙ 1[yₙ ∈ Iₙ]        PICP; equals `level` for a calibrated model
    width    = (1/N) Σₙ 2zσₙ              MPIW; narrower is better at equal coverage

**Quantile calibration** (Kuleshov, Fenner & Ermon, 2018, eq. 9). A forecast is calibrated if a share p of the targets
lies below its p-quantile, for every p. With the probability integral transform uₙ = F((yₙ - μₙ)/σₙ), which is uniform
for a calibrated forecast, and levels p_j = j/n_bins, 0 < j < n_bins:

    p̂_j = (1/N) Σₙ 1[uₙ < p_j]
    l1   mean_j |p̂_j - p_j|       l2   √ mean_j (p̂_j - p_j)²       max   max_j |p̂_j - p_j|

The state is a histogram of u. Kuleshov's score with equal weights is (n_bins - 1) · l2².
"""

import math
from typing import get_args

import torch
from torch import Tensor

from lightning_bayes.arguments import between, count, word
from lightning_bayes.metrics.functional.statistics import (
    MetricInputError,
    Norm,
    cell_sums,
    mean_compute,
    norm_of_gaps,
    regression_inputs,
    running_sum,
    sum_and_count,
)
from lightning_bayes.metrics.functional.student_t import half_width, log_gamma_step, student_cdf, student_nll

Freedom = float | Tensor | None  # degrees of freedom


def gaussian_nll(
    mean: Tensor, variance: Tensor, target: Tensor, df: Freedom = None, validate_args: bool = True
) -> Tensor:
    """Mean negative log-likelihood of `target` under N(mean, variance), all of the same shape.

    >>> gaussian_nll(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    tensor(1.5155, dtype=torch.float64)
    """
    return mean_compute(_gaussian_nll_update(*regression_inputs(mean, variance, target, df, validate_args)))


def _gaussian_nll_update(mean: Tensor, variance: Tensor, target: Tensor, df: Tensor | None) -> Tensor:
    return sum_and_count(student_nll((target - mean).square() / variance, variance, df))  # [2]


def gaussian_crps(
    mean: Tensor, variance: Tensor, target: Tensor, df: Freedom = None, validate_args: bool = True
) -> Tensor:
    """Mean CRPS of N(mean, variance) for `target`, all of the same shape.

    >>> gaussian_crps(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    tensor(0.5349, dtype=torch.float64)
    """
    return mean_compute(_gaussian_crps_update(*regression_inputs(mean, variance, target, df, validate_args)))


def _gaussian_crps_update(mean: Tensor, variance: Tensor, target: Tensor, df: Tensor | None) -> Tensor:
    std = variance.sqrt()
    z = (target - mean) / std
    rest = 2 * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi) - 1 / math.sqrt(math.pi)
    if df is not None:
        rest = torch.where(df.isinf(), rest, _student_rest(z, df.masked_fill(df.isinf(), 3.0)))
    return sum_and_count(std * (z * (2 * student_cdf(z, df) - 1) + rest))  # [2]


def _student_rest(z: Tensor, ν: Tensor) -> Tensor:
    """The CRPS of a Student-t of variance one, without its first term."""
    τ = ((ν - 2) / ν).sqrt()
    t2 = (z / τ).square()
    density = (-student_nll(z.square(), torch.ones_like(z), ν)).exp() * τ  # density of t, not of z
    log_betas = 2 * log_gamma_step(ν / 2) - log_gamma_step(ν - 0.5)
    betas = (log_betas - 0.5 * math.log(math.pi)).exp()  # B(½, ν - ½) / B(½, ν/2)²
    return τ * 2 * (density * (ν + t2) - ν.sqrt() * betas) / (ν - 1)


def interval_coverage(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    df: Freedom = None,
    level: float = 0.95,
    validate_args: bool = True,
) -> Tensor:
    """Share of `target` inside the central interval of N(mean, variance), borders included.

    >>> zeros, ones = torch.zeros(4), torch.ones(4)
    >>> interval_coverage(zeros, ones, torch.tensor([-3.0, -1.0, 0.5, 1.9]))
    tensor(0.7500, dtype=torch.float64)
    """
    check_level(level)
    inputs = regression_inputs(mean, variance, target, df, validate_args)
    return mean_compute(_interval_coverage_update(*inputs, level))


def _interval_coverage_update(
    mean: Tensor, variance: Tensor, target: Tensor, df: Tensor | None, level: float
) -> Tensor:
    return sum_and_count(((target - mean).abs() <= half_width(level, variance, df)).to(mean.dtype))  # [2]


def interval_width(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    df: Freedom = None,
    level: float = 0.95,
    validate_args: bool = True,
) -> Tensor:
    """Mean width of the central interval of N(mean, variance). The width does not depend on `target`.

    >>> zeros = torch.zeros(2)
    >>> interval_width(zeros, torch.tensor([1.0, 4.0]), zeros)
    tensor(5.8799, dtype=torch.float64)
    """
    check_level(level)
    return mean_compute(_interval_width_update(*regression_inputs(mean, variance, target, df, validate_args), level))


def _interval_width_update(mean: Tensor, variance: Tensor, target: Tensor, df: Tensor | None, level: float) -> Tensor:
    return sum_and_count(2 * half_width(level, variance, df))  # [2]


def check_level(level: float) -> float:
    return between("level", level, 0, 1, MetricInputError, borders=False)


def regression_calibration_error(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    df: Freedom = None,
    n_bins: int = 20,
    norm: Norm = "l1",
    validate_args: bool = True,
) -> Tensor:
    """Distance between the expected and the observed quantile levels of `target` under N(mean, variance).

    >>> zeros, ones = torch.zeros(4), torch.ones(4)
    >>> regression_calibration_error(zeros, ones, torch.tensor([-3.0, -2.0, -1.0, 1.0]), n_bins=4)
    tensor(0.2500, dtype=torch.float64)
    """
    check_quantiles(n_bins, norm)
    inputs = regression_inputs(mean, variance, target, df, validate_args)
    return _regression_calibration_compute(_regression_calibration_update(*inputs, n_bins), norm)


def regression_calibration_curve(
    mean: Tensor,
    variance: Tensor,
    target: Tensor,
    df: Freedom = None,
    n_bins: int = 20,
    validate_args: bool = True,
) -> tuple[Tensor, Tensor]:
    """Expected levels p_j and observed shares p̂_j, both `[n_bins - 1]`.

    >>> zeros, ones = torch.zeros(4), torch.ones(4)
    >>> _, observed = regression_calibration_curve(zeros, ones, torch.tensor([-3.0, -2.0, -1.0, 1.0]), n_bins=4)
    >>> observed.tolist()
    [0.75, 0.75, 0.75]
    """
    check_quantiles(n_bins)
    inputs = regression_inputs(mean, variance, target, df, validate_args)
    return _regression_calibration_curve(_regression_calibration_update(*inputs, n_bins))


def check_quantiles(n_bins: int, norm: Norm = "l1") -> None:
    count("n_bins", n_bins, 2, MetricInputError)  # at least one level strictly between 0 and 1
    word("norm", norm, get_args(Norm), MetricInputError)


def _regression_calibration_update(
    mean: Tensor, variance: Tensor, target: Tensor, df: Tensor | None, n_bins: int
) -> Tensor:
    u = student_cdf((target - mean) / variance.sqrt(), df)  # [N]
    return cell_sums(u[:, None], torch.ones_like(u)[:, None, None], n_bins).reshape(-1)  # [n_bins]


def _regression_calibration_curve(counts: Tensor) -> tuple[Tensor, Tensor]:
    expected = torch.arange(1, len(counts), dtype=counts.dtype, device=counts.device) / len(counts)
    return expected, running_sum(counts)[:-1] / counts.sum()


def _regression_calibration_compute(counts: Tensor, norm: Norm) -> Tensor:
    expected, observed = _regression_calibration_curve(counts)
    gap = (observed - expected).abs()  # [n_bins - 1]; NaN if nothing was counted
    return norm_of_gaps(gap, torch.full_like(gap, 1 / len(gap)), norm)
