"""`GaussianPosterior`: a Gaussian over a network's weights, `q(θ) = N(mean, precision⁻¹)`. All inference methods return
one.

A posterior holds its network and never changes it. Weight samples are evaluated by functional calls. The network is
linearised at its weights, which must not have changed since the fit.

A `Calibration` corrects one predictive and link. It is found on held-out data. For class and binary labels it is a
temperature `T`. Applied to the *outputs*, it divides them before integration, `f/T`: the mean becomes `m/T` and the
covariance `Σ/T²`, so no `T` can compensate for a covariance that is too wide. Applied to the *probabilities*, after
integration, `p^(1/T)`, the temperature can compensate for such a covariance. For real targets the correction is a
factor on the predictive variance. A calibration never changes the posterior over the weights or the evidence.

`implements` registers posterior methods that a higher layer implements, such as `predict` and `tune_prior`.

Imports point one way, so `posterior` never imports `evidence` or `predictive`. The posterior declares the method with
its signature and documentation, and the higher layer registers the function that does the work:

    @implements("predict")                                     # predictive/predict.py
    def predict(posterior, x, ...): ...

    class GaussianPosterior:                                   # posterior/gaussian.py
        def predict(self, x, ...):
            return implementation("predict")(self, x, ...)

`import lightning_bayes` imports every layer, so each method has its implementation. A function that supports the shards
of a sharded network is registered with `sharded=True`; all others raise an error for a sharded posterior.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, flag, format_value
from lightning_bayes.jacobian.output_gaussian import Observer, output_gaussian
from lightning_bayes.jacobian.plan import Plan, PlanCache
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.borrowed import borrowed, check_device, check_network
from lightning_bayes.network.input_graph import attached, check_differentiable
from lightning_bayes.options.predictive import ConformalScore, PredictiveOption, PredictiveWord
from lightning_bayes.posterior.at_mean import fingerprint, has_weights, linearised_outputs
from lightning_bayes.posterior.summary import PosteriorSummary, one_line, summarise
from lightning_bayes.structures import Diagonal, Structure

if TYPE_CHECKING:
    from lightning_bayes.predictive import Prediction
    from lightning_bayes.predictive.conformal import Conformal
    from lightning_bayes.predictive.deploy import Deployed
    from lightning_bayes.predictive.draws import FunctionDraw, Reconstruction

Function = TypeVar("Function", bound=Callable[..., Any])

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def implements(method: str, sharded: bool = False) -> Callable[[Function], Function]:
    """Register the decorated function as the implementation of a posterior's `method`."""

    def register(function: Function) -> Function:
        @wraps(function)
        def of_whole(posterior: Any, *args: Any, **options: Any) -> Any:
            posterior.check_whole(method)
            return function(posterior, *args, **options)

        _IMPLEMENTATIONS[method] = function if sharded else of_whole
        return function

    return register


def implementation(method: str) -> Callable[..., Any]:
    return _IMPLEMENTATIONS[method]


Posterior = TypeVar("Posterior", bound="GaussianPosterior")
NEEDS_WHOLE = "needs the whole network on every process, but its weights are sharded"
PLACES = ("outputs", "probs")  # what a temperature applies to


class PosteriorError(RuntimeError):
    """Raised if a posterior does not support a call; the message names an alternative."""


@dataclass(frozen=True)
class Calibration:
    """A correction of predictions made with `predictive` and `link`."""

    predictive: str  # "glm", "gp", "bnn", "map" or "dropout"
    link: str
    output_temperature: float = 1.0
    probs_temperature: float = 1.0
    variance_factor: float = 1.0
    df: float = math.inf  # degrees of freedom of a regression's Student-t


