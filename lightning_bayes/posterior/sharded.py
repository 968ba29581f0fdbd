"""`ShardedPosterior`: a diagonal posterior of which every process holds the part that belongs to its own weights.

Under FSDP2 (`ModelParallelStrategy`) weights and optimizer state are sharded over processes. A diagonal posterior is
elementwise, so that it can be built, evaluated and sampled shard by shard, and no process ever holds the whole. A draw
is numbered by the weight's place in the whole network: it is the same on any number of processes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.arguments import count
from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.likelihoods.outputs import check_generator, standard_normal
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.at_weights import at_weights
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.noise import uniforms
from lightning_bayes.network.shards import local, reshard
from lightning_bayes.network.subset import layer_of
from lightning_bayes.posterior.gaussian import PosteriorError, check_theta
from lightning_bayes.posterior.prior_precision import PriorError, as_precision

if TYPE_CHECKING:
    from lightning_bayes.posterior.laplace import LaplacePosterior
    from lightning_bayes.predictive import Prediction


_VECTORS = ("curvature", "prior_precision", "mean")


@dataclass(frozen=True, eq=False)
class ShardedPosterior:
    """`N(mean, diag(curvature + δ)⁻¹)`; the vectors are this process's shards. Methods are called on all processes."""

    network: nn.Module = field(repr=False)
    subset: Subset = field(repr=False)  # of the whole network
    likelihood: Likelihood
    mean: Tensor = field(repr=False)  # [p]
    curvature: Tensor = field(repr=False)  # [p]
    prior_precision: Tensor  # [] or [p]
    n_data: int

    @staticmethod
    def from_curvature(network: nn.Module, curvature: Curvature, prior_precision: Any) -> ShardedPosterior:
        """Around the network's present weights, with this process's shard of the curvature."""
        values = curvature.structure.diagonal()
        parameters = curvature.subset.parameters(network)
        mean = ShardedPosterior._flat({name: local(p) for name, p in parameters.items()})
        bare = ShardedPosterior(
            network, curvature.subset, curvature.likelihood, mean, values, mean.new_ones(()), curvature.n_data
        )
        return bare.with_prior(prior_precision)

    @property
    def precision(self) -> Tensor:
        """# [p]"""
        return self.curvature + self.prior_precision

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def is_elsewhere(self) -> bool:
        return next(iter(self._shards().values())).device != self.device

    def with_prior(self, prior_precision: float | Tensor) -> ShardedPosterior:
        """The same curvature with another prior: one number, one per layer, or this process's shard of one per
        parameter."""
        δ = torch.as_tensor(prior_precision, dtype=self.mean.dtype, device=self.device)
        if δ.shape != self.mean.shape:
            δ = as_precision(prior_precision, self.subset, self.mean)
            if δ.shape == (len(self.subset.layers),):
                layers = [self.subset.layers.index(layer_of(name)) for name in self.subset.names]
                δ = torch.cat([δ[i].expand(p.numel()) for i, p in zip(layers, self._shards().values(), strict=True)])
            elif δ.ndim:
                raise PosteriorError(
                    "a posterior that is sharded over processes takes one prior precision for all layers, one for each "
                    "layer, or one for each weight of the process's own shard"
                )
        elif not (δ > 0).all():
            raise PriorError(f"a prior precision must be positive, got {δ.min().item():g}")
        return replace(self, prior_precision=δ.detach().clone())

    def sample(self, n: int = 1, seed: int = 0) -> Tensor:
        """This process's shard of `n` weight vectors, the same vectors on any number of processes.  # [n, p]"""
        return torch.stack([self._draw(seed, i) for i in range(n)])

    def log_prob(self, theta: Tensor) -> Tensor:
        """`log N(θ; mean, precision⁻¹)` of whole vectors, of which each process passes its shards.  # [..., p] ->
        [...]"""
        check_theta(theta, self.mean)
        P, shards = self.precision, self._shards()
        terms = 0.5 * (P.log() - P * (theta - self.mean).square() - math.log(2 * math.pi))
        parameters = self.subset.parameters(self.network).values()
        parts = terms.double().split([shard.numel() for shard in shards.values()], dim=-1)
        # What several processes hold counts once.
        total = torch.stack([part.sum(-1) / _copies(p) for part, p in zip(parts, parameters, strict=True)]).sum(0)
        if _several():
            dist.all_reduce(total)
        return total

    def predict(
        self,
        x: Any,
        predictive: str = "bnn",
        link: str | None = None,
        samples: int = 100,
        generator: torch.Generator | None = None,
        calibrated: bool = True,
    ) -> Prediction:
        """The predictive distribution at this process's own `x`, through weight samples ("bnn") or at the mean
        ("map"). All processes must call it, each with a batch. A sharded posterior has no calibration to leave out."""
        from lightning_bayes.predictive import Prediction

        if predictive not in ("bnn", "map"):
            raise PosteriorError(
                f"predictive={predictive!r} needs the whole network on every process, but its weights are sharded: use "
                "predictive='bnn' or 'map', or gather(network) for an ordinary posterior"
            )
        count("samples", samples)
        check_generator(generator)
        self.likelihood.choose_link(link)
        self.check_weights()
        seed = generator.initial_seed() if generator is not None else 0
        with torch.inference_mode(False), borrowed(self.network, ()), torch.no_grad():
            x = inputs.to_device(x, self.device)
            if predictive == "map":
                return Prediction.from_predictive(self.likelihood.point(self._outputs(x)))
            draws = []
            for i in range(samples):
                with self.at(self._draw(seed, i)):
                    draws.append(self._outputs(x))
            return Prediction.from_predictive(self.likelihood.from_samples(torch.stack(draws)))

    @contextmanager
    def at(self, theta: Tensor) -> Iterator[None]:
        """The network with other weights, this process's shard of them; its own come back whatever happens."""
        shards = self._shards()
        parts = (theta - self._flat(shards)).split([shard.numel() for shard in shards.values()])
        parameters = self.subset.parameters(self.network).values()
        moves = {
            p: part.reshape(shard.shape) for p, shard, part in zip(parameters, shards.values(), parts, strict=True)
        }
        with at_weights(self.network, moves):
            yield

    def gather(self, network: nn.Module) -> LaplacePosterior:
        """The ordinary posterior, for a `network` that holds the whole weights."""
        from lightning_bayes.posterior.laplace import from_curvature
        from lightning_bayes.structures import Diagonal

        H, δ, θ = (self._gathered(t) for t in (self.curvature, self.prior_precision, self.mean))
        if not torch.equal(self.subset.flatten(network).to(θ), θ):
            raise PosteriorError("the network's weights are not those of the posterior: load the matching weights")
        whole = Curvature(
            structure=Diagonal(H),
            subset=self.subset,
            likelihood=self.likelihood,
            kind="second_moment",
            n_data=self.n_data,
            n_outputs=0,
            log_likelihood=torch.tensor(math.nan, dtype=torch.float64),
        )
        return from_curvature(network, whole, δ)

    def check_weights(self) -> None:
        """Raise, on all processes, if one's shard of the weights is not the one the posterior was made of."""
        same = torch.tensor(int(torch.equal(self._flat(self._shards()), self.mean)), device=self.device)
        if _several():  # where only one raised, the others would wait for it for ever
            dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same:
            raise PosteriorError(
                "the network's weights are not those the posterior was fitted to: load the matching weights, or fit "
                "the posterior again"
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Write a folder of all processes' shards, which any number of processes can load; on all processes."""
        import torch.distributed.checkpoint as checkpoint

        state: dict[str, Any] = {"n_data": torch.tensor(self.n_data)}
        for what in _VECTORS:
            parts = self._distributed(getattr(self, what).expand_as(self.mean))
            state.update({f"{what}.{name}": part for name, part in parts.items()})
        with _quiet():
            checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(str(path), overwrite=True))

    @staticmethod
    def load(path: str | PathLike[str], network: nn.Module, likelihood: str | Likelihood) -> ShardedPosterior:
        """The posterior in that folder, for a network that is sharded in whatever way; on all processes."""
        import torch.distributed.checkpoint as checkpoint

        reshard(network)
        saved = checkpoint.FileSystemReader(str(path)).read_metadata().state_dict_metadata
        tensors = {key: meta for key, meta in saved.items() if isinstance(meta, checkpoint.TensorStorageMetadata)}
        shapes = {key.removeprefix("mean."): meta.size for key, meta in tensors.items() if key.startswith("mean.")}
        parameters = {name: p for name, p in network.named_parameters() if shapes.get(name) == p.shape}
        for name in shapes.keys() - parameters.keys():
            raise PosteriorError(
                f"the posterior belongs to another network: it has {name} of shape {tuple(shapes[name])}, this one "
                "has no such parameter"
            )
        state: dict[str, Any] = {"n_data": torch.tensor(0)}
        for what in _VECTORS:
            for name, p in parameters.items():
                dtype = tensors[f"{what}.{name}"].properties.dtype
                state[f"{what}.{name}"] = torch.empty_like(p, dtype=dtype, requires_grad=False)
        with _quiet():
            checkpoint.load(state, checkpoint_id=str(path))
        H, δ, θ = (
            ShardedPosterior._flat({name: local(state[f"{what}.{name}"]) for name in parameters}) for what in _VECTORS
        )
        subset = Subset(tuple(parameters), tuple(p.shape for p in parameters.values()))
        return ShardedPosterior(network, subset, resolve(likelihood), θ, H, δ, int(state["n_data"]))

    @staticmethod
    def _flat(shards: dict[str, Tensor]) -> Tensor:
        flat = torch.cat([shard.reshape(-1) for shard in shards.values()])
        return flat.to(torch.promote_types(flat.dtype, torch.float32))

    def _distributed(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector of this process's shards as one tensor per parameter, placed as the parameter is."""
        shards, found = self._shards(), {}
        parameters = self.subset.parameters(self.network)
        parts = vector.split([shard.numel() for shard in shards.values()])
        for (name, p), shard, part in zip(parameters.items(), shards.values(), parts, strict=True):
            whole = part.reshape(shard.shape).contiguous()
            if hasattr(p, "to_local"):
                from torch.distributed.tensor import DTensor

                assert isinstance(p, DTensor)
                stride = torch.empty(p.shape, device="meta").stride()  # the parameter's own may be channels-last
                whole = DTensor.from_local(
                    whole, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=stride
                )
            found[name] = whole
        return found

    def _gathered(self, vector: Tensor) -> Tensor:
        if vector.ndim == 0:
            return vector
        whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in self._distributed(vector).values()]
        return torch.cat([t.reshape(-1) for t in whole])

    def _outputs(self, x: Any) -> Tensor:
        return inputs.call(self.network, x)

    def _draw(self, seed: int, number: int) -> Tensor:
        reshard(self.network)
        parameters = self.subset.parameters(self.network)
        noise = [self._noise(seed, number, self.subset.starts[name], p) for name, p in parameters.items()]
        return self.mean + torch.cat(noise) * self.precision.rsqrt()

    def _noise(self, seed: int, number: int, start: int, p: Tensor) -> Tensor:
        """Numbers that belong to a weight's place in the whole network's flat vector."""
        places = (start + _positions(p)).reshape(-1).to(self.device)
        return standard_normal(uniforms(seed, number, places, torch.Size(), torch.float64)).to(self.mean)

    def _shards(self) -> dict[str, Tensor]:
        reshard(self.network)
        return {name: local(p) for name, p in self.subset.parameters(self.network).items()}


