"""Negative log-likelihood of a categorical predictive, in nats.

    NLL = -(1/N) Σₙ log p(yₙ | xₙ)

The log score of Gneiting & Raftery (2007), strictly proper. It takes the predictive's probabilities, since the average
of a Bayesian model's probabilities has no logits. Nothing is clipped: a true class of probability zero costs infinity.
"""

from torch import Tensor

from lightning_bayes.metrics.functional.inputs import classification_inputs
from lightning_bayes.metrics.functional.mean import mean_compute, sum_and_count


def negative_log_likelihood(
    probs: Tensor, target: Tensor, ignore_index: int | None = None, validate_args: bool = True
) -> Tensor:
    """Mean negative log-likelihood of `target` `[B, ...]` under `probs` `[B, C, ...]`.

    >>> import torch
    >>> negative_log_likelihood(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))
    tensor(1.0397, dtype=torch.float64)
    """
    return mean_compute(_negative_log_likelihood_update(probs, target, ignore_index, validate_args))


def _negative_log_likelihood_update(probs: Tensor, target: Tensor, ignore_index: int | None, validate: bool) -> Tensor:
    probs, target = classification_inputs(probs, target, ignore_index, validate)
    return sum_and_count(-probs.gather(1, target[:, None]).log())  # [2]
