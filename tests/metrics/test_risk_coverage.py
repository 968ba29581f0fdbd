"""Risk–coverage against the definition, and ties against all their orders."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_bayes.metrics import functional as F


def area_in_order(correct: np.ndarray) -> float:
    """AURC of predictions already sorted by falling confidence."""
    return float(np.mean([(~correct[:i]).mean() for i in range(1, len(correct) + 1)]))


def case(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return 5 * torch.randn(n, generator=generator), torch.rand(n, generator=generator) < 0.7


def test_the_area_is_the_mean_selective_risk() -> None:
    confidence, correct = case(50)
    expected = area_in_order(correct[confidence.argsort(descending=True)].numpy())
    assert float(F.risk_coverage(confidence, correct)) == pytest.approx(expected, rel=1e-12)


def test_ties_count_as_the_mean_over_all_their_orders() -> None:
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.5, 0.1])
    correct = torch.tensor([True, False, True, True, False, False])
    orders = [area_in_order(correct[[0, *middle, 5]].numpy()) for middle in permutations([1, 2, 3, 4])]
    assert float(F.risk_coverage(confidence, correct)) == pytest.approx(np.mean(orders), rel=1e-12)


def test_the_curve_ends_at_the_error_rate() -> None:
    confidence, correct = case(50)
    coverage, risk = F.risk_coverage_curve(confidence, correct)
    torch.testing.assert_close(coverage, torch.arange(1, 51, dtype=torch.float64) / 50)
    assert float(risk[-1]) == pytest.approx(1 - float(correct.double().mean()))


def test_a_constant_confidence_has_the_error_rate_as_its_area() -> None:
    _, correct = case(50)
    assert float(F.risk_coverage(torch.zeros(50), correct)) == pytest.approx(1 - float(correct.double().mean()))
