"""`DeepEnsemble`: one predictive from several posteriors, each of a different network.

It is the mixture of the members' predictives (see `predictive.mixture`).

With `predictive="map"` the members are points, and this is the deep ensemble of Lakshminarayanan et al. (2017), "Simple
and scalable predictive uncertainty estimation using deep ensembles", which matches moments in the same way. Posteriors
add the uncertainty around each member (L2M paper, section 4.2).

Members can be loaded from checkpoints, which contain a network and the posterior that a callback fitted to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, format_value, instance, listed
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import copied_generator, preserved_rng, submodule
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.output import unwrap_output
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import same_weights, unflatten
from lightning_bayes.posterior.files import describe, posterior_in, read_any
from lightning_bayes.posterior.gaussian import point_posterior
from lightning_bayes.posterior.moments import update_statistics, with_statistics
from lightning_bayes.predictive.draws import draw_move
from lightning_bayes.predictive.mixture import Mixture, check_shapes, naming
from lightning_bayes.predictive.prediction import Prediction


@dataclass(frozen=True, eq=False)
class DeepEnsemble(Mixture):
    """The mixture of several posteriors' predictives. Each member draws its own samples.

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
            with naming(str(path)):
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
            with naming(str(path)):
                members.append(read_checkpoint(path, module, name, network, likelihood, device))
        return DeepEnsemble(members, member_weights)

    @staticmethod
    def from_samples(
        posterior: GaussianPosterior,
        loader: Iterable[Any],
        samples: int = 30,
        *,
        generator: torch.Generator | None = None,
    ) -> DeepEnsemble:
        """Copies of a posterior's network at weight samples, each with its own batch norm statistics, as Maddox et al.
        (2019) use them for SWAG. Predict with "map".

        Args:
            posterior: the posterior of a network with batch norms.
            loader: the training data, in batches. Each sample takes one pass.
            samples: the number of copies.
            generator: draws the samples.
        """
        instance("posterior", posterior, GaussianPosterior, "a posterior")
        posterior.check_whole("from_samples")
        count("samples", samples)
        check_generator(generator)
        if isinstance(check_loader(loader), Iterator):
            raise PosteriorError(
                "each sample passes over the data, but the loader is an iterator: pass a DataLoader or a list"
            )
        posterior.check_weights()
        members = []
        for _ in range(samples):
            network, move = copy.deepcopy(posterior.network), draw_move(posterior, generator)
            with torch.no_grad():
                for name, part in unflatten(posterior, move).items():
                    network.get_parameter(name).add_(part)
            if with_statistics(network):
                with preserved_rng(posterior.device):  # a shuffling loader draws from the global generator
                    xs = (inputs.split_targets(network, batch, "train")[0] for batch in loader)
                    update_statistics(network, (inputs.to_device(x, posterior.device) for x in xs))
            members.append(point_posterior(network, posterior.likelihood))
        return DeepEnsemble(members)

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

    @property
    def network(self) -> nn.Module:
        """The first member's network."""
        return self.posteriors[0].network

    @property
    def part_weights(self) -> Sequence[float]:
        weights: Any = self.member_weights
        return weights

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
            with naming(f"member {number}"):
                predictions.append(posterior.predict(x, predictive, generator=generator).to(self.device))
        check_shapes(predictions, "members", "use networks with the same outputs")
        return predictions


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
