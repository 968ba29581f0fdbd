"""The largest eigenpairs of the curvature: all of it where the rank allows, and never more than it."""

import oracles
import pytest
import torch
from networks import CASES

from lightning_bayes.curvature import fit_curvature

OPAQUE = ("custom_function", "embedding_scaled_by_frequency")  # without products


@pytest.mark.parametrize("name", [name for name in CASES if name not in OPAQUE])
def test_a_rank_that_is_high_enough_is_the_exact_curvature(name: str) -> None:
    case = CASES[name]()
    H = oracles.ggn(case)
    fitted = fit_curvature(case.network, case.loader(), case.likelihood, "lowrank", rank=len(H))
    torch.testing.assert_close(fitted.structure.to_dense(), H, rtol=1e-8, atol=1e-10 * float(H.abs().max()))
