"""The exact GGN of every network, full and diagonal, is the per-example sum `Σₙ JₙᵀΛₙJₙ`."""

from typing import Any

import oracles
import pytest
import torch
from networks import CASES, Case, Wired, real
from oracles import close
from torch import nn

from lightning_bayes import fit_laplace
from lightning_bayes.curvature import choose_subset, fit_curvature
from lightning_bayes.curvature.diagonal import BatchDiagonal
from lightning_bayes.likelihoods import Categorical


@pytest.mark.parametrize("name", CASES)
def test_full_and_diagonal_are_the_oracles(name: str) -> None:
    case = CASES[name]()
    oracles.check_exact(case, oracles.ggn(case))


@pytest.mark.parametrize("backend", ["eager"])
@pytest.mark.parametrize("part", ["whole", "inside"])
def test_compiled_module_has_the_curvature_of_the_one_inside(backend: str, part: str) -> None:
    case = CASES["mlp"]()
    H = oracles.ggn(case)
    if part == "whole":
        network = torch.compile(case.network, backend=backend)
    else:
        network = nn.Sequential(torch.compile(case.network[:2], backend=backend), case.network[2])
    fitted = fit_curvature(network, case.loader(), structure="full")
    close(fitted.structure.to_dense(), H)
    if part == "whole":
        assert fitted.subset.names == tuple(name for name, _ in case.network.named_parameters())


@pytest.mark.parametrize("name", ["mlp", "bare_parameters", "transformer"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_modes_without_gradients_change_nothing(name: str, mode: type, structure: str) -> None:
    case = CASES[name]()
    expected = case.fit(structure).structure.to_dense()
    with mode():
        batches = [(x.clone(), y.clone()) for x, y in case.loader()]
        found = fit_curvature(case.network, batches, structure=structure)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    torch.testing.assert_close(found.structure.to_dense(), expected, rtol=0, atol=0)


def test_inputs_that_ask_for_gradients_get_none() -> None:
    case = CASES["mlp"]()
    x = case.x.clone().requires_grad_()
    fitted = fit_curvature(case.network, [(x, case.y)], structure="full")
    close(fitted.structure.to_dense(), oracles.ggn(case))
    assert x.grad is None


def test_shared_input_without_a_batch_dimension_is_passed_to_every_example() -> None:
    """`((x, mask), y)` where the mask belongs to no example."""
    network = Wired(
        lambda s, x, m: s.head((m @ s.inner(x) * s.scale).tanh().mean(1)),
        inner=nn.Linear(2, 3),
        scale=nn.Parameter(torch.rand(3)),
        head=nn.Linear(3, 3),
    ).double()
    x, mask, y = real(5, 4, 2), real(4, 4), torch.tensor([0, 1, 2, 1, 0])
    plain = Wired(lambda s, x: s.inside(x, mask), inside=network)
    expected = oracles.ggn(Case(plain, x, y, Categorical()))
    fitted = fit_curvature(network, [((x, mask), y)], structure="full")
    close(fitted.structure.to_dense(), expected)


@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("first", [6, 4])
def test_shared_input_may_have_as_many_rows_as_the_batch_has_examples(form: str, first: int) -> None:
    """`((x, A), y)` with six rows of A, beside which six examples are six others; a leftover and layers."""
    network = Wired(
        lambda s, x, A, w: s.head((s.inner(x) @ s.memory(A).mT).softmax(1) @ A * s.scale * w),
        inner=nn.Linear(2, 3),
        memory=nn.Linear(3, 3),
        scale=nn.Parameter(torch.rand(3)),
        head=nn.Linear(3, 3),
    ).double()
    x, A, w, y = real(10, 2), real(6, 3), real(10, 3), torch.randint(3, (10,))
    plain = Wired(lambda s, x, w: s.inside(x, A, w), inside=network)
    alone = Case(plain, (x, w), y, Categorical())
    H = oracles.ggn(alone)

    def batch(part: slice) -> Any:
        parts = {"x": x[part], "A": A, "w": w[part]}
        return parts if form == "dict" else tuple(parts.values())

    parts = [slice(0, first), slice(first, 10)]
    batches = [(batch(part), y[part]) for part in parts]
    for structure in ("full", "diag", "kron"):
        posterior = fit_laplace(network, batches, structure=structure)
        found = posterior.curvature.structure
        if structure != "kron":
            close(found.diagonal(), H.diagonal())
        expected = torch.cat([posterior.functional(batch(slice(n, n + 1)))[1] for n in range(10)])
        covariance = torch.cat([posterior.functional(batch(part))[1] for part in parts])
        close(covariance, expected)
        torch.testing.assert_close(
            torch.cat([posterior.predict(batch(part)).probs for part in parts]),
            torch.cat([posterior.predict(batch(slice(n, n + 1))).probs for n in range(10)]),
        )
    diagonal = BatchDiagonal(network, choose_subset(network, batches[0][0], "all"), Categorical(), "exact")
    close(sum(diagonal(*each) for each in batches), H.diagonal())