def _positions(p: Tensor) -> Tensor:
    """The flat positions, within the whole parameter, of this process's shard of it, in the shard's shape."""
    rows = [torch.arange(size) for size in p.shape]
    for mesh_dim, placement in enumerate(getattr(p, "placements", ())):
        if hasattr(placement, "dim"):
            rank, size = p.device_mesh.get_local_rank(mesh_dim), p.device_mesh.size(mesh_dim)  # type: ignore[attr-defined]
            # Beside a tensor-parallel dimension to its right, a shard is a part of each of that one's shards.
            before = getattr(placement, "split_factor", 1)
            parts = [_chunk(_chunk(rows[placement.dim], i, before), rank, size) for i in range(before)]
            rows[placement.dim] = torch.cat(parts)
    place, stride = torch.zeros([1] * p.ndim, dtype=torch.long), 1
    for d in reversed(range(p.ndim)):
        place = place + stride * rows[d].view([-1 if other == d else 1 for other in range(p.ndim)])
        stride *= p.shape[d]
    return place


def _chunk(rows: Tensor, rank: int, size: int) -> Tensor:
    """The part that `rank` gets where `torch.chunk` cuts, and nothing where that makes fewer parts."""
    width = -(-len(rows) // size)
    return rows[rank * width : (rank + 1) * width]


def _copies(p: Tensor) -> int:
    """How many processes hold the same weights."""
    world = dist.get_world_size() if _several() else 1
    for mesh_dim, placement in enumerate(getattr(p, "placements", ())):
        if hasattr(placement, "dim"):
            world //= p.device_mesh.size(mesh_dim)  # type: ignore[attr-defined]
    return world


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notices that a process alone is a process alone, and that an older file is written over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
