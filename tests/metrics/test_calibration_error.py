"""Calibration errors against torchmetrics and a plain loop over bins."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from lightning_bayes.metrics import CalibrationError
from lightning_bayes.metrics import functional as F

GENERATOR = torch.Generator().manual_seed(4)
PROBS = (2 * torch.randn(240, 5, generator=GENERATOR, dtype=torch.float64)).softmax(-1)  # 240 = 15 · 16 = 10 · 24
TARGET = torch.randint(5, (240,), generator=GENERATOR)


def error_of_bins(bins: list[tuple[np.ndarray, np.ndarray]], norm: str) -> float:
    """Over (confidences, hits) per bin, straight from the definition."""
    bins = [(conf, hit) for conf, hit in bins if len(conf)]
    weight = np.array([len(conf) for conf, _ in bins]) / sum(len(conf) for conf, _ in bins)
    gap = np.array([abs(conf.mean() - hit.mean()) for conf, hit in bins])
    return {"l1": (weight * gap).sum(), "l2": np.sqrt((weight * gap**2).sum()), "max": gap.max()}[norm]


def equal_mass_bins(confidence: Tensor, hit: Tensor, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    order = confidence.argsort()
    return list(
        zip(np.array_split(confidence[order].numpy(), n), np.array_split(hit[order].double().numpy(), n), strict=True)
    )


@pytest.mark.parametrize("n_bins", [10, 15])  # the GLM paper's UCI runs; elsewhere
@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_equal_width_is_torchmetrics(norm: str, n_bins: int) -> None:
    expected = multiclass_calibration_error(PROBS, TARGET, num_classes=5, n_bins=n_bins, norm=norm)
    torch.testing.assert_close(F.calibration_error(PROBS, TARGET, n_bins, norm), expected, check_dtype=False)


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_equal_mass_is_a_loop_over_sorted_predictions(norm: str) -> None:
    confidence, label = PROBS.max(1)
    expected = error_of_bins(equal_mass_bins(confidence, label == TARGET, 15), norm)
    assert float(F.calibration_error(PROBS, TARGET, 15, norm, "mass")) == pytest.approx(expected, rel=1e-12)


def test_class_wise_is_the_mean_over_one_against_the_rest() -> None:
    columns = [(p.contiguous(), y) for p, y in zip(PROBS.T, torch.eye(5).long()[TARGET].T, strict=True)]
    ece, mce = (
        torch.stack([binary_calibration_error(p, y, n_bins=15, norm=norm) for p, y in columns])
        for norm in ("l1", "max")
    )
    value = {n: F.calibration_error(PROBS, TARGET, norm=n, kind="class_wise") for n in ("l1", "l2", "max")}
    rms = torch.stack([binary_calibration_error(p, y, n_bins=15, norm="l2") for p, y in columns]).square().mean().sqrt()
    torch.testing.assert_close(value["l1"], ece.mean(), check_dtype=False)
    torch.testing.assert_close(value["l2"], rms, check_dtype=False)
    torch.testing.assert_close(value["max"], mce.max(), check_dtype=False)
    by_mass = np.mean([error_of_bins(equal_mass_bins(p, y, 10), "l1") for p, y in columns])
    assert float(F.calibration_error(PROBS, TARGET, 10, "l1", "mass", "class_wise")) == pytest.approx(
        by_mass, rel=1e-12
    )


def test_equal_confidences_share_their_bins_evenly() -> None:
    """Six predictions, one confidence, half of them right: every bin is half right, in any order."""
    probs = torch.tensor([[0.8, 0.2]]).repeat(6, 1)
    for target in ([0, 0, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0]):
        bins = F.reliability_bins(probs, torch.tensor(target), n_bins=4, binning="mass")
        assert bins.count.tolist() == [1.5] * 4
        torch.testing.assert_close(bins.accuracy, torch.full((4,), 0.5, dtype=torch.float64))


def test_equal_mass_from_a_fine_histogram_approaches_the_exact_value() -> None:
    exact = float(F.calibration_error(PROBS, TARGET, 10, "l2", "mass"))
    error = []
    for resolution in (20, 100_000):
        metric = CalibrationError(10, "l2", "mass", resolution=resolution)
        metric.update(PROBS, TARGET)
        error.append(abs(float(metric.compute()) - exact))
    assert metric.sums.shape == (1, 100_000, 3)  # constant, whatever the number of predictions
    assert error[1] < 1e-12 < error[0] < 0.05


def test_a_class_wise_histogram_is_exact_when_cells_hold_one_confidence_each() -> None:
    p = torch.tensor([0.1, 0.3, 0.3, 0.7, 0.9], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 1, 1])
    metric = CalibrationError(3, binning="mass", resolution=64, kind="class_wise", num_classes=2)
    metric.update(p, y)
    torch.testing.assert_close(metric.compute(), F.calibration_error(p, y, 3, binning="mass", kind="class_wise"))


def test_confidence_one_belongs_to_the_last_bin_and_empty_bins_are_nan() -> None:
    bins = F.reliability_bins(torch.tensor([1.0, 0.0, 0.75]), torch.tensor([1, 0, 0]), n_bins=4)
    assert bins.count.tolist() == [0, 0, 0, 3]
    assert bins.accuracy.isnan().tolist() == [True, True, True, False]
    assert float(bins.accuracy[3]) == pytest.approx(2 / 3)


def test_dense_outputs_with_an_ignored_label_count_the_rest() -> None:
    dense = PROBS.reshape(4, 60, 5).movedim(-1, 1)  # [B, C, T]
    target = TARGET.reshape(4, 60).clone()
    target[1] = -1
    kept = (target != -1).reshape(-1)
    metric = CalibrationError(ignore_index=-1)
    metric.update(dense, target)
    torch.testing.assert_close(metric.compute(), F.calibration_error(PROBS[kept], TARGET[kept]))
