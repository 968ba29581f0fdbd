"""Conformal sets and intervals: against the papers' definitions, and their promise on held-out data."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.options import predictive_of
from predictive_cases import Shaped, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Bernoulli, Conformal, DeepEnsemble, Gaussian, Prediction, fit_laplace
from lightning_bayes.network import DataError
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.predictive import conformal as conformal_quantile
from lightning_bayes.predictive import conformalize
from lightning_bayes.predictive.conformal import Score


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_probs(probs: Tensor) -> Prediction:
    return Prediction(probs, probs, probs[:, 0], probs=probs)


def of_real(mean: Tensor, std: Tensor) -> Prediction:
    return Prediction(std, std, std, mean=mean, variance=std**2)


def of_labels(probs: Tensor) -> Prediction:
    return Prediction(probs, probs, probs, probs=probs)


def drawn(n: int, C: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities that are true: labels are drawn from them."""
    probs = (2 * torch.randn(n, C, generator=generator(seed), dtype=torch.float64)).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=generator(seed + 1)).squeeze(1)


# -- the definitions ---------------------------------------------------------------------------------------------------


def slow_score(p: list[float], label: int, method: str, u: float, λ: float, k0: int) -> float:
    """Romano et al. (2020), eq. (5) read backwards: the smallest τ at which the label is in the set; Angelopoulos et
    al. (2021), eq. (4)."""
    if method == "lac":
        return 1 - p[label]
    order = sorted(range(len(p)), key=lambda c: -p[c])
    k = order.index(label) + 1
    total = sum(p[c] for c in order[: k - 1]) + u * p[label]
    return total + (λ * max(k - k0, 0) if method == "raps" else 0)


def slow_quantile(scores: list[float], level: float) -> float:
    rank = math.ceil(round((len(scores) + 1) * level, 9))
    return sorted(scores)[rank - 1] if rank <= len(scores) else math.inf


@pytest.mark.parametrize("randomised", [True, False])
@pytest.mark.parametrize("method", ["aps", "raps", "lac"])
def test_sets_are_those_of_the_papers(method: str, randomised: bool) -> None:
    probs, y = drawn(60)
    conformal = Conformal.fit(
        of_probs(probs[:40]), y[:40], 0.8, method, randomised=randomised, penalty=0.07, free_classes=1, allow_empty=True
    )
    u = Score()._uniform(probs).tolist() if randomised else [1.0] * 60
    scores = [[slow_score(p, c, method, u[n], 0.07, 1) for c in range(5)] for n, p in enumerate(probs.tolist())]
    q = slow_quantile([scores[n][int(y[n])] for n in range(40)], 0.8)
    assert float(conformal.quantile) == pytest.approx(q, abs=1e-12)
    expected = torch.tensor([[s <= q + 1e-12 for s in row] for row in scores[40:]])
    assert torch.equal(conformal.sets(of_probs(probs[40:])), expected)
    assert expected.sum() > 20
    never_empty = replace(conformal, allow_empty=False).sets(of_probs(probs[40:]))
    top = nn.functional.one_hot(probs[40:].argmax(1), 5).bool()
    assert torch.equal(never_empty, expected | top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [20.0, 40.0, 400.0])
def test_certain_networks_have_sets_by_rank(gap: float, dtype: torch.dtype) -> None:
    """Of ten classes the first is right in 70 % of all cases, the second in 25 %: two classes are enough for 90 %."""
    logits = -gap * torch.arange(10, dtype=dtype) + torch.randn(2000, 10, generator=generator(), dtype=dtype)
    rank = torch.searchsorted(torch.tensor([0.7, 0.95]), torch.rand(2000, generator=generator(1)))
    y = logits.argsort(1, descending=True).gather(1, rank[:, None])
    probs = logits.softmax(1)
    for method in ("aps", "raps"):
        conformal = Conformal.fit(of_probs(probs[:1000]), y[:1000, 0], 0.9, method)
        sets = conformal.sets(of_probs(probs[1000:]))
        assert sets.gather(1, y[1000:]).double().mean() > 0.88
        assert sets.sum(1).double().mean() <= 2


