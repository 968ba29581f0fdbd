"""What follows from a `Prediction`'s numbers, for classes, labels and real targets, flat and dense."""

import math
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.options import predictive_of
from predictive_cases import Shaped, linearised_draws, mlp, network_draws
from scipy import stats
from torch import Tensor

from lightning_bayes import (
    BNN,
    GLM,
    GP,
    Bernoulli,
    Categorical,
    Conformal,
    DeepEnsemble,
    Gaussian,
    Prediction,
    evaluate,
    fit_laplace,
)
from lightning_bayes.likelihoods import HeteroscedasticGaussian
from lightning_bayes.likelihoods.outputs import draw_gaussian
from lightning_bayes.network import DataError
from lightning_bayes.posterior.gaussian import Calibration
from lightning_bayes.predictive.predict import RunningMixture

X = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2, 2])
LABELS = torch.tensor([[0.0, 1], [1, 1], [0, 0], [1, 0], [0, 1], [1, 1], [0, 0]])
REAL = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DENSE_CLASSES = torch.tensor([[[0, 1], [2, 0]]]).expand(7, 2, 2).contiguous()


def posterior(kind: str, **options: Any) -> Any:
    network, y, likelihood = {
        "classes": (mlp(3), CLASSES, Categorical()),
        "labels": (mlp(2), LABELS, Bernoulli()),
        "label": (Shaped(mlp(1)), LABELS[:, 0], Bernoulli()),
        "real": (mlp(2), REAL, Gaussian(0.5)),
        "dense classes": (Shaped(mlp(12), 3, 2, 2), DENSE_CLASSES, Categorical()),
        "dense real": (Shaped(mlp(8), 2, 2, 2), REAL[:, :, None, None].expand(7, 2, 2, 2).contiguous(), Gaussian(0.5)),
    }[kind]
    return fit_laplace(network, [(X, y)], likelihood, structure="full", **options)


