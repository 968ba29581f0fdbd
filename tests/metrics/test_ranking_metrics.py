"""OOD detection against scikit-learn, risk–coverage against its definition, thresholds against exact binomial tails."""

import math
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy
import numpy as np
import pytest
import torch
from helpers.tensors import seeded
from metric_cases import DATA
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from lightning_bayes import metrics
from lightning_bayes.metrics import OODDetection
from lightning_bayes.metrics import functional as F
from lightning_bayes.metrics.functional.ranking import binomial_cdf

SCORE, IS_OOD = DATA["score"]


def reference(score: Tensor, is_ood: Tensor) -> dict[str, float]:
    fpr, tpr, _ = roc_curve(~is_ood, -score, drop_intermediate=False)  # in-distribution is the positive class
    return {
        "auroc": roc_auc_score(is_ood, score),
        "aupr_in": average_precision_score(~is_ood, -score),
        "aupr_out": average_precision_score(is_ood, score),
        "fpr95": fpr[tpr >= 0.95][0],
    }


def as_floats(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6, -1.0])
def test_exact_mode_is_scikit_learn(scale: float) -> None:
    score = scale * SCORE + (1 if scale < 0 else 0)
    assert as_floats(F.ood_detection(score, IS_OOD)) == pytest.approx(reference(score, IS_OOD), rel=1e-12)


def test_a_batch_outside_the_unit_interval_changes_nothing_about_the_others() -> None:
    """A sigmoid on only the batches outside [0, 1] would rank 0.9 of one batch above 3.0 of another."""
    metric = OODDetection()
    metric.update(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([False, False, False]))
    metric.update(torch.tensor([1.5, 3.0, -7.0]), torch.tensor([True, True, False]))
    assert as_floats(metric.compute()) == {"auroc": 1.0, "aupr_in": 1.0, "aupr_out": 1.0, "fpr95": 0.0}


@pytest.mark.parametrize(("out_score", "expected"), [(18.5, 1.0), (19.0, 1.0), (19.5, 0.0)])
def test_fpr95_accepts_nineteen_of_twenty(out_score: float, expected: float) -> None:
    """τ is the 19th smallest of 20 in-distribution scores; an OOD score at τ itself is accepted with it."""
    score = torch.cat([torch.arange(1.0, 21.0), torch.tensor([out_score])])
    is_ood = torch.arange(21) == 20
    assert float(F.ood_detection(score, is_ood)["fpr95"]) == expected


def test_a_constant_score_knows_nothing() -> None:
    values = as_floats(F.ood_detection(torch.zeros(10), torch.arange(10) < 3))
    assert values == pytest.approx({"auroc": 0.5, "aupr_in": 0.7, "aupr_out": 0.3, "fpr95": 1.0})


def test_infinite_scores_are_the_most_extreme() -> None:
    score, is_ood = torch.tensor([-torch.inf, 0.0, 1.0, torch.inf]), torch.tensor([False, True, False, True])
    finite = torch.tensor([-9.0, 0.0, 1.0, 9.0])
    assert as_floats(F.ood_detection(score, is_ood)) == as_floats(F.ood_detection(finite, is_ood))
    in_cells = F.ood_detection(score, is_ood, resolution=100, score_range=(-9.0, 9.0))
    assert as_floats(in_cells) == as_floats(F.ood_detection(finite, is_ood))


def test_the_histogram_is_exact_for_scores_rounded_to_its_cells() -> None:
    low, high, n = -4.0, 4.0, 16
    cell = ((SCORE.clamp(low, high - 1e-9) - low) / (high - low) * n).floor()
    values = F.ood_detection(SCORE, IS_OOD, resolution=n, score_range=(low, high))
    assert as_floats(values) == pytest.approx(reference(cell, IS_OOD), rel=1e-12)


def test_one_kind_alone_is_nan() -> None:
    assert all(value.isnan() for value in F.ood_detection(SCORE, torch.ones_like(IS_OOD)).values())


