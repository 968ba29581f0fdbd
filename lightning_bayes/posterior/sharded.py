"""`ShardedPosterior`: a diagonal Laplace posterior in shards, one per process.

    q(θ) = N(θ*, diag(H + δ)⁻¹),    θ*, H and δ in shards

Under FSDP2 (`ModelParallelStrategy`) weights and optimizer state are sharded over processes. A diagonal posterior is
elementwise, so it is built, evaluated and sampled shard by shard, and no process holds all of it. Methods that need the
whole network on every process (the linearised network, the evidence, choices on held-out data) raise an error; see
`GaussianPosterior.check_whole`.

A sharded posterior is saved as a folder by `torch.distributed.checkpoint`. Any number of processes can load it, with
any sharding.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.processes import local, placed_like, reshard, whole
from lightning_bayes.network.subset import layer_of
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord, predictive_option
from lightning_bayes.posterior.files import FORMAT, likelihood_from, read
from lightning_bayes.posterior.fit import from_curvature
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError, check_parameters, implements
from lightning_bayes.posterior.laplace import LaplacePosterior, Precision
from lightning_bayes.posterior.prior import PriorError, as_precision
from lightning_bayes.structures import Diagonal, Structure
from lightning_bayes.structures.sharded import ParameterShard, ShardedDiagonal

if TYPE_CHECKING:
    from lightning_bayes.predictive import Prediction

VECTORS = ("curvature", "prior_precision", "mean")


@dataclass(frozen=True, eq=False, repr=False)
class ShardedPosterior(LaplacePosterior):
    """A `LaplacePosterior` whose vectors contain this process's shards, `[p]`. All processes must call its methods."""

    is_sharded: ClassVar[bool] = True
    precision: ShardedDiagonal

    @staticmethod
    def from_curvature(network: nn.Module, curvature: Curvature, prior_precision: Any) -> ShardedPosterior:
        """The posterior around the network's current weights with this process's shard of a diagonal curvature."""
        reshard(network)
        parameters, starts = curvature.subset.parameters(network), curvature.subset.starts
        shards = tuple(ParameterShard.of(p, starts[name]) for name, p in parameters.items())
        structure = ShardedDiagonal(curvature.structure.diagonal(), shards)
        mean = _flat(parameters.values())
        no_fingerprint = mean.new_empty(0, 2)  # `_has_same_weights` compares the weights with the mean instead
        curvature = replace(curvature, structure=structure)
        return ShardedPosterior.around(network, mean, no_fingerprint, curvature, prior_precision)

    def precision_at(self, δ: Tensor, ρ: Tensor | None = None) -> Structure:
        return self.curvature.structure.add_prior(δ)

    def _as_precision(self, prior_precision: Precision) -> Tensor:
        """A number, or one for each weight of this process's shard.  # [] or [p]"""
        δ = torch.as_tensor(prior_precision, dtype=self.mean.dtype, device=self.device)
        if δ.shape == self.mean.shape:
            if not (δ > 0).all():
                raise PriorError(f"a prior precision must be positive, got {δ.min().item():g}")
            return δ
        δ = as_precision(prior_precision, self.subset, self.mean)
        if δ.ndim == 0:
            return δ
        if len(δ) != len(self.subset.layers):
            raise PosteriorError(
                "a sharded posterior takes one prior precision for all layers, one for each layer, or one for each "
                "weight of this process's shard"
            )
        sizes = torch.tensor([shard.size for shard in self.precision.shards], device=self.device)
        return δ[self._layers].repeat_interleave(sizes)

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
        predictive: PredictiveWord | PredictiveOption = "bnn",
        *,
        generator: torch.Generator | None = None,
        calibrated: bool = True,
        differentiable: bool = False,
        split: bool = True,
    ) -> Prediction:
        """The predictive distribution at this process's `x`, by weight samples ("bnn") or at the mean ("map"). All
        processes must call it, each with a batch. The arguments are those of `GaussianPosterior.predict`."""
        option = predictive_option(predictive)
        if option.is_linear:
            self.check_whole(f"predictive={option.kind!r}")
        if differentiable:
            self.check_whole("differentiable=True")
        return super().predict(x, option, generator=generator, calibrated=calibrated, split=split)

    def _has_same_weights(self) -> bool:
        """Whether the weights equal the mean on all processes. All processes get the same answer: if only one of them
        raised an error, the others would deadlock."""
        reshard(self.network)
        weights = _flat(self.subset.parameters(self.network).values())
        changed = torch.tensor(int(not torch.equal(weights, self.mean)), device=self.device)
        Processes.current().sum_([changed])
        return not changed

    def gather(self, network: nn.Module) -> LaplacePosterior:
        """The ordinary posterior, for a `network` that has all weights."""
        H, δ, θ = (self.gathered(t) for t in (self.curvature.structure.diagonal(), self.prior_precision, self.mean))
        if not torch.equal(self.subset.flatten(network).to(θ), θ):
            raise PosteriorError("the network's weights do not match the posterior: load the matching weights")
        return from_curvature(network, replace(self.curvature, structure=Diagonal(H)), δ)

    def gathered(self, vector: Tensor) -> Tensor:
        """Gather a whole sharded vector on every process.  # [p] -> [P]"""
        if vector.ndim == 0:
            return vector
        return torch.cat([whole(t).reshape(-1) for t in self._by_parameter(vector).values()])

    def _by_parameter(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a sharded vector into one tensor per parameter, distributed like the parameter."""
        reshard(self.network)
        shards, parts = self.precision.shards, self.precision.split(vector)
        return {
            name: placed_like(part.reshape(shard.local_shape), p)
            for (name, p), part, shard in zip(self.subset.parameters(self.network).items(), parts, shards, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Each vector is stored as one tensor per parameter, distributed like the parameter; all other values are
        plain."""
        vectors = (self.curvature.structure.diagonal(), self.prior_precision.expand_as(self.mean), self.mean)
        return {
            "format": FORMAT,
            "type": type(self).__name__,
            "likelihood": self.likelihood.to_state(),
            "n_data": int(self.n_data),
            "kind": self.curvature.kind,
            **{name: self._by_parameter(vector) for name, vector in zip(VECTORS, vectors, strict=True)},
        }

    @staticmethod
    def from_state_dict(
        network: nn.Module, state: dict[str, Any], likelihood: Likelihood | None = None
    ) -> ShardedPosterior:
        """The posterior with this state, for a network that is sharded in the same way."""
        shapes = {name: t.shape for name, t in state["mean"].items()}
        subset = Subset(tuple(shapes), tuple(shapes.values()))
        check_parameters(network, subset)
        device = next(network.parameters()).device
        H, δ, mean = (_flat(state[vector].values()).to(device) for vector in VECTORS)
        curvature = Curvature(
            structure=Diagonal(H),
            subset=subset,
            likelihood=likelihood or likelihood_from(state["likelihood"], device),
            kind=state["kind"],
            n_data=state["n_data"],
            n_outputs=0,
        )
        return replace(ShardedPosterior.from_curvature(network, curvature, δ), mean=mean)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a folder with all processes' shards; all processes must call it."""
        import torch.distributed.checkpoint as checkpoint

        state = self.state_dict()
        vectors = {vector: state.pop(vector) for vector in VECTORS}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        plain = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)  # checkpoints store only tensors
        with _quiet():
            writer = checkpoint.FileSystemWriter(str(path), overwrite=True)
            checkpoint.save({"plain": plain, **vectors}, storage_writer=writer)

    @staticmethod
    def load(
        path: str | PathLike[str],
        network: nn.Module,
        likelihood: str | Likelihood | None = None,
        name: str | None = None,
    ) -> ShardedPosterior:
        """Read a folder that `save` wrote, for a network with any sharding; all processes must call it. A folder
        contains one posterior, so `name` has no effect."""
        state = _read(path, network)
        return ShardedPosterior.from_state_dict(network, state, None if likelihood is None else resolve(likelihood))