KINDS = ["classes", "labels", "label", "real", "dense classes", "dense real"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def entropy(p: Tensor, dim: int) -> Tensor:
    return -(p * p.clamp_min(1e-300).log()).sum(dim)


# -- labels, confidences, intervals ------------------------------------------------------------------------------------


@every_kind
def test_kinds_are_told_by_what_is_predicted(kind: str) -> None:
    words = {"classes": "classification", "labels": "binary", "label": "binary", "real": "regression"}
    assert posterior(kind).predict(X).kind == words[kind.removeprefix("dense ")]


@pytest.mark.parametrize("kind", ["classes", "dense classes"])
def test_a_class_is_the_likeliest_one(kind: str) -> None:
    prediction = posterior(kind).predict(X)
    rows = prediction.probs.movedim(1, -1).reshape(-1, 3).tolist()
    assert prediction.label.flatten().tolist() == [max(range(3), key=row.__getitem__) for row in rows]
    assert prediction.confidence.flatten().tolist() == [max(row) for row in rows]
    assert prediction.label.shape == prediction.entropy.shape == prediction.probs[:, 0].shape
    assert prediction.label.dtype == torch.int64


@pytest.mark.parametrize("kind", ["labels", "label"])
def test_a_label_is_yes_where_that_is_likelier(kind: str) -> None:
    prediction = posterior(kind).predict(X)
    p = prediction.probs
    assert torch.equal(prediction.label, (p > 0.5).long())
    assert torch.equal(prediction.confidence, torch.where(p > 0.5, p, 1 - p))


def tailed(kind: str = "real", df: float = 4.0) -> Any:
    return posterior(kind).with_calibration(Calibration("glm", "exact", df=df))


@pytest.mark.parametrize("df", [4.0, math.inf])
@pytest.mark.parametrize("kind", ["real", "dense real"])
def test_a_real_target_has_the_law_of_scipy(kind: str, df: float) -> None:
    """A Student-t with the moments of the Gaussian."""
    prediction, gaussian = tailed(kind, df).predict(X), posterior(kind).predict(X)
    for name in ("mean", "variance", "epistemic", "aleatoric", "mutual_information"):
        assert torch.equal(getattr(prediction, name), getattr(gaussian, name))
    torch.testing.assert_close(prediction.std**2, prediction.epistemic + prediction.aleatoric)
    scale = 1.0 if math.isinf(df) else ((df - 2) / df) ** 0.5
    law = stats.t(df, prediction.mean.numpy(), (prediction.std * scale).numpy())
    np.testing.assert_allclose(law.var(), prediction.variance)
    np.testing.assert_allclose(prediction.entropy, law.entropy())
    for level in (0.5, 0.95):
        np.testing.assert_allclose(prediction.interval(level), law.interval(level))
    torch.testing.assert_close(prediction.interval(), prediction.interval(0.95))
    y = prediction.mean + 3 * torch.randn(prediction.mean.shape, generator=seeded())
    np.testing.assert_allclose(prediction.log_prob(y), law.logpdf(y))
    covered = ((law.interval(0.95)[0] < y.numpy()) & (y.numpy() < law.interval(0.95)[1])).mean()
    for predictor in (tailed(kind, df), DeepEnsemble([tailed(kind, df)])):
        scores = evaluate(predictor, [(X[:3], y[:3]), (X[3:], y[3:])])
        assert scores["nll"] == pytest.approx(-law.logpdf(y).mean())
        assert scores["coverage"] == pytest.approx(covered)


def test_parts_of_a_student_t_are_student_ts_and_a_gaussian_joins_them() -> None:
    heavy, gaussian = tailed().predict(X), posterior("real").predict(X)
    both = Prediction.cat([heavy, gaussian])
    y = torch.cat([REAL, REAL])
    torch.testing.assert_close(both.log_prob(y), torch.cat([heavy.log_prob(REAL), gaussian.log_prob(REAL)]))
    torch.testing.assert_close(both[8].interval(), gaussian[1].interval())
    torch.testing.assert_close(heavy[[1, 3]].interval(), tuple(end[[1, 3]] for end in heavy.interval()))
    assert Prediction.cat([gaussian, gaussian]).df is None
    assert heavy.numpy()["df"].shape == (7, 2)


def test_conformal_intervals_do_not_depend_on_the_tails() -> None:
    intervals = [
        Conformal.fit(prediction, REAL, 0.5).interval(prediction)
        for prediction in (tailed().predict(X), posterior("real").predict(X))
    ]
    torch.testing.assert_close(*intervals)


def test_what_belongs_to_another_kind_says_what_to_use() -> None:
    classes, real = posterior("classes").predict(X), posterior("real").predict(X)
    for call, words in [
        (lambda: real.label, "real targets has no label: its best guess is `mean`"),
        (lambda: real.confidence, r"real targets has no confidence: use `std` or `interval\(level\)`"),
        (lambda: classes.std, "classes has no std: use `confidence`"),
        (lambda: classes.log_prob(CLASSES), "classes has no log_prob: take the log of `probs`"),
        (lambda: classes.interval(0.9), r"classes has no interval: use sets of classes.*conformalize\(loader, level\)"),
    ]:
        with pytest.raises(AttributeError, match=words):
            call()
    assert not hasattr(classes, "std")


# -- mutual information ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("predictive", "draws"), [("bnn", network_draws), ("glm", linearised_draws)])
def test_mutual_information_of_draws_is_the_entropy_that_knowing_the_weights_takes_away(
    predictive: str, draws: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_bayes.predictive.predict.MANY", 0)  # so that "glm" is sampled, too
    for kind in ("classes", "dense classes"):
        fitted = posterior(kind)
        p = draws(fitted, X, 20, seeded()).softmax(2)
        expected = entropy(p.mean(0), 1) - entropy(p, 2).mean(0)
        prediction = fitted.predict(X, predictive_of(predictive, samples=20), generator=seeded())
        torch.testing.assert_close(prediction.mutual_information, expected, rtol=1e-9, atol=1e-9)
    fitted = posterior("labels")
    p = torch.stack([1 - (q := draws(fitted, X, 20, seeded()).sigmoid()), q], 0)
    expected = entropy(p.mean(1), 0) - entropy(p, 0).mean(0)
    prediction = fitted.predict(X, predictive_of(predictive, link="mc", samples=20), generator=seeded())
    torch.testing.assert_close(prediction.mutual_information, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["classes", "dense classes", "labels", "label"])
def test_mutual_information_by_monte_carlo_has_all_its_terms_from_the_same_draws(kind: str) -> None:
    """Draws of the Gaussian over outputs: those of the entropy of the mean are those of the mean of entropies."""
    fitted = posterior(kind).with_prior(0.1)
    m, Σ = fitted.functional(X)
    f = draw_gaussian(m.reshape(7, -1), Σ.reshape(7, m[0].numel(), -1), 3, seeded()).reshape(3, *m.shape)
    labels = kind.startswith("label")
    p = torch.stack([1 - f.sigmoid(), f.sigmoid()], 2) if labels else f.softmax(2)  # [S, B, classes, …]
    expected = entropy(p.mean(0), 1) - entropy(p, 2).mean(0)
    prediction = fitted.predict(X, GLM(link="mc", samples=3), generator=seeded())
    torch.testing.assert_close(prediction.mutual_information, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prediction.entropy, entropy(p.mean(0), 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=["classes", "labels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_mutual_information_is_never_negative(likelihood: Any, dtype: torch.dtype) -> None:
    """Not for draws that agree to the last digit, for a single one, or where the network is certain."""
    m = torch.cat([scale * torch.randn(200, 3, generator=seeded()) for scale in (0, 1, 30, 1e3)]).to(dtype)
    for variance in (0, 1e-12, 1e-6, 1, 1e6):
        Σ = torch.full_like(m, variance)
        predictives = [likelihood.integrate(m, Σ, link, n, seeded()) for link in likelihood.links for n in (1, 7)]
        running = RunningMixture(likelihood)
        for f in draw_gaussian(m.float(), Σ.float(), 7, seeded()):
            running.add(f)
        for predictive in [*predictives, running.predictive()]:
            assert (predictive.mutual_information >= 0).all()
            assert (predictive.mutual_information <= predictive.entropy).all()


@pytest.mark.parametrize("link", ["probit", "pairwise", "bridge", "mc"])
def test_all_links_agree_on_the_mutual_information_of_outputs(link: str) -> None:
    """With the integral over two classes by quadrature: the bridge and the draws are near it."""
    torch.manual_seed(0)
    fitted = fit_laplace(mlp(2), [(X, CLASSES.clamp(max=1))], structure="full", prior_precision=3.0)
    m, Σ = fitted.functional(X)
    d, v = m[:, 1] - m[:, 0], Σ[:, 0, 0] + Σ[:, 1, 1] - 2 * Σ[:, 0, 1]
    nodes, weights = (torch.from_numpy(t) for t in np.polynomial.hermite_e.hermegauss(60))
    q = (d[:, None] + v.sqrt()[:, None] * nodes).sigmoid()
    w = weights / weights.sum()
    p = torch.stack([1 - q, q])  # [2, B, nodes]
    exact = entropy((p * w).sum(-1), 0) - (entropy(p, 0) * w).sum(-1)
    information = fitted.predict(X, GLM(link=link, samples=20_000), generator=seeded()).mutual_information
    rtol = 0.25 if link == "bridge" else 0.05  # a Dirichlet is not the law of a softmax of Gaussians
    torch.testing.assert_close(information, exact, rtol=rtol, atol=1e-3)


def test_the_bridge_has_the_mutual_information_of_its_dirichlet() -> None:
    m = torch.tensor([[1.0, -0.5, 0.2], [8.0, 0.0, -3.0]], dtype=torch.float64)
    for variance in (1e-3, 0.3, 4.0):
        predictive = Categorical().integrate(m, torch.full_like(m, variance), "bridge")
        α0 = predictive.aleatoric / predictive.epistemic  # Var = p(1 − p)/(α₀ + 1)
        α = predictive.probs * α0
        expected = predictive.entropy - (torch.digamma(α0[:, 0] + 1) - (predictive.probs * torch.digamma(α + 1)).sum(1))
        torch.testing.assert_close(predictive.mutual_information, expected, rtol=1e-6, atol=1e-10)
    assert Categorical().integrate(m, torch.zeros_like(m), "bridge").mutual_information.tolist() == [0, 0]


@every_kind
def test_the_plain_network_has_no_mutual_information(kind: str) -> None:
    prediction = posterior(kind).predict(X, "map")
    assert prediction.mutual_information.shape == prediction.entropy.shape
    assert not prediction.mutual_information.any()
    assert not prediction.epistemic.any()


@every_kind
def test_mutual_information_is_a_part_of_the_entropy(kind: str) -> None:
    fitted = posterior(kind)
    for prediction in (fitted.predict(X, GLM(samples=5)), fitted.predict(X, BNN(samples=5))):
        assert prediction.mutual_information.shape == prediction.entropy.shape
        assert (prediction.mutual_information > 0).all()
        if prediction.probs is not None:
            check_parts(prediction)


def check_parts(prediction: Any) -> None:
    """Of class labels: both parts of the variance and of the entropy add up."""
    p, information = prediction.probs, prediction.mutual_information
    assert (prediction.epistemic >= 0).all()
    assert (prediction.aleatoric >= 0).all()
    torch.testing.assert_close(prediction.epistemic + prediction.aleatoric, p * (1 - p), rtol=1e-6, atol=1e-12)
    assert (information >= 0).all()
    assert (information <= prediction.entropy * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("kind", "predictive"),
    [
        *product(["classes", "labels", "dense classes"], ["glm", "many outputs", "bnn", "map"]),
        *product(["classes", "labels"], ["gp"]),
    ],
)
def test_epistemic_and_aleatoric_parts_make_the_whole(
    kind: str, predictive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With outputs so wide, and so few draws, that closed forms and draws are far from each other."""
    if predictive == "many outputs":
        monkeypatch.setattr("lightning_bayes.predictive.predict.MANY", 0)
        predictive = "glm"
    fitted = posterior(kind, **({"gp": GP(points=None)} if predictive == "gp" else {})).with_prior(1e-3)
    for link in fitted.likelihood.links:
        for samples in (1, 3):
            prediction = fitted.predict(X, predictive_of(predictive, link=link, samples=samples), generator=seeded())
            check_parts(prediction)
            check_parts(
                DeepEnsemble([fitted, fitted]).predict(
                    X, predictive_of(predictive, link=link, samples=samples), generator=seeded()
                )
            )


def test_parts_add_up_where_all_draws_are_certain() -> None:
    m = torch.tensor([[0.0, 300.0, 40.0]])
    for likelihood in (Categorical(), Bernoulli()):
        for link in likelihood.links:
            check_parts(likelihood.integrate(m, torch.full_like(m, 1e4), link, 1, seeded()))


def test_of_real_targets_it_is_the_capacity_of_the_gaussian_channel() -> None:
    prediction = posterior("real").predict(X)
    noise = 0.5 * math.log(2 * math.pi * math.e * 0.25)  # H[y | f]
    torch.testing.assert_close(prediction.mutual_information, prediction.entropy - noise)
    y = REAL[:, :1]
    learned = fit_laplace(mlp(2), [(X, y)], HeteroscedasticGaussian(), structure="full").predict(X)
    torch.testing.assert_close(learned.mutual_information, 0.5 * (learned.variance / learned.aleatoric).log())


@pytest.mark.parametrize("kind", ["classes", "labels", "dense classes"])
def test_a_temperature_keeps_the_epistemic_share_of_the_entropy(kind: str) -> None:
    fitted = posterior(kind)
    plain = fitted.predict(X, generator=seeded())
    y = {"classes": CLASSES, "labels": LABELS, "dense classes": DENSE_CLASSES}[kind]
    calibrated = fitted.calibrate([(X, y)], GLM(link=fitted.likelihood.links[0]), of="probs")
    tempered = calibrated.predict(X, generator=seeded())
    assert (tempered.entropy - plain.entropy).abs().max() > 1e-3
    share = plain.mutual_information / plain.entropy
    torch.testing.assert_close(tempered.mutual_information / tempered.entropy, share)


def test_an_ensemble_has_the_mutual_information_of_its_mixture() -> None:
    """With members that are points: what is known of the label once the member is known."""
    members = [posterior("classes") for _ in range(2)]
    with torch.no_grad():
        members[1].network[0].weight.mul_(-3)
    members[1] = fit_laplace(members[1].network, [(X, CLASSES)])
    ensemble = DeepEnsemble(members, [3, 1])
    p = torch.stack([member.predict(X, "map").probs for member in members])
    w = torch.tensor([0.75, 0.25], dtype=torch.float64)
    expected = entropy((w[:, None, None] * p).sum(0), 1) - (w[:, None] * entropy(p, 2)).sum(0)
    torch.testing.assert_close(ensemble.predict(X, "map").mutual_information, expected)
    assert (ensemble.predict(X).mutual_information > expected).all()


# -- one input, one value ----------------------------------------------------------------------------------------------


def fields_of(prediction: Prediction) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in prediction.numpy().items()}


def check_one_value(predict: Callable[[Tensor], Prediction], x: Tensor = X, **tolerance: float) -> None:
    """Every field of an example is the same alone, in any batch, and at any position of it."""
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-12}
    whole = predict(x)
    order = torch.tensor([5, 0, 3, 3, 6, 1, 3, 2, 4])
    for part, rows in [
        (predict(x[order]), order),
        (Prediction.cat([predict(x[n : n + 1]) for n in range(7)]), slice(None)),
        (Prediction.cat([predict(x[:2]), predict(x[2:7])]), slice(None)),
    ]:
        for name, values in fields_of(part).items():
            torch.testing.assert_close(values, fields_of(whole)[name][rows], **tolerance)


@pytest.mark.parametrize(
    ("kind", "predictive"),
    [*product(KINDS, ["glm", "many outputs", "bnn", "map"]), *product(["classes", "labels", "real"], ["gp"])],
)
def test_one_input_has_one_value(kind: str, predictive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if predictive == "many outputs":
        monkeypatch.setattr("lightning_bayes.predictive.predict.MANY", 0)
        predictive = "glm"
    fitted = posterior(kind, **({"gp": GP(points=None)} if predictive == "gp" else {})).with_prior(0.1)
    for link in fitted.likelihood.links if predictive in ("glm", "gp") else (None,):
        check_one_value(
            lambda x, link=link: fitted.predict(x, predictive_of(predictive, link=link, samples=20), generator=seeded())
        )
        ensemble = DeepEnsemble([fitted, fitted.with_prior(1.0)])
        check_one_value(
            lambda x, link=link, e=ensemble: e.predict(
                x, predictive_of(predictive, link=link, samples=20), generator=seeded()
            )
        )


def test_one_input_has_one_value_in_float32() -> None:
    fitted = fit_laplace(mlp(3).float(), [(X.float(), CLASSES)], structure="kron")
    for link in fitted.likelihood.links:
        predict = lambda x, link=link: fitted.predict(x, GLM(link=link), generator=seeded())  # noqa: E731
        check_one_value(predict, X.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("predictive", "link"), [("glm", "mc"), ("glm", "pairwise"), ("bnn", None)])
def test_scores_do_not_depend_on_the_batch_size(predictive: str, link: str | None) -> None:
    fitted = posterior("classes").with_prior(0.1)
    whole, split = (
        evaluate(
            fitted,
            list(zip(X.split(size), CLASSES.split(size), strict=True)),
            predictive=predictive_of(predictive, link=link),
        )
        for size in (7, 3)
    )
    assert split == pytest.approx(whole, rel=1e-9)


def test_targets_of_another_shape_are_not_scored() -> None:
    """As many numbers in another order are other targets; a dimension of one may be missing."""
    fitted, y = posterior("dense real"), REAL[:, :, None, None].expand(7, 2, 2, 2)
    wrong = y.reshape(7, 4, 2)
    with pytest.raises(DataError, match=r"of shape \[7, 2, 2, 2\] need real targets .* got .* of shape \[7, 4, 2\]"):
        evaluate(fitted, [(X, wrong)])
    one = fit_laplace(Shaped(mlp(1)), [(X, REAL[:, 0])], Gaussian(0.5))
    assert evaluate(one, [(X, REAL[:, :1])]) == evaluate(one, [(X, REAL[:, 0])])


@pytest.mark.parametrize("link", ["probit", "pairwise", "bridge"])
def test_links_with_a_closed_form_draw_no_random_numbers(link: str) -> None:
    fitted = posterior("classes")
    generator = seeded()
    state = generator.get_state()
    first, second = fitted.predict(X, GLM(link=link), generator=generator), fitted.predict(X, GLM(link=link))
    assert torch.equal(generator.get_state(), state)
    same(first, second)


# -- examples ----------------------------------------------------------------------------------------------------------


def same(a: Prediction, b: Prediction) -> None:
    assert a.kind == b.kind
    mine, other = a.numpy(), b.numpy()
    assert mine.keys() == other.keys()
    for name, values in mine.items():
        np.testing.assert_array_equal(values, other[name])


@every_kind
def test_examples_are_taken_by_numbers_slices_lists_and_masks(kind: str) -> None:
    prediction = posterior(kind).predict(X)
    whole = prediction.numpy()
    mask = torch.tensor([True, False, False, True, False, False, True])
    for index, rows in [
        (2, [2]),
        (-1, [6]),
        (torch.tensor(3), [3]),
        (np.int64(4), [4]),
        (slice(1, 5, 2), [1, 3]),
        (slice(None, None, -1), [6, 5, 4, 3, 2, 1, 0]),
        (slice(4, 4), []),
        ([5, 0, 5], [5, 0, 5]),
        ([], []),
        (np.array([1, 2]), [1, 2]),
        (mask, [0, 3, 6]),
        (mask.tolist(), [0, 3, 6]),
        (torch.zeros(7, dtype=torch.bool), []),
    ]:
        part = prediction[index]
        assert len(part) == len(rows)
        assert part.kind == prediction.kind
        for name, values in part.numpy().items():
            np.testing.assert_array_equal(values, whole[name][rows])


@every_kind
def test_examples_put_together_again_are_the_whole(kind: str) -> None:
    prediction = posterior(kind).predict(X)
    assert [len(example) for example in prediction] == [1] * 7
    same(Prediction.cat(list(prediction)), prediction)
    same(Prediction.cat([prediction[:3], prediction[3:3], prediction[3:]]), prediction)
    same(Prediction.cat([prediction]), prediction)


def test_an_index_that_means_no_examples_is_refused() -> None:
    prediction = posterior("dense classes").predict(X)
    for bad in ((0, 1), "label", 1.5, None, True, [[0]], torch.zeros(2, 2, dtype=torch.long), ...):
        with pytest.raises(IndexError, match=r"index a prediction by its examples|mask needs the shape"):
            prediction[bad]
    for bad in (7, -8, [0, 7]):
        with pytest.raises(IndexError, match="there are 7 examples, got the index"):
            prediction[bad]
    with pytest.raises(IndexError, match=r"mask needs the shape of the examples, \[7\]"):
        prediction[torch.ones(6, dtype=torch.bool)]


def test_what_cannot_be_put_together_says_why() -> None:
    classes, real, dense = (posterior(kind).predict(X) for kind in ("classes", "real", "dense classes"))
    elsewhere = classes.to("meta")
    for bad, error, words in [
        ([], ValueError, "empty list"),
        (classes, TypeError, "must be a list of predictions, as trainer.predict returns"),
        ([classes, real], ValueError, "of different kinds, classification and regression"),
        ([classes, dense], ValueError, r"of shapes \[7, 3\] and \[7, 3, 2, 2\]"),
        ([classes, elsewhere], ValueError, r"on several devices, cpu and meta.*\[prediction.cpu\(\) for"),
        ([{"laplace": classes, "swag": classes}], TypeError, r"\[batch\['laplace'\] for batch in predictions\]"),
        ([[classes], [classes]], TypeError, r"one list per dataloader: pass one of them, such as predictions\[0\]"),
        ([classes, None], TypeError, "got one with None"),
    ]:
        with pytest.raises(error, match=words):
            Prediction.cat(bad)


def test_unknown_mutual_information_stays_unknown() -> None:
    prediction = posterior("classes").predict(X)
    without = Prediction(prediction.epistemic, prediction.aleatoric, prediction.entropy, prediction.probs)
    assert Prediction.cat([prediction, without]).mutual_information is None
    assert "mutual_information" not in without[2:].numpy()


# -- arrays, words -----------------------------------------------------------------------------------------------------


def test_arrays_have_all_numbers_by_name(tmp_path: Any) -> None:
    common = {"epistemic", "aleatoric", "entropy", "mutual_information", "novelty"}
    classes, real = posterior("classes").predict(X), posterior("real").predict(X)
    assert classes.numpy().keys() == common | {"probs", "label", "confidence", "energy"}
    assert real.numpy().keys() == common | {"mean", "variance", "std"}
    np.savez(tmp_path / "prediction.npz", **classes.numpy())
    np.testing.assert_array_equal(np.load(tmp_path / "prediction.npz")["label"], classes.label.numpy())


def test_the_words_for_a_prediction_are_few() -> None:
    classes, dense = posterior("classes").predict(X), posterior("dense real").predict(X)
    assert repr(classes) == "Prediction(classification of 7, probs [7, 3], float64)"
    assert repr(dense) == "Prediction(regression of 7, mean [7, 2, 2, 2], float64)"
    assert repr(classes.to(torch.float32).to("meta")) == (
        "Prediction(classification of 7, probs [7, 3], float32, meta)"
    )


def test_a_prediction_can_be_sent_to_another_process() -> None:
    prediction = posterior("classes").predict(X)
    same(pickle.loads(pickle.dumps(prediction)), prediction)
