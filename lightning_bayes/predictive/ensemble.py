"""`DeepEnsemble`: one predictive from several posteriors, each of a different network.

It is the mixture of the members' predictives, `p(y | x) = Σₘ wₘ pₘ(y | x)`. Its moments follow from the members'
moments by the law of total variance, where the choice of the member is a further unknown:

    μ         = Σₘ wₘ μₘ                                  (for classes, the probabilities)
    epistemic = Σₘ wₘ epistemicₘ + Σₘ wₘ (μₘ − μ)²        within the members, and between them
    aleatoric = Σₘ wₘ aleatoricₘ

For classes, `epistemic + aleatoric = μ(1 − μ)`, as for the members. The entropy of classes is that of the mixture, and
its epistemic part is `Σₘ wₘ Iₘ + (H[μ] − Σₘ wₘ H[μₘ])`. A regression's mixture is reported and scored as the Gaussian
with its mean and variance, which has the largest entropy for that variance, or as a Student-t with the members' tails,
`1/ν = Σₘ wₘ/νₘ`. `log_prob` is the density of the mixture.

With `predictive="map"` the members are points, and this is the deep ensemble of Lakshminarayanan et al. (2017), "Simple
and scalable predictive uncertainty estimation using deep ensembles", which matches moments in the same way. Posteriors
add the uncertainty around each member (L2M paper, section 4.2).

Members can be loaded from checkpoints, which contain a network and the posterior that a callback fitted to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import format_value, instance, listed
from lightning_bayes.likelihoods import ClassPredictive, Likelihood
from lightning_bayes.network.borrowed import copied_generator, submodule
from lightning_bayes.network.output import unwrap_output
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import same_weights
from lightning_bayes.posterior.files import describe, posterior_in, read_any
from lightning_bayes.predictive.prediction import Prediction, mean_of


@dataclass(frozen=True, eq=False)
class DeepEnsemble:
    """The mixture of several posteriors' predictives.

    Args:
        posteriors: one for each trained network, from any method, all with the same kind of likelihood. Each keeps its
            noise.
        member_weights: relative weights of the members, equal by default.
    """

    posteriors: Sequence[GaussianPosterior] = field(repr=False)
    member_weights: Sequence[float] | Tensor | None = None

    def __post_init__(self) -> None:
        instance("posteriors", self.posteriors, Iterable, "a list of posteriors")
        object.__setattr__(self, "posteriors", tuple(self.posteriors))
        _check_members(self.posteriors)
        object.__setattr__(self, "member_weights", _normalised(self.member_weights, len(self.posteriors)))

    @staticmethod
    def load(
        paths: Sequence[str | PathLike[str]],
        networks: Sequence[nn.Module],
        likelihood: Likelihood | None = None,
        member_weights: Sequence[float] | Tensor | None = None,
    ) -> DeepEnsemble:
        """Load the files that posteriors and callbacks write, with the trained network of each."""
        listed("paths", paths, "paths")
        listed("networks", [*networks] if isinstance(networks, nn.ModuleList) else networks, "networks")
        if len(paths) != len(networks):
            raise PosteriorError(
                f"there are {len(paths)} posterior files and {len(networks)} networks: pass one of each per member"
            )
        members = []
        for path, network in zip(paths, networks, strict=True):
            with _naming(str(path)):
                members.append(GaussianPosterior.load(path, network, likelihood))
                members[-1].check_weights()
        return DeepEnsemble(members, member_weights)

    @staticmethod
    def from_checkpoints(
        paths: Sequence[str | PathLike[str]],
        module: Callable[..., nn.Module],
        name: str | None = None,
        network: str | None = None,
        likelihood: Likelihood | None = None,
        member_weights: Sequence[float] | Tensor | None = None,
        device: str | torch.device = "cpu",
    ) -> DeepEnsemble:
        """Load the last checkpoints of several Trainers with a posterior callback.

        Args:
            paths: one checkpoint for each member.
            module: the LightningModule's class, which is restored with its saved arguments, or a function that makes an
                untrained one, such as `lambda: LitNet(width=50)`.
            name: name of the callback, needed if there were several.
            network: the submodule that maps x to f, as in the callback; by default the module itself.
            likelihood: needed if its class has no `name`, because files cannot store it.
            member_weights: relative weights of the members, equal by default.
            device: device of the networks.
        """
        listed("paths", paths, "paths")
        members = []
        for path in paths:
            with _naming(str(path)):
                members.append(read_checkpoint(path, module, name, network, likelihood, device))
        return DeepEnsemble(members, member_weights)

    def __len__(self) -> int:
        return len(self.posteriors)

    @property
    def likelihood(self) -> Likelihood:
        """The first member's likelihood; the others may have a different noise."""
        return self.posteriors[0].likelihood

    @property
    def device(self) -> torch.device:
        """The first member's device, where predictions are combined."""
        return self.posteriors[0].device

    def predict(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The mixture of the members' predictions at `x`; for the arguments see `GaussianPosterior.predict`. Each
        member draws its own samples."""
        members = self.predict_each(x, predictive, generator=generator)
        means = torch.stack([mean_of(member) for member in members])  # [M, B, …]
        w = self._weights_like(means)
        mean = (w * means).sum(0)
        within = (w * torch.stack([member.epistemic for member in members])).sum(0)
        between = (w * (means - mean).square()).sum(0)
        aleatoric = (w * torch.stack([member.aleatoric for member in members])).sum(0)
        mixture = self.likelihood.predictive(mean, within + between, aleatoric)
        known = [member.mutual_information for member in members if member.mutual_information is not None]
        if isinstance(mixture, ClassPredictive) and len(known) == len(members):
            entropies = torch.stack([member.entropy for member in members])  # [M, B, …]
            w = self._weights_like(entropies)
            disagreement = (mixture.entropy - (w * entropies).sum(0)).clamp_min(0)
            mixture = replace(mixture, mutual_information=(w * torch.stack(known)).sum(0) + disagreement)
        per_input = {}
        for name in ("novelty", "energy"):
            values = [getattr(member, name) for member in members]
            if all(value is not None for value in values):
                per_input[name] = (self._weights_like(torch.stack(values)) * torch.stack(values)).sum(0)
        df: float | Tensor = math.inf
        if any(member.df is not None for member in members):
            tails = torch.stack([torch.zeros_like(mean) if m.df is None else 1 / m.df for m in members])
            df = 1 / (self._weights_like(tails) * tails).sum(0)
        return replace(Prediction.from_predictive(mixture, df), **per_input)

    def predict_each(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> list[Prediction]:
        """The prediction of each member at `x`, on the first member's device."""
        # Members restore the global generator, so all would draw the same numbers from it.
        generator = copied_generator(self.device) if generator is None else generator
        predictions = []
        for number, posterior in enumerate(self.posteriors):
            with _naming(f"member {number}"):
                predictions.append(posterior.predict(x, predictive, generator=generator).to(self.device))
        first = mean_of(predictions[0])
        for number, member in enumerate(predictions):
            if mean_of(member).shape != first.shape:
                raise PosteriorError(
                    f"members must have outputs of the same shape, but member 0 has shape {list(first.shape)} and "
                    f"member {number} has shape {list(mean_of(member).shape)}: use networks with the same outputs"
                )
        return predictions

    def log_prob(
        self,
        x: Any,
        y: Tensor,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`log Σₘ wₘ pₘ(y)` of each real target, in the shape of y."""
        members = self.predict_each(x, predictive, generator=generator)
        if members[0].probs is not None:
            raise PosteriorError("log_prob is a density of real targets; for classes take the log of predict(x).probs")
        log_p = torch.stack([member.log_prob(y) for member in members])  # [M, B, …]
        return (self._weights_like(log_p).log() + log_p).logsumexp(0)

    def _weights_like(self, means: Tensor) -> Tensor:
        """# [M, 1, …]"""
        return torch.tensor(self.member_weights, dtype=means.dtype, device=means.device).view(
            -1, *[1] * (means.ndim - 1)
        )


def _check_members(posteriors: Sequence[GaussianPosterior]) -> None:
    if not posteriors:
        raise PosteriorError("an ensemble needs at least one posterior, got none")
    first = posteriors[0]
    for number, member in enumerate(posteriors):
        if not isinstance(member, GaussianPosterior):
            raise PosteriorError(
                f"member {number} is a {type(member).__name__}: pass GaussianPosteriors, such as those from "
                "fit_laplace, or a callback's .posterior if the network is not sharded"
            )
        if _kind(member.likelihood) != _kind(first.likelihood):
            raise PosteriorError(
                f"members must share one kind of likelihood, but member 0 has {first.likelihood} and member {number} "
                f"has {member.likelihood}"
            )
        for other in range(number):
            # Compare fingerprints, because `check_weights` would fail for at least one of the two members.
            same = same_weights(member.fingerprint, posteriors[other].fingerprint)
            if unwrap_output(member.network) is unwrap_output(posteriors[other].network) and not same:
                raise PosteriorError(
                    f"members {other} and {number} share one network, but were fitted to different weights: give each "
                    "member its own copy of the network"
                )


def _kind(likelihood: Likelihood) -> tuple[Any, ...]:
    """The properties that all members must share. Noise may differ, because each member may have tuned it."""
    return type(likelihood), likelihood.ignore_index


def _normalised(weights: Sequence[float] | Tensor | None, members: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / members,) * members
    try:
        w = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise PosteriorError(f"member_weights must be a number for each member, got {format_value(weights)}") from None
    if w.shape != (members,):
        raise PosteriorError(
            f"there are {members} members, but member_weights of shape {list(w.shape)}: give one for each"
        )
    if not (w >= 0).all() or not w.isfinite().all() or not w.sum() > 0:
        raise PosteriorError(f"member_weights must be finite, not negative, and not all zero, got {w.tolist()}")
    return tuple((w / w.sum()).tolist())


@contextmanager
def _naming(which: str) -> Iterator[None]:
    """Add the member's name to its errors."""
    try:
        yield
    except PosteriorError as error:
        raise PosteriorError(f"{which}: {error}") from error


def read_checkpoint(
    path: str | PathLike[str],
    module: Callable[..., nn.Module],
    name: str | None = None,
    network: str | None = None,
    likelihood: Likelihood | None = None,
    device: str | torch.device = "cpu",
) -> GaussianPosterior:
    """The posterior in a checkpoint; the arguments are those of `DeepEnsemble.from_checkpoints`."""
    checkpoint = _read(path)
    state = posterior_in(checkpoint, name)
    restored = _placed(_restore(module, path, checkpoint), device)
    own_network = restored if network is None else submodule(restored, network, PosteriorError)
    posterior = GaussianPosterior.from_state_dict(own_network, state, likelihood)
    posterior.check_weights()
    return posterior


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        checkpoint = read_any(path, "checkpoint")
    except IsADirectoryError:
        raise PosteriorError(
            "this is a folder written by sharded training: use DeepEnsemble.load with the posteriors' own files"
        ) from None
    if not isinstance(checkpoint, dict):
        raise PosteriorError(f"{path} is not a checkpoint: it contains {describe(checkpoint)}")
    return checkpoint


def _placed(network: nn.Module, device: str | torch.device) -> nn.Module:
    try:
        return network.to(device)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:150]
        raise PosteriorError(f"the network cannot be moved to the device {format_value(device)}: {reason}") from error


def _restore(module: Callable[..., nn.Module], path: str | PathLike[str], checkpoint: dict[str, Any]) -> nn.Module:
    if isinstance(module, nn.Module):
        raise PosteriorError(
            f"module= is a single {type(module).__name__}, but each member needs a separate one: pass the class, or a "
            "function that makes one"
        )
    if hasattr(module, "load_from_checkpoint"):  # a LightningModule's class; the checkpoint has its arguments
        return module.load_from_checkpoint(path, map_location="cpu")
    if not callable(module):
        raise TypeError(
            f"module must be a LightningModule's class, or a function that makes a network, got {format_value(module)}"
        )
    made = module()
    made.load_state_dict(checkpoint["state_dict"])
    return made
