"""A metric never guesses: every input it cannot use is refused in one sentence that says what to give."""

import pytest
import torch

from lightning_bayes.metrics import BrierDecomposition, BrierScore, CalibrationError, MetricInputError
from lightning_bayes.metrics import functional as F

HALF = torch.full((2, 2), 0.5)
LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("probs", "target", "message"),
    [
        (torch.tensor([[-1.0, 2.0]]), LABELS[:1], "softmax or sigmoid to logits"),
        (torch.tensor([[0.3, 0.3]]), LABELS[:1], "sum to one over the class axis .* off by up to 0.4"),
        (torch.tensor([[torch.nan, 1.0]]), LABELS[:1], "hold no NaN"),
        (torch.tensor([1.5]), LABELS[:1], r"lie in \[0, 1\]"),
        (torch.ones(2, 1), LABELS, "class axis of length 1"),
        (HALF, torch.tensor([0, 1, 1]), r"got probs \[2, 2\] and target \[3\]"),
        (torch.ones(2, 2, dtype=torch.long), LABELS, "floating-point probabilities, got torch.int64"),
        (HALF, torch.tensor([0.0, 1.0]), "integer class labels, got torch.float32"),
        (HALF, torch.tensor([0, 2]), r"lie in 0..1 for 2 classes, got values from 0 to 2"),
        (HALF, torch.tensor([0, -100]), "pass ignore_index"),
    ],
)
def test_bad_classification_inputs_are_named(probs: torch.Tensor, target: torch.Tensor, message: str) -> None:
    for function in (F.negative_log_likelihood, F.brier_score, F.brier_decomposition, F.calibration_error):
        with pytest.raises(MetricInputError, match=message):
            function(probs, target)


def test_one_hot_targets_are_refused_and_labels_of_their_own_are_not() -> None:
    """Both have the shape of probs; only one-hot targets sum to one wherever probs do."""
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "l3"}, "norm must be one of 'l1', 'l2', 'max', got 'l3'"),
        ({"binning": "log"}, "binning must be one of"),
        ({"kind": "all"}, "kind must be one of"),
        ({"n_bins": 0}, "n_bins must be a positive integer, got 0"),
        ({"kind": "class_wise"}, "num_classes .*class_wise"),
        ({"resolution": 100}, 'resolution is for binning="mass"'),
    ],
)
def test_bad_options_of_the_calibration_error(options: dict, message: str) -> None:
    with pytest.raises(MetricInputError, match=message):
        CalibrationError(**options)


def test_another_number_of_classes_than_announced() -> None:
    for metric in (CalibrationError(kind="class_wise", num_classes=3), BrierDecomposition(num_classes=3)):
        with pytest.raises(MetricInputError, match="probs has 2 classes, but num_classes is 3"):
            metric.update(HALF, LABELS)


@pytest.mark.parametrize(
    ("mean", "variance", "target", "message"),
    [
        (torch.zeros(2), torch.tensor([1.0, -1.0]), torch.zeros(2), "variance must be positive, got a minimum of -1"),
        (torch.zeros(2), torch.tensor([1.0, 0.0]), torch.zeros(2), "variance must be positive, got a minimum of 0"),
        (torch.zeros(2), torch.ones(2, 1), torch.zeros(2), r"must have one shape, got \[2\], \[2, 1\] and \[2\]"),
        (torch.tensor([0.0, torch.nan]), torch.ones(2), torch.zeros(2), "mean must be finite"),
        (torch.zeros(2), torch.ones(2), torch.tensor([0.0, torch.inf]), "target must be finite"),
    ],
)
def test_bad_regression_inputs_are_named(
    mean: torch.Tensor, variance: torch.Tensor, target: torch.Tensor, message: str
) -> None:
    for function in (
        F.gaussian_nll,
        F.gaussian_crps,
        F.interval_coverage,
        F.interval_width,
        F.regression_calibration_error,
    ):
        with pytest.raises(MetricInputError, match=message):
            function(mean, variance, target)


def test_bad_scores_and_labels_are_named() -> None:
    for function, score, label in ((F.ood_detection, "score", "is_ood"), (F.risk_coverage, "confidence", "correct")):
        with pytest.raises(MetricInputError, match=f"{score} holds NaN"):
            function(torch.tensor([torch.nan]), torch.tensor([True]))
        with pytest.raises(MetricInputError, match=f"{label} must be boolean"):
            function(torch.tensor([0.0]), torch.tensor([2]))
        with pytest.raises(MetricInputError, match=rf"{score} and {label} must have one shape, got \[1\] and \[2\]"):
            function(torch.tensor([0.0]), torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": 10}, "resolution and score_range belong together"),
        ({"score_range": (0.0, 1.0)}, "resolution and score_range belong together"),
        ({"resolution": 10, "score_range": (1.0, 1.0)}, "low < high"),
        ({"resolution": 0, "score_range": (0.0, 1.0)}, "resolution must be a positive integer"),
    ],
)
def test_bad_histogram_options(options: dict, message: str) -> None:
    with pytest.raises(MetricInputError, match=message):
        F.ood_detection(torch.zeros(2), torch.tensor([True, False]), **options)


def test_bad_levels() -> None:
    for level in (0.0, 1.0, 95):
        with pytest.raises(MetricInputError, match="level must lie strictly between 0 and 1"):
            F.interval_coverage(torch.zeros(1), torch.ones(1), torch.zeros(1), level=level)
    with pytest.raises(MetricInputError, match="n_bins must be an integer of at least 2"):
        F.regression_calibration_error(torch.zeros(1), torch.ones(1), torch.zeros(1), n_bins=1)