def test_noise_belongs_to_the_example() -> None:
    probs, _ = drawn(500)
    u = Score()._uniform(probs)
    order = torch.randperm(500, generator=generator())
    assert torch.equal(Score()._uniform(probs[order]), u[order])
    rounded = Score()._uniform(probs.float().double())
    assert (rounded == u).double().mean() > 0.99  # another machine's rounding
    assert not (Score(seed=1)._uniform(probs) == u).any()
    assert (u.sort().values - (torch.arange(500) + 0.5) / 500).abs().max() < 1.6 / 500**0.5  # Kolmogorov–Smirnov
    assert abs(float(torch.corrcoef(torch.stack([u, probs.amax(1)]))[0, 1])) < 0.15


@pytest.mark.parametrize("source", ["prediction", "quantiles"])
@pytest.mark.parametrize("method", ["cqr", "cqr_asymmetric"])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_quantile_intervals_are_those_of_the_paper(shape: tuple[int, ...], method: str, source: str) -> None:
    """Romano, Patterson & Candès (2019), eqs. (6) to (8) and theorem 2, one target after the other."""
    g = generator()
    mean, y = (torch.randn(50, *shape, generator=g, dtype=torch.float64) for _ in range(2))
    std = torch.rand(50, *shape, generator=g, dtype=torch.float64) + 0.1
    z = float(torch.special.ndtri(torch.tensor(0.875, dtype=torch.float64)))  # between 12.5 % and 87.5 %
    l, u = mean - z * std, mean + z * std
    made: Any = of_real(mean, std) if source == "prediction" else None
    known, new = (made[:30], made[30:]) if made is not None else ((l[:30], u[:30]), (l[30:], u[30:]))
    conformal = Conformal.fit(known, y[:30], 0.75, method)
    lower, upper = conformal.interval(new)
    below, above = (l - y)[:30].reshape(30, -1), (y - u)[:30].reshape(30, -1)
    for k in range(below.shape[1]):
        if method == "cqr":
            q = slow_quantile(
                [max(a, b) for a, b in zip(below[:, k].tolist(), above[:, k].tolist(), strict=True)], 0.75
            )
            ends = (q, q)
        else:
            ends = slow_quantile(below[:, k].tolist(), 0.875), slow_quantile(above[:, k].tolist(), 0.875)
        torch.testing.assert_close(lower.reshape(20, -1)[:, k], l[30:].reshape(20, -1)[:, k] - ends[0])
        torch.testing.assert_close(upper.reshape(20, -1)[:, k], u[30:].reshape(20, -1)[:, k] + ends[1])
    assert lower.shape == (20, *shape)
    again = Conformal.from_state_dict(conformal.state_dict()).interval(new)
    assert all(torch.equal(a, b) for a, b in zip(again, (lower, upper), strict=True))


def test_each_class_has_the_quantile_of_its_own_examples() -> None:
    probs, y = drawn(200, 3)
    conformal = Conformal.fit(of_probs(probs[:150]), y[:150], 0.75, "lac", per_class=True, allow_empty=True)
    assert conformal.n_data == 150
    sets = conformal.sets(of_probs(probs[150:]))
    for c in range(3):
        q = slow_quantile([1 - float(p[c]) for p, label in zip(probs[:150], y[:150], strict=True) if label == c], 0.75)
        assert float(conformal.quantile[0, c]) == pytest.approx(q, abs=1e-12)
        assert torch.equal(sets[:, c], 1 - probs[150:, c] <= q + 1e-12)
    again = Conformal.from_state_dict(conformal.state_dict())
    assert torch.equal(again.sets(of_probs(probs[150:])), sets)


def test_yes_and_no_of_each_label_have_quantiles_of_their_own() -> None:
    g = generator()
    probs = torch.rand(80, 2, generator=g, dtype=torch.float64)
    y = (torch.rand(80, 2, generator=g) < probs).long()
    conformal = Conformal.fit(of_labels(probs), y, 0.8, "lac", per_class=True)
    assert conformal.quantile.shape == (2, 2)
    for label in range(2):
        for answer in range(2):
            p = probs[:, label] if answer else 1 - probs[:, label]
            q = slow_quantile((1 - p)[y[:, label] == answer].tolist(), 0.8)
            assert float(conformal.quantile[label, answer]) == pytest.approx(q, abs=1e-12)
    assert conformal.sets(of_labels(probs)).shape == (80, 2, 2)


