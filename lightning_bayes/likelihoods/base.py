"""The base classes of likelihoods `p(y | f)` and of predictive distributions of `y`.

For a batch of outputs `f` (layouts in `outputs.py`) and targets `y`, a likelihood provides

- `log p(y | f)` with all constants, and its gradient, the *residual* `r = ∂ log p(y | f) / ∂f`;
- a root `S` of the output Fisher `Λ = E_y[r rᵀ] = SSᵀ`, with `y` drawn from the model. `Λ` equals the output Hessian
  `−∂² log p / ∂f²` if `f` is the natural parameter (Categorical, Bernoulli, Gaussian), and is always PSD;
- samples of `y` from the model;
- the mean and variance of `y` given `f`, from which predictives are built.

A new likelihood needs four methods: `log_likelihood_per_example`, `fisher_root`, `sample` and `conditional`. With a
`name` it can be saved, and with a `word` users can select it as `likelihood=word`.

A `Predictive` is the distribution of targets with the outputs `f` integrated out. By the law of total variance,

    E[y] = E_f[E[y | f]],    Var[y] = Var_f(E[y | f]) + E_f[Var(y | f)] = epistemic + aleatoric.

For a class label, read as a one-hot vector, `E[y | f] = p` and `Var(y | f) = p(1 − p)`. This is the diagonal of the
decomposition `diag Cov[p] + E[p(1 − p)] = E[p](1 − E[p])` of Kwon et al. (2020), "Uncertainty quantification using
Bayesian neural networks in classification".

The entropy also splits in two: the mutual information of label and outputs, and the expected entropy given `f`,

    H[y] = I(y; f) + E_f[H[y | f]]    (Houlsby et al. 2011, "Bayesian active learning for classification and preference
                                       learning"; Depeweg et al. 2018).

For real targets `I = ½ log(Var[y] / aleatoric)`, which is exact for Gaussian outputs with one noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bayes.arguments import count, format_value, register
from lightning_bayes.likelihoods.outputs import (
    LikelihoodError,
    UnknownLikelihoodError,
    check_generator,
    draw_gaussian,
    gaussian_nodes,
    sum_per_example,
    widen,
)


@dataclass(frozen=True)
class Predictive:
    """The predictive distribution of real targets; all tensors have the shape of `y`."""

    has_probs: ClassVar[bool] = False  # whether the mean is a probability
    chooses_one_class: ClassVar[bool] = False  # whether the probabilities are those of the classes of one label

    mean: Tensor  # E[y]
    epistemic: Tensor  # Var_f(E[y | f]), which more data would reduce
    aleatoric: Tensor  # E_f[Var(y | f)], the noise

    @classmethod
    def from_conditionals(cls, means: Tensor, variances: Tensor) -> Predictive:
        """From the means and variances of `y` given equally likely outputs.  # [S, B, …] each"""
        mean = means.mean(0)
        return cls(mean, (means - mean).square_().mean(0), variances.mean(0))

    def tempered(self, T: float | Tensor) -> Predictive:
        """The variance times `T²`: a Gaussian to the power `1/T²`, normalised."""
        return replace(self, epistemic=T**2 * self.epistemic, aleatoric=T**2 * self.aleatoric)

    def with_mean(self, mean: Tensor) -> Predictive:
        """The same predictive with another mean and an unchanged variance."""
        return replace(self, mean=mean)

    @property
    def variance(self) -> Tensor:
        """The variance of `y`, noise included."""
        return self.epistemic + self.aleatoric

    @property
    def entropy(self) -> Tensor:
        """`½ log 2πe·Var[y]` of each output, the differential entropy of the Gaussian with this variance."""
        return 0.5 * torch.log(2 * math.pi * math.e * self.variance)

    @property
    def mutual_information(self) -> Tensor | None:
        """`I(y; f)` of each output, in nats."""
        return 0.5 * torch.log1p(self.epistemic / self.aleatoric)


