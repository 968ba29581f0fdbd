"""`VariationalMixin`: a LightningModule with a Gaussian over its weights; the base of the variational mixins.

`VariationalOptions` are the keys of `variational={…}`. The mixin defines the public names and Lightning hooks of the
module. The work is done by `GaussianWeights`, its one private attribute `_variational`, and by `VariationalCallback`,
which scores and predicts with the posterior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_bayes.arguments import count, flag, format_value, plain_values, positive, to_plain, word
from lightning_bayes.likelihoods import Categorical, Likelihood, resolve
from lightning_bayes.likelihoods.outputs import UnknownLikelihoodError
from lightning_bayes.mixins.gaussian_weights import MIXIN_FIRST, GaussianWeights, LogSigma
from lightning_bayes.network.output import unwrap_output
from lightning_bayes.options.callback import UseOptions
from lightning_bayes.options.fit import Network, network_option
from lightning_bayes.options.predictive import MAP, PredictiveOption, predictive_option
from lightning_bayes.plots.figure import require_matplotlib
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.trainer import PosteriorCallback
from lightning_bayes.trainer.module import refuse_sharded

if TYPE_CHECKING:
    MixinBase = LightningModule
else:
    MixinBase = object  # at run time, a mixin needs no base, because it is combined with the user's LightningModule
LossWord = Literal["returned", "likelihood"]
EstimatorWord = Literal["fisher", "empirical", "hessian"]
CovarianceWord = Literal["dense", "diagonal"]
StepMethod = Literal["auto", "exact", "finite_difference", "two_passes"]
_KEY = "variational"  # the key of the mixin's state in a checkpoint
# Options of Variational Laplace, of variational inference, and of a variational last layer
CURVATURE, SAMPLING = ("estimator", "method"), ("train_samples", "local_reparameterization")
LAST_LAYER = ("covariance", "learn_noise")
_NOT_KEYS = ("save", "calibrate", "progress")  # options that only callbacks have


class OptionError(ValueError):
    """An unknown key or word in `variational`."""


@dataclass(frozen=True, kw_only=True)
class VariationalOptions(UseOptions):
    """The keys of `variational={…}` and their defaults.

    Args:
        likelihood: "classification", "binary", "regression", or a `Likelihood`.
        beta: weight of the KL divergence in the loss; it tempers the posterior.
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
        covariance: of each output's weights in a variational last layer: "dense" or "diagonal".
        learn_noise: learn the noise of a regression with the variational last layer, from `noise_std` of the likelihood
            on; the loss that `training_step` returns is then ignored.
        name: suffix of the logged numbers; "vl", "vi" or "vbll" by default.
        predictive: what `test` and `predict` use: "mean" or "map" (the network at the mean weights), "bnn" (weight
            samples) or "glm" (the linearised network), or an option. The default is `BNN(samples=10)` for variational
            inference, `GLM(samples=10)` for Variational Laplace, and `GLM()` for a variational last layer.
        ood: whether dataloaders after the first have out-of-distribution data.
        plots: write reliability diagrams (calibration curves for regression) to the logger, or as PNG files.
        predict_step: "replace" the module's own step in `trainer.predict`, "keep" it, or return "both".
    """

    likelihood: Likelihood = field(default_factory=Categorical)
    beta: float = 1.0
    prior_std: float | str | Mapping[str, float | str] = 1.0
    n_data: int | None = None
    deterministic: tuple[str, ...] = ()
    loss: LossWord = "returned"
    estimator: EstimatorWord = "fisher"
    method: StepMethod = "auto"
    train_samples: int = 1
    local_reparameterization: bool = False
    covariance: CovarianceWord = "dense"
    learn_noise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predictive.kind == "gp":
            raise ValueError("a variational module keeps no training points for predictive='gp': use LaplaceCallback")
        self.likelihood.choose_link(self.predictive.link)  # raises an error for an unknown link
        word("loss", self.loss, get_args(LossWord))
        word("estimator", self.estimator, get_args(EstimatorWord))
        word("covariance", self.covariance, get_args(CovarianceWord))
        word("method", self.method, get_args(StepMethod))
        if self.estimator == "hessian" and self.method in ("finite_difference", "two_passes"):
            raise ValueError("estimator='hessian' has no finite-difference form: use method='exact'")
        positive("beta", self.beta)
        count("train_samples", self.train_samples)
        count("n_data", 1 if self.n_data is None else self.n_data)
        flag("local_reparameterization", self.local_reparameterization)
        flag("learn_noise", self.learn_noise)


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
        given_likelihood = options["likelihood"]  # a `Likelihood`, a word, or the state that `plain` has stored
        try:
            is_state = isinstance(given_likelihood, Mapping)
            options["likelihood"] = (Likelihood.from_state if is_state else resolve)(given_likelihood)
        except UnknownLikelihoodError:
            raise OptionError(
                f"the likelihood {given_likelihood.get('name')!r} cannot be loaded from a file: pass "
                "variational={'likelihood': …} again"
            ) from None
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
    """The options as tensors, numbers and strings, which any checkpoint can store."""
    options: dict[str, Any] = plain_values(given or {})
    likelihood, predictive, network = (options.get(key) for key in ("likelihood", "predictive", "network"))
    if isinstance(likelihood, Likelihood):
        options["likelihood"] = likelihood.to_state()
    if isinstance(predictive, PredictiveOption):
        options["predictive"] = to_plain(predictive)
    if isinstance(network, Network):
        options["network"] = asdict(network)
    return options


class VariationalMixin(MixinBase):
    """Weights with a Gaussian each; the base of the variational mixins."""

    log_sigma: LogSigma
    _variational: GaussianWeights

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(VariationalMixin):
            raise TypeError(
                f"{MIXIN_FIRST}: class {cls.__name__} has it the other way round, and would be a plain module"
            )

    @property
    def posterior(self) -> GaussianPosterior:
        """`N(μ, diag σ²)` over the network's current weights; for a variational last layer, with its covariances."""
        return self._variational.posterior()

    def weights_and_log_sigma(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name, for the weights that are not frozen."""
        return self._variational.pairs()

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        own = super().configure_callbacks()
        return [*(own if isinstance(own, Sequence) else [own]), VariationalCallback(self._variational)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_KEY] = self._variational.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._variational.load_state_dict(checkpoint.get(_KEY, {}))
        self._variational.add_missing_log_sigma(checkpoint["state_dict"])


def make_variational(
    module: VariationalMixin,
    given: Mapping[str, Any] | None,
    *,
    name: str,
    predictive: PredictiveOption,
    unused: tuple[str, ...],
    gaussian: type[GaussianWeights] = GaussianWeights,
) -> None:
    """Make the module variational, with a `gaussian` over its weights: called in the `__init__` of a mixin. For the
    other arguments see `options_from`."""
    options = options_from(given, name=name, predictive=predictive, unused=unused)
    # `load_from_checkpoint` finds the options here, even if the user's module saves no hyperparameters.
    module.hparams["variational"] = plain(given)
    module._variational = gaussian(module, options)
    module.log_sigma = module._variational.log_sigma


class VariationalCallback(PosteriorCallback):
    """Scores and predicts with the module's current posterior. It stores no posterior, because the module's own
    parameters define it."""

    def __init__(self, q: GaussianWeights) -> None:
        options = {field.name: getattr(q.options, field.name) for field in fields(UseOptions)}
        super().__init__(q.options.likelihood, **options)
        self._q = q

    def _find_posterior(self) -> GaussianPosterior | None:
        if self._module is None:
            return None
        now, before = self._module.posterior, self._posterior
        assert isinstance(now, GaussianPosterior)
        if (
            before is not None
            and unwrap_output(before.network) is unwrap_output(now.network)
            and (before.subset.names, before.device) == (now.subset.names, now.device)
        ):
            now = replace(now, plans=before.plans)  # plans do not depend on the weights' values
        self._posterior = now
        return now

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "a variational module")

    def _check_module(self, module: LightningModule) -> None:
        pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._q.begin(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._q.checks.raise_pending()
        super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._q.checks.raise_pending()
        super().on_train_end(trainer, pl_module)
