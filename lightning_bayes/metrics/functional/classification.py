"""Scores and calibration of predicted class probabilities.

**Negative log-likelihood** in nats, the strictly proper log score of Gneiting & Raftery (2007). It takes probabilities,
since the average of a Bayesian model's probabilities has no logits. Probabilities are not clipped: a true class of
probability zero gives infinity.

    NLL = -(1/N) Σₙ log p(yₙ | xₙ)

**Brier score**, the squared error of a probability vector (Brier, 1950). The sum runs over all classes, as in Brier's
paper; for two classes it is twice the one-sided `(p - y)²` that scikit-learn reports by default.

    BS = (1/N) Σₙ Σ_c (p(c | xₙ) - 1[yₙ = c])²,  from 0 (sure and right) to 2 (sure and wrong)

**Brier decomposition** (Murphy, 1973). For one class, let bin k hold n_k of N forecasts p with mean p̄_k and outcome
rate ȳ_k, and let ȳ be the overall rate. Each term is summed over the classes, like the Brier score:

    BS = Σ_k (n_k/N) (p̄_k - ȳ_k)²      reliability  (0 is best: forecasts match outcome rates)
       - Σ_k (n_k/N) (ȳ_k - ȳ)²        resolution   (large is best: forecasts separate the cases)
       + ȳ (1 - ȳ)                      uncertainty  (a property of the data)
       + (1/N) Σ [(p - p̄_k)² - 2 (p - p̄_k)(y - ȳ_k)]   within_bin

The last term is zero when all forecasts in a bin are equal, which is Murphy's case; with it the identity is exact for
any bins (Stephenson, Coelho & Jolliffe, 2008).

**Calibration error**, the distance between confidence and accuracy. With n_k of N predictions in bin k, their mean
confidence conf_k and their accuracy acc_k:

    l1  (ECE)    Σ_k (n_k/N) |acc_k - conf_k|            Naeini et al. (2015), Guo et al. (2017, eq. 3)
    l2  (RMSCE)  √ Σ_k (n_k/N) (acc_k - conf_k)²         Hendrycks et al. (2019), Kumar et al. (2019)
    max (MCE)    max_k |acc_k - conf_k|, n_k > 0          Guo et al. (2017, eq. 5)

Bins have equal *width* on [0, 1], closed on the left, or equal *mass*: exactly N/K predictions each. Equal confidences
that straddle a border are split in proportion, so the result does not depend on the order of the data.
`kind="top_label"` takes the largest probability as confidence; `kind="class_wise"` bins each class's probability
against that class's indicator and averages over the classes (Nixon et al., 2019; the marginal calibration error of
Kumar et al., 2019).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_bayes.arguments import count, word
from lightning_bayes.metrics.functional.statistics import (
    MetricInputError,
    Norm,
    cell_sums,
    classification_inputs,
    equal_mass_sums,
    mean_compute,
    norm_of_gaps,
    sum_and_count,
    tie_sums,
)

Binning = Literal["width", "mass"]
Kind = Literal["top_label", "class_wise"]


def negative_log_likelihood(
    probs: Tensor, target: Tensor, ignore_index: int | None = None, validate_args: bool = True
) -> Tensor:
    """Mean negative log-likelihood of `target` `[B, ...]` under `probs` `[B, C, ...]`.

    >>> negative_log_likelihood(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))
    tensor(1.0397, dtype=torch.float64)
    """
    inputs = classification_inputs(probs, target, ignore_index, validate_args)
    return mean_compute(_negative_log_likelihood_update(*inputs))


def _negative_log_likelihood_update(probs: Tensor, target: Tensor) -> Tensor:
    return sum_and_count(-probs.gather(1, target[:, None]).log())  # [2]


def brier_score(probs: Tensor, target: Tensor, ignore_index: int | None = None, validate_args: bool = True) -> Tensor:
    """Mean Brier score of `probs` `[B, C, ...]` for `target` `[B, ...]`.

    >>> brier_score(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))
    tensor(0.8125, dtype=torch.float64)
    """
    return mean_compute(_brier_score_update(*classification_inputs(probs, target, ignore_index, validate_args)))


def _brier_score_update(probs: Tensor, target: Tensor) -> Tensor:
    return sum_and_count((probs - one_hot(target, probs.shape[1])).square().sum(1))  # [2]


def brier_decomposition(
    probs: Tensor, target: Tensor, n_bins: int = 15, ignore_index: int | None = None, validate_args: bool = True
) -> dict[str, Tensor]:
    """Reliability, resolution, uncertainty and the within-bin remainder of the Brier score.

    >>> parts = brier_decomposition(torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([0, 1, 1, 1]), n_bins=2)
    >>> {name: round(float(value), 4) for name, value in parts.items()}
    {'reliability': 0.125, 'resolution': 0.125, 'uncertainty': 0.375, 'within_bin': 0.0}
    """
    count("n_bins", n_bins, error=MetricInputError)
    inputs = classification_inputs(probs, target, ignore_index, validate_args)
    return _brier_decomposition_compute(_brier_decomposition_update(*inputs, n_bins))


def _brier_decomposition_update(p: Tensor, target: Tensor, n_bins: int) -> Tensor:
    """The sums of 1, p, y, p² and p·y per class and bin: `[C, n_bins, 5]`."""
    y = one_hot(target, p.shape[1]).to(p.dtype)  # [N, C]
    return cell_sums(p, torch.stack([torch.ones_like(p), p, y, p * p, p * y], dim=-1), n_bins)


def _brier_decomposition_compute(sums: Tensor) -> dict[str, Tensor]:
    n, p, y, pp, py = sums.unbind(-1)  # [C, n_bins] each
    total = n.sum(1, keepdim=True)  # [C, 1]
    rate = y.sum(1, keepdim=True) / total  # [C, 1]
    p_bar, y_bar = p / n.clamp(min=1), y / n.clamp(min=1)  # [C, n_bins]
    within = pp - n * p_bar.square() - 2 * (py - n * p_bar * y_bar)  # [C, n_bins]
    return {
        "reliability": (n * (p_bar - y_bar).square() / total).sum(),
        "resolution": (n * (y_bar - rate).square() / total).sum(),
        "uncertainty": (rate * (1 - rate)).sum(),
        "within_bin": (within / total).sum(),
    }


@dataclass(frozen=True)
class ReliabilityBins:
    """The bins of a reliability diagram, each field `[n_bins]`; confidence and accuracy are NaN in empty bins."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def calibration_error(
    probs: Tensor,
    target: Tensor,
    n_bins: int = 15,
    norm: Norm = "l1",
    binning: Binning = "width",
    kind: Kind = "top_label",
    ignore_index: int | None = None,
    validate_args: bool = True,
) -> Tensor:
    """Calibration error of `probs` `[B, C, ...]` for `target` `[B, ...]`.

    >>> probs, target = torch.tensor([0.95, 0.85, 0.25, 0.65]), torch.tensor([1, 1, 0, 0])
    >>> calibration_error(probs, target, n_bins=10)
    tensor(0.2750, dtype=torch.float64)
    >>> calibration_error(probs, target, n_bins=10, norm="max")
    tensor(0.6500, dtype=torch.float64)
    """
    check_calibration(n_bins, binning, kind, norm)
    hits = _confidence_and_hit(*classification_inputs(probs, target, ignore_index, validate_args), kind)
    return _calibration_error_compute(_bin_sums(hits, n_bins, binning), norm)


