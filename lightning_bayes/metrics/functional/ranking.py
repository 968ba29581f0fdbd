"""Metrics of a ranking of examples by a real-valued score: OOD detection and selective prediction.

Only the order of the scores matters, so they may have any range. torchmetrics' curves are not used, because they apply
a sigmoid to every batch whose scores leave [0, 1].

**Out-of-distribution detection.** Larger scores mean "more out-of-distribution".

    auroc     P(s_out > s_in) + ½ P(s_out = s_in)
    aupr_out  average precision with OOD as the positive class, ranked by s
    aupr_in   average precision with in-distribution as the positive class, ranked by -s
    fpr95     in-distribution is the positive class (Liang, Li & Srikant, 2018): with τ the smallest observed score such
              that at least 95 % of the in-distribution inputs have s ≤ τ, the share of OOD inputs with s ≤ τ

Average precision is Σ_τ precision(τ) Δrecall(τ) over distinct thresholds, without interpolation. Equal scores share one
threshold.

**Risk–coverage.** Sort by falling confidence and keep the i most confident of N predictions, a coverage of i/N:

    risk(i) = (errors among the i most confident) / i
    AURC    = (1/N) Σᵢ risk(i)                    Geifman & El-Yaniv (2017); Geifman, Uziel & El-Yaniv (2019)

Predictions of equal confidence count with their group's error rate, which gives the expected risk over all their
orders.

**Threshold for a risk.** Of `m` examples keep the `j` with confidence above `θ`; `e` of them are wrong. The error rate
`R(θ) = P(wrong | confidence > θ)` of new examples is at most `r` with probability `1 − δ` if

    P(Binomial(j, r) ≤ e) ≤ δ,

that is, if the upper bound of Clopper and Pearson (1934) is at most `r`; Geifman & El-Yaniv (2017), "Selective
classification for deep neural networks", use this bound. The search tries `K = ⌈√m/2⌉` thresholds, each with error
probability `δ/K`. This is valid however the tries depend on each other. The tries are ranks, fixed before any
confidence is seen: each try keeps the `J` most confident examples, with `J` in even steps from the smallest number that
could pass (`(1 − r)^J ≤ δ/K`) to all `m`. Given the confidence at a rank, the examples above it are an independent
sample of all examples above it, so the bound is exact. Ties at that confidence are not kept.

**Threshold for a coverage** `c`: the threshold that keeps `⌈cm⌉` of the sample. With `δ`, it keeps new examples with
probability at least `c`, by the smallest rank `i` with `P(Binomial(m, c) ≥ i) ≤ δ` (Wilks 1941, tolerance limits).
"""

import math

import torch
from torch import Tensor

from lightning_bayes.arguments import between, count, format_value
from lightning_bayes.metrics.functional.statistics import (
    MetricInputError,
    cell_sums,
    flat_score,
    running_sum,
    score_inputs,
    tie_sums,
)


def ood_detection(
    score: Tensor,
    is_ood: Tensor,
    resolution: int | None = None,
    score_range: tuple[float, float] | None = None,
    validate_args: bool = True,
) -> dict[str, Tensor]:
    """AUROC, AUPR with either class as the positive one, and FPR at 95 % TPR. All NaN unless both classes are present.

    With `resolution`, the scores are first put into that many equal cells of `score_range`.

    >>> result = ood_detection(torch.tensor([-2.0, 0.0, 5.0, 40.0]), torch.tensor([False, False, True, False]))
    >>> {name: round(float(value), 4) for name, value in result.items()}
    {'auroc': 0.6667, 'aupr_in': 0.9167, 'aupr_out': 0.5, 'fpr95': 1.0}
    """
    check_histogram(resolution, score_range)
    return _ood_detection_compute(_ood_counts(_ood_rows(score, is_ood, validate_args), resolution, score_range))


def check_histogram(resolution: int | None, score_range: tuple[float, float] | None) -> None:
    """A histogram needs both a resolution and a range; the exact mode needs neither."""
    if (resolution is None) != (score_range is None):
        raise MetricInputError(
            "resolution and score_range belong together: pass both for a histogram, or neither for the exact result."
        )
    if resolution is not None and score_range is not None:
        count("resolution", resolution, error=MetricInputError)
        try:
            low, high = (float(border) for border in score_range)
        except (TypeError, ValueError):
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise MetricInputError(f"score_range must be (low, high) with low < high, got {format_value(score_range)}.")


def _ood_rows(score: Tensor, is_ood: Tensor, validate: bool) -> Tensor:
    return torch.stack(score_inputs(score, is_ood, ("score", "is_ood"), validate), dim=-1)  # [N, 2] score, is_ood


def _ood_counts(rows: Tensor, resolution: int | None = None, score_range: tuple[float, float] | None = None) -> Tensor:
    """Numbers of in- and out-of-distribution inputs in ascending order of the score: per distinct score `[G, 2]`, or
    per cell of a histogram `[resolution, 2]`."""
    score, is_ood = rows.unbind(1)  # [N] each
    classes = torch.stack([1 - is_ood, is_ood], dim=-1)  # [N, 2]
    if resolution is None or score_range is None:
        return tie_sums(score, classes)
    return cell_sums(score[:, None], classes[:, None], resolution, *score_range)[0]


