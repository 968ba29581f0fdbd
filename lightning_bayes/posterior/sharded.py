"""`ShardedPosterior`: a diagonal Laplace posterior of which each process holds the part of its own weights.

    q(θ) = N(θ*, diag(H + δ)⁻¹),    θ*, H and δ in shards

Under FSDP2 (`ModelParallelStrategy`) weights and optimizer state are sharded over processes. A diagonal posterior is
elementwise, so it is built, evaluated and sampled shard by shard, and no process ever holds the whole. What needs the
whole network on every process (the linearised network, the evidence, held-out choices) is refused with a sentence.

It is saved as a folder: `torch.distributed.checkpoint` writes the shards of all processes, and any number of processes,
each with shards of its own, reads them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.processes import local, placed_like, reshard, whole
from lightning_bayes.network.subset import layer_of
from lightning_bayes.options.predictive import PredictiveOption, predictive_option
from lightning_bayes.posterior.files import FORMAT, likelihood_from, read
from lightning_bayes.posterior.fit import from_curvature
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError, check_parameters
from lightning_bayes.posterior.implementation import implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import PriorError, as_precision
from lightning_bayes.structures import Diagonal
from lightning_bayes.structures.sharded import ParameterShard, ShardedDiagonal

if TYPE_CHECKING:
    from lightning_bayes.predictive import Prediction

VECTORS = ("curvature", "prior_precision", "mean")
NEEDS_WHOLE = "needs the whole network on every process, but its weights are sharded"
Sharded = TypeVar("Sharded", bound="ShardedPosterior")


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PosteriorError(
            f"{what} {NEEDS_WHOLE}: use predictive='bnn' or 'map', or gather(network) for an ordinary posterior"
        )

    return refuse


@dataclass(frozen=True, eq=False, repr=False)
class ShardedPosterior(LaplacePosterior):
    """A `LaplacePosterior` whose vectors are this process's shards, `[p]`. Its methods are called on all processes."""

    is_sharded: ClassVar[bool] = True
    precision: ShardedDiagonal = field(repr=False)

    functional_for, log_marginal_likelihood = _refused("functional"), _refused("the evidence")
    with_noise, with_log_likelihood = _refused("with_noise"), _refused("with_log_likelihood")
    tune_prior, calibrate, refine = _refused("tune_prior"), _refused("calibrate"), _refused("refine")
    encode, reconstruct, to = _refused("encode"), _refused("reconstruct"), _refused("to")
    update, penalty = _refused("update"), _refused("penalty")

    @staticmethod
    def from_curvature(network: nn.Module, curvature: Curvature, prior_precision: Any) -> ShardedPosterior:
        """Around the network's present weights, with this process's shard of a diagonal curvature."""
        reshard(network)
        parameters, starts = curvature.subset.parameters(network), curvature.subset.starts
        shards = tuple(ParameterShard.of(p, starts[name]) for name, p in parameters.items())
        structure = ShardedDiagonal(curvature.structure.diagonal(), shards)
        mean = _flat(parameters.values())
        no_fingerprint = mean.new_empty(0, 2)  # the weights themselves are compared with the mean
        curvature = replace(curvature, structure=structure)
        return ShardedPosterior.around(network, mean, no_fingerprint, curvature, prior_precision)

    def with_prior(self: Sharded, prior_precision: float | Tensor | Sequence[float]) -> Sharded:
        """The same curvature with another prior: one number, one per layer, or this process's shard of one per
        parameter."""
        with torch.inference_mode(False), torch.no_grad():
            δ = self._own_prior(prior_precision)
            H = replace(self.precision, values=self.curvature.structure.diagonal())
            return replace(self, prior_precision=δ, precision=H.add_prior(δ))

    def _own_prior(self, prior_precision: float | Tensor | Sequence[float]) -> Tensor:
        """# [] or [p]"""
        δ = torch.as_tensor(prior_precision, dtype=self.mean.dtype, device=self.device)
        if δ.shape == self.mean.shape:
            if not (δ > 0).all():
                raise PriorError(f"a prior precision must be positive, got {δ.min().item():g}")
            return δ.detach().clone()
        δ = as_precision(prior_precision, self.subset, self.mean).detach().clone()
        if δ.ndim and len(δ) != len(self.subset.layers):
            raise PosteriorError(
                "a posterior that is sharded over processes takes one prior precision for all layers, one for each "
                "layer, or one for each weight of the process's own shard"
            )
        if δ.ndim:
            sizes = torch.tensor([shard.size for shard in self.precision.shards], device=self.device)
            δ = δ[self._layers].repeat_interleave(sizes)
        return δ

    def prior_shares(self) -> Tensor:
        return self.prior_precision * self.precision.inverse_diagonal()

    def effective_parameters_per_layer(self) -> Tensor:
        γ = self.precision.sums(1 - self.prior_shares())  # of each parameter
        return γ.new_zeros(len(self.subset.layers)).index_add_(0, self._layers, γ)

    @property
    def _layers(self) -> Tensor:
        """The layer of each parameter."""
        layers = [self.subset.layers.index(layer_of(name)) for name in self.subset.names]
        return torch.tensor(layers, device=self.device)

    def predict(
        self,
        x: Any,
        predictive: str | PredictiveOption = "bnn",
        *,
        generator: torch.Generator | None = None,
        calibrated: bool = True,
        differentiable: bool = False,
        split: bool = True,
    ) -> Prediction:
        """The predictive distribution at this process's own `x`, through weight samples ("bnn") or at the mean
        ("map"). All processes must call it, each with a batch. The arguments are those of `GaussianPosterior`."""
        option = predictive_option(predictive)
        if option.is_linear:
            _refused(f"predictive={option.kind!r}")()
        if differentiable:
            _refused("differentiable=True")()
        return super().predict(x, option, generator=generator, calibrated=calibrated, split=split)

    def _has_same_weights(self) -> bool:
        """Whether all processes have the shards of the mean: where only one raised, the others would wait for ever."""
        reshard(self.network)
        weights = _flat(self.subset.parameters(self.network).values())
        changed = torch.tensor(int(not torch.equal(weights, self.mean)), device=self.device)
        Processes.current().sum_([changed])
        return not changed

    def gather(self, network: nn.Module) -> LaplacePosterior:
        """The ordinary posterior, for a `network` that holds the whole weights."""
        H, δ, θ = (self.gathered(t) for t in (self.curvature.structure.diagonal(), self.prior_precision, self.mean))
        if not torch.equal(self.subset.flatten(network).to(θ), θ):
            raise PosteriorError("the network's weights are not those of the posterior: load the matching weights")
        return from_curvature(network, replace(self.curvature, structure=Diagonal(H)), δ)

    def gathered(self, vector: Tensor) -> Tensor:
        """The whole of a vector of shards, on every process.  # [p] -> [P]"""
        if vector.ndim == 0:
            return vector
        return torch.cat([whole(t).reshape(-1) for t in self._by_parameter(vector).values()])

    def _by_parameter(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector of shards as one tensor per parameter, distributed as the parameter is."""
        reshard(self.network)
        shards, parts = self.precision.shards, self.precision.split(vector)
        return {
            name: placed_like(part.reshape(shard.local_shape), p)
            for (name, p), part, shard in zip(self.subset.parameters(self.network).items(), parts, shards, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Each vector as one tensor per parameter, distributed as the parameter is; the rest plain."""
        vectors = {
            "curvature": self.curvature.structure.diagonal(),
            "prior_precision": self.prior_precision.expand_as(self.mean),
            "mean": self.mean,
        }
        return {
            "format": FORMAT,
            "type": type(self).__name__,
            "likelihood": self.likelihood.to_state(),
            "n_data": int(self.n_data),
            "kind": self.curvature.kind,
            **{name: self._by_parameter(vector) for name, vector in vectors.items()},
        }

    @staticmethod
    def from_state_dict(
        network: nn.Module, state: dict[str, Any], likelihood: Likelihood | None = None
    ) -> ShardedPosterior:
        """The posterior that `state_dict` described, for a network that is sharded in the same way."""
        shapes = {name: t.shape for name, t in state["mean"].items()}
        subset = Subset(tuple(shapes), tuple(shapes.values()))
        check_parameters(network, subset)
        device = next(network.parameters()).device
        H, δ, mean = (_flat(state[vector].values()).to(device) for vector in VECTORS)
        curvature = Curvature(
            structure=Diagonal(H),
            subset=subset,
            likelihood=likelihood or likelihood_from(state["likelihood"], device),
            kind=state.get("kind", "second_moment"),  # of older states
            n_data=state["n_data"],
            n_outputs=0,
        )
        return replace(ShardedPosterior.from_curvature(network, curvature, δ), mean=mean)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a folder of all processes' shards, which any number of processes can load; on all processes."""
        import torch.distributed.checkpoint as checkpoint

        state = self.state_dict()
        plain = {"n_data": torch.tensor(state["n_data"]), "likelihood": _packed(state["likelihood"])}
        plain["kind"] = _packed({"kind": state["kind"]})
        tensors = {**plain, **{vector: state[vector] for vector in VECTORS}}
        with _quiet():
            checkpoint.save(tensors, storage_writer=checkpoint.FileSystemWriter(str(path), overwrite=True))

    @staticmethod
    def load(
        path: str | PathLike[str],
        network: nn.Module,
        likelihood: str | Likelihood | None = None,
        name: str | None = None,
    ) -> ShardedPosterior:
        """The posterior in that folder, which holds one of any `name`, for a network sharded in whatever way; on all
        processes."""
        state = _read(path, network)
        if likelihood is None and "likelihood" not in state:
            raise PosteriorError(f"{path} is of an older version, which did not save the likelihood: pass likelihood=")
        return ShardedPosterior.from_state_dict(network, state, None if likelihood is None else resolve(likelihood))


def _read(path: str | PathLike[str], network: nn.Module) -> dict[str, Any]:
    """The state, in shards like those of the network's parameters; on all processes."""
    import torch.distributed.checkpoint as checkpoint

    reshard(network)
    saved = checkpoint.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    stored = {key: meta for key, meta in saved.items() if isinstance(meta, checkpoint.TensorStorageMetadata)}
    shapes = {key.removeprefix("mean."): meta.size for key, meta in stored.items() if key.startswith("mean.")}
    parameters = {name: p for name, p in network.named_parameters() if shapes.get(name) == p.shape}
    for name in shapes.keys() - parameters.keys():
        raise PosteriorError(
            f"the posterior belongs to another network: it has {name} of shape {tuple(shapes[name])}, this one "
            "has no such parameter"
        )
    state: dict[str, Any] = {"n_data": torch.tensor(0)}
    packed = [key for key in ("likelihood", "kind") if key in stored]  # older folders have none
    for key in packed:
        state[key] = torch.empty(stored[key].size, dtype=torch.uint8)
    for vector in VECTORS:
        dtypes = {name: stored[f"{vector}.{name}"].properties.dtype for name in parameters}
        state[vector] = {name: torch.empty_like(p, dtype=dtypes[name]) for name, p in parameters.items()}
    with _quiet():
        checkpoint.load(state, checkpoint_id=str(path))
    state["n_data"] = int(state["n_data"])
    for key in packed:
        state[key] = _unpacked(state[key])
    if "kind" in state:
        state["kind"] = state["kind"]["kind"]
    return state


def is_folder_of_shards(path: Any) -> bool:
    return isinstance(path, (str, PathLike)) and Path(path, ".metadata").is_file()


def _packed(state: dict[str, Any]) -> Tensor:
    """A dictionary as bytes, for a checkpoint of tensors.  # uint8 [bytes]"""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notices that a process alone is a process alone, and that an older file is written over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """This process's shards as one vector, in at least float32.  # [p]"""
    flat = torch.cat([local(t).reshape(-1) for t in tensors])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


@implements("load")
def load_posterior(
    path: str | PathLike[str], network: nn.Module, likelihood: Likelihood | None, name: str | None
) -> GaussianPosterior:
    if is_folder_of_shards(path):
        return ShardedPosterior.load(path, network, likelihood)
    posterior = GaussianPosterior.from_state_dict(network, read(path, name), likelihood)
    try:
        posterior.check_weights()
    except PosteriorError as error:
        raise PosteriorError(
            f"{path}: {error}. A callback's own file belongs to the last weights; load also reads a checkpoint, "
            "whose posterior belongs to the weights in it"
        ) from None
    return posterior
