"""The whitened linear model and its Gaussians in two spaces: those of the dense Jacobian and of a fitted posterior."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracles import jacobian
from helpers.poisson import Poisson
from torch import Tensor, nn

from lightning_bayes import LaplacePosterior, Prior, fit_laplace
from lightning_bayes.evidence.whitened_model import (
    DiagonalSpace,
    FunctionSpace,
    WeightSpace,
    WhitenedModel,
    WhitenedRows,
)
from lightning_bayes.posterior import jacobian_factors

NETWORKS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)
    ),
    "norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)),
    "one output": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one prior": {"prior_precision": 0.7},
    "a prior per layer": {"prior_precision": [0.3, 2.0]},
    "a subnetwork": {"subset": torch.tensor([0, 3, 7, 11, 20, 30, 40])},
    "some parameters": {"subset": ["0.weight", "2.bias"]},
    "a mean and a temperature": {"prior": Prior(mean=torch.linspace(-1, 1, 43).double(), temperature=0.3)},
}
CASES = [(name, {}) for name in NETWORKS] + [("mlp", variant) for variant in VARIANTS.values()]


def data(n: int, name: str = "mlp", seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    if name == "one output":
        return x, torch.randint(0, 2, (n,), generator=g).double()
    return x, torch.randint(0, 3, (n,), generator=g)


def fit(
    name: str, n: int, structure: str = "full", **words: Any
) -> tuple[LaplacePosterior, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    x, y = data(n, name)
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    likelihood = "binary" if name == "one output" else "classification"
    return fit_laplace(NETWORKS[name]().double(), batches, likelihood, structure=structure, **words), batches


def dense(posterior: LaplacePosterior, x: Tensor) -> Tensor:
    """The Jacobian.  # [N, C, P]"""
    J = jacobian(posterior.network, x, posterior.subset.names)
    return J if posterior.subset.mask is None else J[..., posterior.subset.mask]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("name", "words"), CASES)