def test_dense_examples_count_once_for_each_class_they_have() -> None:
    probs, y = drawn(40 * 6, 3)
    probs, y = probs.reshape(40, 2, 3, 3).movedim(3, 1), y.reshape(40, 2, 3)
    y[0] = -100
    conformal = Conformal.fit(of_probs(probs), y, 0.7, "lac", per_class=True)
    for c in range(3):
        scores = [(1 - probs[i, c])[y[i] == c] for i in range(40) if (y[i] == c).any()]
        held = []
        for q in sorted(torch.cat(scores).tolist()):
            missed = sum(float((s > q).double().mean()) for s in scores)
            if (missed + 1) / (len(scores) + 1) <= 0.3 + 1e-12:
                held.append(q)
        assert float(conformal.quantile[0, c]) == held[0]
    assert conformal.n_data == 39
    assert conformal.sets(of_probs(probs)).shape == probs.shape


def test_a_class_with_too_few_examples_is_in_every_set() -> None:
    probs, y = drawn(100, 3)
    y[y == 2] = 0
    y[:3] = 2
    with pytest.warns(UserWarning, match="class 2 has too few held-out examples for a level of 0.8, .*at least 4 of"):
        conformal = Conformal.fit(of_probs(probs), y, 0.8, per_class=True, allow_empty=True)
    assert conformal.quantile.isinf().tolist() == [[False, False, True]]
    sets = conformal.sets(of_probs(probs))
    assert sets[:, 2].all()
    assert not sets[:, :2].all()
    labels = (probs > 0.99).long()
    with pytest.warns(UserWarning, match="class 1 of output 0, 1 of output 1, 1 of output 2 has too few"):
        Conformal.fit(of_labels(probs), 0 * labels, per_class=True)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_intervals_are_the_means_and_a_multiple_of_the_standard_deviation(shape: tuple[int, ...]) -> None:
    g = generator()
    mean, y = (torch.randn(50, *shape, generator=g, dtype=torch.float64) for _ in range(2))
    std = torch.rand(50, *shape, generator=g, dtype=torch.float64) + 0.1
    conformal = Conformal.fit(of_real(mean[:30], std[:30]), y[:30], 0.75)
    lower, upper = conformal.interval(of_real(mean[30:], std[30:]))
    scores = ((y - mean).abs() / std)[:30].reshape(30, -1)
    for k, column in enumerate(scores.T.tolist()):  # each output by itself
        q = slow_quantile(column, 0.75)
        torch.testing.assert_close(upper.reshape(20, -1)[:, k], (mean + q * std)[30:].reshape(20, -1)[:, k])
        torch.testing.assert_close(lower.reshape(20, -1)[:, k], (mean - q * std)[30:].reshape(20, -1)[:, k])
    assert lower.shape == (20, *shape)


def test_labels_are_each_two_classes() -> None:
    g = generator()
    probs = torch.rand(80, 2, generator=g, dtype=torch.float64)
    y = (torch.rand(80, 2, generator=g) < probs).long()
    conformal = Conformal.fit(of_labels(probs[:60]), y[:60], 0.8, "lac")
    sets = conformal.sets(of_labels(probs[60:]))  # [20, 2 classes, 2 labels]
    for label in range(2):
        pair = torch.stack([1 - probs[:, label], probs[:, label]], 1)
        alone = Conformal.fit(of_probs(pair[:60]), y[:60, label], 0.8, "lac")
        assert torch.equal(sets[:, :, label], alone.sets(of_probs(pair[60:])))
    single = Conformal.fit(of_labels(probs[:60, 0]), y[:60, 0].double(), 0.8, "lac")
    assert torch.equal(single.sets(of_labels(probs[60:, 0])), sets[:, :, 0])


