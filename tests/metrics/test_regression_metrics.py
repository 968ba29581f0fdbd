"""Gaussian NLL, CRPS, intervals and quantile calibration against SciPy, quadrature and closed forms."""

import numpy as np
import pytest
import torch
from metric_cases import DATA
from scipy.integrate import quad
from scipy.stats import norm

from lightning_bayes.metrics import functional as F

MEAN, VARIANCE, TARGET = DATA["regression"]
NORMAL = norm(MEAN.numpy(), VARIANCE.sqrt().numpy())


def test_nll_is_scipys_log_density() -> None:
    expected = -NORMAL.logpdf(TARGET.numpy()).mean()
    assert float(F.gaussian_nll(MEAN, VARIANCE, TARGET)) == pytest.approx(expected, rel=1e-12)


def test_crps_is_the_integral_it_stands_for() -> None:
    values = []
    for mu, std, y in [(0.3, 0.5, 1.1), (-1.0, 2.0, -1.0), (0.0, 1.0, -2.5)]:
        below, _ = quad(lambda t, mu=mu, std=std: norm.cdf(t, mu, std) ** 2, -30, y, epsabs=1e-12, limit=200)
        above, _ = quad(lambda t, mu=mu, std=std: norm.sf(t, mu, std) ** 2, y, 30, epsabs=1e-12, limit=200)
        values.append(below + above)
    mean, std, target = torch.tensor([[0.3, -1.0, 0.0], [0.5, 2.0, 1.0], [1.1, -1.0, -2.5]], dtype=torch.float64)
    assert float(F.gaussian_crps(mean, std.square(), target)) == pytest.approx(np.mean(values), rel=1e-9)


def test_crps_of_a_sure_forecast_is_the_absolute_error() -> None:
    crps = F.gaussian_crps(MEAN, torch.full_like(MEAN, 1e-18), TARGET)
    torch.testing.assert_close(crps, (TARGET - MEAN).abs().mean(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_are_scipys(level: float) -> None:
    low, high = NORMAL.interval(level)
    covered = ((low <= TARGET.numpy()) & (TARGET.numpy() <= high)).mean()
    assert 0 < covered < 1
    assert float(F.interval_coverage(MEAN, VARIANCE, TARGET, level)) == pytest.approx(covered, rel=1e-12)
    assert float(F.interval_width(MEAN, VARIANCE, TARGET, level)) == pytest.approx((high - low).mean(), rel=1e-12)


@pytest.mark.parametrize("n_bins", [2, 10, 20])
def test_quantile_calibration_is_a_loop_over_scipys_quantiles(n_bins: int) -> None:
    levels = np.arange(1, n_bins) / n_bins
    observed = np.array([(TARGET.numpy() < NORMAL.ppf(level)).mean() for level in levels])
    gap = np.abs(observed - levels)
    curve = F.regression_calibration_curve(MEAN, VARIANCE, TARGET, n_bins)
    np.testing.assert_allclose(curve[0], levels, rtol=1e-12)
    np.testing.assert_allclose(curve[1], observed, rtol=1e-12)
    for name, expected in {"l1": gap.mean(), "l2": np.sqrt((gap**2).mean()), "max": gap.max()}.items():
        value = float(F.regression_calibration_error(MEAN, VARIANCE, TARGET, n_bins, name))
        assert value == pytest.approx(expected, rel=1e-12)


def test_targets_at_their_own_quantiles_are_perfectly_calibrated() -> None:
    u = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    target = 3 + 2 * torch.special.ndtri(u)
    mean, variance = torch.full_like(u, 3.0), torch.full_like(u, 4.0)
    assert float(F.regression_calibration_error(mean, variance, target, norm="max")) < 1e-12
    assert float(F.interval_coverage(mean, variance, target, level=0.95)) == 0.95
