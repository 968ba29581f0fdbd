"""Real processes under DDP, and accumulation: the objective is that of one process and one batch."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
import variational_ddp_worker

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`"),
    pytest.mark.filterwarnings("ignore:.*in eval mode"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, variational_ddp_worker.__file__, str(folder), "2"],
            env={**os.environ, **shared, "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        alone = variational_ddp_worker.run(tmp_path_factory.mktemp("alone"), 1)
        said = [process.communicate(timeout=300)[0] for process in processes]
        failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
        assert not failed, failed[0]
        return alone, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


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


def test_all_processes_have_the_same_weights(results: Any) -> None:
    _, ranks = results
    for name in ("narrow/1", "still/2", "fd", "exact", "vi"):
        for key, value in ranks[0][name]["weights"].items():
            if "running" not in key:  # a batch norm's statistics are each process's own
                assert torch.equal(ranks[1][name]["weights"][key], value), (name, key)


def test_finite_differences_and_double_backward_agree_on_two_processes(results: Any) -> None:
    for source in (results[0], *results[1]):
        for key, value in source["exact"]["weights"].items():
            torch.testing.assert_close(source["fd"]["weights"][key], value, rtol=1e-5, atol=1e-6)
