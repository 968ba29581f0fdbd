"""The posterior in function space: a Gaussian process conditioned on training points."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.networks import Wired, made
from helpers.oracles import jacobian
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_bayes import GP, LaplacePosterior, Prior, fit_laplace
from lightning_bayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from lightning_bayes.posterior import function_space, jacobian_factors
from lightning_bayes.structures import Diagonal

N, C = 23, 3
NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, C)), (3,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4, C)
        ),
        (1, 4, 4),
    ),
    "sequence": (
        lambda: nn.Sequential(
            nn.Embedding(7, 4), nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(9, C)
        ),
        (),
    ),
}
LIKELIHOODS: dict[str, Likelihood] = {
    "classification": Categorical(),
    "regression": Gaussian(noise_std=torch.tensor([0.5, 1.0, 0.2])),
    "binary": Bernoulli(),
}


def data(kind: str, shape: tuple[int, ...], n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=g, dtype=torch.float64) if shape else torch.randint(0, 7, (n, 3), generator=g)
    if kind == "classification":
        return x, torch.randint(0, C, (n,), generator=g)
    y = torch.randn(n, C, generator=g, dtype=torch.float64)
    return x, (y > 0).double() if kind == "binary" else y


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:9], y[:9]), (x[9:22], y[9:22]), (x[22:], y[22:])]


def fit(name: str = "mlp", kind: str = "classification", **words: Any) -> LaplacePosterior:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    words = {"structure": "full", "gp": GP(points=None, outputs="joint"), **words}
    return fit_laplace(make().double(), batches(*data(kind, shape)), LIKELIHOODS[kind], **words)


def unseen(name: str = "mlp", n: int = 5) -> Tensor:
    x, _ = data("classification", NETWORKS[name][1], n, seed=1)
    return 2 * x if x.is_floating_point() else x


def covariance(posterior: LaplacePosterior, x: Any) -> Tensor:
    return function_space.process_gaussian([posterior], x)[1][0]


def prior_variance(posterior: LaplacePosterior, x: Any) -> Tensor:
    δ = posterior.prior_precision
    δ = δ[posterior.subset.layer_index] if δ.numel() > 1 else δ.expand(posterior.subset.size)
    return posterior.functional_for([Diagonal(δ)], x)[1][0].abs().max()


# -- with all points, the linearised network ---------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [1e-2, 0.3, "layers"])
@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_with_all_points_the_process_is_the_linearised_network(name: str, kind: str, prior: Any) -> None:
    posterior = fit(name, kind)
    layers = len(posterior.subset.layers)
    δ = torch.linspace(0.05, 1, layers, dtype=torch.float64) if prior == "layers" else prior
    posterior, x = posterior.with_prior(δ), unseen(name)
    mean, expected = posterior.functional(x)
    found, (Σ,) = function_space.process_gaussian([posterior], x)
    assert torch.equal(found, mean)
    assert (Σ - expected).abs().max() <= 1e-9 * prior_variance(posterior, x)


VARIANTS: dict[str, dict[str, Any]] = {
    "temperature": {"prior": Prior(temperature=0.3)},
    "a subnetwork": {"subset": torch.tensor([0, 3, 7, 11, 20, 30, 40, 45])},
    "some parameters": {"subset": ["0.weight", "3.bias"]},
    "the last layer": {"subset": "last_layer"},
    "more points than there are": {"gp": GP(points=1000, outputs="joint")},
    "one prior for each weight": {"prior_precision": torch.linspace(0.1, 2, 48).double()},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_it_is_in_every_variant(variant: str) -> None:
    posterior, x = fit(**VARIANTS[variant]), unseen()
    torch.testing.assert_close(covariance(posterior, x), posterior.functional(x)[1], rtol=1e-8, atol=1e-10)


def test_so_it_is_for_a_noise_of_the_networks_own() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(9, 3).double()
    y = torch.randn(9, 2).double()
    posterior = fit_laplace(net, [(x, y)], HeteroscedasticGaussian(), structure="full", gp=GP(points=None))
    torch.testing.assert_close(covariance(posterior, 2 * x), posterior.functional(2 * x)[1], rtol=1e-8, atol=1e-10)


def test_a_new_noise_and_a_new_prior_are_those_of_the_process() -> None:
    posterior, x = fit(kind="regression"), unseen()
    before = covariance(posterior, x)
    posterior = posterior.with_noise(3 * torch.tensor([0.5, 1.0, 0.2])).with_prior(0.1)
    assert not torch.allclose(covariance(posterior, x), before, rtol=0.1)
    torch.testing.assert_close(covariance(posterior, x), posterior.functional(x)[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["laplace", "variational"])
def test_a_refined_posterior_has_its_own_mean_and_fisher(method: str) -> None:
    posterior, x = fit(prior_precision=3.0), unseen()
    refined = posterior.refine(batches(*data("classification", (3,))), method=method, samples=16)
    mean, Σ = refined.functional(x)
    found, (of_process,) = function_space.process_gaussian([refined], x)
    torch.testing.assert_close(found, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_process, Σ, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(Σ, posterior.functional(x)[1], rtol=1e-3)


def test_targets_without_a_value_say_nothing() -> None:
    torch.manual_seed(0)
    x, y = data("classification", (3,))
    y[::2] = -100
    net = NETWORKS["mlp"][0]().double()
    posterior = fit_laplace(net, batches(x, y), Categorical(ignore_index=-100), structure="full", gp=GP(points=None))
    torch.testing.assert_close(covariance(posterior, 2 * x), posterior.functional(2 * x)[1], rtol=1e-8, atol=1e-10)


# -- with some points, eq. (15) by hand --------------------------------------------------------------------------------


def by_hand(posterior: LaplacePosterior, x: Tensor, x_all: Tensor, independent: bool) -> Tensor:
    """`K** − K*M (K_MM + Λ⁻¹)⁻¹ K_M*` with whole Jacobians, and `Λ⁻¹` where it exists."""
    assert posterior.points is not None
    M = len(posterior.points)
    x_M = x_all[posterior.points.index]
    δ = float(posterior.prior_precision) * posterior.n_data / M
    J_M, J = (jacobian(posterior.network, t, posterior.subset.names) for t in (x_M, x))  # [M, C, P]
    S = posterior.likelihood.fisher_root(posterior.network(x_M).detach())  # [R, M, C]
    Λ = torch.einsum("rmc,rmd->mcd", S, S)  # [M, C, C]
    if independent:
        variances = []
        for c in range(C):
            K = J_M[:, c] @ J_M[:, c].mT / δ + torch.diag(1 / Λ[:, c, c])
            k = J[:, c] @ J_M[:, c].mT / δ
            variances.append(J[:, c].square().sum(1) / δ - (k @ torch.linalg.inv(K) * k).sum(1))
        return torch.diag_embed(torch.stack(variances, 1))
    H = torch.einsum("mcp,mcd,mdq->pq", J_M, Λ, J_M) + δ * torch.eye(J_M.shape[-1]).double()
    return J @ torch.linalg.inv(H) @ J.mT


@pytest.mark.parametrize("outputs", ["joint", "independent"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_fewer_points_condition_by_the_formula(name: str, outputs: str) -> None:
    posterior = fit(name, prior_precision=0.4, gp=GP(points=7, outputs=outputs))
    x_all, _ = data("classification", NETWORKS[name][1])
    expected = by_hand(posterior, unseen(name), x_all, outputs == "independent")
    torch.testing.assert_close(covariance(posterior, unseen(name)), expected, rtol=1e-8, atol=1e-10)


def test_batches_and_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One input alone, points that are not held, and layers in pieces of one output."""
    posterior, x = fit("cnn", gp=8), unseen("cnn")
    expected = covariance(posterior, x)
    for n in range(len(x)):
        torch.testing.assert_close(covariance(posterior, x[n : n + 1]), expected[n : n + 1])
    monkeypatch.setattr(jacobian_factors, "MEMORY", 1)
    monkeypatch.setattr(jacobian_factors, "HELD", 1)
    again = replace(posterior)
    torch.testing.assert_close(covariance(again, x), expected, rtol=1e-9, atol=1e-12)


