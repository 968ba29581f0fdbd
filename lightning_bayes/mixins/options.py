"""What a variational module is told in its `variational` argument: plain words and numbers, in one dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from lightning_bayes.arguments import count, flag, plain_values, positive, shown, word
from lightning_bayes.likelihoods import Categorical, Likelihood, UnknownLikelihoodError, resolve
from lightning_bayes.trainer.options import UseOptions

CURVATURES = ("fisher", "empirical", "hessian")
METHODS = ("auto", "exact", "finite_difference")
LOSSES = ("returned", "likelihood")
PREDICTIVES = {"mean": "map", "map": "map", "bnn": "bnn", "glm": "glm"}


class OptionError(ValueError):
    """An unknown key or word in `variational`."""


class VariationalOptions(TypedDict, total=False):
    """The keys of `variational`; each has a default.

    likelihood: "classification" (default), "binary", "regression", or a `Likelihood`.
    beta: tempers the posterior: weight of the KL divergence, 1 by default.
    prior_std: of the weights, 1 by default: a number, "he" (√(2/fan-in)), "weight_decay" (the optimizer's, which is
        then set to zero), or one of these for each name pattern, as in {"head": 0.1, "*": "he"}.
    n_data: examples in the training data of all processes together; by default they are counted.
    network: the submodule that maps x to f; by default the module's own `forward`.
    deterministic: name patterns of parameters without a distribution, such as ["*.bias", "net.1"].
    loss: "returned" (default: `training_step` returns the mean negative log-likelihood, which is checked) or
        "likelihood" (whatever it returns, the likelihood's own is trained on).
    seed: of everything that is drawn, in training and in prediction.
    curvature: of Variational Laplace: "fisher" (default), or for study "empirical" or "hessian".
    method: how Variational Laplace computes its step: "auto", "exact" or "finite_difference".
    train_samples: weight samples per training step of variational inference, 1 by default.
    local_reparameterization: sample the outputs of linear and convolutional layers in the place of their weights.
    name: suffix of the logged numbers, "vl" or "vi" by default.
    predictive: what `test` and `predict` use: "mean" (the network at the mean weights), "bnn" (weight samples; default
        of variational inference) or "glm" (the linearised network; default of Variational Laplace).
    link: how "glm" integrates over a classifier's outputs: "probit", "pairwise", "bridge" or "mc".
    samples: drawn where a prediction draws, 10 by default.
    ood: dataloaders after the first hold out-of-distribution data.
    plots: write reliability diagrams (of a regression, calibration curves) to the logger, or as PNG files.
    predict_step: "replace" the module's own in `trainer.predict` (default), "keep" it, or return "both".
    """

    likelihood: str | Likelihood | dict[str, Any]
    beta: float
    prior_std: float | str | dict[str, float | str]
    n_data: int | None
    network: str | None
    deterministic: list[str]
    loss: str
    seed: int
    curvature: str
    method: str
    train_samples: int
    local_reparameterization: bool
    name: str
    predictive: str
    link: str | None
    samples: int
    ood: bool
    plots: bool
    predict_step: str


@dataclass(frozen=True)
class Settings:
    """`VariationalOptions` with every default filled in and every word checked."""

    name: str
    predictive: str
    likelihood: Likelihood = field(default_factory=Categorical)
    beta: float = 1.0
    prior_std: Any = 1.0
    n_data: int | None = None
    network: str | None = None
    deterministic: tuple[str, ...] = ()
    loss: str = "returned"
    seed: int = 0
    curvature: str = "fisher"
    method: str = "auto"
    train_samples: int = 1
    local_reparameterization: bool = False
    link: str | None = None
    samples: int = 10
    ood: bool = False
    plots: bool = False
    predict_step: str = "replace"

    def __post_init__(self) -> None:
        word("predictive", self.predictive, tuple(PREDICTIVES), OptionError)
        word("loss", self.loss, LOSSES, OptionError)
        word("curvature", self.curvature, CURVATURES, OptionError)
        word("method", self.method, METHODS, OptionError)
        if self.curvature == "hessian" and self.method == "finite_difference":
            raise OptionError("curvature='hessian' has no finite-difference form: use method='exact'")
        positive("beta", self.beta, OptionError)
        count("train_samples", self.train_samples, error=OptionError)
        count("n_data", 1 if self.n_data is None else self.n_data, error=OptionError)
        flag("local_reparameterization", self.local_reparameterization, OptionError)
        self.use()  # which checks itself

    def use(self) -> UseOptions:
        """What the callback is told."""
        return UseOptions(
            name=self.name,
            likelihood=self.likelihood,
            predictive=PREDICTIVES[self.predictive],
            link=self.link,
            samples=self.samples,
            network=self.network,
            ood=self.ood,
            plots=self.plots,
            seed=self.seed,
            predict_step=self.predict_step,
            error=OptionError,
        )


def settings_from(given: VariationalOptions | None, **defaults: Any) -> Settings:
    """`defaults` are those that differ from one mixin to the next; `unused` among them names keys it has no use for."""
    unused = set(defaults.pop("unused", ()))
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"variational must be a dictionary of options, got {shown(given)}")
    options: dict[str, Any] = plain_values(given or {})
    known = [f.name for f in fields(Settings) if f.name not in unused]
    for key in options:
        if key not in known:
            raise OptionError(f"variational has no key {key!r}: use {', '.join(map(repr, known))}")
    if "likelihood" in options:
        options["likelihood"] = likelihood_from(options["likelihood"])
    if isinstance(options.get("deterministic"), str):
        options["deterministic"] = (options["deterministic"],)
    patterns = options.get("deterministic") or ()
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"deterministic must be a list of name patterns, got {shown(patterns)}")
    options["deterministic"] = tuple(patterns)
    return Settings(**{**defaults, **options})


def plain(given: VariationalOptions | None) -> dict[str, Any]:
    """The same options as tensors, numbers and strings only, which any checkpoint can hold."""
    options: dict[str, Any] = plain_values(given or {})
    likelihood = options.get("likelihood")
    if isinstance(likelihood, Likelihood):
        options["likelihood"] = likelihood.to_state()
    return options


def likelihood_from(given: str | Likelihood | Mapping[str, Any]) -> Likelihood:
    """A likelihood, the one that a word means, or the one that `plain` described."""
    if not isinstance(given, Mapping):
        return resolve(given)
    try:
        return Likelihood.from_state(given)
    except UnknownLikelihoodError:
        name = given.get("name")
        raise OptionError(
            f"the likelihood {name!r} cannot be made from a file: pass variational={{'likelihood': …}} again"
        ) from None
