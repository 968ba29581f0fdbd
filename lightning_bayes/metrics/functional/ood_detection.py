"""Out-of-distribution detection: how well a score tells inputs of another kind from inputs like the training data.

Larger scores mean "more out-of-distribution". The score may be any real number, of any range; only its order matters.

    auroc     P(s_out > s_in) + ½ P(s_out = s_in)
    aupr_out  average precision with OOD as the positive class, ranked by s
    aupr_in   average precision with in-distribution as the positive class, ranked by -s
    fpr95     in-distribution is the positive class (Liang, Li & Srikant, 2018): with τ the smallest observed score such
              that at least 95 % of the in-distribution inputs have s ≤ τ, the share of OOD inputs that have s ≤ τ too

Average precision is Σ_τ precision(τ) Δrecall(τ) over distinct thresholds, without interpolation. Equal scores are one
threshold: they are accepted together or not at all.

torchmetrics' curves are not called here, because they squash scores through a sigmoid whenever a batch leaves [0, 1].
"""

import math

import torch
from torch import Tensor

from lightning_bayes.arguments import format_value
from lightning_bayes.metrics.functional.binning import cell_sums, running_sum, tie_sums
from lightning_bayes.metrics.functional.inputs import MetricInputError, check_count, score_inputs


def ood_detection(
    score: Tensor,
    is_ood: Tensor,
    resolution: int | None = None,
    score_range: tuple[float, float] | None = None,
    validate_args: bool = True,
) -> dict[str, Tensor]:
    """AUROC, AUPR with either class as the positive one, and FPR at 95 % TPR. All NaN unless both classes are present.

    With `resolution` the scores are first put into that many equal cells of `score_range`.

    >>> result = ood_detection(torch.tensor([-2.0, 0.0, 5.0, 40.0]), torch.tensor([False, False, True, False]))
    >>> {name: round(float(value), 4) for name, value in result.items()}
    {'auroc': 0.6667, 'aupr_in': 0.9167, 'aupr_out': 0.5, 'fpr95': 1.0}
    """
    check_histogram(resolution, score_range)
    rows = _ood_rows(score, is_ood, validate_args)
    if resolution is None or score_range is None:
        return _ood_detection_compute(_exact_counts(rows))
    return _ood_detection_compute(_histogram_counts(rows, resolution, score_range))


def check_histogram(resolution: int | None, score_range: tuple[float, float] | None) -> None:
    """A histogram needs both a resolution and a range; the exact mode needs neither."""
    if (resolution is None) != (score_range is None):
        raise MetricInputError(
            "resolution and score_range belong together: give both for a histogram, neither for the exact result."
        )
    if resolution is not None and score_range is not None:
        check_count("resolution", resolution)
        try:
            low, high = (float(border) for border in score_range)
        except (TypeError, ValueError):
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise MetricInputError(f"score_range must be (low, high) with low < high, got {format_value(score_range)}.")


def _ood_rows(score: Tensor, is_ood: Tensor, validate: bool) -> Tensor:
    return torch.stack(score_inputs(score, is_ood, ("score", "is_ood"), validate), dim=-1)  # [N, 2] score, is_ood


def _in_and_out(is_ood: Tensor) -> Tensor:
    return torch.stack([1 - is_ood, is_ood], dim=-1)  # [..., 2]


def _exact_counts(rows: Tensor) -> Tensor:
    """Number of in- and out-of-distribution inputs at each distinct score, ascending: `[G, 2]`."""
    return tie_sums(rows[:, 0], _in_and_out(rows[:, 1]))


def _histogram_counts(rows: Tensor, resolution: int, score_range: tuple[float, float]) -> Tensor:
    """The same numbers for each cell of a histogram: `[resolution, 2]`."""
    return cell_sums(rows[:, :1], _in_and_out(rows[:, 1:]), resolution, *score_range)[0]


def _ood_detection_compute(counts: Tensor) -> dict[str, Tensor]:
    counts = counts[counts.sum(1) > 0]  # [G, 2]
    n_in, n_out = counts.sum(0)
    if n_in == 0 or n_out == 0:
        return {name: counts.new_tensor(float("nan")) for name in ("auroc", "aupr_in", "aupr_out", "fpr95")}
    inside, outside = counts.unbind(1)  # [G] each
    below = running_sum(inside) - inside  # [G] in-distribution inputs of strictly smaller score
    # cumsum / n is correctly rounded, so 19 of 20 counts as 95 %; comparing with 0.95 · n might not.
    accepts_95 = running_sum(inside) / n_in >= 0.95  # [G]
    return {
        "auroc": (outside * (below + 0.5 * inside)).sum() / (n_in * n_out),
        "aupr_in": _average_precision(inside, outside),
        "aupr_out": _average_precision(outside.flip(0), inside.flip(0)),
        "fpr95": (running_sum(outside) / n_out)[accepts_95][0],
    }


def _average_precision(positive: Tensor, negative: Tensor) -> Tensor:
    """Average precision from counts `[G]` in the order in which a falling threshold accepts them."""
    precision = running_sum(positive) / running_sum(positive + negative)  # [G]
    return (precision * positive).sum() / positive.sum()