def reliability_bins(
    probs: Tensor,
    target: Tensor,
    n_bins: int = 15,
    binning: Binning = "width",
    kind: Kind = "top_label",
    ignore_index: int | None = None,
    validate_args: bool = True,
) -> ReliabilityBins:
    """Count, mean confidence and accuracy per bin; class-wise bins are pooled over the classes.

    >>> probs, target = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 0, 1])
    >>> bins = reliability_bins(probs, target, n_bins=2, binning="mass")
    >>> bins.count.tolist(), bins.accuracy.tolist()
    ([2.0, 2.0], [0.5, 1.0])
    """
    check_calibration(n_bins, binning, kind)
    hits = _confidence_and_hit(*classification_inputs(probs, target, ignore_index, validate_args), kind)
    return _reliability_bins(_bin_sums(hits, n_bins, binning))


def check_calibration(n_bins: int, binning: Binning, kind: Kind, norm: Norm = "l1") -> None:
    count("n_bins", n_bins, error=MetricInputError)
    word("binning", binning, get_args(Binning), MetricInputError)
    word("kind", kind, get_args(Kind), MetricInputError)
    word("norm", norm, get_args(Norm), MetricInputError)


def _confidence_and_hit(probs: Tensor, target: Tensor, kind: Kind) -> Tensor:
    """Confidence and hit (0 or 1) of each prediction: `[N, K, 2]`, with one column (`K = 1`) for "top_label", and one
    column per class (`K = C`) for "class_wise"."""
    if kind == "class_wise":
        return torch.stack([probs, one_hot(target, probs.shape[1]).to(probs.dtype)], dim=-1)  # [N, C, 2]
    confidence, label = probs.max(1)  # [N], [N]
    return torch.stack([confidence, (label == target).to(probs.dtype)], dim=-1)[:, None]  # [N, 1, 2]


def _bin_sums(hits: Tensor, n: int, binning: Binning) -> Tensor:
    """Sums of count, confidence and hits over `n` bins: `[K, n, 3]`."""
    values = torch.cat([torch.ones_like(hits[..., :1]), hits], dim=-1)  # [N, K, 3] count, confidence, hit
    if binning == "width":
        return cell_sums(hits[..., 0], values, n)
    return _equal_mass_bins((tie_sums(column[:, 1], column) for column in values.unbind(1)), n)


def _equal_mass_bins(columns: Iterable[Tensor], n: int) -> Tensor:
    """The sums over bins of equal mass, from the ordered sums `[G, 3]` of each column: `[K, n, 3]`."""
    return torch.stack([equal_mass_sums(column, n) for column in columns])


def _calibration_error_compute(sums: Tensor, norm: Norm) -> Tensor:
    n, confidence, hit = sums.reshape(-1, 3).unbind(-1)  # [K·n_bins] each
    # Over K columns the counts add up to K·N, so the weighted mean over all bins is also the average over the classes.
    weight = n / n.sum()  # [K·n_bins]; NaN if nothing was counted
    gap = torch.where(n > 0, (hit - confidence).abs() / n, 0)  # [K·n_bins]
    return norm_of_gaps(gap, weight, norm)


def _reliability_bins(sums: Tensor) -> ReliabilityBins:
    n, confidence, hit = sums.sum(0).unbind(-1)  # [n_bins] each
    return ReliabilityBins(n, confidence / n, hit / n)
