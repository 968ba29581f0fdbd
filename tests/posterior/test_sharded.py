"""`ShardedPosterior` on one process: places, draws, densities; on several it is tested beside the callbacks."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tensors import seeded
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard
from torch.nn import functional as F

from lightning_bayes import BNN, Bernoulli, Categorical, GaussianPosterior
from lightning_bayes.posterior import LaplacePosterior, PosteriorError, PriorError, ShardedPosterior, fit_l2m
from lightning_bayes.predictive import sample_functions
from lightning_bayes.structures.sharded import ParameterShard, own_indices

N, C = 24, 3


def trained(dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, LaplacePosterior, ShardedPosterior]:
    """A small network with a bias of one weight, its ordinary posterior, and the same as if it were sharded."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), nn.Tanh(), nn.Linear(1, C)).to(dtype)
    x, y = torch.randn(N, 4, dtype=dtype), torch.randint(C, (N,))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    for rows in torch.randperm(N).split(5):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    whole = fit_l2m(net, optimizer, n_data=N, batch_size=4.8)
    return net, whole, ShardedPosterior.from_curvature(net, whole.curvature, whole.prior_precision)


# -- which weights a process has ---------------------------------------------------------------------------------------


@dataclass
class Mesh:
    sizes: tuple[int, ...]
    place: tuple[int, ...]

    def size(self, mesh_dim: int) -> int:
        return self.sizes[mesh_dim]

    def get_local_rank(self, mesh_dim: int) -> int:
        return self.place[mesh_dim]


def shards(shape: tuple[int, ...], placements: tuple[Any, ...], sizes: tuple[int, ...]) -> dict[Any, Tensor]:
    """The places of each process's weights in the flat parameter, by the process's place in the mesh."""
    places = {}
    for place in product(*map(range, sizes)):
        indices = own_indices(torch.Size(shape), placements, Mesh(sizes, place))
        places[place] = ParameterShard(0, torch.Size(shape), indices, copies=1).places()
    return places


def cut(t: Tensor, parts: int, dim: int) -> list[Tensor]:
    """`torch.chunk`, with empty ones where it gives fewer."""
    chunks = list(t.chunk(parts, dim))
    return chunks + [t.narrow(dim, 0, 0)] * (parts - len(chunks))


@pytest.mark.parametrize("shape", [(8,), (7,), (1,), (5, 4), (3, 2, 2), (2, 3, 3, 1), (1, 6)])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_is_the_chunk_that_torch_cuts(shape: tuple[int, ...], world: int, dim: int) -> None:
    if dim >= len(shape):
        dim = 0
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    places = shards(shape, (Shard(dim),), (world,))
    for rank, expected in enumerate(cut(whole, world, dim)):
        assert torch.equal(places[(rank,)], expected)


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 3), (1, 4)])
def test_a_shard_of_a_shard(shape: tuple[int, ...]) -> None:
    """FSDP over a layer that tensor parallelism has cut: along the other dimension, and along the same one."""
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    across = shards(shape, (Shard(0), Shard(1)), (2, 3))
    along = shards(shape, (_StridedShard(0, split_factor=3), Shard(0)), (2, 3))
    copies = shards(shape, (Replicate(), Shard(0)), (2, 3))
    for data, tensor in product(range(2), range(3)):
        assert torch.equal(across[data, tensor], cut(cut(whole, 2, 0)[data], 3, 1)[tensor])
        assert torch.equal(copies[data, tensor], cut(whole, 3, 0)[tensor])
    seen = torch.cat([t.flatten() for t in along.values()])
    assert torch.equal(seen.sort().values, whole.flatten())  # every weight on one process


def test_even_shards_along_the_same_dimension_are_cut_by_tensor_parallelism_first() -> None:
    whole = torch.arange(12 * 2).view(12, 2)
    places = shards((12, 2), (_StridedShard(0, split_factor=3), Shard(0)), (2, 3))
    for data, tensor in product(range(2), range(3)):
        assert torch.equal(places[data, tensor], whole.chunk(3)[tensor].chunk(2)[data])


def test_a_whole_tensor_is_all_there_is() -> None:
    shard = ParameterShard.of(torch.empty(3, 4), start=7)
    assert torch.equal(shard.places(), 7 + torch.arange(12).view(3, 4))
    assert torch.equal(ParameterShard.of(torch.empty(()), start=0).places().reshape(-1), torch.arange(1))
    assert (shard.size, shard.local_shape, shard.copies) == (12, (3, 4), 1)


