"""A metric never guesses: every input it cannot use is refused in one sentence that says what to give."""

import pytest
import torch

from lightning_bayes.metrics import BrierScore, MetricInputError
from lightning_bayes.metrics import functional as F

HALF = torch.full((2, 2), 0.5)
LABELS = torch.tensor([0, 1])


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
