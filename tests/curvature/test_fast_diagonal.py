"""`fit_laplace(structure=Diag(method=…))` is the sum over batches of the diagonals that back-propagation gives."""

import copy
from itertools import pairwise
from typing import Any

import oracles
import pytest
import torch
from networks import CASES, Case, N
from torch import Tensor, nn

from lightning_bayes import Diag, Gaussian, fit_laplace
from lightning_bayes.curvature import choose_subset
from lightning_bayes.curvature.diagonal import THRESHOLD, BatchDiagonal, RuleError
from lightning_bayes.network import Processes

NETWORKS = ("mlp", "deep_cnn", "norm_batch_2d", "heteroscedastic", "image_to_image")
UNEVEN = (1, 3)


def wide() -> Case:
    """An autoencoder with one layer above the threshold of "mixed", and a bottleneck."""
    torch.manual_seed(0)
    sizes = (3, 4, THRESHOLD + 4, 2, 5)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())][:-1]
    x = torch.randn(N, 3, dtype=torch.float64)
    return Case(nn.Sequential(*layers).double(), x, torch.randn(N, 5, dtype=torch.float64), Gaussian(0.7))


def case_of(name: str) -> Case:
    return wide() if name == "wide" else CASES[name]()


def diagonal(case: Case, *sizes: int, hessian: Any = "exact", **options: Any) -> Tensor:
    """Of the curvature alone."""
    posterior = case.laplace(*sizes, structure=Diag(hessian), **options)
    assert posterior.n_data == N
    return posterior.curvature.structure.diagonal()


@pytest.mark.parametrize("name", [*NETWORKS, "wide"])
def test_exact_is_the_default(name: str) -> None:
    case = case_of(name)
    exact = diagonal(case, *UNEVEN, hessian="exact")
    assert torch.equal(exact, diagonal(case, *UNEVEN))
    torch.testing.assert_close(exact, oracles.ggn(case).diagonal(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("hessian", ["approx", "mixed", "auto"])
@pytest.mark.parametrize("name", [*NETWORKS, "wide"])
def test_the_others_are_sums_over_batches(name: str, hessian: str) -> None:
    case = case_of(name)
    subset = choose_subset(case.network, case.x, "all")
    of_batch = BatchDiagonal(case.network, subset, case.likelihood, hessian)
    expected = sum(of_batch(x, y) for x, y in case.loader(*UNEVEN))
    torch.testing.assert_close(diagonal(case, *UNEVEN, hessian=hessian), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(diagonal(case, hessian=hessian), expected, rtol=1e-9, atol=1e-12)


def test_auto_is_exact_where_all_layers_are_narrow_and_mixed_elsewhere() -> None:
    narrow, broad = CASES["mlp"](), wide()
    torch.testing.assert_close(diagonal(narrow, hessian="auto"), diagonal(narrow), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(diagonal(broad, hessian="auto"), diagonal(broad, hessian="mixed"))
    assert not torch.allclose(diagonal(broad, hessian="auto"), diagonal(broad), rtol=1e-3)
    assert not torch.allclose(diagonal(broad, hessian="approx"), diagonal(broad, hessian="mixed"), rtol=1e-3)


def test_the_pass_learns_the_rest_too() -> None:
    """Evidence, gradient and counts are those of the exact fit: only the curvature is approximated."""
    case = wide()
    exact, fast = (case.laplace(*UNEVEN, structure=Diag(method=hessian)).curvature for hessian in ("exact", "approx"))
    for name in ("log_likelihood", "squared_error", "gradient"):
        torch.testing.assert_close(getattr(fast, name), getattr(exact, name))
    assert (fast.n_data, fast.n_outputs, fast.kind) == (exact.n_data, exact.n_outputs, "ggn")


@pytest.mark.parametrize("subset", ["last_layer", ["0.weight", "4.bias"], torch.tensor([2, 3, 300, 1800])], ids=str)
def test_a_subset_is_a_part_of_the_whole(subset: Any) -> None:
    case = wide()
    chosen = choose_subset(case.network, case.x, subset)
    whole = diagonal(case, hessian="approx")
    everything = choose_subset(case.network, case.x, "all")
    parts = torch.cat(
        [torch.arange(p.numel()) + everything.starts[n] for n, p in chosen.parameters(case.network).items()]
    )
    torch.testing.assert_close(diagonal(case, hessian="approx", subset=subset), whole[chosen.narrow(parts)])


def test_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with one example and three: what each hands to the reduction sums to the fit of all."""
    case, handed = wide(), []
    monkeypatch.setattr(Processes, "sum_", lambda self, tensors: handed.append([t.clone() for t in tensors]))
    monkeypatch.setattr(Processes, "gather", lambda self, value: [value])
    for rank, batch in enumerate(case.loader(*UNEVEN)):
        fit_laplace(
            case.network,
            [batch],
            case.likelihood,
            processes=Processes(rank, 2),
            probe=case.x,
            structure=Diag(method="approx"),
        )
    both = [a + b for a, b in zip(*handed, strict=True)]
    handed.clear()
    diagonal(case, hessian="approx")
    for total, expected in zip(both, handed[0], strict=True):
        torch.testing.assert_close(total, expected)


def test_the_network_is_left_as_it_was_even_if_it_writes_into_its_input() -> None:
    network = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    network[1].bias.requires_grad_(False)
    network.train()
    state = copy.deepcopy(network.state_dict())
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)
    fitted = fit_laplace(network, [(x.clone(), y)], "regression", structure=Diag(method="approx"))
    other = fit_laplace(
        network, [(x[:1].clone(), y[:1]), (x[1:].clone(), y[1:])], "regression", structure=Diag(method="auto")
    )
    assert fitted.curvature.structure.size == other.curvature.structure.size == 12 + 10
    torch.testing.assert_close(fitted.curvature.gradient, other.curvature.gradient)
    assert network.training
    assert [p.requires_grad for p in network.parameters()] == [True, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(state.values(), network.state_dict().values(), strict=True))


def test_what_has_no_rule_is_refused_by_name() -> None:
    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).sort().values)

    batch = (torch.randn(N, 3), torch.randn(N, 2))
    with pytest.raises(RuleError, match=r"through sort.*use hessian='exact'"):
        fit_laplace(Sorting(), [batch], "regression", structure=Diag(method="approx"))
    positive = nn.Linear(3, 2)
    nn.init.ones_(positive.weight)
    for bad in (torch.nan, torch.inf):
        far = torch.full_like(batch[0], bad)
        with pytest.raises(ValueError, match="batch 1: the network's output is not finite"):
            fit_laplace(positive, [batch, (far, batch[1])], "regression", structure=Diag(method="approx"))
