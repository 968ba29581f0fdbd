"""Fits with few rows of wide layers, and with ranks of their factors, against the factors themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factor_cases import THRESHOLDS, cnn, data
from helpers.processes import Peer, together
from helpers.tensors import real
from networks import CASES, Wired
from torch import nn

from lightning_bayes import GaussianPosterior, Kron, Tuning, fit_laplace
from lightning_bayes.curvature import blocks as input_sum
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.network import CurvatureError, Processes
from lightning_bayes.structures import Factor, Kronecker


def fit_shares(peer: Peer) -> dict[str, Any]:
    """Kronecker factors by their rows, and by a few eigenpairs, on several processes."""
    for module, name, value in THRESHOLDS:
        setattr(module, name, value)
    with peer.group() as processes:
        return answers_of(processes)


def answers_of(processes: Processes) -> dict[str, Any]:
    network, answers = cnn(), {}
    for n in (1, 3, 7):  # none for one of them; few rows over all; few on one and not over all
        x, y = data(n)
        own = [(x[processes.rank :: processes.size], y[processes.rank :: processes.size])] if processes.rank < n else []
        for rank_of_factors in (None, 3, "auto"):
            words = {"structure": Kron(rank=rank_of_factors), "processes": processes, "probe": x[:1]}
            posterior = fit_laplace(network, own, "classification", **words)
            for block in posterior.curvature.structure.blocks:
                for found in (block.left, block.right):
                    answers.setdefault(f"ranks {n} {rank_of_factors}", []).append(found.values.shape[-1])
            answers[f"{n} {rank_of_factors}"] = posterior.precision.to_dense()
            answers[f"draw {n} {rank_of_factors}"] = posterior.sample(2, torch.Generator().manual_seed(1))
    return answers


TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
RANKS = (None, 3, "auto")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in THRESHOLDS:
        monkeypatch.setattr(module, name, value)


def batches(n: int, *sizes: int) -> list[Any]:
    x, y = data(n)
    sizes = (*sizes, n - sum(sizes))
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def widths(posterior: Any) -> list[tuple[int, int]]:
    """Of the factors of inputs: columns and eigenpairs."""
    rights = [block.right for block in posterior.curvature.structure.blocks]
    return [(right.size, right.values.shape[-1]) for right in rights]


NAMES = ("mlp", "conv_2d_groups", "deep_cnn", "linear_on_sequences", "transposed_2d_groups", "merged_time_batch")
NAMES += ("embedding", "transformer", "dead_layer", "used_twice_on_different_shapes", "frozen")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", [name for name in NAMES if name in CASES])
def test_few_rows_give_the_factors_themselves(name: str, sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()

    def fitted() -> Any:
        loader = case.loader(1, 3)
        return fit_curvature(
            case.network, loader, case.likelihood, structure=Kron(weight_sharing=sharing)
        ).structure.to_dense()

    expected = fitted()
    monkeypatch.setattr(input_sum, "WIDE", 1)
    for part in (1, 2):
        monkeypatch.setattr(input_sum, "PART", part)
        torch.testing.assert_close(fitted(), expected, **TIGHT)


def test_rows_are_kept_while_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [fit_laplace(cnn(), batches(n, 1)) for n in (2, 7)]
    for module, name, value in THRESHOLDS:
        monkeypatch.setattr(module, name, value)
    few, many = (fit_laplace(cnn(), batches(n, 1)) for n in (2, 7))
    assert widths(few) == [(19, 19), (36, 8), (25, 2)]  # 16, 4 and 1 positions
    assert widths(many) == [(19, 19), (36, 36), (25, 7)]
    for found, expected in zip((few, many), whole, strict=True):
        torch.testing.assert_close(found.precision.to_dense(), expected.precision.to_dense(), **TIGHT)
        torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), **TIGHT)
        torch.testing.assert_close(found.effective_parameters, expected.effective_parameters, **TIGHT)
        x = real(4, 4, 6, 6, seed=8)
        for ours, theirs in zip(found.functional(x), expected.functional(x), strict=True):
            torch.testing.assert_close(ours, theirs, **TIGHT)


def test_few_rows_whose_products_are_too_large_are_those_of_a_parameter(wide: None) -> None:
    parts = cnn()
    nn.init.zeros_(parts[5].weight)
    network = Wired(lambda s, x: s.head(1e160 * s.body(x)), body=parts[:5], head=parts[5])
    with pytest.raises(CurvatureError, match=r"head\.weight"):
        fit_laplace(network, [data(2)])


@pytest.mark.parametrize("rank", [1, 3, 20])
def test_a_rank_is_that_of_each_factor(rank: int, wide: None) -> None:
    exact, found = (fit_laplace(cnn(), batches(7, 2), structure=Kron(rank=k)) for k in (None, rank))
    pairs = zip(exact.curvature.structure.blocks, found.curvature.structure.blocks, strict=True)
    for whole, block in pairs:
        assert isinstance(whole, Kronecker)
        for side in ("left", "right"):
            expected = Factor.from_matrix(getattr(whole, side).matrix, rank=rank)
            if getattr(whole, side).size <= 4 * rank:  # else by a Krylov space
                torch.testing.assert_close(getattr(block, side).matrix, expected.matrix, **TIGHT)
            assert getattr(block, side).values.shape[-1] <= rank
            torch.testing.assert_close(getattr(block, side).trace, getattr(whole, side).trace, **TIGHT)
    assert found.log_marginal_likelihood() <= exact.log_marginal_likelihood() + 1e-9  # a flat remainder, by Jensen


@pytest.mark.parametrize("rank", [100, "auto"])
def test_the_precision_of_a_wide_layer_with_dead_inputs_has_an_inverse(rank: Any) -> None:
    x = torch.zeros(1500, 1100)
    x[:, :250] = real(1500, 250, seed=9).float()
    M = fit_laplace(nn.Linear(1100, 3), [(x, torch.arange(1500) % 3)], structure=Kron(rank=rank)).precision
    v = real(1, 3303, seed=10).float()
    assert (M.solve(M.matmul(v)) - v).norm() <= 1e-3 * v.norm()


@pytest.mark.parametrize("rank", RANKS)
def test_a_file_holds_the_same_posterior(rank: Any, wide: None, tmp_path: Path) -> None:
    posterior = fit_laplace(cnn(), batches(7, 2), prior_precision=[0.5, 1.0, 2.0], structure=Kron(rank=rank))
    posterior.save(tmp_path / "q.pt")
    loaded = GaussianPosterior.load(tmp_path / "q.pt", cnn())
    assert torch.equal(loaded.precision.to_dense(), posterior.precision.to_dense())
    tuned = loaded.tune_prior(Tuning("marglik", groups="layers"))
    assert tuned.log_marginal_likelihood() >= loaded.log_marginal_likelihood()


@pytest.mark.parametrize("rank", [None, 3])
def test_data_added_later_make_the_factors_of_one_fit(rank: int | None, wide: None) -> None:
    first, second = batches(7, 2)
    grown = fit_laplace(cnn(), [first], structure=Kron(rank=rank, updatable=True)).update([second])
    whole = fit_laplace(cnn(), [first, second], structure=Kron(rank=rank, updatable=True))
    pairs = zip(grown.curvature.structure.blocks, whole.curvature.structure.blocks, strict=True)
    for ours, theirs in pairs:
        for side in ("left", "right"):
            torch.testing.assert_close(getattr(ours, side).full_matrix, getattr(theirs, side).full_matrix, **TIGHT)
    torch.testing.assert_close(grown.precision.to_dense(), whole.precision.to_dense(), rtol=1e-6, atol=1e-6)


def test_a_posterior_of_few_rows_is_a_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> Any:
        first, second = batches(4, 1)
        return fit_laplace(cnn(), [second], prior=fit_laplace(cnn(), [first])).precision.to_dense()

    expected = both()
    monkeypatch.setattr(input_sum, "WIDE", 5)
    torch.testing.assert_close(both(), expected, **TIGHT)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(fit_shares, tmp_path_factory.mktemp("factors"), 2)


@pytest.mark.parametrize("rank", RANKS)
def test_two_processes_fit_the_factors_of_one(rank: Any, of_two: list[dict[str, Any]], wide: None) -> None:
    for n in (1, 3, 7):
        one = fit_laplace(cnn(), [data(n)], structure=Kron(rank=rank))
        factors = [f for block in one.curvature.structure.blocks for f in (block.left, block.right)]
        draw = one.sample(2, torch.Generator().manual_seed(1))
        for found in of_two:
            assert found[f"ranks {n} {rank}"] == [f.values.shape[-1] for f in factors]
            torch.testing.assert_close(found[f"{n} {rank}"], one.precision.to_dense(), rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(found[f"draw {n} {rank}"], draw, rtol=1e-7, atol=1e-8)
