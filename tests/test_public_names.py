"""The public names, their arguments and their words: nothing is removed or renamed, and defaults stay.

What the design fixes but the package does not have yet stands in the tables as "to come". When it comes, its row moves.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.options import predictive_of
from torch import Tensor, nn

import lightning_bayes
from lightning_bayes import (
    BNN,
    EKFAC,
    GLM,
    GP,
    MAP,
    Conformal,
    DeepEnsemble,
    Diag,
    FisherMC,
    FitData,
    Full,
    GaussianPosterior,
    HeteroscedasticGaussian,
    Kron,
    L2MCallback,
    LaplaceCallback,
    LaplacePosterior,
    Learning,
    LogSigmaMultiplierMixin,
    LowRank,
    MarginalLikelihoodCallback,
    Memory,
    Network,
    OnlineLaplaceCallback,
    Prediction,
    Prior,
    Subnetwork,
    SWAGCallback,
    Tuning,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    evaluate,
    fit_l2m,
    fit_laplace,
    likelihoods,
    metrics,
    plots,
    replace_activations,
)
from lightning_bayes.trainer import PosteriorCallback

# -- names -------------------------------------------------------------------------------------------------------------

FIXED = {
    *("fit_laplace", "GaussianPosterior", "LaplacePosterior", "Prediction"),
    *("Categorical", "Bernoulli", "Gaussian", "HeteroscedasticGaussian"),
    *("LaplaceCallback", "L2MCallback", "OnlineLaplaceCallback", "MarginalLikelihoodCallback"),
    *("VariationalLaplaceMixin", "VariationalInferenceMixin", "LogSigmaMultiplierMixin"),
}
BESIDES = {
    *("Conformal", "DeepEnsemble", "LinearMeasurement", "MeasurementPosterior", "Reconstruction", "SWAGCallback"),
    *("Subnetwork", "fit_measurements"),
    *("Full", "Kron", "EKFAC", "Diag", "LowRank", "FisherMC", "Prior", "GLM", "BNN", "GP", "MAP", "Tuning", "Learning"),
    *("Memory", "Network", "FitData"),
    *("evaluate", "fit", "fit_l2m", "replace_activations"),
}

FIXED_METRICS = {
    *("NegativeLogLikelihood", "BrierScore", "CalibrationError", "GaussianNLL", "GaussianCRPS", "IntervalCoverage"),
    *("OODDetection", "RiskCoverage"),
}
METRICS_BESIDES = {
    *("BrierDecomposition", "IntervalWidth", "RegressionCalibrationError"),
    *("MetricInputError", "functional"),
}
PLOTS = {
    *("decision_map", "log_figure", "ood_histogram", "regression_bands", "regression_calibration_curve"),
    *("reliability_diagram", "risk_coverage_curve", "uncertainty_maps"),
}
LIKELIHOODS = {
    *("Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Likelihood", "LikelihoodError", "resolve"),
    *("ClassPredictive", "LabelPredictive", "LinearMeasurement", "Predictive"),
}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (lightning_bayes, FIXED | BESIDES),
        (metrics, FIXED_METRICS | METRICS_BESIDES),
        (plots, PLOTS),
        (likelihoods, LIKELIHOODS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_exactly_these_names_are_public(module: Any, names: set[str]) -> None:
    assert list(module.__all__) == sorted(names, key=lambda name: (not name.isupper(), name))
    for name in names:
        assert getattr(module, name).__name__.rpartition(".")[2] == name


def test_the_version_is_that_of_the_package() -> None:
    project = (Path(lightning_bayes.__file__).parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{lightning_bayes.__version__}"\n' in project


# -- arguments ---------------------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty

# In this order, from the first: they may be given by position.
SIGNATURES: dict[Any, dict[str, Any]] = {
    fit_laplace: {
        "network": REQUIRED,
        "loader": REQUIRED,
        "likelihood": "classification",
        "structure": "auto",
        "subset": "all",
        "curvature": "auto",
        "prior_precision": 1.0,
        "prior": None,
    },
    LaplacePosterior.log_marginal_likelihood: {"self": REQUIRED, "prior_precision": None, "noise_std": None},
    LaplacePosterior.with_prior: {"self": REQUIRED, "prior_precision": REQUIRED},
    LaplacePosterior.tune_prior: {"self": REQUIRED, "method": "auto", "loader": None},
    GaussianPosterior.calibrate: {"self": REQUIRED, "loader": REQUIRED},
    GaussianPosterior.conformalize: {"self": REQUIRED, "loader": REQUIRED, "level": 0.9, "method": "aps"},
    GaussianPosterior.functional: {"self": REQUIRED, "x": REQUIRED},
    GaussianPosterior.predict: {
        "self": REQUIRED,
        "x": REQUIRED,
        "predictive": "glm",
        "generator": None,
    },
    GaussianPosterior.sample: {"self": REQUIRED, "n": 1, "generator": None},
    GaussianPosterior.sample_function: {"self": REQUIRED, "generator": None, "predictive": "glm", "n": None},
    GaussianPosterior.log_prob: {"self": REQUIRED, "theta": REQUIRED},
    GaussianPosterior.save: {"self": REQUIRED, "path": REQUIRED},
    GaussianPosterior.load: {"path": REQUIRED, "network": REQUIRED},
    GaussianPosterior.state_dict: {"self": REQUIRED},
    GaussianPosterior.from_state_dict: {"network": REQUIRED, "state": REQUIRED},
    GaussianPosterior.penalty: {"self": REQUIRED, "network": REQUIRED},
    LaplacePosterior.update: {"self": REQUIRED, "loader": REQUIRED},
    GaussianPosterior.summary: {"self": REQUIRED},
    GaussianPosterior.to: {"self": REQUIRED, "device": REQUIRED},
    Prediction.to: {"self": REQUIRED},
    Prediction.interval: {"self": REQUIRED, "level": 0.95},
    Prediction.cat: {"predictions": REQUIRED},
    Conformal.fit: {"prediction": REQUIRED, "y": REQUIRED, "level": 0.9, "method": "aps"},
    Conformal.sets: {"self": REQUIRED, "prediction": REQUIRED},
    Conformal.interval: {"self": REQUIRED, "prediction": REQUIRED},
    metrics.functional.threshold_for_risk: {
        "confidence": REQUIRED,
        "correct": REQUIRED,
        "risk": REQUIRED,
        "delta": 0.05,
    },
    metrics.functional.threshold_for_coverage: {"confidence": REQUIRED, "coverage": REQUIRED, "delta": None},
    DeepEnsemble: {"posteriors": REQUIRED, "member_weights": None},
    DeepEnsemble.predict: {"self": REQUIRED, "x": REQUIRED, "predictive": "glm", "generator": None},
    evaluate: {"predictor": REQUIRED, "loader": REQUIRED, "ood_loaders": ()},
    fit_l2m: {"network": REQUIRED, "optimizers": REQUIRED, "likelihood": "classification"},
    lightning_bayes.fit: {"module": REQUIRED, "datamodule": None, "val_dataloader": None},
    LaplaceCallback.fit_now: {"self": REQUIRED, "trainer": REQUIRED, "module": REQUIRED, "dataloader": REQUIRED},
    replace_activations: {"module": REQUIRED, "replacement": nn.Softplus},
    VariationalLaplaceMixin.vl_loss: {"self": REQUIRED, "f": REQUIRED, "y": REQUIRED, "y_sampled": None},
    LaplaceCallback: {"likelihood": "classification"},
    L2MCallback: {"likelihood": "classification"},
    SWAGCallback: {"likelihood": "classification"},
    Subnetwork: {"n": REQUIRED, "by": "laplace_diag", "seed": 0},
    OnlineLaplaceCallback: {"likelihood": "regression"},
    MarginalLikelihoodCallback: {"likelihood": "classification"},
    metrics.CalibrationError: {"n_bins": 15, "norm": "l1", "binning": "width"},
    metrics.IntervalCoverage: {"level": 0.95},
    metrics.NegativeLogLikelihood.update: {"self": REQUIRED, "probs": REQUIRED, "target": REQUIRED},
    metrics.BrierScore.update: {"self": REQUIRED, "probs": REQUIRED, "target": REQUIRED},
    metrics.CalibrationError.update: {"self": REQUIRED, "probs": REQUIRED, "target": REQUIRED},
    metrics.GaussianNLL.update: {"self": REQUIRED, "mean": REQUIRED, "variance": REQUIRED, "target": REQUIRED},
    metrics.GaussianCRPS.update: {"self": REQUIRED, "mean": REQUIRED, "variance": REQUIRED, "target": REQUIRED},
    metrics.IntervalCoverage.update: {"self": REQUIRED, "mean": REQUIRED, "variance": REQUIRED, "target": REQUIRED},
    metrics.OODDetection.update: {"self": REQUIRED, "score": REQUIRED, "is_ood": REQUIRED},
    metrics.RiskCoverage.update: {"self": REQUIRED, "confidence": REQUIRED, "correct": REQUIRED},
    **{
        kind: {}
        for kind in (
            metrics.NegativeLogLikelihood,
            metrics.BrierScore,
            metrics.GaussianNLL,
            metrics.GaussianCRPS,
            metrics.OODDetection,
            metrics.RiskCoverage,
            HeteroscedasticGaussian,
        )
    },
}

# By name, in any place.
USING = {
    "network": None,
    "ood": False,
    "plots": False,
    "seed": 0,
    "save": None,
    "calibrate": "auto",
    "predict_step": "replace",
    "progress": True,
}
KEYWORDS: dict[Any, dict[str, Any]] = {
    fit_laplace: {"gp": None, "output": None, "seed": 0, "progress": False},
    LaplaceCallback: {
        **USING,
        "structure": "auto",
        "subset": "auto",
        "curvature": "auto",
        "prior_precision": 1.0,
        "prior": None,
        "tune": "auto",
        "weights": "both",
        "data": None,
        "predictive": "glm",
        "name": "laplace",
    },
    L2MCallback: {
        **USING,
        "scaling": "dataset",
        "prior_precision": None,
        "prior": None,
        "loss_scale": None,
        "n_data": None,
        "tune": "auto",
        "predictive": "glm",
        "name": "l2m",
    },
    OnlineLaplaceCallback: {
        **USING,
        "memory_factor": 1e-4,
        "hessian": "auto",
        "train_samples": 1,
        "prior_precision": 1.0,
        "memory": None,
        "predictive": "bnn",
        "name": "online_laplace",
    },
    MarginalLikelihoodCallback: {
        **USING,
        "structure": "kron",
        "subset": "all",
        "curvature": "auto",
        "prior_precision": 1.0,
        "prior": None,
        "evidence": "marglik",
        "every_n_epochs": 1,
        "burn_in_epochs": 0,
        "data": None,
        "predictive": "glm",
        "name": "marglik",
    },
    SWAGCallback: {
        **USING,
        "start": 0.75,
        "every_n_epochs": 1,
        "every_n_steps": None,
        "data": None,
        "predictive": "bnn",
        "name": "swag",
    },
    Full: {},
    Kron: {"rank": None, "weight_sharing": "expand", "damping": None, "updatable": False},
    EKFAC: {"weight_sharing": "expand"},
    Diag: {"method": "exact"},
    LowRank: {"rank": 100},
    FisherMC: {"samples": 1},
    GLM: {"link": None, "samples": 100},
    BNN: {"samples": 100},
    GP: {"points": 1000, "outputs": "auto", "link": None, "samples": 100},
    MAP: {},
    Prior: {"mean": None, "temperature": 1.0, "posterior": None},
    Tuning: {"method": "auto", "groups": None, "noise": True, "iterate": False, "passes": 10, "fisher": "weights"},
    Learning: {"method": "marglik", "steps": 10, "lr": 0.1, "noise": True, "keep": "best", "loss_scale": None},
    Memory: {"average": False, "scale": 1.0, "extrapolate": True, "initial_curvature": 0.0, "curvature_at": "mean"},
    Network: {"name": None, "output": None, "class_dim": None},
    FitData: {"loader": None, "max_batches": None},
    VariationalLaplaceMixin.__init__: {"variational": None},
    VariationalInferenceMixin.__init__: {"variational": None},
    LogSigmaMultiplierMixin.__init__: {"log_sigma_multiplier": 10.0},
    fit_l2m: {"n_data": REQUIRED, "batch_size": REQUIRED, "scaling": "dataset", "prior_precision": None},
    evaluate: {"predictive": "glm", "seed": 0},
    GaussianPosterior.predict: {"calibrated": True, "differentiable": False, "split": True},
    GaussianPosterior.functional: {"joint": False, "differentiable": False},
    lightning_bayes.fit: {"likelihood": "classification", "trainer": None},
    LaplaceCallback.fit_now: {"val_dataloader": None},
}


def named(function: Any) -> str:
    return function.__qualname__


@pytest.mark.parametrize("function", SIGNATURES, ids=named)
def test_signature_begins_as_promised(function: Any) -> None:
    """More arguments may follow, as long as nobody has to give them."""
    promised, keywords = SIGNATURES[function], KEYWORDS.get(function, {})
    parameters = inspect.signature(function).parameters
    assert {name: p.default for name, p in list(parameters.items())[: len(promised)]} == promised
    for name, extra in list(parameters.items())[len(promised) :]:
        optional = extra.default is not REQUIRED or extra.kind in (extra.VAR_KEYWORD, extra.VAR_POSITIONAL)
        assert optional or name in keywords


@pytest.mark.parametrize("function", KEYWORDS, ids=named)
def test_keywords_have_the_promised_defaults(function: Any) -> None:
    parameters = dict(inspect.signature(function).parameters)
    if function in CALLBACKS:  # those of the base, but for the method's own defaults
        parameters = {**inspect.signature(PosteriorCallback).parameters, **parameters}
    promised = KEYWORDS[function]
    assert {name: p.default for name, p in parameters.items() if name in promised} == promised


CALLBACKS = [LaplaceCallback, L2MCallback, OnlineLaplaceCallback, MarginalLikelihoodCallback, SWAGCallback]


@pytest.mark.parametrize("callback", CALLBACKS, ids=named)
def test_callbacks_take_keywords_after_the_likelihood(callback: Any) -> None:
    for kind in (callback, PosteriorCallback):
        _, *others = (p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD)
        assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("method", ["log_marginal_likelihood", "with_prior", "tune_prior", "update"])
def test_every_posterior_answers_to_the_same_arguments(method: str) -> None:
    """The plain Gaussian refuses, but takes what the Laplace posterior takes."""
    parameters = inspect.signature(getattr(LaplacePosterior, method)).parameters.values()
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    by_place = [None for p in parameters if p.kind is not p.KEYWORD_ONLY]
    inspect.signature(getattr(GaussianPosterior, method)).bind(*by_place, **by_name)


# -- fields ------------------------------------------------------------------------------------------------------------

FIELDS: dict[Any, set[str]] = {
    GaussianPosterior: {"mean", "n_data", "likelihood", "network"},
    LaplacePosterior: {"mean", "n_data", "likelihood", "network", "prior", "temperature"},
    Prediction: {"probs", "mean", "variance", "epistemic", "aleatoric", "entropy", "mutual_information"},
}


@pytest.mark.parametrize("kind", FIELDS, ids=named)
def test_frozen_dataclasses_have_the_promised_fields(kind: Any) -> None:
    assert is_dataclass(kind)
    assert FIELDS[kind] <= {f.name for f in fields(kind)}
    assert kind.__dataclass_params__.frozen
    assert issubclass(LaplacePosterior, GaussianPosterior)
    assert isinstance(LaplacePosterior.prior_precision, property)


def test_out_of_distribution_detection_has_the_promised_keys() -> None:
    metric = metrics.OODDetection()
    metric.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    assert set(metric.compute()) == {"auroc", "aupr_in", "aupr_out", "fpr95"}


class LitNet(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Softplus(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BayesNet(LogSigmaMultiplierMixin, VariationalLaplaceMixin, LitNet):
    pass


class MeanFieldNet(VariationalInferenceMixin, LitNet):
    pass


def test_variational_modules_take_the_promised_words() -> None:
    words: Any = {"likelihood": "classification", "beta": 0.1, "prior_std": 1.0, "n_data": None}
    net = BayesNet(4, log_sigma_multiplier=10.0, variational=words)
    MeanFieldNet(4, variational=words)
    BayesNet(4, log_sigma_multiplier={"*": 3.0}, variational={"n_data": 7})
    assert isinstance(net.log_sigma["net.0.weight"], nn.Parameter)
    assert net.log_sigma["net.0.weight"].shape == (4, 3)
    assert isinstance(net.posterior, GaussianPosterior)


# -- words -------------------------------------------------------------------------------------------------------------

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 2, 1, 1, 0, 2, 2])
BATCHES = [(X[:4], Y[:4]), (X[4:], Y[4:])]


def fit(**arguments: Any) -> LaplacePosterior:
    torch.manual_seed(0)
    return fit_laplace(nn.Linear(3, 3).double(), BATCHES, **{"structure": "diag", **arguments})


# The call, and what it takes.
WORDS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "structure": (lambda word: fit(structure=word), ["auto", "kron", "full", "diag", "ekfac", "lowrank"]),
    "subset": (lambda word: fit(subset=word), ["all", "last_layer", ["bias"], Subnetwork(3)]),
    "by of Subnetwork": (lambda word: Subnetwork(3, word), ["laplace_diag", "magnitude", "random"]),
    "curvature": (lambda word: fit(curvature=word), ["auto", "ggn", "fisher_mc", "empirical_fisher"]),
    "method of Diag": (lambda word: fit(structure=Diag(method=word)), ["exact", "approx", "mixed", "auto"]),
    "prior_precision": (lambda word: fit(prior_precision=word), [2.0, [3.0], torch.ones(12)]),
    "likelihood": (likelihoods.resolve, ["classification", "binary", "regression"]),
    "tune_prior": (
        lambda word: fit().tune_prior(word, loader=BATCHES),
        ["auto", "marglik", "mackay", "linear", "grid"],
    ),
    "predictive": (lambda word: fit(gp=4).predict(X, predictive_of(word, samples=2)), ["glm", "bnn", "map", "gp"]),
    "predictive of functions": (lambda word: fit().sample_function(predictive=word), ["glm", "bnn"]),
    "gp": (lambda word: fit(gp=word), [4, None, GP(points=4), GP(points=None)]),
    "outputs of GP": (lambda word: fit(gp=GP(points=4, outputs=word)), ["auto", "joint", "independent"]),
    "link": (lambda word: fit().predict(X, GLM(link=word, samples=2)), ["pairwise", "probit", "bridge", "mc"]),
    "scaling of L2M": (lambda word: L2MCallback(scaling=word), ["dataset", "paper"]),
    "hessian of online Laplace": (
        lambda word: OnlineLaplaceCallback(hessian=word),
        ["auto", "exact", "approx", "mixed"],
    ),
    "at": (lambda word: OnlineLaplaceCallback(memory=Memory(curvature_at=word)), ["mean", "sample"]),
    "evidence": (lambda word: MarginalLikelihoodCallback(evidence=word), ["marglik", "mackay", "linear"]),
    "norm": (lambda word: metrics.CalibrationError(norm=word), ["l1", "l2", "max"]),
    "binning": (lambda word: metrics.CalibrationError(binning=word), ["width", "mass"]),
}


@pytest.mark.parametrize("argument", WORDS)
def test_words_mean_something(argument: str) -> None:
    call, words = WORDS[argument]
    for word in words:
        assert call(word) is not None