@pytest.mark.parametrize(
    ("score", "auroc"),
    [("latent", 0.998886), ("output", 0.999290), ("likelihood", 0.991048), ("typicality", 0.987978)],
)
def test_auroc_of_the_laplacian_autoencoders_own_scores(score: str, auroc: float, data_folder: Path) -> None:
    """10,000 scores of the authors' stored run, in batches of uneven sizes, give the AUROC that the authors report."""
    path = data_folder / "outside" / "lae_ood_scores.npz"
    if not path.exists():
        pytest.skip(f"LIGHTNING_BAYES_DATA has no outside/{path.name}")
    with numpy.load(path) as file:
        values, is_ood = torch.as_tensor(file[score]), torch.as_tensor(file[f"{score}_is_ood"]).bool()
    metric = OODDetection()
    for part in torch.arange(len(values)).split(3001):
        metric.update(values[part], is_ood[part])
    assert float(metric.compute()["auroc"]) == pytest.approx(auroc, abs=6e-7)


def area_in_order(correct: np.ndarray) -> float:
    """AURC of predictions already sorted by falling confidence."""
    return float(np.mean([(~correct[:i]).mean() for i in range(1, len(correct) + 1)]))


CONFIDENCE = 5 * torch.randn(50, generator=seeded(6))
CORRECT = torch.rand(50, generator=seeded(7)) < 0.7
ERROR_RATE = 1 - float(CORRECT.double().mean())


def test_the_area_is_the_mean_selective_risk() -> None:
    expected = area_in_order(CORRECT[CONFIDENCE.argsort(descending=True)].numpy())
    assert float(F.risk_coverage(CONFIDENCE, CORRECT)) == pytest.approx(expected, rel=1e-12)


def test_ties_count_as_the_mean_over_all_their_orders() -> None:
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.5, 0.1])
    correct = torch.tensor([True, False, True, True, False, False])
    orders = [area_in_order(correct[[0, *middle, 5]].numpy()) for middle in permutations([1, 2, 3, 4])]
    assert float(F.risk_coverage(confidence, correct)) == pytest.approx(np.mean(orders), rel=1e-12)


def test_the_curve_ends_at_the_error_rate() -> None:
    coverage, risk = F.risk_coverage_curve(CONFIDENCE, CORRECT)
    torch.testing.assert_close(coverage, torch.arange(1, 51, dtype=torch.float64) / 50)
    assert float(risk[-1]) == pytest.approx(ERROR_RATE)


def test_a_constant_confidence_has_the_error_rate_as_its_area() -> None:
    assert float(F.risk_coverage(torch.zeros(50), CORRECT)) == pytest.approx(ERROR_RATE)


# -- thresholds --------------------------------------------------------------------------------------------------------


