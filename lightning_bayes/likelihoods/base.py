"""A likelihood `p(y | f)`: what the rest of the package asks of it, and what it answers about predictions.

For a batch of outputs `f` (layouts in `outputs.py`) and targets `y`, a likelihood knows

- `log p(y | f)`, every constant included, and its gradient, the *residual* `r = ∂ log p(y | f) / ∂f`;
- a root `S` of the output Fisher `Λ = E_y[r rᵀ] = SSᵀ`, `y` drawn from the model. It equals the output Hessian
  `−∂² log p / ∂f²` where `f` is the natural parameter (Categorical, Bernoulli, Gaussian), and is PSD always;
- how to draw `y` from the model;
- the mean and variance of `y` given `f`, which is all a predictive needs (see `predictive`).

A likelihood of your own needs four methods: `log_likelihood_per_example`, `fisher_root`, `sample` and `conditional`.
With a `name` of its own it can be saved, and with a `word` it can be asked for as `likelihood=word`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
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
from lightning_bayes.likelihoods.predictive import ClassPredictive, LabelPredictive, Predictive


class Likelihood(ABC):
    """`p(y | f)` of targets `y` given network outputs `f` (layouts `[B]`, `[B, C]`, `[B, C, *positions]`).

    Likelihoods are immutable and their methods pure. `check` is for the edge, once per batch; the others repeat only
    what is free, so a target that would broadcast is refused everywhere.
    """

    name: ClassVar[str | None] = None  # under which files know it; a subclass needs one of its own
    word: ClassVar[str | None] = None  # by which `likelihood=` means it, with its default settings
    predictive: ClassVar[type[Predictive]] = Predictive
    links: ClassVar[tuple[str, ...]] = ("mc",)  # the ways to integrate over f; the first is the default
    calibrated_link: ClassVar[str | None] = None  # the default where a temperature is found; None: the first
    is_convex: ClassVar[bool] = True  # whether −log p(y | f) is convex in f
    has_diagonal_fisher: ClassVar[bool] = False  # then `fisher_diagonal` is all of Λ, and the root is never built
    couples_outputs: ClassVar[bool] = False  # then a column of the Fisher's root spans all positions of an example
    ignore_index: int | None = None  # the target that marks positions without one
    noise_std: float | Tensor | None = None  # σ, where `log p` has `½ ‖(y − f)/σ‖²`

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
        if root < flag:
            cls.has_diagonal_fisher = False  # what an older class says is not of this root

    @property
    def tunable_noise(self) -> float | Tensor | None:
        """`σ`, where `with_noise` can change it."""
        return None if type(self).with_noise is Likelihood.with_noise else self.noise_std

    @property
    def has_probs(self) -> bool:
        """Whether predictions are probabilities, of classes or of yes/no labels."""
        return issubclass(self.predictive, ClassPredictive)

    @property
    def chooses_one_class(self) -> bool:
        """Whether outputs are logits of the classes of one label."""
        return self.has_probs and not issubclass(self.predictive, LabelPredictive)

    def settings(self) -> dict[str, Any]:
        """The arguments that make this likelihood again, as tensors, numbers and strings: a dataclass's fields."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)} if is_dataclass(self) else {}

    def to_state(self) -> dict[str, Any]:
        """Its name and settings; of a class without a `name` of its own, only what it is called."""
        kind = type(self)
        if kind.__dict__.get("name") is None:
            return {"name": f"{kind.__module__}.{kind.__qualname__}"}
        return {"name": kind.name, **self.settings()}

    def to(self, device: torch.device) -> Likelihood:
        """The same likelihood with its tensors on another device; one without a `name` of its own is left as it is."""
        if type(self).__dict__.get("name") is None:
            return self
        state = self.to_state().items()
        return Likelihood.from_state({key: v.to(device) if isinstance(v, Tensor) else v for key, v in state})

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Likelihood:
        """The likelihood that `to_state` described."""
        settings = dict(state)
        name = settings.pop("name", None)
        if name not in Likelihood.NAMES:
            raise UnknownLikelihoodError(f"no likelihood named {name!r} is known: import the file that defines it.")
        return Likelihood.NAMES[name](**settings)

    @abstractmethod
    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        """`log p(yₙ | fₙ)` of every example, summed over its positions and outputs, with all constants: `[B]`."""

    @abstractmethod
    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Columns `S` `[K, B, C, *positions]` with `Λ = Σ_k S_k S_kᵀ` over dim C, at every example and position; over
        all outputs of an example where the likelihood `couples_outputs`.

        `y` serves only to find the positions without a target (`ignore_index`): their columns are zero.
        """

    def fisher_diagonal(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """`diag Λ` in the shape of `f`."""
        return self.fisher_root(f, y).square().sum(0)

    def noise_shape(self, f: Tensor) -> torch.Size:
        """Of the numbers that `sample` takes for an example."""
        return f.shape[1:]

    @abstractmethod
    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        """Targets drawn from the model by inverse CDF from `uniform` numbers in (0, 1), `noise_shape` of each example.

        Every example depends on its own numbers alone, so batches may be split in any way. Positions that `y` marks as
        having no target keep that mark.
        """

    @abstractmethod
    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance of `y` given `f`, each in the shape of `y` (of its one-hot form, for classes)."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise `LikelihoodError`, in one sentence, when outputs or targets do not fit this likelihood."""
        self.check_fit(f, y)
        if f.isnan().any():
            bad = int(f.isnan().reshape(len(f), -1).any(1).nonzero()[0])
            raise LikelihoodError(
                f"{type(self).__name__} got NaN in the network's output, first for example {bad} of the batch; "
                "check the inputs and the weights."
            )
        wrong = self.wrong_targets(f, y)
        if wrong.any():
            raise self.wrong_target(y[wrong][0].item(), f)

    def wrong_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Which of the targets no output can have.  # [*y.shape]"""
        return torch.zeros_like(y, dtype=torch.bool)

    def wrong_target(self, target: float, f: Tensor) -> LikelihoodError:
        """What to say of the first of them."""
        return LikelihoodError(f"{type(self).__name__} got the target {target:g}, which no output can have.")

    def log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        """`Σₙ log p(yₙ | fₙ)`, a sum and never a mean."""
        return self.log_likelihood_per_example(f, y).sum()

    def least_nll(self, n_outputs: int) -> float:
        """A bound that `−log p(y | f)` cannot fall below for any values of `n_outputs` outputs; `-inf` without one."""
        return 0.0 if self.has_probs else -math.inf

    def n_targets(self, y: Tensor) -> Tensor:
        """How many of the targets count; those marked as unknown (`ignore_index`) do not."""
        return torch.tensor(y.numel(), device="cpu")

    def with_noise(self, noise_std: float | Tensor) -> Likelihood:
        """This likelihood with another noise."""
        raise LikelihoodError(f"{type(self).__name__} has no noise_std to change.")

    def squared_error(self, f: Tensor, y: Tensor) -> Tensor | None:
        """`Σₙ ‖(yₙ − fₙ)/σ‖²` in float64, for a likelihood whose noise `σ` can be tuned; `None` for all others."""
        return None

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The `s` for which a usual loss, summed over all targets, is `s` times the negative log-likelihood but for
        its `constant`; that of torch's own loss first."""
        return (1.0,)

    def constant(self, y: Tensor) -> float:
        """The part of `−Σₙ log p(yₙ | fₙ)` that does not depend on `f` and that losses leave out."""
        return 0.0

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """`∂ log p(y | f) / ∂f` in the shape of `f`; zero where there is no target."""
        gradient: Tensor = torch.func.grad(self.log_likelihood)(widen(f), y)
        return gradient

    def point(self, f: Tensor) -> Predictive:
        """The predictive at known outputs `f` (MAP): no epistemic part."""
        mean, variance = self.conditional(f)
        return self.predictive.from_conditionals(mean.unsqueeze(0), variance.unsqueeze(0))

    def from_samples(self, f_samples: Tensor) -> Predictive:
        """The Monte Carlo predictive of given output samples `[S, B, …]`, by the law of total variance."""
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

        `link` is one of `links`. What has no closed form is an average over `samples`: for "mc" random ones, of the
        `generator`; for the epistemic and aleatoric shares of "probit" and "pairwise" fixed ones, so that these are
        not random. The shares are NaN for `samples=0`.
        """
        self._check_outputs(mean)
        self._check_tensor("variances of the outputs", covariance)
        count("samples", samples, 0, LikelihoodError)
        check_generator(generator)
        mean, covariance = widen(mean), widen(covariance)
        closed = self.closed_form(mean, covariance, self.choose_link(link))
        if isinstance(closed, Predictive):
            return closed
        if closed is not None and samples == 0:
            unknown = torch.full_like(closed, math.nan)
            return self.predictive(closed, unknown, unknown)
        if closed is None:
            return self.from_samples(draw_gaussian(mean, covariance, samples, generator))
        return self.from_samples(gaussian_nodes(mean, covariance, samples)).with_mean(closed)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Predictive | Tensor | None:
        """The integral by this link, exact or approximate: a predictive, or its mean alone; None where all is drawn."""
        return None

    def predictive_log_likelihood(self, predictive: Predictive, y: Tensor) -> Tensor:
        """`log p(yₙ)` of every example under a predictive distribution, `f` integrated out: that of the Gaussian with
        its mean and variance.  # [B]"""
        variance = predictive.variance
        error = y.reshape(variance.shape).to(variance.dtype) - predictive.mean
        return sum_per_example(-0.5 * (error.square() / variance + (2 * math.pi * variance).log()))

    def choose_link(self, link: str | None) -> str:
        """`link`, or the default for `None`; an error with the words to choose from otherwise."""
        if link is None:
            return self.links[0]
        if not isinstance(link, str) or link not in self.links:
            words = ", ".join(repr(word) for word in self.links)
            raise LikelihoodError(f"{type(self).__name__} cannot integrate with link={link!r}; choose one of {words}.")
        return link

    def check_fit(self, f: Tensor, y: Tensor) -> None:
        """Refuse types and shapes that do not fit, which is free: no number is looked at."""
        self._check_outputs(f)
        self._check_tensor("targets", y)
        if y.ndim == 0 or len(y) != len(f):
            raise LikelihoodError(
                f"{type(self).__name__} needs one target per example, got outputs of shape {list(f.shape)} "
                f"and targets of shape {list(y.shape)}."
            )

    def _check_outputs(self, f: Tensor) -> None:
        """Refuse outputs that are not real floating-point tensors with a batch dimension."""
        self._check_tensor("network outputs", f)
        if not f.is_floating_point() or f.ndim == 0:
            raise LikelihoodError(
                f"{type(self).__name__} needs floating-point network outputs with a batch dimension, got {f.dtype} of "
                f"shape {list(f.shape)}; return the raw outputs of the last layer."
            )

    def _check_tensor(self, what: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise LikelihoodError(f"{type(self).__name__} needs {what} in a tensor, got {format_value(value)}.")

    def _check_shape(self, f: Tensor, y: Tensor, expected: tuple[int, ...]) -> None:
        """Refuse a target that is not exactly of the expected shape: broadcasting would change the model silently."""
        if y.shape != expected:
            named = ", or name the classes' dimension with class_dim=" if self.chooses_one_class and f.ndim > 2 else ""
            raise LikelihoodError(
                f"{type(self).__name__} needs targets of shape {list(expected)} for network outputs of shape "
                f"{list(f.shape)}, got shape {list(y.shape)}; reshape the targets or the outputs so that they "
                f"match{named}."
            )

    def _check_uniform(self, f: Tensor, uniform: Tensor) -> None:
        self._check_outputs(f)
        if uniform.shape != f.shape:
            raise LikelihoodError(
                f"{type(self).__name__} samples labels from uniform numbers of the outputs' shape {list(f.shape)}, "
                f"got shape {list(uniform.shape)}."
            )


def _plain(value: Any) -> Any:
    """For a file: no graph, and no number type of another library."""
    if isinstance(value, Tensor):
        return value.detach()
    return value.item() if hasattr(value, "item") else value
