"""Proposition 3 (tutorial, section 6): weights before a normalisation have no scale, and with a tuned prior of their
own predictions do not have one either."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.networks import made
from helpers.tensors import real
from torch import Tensor, nn

from lightning_bayes import Gaussian, LaplacePosterior, Tuning, fit_laplace

K = 7.0
N = 30
X = real(6, 3, seed=5)


def network_with(norm: str) -> nn.Sequential:
    def make() -> nn.Sequential:
        between = {"batch": nn.BatchNorm1d(4), "layer": nn.LayerNorm(4), "group": nn.GroupNorm(2, 4)}[norm]
        return nn.Sequential(nn.Linear(3, 4), between, nn.Tanh(), nn.Linear(4, 2))

    network = made(make, seed=2).eval()
    if norm == "batch":
        with torch.no_grad():
            network[1].running_mean.copy_(real(4, seed=3))
            network[1].running_var.copy_(real(4, seed=4).square() + 0.3)
    return network


def scaled(network: nn.Sequential) -> nn.Sequential:
    """The same function with `K` times the weights and bias of the layer before the normalisation."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[0].weight.mul_(K)
        other[0].bias.mul_(K)
        other[1].eps *= K**2
        if isinstance(other[1], nn.BatchNorm1d):
            other[1].running_mean.mul_(K)
            other[1].running_var.mul_(K**2)
    return other


def batches() -> list[tuple[Tensor, Tensor]]:
    x = real(N, 3)
    y = (x @ real(3, 2, seed=7)).tanh() + 0.3 * real(N, 2, seed=8)
    return [(x[:19], y[:19]), (x[19:], y[19:])]


def fitted(network: nn.Module, structure: str = "full", prior: Any = 1.0) -> LaplacePosterior:
    return fit_laplace(network, batches(), Gaussian(0.4), prior_precision=prior, structure=structure)


def variances(posterior: LaplacePosterior) -> Tensor:
    return posterior.functional(X)[1].diagonal(dim1=1, dim2=2)


def is_same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("norm", ["batch", "layer", "group"])
def test_a_prior_of_its_own_by_hand_takes_the_scale_up(norm: str, structure: str) -> None:
    network = network_with(norm)
    other = scaled(network)
    torch.testing.assert_close(other(X), network(X), rtol=1e-10, atol=1e-12)
    own = torch.tensor([0.7, 1.3, 1.3], dtype=torch.float64)
    divided = torch.tensor([0.7 / K**2, 1.3, 1.3], dtype=torch.float64)
    expected = variances(fitted(network, structure, own))
    assert is_same(variances(fitted(other, structure, divided)), expected)
    assert not is_same(variances(fitted(other, structure, own)), expected)  # one that was not tuned again
    shared = [variances(fitted(each, structure, 1.3)) for each in (network, other)]
    assert not is_same(*shared)


TUNING: dict[str, dict[str, Any]] = {
    "mackay": {"method": "mackay", "tolerance": 1e-10, "steps": 20_000},
    "iterated": {"method": "linear", "iterate": True, "passes": 3000, "tolerance": 1e-8},
}


@pytest.mark.parametrize(
    ("norm", "how"),
    [("batch", "mackay"), ("layer", "mackay"), ("group", "mackay"), ("batch", "iterated"), ("layer", "iterated")],
)
def test_priors_tuned_from_each_network_do_not_know_its_scale(norm: str, how: str) -> None:
    network = network_with(norm)
    both = [fitted(network), fitted(scaled(network))]
    assert [posterior.curvature.normalised for posterior in both] == [("0",), ("0",)]
    tuning = Tuning(noise=False, **TUNING[how])
    by_group = replace(tuning, groups="normalised")
    groups = [posterior.tune_prior(by_group, batches()) for posterior in both]
    priors = [posterior.prior_precision for posterior in groups]
    assert max(float(prior.log().abs().max()) for prior in priors) < 15  # within the bounds
    torch.testing.assert_close(priors[0][0], priors[1][0] * K**2, rtol=1e-6, atol=0)
    assert is_same(variances(groups[0]), variances(groups[1]))
    kept = both[1].with_prior(priors[0])  # the first network's priors, not tuned again
    assert not is_same(variances(kept), variances(groups[0]))
    shared = [posterior.tune_prior(tuning, batches()) for posterior in both]
    assert not is_same(variances(shared[0]), variances(shared[1]))


def test_the_groups_are_tied_and_their_evidence_has_no_slope() -> None:
    posterior = fitted(network_with("layer"))
    tuned = posterior.tune_prior(Tuning("marglik", groups="normalised", noise=False))
    assert posterior.subset.layers == ("0", "1", "3")
    assert tuned.prior_precision[1] == tuned.prior_precision[2] != tuned.prior_precision[0]
    log_λ = tuned.prior_precision[:2].log().requires_grad_()
    evidence = tuned.log_marginal_likelihood(log_λ[[0, 1, 1]].exp())
    assert torch.autograd.grad(evidence, log_λ)[0].abs().max() < 1e-4
    by_mackay = posterior.tune_prior(Tuning("mackay", groups="normalised", noise=False))
    torch.testing.assert_close(by_mackay.prior_precision, tuned.prior_precision, rtol=1e-4, atol=0)
    by_layers = posterior.tune_prior(Tuning("mackay", groups="layers"))
    torch.testing.assert_close(
        by_layers.prior_precision, posterior.tune_prior(Tuning("mackay", groups="layers")).prior_precision
    )