def test_on_one_process_the_matrix_is_a_plain_diagonal() -> None:
    _, whole, posterior = trained()
    M, D = posterior.curvature.structure.add_prior(0.5), whole.curvature.structure.add_prior(0.5)
    J = torch.randn(2, 3, D.size, dtype=torch.float64)
    δ = torch.rand(D.size, dtype=torch.float64)
    for operation in (
        lambda A: A.logdet(),
        lambda A: A.quadratic(J),
        lambda A: A.inverse_quadratic(J),
        lambda A: A.inverse_diagonal(),
        lambda A: A.scale(3.0).add_prior(δ).diagonal(),
        lambda A: (A + A.add_prior(1.0)).logdet(),
        lambda A: A.to(dtype=torch.float32).diagonal(),
    ):
        torch.testing.assert_close(operation(M), operation(D), rtol=1e-12, atol=1e-12)
    assert M.sample(0, seeded(0)).shape == (0, D.size)


# -- draws and densities -----------------------------------------------------------------------------------------------


def test_draws_have_the_posteriors_mean_and_covariance() -> None:
    _, whole, posterior = trained()
    S = 1000
    z = (posterior.sample(S, seeded(1)) - whole.mean) * whole.precision.diagonal().sqrt()  # [S, P], standard normal
    assert z.shape == (S, whole.subset.size)
    # Means have a standard deviation of 1/√S, second moments of √2/√S and 1/√S: five of them.
    assert z.mean(0).abs().max() < 5 / S**0.5
    moments = z.T @ z / S
    assert (moments.diagonal() - 1).abs().max() < 5 * (2 / S) ** 0.5
    assert (moments - moments.diagonal().diag()).abs().max() < 5 / S**0.5
    assert (z[1:] * z[:-1]).mean(0).abs().max() < 5 / S**0.5  # one draw after the other
    assert ((z.abs() < 1.959964).double().mean() - 0.95).abs() < 5 * (0.95 * 0.05 / z.numel()) ** 0.5


