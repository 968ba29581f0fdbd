"""`VariationalOptions`: the `variational={…}` argument of a module, checked and with all defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Any

from lightning_bayes.arguments import count, flag, plain_values, positive, shown, word
from lightning_bayes.likelihoods import Categorical, Likelihood, resolve
from lightning_bayes.likelihoods.outputs import UnknownLikelihoodError
from lightning_bayes.trainer.options import UseOptions

PREDICTIVES = {"mean": "map", "map": "map", "bnn": "bnn", "glm": "glm"}


class OptionError(ValueError):
    """An unknown key or word in `variational`."""


@dataclass(frozen=True, kw_only=True)
class VariationalOptions(UseOptions):
    """The keys of `variational={…}`, with their defaults; it checks itself when it is made.

    Args:
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        beta: tempers the posterior: weight of the KL divergence.
        prior_std: of the weights: a number, "he" (√(2/fan-in)), "weight_decay" (the optimizer's, which is then set to
            zero), or one of these for each name pattern, as in {"head": 0.1, "*": "he"}.
        n_data: examples in the training data of all processes together; by default they are counted.
        network: the submodule that maps x to f; by default the module's own `forward`.
        output: the key, attribute or index of f in what the network returns; by default a tensor, or its `logits`.
        class_dim: the dimension of f that counts classes; by default the shape of the targets says which it is.
        deterministic: name patterns of parameters without a distribution, such as ["*.bias", "net.1"].
        loss: "returned" (`training_step` returns the mean negative log-likelihood, which is checked) or "likelihood"
            (whatever it returns, the likelihood's own is trained on).
        seed: of everything that is drawn, in training and in prediction.
        curvature: of Variational Laplace: "fisher", or for study "empirical" or "hessian".
        method: how Variational Laplace computes its step: "auto", "exact", "finite_difference" or "two_passes".
        train_samples: weight samples per training step of variational inference.
        local_reparameterization: sample the outputs of linear and convolutional layers instead of their weights.
        name: suffix of the logged numbers, "vl" or "vi" by default.
        predictive: what `test` and `predict` use: "mean" (the network at the mean weights), "bnn" (weight samples;
            default of variational inference) or "glm" (the linearised network; default of Variational Laplace).
        link: how "glm" integrates over a classifier's outputs: "probit", "pairwise", "bridge" or "mc".
        samples: drawn where a prediction draws.
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write reliability diagrams (of a regression, calibration curves) to the logger, or as PNG files.
        predict_step: "replace" the module's own in `trainer.predict`, "keep" it, or return "both".
    """

    likelihood: Likelihood = field(default_factory=Categorical)
    samples: int = 10
    beta: float = 1.0
    prior_std: float | str | Mapping[str, float | str] = 1.0
    n_data: int | None = None
    deterministic: tuple[str, ...] = ()
    loss: str = "returned"
    curvature: str = "fisher"
    method: str = "auto"
    train_samples: int = 1
    local_reparameterization: bool = False
    error: InitVar[type[Exception]] = OptionError

    def __post_init__(self, error: type[Exception], has_points: bool) -> None:
        super().__post_init__(error, has_points)
        word("loss", self.loss, ("returned", "likelihood"), error)
        word("curvature", self.curvature, ("fisher", "empirical", "hessian"), error)
        word("method", self.method, ("auto", "exact", "finite_difference", "two_passes"), error)
        if self.curvature == "hessian" and self.method in ("finite_difference", "two_passes"):
            raise error("curvature='hessian' has no finite-difference form: use method='exact'")
        positive("beta", self.beta, error)
        count("train_samples", self.train_samples, error=error)
        count("n_data", 1 if self.n_data is None else self.n_data, error=error)
        flag("local_reparameterization", self.local_reparameterization, error)


def options_from(
    given: Mapping[str, Any] | None, *, name: str, predictive: str, unused: tuple[str, ...]
) -> VariationalOptions:
    """The given options of a mixin, with its own `name` and `predictive` by default; it has no use for the keys that
    are `unused`."""
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"variational must be a dictionary of options, got {shown(given)}")
    options: dict[str, Any] = plain_values(given or {})
    known = [f.name for f in fields(VariationalOptions) if f.name not in ("save", *unused)]
    for key in options:
        if key not in known:
            raise OptionError(f"variational has no key {key!r}: use {', '.join(map(repr, known))}")
    if "likelihood" in options:
        options["likelihood"] = _likelihood_from(options["likelihood"])
    if isinstance(options.get("deterministic"), str):
        options["deterministic"] = (options["deterministic"],)
    patterns = options.get("deterministic") or ()
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"deterministic must be a list of name patterns, got {shown(patterns)}")
    options["deterministic"] = tuple(patterns)
    predictive = word("predictive", options.pop("predictive", predictive), tuple(PREDICTIVES), OptionError)
    return VariationalOptions(**{"name": name, "predictive": PREDICTIVES[predictive], **options})


def plain(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same options as tensors, numbers and strings only, which any checkpoint can hold."""
    options: dict[str, Any] = plain_values(given or {})
    likelihood = options.get("likelihood")
    if isinstance(likelihood, Likelihood):
        options["likelihood"] = likelihood.to_state()
    return options


def _likelihood_from(given: str | Likelihood | Mapping[str, Any]) -> Likelihood:
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
