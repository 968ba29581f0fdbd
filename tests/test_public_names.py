"""The public names and their arguments, as the documentation gives them: none is removed or renamed by accident."""

import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lightning_bayes
from lightning_bayes import (
    BayesWarning,
    Conformal,
    GaussianPosterior,
    LaplacePosterior,
    MeasurementPosterior,
    Prediction,
    Reconstruction,
    likelihoods,
    metrics,
    plots,
)
from lightning_bayes.trainer import PosteriorCallback

NAMES = {
    lightning_bayes: """
        fit fit_l2m fit_laplace fit_measurements evaluate mc_dropout replace_activations
        GaussianPosterior LaplacePosterior MeasurementPosterior Prediction Reconstruction DeepEnsemble Augmented
        MCDropout Conformal
        Categorical Bernoulli Gaussian HeteroscedasticGaussian LinearMeasurement
        LaplaceCallback L2MCallback OnlineLaplaceCallback MarginalLikelihoodCallback SWAGCallback IVON IVONCallback
        VariationalLaplaceMixin VariationalInferenceMixin VariationalLastLayerMixin LogSigmaMultiplierMixin BayesWarning
        Full Kron EKFAC Diag LowRank FisherMC Prior GLM BNN GP MAP Dropout Tuning Learning Memory Network FitData
        Subnetwork
    """,
    metrics: """
        NegativeLogLikelihood BrierScore BrierDecomposition CalibrationError GaussianNLL GaussianCRPS IntervalCoverage
        IntervalWidth RegressionCalibrationError OODDetection RiskCoverage MetricInputError functional
    """,
    plots: """
        decision_map log_figure ood_histogram regression_bands regression_calibration_curve reliability_diagram
        risk_coverage_curve uncertainty_maps
    """,
    likelihoods: """
        Bernoulli Categorical Gaussian HeteroscedasticGaussian LinearMeasurement Likelihood LikelihoodError
        Predictive ClassPredictive LabelPredictive resolve
    """,
}


@pytest.mark.parametrize("module", NAMES, ids=lambda module: module.__name__)
def test_exactly_these_names_are_public(module: Any) -> None:
    assert list(module.__all__) == sorted(NAMES[module].split(), key=lambda name: (not name.isupper(), name))
    for name in module.__all__:
        assert getattr(module, name).__name__.rpartition(".")[2] == name


