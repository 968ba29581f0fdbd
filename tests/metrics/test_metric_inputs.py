"""A metric never guesses: every input it cannot use is refused in one sentence that says what to give."""

import pytest
import torch

from lightning_bayes.metrics import BrierScore, CalibrationError, MetricInputError
from lightning_bayes.metrics import functional as F

HALF = torch.full((2, 2), 0.5)
LABELS = torch.tensor([0, 1])


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
