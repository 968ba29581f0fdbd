"""Risk–coverage: the error rate among the predictions kept, as the least confident are handed to someone else.

Sort by falling confidence. At coverage i/N the i most confident predictions are kept, and

    risk(i) = (errors among the i most confident) / i
    AURC    = (1/N) Σᵢ risk(i)                    Geifman & El-Yaniv (2017); Geifman, Uziel & El-Yaniv (2019)

Predictions of equal confidence have no order. Each counts as its group's error rate, which gives the risk expected over
all their orders, so the result does not depend on the order of the data.
"""

import torch
from torch import Tensor

from lightning_bayes.metrics.functional.binning import running_sum, tie_sums
from lightning_bayes.metrics.functional.inputs import score_inputs


def risk_coverage(confidence: Tensor, correct: Tensor, validate_args: bool = True) -> Tensor:
    """Area under the risk–coverage curve; larger `confidence` (any real number) is kept first.

    >>> risk_coverage(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([True, True, False, True]))
    tensor(0.1458, dtype=torch.float64)
    """
    return _risk_coverage_compute(_risk_coverage_rows(confidence, correct, validate_args))


def risk_coverage_curve(confidence: Tensor, correct: Tensor, validate_args: bool = True) -> tuple[Tensor, Tensor]:
    """Coverage i/N and the risk at it, for i = 1..N, both `[N]`.

    >>> risk_coverage_curve(torch.tensor([0.9, 0.8, 0.8]), torch.tensor([True, True, False]))[1]
    tensor([0.0000, 0.2500, 0.3333], dtype=torch.float64)
    """
    return _risk_coverage_curve(_risk_coverage_rows(confidence, correct, validate_args))


def _risk_coverage_rows(confidence: Tensor, correct: Tensor, validate: bool) -> Tensor:
    confidence, correct = score_inputs(confidence, correct, ("confidence", "correct"), validate)
    return torch.stack([confidence, 1 - correct], dim=-1)  # [N, 2] confidence, error


def _risk_coverage_curve(rows: Tensor) -> tuple[Tensor, Tensor]:
    confidence, error = rows.unbind(1)  # [N] each
    ties = tie_sums(-confidence, torch.stack([torch.ones_like(error), error], dim=-1))  # [G, 2] count, errors
    count = ties[:, 0]  # [G]
    error = (ties[:, 1] / count).repeat_interleave(count.long())  # [N] expected error at each rank
    rank = torch.arange(1, len(error) + 1, dtype=error.dtype, device=error.device)  # [N]
    return rank / len(error), running_sum(error) / rank


def _risk_coverage_compute(rows: Tensor) -> Tensor:
    return _risk_coverage_curve(rows)[1].mean()  # NaN where nothing was counted
