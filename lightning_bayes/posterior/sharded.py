"""`ShardedPosterior`: a diagonal Laplace posterior of which each process holds the part of its own weights.

    q(θ) = N(θ*, diag(H + δ)⁻¹),    θ*, H and δ in shards

Under FSDP2 (`ModelParallelStrategy`) weights and optimizer state are sharded over processes. A diagonal posterior is
elementwise, so it is built, evaluated and sampled shard by shard, and no process ever holds the whole. What needs the
whole network on every process (the linearised network, the evidence, held-out choices) is refused with a sentence.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.shards import local, placed_like, reshard, whole
from lightning_bayes.network.subset import layer_of
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior, from_curvature
from lightning_bayes.posterior.prior_precision import PriorError, as_precision
from lightning_bayes.structures import Diagonal
from lightning_bayes.structures.sharded import ParameterShard, ShardedDiagonal

if TYPE_CHECKING:
    from lightning_bayes.predictive import Prediction

NEEDS_WHOLE = "needs the whole network on every process, but its weights are sharded"
_VECTORS = ("curvature", "prior_precision", "mean")


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PosteriorError(
            f"{what} {NEEDS_WHOLE}: use predictive='bnn' or 'map', or gather(network) for an ordinary posterior"
        )

    return refuse


@dataclass(frozen=True, eq=False)
class ShardedPosterior(LaplacePosterior):
    """A `LaplacePosterior` whose vectors are this process's shards, `[p]`. Its methods are called on all processes."""

    is_sharded: ClassVar[bool] = True
    precision: ShardedDiagonal = field(repr=False)

    functional_for, log_marginal_likelihood = _refused("functional"), _refused("the evidence")
    with_noise, with_log_likelihood = _refused("with_noise"), _refused("with_log_likelihood")
    tune_prior, calibrate = _refused("tune_prior"), _refused("calibrate")
    encode, reconstruct = _refused("encode"), _refused("reconstruct")

    @staticmethod
    def from_curvature(network: nn.Module, curvature: Curvature, prior_precision: Any) -> ShardedPosterior:
        """Around the network's present weights, with this process's shard of a diagonal curvature."""
        reshard(network)
        parameters, starts = curvature.subset.parameters(network), curvature.subset.starts
        shards = tuple(ParameterShard.of(p, starts[name]) for name, p in parameters.items())
        structure = ShardedDiagonal(curvature.structure.diagonal(), shards)
        mean = _flat(parameters.values())
        bare = ShardedPosterior(
            network=network,
            subset=curvature.subset,
            likelihood=curvature.likelihood,
            mean=mean,
            precision=structure,
            n_data=curvature.n_data,
            fingerprint=mean.new_empty(0, 2),  # `check_weights` compares the weights themselves with the mean
            curvature=replace(curvature, structure=structure),
            prior_precision=mean.new_ones(()),
        )
        return bare.with_prior(prior_precision)

    def with_prior(self, prior_precision: float | Tensor) -> ShardedPosterior:
        """The same curvature with another prior: one number, one per layer, or this process's shard of one per
        parameter."""
        with torch.inference_mode(False), torch.no_grad():
            δ = self._own_prior(prior_precision)
            H = replace(self.precision, values=self.curvature.structure.diagonal())
            return replace(self, prior_precision=δ, precision=H.add_prior(δ))

    def _own_prior(self, prior_precision: float | Tensor) -> Tensor:
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

    def effective_parameters_per_layer(self) -> Tensor:
        γ = self.precision.sums(1 - self.prior_precision * self.precision.inverse_diagonal())  # of each parameter
        return γ.new_zeros(len(self.subset.layers)).index_add_(0, self._layers, γ)

    @property
    def _layers(self) -> Tensor:
        """The layer of each parameter."""
        layers = [self.subset.layers.index(layer_of(name)) for name in self.subset.names]
        return torch.tensor(layers, device=self.device)

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
        ("map"). All processes must call it, each with a batch. The arguments are those of `GaussianPosterior`."""
        if predictive == "glm":
            _refused("predictive='glm'")()
        return super().predict(x, predictive, link, samples, generator, calibrated)

    def check_weights(self) -> None:
        """Raise, on all processes, if one's shard of the weights is not the one the posterior was made of."""
        reshard(self.network)
        weights = _flat(self.subset.parameters(self.network).values())
        changed = torch.tensor(int(not torch.equal(weights.to(self.mean), self.mean)), device=self.device)
        Processes.current().sum_([changed])  # where only one raised, the others would wait for it for ever
        if changed:
            raise PosteriorError(
                "the network's weights are not those the posterior was fitted to: load the matching weights, or fit "
                "the posterior again"
            )

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
        """Each vector as one tensor per parameter, distributed as the parameter is."""
        vectors = {
            "curvature": self.curvature.structure.diagonal(),
            "prior_precision": self.prior_precision.expand_as(self.mean),
            "mean": self.mean,
        }
        tensors = {what: self._by_parameter(vector) for what, vector in vectors.items()}
        return {"n_data": torch.tensor(self.n_data), **tensors}

    @staticmethod
    def from_state_dict(
        network: nn.Module, state: dict[str, Any], likelihood: str | Likelihood | None = None
    ) -> ShardedPosterior:
        """The posterior that `state_dict` described, for a network that is sharded in the same way."""
        if likelihood is None:
            raise PosteriorError("the state of a sharded posterior does not hold its likelihood: pass likelihood=")
        shapes = {name: t.shape for name, t in state["mean"].items()}
        H, δ, mean = (_flat(state[what].values()) for what in _VECTORS)
        curvature = Curvature(
            structure=Diagonal(H),
            subset=Subset(tuple(shapes), tuple(shapes.values())),
            likelihood=resolve(likelihood),
            kind="second_moment",
            n_data=int(state["n_data"]),
            n_outputs=0,
            log_likelihood=torch.tensor(math.nan, dtype=torch.float64),  # unknown without a pass over the data
        )
        return replace(ShardedPosterior.from_curvature(network, curvature, δ), mean=mean)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a folder of all processes' shards, which any number of processes can load; on all processes."""
        import torch.distributed.checkpoint as checkpoint

        with _quiet():
            checkpoint.save(self.state_dict(), storage_writer=checkpoint.FileSystemWriter(str(path), overwrite=True))

    @staticmethod
    def load(
        path: str | PathLike[str], network: nn.Module, likelihood: str | Likelihood | None = None
    ) -> ShardedPosterior:
        """The posterior in that folder, for a network that is sharded in whatever way; on all processes."""
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

        def empty(what: str, name: str, p: Tensor) -> Tensor:
            return torch.empty_like(p, dtype=stored[f"{what}.{name}"].properties.dtype, requires_grad=False)

        state: dict[str, Any] = {
            what: {name: empty(what, name, p) for name, p in parameters.items()} for what in _VECTORS
        }
        state["n_data"] = torch.tensor(0)
        with _quiet():
            checkpoint.load(state, checkpoint_id=str(path))
        return ShardedPosterior.from_state_dict(network, state, likelihood)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """This process's shards as one vector, in at least float32.  # [p]"""
    flat = torch.cat([local(t).reshape(-1) for t in tensors])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notices that a process alone is a process alone, and that an older file is written over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