def _ood_detection_compute(counts: Tensor) -> dict[str, Tensor]:
    counts = counts[counts.sum(1) > 0]  # [G, 2]
    n_in, n_out = counts.sum(0)
    if n_in == 0 or n_out == 0:
        return {name: counts.new_tensor(math.nan) for name in ("auroc", "aupr_in", "aupr_out", "fpr95")}
    inside, outside = counts.unbind(1)  # [G] each
    below = running_sum(inside) - inside  # [G] in-distribution inputs with a strictly smaller score
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


def risk_coverage(confidence: Tensor, correct: Tensor, validate_args: bool = True) -> Tensor:
    """Area under the risk–coverage curve; predictions with larger `confidence` (any real number) are kept first.

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
    size = ties[:, 0]  # [G]
    error = (ties[:, 1] / size).repeat_interleave(size.long())  # [N] expected error at each rank
    rank = torch.arange(1, len(error) + 1, dtype=error.dtype, device=error.device)  # [N]
    return rank / len(error), running_sum(error) / rank


def _risk_coverage_compute(rows: Tensor) -> Tensor:
    return _risk_coverage_curve(rows)[1].mean()  # NaN if nothing was counted


def threshold_for_risk(
    confidence: Tensor, correct: Tensor, risk: float, delta: float = 0.05, validate_args: bool = True
) -> Tensor:
    """The lowest confidence such that at most a share `risk` of the predictions *above* it is wrong, with probability
    `1 − delta` over the examples passed here, which must not have been used before.

    Keep `confidence > threshold`. Minus infinity keeps all predictions; infinity, which keeps none, means that no
    threshold can be guaranteed.

    >>> confidence = torch.linspace(0, 1, 1000)
    >>> threshold_for_risk(confidence, confidence > 0.2, risk=0.1)
    tensor(0.1882, dtype=torch.float64)
    """
    return _risk_threshold(_risk_coverage_rows(confidence, correct, validate_args), risk, delta)


def threshold_for_coverage(
    confidence: Tensor, coverage: float, delta: float | None = None, validate_args: bool = True
) -> Tensor:
    """The highest confidence such that at least a share `coverage` of the predictions is *above* it: of the predictions
    passed here or, with `delta`, of all predictions with probability `1 − delta`. Minus infinity keeps all predictions.
    Any score can serve as confidence if it is larger for predictions to keep: with `novelty_p` as the score, known
    inputs are kept.

    >>> threshold_for_coverage(torch.tensor([0.9, 0.4, 0.8, 0.6]), coverage=0.5)
    tensor(0.6000, dtype=torch.float64)
    """
    return _coverage_threshold(flat_score("confidence", confidence, validate_args), coverage, delta)


def _risk_threshold(rows: Tensor, risk: float, delta: float) -> Tensor:
    between("risk", risk, 0, 1, MetricInputError, borders=False)
    between("delta", delta, 0, 1, MetricInputError, borders=False)
    confidence, error = rows.unbind(1)  # [N] each
    m = len(confidence)
    if m == 0:
        return confidence.new_tensor(math.nan)
    confidence, order = confidence.sort(descending=True)
    errors = error[order].cpu().cumsum(0)  # [N]
    kept = _tries(m, risk, delta)
    for j in reversed(kept):
        θ = confidence[j] if j < m else confidence.new_tensor(-math.inf)
        # Examples with exactly this confidence are not kept
        above = j if j == m or confidence[j - 1] > θ else int((confidence > θ).sum())
        if above and binomial_cdf(above, risk)[int(errors[above - 1])] <= delta / len(kept):
            return θ
    return confidence.new_tensor(math.inf)


def _coverage_threshold(confidence: Tensor, coverage: float, delta: float | None) -> Tensor:
    between("coverage", coverage, 0, 1, MetricInputError)
    if coverage == 0:
        raise MetricInputError("coverage must be positive: a threshold of infinity keeps nothing")
    m = len(confidence)
    if m == 0:
        return confidence.new_tensor(math.nan)
    if delta is None:
        rank = math.ceil(coverage * m - 1e-9)
    else:
        between("delta", delta, 0, 1, MetricInputError, borders=False)
        at_least = 1 - binomial_cdf(m, coverage)  # P(Binomial(m, c) ≥ i), i = 1..m + 1
        rank = int((at_least <= delta).nonzero()[0]) + 1
    if rank > m:
        return confidence.new_tensor(-math.inf)
    below = confidence[confidence < confidence.sort(descending=True).values[rank - 1]]
    return below.amax() if len(below) else confidence.new_tensor(-math.inf)


def _tries(m: int, risk: float, delta: float) -> list[int]:
    """The numbers of examples to keep in each try, in ascending order. They do not depend on the confidences."""
    K = math.ceil(m**0.5 / 2)
    fewest = math.ceil(math.log(delta / K) / math.log1p(-risk))
    if fewest <= m:
        return sorted({round(fewest + (m - fewest) * k / max(K - 1, 1)) for k in range(K)} | {m})[-K:]
    return [m] if m * math.log1p(-risk) <= math.log(delta) else []  # a single try has all of δ


def binomial_cdf(n: int, p: float) -> Tensor:
    """`P(Binomial(n, p) ≤ k)` for k = 0..n, in float64 on the CPU.  # [n + 1]"""
    k = torch.arange(n + 1, dtype=torch.float64, device="cpu")
    if p == 1:
        return (k == n).double()
    log_choose = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (log_choose + k * math.log(p) + (n - k) * math.log1p(-p)).logcumsumexp(0).exp().clamp(max=1)
