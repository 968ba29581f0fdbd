"""The Jacobian of single weights is their columns of the whole one, by entries and by rectangles, in any layer."""

import pytest
import torch
from networks import CASES
from oracles import close
from torch import Tensor

from lightning_bayes.jacobian import rows as jacobian_rows
from lightning_bayes.structures import Dense

NETWORKS = [
    *("mlp", "mlp_without_bias", "deep_cnn", "transformer", "embedding", "lstm", "bare_parameters", "norm_batch_2d"),
    *("residual", "segmentation", "frozen"),
]
BY_ENTRIES, BY_RECTANGLES = 2.0, 0.0


@pytest.mark.parametrize("filled", [BY_ENTRIES, BY_RECTANGLES], ids=["entries", "rectangles"])
@pytest.mark.parametrize("name", NETWORKS)
def test_curvature_and_outputs_of_single_weights(name: str, filled: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_rows, "FILLED", filled)
    monkeypatch.setattr(jacobian_rows, "CACHE", 200)  # some examples, and some weights of one, at a time
    case = CASES[name]()
    whole = case.fit("full").structure.to_dense()
    mask = (torch.rand(len(whole)) < 0.2).nonzero().squeeze(1)
    posterior = case.laplace(1, 3, structure="full", subset=mask)
    H = whole[mask.unsqueeze(-1), mask]
    close(posterior.curvature.structure.to_dense(), H)
    _, covariance = posterior.functional(case.x)
    everything = case.laplace(structure="full")
    known = torch.full((len(whole),), 1e14, dtype=whole.dtype)  # weights outside are known exactly
    known[mask] = 1.0
    zeroed = torch.zeros_like(whole)
    zeroed[mask.unsqueeze(-1), mask] = H
    precision = Dense(zeroed).add_prior(known)
    _, (expected,) = everything.functional_for([precision], case.x)
    torch.testing.assert_close(covariance, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "deep_cnn", "embedding"])
def test_only_the_inputs_of_chosen_weights_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, taken = CASES[name](), []
    put = jacobian_rows.ChosenWeights.put

    def watched(self: jacobian_rows.ChosenWeights, a: Tensor, g: Tensor, into: Tensor) -> None:
        taken.append(a.shape[-1])
        put(self, a, g, into)

    monkeypatch.setattr(jacobian_rows.ChosenWeights, "put", watched)
    case.fit("full", subset=torch.tensor([0, 1]))
    assert taken
    assert set(taken) <= {1, 2}
