"""A subnetwork: which weights are chosen, and that all of them together are the whole network."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.networks import mlp
from posterior_cases import CASES, Case
from posterior_cases import case as make
from torch import Tensor, nn

from lightning_bayes import GaussianPosterior, Prior, Subnetwork, Tuning, fit_laplace
from lightning_bayes.network import DataError, Processes, SubsetError
from lightning_bayes.network.messages import BayesWarning

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def fitted(case: Case, subset: Any, **words: Any) -> Any:
    return fit_laplace(case.network, case.loader(), case.likelihood, subset=subset, **words)


def weights(case: Case) -> Tensor:
    return torch.cat([p.detach().flatten() for p in case.network.parameters() if p.requires_grad])


def chosen(posterior: GaussianPosterior) -> Tensor:
    """Positions among all trainable weights."""
    start, places = 0, []
    kept = dict(zip(posterior.subset.names, posterior.subset.shapes, strict=True))
    mask = torch.zeros(posterior.subset.full_size, dtype=torch.bool)
    mask[posterior.subset.mask] = True
    for name, p in posterior.network.named_parameters():
        if not p.requires_grad:
            continue
        if name in kept:
            first = posterior.subset.starts[name]
            places.append(mask[first : first + p.numel()].nonzero().squeeze(1) + start)
        start += p.numel()
    return torch.cat(places)


def largest(scores: Tensor, n: int) -> Tensor:
    return scores.argsort(descending=True, stable=True)[:n].sort().values


@pytest.mark.parametrize("by", ["laplace_diag", "magnitude", "random"])
@pytest.mark.parametrize("name", CASES)
def test_all_weights_are_the_whole_network(name: str, by: str) -> None:
    case = make(name)
    whole = fitted(case, "all", structure="full", prior_precision=0.7)
    n = whole.subset.size
    every = fitted(case, Subnetwork(n, by=by), prior_precision=0.7)  # full by default
    torch.testing.assert_close(every.mean, whole.mean, **TIGHT)
    torch.testing.assert_close(every.precision.to_dense(), whole.precision.to_dense(), **TIGHT)
    torch.testing.assert_close(every.log_marginal_likelihood(), whole.log_marginal_likelihood(), **TIGHT)
    for one, two in zip(every.functional(case.x), whole.functional(case.x), strict=True):
        torch.testing.assert_close(one, two, **TIGHT)


def test_the_weights_with_the_largest_marginal_variance() -> None:
    case = make("mlp")
    words: dict[str, Any] = {"prior_precision": 0.7, "prior": Prior(temperature=0.5)}
    diagonal = fitted(case, "all", structure="diag", **words)
    expected = largest(1 / diagonal.precision.diagonal(), 9)
    for by in ("laplace_diag", diagonal):
        posterior = fitted(case, Subnetwork(9, by=by), **words)
        assert torch.equal(chosen(posterior), expected)
        assert torch.equal(posterior.mean, weights(case)[expected])
    whole = fitted(case, "all", structure="full", **words).precision.to_dense()
    torch.testing.assert_close(posterior.precision.to_dense(), whole[expected.unsqueeze(-1), expected], **TIGHT)


def test_the_largest_weights() -> None:
    case = make("mlp")
    assert torch.equal(chosen(fitted(case, Subnetwork(5, "magnitude"))), largest(weights(case).abs(), 5))


def test_chance_follows_its_seed() -> None:
    case = make("mlp")
    first, again, other = (chosen(fitted(case, Subnetwork(8, "random", seed))) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_posterior_of_some_weights_chooses_among_them() -> None:
    case = make("mlp")
    last = fitted(case, "last_layer")
    assert fitted(case, Subnetwork(4, by=last)).subset.layers == last.subset.layers
    again = fitted(case, Subnetwork(4, by=fitted(case, Subnetwork(6, "magnitude"))))
    assert set(chosen(again).tolist()) < set(largest(weights(case).abs(), 6).tolist())
    with pytest.raises(SubsetError, match=f"more weights than the {last.subset.size}"):
        fitted(case, Subnetwork(last.subset.size + 1, by=last))


def test_a_posterior_of_the_module_around_the_network_or_of_its_copy_serves() -> None:
    case, copy = make("mlp"), make("mlp")
    expected = chosen(fitted(case, Subnetwork(5)))
    outer = nn.Sequential(case.network, nn.Identity())
    around = fit_laplace(outer, case.loader(), case.likelihood, structure="diag")
    of_copy = fit_laplace(copy.network, case.loader(), case.likelihood, structure="diag")
    for by in (around, of_copy):
        assert torch.equal(chosen(fitted(case, Subnetwork(5, by=by))), expected)
    other = fit_laplace(
        mlp(2, 3).double(), [(torch.randn(4, 2).double(), torch.tensor([0, 1, 2, 0]))], structure="diag"
    )
    with pytest.raises(SubsetError, match="a posterior of another network"):
        fitted(case, Subnetwork(2, by=other))


@pytest.mark.parametrize("by", ["laplace_diag", "random"])
def test_a_prior_per_layer_or_per_weight_is_that_of_the_network(by: str) -> None:
    case = make("mlp")
    diagonal = fitted(case, "all", structure="diag")
    layers = len(diagonal.subset.layers)
    per_layer = torch.arange(1.0, layers + 1, dtype=torch.float64)
    per_weight = per_layer[diagonal.subset.layer_index]
    one, two = (fitted(case, Subnetwork(4, by), prior_precision=prior) for prior in (per_layer, per_weight))
    whole = fitted(case, "all", structure="full", prior_precision=per_weight)
    assert torch.equal(chosen(one), chosen(two))
    if by == "laplace_diag":
        marginal = 1 / (diagonal.curvature.structure.diagonal() + per_weight)
        assert torch.equal(chosen(one), largest(marginal, 4))
    index = chosen(one)
    for posterior in (one, two):
        expected = whole.precision.to_dense()[index.unsqueeze(-1), index]
        torch.testing.assert_close(posterior.precision.to_dense(), expected, **TIGHT)


def test_all_processes_take_the_choice_of_the_first() -> None:
    class Second(Processes):
        def sum_(self, tensors: list[Tensor]) -> None:
            if not tensors[0].is_floating_point():
                tensors[0] += torch.tensor([3, 5])  # what the first has sent

    case = make("mlp")
    positions, _ = Subnetwork(2, "magnitude").in_network(case.network, [], 1.0, lambda: torch.ones(1), Second(1, 2))
    assert positions.tolist() == [3, 5]


def test_a_diagonal_subnetwork_and_a_saved_one() -> None:
    case = make("mlp")
    full, diagonal = (fitted(case, Subnetwork(6), structure=structure) for structure in ("full", "diag"))
    torch.testing.assert_close(diagonal.precision.diagonal(), full.precision.to_dense().diagonal(), **TIGHT)
    again = GaussianPosterior.from_state_dict(case.network, full.state_dict())
    for one, two in zip(again.functional(case.x), full.functional(case.x), strict=True):
        assert torch.equal(one, two)
    assert full.tune_prior(Tuning("marglik", steps=3)).subset is full.subset


def test_too_many_weights_and_data_that_cannot_be_read_twice() -> None:
    case = make("mlp")
    with pytest.raises(SubsetError, match=r"n=1000\) asks for more weights than the"):
        fitted(case, Subnetwork(1000))
    with pytest.raises(DataError, match="passes over the data twice, but the loader is an iterator"):
        fit_laplace(case.network, iter(case.loader()), case.likelihood, subset=Subnetwork(3))
    fit_laplace(case.network, iter(case.loader()), case.likelihood, subset=Subnetwork(3, "magnitude"))


@pytest.mark.parametrize(
    ("dead", "context"), [(1, nullcontext()), (3, pytest.warns(BayesWarning, match="^12 of the 14"))]
)
def test_dead_weights_have_the_largest_variance_and_are_named(dead: int, context: Any) -> None:
    """An input that is always zero leaves the four weights that read it with the variance of the prior."""
    case = make("mlp")
    case.x[:, :dead] = 0.0
    with context:
        fitted(case, Subnetwork(14))