def test_products_are_those_of_the_whitened_jacobian(
    name: str, words: dict[str, Any], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(jacobian_factors, "HELD", 1)
        monkeypatch.setattr(jacobian_factors, "MEMORY", 500)  # a few examples and outputs of a layer at a time
    posterior, batches = fit(name, 11, **words)
    rows = WhitenedRows(posterior, [x for x, _ in batches])
    J = dense(posterior, data(11, name)[0]) * posterior.prior_matrix().diagonal().rsqrt()
    (N, C, P), g = J.shape, torch.Generator().manual_seed(2)
    w, u = torch.randn(2, P, generator=g, dtype=torch.float64), torch.randn(2, N, C, generator=g, dtype=torch.float64)
    root = torch.randn(N, C, C, generator=g, dtype=torch.float64)
    W = root @ root.mT
    H = torch.einsum("ncp,ncd,ndq->pq", J, W, J)
    torch.testing.assert_close(rows.push(w), torch.einsum("ncp,sp->snc", J, w))
    torch.testing.assert_close(rows.pull(u), torch.einsum("ncp,snc->sp", J, u))
    torch.testing.assert_close(rows.kernel(rows), J.flatten(0, 1) @ J.flatten(0, 1).mT)
    torch.testing.assert_close(rows.own_kernel(), J @ J.mT)
    torch.testing.assert_close(rows.hessian(W), H[rows.order][:, rows.order])
    torch.testing.assert_close(rows.hessian_diagonal(W), H.diagonal())
    torch.testing.assert_close(rows.covariance(H[rows.order][:, rows.order], rows), J @ H @ J.mT)
    torch.testing.assert_close(rows.diagonal_covariance(w[0]), (J * w[0]) @ J.mT)
    d = posterior.prior.distance(posterior.mean)
    torch.testing.assert_close(rows.at_start, dense(posterior, data(11, name)[0]) @ d)


@pytest.mark.parametrize("space", [FunctionSpace, WeightSpace])
@pytest.mark.parametrize(("name", "words"), CASES)
def test_both_spaces_have_the_posterior_of_the_full_curvature(name: str, words: dict[str, Any], space: Any) -> None:
    posterior, batches = fit(name, 11, **words)
    model, x = WhitenedModel(posterior, batches), data(4, name, seed=5)[0]
    train, W = model.train, model.network_fisher()
    gaussian = space(train, W, train.kernel(train)) if space is FunctionSpace else space(train, W)
    for rows, inputs in ((WhitenedRows(posterior, [x]), x), (train, torch.cat([x for x, _ in batches]))):
        torch.testing.assert_close(gaussian.covariance(rows), posterior.functional(inputs)[1])
    divergence = posterior.precision.logdet() - posterior.prior_matrix().logdet() + (posterior.prior_shares() - 1).sum()
    assert gaussian.divergence == pytest.approx(float(divergence), rel=1e-6)
    # A Newton step from the network's weights, with the gradient of the data's log-likelihood.
    mean = model.mean(1.0, torch.zeros_like(train.f))
    _, r = model.fit(
        train.f, train.f.new_zeros(*train.f.shape, train.f.shape[1]), train.f.new_zeros(1, train.f.shape[1])
    )
    stepped = model.shift(model.mean(0.0, gaussian.solve(r, mean)))
    d = posterior.prior.distance(posterior.mean)
    g = posterior.curvature.gradient / posterior.temperature + posterior.prior_matrix().matmul(d)
    torch.testing.assert_close(stepped, -posterior.precision.solve(g), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("n", [9, 60])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_smaller_space_is_taken(structure: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, batches = fit("mlp", n, structure)
    model = WhitenedModel(posterior, batches)
    assert isinstance(model.gaussian(model.network_fisher()), FunctionSpace if n == 9 else WeightSpace)
    torch.testing.assert_close(
        DiagonalSpace(model.train, model.network_fisher()).covariance(model.train),
        (fit("mlp", n, "diag")[0].functional(data(n)[0])[1]),
    )


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("n", [9, 60])
def test_refinement_is_the_same_in_either_space(structure: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, batches = fit("mlp", n, structure, prior_precision=2.0)
    refined = posterior.refine(batches, "variational", tolerance=1e-9)
    narrow = WhitenedModel.is_narrow
    monkeypatch.setattr(WhitenedModel, "is_narrow", property(lambda model: not narrow.fget(model)))
    again = posterior.refine(batches, "variational", tolerance=1e-9)
    torch.testing.assert_close(again.mean, refined.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.precision.to_dense(), refined.precision.to_dense(), rtol=1e-4, atol=1e-5)


def test_conjugate_gradients_replace_both_spaces_where_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, batches = fit("mlp", 9, "diag", prior_precision=2.0)
    refined = posterior.refine(batches, "variational", tolerance=1e-9)
    monkeypatch.setattr("lightning_bayes.evidence.whitened_model.LARGEST_SIDE", 1)
    again = posterior.refine(batches, "variational", tolerance=1e-9)
    torch.testing.assert_close(again.mean, refined.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(again.precision.diagonal(), refined.precision.diagonal(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["mlp", "one output"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_likelihood_that_takes_no_positions_is_refined_alike(
    name: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior, batches = fit(name, 11, structure)
    refined = posterior.refine(batches, "variational")
    monkeypatch.setattr(type(posterior.likelihood), "takes_positions", False)
    again = posterior.refine(batches, "variational")
    torch.testing.assert_close(again.mean, refined.mean)
    torch.testing.assert_close(again.precision.to_dense(), refined.precision.to_dense())


def test_a_likelihood_of_ones_own_is_refined_to_a_larger_bound() -> None:
    torch.manual_seed(0)
    x = data(20)[0]
    y = torch.poisson(x[:, :3].exp())
    fitted = fit_laplace(NETWORKS["mlp"]().double(), [(x, y)], Poisson(), structure="full")
    q = fitted.refine([(x, y)], "variational", tolerance=1e-9)
    h, Σ = q.functional(x)
    v = Σ.diagonal(dim1=1, dim2=2)
    rate = (h + v / 2).exp()  # the mean of a log-normal
    J = dense(q, x)
    precision = torch.einsum("ncp,nc,ncq->pq", J, rate, J) + torch.eye(len(q.mean), dtype=torch.float64)
    torch.testing.assert_close(q.precision.to_dense(), precision, rtol=0.02, atol=0.05)
    torch.testing.assert_close(torch.einsum("ncp,nc->p", J, y - rate), q.mean, rtol=0.05, atol=0.05)
