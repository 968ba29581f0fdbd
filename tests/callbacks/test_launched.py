"""Strategies that fork or spawn hand the posterior back to the process that called `fit`."""

from pathlib import Path

import launched_worker
import pytest
import torch
from helpers.processes import environment, free_port
from helpers.programs import run_program


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_the_parent_has_the_posterior(tmp_path: Path, strategy: str) -> None:
    variables = environment(MASTER_PORT=str(free_port()))
    done = run_program(launched_worker.__file__, str(tmp_path), strategy, env=variables)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert found["is the model's"]
    assert found["n_data"] == 37
    assert found["path"] == str(tmp_path / "laplace_posterior.pt")
    torch.testing.assert_close(*found["logdet"], rtol=1e-5, atol=1e-5)
    assert found["logged"] == pytest.approx([found["expected"]] * len(found["logged"]), rel=1e-5)
    assert len(set(found["l2m"])) == 1
