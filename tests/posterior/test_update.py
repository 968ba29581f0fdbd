"""Data that come later: an updated posterior is that of one fit to all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.networks import made, mlp
from helpers.options import estimate_of, structure_of
from helpers.processes import Peer, together
from helpers.tensors import TIGHT, real
from posterior_cases import STRUCTURES, Case, case

from lightning_bayes import (
    Categorical,
    Diag,
    GaussianPosterior,
    Kron,
    LaplacePosterior,
    Prior,
    Subnetwork,
    fit_laplace,
)
from lightning_bayes.network import Processes
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.structures import StructureError


def fit_and_update(peer: Peer) -> dict[str, Any]:
    """A fit of five examples and an update by six more, on several processes."""
    with peer.group() as processes:
        return answers_of(processes)


def answers_of(processes: Processes) -> dict[str, Any]:
    rank, world = processes.rank, processes.size
    network, x, y = made(mlp), real(11, 3), torch.arange(11) % 3
    first, second = ([(x[part], y[part])] for part in (slice(rank, 5, world), slice(5 + rank, 11, world)))
    words: dict[str, Any] = {"processes": processes}
    answers = {}
    for structure in ("full", "diag", "kron"):
        option = Kron(updatable=True) if structure == "kron" else structure
        for curvature in ("ggn", "fisher_mc"):
            posterior = fit_laplace(network, first, Categorical(), curvature=curvature, structure=option, **words)
            posterior = posterior.update(second, processes=processes)
            answers[f"{structure} {curvature}"] = posterior.precision.to_dense()
            answers[f"evidence {structure} {curvature}"] = posterior.log_marginal_likelihood()
    one = posterior.update([(x[:1], y[:1])] if rank == 0 else [], processes=processes, probe=x[:1])
    answers["n_data"] = torch.tensor(one.n_data)  # an example for one of them alone
    return answers


CASES = ("mlp", "regression", "noise_per_output", "cnn", "attention", "embedding", "lstm", "segmentation")


def grown(data: Case, *sizes: int, **words: Any) -> tuple[LaplacePosterior, LaplacePosterior]:
    """A fit to the first batch to which the others are added, and one fit to all."""
    first, *others = data.loader(*sizes)
    structure = words.get("structure", "kron")
    option = structure_of(structure, updatable=True) if isinstance(structure, str) else structure
    option = replace(option, updatable=True) if isinstance(option, Kron) else option
    posterior = fit_laplace(data.network, [first], data.likelihood, **{**words, "structure": option})
    for batch in others:
        posterior = posterior.update([batch])
    return posterior, fit_laplace(data.network, data.loader(), data.likelihood, **words)


def check_same(posterior: LaplacePosterior, whole: LaplacePosterior) -> None:
    assert torch.allclose(posterior.precision.to_dense(), whole.precision.to_dense(), **TIGHT)
    ours, theirs = posterior.curvature, whole.curvature
    assert (ours.n_data, ours.n_outputs, posterior.n_data) == (theirs.n_data, theirs.n_outputs, whole.n_data)
    for name in ("log_likelihood", "gradient", "squared_error"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None and b is None) or torch.allclose(a, b, **TIGHT), name
    for at in ("weights", "optimum"):
        evidence = whole.log_marginal_likelihood(at=at)
        assert torch.allclose(posterior.log_marginal_likelihood(at=at), evidence, **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", CASES)
def test_adding_data_is_fitting_to_all(name: str, structure: str) -> None:
    check_same(*grown(case(name), 3, 1, 3, structure=structure))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["fisher_mc", "empirical_fisher"])
def test_labels_are_drawn_as_in_one_fit(structure: str, curvature: str) -> None:
    """By the number of the example, counted on from the data before."""
    estimate = estimate_of(curvature, 2)
    check_same(*grown(case("mlp"), 3, 1, 3, structure=structure, curvature=estimate, seed=5))


def test_with_the_words_of_the_fit() -> None:
    check_same(*grown(case("attention"), 3, 4, structure=Kron(weight_sharing="reduce")))
    check_same(*grown(case("cnn"), 3, 4, structure=Diag(method="approx")))
    check_same(
        *grown(case("mlp"), 3, 4, structure="full", subset=torch.tensor([1, 4, 30]), prior=Prior(temperature=2.0))
    )
    check_same(*grown(case("mlp"), 3, 4, subset="last_layer", prior_precision=3.0))
    posterior, whole = grown(case("mlp"), 3, 4, structure=Kron(damping="ritter"))
    assert torch.allclose(posterior.precision.to_dense(), whole.precision.to_dense(), **TIGHT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_tuned_saved_and_loaded_in_between(structure: str, tmp_path: Path) -> None:
    data = case("regression")
    first, second = data.loader(4, 3)
    option = structure_of(structure, updatable=True)
    before = fit_laplace(data.network, [first], data.likelihood, structure=option)
    σ = torch.tensor(0.9, dtype=torch.float64)
    tuned = before.with_noise(σ).with_prior(2.5)
    tuned.save(tmp_path / "posterior.pt")
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", data.network)
    likelihood = data.likelihood.with_noise(σ)
    whole = fit_laplace(data.network, data.loader(), likelihood, prior_precision=2.5, structure=structure)
    check_same(loaded.update([second]), whole)
    check_same(tuned.update([second]), whole)


def test_a_posterior_as_prior_stays_the_prior() -> None:
    data = case("mlp")
    one, two, three = data.loader(3, 2, 2)
    before = fit_laplace(data.network, [one], structure="full")
    after = fit_laplace(data.network, [two], structure="full", prior=before).update([three])
    check_same(after, fit_laplace(data.network, [two, three], structure="full", prior=before))


def test_nothing_changes_after_an_error_in_the_middle() -> None:
    data = case("mlp")
    posterior = fit_laplace(data.network, data.loader(), structure=Kron(updatable=True))
    dense, n = posterior.precision.to_dense(), posterior.n_data
    bad = (data.x[:2], torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="class"):
        posterior.update([data.loader()[0], bad])
    assert torch.equal(posterior.precision.to_dense(), dense)
    assert posterior.n_data == n
    assert data.network.training


def test_what_cannot_grow_says_so() -> None:
    data = case("mlp")
    batches = data.loader()
    kinds: dict[str, Any] = {
        "updatable=True": fit_laplace(data.network, batches),
        "refine it again": fit_laplace(data.network, batches, structure="full").refine(batches),
        "predictive='gp'": fit_laplace(data.network, batches, gp=3, structure=Kron(updatable=True)),
    }
    for says, posterior in kinds.items():
        with pytest.raises(PosteriorError, match=says):
            posterior.update(batches)
    for structure in ("ekfac", "lowrank"):
        with pytest.raises(PosteriorError, match=f"data cannot be added to structure='{structure}'"):
            fit_laplace(data.network, batches, structure=structure).update(batches)
    old = fit_laplace(data.network, batches, structure=Kron(updatable=True))  # as in a file of an older version
    for block in old.curvature.structure.blocks:
        object.__setattr__(block, "rows", None)
    with pytest.raises(StructureError, match="weight: the number of inputs in its factors is unknown"):
        old.update(batches)
    subnetwork = fit_laplace(data.network, batches, subset=Subnetwork(5))
    assert subnetwork.update(batches).n_data == 14


def test_the_factors_are_kept_only_where_asked() -> None:
    data = case("mlp")
    for updatable in (False, True):
        posterior = fit_laplace(data.network, data.loader(), structure=Kron(updatable=updatable))
        kept = [block.left.full_matrix is not None for block in posterior.curvature.structure.blocks]
        assert kept == [updatable, updatable]
        after = fit_laplace(data.network, data.loader(), prior=posterior, structure=Kron(updatable=updatable))
        for P in (posterior.precision, after.precision, after.prior.precision):  # nothing is added to a sum
            assert [block.left.full_matrix for block in P.blocks] == [None, None]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_two_processes_add_what_one_adds(structure: str, growing: list[dict[str, Any]]) -> None:
    network, x, y = made(mlp), real(11, 3), torch.arange(11) % 3
    assert [int(of_process["n_data"]) for of_process in growing] == [12, 12]
    for curvature in ("ggn", "fisher_mc"):
        whole = fit_laplace(network, [(x, y)], Categorical(), curvature=curvature, structure=structure)
        for of_process in growing:
            expected = whole.precision.to_dense()
            assert torch.allclose(of_process[f"{structure} {curvature}"], expected, **TIGHT)
            evidence = whole.log_marginal_likelihood()
            assert torch.allclose(of_process[f"evidence {structure} {curvature}"], evidence, **TIGHT)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(fit_and_update, tmp_path_factory.mktemp("growing"), 2)