def _laplace_only(what: str) -> Callable[..., Any]:
    """A method that only `LaplacePosterior` implements."""

    def refuse(posterior: GaussianPosterior, *_: Any, **__: Any) -> Any:
        raise PosteriorError(
            f"{type(posterior).__name__} does not store curvature and prior separately, so it has no {what}: use a "
            "LaplacePosterior from fit_laplace"
        )

    return refuse


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPosterior:
    """`q(θ) = N(mean, precision⁻¹)` over the weights of `subset`. All other weights keep the network's values."""

    is_sharded: ClassVar[bool] = False  # whether vectors contain only this process's shards

    network: nn.Module
    subset: Subset
    likelihood: Likelihood
    mean: Tensor  # [P]
    precision: Structure
    n_data: int
    fingerprint: Tensor  # of all weights and buffers of the network
    calibrations: tuple[Calibration, ...] = ()  # at most one for each predictive and link
    shift: Tensor | None = None  # mean − the network's weights, for a refined posterior [P]
    plans: PlanCache = field(default_factory=PlanCache)  # a mutable cache that never changes a result
    known_novelty: Tensor | None = None  # novelty of held-out inputs, ascending [n]

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def _network_device(self) -> torch.device:
        return next(iter(self.subset.parameters(self.network).values())).device

    def is_elsewhere(self) -> bool:
        """Whether the network and the posterior are now on different devices."""
        return self._network_device != self.device

    def check_whole(self, what: str) -> None:
        """Raise an error if the weights are sharded over processes; `what` names the call."""
        if self.is_sharded:
            raise PosteriorError(
                f"{what} {NEEDS_WHOLE}: use predictive='bnn' or 'map', or gather(network) for an ordinary posterior"
            )

    def __repr__(self) -> str:
        return one_line(self)

    def summary(self) -> PosteriorSummary:
        """Summarise the parameters, size, memory, prior and effective number of parameters γ of each block, and the
        noise, evidence and calibrations. `print` shows a table. Under sharding, it lists this process's blocks, and all
        processes must call it."""
        return summarise(self)

    def to(self: Posterior, device: str | torch.device) -> Posterior:
        """The same posterior on another device. A network that is already there is shared; otherwise the posterior
        gets a copy, because it never moves your network."""
        self.check_whole("to")
        target = check_device(device)
        if target == self.device and not self.is_elsewhere():
            return self
        network = self.network if self._network_device == target else copy.deepcopy(self.network).to(target)
        return replace(self, network=network, plans=PlanCache(), **self._on(target))

    def _on(self, device: torch.device) -> dict[str, Any]:
        """The fields that depend on the device, moved to `device`."""
        return {
            "mean": self.mean.to(device),
            "precision": self.precision.to(device),
            "likelihood": self.likelihood.to(device),
            **{
                name: None if (value := getattr(self, name)) is None else value.to(device)
                for name in ("shift", "known_novelty")
            },
        }

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw `n` weight vectors.  # [n, P]"""
        count("n", n)
        check_generator(generator)
        return self.mean + self.precision.sample(n, generator)

    def log_prob(self, theta: Tensor) -> Tensor:
        """`log N(θ; mean, precision⁻¹)`.  # [..., P] -> [...]"""
        if not isinstance(theta, Tensor) or theta.shape[-1:] != self.mean.shape:  # broadcasting would hide the mistake
            raise ValueError(
                f"theta must be weight vectors [..., {len(self.mean)}], one number for each weight of the posterior, "
                f"got {format_value(theta)}"
            )
        distance = self.precision.quadratic((theta - self.mean).unsqueeze(-2))[..., 0, 0]
        return 0.5 * (self.precision.logdet() - distance - self.subset.size * math.log(2 * math.pi))

    def penalty(self, network: nn.Module) -> Tensor:
        """`½ (θ − mean)ᵀ P (θ − mean)` for the current weights `θ` of `network`, differentiable in `θ`. This penalty
        makes the posterior a prior for training on other data. Add it to a *sum* of negative log-likelihoods, or divide
        it by the number of examples if the loss is a mean."""
        self.check_whole("penalty")
        weights = check_network(network)
        check_parameters(weights, self.subset)
        flat = torch.cat([p.reshape(-1) for p in self.subset.parameters(weights).values()])
        d = self.subset.narrow(flat).to(self.mean) - self.mean
        with torch.autocast(self.device.type, enabled=False):  # a mixed-precision training step may call this
            return 0.5 * (d * self.precision.matmul(d)).sum()

    def functional(self, x: Any, joint: bool = False, differentiable: bool = False) -> tuple[Tensor, Tensor]:
        """The Gaussian over outputs of the linearised network: the mean `[B, C]` and the covariance of each example
        `[B, C, C]`, or with `joint` the covariance of the whole batch `[B·C, B·C]`. With `differentiable` both keep the
        graph to `x`."""
        flag("joint", joint)
        if flag("differentiable", differentiable):
            check_differentiable(x)
        form = "joint" if joint else "example"
        mean, covariances = self.functional_for([self.precision], x, form, differentiable)
        return mean, covariances[0]

    def functional_for(
        self,
        precisions: list[Structure],
        x: Any,
        form: str = "example",
        differentiable: bool = False,
        approximate: bool = False,
        observe: Observer | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """`functional` for several precisions (several priors of one fit) in one backward pass. `form` is one of the
        covariance forms of `output_gaussian`, `approximate` makes many priors as cheap as one, and `observe` is called
        with each pass of the network."""
        self.check_whole("functional")

        def gaussian(x: Any) -> list[Tensor]:
            with self.linearised(x) as (plan, x):
                mean, covariances = output_gaussian(
                    self.network, plan, precisions, x, form, differentiable, approximate, observe
                )
            return [mean, *covariances]

        mean, *covariances = attached(x, gaussian) if differentiable else gaussian(x)
        return mean if self.shift is None else self.shifted(x, differentiable), covariances

    def shifted(self, x: Any, differentiable: bool = False) -> Tensor:
        """`f(x) + J(x) (mean − θ̃)`, the mean output of a refined posterior."""
        assert self.shift is not None
        return linearised_outputs(self, x, self.shift, differentiable)

    @contextmanager
    def linearised(self, x: Any) -> Iterator[tuple[Plan, Any]]:
        """Borrow the network for a backward pass at the mean; yields its plan, and `x` on its device."""
        self.check_weights()
        with torch.inference_mode(False), borrowed(self.network, self.subset.names):
            x = inputs.to_device(inputs.contained(self.network, x), self.device)
            yield self.plans.find_or_make(self.network, self.subset, x), x

    def predict(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
        calibrated: bool = True,
        differentiable: bool = False,
        split: bool = True,
    ) -> Prediction:
        """The predictive distribution at `x`.

        Args:
            x: an input of the network.
            predictive: "glm" (the linearised network), "gp" (the same in function space, for a posterior with training
                points), "bnn" (weight samples through the network itself), "dropout" (random dropout masks at the
                mean), "map", or an option such as `GLM(link="probit", samples=100)`.
            generator: generator for random samples ("bnn", "dropout", "mc", many outputs). With the same state, an
                input gets the same prediction in any batch.
            calibrated: apply the correction that `calibrate` found for this predictive and link, if any.
            differentiable: keep the graph to `x`, for example to optimise an acquisition function. With many classes,
                such a prediction is an average over other draws.
            split: separate epistemic from aleatoric uncertainty. If the link has no closed form for this split, it is
                an average over as many fixed points as the predictive has `samples`. If False, `epistemic` and
                `aleatoric` are NaN, and `mutual_information` is None.
        """
        return implementation("predict")(
            self,
            x,
            predictive,
            generator=generator,
            calibrated=calibrated,
            differentiable=differentiable,
            split=split,
        )

    def deploy(
        self, x: Any, predictive: PredictiveWord | PredictiveOption = "glm", calibrated: bool = True
    ) -> Deployed:
        """Make a module of tensor operations that `torch.export` and ONNX can export. Its `forward(x)` returns the
        `probs`, or the `mean` and `variance`, and the `novelty` of `predict` as a dictionary of tensors.

        Args:
            x: an example input of at least two examples.
            predictive: "glm", for a posterior over a linear last layer, or "map", the plain network, for any posterior.
            calibrated: apply the correction that `calibrate` or `tune_prior("auto")` found for this predictive.
        """
        return implementation("deploy")(self, x, predictive, calibrated)

    def novelty(self, x: Any) -> Tensor:
        """Score how unknown each input is, from 0 to 1: the share of a weak prior's variance that the data have not
        removed. Scores are comparable between inputs and cost one forward pass. They depend only on the last layer's
        weights and are the same for every prior (see `predictive.novelty`).  # [B]"""
        return implementation("novelty")(self, x)

    def sample_function(
        self, generator: torch.Generator | None = None, predictive: str = "glm", n: int | None = None
    ) -> FunctionDraw:
        """Draw a function from the posterior, `x ↦ f(x)`; see `FunctionDraw`.

        Args:
            generator: draws the weights and advances, so the next call returns another function. Without one, the
                global random state determines the function and is not advanced, so repeated calls return the same
                function.
            predictive: "glm" (the linearised network) or "bnn" (the network itself).
            n: the number of functions, which is the first dimension of the outputs; by default one function, without
                that dimension.
        """
        return implementation("sample_function")(self, generator, predictive, n)

    def calibrate(
        self: Posterior,
        loader: Iterable[Any],
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        of: str = "outputs",
        seed: int = 0,
    ) -> Posterior:
        """Return the same posterior with a correction of its predictions, found in one pass over held-out data. For
        class and binary labels, the correction is the temperature with the best likelihood. For real targets, it is a
        factor on the predictive variance and the degrees of freedom of a Student-t. If a Gaussian fits best, the factor
        is the mean of (y − m)²/v.

        The correction only affects predictions with this predictive and link; `functional`, `sample` and the evidence
        do not change.

        Args:
            loader: held-out batches `(x, y)`.
            predictive: as in `predict`; if it has no link, the link that scores best with a temperature is used.
            of: what the temperature applies to: the network's "outputs" `f/T`, or the predicted "probs" `p^(1/T)`,
                which can also compensate for a posterior that is too wide.
            seed: seed for random draws.
        """
        return implementation("calibrate")(self, loader, predictive, of, seed)

    def conformalize(
        self,
        loader: Iterable[Any],
        level: float = 0.9,
        method: ConformalScore = "aps",
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        seed: int = 0,
        randomised: bool = True,
        penalty: float = 0.01,
        free_classes: int = 5,
        allow_empty: bool = False,
        per_class: bool = False,
    ) -> Conformal:
        """Make sets of classes, or intervals of real targets, that contain the target with probability `level`. It
        takes one pass over held-out data that were not used for training, tuning or calibration. With several
        processes, call it on only one of them.

        Args:
            loader: held-out batches `(x, y)`.
            level: the probability that a new example's target is in its set, averaged over examples.
            method: the score of classes: "aps" (larger sets for difficult examples), "raps" (the same, with unlikely
                classes kept out) or "lac" (the smallest sets on average). By default, intervals of real targets are
                scaled; with "cqr" both ends move by the same amount, with "cqr_asymmetric" by one amount each.
            predictive: as in `predict`; "map" makes sets of the plain network.
            seed: seed for random draws and randomised scores.
            randomised: add a random part to "aps" and "raps"; without it, sets are larger than necessary.
            penalty: λ of "raps", the penalty for each class in a set beyond `free_classes`.
            free_classes: k₀ of "raps", the number of classes without a penalty.
            per_class: guarantee the level for the examples of each class, with one threshold per class. A class with
                too few held-out examples is in every set.
            allow_empty: allow empty sets. A coverage of exactly `level` requires empty sets if the share of examples
                that the network gets right exceeds `level`. By default every set contains the likeliest class.
        """
        return implementation("conformalize")(
            self, loader, level, method, predictive, seed=seed,
            randomised=randomised, penalty=penalty, free_classes=free_classes, allow_empty=allow_empty,
            per_class=per_class,
        )  # fmt: skip

    def calibration_of(self, predictive: str, link: str | None = None) -> Calibration | None:
        """The calibration of this predictive and link, if any; without `link`, the most recent one."""
        of_predictive = [c for c in self.calibrations if c.predictive == predictive]
        if predictive in ("glm", "gp") and link is not None:
            of_predictive = [c for c in of_predictive if c.link == link]
        return of_predictive[-1] if of_predictive else None

    def with_calibration(self: Posterior, calibration: Calibration) -> Posterior:
        others = [c for c in self.calibrations if (c.predictive, c.link) != (calibration.predictive, calibration.link)]
        return replace(self, calibrations=(*others, calibration))

    def encode(
        self, x: Any, samples: int = 100, generator: torch.Generator | None = None, keep_samples: bool = False
    ) -> Reconstruction:
        """Mean and variance in latent space, for a network with an `encoder` and a `decoder`."""
        return implementation("reconstruct")(self, x, samples, generator, keep_samples, parts=("encoder",))

    def reconstruct(
        self, x: Any, samples: int = 100, generator: torch.Generator | None = None, keep_samples: bool = False
    ) -> Reconstruction:
        """Mean and variance in latent and output space, for a network with an `encoder` and a `decoder`."""
        return implementation("reconstruct")(self, x, samples, generator, keep_samples)

    def check_weights(self) -> None:
        """Raise if the network's weights are not the ones the posterior was fitted to."""
        weights = next(iter(self.subset.parameters(self.network).values())).dtype
        if torch.promote_types(weights, torch.float32) != self.mean.dtype:
            raise PosteriorError(
                f"the network's weights are {weights}, but the posterior's are {self.mean.dtype}: cast the network "
                "back with network.to(dtype), or fit the posterior again"
            )
        if not self._has_same_weights():
            raise PosteriorError(
                "the network's weights are not those the posterior was fitted to: load the matching weights, or fit "
                "the posterior again"
            )

    def _has_same_weights(self) -> bool:
        own = self.subset.parameters(self.network).values() if self.subset.mask is None else ()
        return has_weights(self.network, self.fingerprint, list(own), self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings only, readable by `torch.load(weights_only=True)`."""
        return implementation("state_dict")(self)

    @staticmethod
    def from_state_dict(
        network: nn.Module, state: dict[str, Any], likelihood: Likelihood | None = None
    ) -> GaussianPosterior:
        """Restore a posterior from its state, on the network's device. A likelihood class without a `name` is not
        stored, so pass the likelihood again."""
        return implementation("from_state_dict")(network, state, likelihood)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the posterior to one file, atomically. `path` may be an `fsspec` URL."""
        implementation("save")(self.state_dict(), path)

    @staticmethod
    def load(
        path: str | PathLike[str], network: nn.Module, likelihood: Likelihood | None = None, name: str | None = None
    ) -> GaussianPosterior:
        """Read a posterior from a file that `save` wrote (a folder, if it was sharded) or from a Trainer's checkpoint.

        Args:
            path: the file, folder or checkpoint.
            network: the network with the weights that the posterior was fitted to.
            likelihood: required if the likelihood's class has no `name`.
            name: the callback's name, if a checkpoint contains several posteriors.
        """
        return implementation("load")(path, network, likelihood, name)

    log_marginal_likelihood = _laplace_only("evidence")
    with_prior = _laplace_only("prior to change")
    tune_prior = _laplace_only("prior to tune")
    update = _laplace_only("sums over data to add to")


def point_posterior(network: nn.Module, likelihood: Likelihood) -> GaussianPosterior:
    """A posterior without variance at the weights of `network`, for predictions of the network itself."""
    parameters = {name: p for name, p in network.named_parameters() if p.is_floating_point()}
    subset = Subset(tuple(parameters), tuple(p.shape for p in parameters.values()))
    with torch.inference_mode(False), torch.no_grad():
        mean = subset.flatten(network)
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
        precision = Diagonal(mean.new_tensor(math.inf).expand_as(mean))
        return GaussianPosterior(network, subset, likelihood, mean, precision, 0, fingerprint(network))


def check_parameters(network: nn.Module, subset: Subset) -> None:
    """Raise an error if the network lacks a parameter of the subset, or has it with a different shape."""
    shapes = {name: p.shape for name, p in network.named_parameters()}
    for name, shape in zip(subset.names, subset.shapes, strict=True):
        if shapes.get(name) != shape:
            other = "no such parameter" if name not in shapes else f"shape {tuple(shapes[name])}"
            raise PosteriorError(
                f"the posterior belongs to another network: it has {name} of shape {tuple(shape)}, but this network "
                f"has {other}"
            )
