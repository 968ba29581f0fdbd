"""Negative log-likelihood, Brier score and its decomposition against references, and the inputs they accept."""

import numpy as np
import pytest
import torch
from metric_cases import DATA
from sklearn.metrics import brier_score_loss, log_loss

from lightning_bayes.metrics import BrierScore, CalibrationError, MetricInputError
from lightning_bayes.metrics import functional as F

PROBS, TARGET = DATA["classification"]
HALF, LABELS = torch.full((2, 2), 0.5), torch.tensor([0, 1])


def test_nll_is_scikit_learns_log_loss() -> None:
    expected = log_loss(TARGET, PROBS, labels=range(4))
    assert float(F.negative_log_likelihood(PROBS, TARGET)) == pytest.approx(expected, rel=1e-12)


def test_nll_of_dense_outputs_with_an_ignored_label_is_torchs() -> None:
    generator = torch.Generator().manual_seed(2)
    probs = torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64).softmax(1)  # [B, C, H, W]
    target = torch.randint(4, (3, 5, 6), generator=generator)
    target[0, 0] = 255
    expected = torch.nn.functional.nll_loss(probs.log(), target, ignore_index=255)
    torch.testing.assert_close(F.negative_log_likelihood(probs, target, ignore_index=255), expected)


def test_a_true_class_of_probability_zero_costs_infinity() -> None:
    assert F.negative_log_likelihood(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 0])) == torch.inf


def test_brier_is_scikit_learns() -> None:
    expected = brier_score_loss(TARGET, PROBS.numpy(), labels=range(4), scale_by_half=False)
    assert float(F.brier_score(PROBS, TARGET)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(60,), (60, 1), (4, 15)])
def test_probabilities_of_the_targets_shape_are_those_of_class_one(shape: tuple[int, ...]) -> None:
    p, y = PROBS[:60, 0].reshape(shape), (TARGET[:60] == 0).long().reshape(shape)
    two = torch.stack([1 - p.reshape(-1), p.reshape(-1)], dim=1)  # [N, 2]
    for function in (F.negative_log_likelihood, F.brier_score, F.calibration_error):
        torch.testing.assert_close(function(p, y), function(two, y.reshape(-1)))
    expected = 2 * brier_score_loss(y.reshape(-1), p.reshape(-1))
    assert float(F.brier_score(p, y.bool())) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_bins", [1, 4, 15])
def test_the_parts_of_the_brier_score_add_up(n_bins: int) -> None:
    parts = F.brier_decomposition(PROBS, TARGET, n_bins=n_bins)
    total = parts["reliability"] - parts["resolution"] + parts["uncertainty"] + parts["within_bin"]
    torch.testing.assert_close(total, F.brier_score(PROBS, TARGET), rtol=1e-12, atol=0)


def test_the_parts_are_murphys_where_forecasts_are_few() -> None:
    generator = torch.Generator().manual_seed(3)
    p = (torch.randint(5, (200,), generator=generator).double() + 0.5) / 5  # one forecast per bin
    y = (torch.rand(200, generator=generator) < p).long()
    reliability = resolution = 0.0
    rate = y.double().mean()
    for value in p.unique():
        inside = p == value
        observed = y[inside].double().mean()
        reliability += inside.double().mean() * (value - observed) ** 2
        resolution += inside.double().mean() * (observed - rate) ** 2
    parts = F.brier_decomposition(p, y, n_bins=5)
    # Two classes mirror each other, so that each part is twice the one-sided one.
    expected = 2 * np.array([reliability, resolution, rate * (1 - rate), 0.0])
    np.testing.assert_allclose([float(v) for v in parts.values()], expected, atol=1e-14)


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_one_hot_targets_are_refused_and_labels_of_their_own_are_not() -> None:
    """Both have the shape of probs; only one-hot targets sum to one in every row, as probs do."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 3), (6, 3, 2)):
        probs = torch.randn(shape, generator=generator).softmax(1)
        one_hot = torch.nn.functional.one_hot(probs.argmax(1), 3).movedim(-1, 1)
        for function in (F.negative_log_likelihood, F.brier_score, F.calibration_error):
            with pytest.raises(MetricInputError, match=r"is one-hot, .* pass class labels, target\.argmax\(1\)"):
                function(probs, one_hot)
        with pytest.raises(MetricInputError, match="is one-hot"):
            CalibrationError().update(probs, one_hot)
        labels = one_hot.clone()
        labels[0] = 1
        assert F.brier_score(probs, labels).isfinite()  # yes or no for each
        assert F.brier_score(probs * 0.9, one_hot).isfinite()


def test_a_refused_batch_does_not_count() -> None:
    metric = BrierScore()
    metric.update(HALF, LABELS)
    with pytest.raises(MetricInputError):
        metric.update(3 * HALF, LABELS)
    assert float(metric.compute()) == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rounding_of_narrow_probabilities_is_forgiven(dtype: torch.dtype) -> None:
    probs = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)).softmax(-1)
    target = torch.arange(64)
    value = F.negative_log_likelihood(probs.to(dtype), target)
    assert abs(float(value - F.negative_log_likelihood(probs, target))) < 4 * torch.finfo(dtype).eps


def test_validate_args_off_skips_the_checks_of_values() -> None:
    assert float(F.brier_score(torch.tensor([[2.0, 0.0]]), LABELS[:1], validate_args=False)) == 1.0
