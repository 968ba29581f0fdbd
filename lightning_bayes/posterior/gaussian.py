"""`GaussianPosterior`: the one object that every method ends in, `q(θ) = N(mean, precision⁻¹)`.

It knows the network it belongs to, but changes nothing of it: samples run through functional calls, and the linearised
model is taken at the network's own weights, which must still be the mean.

One number found on held-out data, and the predictive it belongs to.

For class and binary labels it is a temperature `T`, in one of two places. That of the *outputs* divides them before
they are integrated over, `f/T`: a mean `m/T` and a covariance `Σ/T²`, so that no `T` makes up for a covariance that is
too wide. That of the *probabilities* comes after, `p^(1/T)`, and does. For real targets it is a factor on the
predictive variance. The weights, their posterior and its evidence do not know of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, flag, format_value
from lightning_bayes.jacobian.output_gaussian import output_gaussian
from lightning_bayes.jacobian.plan import Plan, make_plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.borrowed import borrowed, unwrap
from lightning_bayes.network.checks import check_device, check_network
from lightning_bayes.network.input_graph import attached, check_differentiable
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior.at_mean import linearised_outputs
from lightning_bayes.posterior.fingerprint import has_weights
from lightning_bayes.posterior.implementation import implementation
from lightning_bayes.structures import Structure

if TYPE_CHECKING:
    from lightning_bayes.posterior.summary import PosteriorSummary
    from lightning_bayes.predictive import Prediction
    from lightning_bayes.predictive.autoencoder import Reconstruction
    from lightning_bayes.predictive.conformal import Conformal
    from lightning_bayes.predictive.functions import FunctionDraw

Posterior = TypeVar("Posterior", bound="GaussianPosterior")


class PosteriorError(RuntimeError):
    """A posterior asked for what it cannot give; the message says what can."""


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPosterior:
    """`q(θ) = N(mean, precision⁻¹)` over the weights of `subset`; all other weights are as the network has them."""

    is_sharded: ClassVar[bool] = False  # whether its vectors are this process's shards of the whole ones

    network: nn.Module = field(repr=False)
    subset: Subset = field(repr=False)
    likelihood: Likelihood
    mean: Tensor = field(repr=False)  # [P]
    precision: Structure = field(repr=False)
    n_data: int
    fingerprint: Tensor = field(repr=False)  # of all weights and buffers that the posterior belongs to
    calibrations: tuple[Calibration, ...] = ()  # at most one for each predictive and link
    shift: Tensor | None = field(default=None, repr=False)  # mean − the network's weights, of a refined posterior [P]
    # A cache that posteriors of one network may share: plans depend on the inputs' shapes, not on the weights' values.
    plans: dict[tuple[torch.Size, ...], Plan] = field(default_factory=dict, repr=False)
    used_data: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # hashes of examples: see `used_data`

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def is_elsewhere(self) -> bool:
        """Whether the network has since moved to another device than the posterior's."""
        return next(iter(self.subset.parameters(self.network).values())).device != self.device

    def __repr__(self) -> str:
        return str(implementation("__repr__")(self))

    def summary(self) -> PosteriorSummary:
        """What it is made of: the block of each parameter with its size, memory, prior and effective number of
        parameters γ; noise, evidence and calibration. `print` shows a table, its fields are numbers. One that
        is sharded over processes has the blocks of this process, and all must ask."""
        return implementation("summary")(self)

    def to(self: Posterior, device: str | torch.device) -> Posterior:
        """The same posterior on another device. Its network is there, too: the very one, if you have moved it already,
        or a copy, because a posterior changes nothing of yours."""
        target = check_device(device)
        if target == self.device and not self.is_elsewhere():
            return self
        home = next(iter(self.subset.parameters(self.network).values())).device
        network = self.network if home == target else copy.deepcopy(self.network).to(target)
        return replace(self, network=network, plans={}, **self._on(target))

    def _on(self, device: torch.device) -> dict[str, Any]:
        """The fields that live on the posterior's device, on another one."""
        return {
            "mean": self.mean.to(device),
            "precision": self.precision.to(device),
            "likelihood": self.likelihood.to(device),
            "shift": None if self.shift is None else self.shift.to(device),
        }

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """`n` weight vectors, drawn with the root of the covariance that the structure has.  # [n, P]"""
        count("n", n)
        check_generator(generator)
        return self.mean + self.precision.sample(n, generator)

    def log_prob(self, theta: Tensor) -> Tensor:
        """`log N(θ; mean, precision⁻¹)`.  # [..., P] -> [...]"""
        if not isinstance(theta, Tensor) or theta.shape[-1:] != self.mean.shape:  # which broadcasting would let through
            raise ValueError(
                f"theta must be weight vectors [..., {len(self.mean)}], one number for each weight of the posterior, "
                f"got {format_value(theta)}"
            )
        distance = self.precision.quadratic((theta - self.mean).unsqueeze(-2))[..., 0, 0]
        return 0.5 * (self.precision.logdet() - distance - self.subset.size * math.log(2 * math.pi))

    def penalty(self, network: nn.Module) -> Tensor:
        """`½ (θ − mean)ᵀ P (θ − mean)` of the weights `θ` that `network` has now, differentiable in them: the posterior
        as the prior of a training on other data. It belongs to a *sum* of negative log-likelihoods: divide it by the
        number of examples for a loss that is their mean."""
        weights = check_network(unwrap(network))
        check_parameters(weights, self.subset)
        flat = torch.cat([p.reshape(-1) for p in self.subset.parameters(weights).values()])
        d = self.subset.narrow(flat).to(self.mean) - self.mean
        with torch.autocast(self.device.type, enabled=False):  # also in a training step of mixed precision
            return 0.5 * (d * self.precision.matmul(d)).sum()

    def functional(self, x: Any, joint: bool = False, differentiable: bool = False) -> tuple[Tensor, Tensor]:
        """The Gaussian over outputs of the linearised network: mean `[B, C]` and covariance `[B, C, C]`, or, `joint`,
        the covariance of all outputs of the batch `[B·C, B·C]`. If `differentiable`, they keep the graph to `x`."""
        flag("joint", joint)
        check_differentiable(differentiable, x)
        form = "joint" if joint else "example"
        mean, covariances = self.functional_for([self.precision], x, form, differentiable)
        return mean, covariances[0]

    def functional_for(
        self, precisions: list[Structure], x: Any, form: str = "example", differentiable: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """`functional` for several precisions (several priors of one fit), in one backward pass; the covariances in one
        of the forms of `output_gaussian`."""

        def gaussian(x: Any) -> list[Tensor]:
            with self.linearised(x) as (plan, x):
                mean, covariances = output_gaussian(self.network, plan, precisions, x, form, differentiable)
            return [mean, *covariances]

        mean, *covariances = attached(x, gaussian) if differentiable else gaussian(x)
        return mean if self.shift is None else self.shifted(x, differentiable), covariances

    def shifted(self, x: Any, differentiable: bool = False) -> Tensor:
        """`f(x) + J(x) (mean − θ̃)`, of a refined posterior."""
        assert self.shift is not None
        return linearised_outputs(self, x, self.shift, differentiable)

    @contextmanager
    def linearised(self, x: Any) -> Iterator[tuple[Plan, Any]]:
        """The network, borrowed for a backward pass at the mean, with its plan and `x` on its device."""
        self.check_weights()
        with torch.inference_mode(False), borrowed(self.network, self.subset.names):
            x = inputs.to_device(inputs.contained(self.network, x), self.device)
            shapes = _shapes(x)
            if shapes not in self.plans:
                self.plans[shapes] = make_plan(self.network, inputs.map_tensors(x, Tensor.detach), self.subset)
            yield self.plans[shapes], x

    def known_plan(self, x: Any) -> Plan | None:
        """The plan of inputs with the shapes of `x`, if there has been one; how many outputs there are, it knows, too.
        Of a container each has its own."""
        return None if isinstance(x, inputs.Container) else self.plans.get(_shapes(x))

    def predict(
        self,
        x: Any,
        predictive: str | PredictiveOption = "glm",
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
                points), "bnn" (weight samples through the network itself), "map", or an option such as
                `GLM(link="probit", samples=100)`.
            generator: of random samples ("bnn", "mc", many outputs). The same state gives every input the same
                prediction, in any batch.
            calibrated: use what `calibrate` found for this predictive and link, if it was called.
            differentiable: keep the graph to `x`, whose gradient an acquisition function is optimised by.
            split: tell epistemic from aleatoric uncertainty. Where a link has no closed form for it, this averages
                over as many fixed points as the predictive has `samples`. Without it `epistemic` and `aleatoric` are
                NaN, and `mutual_information` is None.
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

    def sample_function(
        self, generator: torch.Generator | None = None, predictive: str = "glm", n: int | None = None
    ) -> FunctionDraw:
        """A function drawn from the posterior, `x ↦ f(x)`: see `FunctionDraw`.

        Args:
            generator: of the weight sample, which moves on: its next function is another one. Without it the global
                random state says which function it is, and stays as it was: two calls give the same function until
                something else moves that state.
            predictive: "glm" (the linearised network) or "bnn" (the network itself).
            n: how many functions, as a first dimension of the outputs; by default one, without it.
        """
        return implementation("sample_function")(self, generator, predictive, n)

    def calibrate(
        self: Posterior,
        loader: Iterable[Any],
        predictive: str | PredictiveOption = "glm",
        *,
        of: str = "outputs",
        seed: int = 0,
    ) -> Posterior:
        """The same posterior with one number found on held-out data, in one pass over `loader`: for class and binary
        labels a temperature, the one with the best likelihood; for real targets a factor on the predictive variance,
        the mean of (y − m)²/v.

        It corrects the predictions by this predictive and link, and nothing else: `functional`, `sample` and the
        evidence stay as they are.

        Args:
            loader: held-out batches `(x, y)`.
            predictive: as in `predict`; without a link, the one that is best with a temperature is used.
            of: the temperature's place: the network's "outputs" `f/T`, or the predicted "probs" `p^(1/T)`, which can
                also make up for a posterior that is too wide.
            seed: of what is drawn.
        """
        return implementation("calibrate")(self, loader, predictive, of, seed)

    def conformalize(
        self,
        loader: Iterable[Any],
        level: float = 0.9,
        method: str = "aps",
        predictive: str | PredictiveOption = "glm",
        *,
        seed: int = 0,
        randomised: bool = True,
        penalty: float = 0.01,
        free_classes: int = 5,
        allow_empty: bool = False,
    ) -> Conformal:
        """Sets of classes, or intervals of real targets, that hold the target with probability `level`: one pass over
        held-out data that were used for nothing else, neither training nor tuning nor calibration; a warning says if
        the posterior has met them before. Under several processes call it on one of them.

        Args:
            loader: held-out batches `(x, y)`.
            level: the probability that a new example's target is in its set, averaged over examples.
            method: of classes: "aps" (larger sets for difficult examples), "raps" (the same, with unlikely classes kept
                out) or "lac" (the smallest sets on average); see `conformal_scores`.
            predictive: as in `predict`; "map" makes sets of the plain network.
            seed: of what is drawn, and of the randomised scores.
            randomised: "aps" and "raps" with a random part, without which sets are larger than they need to be.
            penalty: λ of "raps", for each class in a set beyond `free_classes`.
            free_classes: k₀ of "raps".
            allow_empty: sets may be empty, as they have to be for a coverage of exactly `level` where the network is
                right more often than that. By default the likeliest class is always among them.
        """
        return implementation("conformalize")(
            self, loader, level, method, predictive, seed=seed,
            randomised=randomised, penalty=penalty, free_classes=free_classes, allow_empty=allow_empty,
        )  # fmt: skip

    def calibration_of(self, predictive: str, link: str | None = None) -> Calibration | None:
        """What `calibrate` found for this predictive and link; for `None`, for the link that was calibrated last."""
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
        """Mean and variance in latent space, for a network that names its `encoder` and `decoder`."""
        return implementation("reconstruct")(self, x, samples, generator, keep_samples, parts=("encoder",))

    def reconstruct(
        self, x: Any, samples: int = 100, generator: torch.Generator | None = None, keep_samples: bool = False
    ) -> Reconstruction:
        """Mean and variance in latent and output space, for a network that names its `encoder` and `decoder`."""
        return implementation("reconstruct")(self, x, samples, generator, keep_samples)

    def check_weights(self) -> None:
        """Raise if the network's weights are not the ones this posterior was fitted to."""
        weights = next(iter(self.subset.parameters(self.network).values())).dtype
        if torch.promote_types(weights, torch.float32) != self.mean.dtype:
            raise PosteriorError(
                f"the network's weights are {weights}, but the posterior's are {self.mean.dtype}: put the network back "
                "with network.to(dtype), or fit the posterior again"
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
        """Tensors, numbers and strings only, so that `torch.load(weights_only=True)` reads them."""
        return implementation("state_dict")(self)

    @staticmethod
    def from_state_dict(
        network: nn.Module, state: dict[str, Any], likelihood: Likelihood | None = None
    ) -> GaussianPosterior:
        """The posterior that `state_dict` described, on the network's device. A likelihood whose class has no `name` of
        its own is not stored: pass it again."""
        return implementation("from_state_dict")(network, state, likelihood)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the posterior as one file, whole or not at all; `path` may be a URL that `fsspec` knows."""
        implementation("save")(self.state_dict(), path)

    @staticmethod
    def load(
        path: str | PathLike[str], network: nn.Module, likelihood: Likelihood | None = None, name: str | None = None
    ) -> GaussianPosterior:
        """The posterior in a file (of a sharded one, a folder) that `save` wrote, or in a checkpoint of a Trainer, for
        the network with the weights that it was fitted to; `name` is that of the callback, where there were several."""
        return implementation("load")(path, network, likelihood, name)

    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, noise_std: float | Tensor | None = None
    ) -> Tensor:
        raise PosteriorError(self._no_evidence("evidence"))

    def with_prior(self, prior_precision: float | Tensor) -> GaussianPosterior:
        raise PosteriorError(self._no_evidence("prior to change"))

    def tune_prior(self, method: str | Tuning = "auto", loader: Any = None) -> GaussianPosterior:
        raise PosteriorError(self._no_evidence("prior to tune"))

    def update(
        self, loader: Any, progress: bool = False, processes: Any = None, probe: Any = None
    ) -> GaussianPosterior:
        raise PosteriorError(self._no_evidence("sums over data to add to"))

    def _no_evidence(self, what: str) -> str:
        return (
            f"{type(self).__name__} does not keep curvature and prior apart and so has no {what}; "
            "fit_laplace gives a LaplacePosterior that does"
        )


def _shapes(x: Any) -> tuple[torch.Size, ...]:
    """Of one example: positions may be merged with the batch; those of a container are so in any number."""
    return () if isinstance(x, inputs.Container) else tuple(leaf.shape[1:] for leaf in inputs.tensors(x))


def check_parameters(network: nn.Module, subset: Subset) -> None:
    shapes = {name: p.shape for name, p in network.named_parameters()}
    for name, shape in zip(subset.names, subset.shapes, strict=True):
        if shapes.get(name) != shape:
            other = "no such parameter" if name not in shapes else f"shape {tuple(shapes[name])}"
            raise PosteriorError(
                f"the posterior belongs to another network: it has {name} of shape {tuple(shape)}, this one has {other}"
            )


PLACES = ("outputs", "probs")


@dataclass(frozen=True)
class Calibration:
    """What a prediction by `predictive` and `link` is corrected by."""

    predictive: str  # "glm", "gp", "bnn" or "map"
    link: str
    output_temperature: float = 1.0
    probs_temperature: float = 1.0
    variance_factor: float = 1.0
