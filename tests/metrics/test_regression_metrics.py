"""NLL, CRPS, intervals and quantile calibration of a Gaussian and a Student-t, against SciPy and quadrature."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from metric_cases import DATA
from scipy import stats
from scipy.integrate import quad
from torch import Tensor

from lightning_bayes.metrics import functional as F
from lightning_bayes.metrics.functional.student_t import half_width, student_cdf, student_entropy, student_nll

MEAN, VARIANCE, TARGET = DATA["regression"]
ALIKE = torch.full_like(MEAN, 5.0)
MIXED = torch.tensor([2.05, 3.0, 7.5, 400.0, math.inf], dtype=torch.float64).repeat(25)[: MEAN.numel()].view_as(MEAN)
each_law = pytest.mark.parametrize("df", [None, ALIKE, MIXED], ids=["Gaussian", "Student-t", "mixed"])


def scipys(mean: Tensor, variance: Tensor, df: Tensor | None) -> Any:
    """SciPy's distribution with this mean and variance."""
    if df is None:
        return stats.norm(mean.numpy(), variance.sqrt().numpy())
    shrunk = torch.where(df.isinf(), 1.0, (df - 2) / df)
    return stats.t(df.numpy(), mean.numpy(), (variance * shrunk).sqrt().numpy())


@each_law
def test_nll_is_scipys_log_density(df: Tensor | None) -> None:
    expected = -scipys(MEAN, VARIANCE, df).logpdf(TARGET.numpy()).mean()
    assert float(F.gaussian_nll(MEAN, VARIANCE, TARGET, df)) == pytest.approx(expected, rel=1e-12)


def test_one_number_is_the_df_of_all_elements() -> None:
    assert F.gaussian_crps(MEAN, VARIANCE, TARGET, 5) == F.gaussian_crps(MEAN, VARIANCE, TARGET, ALIKE)
    for metric in (F.gaussian_nll, F.gaussian_crps, F.interval_coverage, F.regression_calibration_error):
        assert metric(MEAN, VARIANCE, TARGET, math.inf) == metric(MEAN, VARIANCE, TARGET)


@pytest.mark.parametrize("df", [2.05, 2.5, 3.0, 7.5, 60.0, 3000.0])
def test_distribution_and_entropy_are_scipys(df: float) -> None:
    z, one = torch.linspace(-30, 30, 301, dtype=torch.float64), torch.ones(()).double()
    ν = torch.full_like(z, df)
    law = scipys(torch.zeros(()), one, ν[0])
    np.testing.assert_allclose(student_cdf(z, ν), law.cdf(z.numpy()), rtol=0, atol=1e-14)
    assert float(student_entropy(one, ν[0])) == pytest.approx(float(law.entropy()), rel=1e-9)


@pytest.mark.parametrize("df", [4e4, 1e7, 1e14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_degrees_of_freedom_lose_no_digits(dtype: torch.dtype, df: float) -> None:
    """By the series in 1/ν around a Gaussian: SciPy's law loses digits."""
    one, ν, rounding = torch.ones((), dtype=dtype), torch.tensor(df, dtype=dtype), 10 * torch.finfo(dtype).eps
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    assert float(student_nll(one, one, ν)) == pytest.approx(entropy + 0.5 / df, rel=rounding, abs=1 / df**2)
    assert float(student_entropy(one, ν)) == pytest.approx(entropy - 0.75 / df**2, rel=rounding, abs=2 / df**3)


def test_an_interval_of_all_probability_is_found() -> None:
    for df in (3.0, 6.0, 8.1222):
        assert float(half_width(1 - 2**-52, torch.ones(()), torch.tensor(df))) > 100


@pytest.mark.parametrize("df", [None, 2.5, 4.0, 30.0])
def test_crps_is_the_integral_it_stands_for(df: float | None) -> None:
    values = []
    for mu, std, y in [(0.3, 0.5, 1.1), (-1.0, 2.0, -1.0), (0.0, 1.0, -2.5)]:
        ν = None if df is None else torch.tensor(df)
        law = scipys(torch.tensor(mu).double(), torch.tensor(std).double() ** 2, ν)
        below, _ = quad(lambda t, law=law: law.cdf(t) ** 2, -np.inf, y, epsabs=1e-12, limit=500)
        above, _ = quad(lambda t, law=law: law.sf(t) ** 2, y, np.inf, epsabs=1e-12, limit=500)
        values.append(below + above)
    mean, std, target = torch.tensor([[0.3, -1.0, 0.0], [0.5, 2.0, 1.0], [1.1, -1.0, -2.5]], dtype=torch.float64)
    assert float(F.gaussian_crps(mean, std.square(), target, df)) == pytest.approx(np.mean(values), rel=1e-8)


@pytest.mark.parametrize("df", [None, 4.0])
def test_crps_of_a_sure_forecast_is_the_absolute_error(df: float | None) -> None:
    crps = F.gaussian_crps(MEAN, torch.full_like(MEAN, 1e-18), TARGET, df)
    torch.testing.assert_close(crps, (TARGET - MEAN).abs().mean(), rtol=1e-8, atol=0)


@each_law
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_are_scipys(level: float, df: Tensor | None) -> None:
    low, high = scipys(MEAN, VARIANCE, df).interval(level)
    covered = ((low <= TARGET.numpy()) & (TARGET.numpy() <= high)).mean()
    assert 0 < covered < 1
    assert float(F.interval_coverage(MEAN, VARIANCE, TARGET, df, level)) == pytest.approx(covered, rel=1e-12)
    assert float(F.interval_width(MEAN, VARIANCE, TARGET, df, level)) == pytest.approx((high - low).mean(), rel=1e-11)


@each_law
@pytest.mark.parametrize("n_bins", [2, 10, 20])
def test_quantile_calibration_is_a_loop_over_scipys_quantiles(n_bins: int, df: Tensor | None) -> None:
    levels = np.arange(1, n_bins) / n_bins
    observed = np.array([(TARGET.numpy() < scipys(MEAN, VARIANCE, df).ppf(level)).mean() for level in levels])
    gap = np.abs(observed - levels)
    curve = F.regression_calibration_curve(MEAN, VARIANCE, TARGET, df, n_bins)
    np.testing.assert_allclose(curve[0], levels, rtol=1e-12)
    np.testing.assert_allclose(curve[1], observed, rtol=1e-12)
    for name, expected in {"l1": gap.mean(), "l2": np.sqrt((gap**2).mean()), "max": gap.max()}.items():
        value = float(F.regression_calibration_error(MEAN, VARIANCE, TARGET, df, n_bins, name))
        assert value == pytest.approx(expected, rel=1e-12)


def test_targets_at_their_own_quantiles_are_perfectly_calibrated() -> None:
    u = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    target = 3 + 2 * torch.special.ndtri(u)
    mean, variance = torch.full_like(u, 3.0), torch.full_like(u, 4.0)
    assert float(F.regression_calibration_error(mean, variance, target, norm="max")) < 1e-12
    assert float(F.interval_coverage(mean, variance, target, level=0.95)) == 0.95