def test_dense_examples_count_once_each() -> None:
    """Conformal risk control: the smallest q at which (Σᵢ share of i's positions not held + 1)/(n + 1) ≤ 1 − level."""
    probs, y = drawn(20 * 6)
    probs, y = probs.reshape(20, 2, 3, 5).movedim(3, 1), y.reshape(20, 2, 3)
    y[0], y[1, 0], y[2, 1, 1:] = -100, -100, -100
    conformal = Conformal.fit(of_probs(probs), y, 0.7, "lac")
    assert conformal.n_data == 19
    s = 1 - probs.gather(1, y.clamp_min(0).unsqueeze(1)).squeeze(1)
    held = []
    for q in sorted(s[y >= 0].tolist()):
        missed = sum(float((s[i] > q)[y[i] >= 0].double().mean()) for i in range(1, 20))
        if (missed + 1) / 20 <= 0.3 + 1e-12:
            held.append(q)
    assert float(conformal.quantile) == held[0]
    sets = conformal.sets(of_probs(probs))
    assert sets.shape == probs.shape
    flat = conformal.sets(of_probs(probs.movedim(1, 3).reshape(-1, 5)))
    assert torch.equal(sets.movedim(1, 3).reshape(-1, 5), flat)


def test_of_large_images_some_positions_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, y = drawn(30 * 100)
    probs, y = probs.reshape(30, 100, 5).mT, y.reshape(30, 100)
    whole = Conformal.fit(of_probs(probs), y, 0.8, "lac")
    monkeypatch.setattr(conformal_quantile, "POSITIONS", 40)
    some = Conformal.fit(of_probs(probs), y, 0.8, "lac")
    assert some.quantile != whole.quantile
    torch.testing.assert_close(some.quantile, whole.quantile, rtol=0.05, atol=0)


# -- the promise -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[GaussianPosterior, Tensor, Tensor]:
    """A network for real digits, trained on a fifth of them, and all others."""
    sklearn = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")
    data = sklearn.load_digits()
    x, y = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=generator())
    x, y = x[order], y[order]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        optimizer = torch.optim.Adam(network.parameters(), 0.02)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[:150]), y[:150]).backward()
            optimizer.step()
    return fit_laplace(network, [(x[:150], y[:150])]), x[150:], y[150:]


@pytest.mark.parametrize("predictive", ["glm", "map"])
@pytest.mark.parametrize(("method", "level"), [("aps", 0.9), ("raps", 0.9), ("lac", 0.8)])
def test_sets_of_real_digits_hold_what_they_promise(digits: Any, method: str, level: float, predictive: str) -> None:
    """Over many random splits, the mean coverage is (⌈(n + 1) level⌉)/(n + 1), within what chance allows."""
    posterior, x, y = digits
    prediction = posterior.predict(x, predictive, generator=generator())
    n, splits, held, sizes = 200, 120, [], []
    for seed in range(splits):
        order = torch.randperm(len(x), generator=generator(seed))
        known, new = order[:n], order[n:]
        conformal = Conformal.fit(prediction[known], y[known], level, method, allow_empty=True)
        sets = conformal.sets(prediction[new])
        held.append(sets.gather(1, y[new, None]).double().mean())
        sizes.append(sets.sum(1).double().mean())
        never_empty = replace(conformal, allow_empty=False).sets(prediction[new])
        assert (never_empty.sum(1) >= 1).all()
    coverage = torch.stack(held)
    expected = math.ceil((n + 1) * level) / (n + 1)
    assert abs(float(coverage.mean()) - expected) < 4 * float(coverage.std()) / splits**0.5
    assert float(coverage.std()) < 2 * (level * (1 - level) * (1 / n + 1 / (len(x) - n))) ** 0.5
    assert 0.8 < float(torch.stack(sizes).mean()) < 3


def test_sets_and_intervals_hold_what_they_promise_of_a_model_that_is_wrong() -> None:
    """A mean that is off, a standard deviation that is too small by far: the coverage is still the level."""
    g, level, n, held = generator(5), 0.9, 49, []
    for _ in range(300):
        x = torch.randn(n + 200, generator=g, dtype=torch.float64)
        y = torch.stack([x + (1 + x.abs()) * torch.randn(len(x), generator=g, dtype=torch.float64), 3 - x], 1)
        y[:, 1] += torch.rand(len(x), generator=g, dtype=torch.float64)
        prediction = of_real(torch.stack([0.5 * x, 2 - 2 * x], 1), 0.01 * (1 + y.new_ones(len(x), 2)))
        conformal = Conformal.fit(prediction[:n], y[:n], level)
        lower, upper = conformal.interval(prediction[n:])
        held.append(((lower <= y[n:]) & (y[n:] <= upper)).double().mean(0))
    coverage = torch.stack(held).mean(0)  # of each output
    assert (coverage - 0.9).abs().max() < 0.01  # (n + 1) level is whole


