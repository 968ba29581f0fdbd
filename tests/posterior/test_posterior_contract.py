"""The names and signatures that are fixed: nothing may be removed or renamed, and defaults stay."""

import inspect
from typing import Any

import pytest

import lightning_bayes
from lightning_bayes import GaussianPosterior, LaplacePosterior, Prediction, fit_laplace

THIS_LAYER = (
    *("fit_laplace", "GaussianPosterior", "LaplacePosterior", "Prediction"),
    *("Categorical", "Bernoulli", "Gaussian", "HeteroscedasticGaussian"),
)
EXPORTS = (
    *THIS_LAYER,
    *("LaplaceCallback", "L2MCallback", "OnlineLaplaceCallback", "MarginalLikelihoodCallback"),
    *("VariationalLaplaceMixin", "VariationalInferenceMixin", "LogSigmaMultiplierMixin"),
)
REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[Any, dict[str, Any]] = {
    fit_laplace: {
        "network": REQUIRED,
        "loader": REQUIRED,
        "likelihood": "classification",
        "structure": "kron",
        "subset": "all",
        "curvature": "ggn",
        "prior_precision": 1.0,
        "progress": False,
    },
    LaplacePosterior.log_marginal_likelihood: {"self": REQUIRED, "prior_precision": None, "noise_std": None},
    LaplacePosterior.with_prior: {"self": REQUIRED, "prior_precision": REQUIRED},
    LaplacePosterior.tune_prior: {"self": REQUIRED, "method": "auto", "loader": None, "per_layer": False},
    LaplacePosterior.functional: {"self": REQUIRED, "x": REQUIRED},
    LaplacePosterior.predict: {
        "self": REQUIRED,
        "x": REQUIRED,
        "predictive": "glm",
        "link": None,
        "samples": 100,
        "generator": None,
    },
    LaplacePosterior.sample: {"self": REQUIRED, "n": 1, "generator": None},
    LaplacePosterior.log_prob: {"self": REQUIRED, "theta": REQUIRED},
    LaplacePosterior.save: {"self": REQUIRED, "path": REQUIRED},
    GaussianPosterior.load: {"path": REQUIRED, "network": REQUIRED},
    LaplacePosterior.state_dict: {"self": REQUIRED},
    GaussianPosterior.from_state_dict: {"network": REQUIRED, "state": REQUIRED},
    Prediction.to: {"self": REQUIRED},
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signature_begins_as_promised(function: Any) -> None:
    """More arguments may follow, as long as nobody has to give them."""
    promised = SIGNATURES[function]
    parameters = inspect.signature(function).parameters
    found = {name: p.default for name, p in list(parameters.items())[: len(promised)]}
    assert found == promised
    for extra in list(parameters.values())[len(promised) :]:
        assert extra.default is not REQUIRED or extra.kind in (extra.VAR_KEYWORD, extra.VAR_POSITIONAL)


@pytest.mark.parametrize("method", ["log_marginal_likelihood", "with_prior", "tune_prior"])
def test_every_posterior_answers_to_the_same_arguments(method: str) -> None:
    """The plain Gaussian refuses, but takes what the Laplace posterior takes."""
    plain = list(inspect.signature(getattr(GaussianPosterior, method)).parameters)
    assert list(inspect.signature(getattr(LaplacePosterior, method)).parameters)[: len(plain)] == plain


def test_posteriors_have_mean_and_number_of_data() -> None:
    fields = GaussianPosterior.__dataclass_fields__
    assert {"mean", "n_data"} <= set(fields)
    assert issubclass(LaplacePosterior, GaussianPosterior)
    assert GaussianPosterior.__dataclass_params__.frozen
    assert LaplacePosterior.__dataclass_params__.frozen


def test_predictions_have_the_promised_fields() -> None:
    promised = {"probs", "mean", "variance", "epistemic", "aleatoric", "entropy"}
    assert promised <= set(Prediction.__dataclass_fields__)
    assert Prediction.__dataclass_params__.frozen


@pytest.mark.parametrize("name", THIS_LAYER)
def test_package_exports_it(name: str) -> None:
    assert name in lightning_bayes.__all__
    assert getattr(lightning_bayes, name).__name__ == name


def test_package_exports_nothing_else_under_a_fixed_name() -> None:
    """Whatever of the fixed names is there is a class or function of that name, and `__all__` is sorted."""
    for name in set(EXPORTS) & set(vars(lightning_bayes)):
        assert getattr(lightning_bayes, name).__name__ == name
        assert name in lightning_bayes.__all__
    assert list(lightning_bayes.__all__) == sorted(lightning_bayes.__all__)
