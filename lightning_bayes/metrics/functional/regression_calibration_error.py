"""Quantile calibration of a Gaussian predictive (Kuleshov, Fenner & Ermon, 2018, eq. 9).

A forecast is calibrated if a share p of the targets lies below its p-quantile, for every p. With the probability
integral transform uₙ = Φ((yₙ - μₙ)/σₙ), uniform for a calibrated forecast, and levels p_j = j/n_bins, 0 < j < n_bins:

    p̂_j = (1/N) Σₙ 1[uₙ < p_j]
    l1   mean_j |p̂_j - p_j|       l2   √ mean_j (p̂_j - p_j)²       max   max_j |p̂_j - p_j|

A histogram of u is all that is kept. Kuleshov's own score with equal weights is (n_bins - 1) · l2².
"""

import torch
from torch import Tensor

from lightning_bayes.metrics.functional.binning import cell_sums, running_sum
from lightning_bayes.metrics.functional.calibration_error import Norm
from lightning_bayes.metrics.functional.inputs import check_choice, check_count, regression_inputs


def regression_calibration_error(
    mean: Tensor, variance: Tensor, target: Tensor, n_bins: int = 20, norm: Norm = "l1", validate_args: bool = True
) -> Tensor:
    """Distance between the expected and the observed quantile levels of `target` under N(mean, variance).

    >>> zeros, ones = torch.zeros(4), torch.ones(4)
    >>> regression_calibration_error(zeros, ones, torch.tensor([-3.0, -2.0, -1.0, 1.0]), n_bins=4)
    tensor(0.2500, dtype=torch.float64)
    """
    check_levels(n_bins)
    check_choice("norm", norm, ("l1", "l2", "max"))
    sums = _regression_calibration_update(mean, variance, target, n_bins, validate_args)
    return _regression_calibration_compute(sums, norm)


def regression_calibration_curve(
    mean: Tensor, variance: Tensor, target: Tensor, n_bins: int = 20, validate_args: bool = True
) -> tuple[Tensor, Tensor]:
    """Expected levels p_j and the observed shares p̂_j, both `[n_bins - 1]`.

    >>> zeros, ones = torch.zeros(4), torch.ones(4)
    >>> _, observed = regression_calibration_curve(zeros, ones, torch.tensor([-3.0, -2.0, -1.0, 1.0]), n_bins=4)
    >>> observed.tolist()
    [0.75, 0.75, 0.75]
    """
    check_levels(n_bins)
    return _regression_calibration_curve(_regression_calibration_update(mean, variance, target, n_bins, validate_args))


def check_levels(n_bins: int) -> None:
    """Refuse a number of bins that leaves no level strictly between 0 and 1."""
    check_count("n_bins", n_bins, 2)


def _regression_calibration_update(
    mean: Tensor, variance: Tensor, target: Tensor, n_bins: int, validate: bool
) -> Tensor:
    mean, variance, target = regression_inputs(mean, variance, target, validate)
    u = torch.special.ndtr((target - mean) / variance.sqrt())  # [N]
    return cell_sums(u[:, None], torch.ones_like(u)[:, None, None], n_bins).reshape(-1)  # [n_bins]


def _regression_calibration_curve(counts: Tensor) -> tuple[Tensor, Tensor]:
    expected = torch.arange(1, len(counts), dtype=counts.dtype, device=counts.device) / len(counts)
    return expected, running_sum(counts)[:-1] / counts.sum()


def _regression_calibration_compute(counts: Tensor, norm: Norm) -> Tensor:
    expected, observed = _regression_calibration_curve(counts)
    gap = (observed - expected).abs()  # [n_bins - 1]; NaN where nothing was counted
    if norm == "l1":
        return gap.mean()
    if norm == "l2":
        return gap.square().mean().sqrt()
    return gap.max()