@pytest.mark.parametrize("method", ["cqr", "cqr_asymmetric"])
def test_quantile_intervals_hold_what_they_promise(method: str) -> None:
    """Between `1 − α` and `1 − α + 1/(n + 1)` (with both ends `2/(n + 1)`), by the average over many splits of data
    whose quantiles are wrong: skewed noise, and a lower end that is far off."""
    g, level, n, held, sizes = generator(5), 0.8, 29, [], []
    for _ in range(600):
        x = torch.rand(n + 100, generator=g, dtype=torch.float64)
        y = x - x * torch.rand(len(x), generator=g, dtype=torch.float64).log()
        quantiles = x - 0.5, 1.5 * x
        conformal = Conformal.fit((quantiles[0][:n], quantiles[1][:n]), y[:n], level, method)
        lower, upper = conformal.interval((quantiles[0][n:], quantiles[1][n:]))
        held.append(((lower <= y[n:]) & (y[n:] <= upper)).double().mean())
        sizes.append((upper - lower).mean())
    coverage, error = float(torch.stack(held).mean()), float(torch.stack(held).std()) / 600**0.5
    ends = 1 if method == "cqr" else 2
    assert level - 4 * error <= coverage <= level + ends / (n + 1) + 4 * error
    if method == "cqr":
        assert abs(coverage - math.ceil((n + 1) * level) / (n + 1)) < 4 * error
    assert error < 0.005


def test_sets_hold_what_they_promise_of_every_class() -> None:
    """Of a network that hardly knows one class: without classes of their own, its examples are rarely covered."""
    g, level, n, held, together = generator(3), 0.8, 240, [], []
    prior = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    for _ in range(300):
        y = torch.multinomial(prior, n + 300, replacement=True, generator=g)
        logits = torch.randn(len(y), 3, generator=g, dtype=torch.float64)
        logits[torch.arange(len(y)), y] += torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64)[y]
        prediction = of_probs(logits.softmax(1))
        for separate, coverages in ((True, held), (False, together)):
            conformal = Conformal.fit(prediction[:n], y[:n], level, "lac", per_class=separate, allow_empty=True)
            hits = conformal.sets(prediction[n:]).gather(1, y[n:, None])[:, 0].double()
            coverages.append(torch.stack([hits[y[n:] == c].mean() for c in range(3)]))
    coverage, error = torch.stack(held).mean(0), torch.stack(held).std(0) / 300**0.5
    n_least = 0.5 * n * prior  # of a class in one split, almost surely
    assert (coverage > level - 4 * error).all()
    assert (coverage < level + 1 / (n_least + 1) + 4 * error).all()
    assert torch.stack(together).mean(0)[2] < 0.5


def test_dense_sets_hold_their_share_of_a_new_example() -> None:
    """Positions that depend on each other: each image is as hard as one number says."""
    g, held, n = generator(1), [], 20
    for _ in range(400):
        sharpness = torch.rand(n + 30, 1, 1, generator=g, dtype=torch.float64) * 4
        logits = sharpness * torch.randn(n + 30, 4, 9, generator=g, dtype=torch.float64)
        y = torch.multinomial(logits.softmax(1).mT.reshape(-1, 4), 1, generator=g).reshape(n + 30, 9)
        prediction = of_probs((3 * logits).softmax(1))
        conformal = Conformal.fit(prediction[:n], y[:n], 0.8, allow_empty=True)
        sets = conformal.sets(prediction[n:])
        held.append(sets.gather(1, y[n:, None]).double().mean())
    coverage = torch.stack(held)
    error = float(coverage.std()) / 400**0.5
    assert 0.8 - 3 * error < float(coverage.mean()) < 0.8 + 1 / (n + 1) + 3 * error


# -- too few, ties, and other edges ------------------------------------------------------------------------------------