def test_several_priors_take_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fit(prior_precision=torch.tensor([0.2, 1.0, 3.0]).double(), gp=9), unseen()
    candidates = [posterior.with_prior(posterior.prior_precision * c) for c in (0.1, 1.0, 30.0)]
    expected = [covariance(candidate, x) for candidate in candidates]
    for candidate in candidates:
        del candidate.__dict__["process"]
    _, found = function_space.process_gaussian(candidates, x)
    assert [("process" in candidate.__dict__) for candidate in candidates] == [True, False, False]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# -- unusual networks --------------------------------------------------------------------------------------------------


def experts() -> nn.Module:
    """Each row goes to one of two experts, so that a batch's examples have different numbers of rows in a layer."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.inner(x)
        route, sent = h.detach()[..., 0] > 0, torch.zeros_like(h)
        for chosen, expert in ((torch.where(route), s.one), (torch.where(~route), s.two)):
            if len(chosen[0]):
                sent = sent.index_put(chosen, expert(h[chosen]).tanh())
        return s.head(sent.flatten(1))

    parts = {"inner": nn.Linear(2, 4), "one": nn.Linear(4, 4), "two": nn.Linear(4, 4), "head": nn.Linear(12, C)}
    return Wired(forward, **parts)


def unique_rows() -> nn.Module:
    """Equal inputs of several examples are one row of a layer."""

    def forward(s: Any, x: Tensor) -> Tensor:
        rows, back = x.round().flatten(0, 1).unique(dim=0, return_inverse=True)
        return s.head(s.inner(rows).tanh()[back].reshape(*x.shape[:2], -1).flatten(1))

    return Wired(forward, inner=nn.Linear(2, 4), head=nn.Linear(12, C))


@pytest.mark.parametrize("make", [experts, unique_rows])
def test_networks_that_mix_and_sort_rows(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network = made(make)
    x, y = torch.randn(N, 3, 2, generator=torch.Generator().manual_seed(0)).double(), torch.arange(N) % C
    posterior = fit_laplace(network, batches(x, y), structure="full", gp=GP(points=None, outputs="joint"))
    other = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(1)).double()
    expected = posterior.functional(other)[1]
    torch.testing.assert_close(covariance(posterior, other), expected, rtol=1e-8, atol=1e-10)
    monkeypatch.setattr(jacobian_factors, "MEMORY", 500)  # a few examples at a time, whose layers have other forms
    torch.testing.assert_close(covariance(replace(posterior), other), expected, rtol=1e-8, atol=1e-10)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("outputs", ["joint", "independent"])
def test_no_jacobian_is_ever_built(outputs: str) -> None:
    M = 40
    wide = made(lambda: nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 60), nn.Tanh(), nn.Linear(60, C)))
    x, y = torch.randn(M, 30).double(), torch.arange(M) % C
    posterior = fit_laplace(wide, [(x, y)], structure="diag", gp=GP(points=None, outputs=outputs))
    with Largest() as largest:
        covariance(posterior, x[:20])
    assert largest.numel <= M * C * 200 < 0.02 * M * C * posterior.subset.size  # the gradients at the widest layer


def test_one_output_without_a_dimension_of_its_own() -> None:
    network = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)))
    x, _ = data("classification", (3,))
    posterior = fit_laplace(network, batches(x, (x[:, 0] > 0).double()), "binary", structure="full", gp=GP(points=None))
    by_process, by_weights = (posterior.predict(2 * x, predictive) for predictive in ("gp", "glm"))
    assert by_process.probs.shape == (N,)
    torch.testing.assert_close(by_process.probs, by_weights.probs, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(by_process.epistemic, by_weights.epistemic, rtol=1e-8, atol=1e-10)


def test_frozen_layers_are_known() -> None:
    network = NETWORKS["mlp"][0]().double()
    network[0].requires_grad_(False)
    network[3].bias.requires_grad_(False)
    posterior = fit_laplace(network, batches(*data("classification", (3,))), structure="full", gp=GP(points=None))
    torch.testing.assert_close(
        covariance(posterior, unseen()), posterior.functional(unseen())[1], rtol=1e-8, atol=1e-10
    )
