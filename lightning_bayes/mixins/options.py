"""`VariationalOptions`: the `variational={…}` argument of a module, checked and with all defaults.

The prior's standard deviation `s` of a parameter is a number or a word:

- `"he"`: `s = √(2/fan_in)`, the scale of He initialisation. A bias uses the fan-in of its layer's weight; a layer
  without a matrix (the scale and shift of a norm) has `s = 1`.
- `"weight_decay"`: a mean negative log-likelihood over `N` examples with the penalty `wd/2 ‖μ‖²` has the prior
  `s = 1/√(N·wd)`. It is known when training starts; until then log σ starts from "he".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_bayes.arguments import count, flag, format_names, format_value, is_positive, plain_values, positive, word
from lightning_bayes.likelihoods import Categorical, Likelihood, resolve
from lightning_bayes.likelihoods.outputs import UnknownLikelihoodError
from lightning_bayes.mixins.log_sigma import by_pattern
from lightning_bayes.options.network import Network, network_option
from lightning_bayes.options.plain import to_plain
from lightning_bayes.options.predictive import MAP, PredictiveOption, predictive_option
from lightning_bayes.options.use import UseOptions
from lightning_bayes.plots.figure import require_matplotlib

_NOT_KEYS = ("save", "calibrate", "progress")  # of a callback only


class OptionError(ValueError):
    """An unknown key or word in `variational`."""


@dataclass(frozen=True, kw_only=True)
class VariationalOptions(UseOptions):
    """The keys of `variational={…}` and their defaults.

    Args:
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        beta: weight of the KL divergence, which tempers the posterior.
        prior_std: standard deviation of the prior: a number, "he" (√(2/fan-in)), "weight_decay" (from the optimizer,
            whose weight decay becomes zero), or one of these per name pattern, as in {"head": 0.1, "*": "he"}.
        n_data: number of training examples over all processes; counted by default.
        network: name of the submodule that maps x to f, by default the module's own `forward`; or
            `Network(name, output, class_dim)`, or a dictionary of its fields.
        deterministic: name patterns of parameters without a distribution, such as ["*.bias", "net.1"].
        loss: "returned" (`training_step` returns the mean negative log-likelihood, which is checked) or "likelihood"
            (the likelihood's own loss replaces whatever `training_step` returns).
        seed: seed of all random numbers, in training and in prediction.
        estimator: curvature of Variational Laplace: "fisher", or, for study, "empirical" or "hessian".
        method: how Variational Laplace computes its step: "auto", "exact", "finite_difference" or "two_passes".
        train_samples: weight samples per training step of variational inference.
        local_reparameterization: sample the outputs of linear and convolutional layers instead of their weights.
        name: suffix of the logged numbers; "vl" or "vi" by default.
        predictive: what `test` and `predict` use: "mean" or "map" (the network at the mean weights), "bnn" (weight
            samples) or "glm" (the linearised network), or an option. The default is `BNN(samples=10)` for variational
            inference and `GLM(samples=10)` for Variational Laplace.
        ood: whether dataloaders after the first hold out-of-distribution data.
        plots: write reliability diagrams (calibration curves for regression) to the logger, or as PNG files.
        predict_step: "replace" the module's own step in `trainer.predict`, "keep" it, or return "both".
    """

    likelihood: Likelihood = field(default_factory=Categorical)
    beta: float = 1.0
    prior_std: float | str | Mapping[str, float | str] = 1.0
    n_data: int | None = None
    deterministic: tuple[str, ...] = ()
    loss: Literal["returned", "likelihood"] = "returned"
    estimator: Literal["fisher", "empirical", "hessian"] = "fisher"
    method: Literal["auto", "exact", "finite_difference", "two_passes"] = "auto"
    train_samples: int = 1
    local_reparameterization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predictive.kind == "gp":
            raise ValueError("a variational module keeps no training points for predictive='gp': use LaplaceCallback")
        self.likelihood.choose_link(self.predictive.link)  # raises for an unknown link
        word("loss", self.loss, ("returned", "likelihood"))
        word("estimator", self.estimator, ("fisher", "empirical", "hessian"))
        word("method", self.method, ("auto", "exact", "finite_difference", "two_passes"))
        if self.estimator == "hessian" and self.method in ("finite_difference", "two_passes"):
            raise ValueError("estimator='hessian' has no finite-difference form: use method='exact'")
        positive("beta", self.beta)
        count("train_samples", self.train_samples)
        count("n_data", 1 if self.n_data is None else self.n_data)
        flag("local_reparameterization", self.local_reparameterization)


def options_from(
    given: Mapping[str, Any] | None, *, name: str, predictive: PredictiveOption, unused: tuple[str, ...]
) -> VariationalOptions:
    """The options of a mixin with its default `name` and `predictive`; `unused` keys raise an error."""
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"variational must be a dictionary of options, got {format_value(given)}")
    options: dict[str, Any] = plain_values(given or {})
    known = [f.name for f in fields(VariationalOptions) if f.name not in (*_NOT_KEYS, *unused)]
    for key in options:
        if key not in known:
            raise OptionError(f"variational has no key {key!r}: use {', '.join(map(repr, known))}")
    if "likelihood" in options:
        options["likelihood"] = _likelihood_from(options["likelihood"])
    if isinstance(options.get("deterministic"), str):
        options["deterministic"] = (options["deterministic"],)
    patterns = options.get("deterministic") or ()
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"deterministic must be a list of name patterns, got {format_value(patterns)}")
    options["deterministic"] = tuple(patterns)
    if options.get("plots"):
        require_matplotlib()
    try:
        used = options.pop("predictive", predictive)
        options["predictive"] = MAP() if used == "mean" else predictive_option(used)
        options["network"] = network_option(options.get("network"))
        return VariationalOptions(**{"name": name, **options})
    except ValueError as error:
        raise OptionError(str(error)) from None


def plain(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options as tensors, numbers and strings, which any checkpoint can hold."""
    options: dict[str, Any] = plain_values(given or {})
    likelihood, predictive, network = (options.get(key) for key in ("likelihood", "predictive", "network"))
    if isinstance(likelihood, Likelihood):
        options["likelihood"] = likelihood.to_state()
    if isinstance(predictive, PredictiveOption):
        options["predictive"] = to_plain(predictive)
    if isinstance(network, Network):
        options["network"] = asdict(network)
    return options


def _likelihood_from(given: str | Likelihood | Mapping[str, Any]) -> Likelihood:
    """A likelihood from an object, a word, or the state that `plain` made."""
    if not isinstance(given, Mapping):
        return resolve(given)
    try:
        return Likelihood.from_state(given)
    except UnknownLikelihoodError:
        name = given.get("name")
        raise OptionError(
            f"the likelihood {name!r} cannot be loaded from a file: pass variational={{'likelihood': …}} again"
        ) from None


PRIOR_STDS = ("he", "weight_decay")


class PriorStdError(ValueError):
    """A prior standard deviation that is invalid or unknown."""


def find_priors(
    given: float | str | Mapping[str, float | str], weights: Mapping[str, nn.Parameter], network: nn.Module
) -> tuple[dict[str, float], tuple[str, ...]]:
    """`s` of each weight of `network`, and the names of the weights that take it from weight decay. The latter have a
    provisional `s` until training starts."""
    fan_in = _fan_ins(weights, network)
    patterns = given if isinstance(given, Mapping) else {"*": given}
    values = by_pattern({pattern: _checked(value) for pattern, value in patterns.items()}, weights, "prior_std")
    missing = [name for name in weights if name not in values]
    if missing:
        raise PriorStdError(
            f"prior_std has no entry for {format_names(missing)}: add a pattern for the rest, as in {{'*': 1.0}}"
        )
    stds = {name: math.sqrt(2 / fan_in[name]) if isinstance(value, str) else value for name, value in values.items()}
    return stds, tuple(name for name, value in values.items() if value == "weight_decay")


def from_weight_decay(
    optimizers: list[Optimizer],
    weights: Mapping[str, nn.Parameter],
    others: Collection[nn.Parameter],
    n_data: int,
    known: Collection[str],
) -> dict[str, float]:
    """`s = 1/√(N·wd)` of `weights`. Their weight decay becomes zero, because the KL divergence replaces it. Weights
    with a `known` prior may have no weight decay; `others` must keep theirs."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if group.get("weight_decay")]
    decay = {p: float(group["weight_decay"]) for group in groups for p in group["params"]}
    without = [name for name, p in weights.items() if p not in decay and name not in known]
    if without:
        raise PriorStdError(
            f"prior_std='weight_decay', but no optimizer has a weight decay for {format_names(without)}: give the "
            "optimizer one, or prior_std a number"
        )
    own = set(weights.values())
    for group in groups:
        members = set(group["params"])
        if members & own and members & set(others):
            raise PriorStdError(
                "prior_std='weight_decay' turns the weight decay of a param group into a prior, but one group also "
                "holds parameters with another prior or none: put those into a separate param group"
            )
        if members & own:
            group["weight_decay"] = 0.0
    return {name: 1 / math.sqrt(n_data * decay[p]) for name, p in weights.items() if p in decay}


def warn_of_optimizers(optimizers: list[Optimizer], weights: Mapping[str, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Warn of weight decay on `(μ, log σ)`, and of log σ that no optimizer trains."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decayed = {p for group in groups if group.get("weight_decay") for p in group["params"]}
    twice = [name for name, pair in weights.items() if decayed & set(pair)]
    if twice:
        rank_zero_warn(
            f"the optimizer has a weight decay for {format_names(twice)} or its log σ, but the KL divergence already "
            "pulls both to the prior: set it to zero, or use variational={'prior_std': 'weight_decay'} to turn it into "
            "the prior"
        )
    trained = {p for group in groups for p in group["params"]}
    untrained = [name for name, (_, log_σ) in weights.items() if log_σ not in trained]
    if untrained and trained:
        rank_zero_warn(
            f"no optimizer has log σ of {format_names(untrained)}: give it self.parameters(), or derive from "
            "LogSigmaMultiplierMixin too, which adds them"
        )


def _fan_ins(weights: Mapping[str, nn.Parameter], network: nn.Module) -> dict[str, float]:
    """Inputs per output; 2 for a layer without a matrix, for which "he" is 1."""
    names = {id(p): name for name, p in weights.items()}
    fan_ins: dict[str, float] = {}
    for layer in network.modules():
        own = list(layer.parameters(recurse=False))
        matrix = next((p for p in own if p.ndim > 1), None)
        for p in own:
            source = p if p.ndim > 1 else matrix
            if id(p) in names:
                fan_ins.setdefault(names[id(p)], 2.0 if source is None else float(source.shape[1:].numel()))
    return fan_ins


def _checked(value: Any) -> float | str:
    if isinstance(value, str) and value in PRIOR_STDS:
        return value
    if not is_positive(value):
        words = ", ".join(map(repr, PRIOR_STDS))
        raise PriorStdError(f"prior_std must be a positive number or one of {words}, got {format_value(value)}")
    return float(value)