def test_too_few_examples_promise_nothing_less_than_everything() -> None:
    probs, y = drawn(9)
    assert Conformal.fit(of_probs(probs), y, 0.9).quantile.isfinite()  # 0.9·10 = 9
    with pytest.warns(UserWarning, match="8 held-out examples cannot guarantee.*0.9, so sets hold all classes: "):
        conformal = Conformal.fit(of_probs(probs[:8]), y[:8], 0.9)
    assert conformal.sets(of_probs(probs)).all()
    with pytest.warns(UserWarning, match="1 held-out examples cannot.*so intervals are infinite: hold out at least 9"):
        conformal = Conformal.fit(of_real(probs[:1], probs[:1]), probs[:1], 0.9)
    lower, upper = conformal.interval(of_real(probs, probs))
    assert (lower == -math.inf).all()
    assert (upper == math.inf).all()
    one = Conformal.fit(of_real(probs[:1, 0], probs[:1, 0]), probs[:1, 1], 0.5)  # ⌈2·½⌉ = 1
    assert float(one.quantile) == pytest.approx(float((probs[0, 1] - probs[0, 0]).abs() / probs[0, 0]))


def test_no_examples_and_single_ones_are_predicted_too() -> None:
    probs, y = drawn(40)
    conformal, sets = Conformal.fit(of_probs(probs), y), Conformal.fit(of_probs(probs), y).sets(of_probs(probs))
    assert conformal.sets(of_probs(probs)[:0]).shape == (0, 5)
    assert torch.equal(torch.cat([conformal.sets(one) for one in of_probs(probs)]), sets)
    dense = of_probs(probs.reshape(8, 5, 5).mT)
    assert conformal.sets(dense[:0]).shape == (0, 5, 5)
    interval = Conformal.fit(of_real(probs, probs), probs + 1)
    assert [end.shape for end in interval.interval(of_real(probs, probs)[:0])] == [(0, 5), (0, 5)]
    labels = Conformal.fit(of_labels(probs), (probs > 0.2).long())
    assert labels.sets(of_labels(probs)[:0]).shape == (0, 2, 5)


def test_ties_are_all_held() -> None:
    probs = torch.full((20, 4), 0.25, dtype=torch.float64)
    y = torch.arange(20) % 4
    for method, randomised in (("lac", True), ("aps", False)):
        conformal = Conformal.fit(of_probs(probs), y, 0.5, method, randomised=randomised)
        sets = conformal.sets(of_probs(probs))
        assert sets.gather(1, y[:, None]).double().mean() >= 0.5
    assert conformal.sets(of_probs(probs)).sum(1).unique().tolist() == [3]  # of equal classes the first by number


def test_what_cannot_be_scored_is_one_sentence() -> None:
    probs, y = drawn(30)
    real = of_real(probs, probs)
    for prediction, targets, words in [
        (
            of_probs(probs),
            y[:20],
            r"of shape \[30, 5\] need class labels of shape \[30\], got torch.int64 of shape \[20",
        ),
        (of_probs(probs), y + 3, "targets must be classes from 0 to 4, got [5-7]"),
        (of_probs(probs), y + 0.5, "targets must be classes from 0 to 4, got"),
        (of_probs(probs), torch.full((30,), -100), "no held-out targets"),
        (real, y, r"need real targets of shape \[30, 5\], got torch.int64"),
        (
            of_real(probs.reshape(15, 2, 5), probs.reshape(15, 2, 5)),
            probs.reshape(15, 5, 2),
            r"of shape \[15, 2, 5\] need real targets of shape \[15, 2, 5\], got torch.float64 of shape \[15, 5, 2\]",
        ),
        (real, probs[:, :3], r"got torch.float64 of shape \[30, 3\]"),
        (real, probs + math.nan, "contain NaN or infinity"),
    ]:
        with pytest.raises(DataError, match=words):
            Conformal.fit(prediction, targets)
    conformal, interval = Conformal.fit(of_probs(probs), y), Conformal.fit(real, probs)
    for call, words in [
        (lambda: conformal.interval(of_probs(probs)), "classes have sets, not intervals"),
        (lambda: interval.sets(real), "real targets have intervals, not sets"),
        (lambda: conformal.sets(real), "is for classification, but the prediction is of regression"),
        (lambda: interval.interval(of_real(probs[:, :2], probs[:, :2])), "for 5 outputs, but the prediction has 2"),
        (lambda: conformal.predict(probs), r"has no posterior: use sets\(prediction\)"),
    ]:
        with pytest.raises(PosteriorError, match=words):
            call()


# -- of a posterior ----------------------------------------------------------------------------------------------------


def loader(x: Tensor, y: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=64, **options)


