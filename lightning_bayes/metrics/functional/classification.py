"""Negative log-likelihood of a categorical predictive, in nats.

    NLL = -(1/N) Σₙ log p(yₙ | xₙ)

The log score of Gneiting & Raftery (2007), strictly proper. It takes the predictive's probabilities, since the average
of a Bayesian model's probabilities has no logits. Nothing is clipped: a true class of probability zero costs infinity.

Brier score, the squared error of a probability vector (Brier, 1950).

    BS = (1/N) Σₙ Σ_c (p(c | xₙ) - 1[yₙ = c])²,  from 0 (sure and right) to 2 (sure and wrong)

The sum runs over all classes, as in Brier's paper. For two classes this is twice the one-sided `(p - y)²` that
scikit-learn reports by default.

The Brier score taken apart: reliability, resolution, uncertainty (Murphy, 1973).

For one class, let bin k hold n_k of N forecasts p with mean p̄_k and outcome rate ȳ_k, and let ȳ be the overall rate:

    BS = Σ_k (n_k/N) (p̄_k - ȳ_k)²      reliability  (0 is best: forecasts mean what they say)
       - Σ_k (n_k/N) (ȳ_k - ȳ)²        resolution   (large is best: forecasts tell cases apart)
       + ȳ (1 - ȳ)                      uncertainty  (of the data alone)
       + (1/N) Σ [(p - p̄_k)² - 2 (p - p̄_k)(y - ȳ_k)]   within_bin

The last term is zero when all forecasts in a bin are equal, Murphy's case; with it the identity holds exactly for any
bins (Stephenson, Coelho & Jolliffe, 2008). Each term is summed over the classes, like the Brier score.

Calibration error: how far confidence is from accuracy, over bins of the confidence.

With n_k of N predictions in bin k, their mean confidence conf_k and their accuracy acc_k:

    l1  (ECE)    Σ_k (n_k/N) |acc_k - conf_k|            Naeini et al. (2015), Guo et al. (2017, eq. 3)
    l2  (RMSCE)  √ Σ_k (n_k/N) (acc_k - conf_k)²         Hendrycks et al. (2019), Kumar et al. (2019)
    max (MCE)    max_k |acc_k - conf_k|, n_k > 0          Guo et al. (2017, eq. 5)

Bins are of equal *width* on [0, 1], closed on the left, or of equal *mass*: exactly N/K predictions each, where equal
confidences that straddle a border are shared out in proportion, so that order never matters. `kind="top_label"` takes
the largest probability as confidence; `kind="class_wise"` bins each class's probability against its own indicator and
averages over the classes (Nixon et al., 2019; the marginal calibration error of Kumar et al., 2019).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_bayes.metrics.functional.binning import cell_sums, equal_mass_sums, tie_sums
from lightning_bayes.metrics.functional.inputs import (
    check_choice,
    check_count,
    classification_inputs,
    mean_compute,
    sum_and_count,
)


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


def brier_decomposition(
    probs: Tensor, target: Tensor, n_bins: int = 15, ignore_index: int | None = None, validate_args: bool = True
) -> dict[str, Tensor]:
    """Reliability, resolution, uncertainty and the within-bin remainder of the Brier score.

    >>> import torch
    >>> parts = brier_decomposition(torch.tensor([0.25, 0.25, 0.75, 0.75]), torch.tensor([0, 1, 1, 1]), n_bins=2)
    >>> {name: round(float(value), 4) for name, value in parts.items()}
    {'reliability': 0.125, 'resolution': 0.125, 'uncertainty': 0.375, 'within_bin': 0.0}
    """
    check_count("n_bins", n_bins)
    return _brier_decomposition_compute(_brier_decomposition_update(probs, target, n_bins, ignore_index, validate_args))


def _brier_decomposition_update(
    probs: Tensor, target: Tensor, n_bins: int, ignore_index: int | None, validate: bool
) -> Tensor:
    """Per class and bin, the sums of 1, p, y, p² and p·y: `[C, n_bins, 5]`."""
    p, target = classification_inputs(probs, target, ignore_index, validate)  # [N, C], [N]
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


Norm = Literal["l1", "l2", "max"]
Binning = Literal["width", "mass"]
Kind = Literal["top_label", "class_wise"]


@dataclass(frozen=True)
class ReliabilityBins:
    """What a reliability diagram shows, per bin `[n_bins]`; confidence and accuracy are NaN in an empty bin."""

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
    check_choice("norm", norm, ("l1", "l2", "max"))
    sums = _binned(probs, target, n_bins, binning, kind, ignore_index, validate_args)
    return _calibration_error_compute(sums, norm)


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
    return _reliability_bins(_binned(probs, target, n_bins, binning, kind, ignore_index, validate_args))


def _binned(
    probs: Tensor,
    target: Tensor,
    n_bins: int,
    binning: Binning,
    kind: Kind,
    ignore_index: int | None,
    validate: bool,
) -> Tensor:
    check_count("n_bins", n_bins)
    check_choice("binning", binning, ("width", "mass"))
    check_choice("kind", kind, ("top_label", "class_wise"))
    hits = _confidence_and_hit(probs, target, kind, ignore_index, validate)
    return _width_sums(hits, n_bins) if binning == "width" else _exact_mass_sums(hits, n_bins)


def _confidence_and_hit(probs: Tensor, target: Tensor, kind: Kind, ignore_index: int | None, validate: bool) -> Tensor:
    """Confidence and hit (0 or 1) of each prediction, top-label in one column, class-wise in C: `[N, K, 2]`."""
    probs, target = classification_inputs(probs, target, ignore_index, validate)
    if kind == "class_wise":
        return torch.stack([probs, one_hot(target, probs.shape[1]).to(probs.dtype)], dim=-1)  # [N, C, 2]
    confidence, label = probs.max(1)  # [N], [N]
    return torch.stack([confidence, (label == target).to(probs.dtype)], dim=-1)[:, None]  # [N, 1, 2]


def _with_count(hits: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(hits[..., :1]), hits], dim=-1)  # [..., 3] count, confidence, hit


def _width_sums(hits: Tensor, n: int) -> Tensor:
    """Sums of count, confidence and hits over cells of equal width: `[K, n, 3]`."""
    return cell_sums(hits[..., 0], _with_count(hits), n)


def _exact_mass_sums(hits: Tensor, n: int) -> Tensor:
    """The same sums over bins of equal mass, from all confidences: `[K, n, 3]`."""
    return torch.stack([equal_mass_sums(tie_sums(column[:, 0], _with_count(column)), n) for column in hits.unbind(1)])


def _merged_mass_sums(cells: Tensor, n: int) -> Tensor:
    """The same sums over bins of equal mass, from the cells of a fine histogram `[K, resolution, 3]`."""
    return torch.stack([equal_mass_sums(column, n) for column in cells])


def _calibration_error_compute(sums: Tensor, norm: Norm) -> Tensor:
    count, confidence, hit = sums.reshape(-1, 3).unbind(-1)  # [K·n] each
    # Over K columns the counts add up to K·N, so a plain weighted mean over all bins averages over the classes too.
    weight = count / count.sum()  # [K·n]; NaN, and so is the result, where nothing was counted
    gap = torch.where(count > 0, (hit - confidence).abs() / count, 0)  # [K·n]
    if norm == "l1":
        return (weight * gap).sum()
    if norm == "l2":
        return (weight * gap.square()).sum().sqrt()
    return torch.where(weight.isnan(), weight, gap).max()


def _reliability_bins(sums: Tensor) -> ReliabilityBins:
    count, confidence, hit = sums.sum(0).unbind(-1)  # [n] each
    return ReliabilityBins(count, confidence / count, hit / count)