def drawn(m: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Uniform confidences c with error probability 0.3 (1 − c)², so R(θ) = 0.1 (1 − θ)²."""
    c = torch.rand(m, generator=g, dtype=torch.float64)
    return c, torch.rand(m, generator=g, dtype=torch.float64) >= 0.3 * (1 - c) ** 2


def tail(n: int, p: Fraction, k: int) -> Fraction:
    """P(Binomial(n, p) ≤ k), exactly."""
    return sum((math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)), Fraction(0))


def test_the_binomial_tail_is_exact() -> None:
    for n, p in ((1, Fraction(1, 3)), (40, Fraction(1, 20)), (300, Fraction(9, 10))):
        exact = torch.tensor([float(tail(n, p, k)) for k in range(n + 1)], dtype=torch.float64)
        torch.testing.assert_close(binomial_cdf(n, float(p)), exact, rtol=1e-10, atol=1e-300)
    assert binomial_cdf(3, 1.0).tolist() == [0, 0, 0, 1]


def slow_threshold(confidence: Tensor, correct: Tensor, risk: Fraction, delta: Fraction) -> float:
    """The definition in fractions: the lowest passing threshold among ranks that were fixed in advance."""
    c, right, m = confidence.tolist(), correct.tolist(), len(confidence)
    K = math.ceil(m**0.5 / 2)
    fewest = next(j for j in range(10**6) if (1 - risk) ** j <= delta / K)
    ranks = {round(fewest + (m - fewest) * k / (K - 1)) for k in range(K)} if fewest <= m else {m}
    K = len(ranks)
    passing = [math.inf]
    for J in ranks:
        θ = sorted(c, reverse=True)[J] if m > J else -math.inf
        kept = [ok for value, ok in zip(c, right, strict=True) if value > θ]
        if kept and tail(len(kept), risk, kept.count(False)) <= delta / K:
            passing.append(θ)
    return min(passing)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("risk", "delta"), [(Fraction(1, 10), Fraction(1, 20)), (Fraction(1, 4), Fraction(1, 100))])
def test_the_threshold_is_the_lowest_that_passes(risk: Fraction, delta: Fraction, ties: bool) -> None:
    values = set()
    for seed in range(12):
        c, ok = drawn(150, seeded(seed))
        ok &= c > 0.3
        c = (8 * c).round() / 8 if ties else c
        threshold = float(F.threshold_for_risk(c, ok, float(risk), float(delta)))
        assert threshold == slow_threshold(c, ok, risk, delta)
        values.add(threshold)
    assert len(values) > (1 if ties else 3)


@pytest.mark.parametrize("m", [100, 400])
def test_the_risk_of_what_is_kept_is_as_promised(m: int) -> None:
    """The true risk above the threshold exceeds the target in at most a share δ of the draws; something is kept."""
    g, δ, kept, too_risky = seeded(), 0.2, 0.0, 0
    for _ in range(400):
        θ = min(max(float(F.threshold_for_risk(*drawn(m, g), risk=0.05, delta=δ)), 0.0), 1.0)
        too_risky += 0.1 * (1 - θ) ** 2 > 0.05
        kept += (1 - θ) / 400
    assert too_risky / 400 <= δ
    assert kept > (0.01 if m == 100 else 0.3)


def test_the_promise_holds_where_confidence_says_nothing() -> None:
    """All thresholds have the risk 0.1, just above the target, so keeping anything is an error."""
    g, wrong = seeded(1), 0
    for _ in range(400):
        c, ok = torch.rand(300, generator=g), torch.rand(300, generator=g) >= 0.1
        wrong += math.isfinite(float(F.threshold_for_risk(c, ok, risk=0.0999, delta=0.2)))
        assert float(F.threshold_for_risk(c, ok, risk=0.3, delta=0.2)) == -math.inf
    assert wrong / 400 <= 0.2


def test_where_nothing_can_be_promised_nothing_is_kept() -> None:
    c = torch.rand(30, generator=seeded())
    assert float(F.threshold_for_risk(c, c > 2, risk=0.2)) == math.inf  # all wrong
    assert float(F.threshold_for_risk(c, c < 2, risk=0.05)) == math.inf  # 0.95³⁰ > 0.05: too few
    assert float(F.threshold_for_risk(c, c < 2, risk=0.1)) == -math.inf  # 0.9³⁰ < 0.05: all are kept
    same = torch.ones(200)
    assert float(F.threshold_for_risk(same, torch.arange(200) > 100, risk=0.3)) == math.inf  # ties: all or nothing


@pytest.mark.parametrize("coverage", [0.01, 0.25, 0.5, 0.999, 1.0])
def test_the_threshold_for_a_coverage_is_the_highest_that_keeps_it(coverage: float) -> None:
    for c in (torch.rand(99, generator=seeded()), torch.randint(5, (99,), generator=seeded()).float()):
        θ = F.threshold_for_coverage(c, coverage)
        assert (c > θ).double().mean() >= coverage
        higher = c[c > θ].min()
        assert (c > higher).double().mean() < coverage


def test_a_coverage_is_kept_with_the_promised_probability() -> None:
    g, δ, less = seeded(), 0.1, 0
    for _ in range(500):
        θ = float(F.threshold_for_coverage(torch.rand(80, generator=g, dtype=torch.float64), 0.7, δ))
        less += 1 - θ < 0.7
    assert 0.01 < less / 500 <= δ
    assert float(F.threshold_for_coverage(torch.rand(5, generator=g), 0.9, 0.05)) == -math.inf


def test_the_metric_has_the_thresholds_of_all_that_it_has_seen() -> None:
    c, ok = drawn(601, seeded(2))
    metric = metrics.RiskCoverage()
    for part in (slice(0, 100), slice(100, 101), slice(101, None)):
        metric.update(c[part], ok[part])
    assert metric.threshold_for_risk(0.05) == F.threshold_for_risk(c, ok, 0.05)
    assert metric.threshold_for_risk(0.05).isfinite()
    assert metric.threshold_for_coverage(0.3) == F.threshold_for_coverage(c, 0.3)
    assert metric.threshold_for_coverage(0.3, 0.1) == F.threshold_for_coverage(c, 0.3, 0.1)


def test_nothing_counted_is_nan() -> None:
    nothing = torch.empty(0)
    assert F.threshold_for_risk(nothing, nothing, 0.1).isnan()
    assert F.threshold_for_coverage(nothing, 0.1).isnan()
