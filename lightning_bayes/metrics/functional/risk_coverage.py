"""Risk–coverage: the error rate among the predictions kept, as the least confident are handed to someone else.

Sort by falling confidence. At coverage i/N the i most confident predictions are kept, and

    risk(i) = (errors among the i most confident) / i
    AURC    = (1/N) Σᵢ risk(i)                    Geifman & El-Yaniv (2017); Geifman, Uziel & El-Yaniv (2019)

Predictions of equal confidence have no order. Each counts as its group's error rate, which gives the risk expected over
all their orders, so the result does not depend on the order of the data.

Thresholds of confidence: above them a prediction is kept, all others are handed to someone else.

**For a risk.** Of `m` examples keep the `j` whose confidence is above `θ`; `e` of them are wrong. The error rate
`R(θ) = P(wrong | confidence > θ)` of new examples is at most `r` with probability `1 − δ` if

    P(Binomial(j, r) ≤ e) ≤ δ,

that is, if Clopper and Pearson's upper bound (1934) is at most `r`. Geifman & El-Yaniv (2017), "Selective
classification for deep neural networks", use this bound. The search for a threshold has to be paid for: `K = ⌈√m/2⌉`
are tried, each at `δ/K`, which holds however the tries depend on each other. The tries are ranks, chosen before any
confidence is seen: `J` examples kept, in even steps from the fewest that could pass (`(1 − r)^J ≤ δ/K`) to all. Given
the value of the confidence at a rank, what lies above it is an independent sample of all that does, so that the bound
is exact. Ties at that value are not kept.

**For a coverage** `c`, the threshold that keeps `⌈cm⌉` of the sample. With `δ`, new examples are kept with probability
`c` at least, for the smallest rank `i` with `P(Binomial(m, c) ≥ i) ≤ δ` (Wilks 1941, tolerance limits).
"""

import math

import torch
from torch import Tensor

from lightning_bayes.arguments import between
from lightning_bayes.metrics.functional.binning import running_sum, tie_sums
from lightning_bayes.metrics.functional.inputs import MetricInputError, check_tensors, score_inputs


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


def threshold_for_risk(
    confidence: Tensor, correct: Tensor, risk: float, delta: float = 0.05, validate_args: bool = True
) -> Tensor:
    """The lowest confidence such that of the predictions *above* it at most a share `risk` is wrong, with probability
    `1 − delta` over the examples given here, which must not have been used before.

    Keep `confidence > threshold`: minus infinity keeps all, and infinity, where no threshold can be promised, nothing.

    >>> confidence = torch.linspace(0, 1, 1000)
    >>> threshold_for_risk(confidence, confidence > 0.2, risk=0.1)
    tensor(0.1882, dtype=torch.float64)
    """
    confidence, correct = score_inputs(confidence, correct, ("confidence", "correct"), validate_args)
    return risk_threshold(confidence, 1 - correct, risk, delta)


def threshold_for_coverage(
    confidence: Tensor, coverage: float, delta: float | None = None, validate_args: bool = True
) -> Tensor:
    """The highest confidence such that at least a share `coverage` of the predictions is *above* it: of those given
    here, or, with `delta`, of all, with probability `1 − delta`. Minus infinity keeps all.

    >>> threshold_for_coverage(torch.tensor([0.9, 0.4, 0.8, 0.6]), coverage=0.5)
    tensor(0.6000, dtype=torch.float64)
    """
    check_tensors(confidence=confidence)
    nothing = torch.zeros_like(confidence, dtype=torch.bool)
    confidence, _ = score_inputs(confidence, nothing, ("confidence", "correct"), validate_args)
    return coverage_threshold(confidence, coverage, delta)


def risk_threshold(confidence: Tensor, error: Tensor, risk: float, delta: float) -> Tensor:
    """Of checked inputs, both `[N]`."""
    between("risk", risk, 0, 1, MetricInputError, borders=False)
    between("delta", delta, 0, 1, MetricInputError, borders=False)
    m = len(confidence)
    if m == 0:
        return confidence.new_tensor(math.nan)
    confidence, order = confidence.sort(descending=True)
    errors = error[order].cpu().cumsum(0)  # [N]
    kept = _tries(m, risk, delta)
    for j in reversed(kept):
        θ = confidence[j] if j < m else confidence.new_tensor(-math.inf)
        above = j if j == m or confidence[j - 1] > θ else int((confidence > θ).sum())  # without ties
        if above and binomial_cdf(above, risk)[int(errors[above - 1])] <= delta / len(kept):
            return θ
    return confidence.new_tensor(math.inf)


def coverage_threshold(confidence: Tensor, coverage: float, delta: float | None) -> Tensor:
    """Of checked confidences `[N]`."""
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
    """How many of `m` examples are kept, in ascending order; known before their confidences are."""
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