def test_draws_depend_on_the_generators_seed_and_their_number_alone() -> None:
    _, _, posterior = trained()
    before = torch.get_rng_state()
    first = posterior.sample(4, seeded(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    assert torch.equal(posterior.sample(4, seeded(3)), first)
    assert torch.equal(posterior.sample(2, seeded(3)), first[:2])
    assert not torch.isclose(posterior.sample(4, seeded(4)), first).any()


def test_a_generator_moves_on_from_draw_to_draw() -> None:
    """As many calls as draws give the draws of one call, with a generator and with the global one."""
    _, _, posterior = trained()
    generator = seeded(3)
    one_by_one = torch.cat([posterior.sample(1, generator) for _ in range(4)])
    assert torch.equal(one_by_one, posterior.sample(4, seeded(3)))
    torch.manual_seed(3)
    assert torch.equal(torch.cat([posterior.sample() for _ in range(4)]), one_by_one)


def test_the_density_is_that_of_the_ordinary_posterior() -> None:
    _, whole, posterior = trained()
    θ = posterior.sample(6).view(2, 3, -1)
    torch.testing.assert_close(posterior.log_prob(θ), whole.log_prob(θ), rtol=1e-12, atol=0)


# -- priors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [2.0, [1.0, 2.0, 3.0]])
def test_a_prior_is_one_number_or_one_per_layer(prior: Any) -> None:
    _, whole, posterior = trained()
    sharded, ordinary = posterior.with_prior(prior), whole.with_prior(prior)
    torch.testing.assert_close(sharded.precision.diagonal(), ordinary.precision.diagonal())
    torch.testing.assert_close(sharded.effective_parameters_per_layer(), ordinary.effective_parameters_per_layer())
    torch.testing.assert_close(sharded.effective_parameters, ordinary.effective_parameters)


def test_a_prior_of_another_size_or_sign_is_refused() -> None:
    _, whole, posterior = trained()
    with pytest.raises(PriorError, match="must be a number, one for each of the 3 layers"):
        posterior.with_prior(torch.ones(5))
    for wrong in (-1.0, [1.0, 0.0, 1.0], -torch.ones(whole.subset.size)):
        with pytest.raises(PriorError, match="must be positive"):
            posterior.with_prior(wrong)  # type: ignore[arg-type]


# -- predictions -------------------------------------------------------------------------------------------------------


def test_predictions_at_the_mean_are_the_networks() -> None:
    net, whole, posterior = trained()
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(posterior.predict(x, "map").probs, whole.predict(x, "map").probs)  # type: ignore[arg-type]
    draws = posterior.sample(7, seeded(2))
    f = torch.stack([torch.func.functional_call(net, weights(net, θ), (x,)).detach() for θ in draws])
    prediction = posterior.predict(x, BNN(samples=7), generator=seeded(2))
    torch.testing.assert_close(prediction.probs, f.softmax(-1).mean(0))
    torch.testing.assert_close(sample_functions(posterior, x, 7, seeded(2), linearised=False), f)


def weights(net: nn.Module, θ: Tensor) -> dict[str, Tensor]:
    parameters, start = {}, 0
    for name, p in net.named_parameters():
        parameters[name] = θ[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return parameters


def test_the_network_is_borrowed() -> None:
    net, _, posterior = trained()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    net.train()
    net[0].bias.requires_grad_(False)
    posterior.predict(torch.randn(2, 4, dtype=torch.float64), BNN(samples=3))
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert [p.requires_grad for p in net.parameters()] == [True, False, True, True, True, True]
    assert net.training
    assert all(p.grad is not None for p in net.parameters())


def test_errors_say_what_to_do() -> None:
    net, _, posterior = trained()
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(PosteriorError, match=r"'glm' needs the whole network.*use predictive='bnn' or 'map'"):
        posterior.predict(x, "glm")
    with pytest.raises(PosteriorError, match=r"linearised network needs the whole network.*use linearised=False"):
        sample_functions(posterior, x, 2)
    with pytest.raises(ValueError, match="samples must be a whole number of at least 1, got 0"):
        posterior.predict(x, BNN(samples=0))
    with torch.no_grad():
        net[4].bias[0] += 1e-3
    with pytest.raises(PosteriorError, match="not those the posterior was fitted to"):
        posterior.predict(x)
    with pytest.raises(PosteriorError, match="do not match the posterior: load the matching weights"):
        posterior.gather(net)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.functional(torch.ones(1, 4)),
        lambda p: p.log_marginal_likelihood(),
        lambda p: p.tune_prior("grid", []),
        lambda p: p.calibrate([]),
        lambda p: p.with_noise(0.1),
        lambda p: p.with_log_likelihood([]),
        lambda p: p.encode(torch.ones(1, 4)),
        lambda p: p.reconstruct(torch.ones(1, 4)),
    ],
)
def test_what_would_need_all_weights_on_every_process_is_refused(call: Any) -> None:
    _, _, posterior = trained()
    with pytest.raises(
        PosteriorError, match=r"needs the whole network on every process.*gather\(network\) for an ordin"
    ):
        call(posterior)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_saved_posterior_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """A network in half precision has a posterior in float32."""
    net, _, posterior = trained(dtype)
    posterior.save(tmp_path / "kept")
    posterior.save(tmp_path / "kept")  # over the first
    loaded = GaussianPosterior.load(tmp_path / "kept", net)
    assert isinstance(loaded, ShardedPosterior)
    assert loaded.n_data == N
    assert loaded.likelihood == posterior.likelihood == Categorical()
    assert isinstance(ShardedPosterior.load(tmp_path / "kept", net, "binary").likelihood, Bernoulli)
    for got, kept in zip(vectors(loaded), vectors(posterior), strict=True):
        assert got.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        assert torch.equal(got, kept)
    loaded.check_weights()


def vectors(posterior: ShardedPosterior) -> tuple[Tensor, ...]:
    δ = posterior.prior_precision.expand_as(posterior.mean)
    return posterior.mean, posterior.curvature.structure.diagonal(), δ, posterior.precision.diagonal()


def test_a_saved_posterior_knows_of_which_curvature_it_is(tmp_path: Path) -> None:
    """On which its noise depends: the Fisher has `1/σ²`, an optimizer's second moment `1/σ⁴`."""
    net, whole, _ = trained()
    sampled = ShardedPosterior.from_curvature(net, replace(whole.curvature, kind="fisher_mc"), 1.0)
    sampled.save(tmp_path / "kept")
    for again in (
        ShardedPosterior.load(tmp_path / "kept", net),
        GaussianPosterior.from_state_dict(net, sampled.state_dict()),
    ):
        assert isinstance(again, ShardedPosterior)
        assert again.curvature.kind == "fisher_mc"
        assert again.gather(net).noise_power == -2


def test_a_state_is_that_of_the_same_posterior() -> None:
    net, _, posterior = trained()
    again = GaussianPosterior.from_state_dict(net, posterior.state_dict())
    assert isinstance(again, ShardedPosterior)
    assert all(torch.equal(a, b) for a, b in zip(vectors(again), vectors(posterior), strict=True))
    assert again.n_data == N
    with pytest.raises(PosteriorError, match=r"another network: it has 0\.weight of shape"):
        GaussianPosterior.from_state_dict(nn.Linear(4, 5), posterior.state_dict())


def test_a_saved_posterior_of_another_network_is_refused(tmp_path: Path) -> None:
    _, _, posterior = trained()
    posterior.save(tmp_path / "kept")
    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, C)).double()
    with pytest.raises(PosteriorError, match=r"another network: it has \d\.\w+ of shape \(.*has no such parameter"):
        ShardedPosterior.load(tmp_path / "kept", other, "classification")


def test_gathered_it_is_the_ordinary_posterior() -> None:
    net, whole, posterior = trained()
    gathered = posterior.gather(net)
    assert torch.equal(gathered.precision.diagonal(), whole.precision.diagonal())
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(gathered.predict(x).probs, whole.predict(x).probs)