@dataclass(frozen=True)
class ClassPredictive(Predictive):
    """The predictive distribution of one class label out of `C`: `probs`, epistemic and aleatoric are `[B, C, …]`."""

    mutual_information: Tensor | None = None  # I(y; f), in the shape of the entropy

    has_probs = True
    chooses_one_class = True

    @classmethod
    def from_conditionals(cls, means: Tensor, variances: Tensor) -> ClassPredictive:
        mean = means.mean(0)
        given_f = cls.entropy_of(means.flatten(0, 1)).unflatten(0, means.shape[:2]).mean(0)  # E_f[H[y | f]]
        information = (cls.entropy_of(mean) - given_f).clamp_min(0)
        return cls(mean, (means - mean).square_().mean(0), variances.mean(0), information)

    @property
    def probs(self) -> Tensor:
        """The predictive probabilities."""
        return self.mean

    def tempered(self, T: float | Tensor) -> ClassPredictive:
        """`p^(1/T)`, normalised: sharper for `T < 1`. The epistemic proportions of variance and entropy do not
        change."""
        return self.with_mean((log_probability(self.probs) / T).softmax(1))

    def with_mean(self, mean: Tensor) -> ClassPredictive:
        """The same predictive with other probabilities. Their variance and entropy are split in the same
        proportions."""
        tiny = torch.finfo(mean.dtype).tiny
        variance = mean * (1 - mean)
        epistemic = variance * (self.epistemic / self.variance.clamp_min(tiny))
        information = self.mutual_information
        if information is not None:
            information = self.entropy_of(mean) * (information / self.entropy.clamp_min(tiny))
        return type(self)(mean, epistemic, variance - epistemic, information)

    @property
    def entropy(self) -> Tensor:
        """The predictive entropy: of one label `[B, *positions]`, or of each yes/no label in the shape of `probs`."""
        return self.entropy_of(self.probs)

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        """`−Σ_c p_c log p_c` with `0 log 0 = 0`.  # [B, *positions]"""
        return _plogp(probs).sum(1).abs()


@dataclass(frozen=True)
class LabelPredictive(ClassPredictive):
    """The predictive distribution of independent yes/no labels: `probs` is `p(y = 1)` of each label."""

    chooses_one_class = False

    def tempered(self, T: float | Tensor) -> ClassPredictive:
        return self.with_mean((log_odds(self.probs) / T).sigmoid())

    @staticmethod
    def entropy_of(probs: Tensor) -> Tensor:
        """The binary entropy of each label, in the shape of `probs`."""
        return (_plogp(probs) + _plogp(1 - probs)).abs()


def _plogp(p: Tensor) -> Tensor:
    """`p log p` with one copy of `p` in memory, twice as fast as `torch.special.entr`."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log_().mul_(p)


def log_probability(p: Tensor) -> Tensor:
    """`log p`, finite even if a probability has underflowed to zero."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


def log_odds(p: Tensor) -> Tensor:
    """`log(p / (1 − p))`, finite even if a probability has been rounded to zero or one."""
    return p.logit(torch.finfo(p.dtype).eps)