def test_a_posterior_makes_sets_of_its_own_predictions(digits: Any, tmp_path: Path) -> None:
    posterior, x, y = digits
    state = torch.get_rng_state()
    conformal = posterior.conformalize(loader(x[:300], y[:300], shuffle=True), 0.9)
    assert torch.equal(torch.get_rng_state(), state)
    whole = Conformal.fit(posterior.predict(x[:300]), y[:300], 0.9)
    torch.testing.assert_close(conformal.quantile, whole.quantile, rtol=1e-3, atol=0)
    sets = conformal.predict(x[300:])
    assert torch.equal(sets, conformal.sets(posterior.predict(x[300:], generator=generator())))
    assert float(sets.gather(1, y[300:, None]).double().mean()) > 0.87  # above 0.9 but for chance: no set is empty
    conformal.save(tmp_path / "conformal.pt")
    for again in (Conformal.load(tmp_path / "conformal.pt", posterior), replace(conformal)):
        assert torch.equal(again.predict(x[300:]), sets)
        assert repr(again) == repr(conformal)
    with pytest.raises(PosteriorError, match="this version cannot read a Conformal from the state"):
        Conformal.from_state_dict(posterior.state_dict())
    ensemble = DeepEnsemble([posterior])
    torch.testing.assert_close(conformalize(ensemble, loader(x[:300], y[:300]), 0.9).quantile, conformal.quantile)


@pytest.mark.parametrize("predictive", ["glm", "bnn", "map"])
def test_every_kind_of_target_and_predictive_has_sets_or_intervals(predictive: str) -> None:
    g = generator(2)
    x = torch.randn(60, 3, dtype=torch.float64, generator=g)
    real = torch.randn(60, 2, dtype=torch.float64, generator=g)
    for network, y, likelihood, shape in [
        (mlp(2), real, Gaussian(0.5), (30, 2)),
        (mlp(2), (real > 0).long(), Bernoulli(), (30, 2, 2)),
        (Shaped(mlp(12), 3, 2, 2), torch.randint(3, (60, 2, 2), generator=g), "classification", (30, 3, 2, 2)),
    ]:
        posterior = fit_laplace(network, [(x[:20], y[:20])], likelihood)
        conformal = posterior.conformalize(
            [(x[20:30], y[20:30]), (x[30:], y[30:])], 0.8, predictive=predictive_of(predictive, samples=5)
        )
        result = conformal.predict(x[30:])
        assert (result[0] if isinstance(result, tuple) else result).shape == shape
        if isinstance(result, tuple):
            inside = (result[0] <= y[30:]) & (y[30:] <= result[1])
            assert inside.double().mean() >= 0.75


class LastWords(nn.Module):
    """Of sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        return self.linear(torch.stack([sequence[-1] for sequence in sequences]))


def test_sequences_of_different_lengths() -> None:
    g = generator(4)
    sequences, y = [torch.randn(1 + n % 4, 3, generator=g) for n in range(40)], torch.randint(2, (40,), generator=g)
    batches = [(sequences[start : start + 20], y[start : start + 20]) for start in (0, 20)]
    posterior = fit_laplace(LastWords(), batches, structure="diag")
    conformal = posterior.conformalize(batches, 0.8)
    assert conformal.n_data == 40
    assert conformal.predict(sequences[:5]).shape == (5, 2)  # type: ignore[union-attr]


class NodeClasses(nn.Module):
    """Of each node and its neighbours' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.linear(x.index_add(0, edge_index[1], x[edge_index[0]]))


def test_sets_of_nodes_are_made_with_those_that_were_used_for_nothing_else() -> None:
    geometric = pytest.importorskip("torch_geometric.data", reason="graphs are the extra `real`")
    g, part = generator(5), torch.arange(60) // 20
    x, edges = torch.randn(60, 3, generator=g), torch.randint(60, (2, 100), generator=g)
    masks = {"train_mask": part == 0, "val_mask": (part == 1) & (torch.arange(60) % 20 < 4), "calib_mask": part == 2}
    data = geometric.Data(x=x, edge_index=edges, y=(x[:, 0] > 0).long(), **masks)
    posterior = fit_laplace(NodeClasses(), [data], structure="diag")
    conformal = posterior.conformalize([data], 0.75)
    assert conformal.n_data == 20
    del data.calib_mask
    assert posterior.conformalize([data], 0.75).n_data == 4