def test_the_version_is_that_of_the_package() -> None:
    project = (Path(lightning_bayes.__file__).parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{lightning_bayes.__version__}"\n' in project


# Arguments before the star may be given by position. Those of option objects are in tests/options.
SIGNATURES = """
fit(module, datamodule=None, val_dataloader=None, *, likelihood='classification', trainer=None)
fit_laplace(network, loader, likelihood='classification', structure='auto', subset='all', curvature='auto', \
prior_precision=1.0, prior=None, *, gp=None, output=None, seed=0, progress=False)
fit_l2m(network, optimizers, likelihood='classification', *, n_data, batch_size, scaling='dataset', \
prior_precision=None)
evaluate(predictor, loader, ood_loaders=(), *, predictive='glm', seed=0)
replace_activations(module, replacement=nn.Softplus)
Subnetwork(n, by='laplace_diag', seed=0)
GaussianPosterior.calibrate(loader)
GaussianPosterior.conformalize(loader, level=0.9, method='aps')
GaussianPosterior.functional(x, *, joint=False, differentiable=False)
GaussianPosterior.predict(x, predictive='glm', generator=None, *, calibrated=True, differentiable=False, split=True)
GaussianPosterior.deploy(x, predictive='glm', calibrated=True)
GaussianPosterior.sample(n=1, generator=None)
GaussianPosterior.sample_function(generator=None, predictive='glm', n=None)
GaussianPosterior.log_prob(theta)
GaussianPosterior.save(path)
GaussianPosterior.load(path, network)
GaussianPosterior.state_dict()
GaussianPosterior.from_state_dict(network, state)
GaussianPosterior.penalty(network)
GaussianPosterior.summary()
GaussianPosterior.to(device)
LaplacePosterior.log_marginal_likelihood(prior_precision=None, noise_std=None)
LaplacePosterior.with_prior(prior_precision)
LaplacePosterior.tune_prior(method='auto', loader=None)
LaplacePosterior.update(loader)
Prediction.interval(level=0.95)
Prediction.cat(predictions)
DeepEnsemble(posteriors, member_weights=None)
DeepEnsemble.predict(x, predictive='glm', generator=None)
DeepEnsemble.from_samples(posterior, loader, samples=30, *, generator=None)
Augmented(predictor, views)
Augmented.predict(x, predictive='glm', generator=None)
mc_dropout(network, likelihood='classification', *, samples=100, output=None)
MCDropout.predict(x, predictive='dropout', generator=None)
MCDropout.calibrate(loader)
MCDropout.conformalize(loader, level=0.9, method='aps')
Conformal.fit(prediction, y, level=0.9, method='aps')
Conformal.sets(prediction)
Conformal.interval(prediction)
LaplaceCallback.fit_now(trainer, module, dataloader, *, val_dataloader=None)
VariationalLaplaceMixin.vl_loss(f, y, y_sampled=None)
VariationalLaplaceMixin.__init__(*, variational=None)
VariationalInferenceMixin.__init__(*, variational=None)
VariationalLastLayerMixin.__init__(*, variational=None)
LogSigmaMultiplierMixin.__init__(*, log_sigma_multiplier=10.0)
LaplaceCallback(likelihood='classification', *, structure='auto', subset='auto', curvature='auto', \
prior_precision=1.0, prior=None, tune='auto', weights='both', data=None, predictive='glm', name='laplace')
L2MCallback(likelihood='classification', *, scaling='dataset', prior_precision=None, prior=None, loss_scale=None, \
n_data=None, tune='auto', predictive='glm', name='l2m')
OnlineLaplaceCallback(likelihood='regression', *, memory_factor=1e-4, hessian='auto', train_samples=1, \
prior_precision=1.0, memory=None, predictive='bnn', name='online_laplace')
MarginalLikelihoodCallback(likelihood='classification', *, structure='kron', subset='all', curvature='auto', \
prior_precision=1.0, prior=None, evidence='marglik', every_n_epochs=1, burn_in_epochs=0, data=None, \
predictive='glm', name='marglik')
SWAGCallback(likelihood='classification', *, rank=20, scale=1.0, start=0.75, every_n_epochs=1, every_n_steps=None, \
data=None, predictive='bnn', name='swag')
IVONCallback(likelihood='classification', *, train_samples=1, predictive='bnn', name='ivon')
IVON(params, lr=0.1, *, n_data=None, betas=(0.9, 0.99999), weight_decay=1e-4, hess_init=1.0, clip_radius=None, \
temperature=1.0, seed=0)
IVON.posterior(network, likelihood='classification')
trainer.PosteriorCallback(likelihood='classification', *, network=None, ood=False, plots=False, seed=0, save=None, \
calibrate='auto', predict_step='replace', progress=True)
metrics.CalibrationError(n_bins=15, norm='l1', binning='width')
metrics.IntervalCoverage(level=0.95)
metrics.NegativeLogLikelihood.update(probs, target)
metrics.BrierScore.update(probs, target)
metrics.CalibrationError.update(probs, target)
metrics.GaussianNLL.update(mean, variance, target)
metrics.GaussianCRPS.update(mean, variance, target)
metrics.IntervalCoverage.update(mean, variance, target)
metrics.OODDetection.update(score, is_ood)
metrics.RiskCoverage.update(confidence, correct)
metrics.functional.threshold_for_risk(confidence, correct, risk, delta=0.05)
metrics.functional.threshold_for_coverage(confidence, coverage, delta=None)
"""


def optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty or parameter.kind in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


@pytest.mark.parametrize("promise", SIGNATURES.strip().splitlines(), ids=lambda promise: promise.partition("(")[0])
def test_signatures_are_as_promised(promise: str) -> None:
    """More arguments may follow, as long as they are optional."""
    name, _, arguments = promise.removesuffix(")").partition("(")
    promised = inspect.signature(eval(f"lambda {arguments}: 0", {"nn": nn})).parameters.values()
    function = pkgutil.resolve_name(f"lightning_bayes.{name}")
    actual = dict(inspect.signature(function).parameters)
    actual.pop("self", None)
    if name.endswith("Callback"):  # arguments of the base class come by **use
        actual = {**actual, **{k: p for k, p in base_parameters().items() if k not in actual}}
    by_position = [p.name for p in promised if p.kind is not p.KEYWORD_ONLY]
    assert list(actual)[: len(by_position)] == by_position
    assert {p.name: actual[p.name].default for p in promised} == {p.name: p.default for p in promised}
    assert [name for name in actual.keys() - {p.name for p in promised} if not optional(actual[name])] == []


def base_parameters() -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(PosteriorCallback).parameters)


