"""Real processes under DDP, and accumulation: the objective is that of one process and one batch."""

from typing import Any

import pytest
import torch
import variational_ddp_worker
from helpers.processes import launched
from helpers.processes import results as results_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`"),
    pytest.mark.filterwarnings("ignore:.*in eval mode"),
    pytest.mark.filterwarnings("ignore:log σ can move"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("together")
    with launched(variational_ddp_worker.__file__, folder, 2) as processes:
        alone = variational_ddp_worker.run(tmp_path_factory.mktemp("alone"), 1)
        return alone, results_of(folder, processes)


def every(results: Any, name: str) -> list[dict[str, Any]]:
    """One process with accumulation 1 and 2, and two processes with each."""
    alone, ranks = results
    return [source[f"{name}/{accumulate}"] for source in (alone, *ranks) for accumulate in (1, 2)]


def test_likelihood_and_kl_terms_train_to_the_same_weights(results: Any) -> None:
    first, *rest = every(results, "narrow")
    for other in rest:
        for name, value in first["weights"].items():
            torch.testing.assert_close(other["weights"][name], value, rtol=1e-10, atol=1e-12)


def test_likelihood_and_kl_terms_are_logged_alike(results: Any) -> None:
    for name in ("narrow", "still"):
        first, *rest = every(results, name)
        for other in rest:
            assert other["n_data"] == {"narrow": variational_ddp_worker.N, "still": variational_ddp_worker.MANY}[name]
            ours, theirs = other["logged"], first["logged"]
            assert ours["train_kl"] == pytest.approx(theirs["train_kl"], rel=1e-10)
            likelihood = [each["train_ell"] + each["train_squared_gradient"] for each in (ours, theirs)]
            assert likelihood[0] == pytest.approx(likelihood[1], rel=1e-10)


def test_the_squared_gradient_term_is_the_same_in_expectation(results: Any) -> None:
    """Over 64 draws of labels; a term scaled by the global batch would be twice as large."""
    means, errors = [], []
    for found in every(results, "still"):
        g = found["gradients"].flatten(1).sum(1)
        assert len(g) == 64
        means.append(float(g.mean()))
        errors.append(float(g.std()) / len(g) ** 0.5)
    spread = 5 * (errors[0] ** 2 + max(errors) ** 2) ** 0.5
    assert spread < 0.6 * means[0]
    assert means == pytest.approx([means[0]] * len(means), abs=spread)


def test_an_example_has_the_same_random_numbers_for_its_label_on_any_process(results: Any) -> None:
    """Process r has the examples r, r + 2, … of every global batch."""
    alone, ranks = results
    whole = alone["still/1"]["labels"]
    assert len({tuple(labels.tolist()) for labels in whole}) > 1
    for place, rank in enumerate(ranks):
        for labels, expected in zip(rank["still/1"]["labels"], whole, strict=True):
            assert torch.equal(labels, expected[place::2])


def test_processes_draw_weight_samples_of_their_own(results: Any) -> None:
    alone, ranks = results
    assert ranks[0]["vi"]["seeds"] == alone["vi"]["seeds"]
    seeds = [seed for rank in ranks for seed in rank["vi"]["seeds"]]
    assert len(set(seeds)) == len(seeds) == 8


def test_all_processes_have_the_same_weights(results: Any) -> None:
    _, ranks = results
    for name in ("narrow/1", "still/2", "fd", "two", "exact", "vi"):
        for key, value in ranks[0][name]["weights"].items():
            if "running" not in key:  # a batch norm's statistics are each process's own
                assert torch.equal(ranks[1][name]["weights"][key], value), (name, key)


def test_finite_differences_and_double_backward_agree_on_two_processes(results: Any) -> None:
    for source in (results[0], *results[1]):
        for key, value in source["exact"]["weights"].items():
            for method in ("fd", "two"):
                torch.testing.assert_close(source[method]["weights"][key], value, rtol=1e-5, atol=1e-6)


def test_processes_move_their_weights_in_the_same_sense(results: Any) -> None:
    alone, ranks = results
    assert len(alone["two"]["signs"]) > 1
    assert all(rank["two"]["signs"] == alone["two"]["signs"] for rank in ranks)


@pytest.mark.parametrize(
    ("case", "n"),
    [
        ("shuffled", variational_ddp_worker.ODD),  # which is padded for two processes
        ("shuffled, limited", variational_ddp_worker.ODD),
        ("in order", variational_ddp_worker.N),
        ("in order, limited", variational_ddp_worker.BATCH),
        ("in order, limited to a share", variational_ddp_worker.BATCH),
    ],
)
def test_every_example_that_is_drawn_from_counts_once(results: Any, case: str, n: int) -> None:
    alone, ranks = results
    for source in (alone, *ranks):
        assert source["counts"][case]["n_data"] == n
        assert source["counts"][case]["kl_weight"] == pytest.approx(0.7 / n)


def test_the_multiplier_trains_as_one_process_on_the_global_batch(results: Any) -> None:
    """Weights and log σ alike: in param groups and on a schedule of the user's, and of a variational module."""
    alone, ranks = results
    for rank in ranks:
        for case in ("with", "vl"):
            for name, value in alone["multiplied"][case].items():
                found = rank["multiplied"][case][name]
                torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_log_sigma_moves_that_many_times_as_far_on_two_processes(results: Any) -> None:
    alone, ranks = results
    for source in (alone, *ranks):
        before, without, found = (source["multiplied"][key] for key in ("before", "without", "with"))
        for name, start in before.items():
            m = variational_ddp_worker.MULTIPLIER if name.startswith("log_sigma.") else 1.0
            moved = without[name] - start
            assert moved.abs().amin() > 1e-6, name
            torch.testing.assert_close(found[name] - start, m * moved, rtol=1e-8, atol=1e-13)
