"""Brier score, the squared error of a probability vector (Brier, 1950).

    BS = (1/N) Σₙ Σ_c (p(c | xₙ) - 1[yₙ = c])²,  from 0 (sure and right) to 2 (sure and wrong)

The sum runs over all classes, as in Brier's paper. For two classes this is twice the one-sided `(p - y)²` that
scikit-learn reports by default.
"""

from torch import Tensor
from torch.nn.functional import one_hot

from lightning_bayes.metrics.functional.inputs import classification_inputs
from lightning_bayes.metrics.functional.mean import mean_compute, sum_and_count


def brier_score(probs: Tensor, target: Tensor, ignore_index: int | None = None, validate_args: bool = True) -> Tensor:
    """Mean Brier score of `probs` `[B, C, ...]` for `target` `[B, ...]`.

    >>> import torch
    >>> brier_score(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))
    tensor(0.8125, dtype=torch.float64)
    """
    return mean_compute(_brier_score_update(probs, target, ignore_index, validate_args))


def _brier_score_update(probs: Tensor, target: Tensor, ignore_index: int | None, validate: bool) -> Tensor:
    probs, target = classification_inputs(probs, target, ignore_index, validate)
    return sum_and_count((probs - one_hot(target, probs.shape[1])).square().sum(1))  # [2]