CALLBACKS = [name for name in lightning_bayes.__all__ if name.endswith("Callback")]


@pytest.mark.parametrize("kind", [PosteriorCallback, *(getattr(lightning_bayes, name) for name in CALLBACKS)])
def test_callbacks_take_keywords_after_the_likelihood(kind: Any) -> None:
    _, *others = (p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD)
    assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY}


# Arguments with several defaults or types, and the reason. None does not count: it stands for what is known.
DIFFERS = {
    "at": "an evidence is taken at the weights or at the optimum; for measurements, in a linearised or another network",
    "damping": "an option takes a word, a posterior what the option has checked",
    "level": "sets of 90 % need 9 held-out examples, intervals of 95 % none",
    "likelihood": "online Laplace is first of all for autoencoders; a file needs an object, for a class of the user",
    "method": "of a choice of prior, a conformal score, a diagonal, a refinement, or a variational step",
    "name": "each callback has its own, so that a Trainer can have several",
    "passes": "ten passes tune a prior, and a refinement ends long before 200",
    "predictive": "what has trained at samples predicts with samples; only words are functions to draw",
    "prior": "measurements have the priors of an image",
    "progress": "a Trainer shows bars, a function does not",
    "rank": "of a Kronecker factor, of a curvature, or the deviations that SWAG keeps",
    "samples": "of predictions (100), of copies of a network (30), of labels (1), or of a bound (256)",
    "steps": "between two epochs, or until the end",
    "structure": "a prior learned in training needs layers, so a Kronecker form from the start",
    "subset": "a callback must bound what its predictions cost; who calls fit_laplace knows the network",
}
MADE_BY_A_FIT = (GaussianPosterior, LaplacePosterior, MeasurementPosterior, Prediction, Reconstruction, Conformal)


def public_callables() -> Iterator[Any]:
    for thing in [*(getattr(lightning_bayes, name) for name in lightning_bayes.__all__), PosteriorCallback]:
        if thing not in MADE_BY_A_FIT and thing is not BayesWarning:
            yield thing
        for name, member in vars(thing).items() if inspect.isclass(thing) else ():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not name.startswith("_"):
                yield function


def test_an_argument_has_one_default_and_one_type_in_all_callables() -> None:
    defaults, types = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for function in public_callables():
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is parameter.empty:
                continue
            if parameter.default is not None:
                defaults[name].add(repr(parameter.default))
            alternatives = str(parameter.annotation).split(" | ")  # the first one that a file can hold
            types[name].update([kind for kind in alternatives if kind not in ("None", "Tensor", "Any")][:1])
    assert {name for name in types if len(defaults[name]) > 1 or len(types[name]) > 1} == set(DIFFERS)


@pytest.mark.parametrize("method", ["log_marginal_likelihood", "with_prior", "tune_prior", "update"])
def test_every_posterior_answers_to_the_same_arguments(method: str) -> None:
    """The plain Gaussian raises an error, but takes what the Laplace posterior takes."""
    parameters = inspect.signature(getattr(LaplacePosterior, method)).parameters.values()
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    by_place = [None for p in parameters if p.kind is not p.KEYWORD_ONLY]
    inspect.signature(getattr(GaussianPosterior, method)).bind(*by_place, **by_name)


FIELDS: dict[Any, str] = {
    GaussianPosterior: "mean n_data likelihood network",
    LaplacePosterior: "mean n_data likelihood network prior temperature",
    Prediction: "probs mean variance epistemic aleatoric entropy mutual_information",
}


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_results_are_frozen_and_have_the_promised_fields(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert set(FIELDS[kind].split()) <= {f.name for f in fields(kind)}