def _read(path: str | PathLike[str], network: nn.Module) -> dict[str, Any]:
    """The state, with shards like those of the network's parameters; all processes must call it."""
    import torch.distributed.checkpoint as checkpoint

    reshard(network)
    metadata = checkpoint.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    stored = {key: meta for key, meta in metadata.items() if isinstance(meta, checkpoint.TensorStorageMetadata)}
    shapes = {key.removeprefix("mean."): meta.size for key, meta in stored.items() if key.startswith("mean.")}
    parameters = {name: p for name, p in network.named_parameters() if shapes.get(name) == p.shape}
    for name in shapes.keys() - parameters.keys():
        raise PosteriorError(
            f"the posterior belongs to another network: it has {name} of shape {tuple(shapes[name])}, but this "
            "network has no such parameter"
        )
    state: dict[str, Any] = {"plain": torch.empty(stored["plain"].size, dtype=torch.uint8)}
    for vector in VECTORS:
        dtypes = {name: stored[f"{vector}.{name}"].properties.dtype for name in parameters}
        state[vector] = {name: torch.empty_like(p, dtype=dtypes[name]) for name, p in parameters.items()}
    with _quiet():
        checkpoint.load(state, checkpoint_id=str(path))
    plain = io.BytesIO(state.pop("plain").numpy().tobytes())
    return {**state, **torch.load(plain, map_location="cpu", weights_only=True)}


def is_folder_of_shards(path: Any) -> bool:
    return isinstance(path, (str, PathLike)) and Path(path, ".metadata").is_file()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about a single process and about overwriting an older checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """This process's shards as one vector, in at least float32.  # [p]"""
    flat = torch.cat([local(t).reshape(-1) for t in tensors])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


@implements("load", sharded=True)
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
            f"{path}: {error}. A callback's file matches the last weights; for other weights, load a checkpoint, "
            "which contains their posterior"
        ) from None
    return posterior