class Likelihood(ABC):
    """`p(y | f)` of targets `y` given network outputs `f` (layouts `[B]`, `[B, C]`, `[B, C, *positions]`).

    Likelihoods are immutable and their methods are pure. Call `check` once per batch, where data enters. All other
    methods repeat only the cheap checks of types and shapes, so that targets are never broadcast.
    """

    name: ClassVar[str | None] = None  # identifies the class in files; not inherited by subclasses
    word: ClassVar[str | None] = None  # selects the class with its default settings, as in `likelihood=word`
    predictive: ClassVar[type[Predictive]] = Predictive
    links: ClassVar[tuple[str, ...]] = ("mc",)  # methods to integrate over f; the first is the default
    calibrated_link: ClassVar[str | None] = None  # the default if a temperature is fitted; None: the first link
    is_convex: ClassVar[bool] = True  # whether −log p(y | f) is convex in f
    has_diagonal_fisher: ClassVar[bool] = False  # if True, `fisher_diagonal` is all of Λ and the root is never built
    couples_outputs: ClassVar[bool] = False  # if True, a column of the Fisher's root spans all positions of an example
    takes_positions: ClassVar[bool] = False  # whether outputs `[B, C, *positions]` are supported
    ignore_index: int | None = None  # the target that marks positions without a target
    noise_std: float | Tensor | None = None  # σ, if `log p` contains `½ ‖(y − f)/σ‖²`

    NAMES: ClassVar[dict[str, type[Likelihood]]] = {}
    WORDS: ClassVar[dict[str, type[Likelihood]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(Likelihood.NAMES, cls, "name")
        register(Likelihood.WORDS, cls, "word")
        root, flag = (
            next(i for i, kind in enumerate(cls.__mro__) if name in vars(kind))
            for name in ("fisher_root", "has_diagonal_fisher")
        )
        if root < flag:  # a subclass has overridden the root, so the inherited flag no longer describes it
            cls.has_diagonal_fisher = False

    @abstractmethod
    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        """`log p(yₙ | fₙ)` of each example, summed over its positions and outputs, with all constants: `[B]`."""

    @abstractmethod
    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Columns `S` `[K, B, C, *positions]` with `Λ = Σ_k S_k S_kᵀ` over dim C, at each example and position; over
        all outputs of an example if the likelihood `couples_outputs`.

        `y` is used only to find positions without a target (`ignore_index`), where the columns are zero.
        """

    @abstractmethod
    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        """Targets drawn from the model by inverse CDF from `uniform` numbers in (0, 1), `noise_shape` per example.

        The targets of an example depend only on its own uniform numbers, so batches can be split in any way. Positions
        that `y` marks as having no target keep the mark.
        """

    @abstractmethod
    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance of `y` given `f`, each in the shape of `y` (one-hot for classes)."""

    def nll_bound_per_example(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """An upper bound of `E_f[−log p(yₙ | fₙ)]` for independent outputs `f ~ N(mean, variance)`, without samples.
        # [B, …], [B, …] -> [B]"""
        raise LikelihoodError(
            f"{type(self).__name__} has no bound of its expected negative log-likelihood: use Categorical, Bernoulli, "
            "Gaussian or HeteroscedasticGaussian, or define nll_bound_per_example."
        )

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """`diag Λ` in the shape of `f`."""
        return self.fisher_root(f, y).square().sum(0)

    def noise_shape(self, f: Tensor) -> torch.Size:
        """The shape of the uniform numbers that `sample` takes per example."""
        return f.shape[1:]

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive | Tensor | None:
        """The integral over `f` by this link: the predictive, or only its mean, or None if the integral needs
        samples."""
        return None

    def wrong_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """A mask of the targets that are impossible for any output.  # [*y.shape]"""
        return torch.zeros_like(y, dtype=torch.bool)

    def wrong_target(self, target: float, f: Tensor) -> LikelihoodError:
        """The error for an impossible target."""
        return LikelihoodError(f"{type(self).__name__} got the target {target:g}, which is impossible for any output.")

    def n_targets(self, y: Tensor) -> Tensor:
        """The number of targets, without those marked by `ignore_index`."""
        return torch.tensor(y.numel(), device="cpu")

    def with_noise(self, noise_std: float | Tensor) -> Likelihood:
        """The same likelihood with another noise."""
        raise LikelihoodError(f"{type(self).__name__} has no noise_std to change.")

    def squared_error(self, f: Tensor, y: Tensor) -> Tensor | None:
        """`Σₙ ‖(yₙ − fₙ)/σ‖²` in float64 for a likelihood with a tunable noise `σ`, otherwise `None`."""
        return None

    def least_nll(self, n_outputs: int) -> float:
        """A lower bound of `−log p(y | f)` over all values of `n_outputs` outputs; `-inf` if there is no bound."""
        return 0.0 if self.has_probs else -math.inf

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The factors `s` for which a common loss, summed over all targets, is `s` times the negative log-likelihood up
        to `constant`. The first factor is that of torch's own loss."""
        return (1.0,)

    def constant(self, y: Tensor) -> float:
        """The part of `−Σₙ log p(yₙ | fₙ)` that does not depend on `f` and that losses leave out."""
        return 0.0

    def log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        """`Σₙ log p(yₙ | fₙ)`, a sum and never a mean."""
        return self.log_likelihood_per_example(f, y).sum()

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """`∂ log p(y | f) / ∂f` in the shape of `f`; zero at positions without a target."""
        with torch.inference_mode(False):  # in inference mode, older versions of torch silently return zeros
            gradient: Tensor = torch.func.grad(self.log_likelihood)(widen(f).clone(), y.clone())
        return gradient

    def point(self, f: Tensor) -> Predictive:
        """The predictive at known outputs `f` (MAP), without an epistemic part."""
        mean, variance = self.conditional(f)
        return self.predictive.from_conditionals(mean.unsqueeze(0), variance.unsqueeze(0))

    def from_samples(self, f_samples: Tensor) -> Predictive:
        """The Monte Carlo predictive of output samples `[S, B, …]`, by the law of total variance."""
        S, B = f_samples.shape[:2]
        means, variances = (t.unflatten(0, (S, B)) for t in self.conditional(f_samples.flatten(0, 1)))  # [S, B, …]
        return self.predictive.from_conditionals(means, variances)

    def integrate(
        self,
        mean: Tensor,
        covariance: Tensor,
        link: str | None = None,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Predictive:
        """The predictive under a Gaussian over outputs with this mean and covariance `[B, C, C]`, or variances.

        `link` is one of `links`. Parts without a closed form are averages over `samples` values of the outputs. For
        "mc" these are random draws from the `generator`. For the epistemic and aleatoric shares of "probit" and
        "pairwise" they are fixed points, so the shares are deterministic. With `samples=0` these shares are NaN.
        """
        self._check_outputs(mean)
        self._check_tensor("variances of the outputs", covariance)
        count("samples", samples, 0, LikelihoodError)
        check_generator(generator)
        mean, covariance = widen(mean), widen(covariance)
        closed = self.closed_form(mean, covariance, self.choose_link(link))
        if closed is None:
            return self.from_samples(draw_gaussian(mean, covariance, samples, generator))
        if isinstance(closed, Predictive):
            return closed
        if samples == 0:
            unknown = torch.full_like(closed, math.nan)
            return self.predictive(closed, unknown, unknown)
        return self.from_samples(gaussian_nodes(mean, covariance, samples)).with_mean(closed)

    def choose_link(self, link: str | None) -> str:
        """`link`, or the default if it is `None`; an unknown link raises an error."""
        if link is None:
            return self.links[0]
        if not isinstance(link, str) or link not in self.links:
            words = ", ".join(repr(word) for word in self.links)
            raise LikelihoodError(f"{type(self).__name__} cannot integrate with link={link!r}; choose one of {words}.")
        return link

    def predictive_log_likelihood(self, predictive: Predictive, y: Tensor) -> Tensor:
        """`log p(yₙ)` of each example under a predictive; by default, under the Gaussian with its mean and variance.
        # [B]"""
        variance = predictive.variance
        error = y.reshape(variance.shape).to(variance.dtype) - predictive.mean
        return sum_per_example(-0.5 * (error.square() / variance + (2 * math.pi * variance).log()))

    @property
    def tunable_noise(self) -> float | Tensor | None:
        """`σ`, if `with_noise` can change it."""
        return None if type(self).with_noise is Likelihood.with_noise else self.noise_std

    @property
    def has_probs(self) -> bool:
        """Whether predictions are probabilities, of classes or of yes/no labels."""
        return self.predictive.has_probs

    @property
    def chooses_one_class(self) -> bool:
        """Whether outputs are logits of the classes of one label."""
        return self.predictive.chooses_one_class

    def settings(self) -> dict[str, Any]:
        """The constructor arguments as tensors, numbers and strings; by default the fields of a dataclass."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)} if is_dataclass(self) else {}

    def to_state(self) -> dict[str, Any]:
        """The name and settings; for a class without a `name`, only its import path."""
        if self._own_name is None:
            return {"name": f"{type(self).__module__}.{type(self).__qualname__}"}
        return {"name": self._own_name, **self.settings()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Likelihood:
        """The likelihood that `to_state` described."""
        settings = dict(state)
        name = settings.pop("name", None)
        if name not in Likelihood.NAMES:
            raise UnknownLikelihoodError(f"no likelihood named {name!r} is known: import the file that defines it.")
        return Likelihood.NAMES[name](**settings)

    def to(self, device: torch.device) -> Likelihood:
        """A copy with its tensors on another device. A likelihood without a `name` is returned unchanged."""
        if self._own_name is None:
            return self
        state = self.to_state().items()
        return Likelihood.from_state({key: v.to(device) if isinstance(v, Tensor) else v for key, v in state})

    @property
    def _own_name(self) -> str | None:
        return type(self).__dict__.get("name")

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise `LikelihoodError` if outputs or targets do not fit this likelihood."""
        self.check_fit(f, y)
        if f.isnan().any():
            first = int(f.isnan().reshape(len(f), -1).any(1).nonzero()[0])
            raise LikelihoodError(
                f"{type(self).__name__} got NaN in the network's output, first for example {first} of the batch; "
                "check the inputs and the weights."
            )
        wrong = self.wrong_targets(f, y)
        if wrong.any():
            raise self.wrong_target(y[wrong][0].item(), f)

    def check_fit(self, f: Tensor, y: Tensor) -> None:
        """Raise an error if types or shapes do not fit. This check reads no values of tensors, so it forces no device
        synchronisation."""
        self._check_outputs(f)
        self._check_tensor("targets", y)
        self._check_targets(f, y)

    def _outputs(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """`f` in at least float32, after checking the types and shapes of `f` and, if given, `y`."""
        if y is None:
            self._check_outputs(f)
        else:
            self.check_fit(f, y)
        return widen(f)

    def _check_outputs(self, f: Tensor) -> None:
        self._check_tensor("network outputs", f)
        if not f.is_floating_point() or f.ndim == 0:
            raise LikelihoodError(
                f"{type(self).__name__} needs floating-point network outputs with a batch dimension, got {f.dtype} of "
                f"shape {list(f.shape)}; return the raw outputs of the last layer."
            )

    def _check_targets(self, f: Tensor, y: Tensor) -> None:
        if y.ndim == 0 or len(y) != len(f):
            raise LikelihoodError(
                f"{type(self).__name__} needs one target per example, got outputs of shape {list(f.shape)} "
                f"and targets of shape {list(y.shape)}."
            )

    def _check_tensor(self, what: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise LikelihoodError(f"{type(self).__name__} needs {what} as a tensor, got {format_value(value)}.")

    def _check_shape(self, f: Tensor, y: Tensor, expected: tuple[int, ...]) -> None:
        """Raise an error unless `y` has the expected shape: broadcasting would silently change the model."""
        if y.shape != expected:
            named = ", or set the class dimension with class_dim=" if self.chooses_one_class and f.ndim > 2 else ""
            raise LikelihoodError(
                f"{type(self).__name__} needs targets of shape {list(expected)} for network outputs of shape "
                f"{list(f.shape)}, got shape {list(y.shape)}; reshape the targets or the outputs so that they "
                f"match{named}."
            )

    def _check_uniform(self, uniform: Tensor, expected: torch.Size) -> None:
        if uniform.shape != expected:
            raise LikelihoodError(
                f"{type(self).__name__} samples targets from uniform numbers of shape {list(expected)}, got shape "
                f"{list(uniform.shape)}."
            )


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood for a word; a `Likelihood` is returned unchanged.

    >>> resolve("classification")
    Categorical(ignore_index=-100)
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in Likelihood.WORDS:
        return Likelihood.WORDS[likelihood]()
    words = ", ".join(repr(word) for word in Likelihood.WORDS)
    raise LikelihoodError(
        f"likelihood={format_value(likelihood)} is not known; use one of {words}, or a Likelihood such as "
        "Gaussian(noise_std=0.3)."
    )


def _plain(value: Any) -> Any:
    """A value as stored in a file: tensors without a graph, and numbers of other libraries as Python numbers."""
    if isinstance(value, Tensor):
        return value.detach()
    return value.item() if hasattr(value, "item") else value
