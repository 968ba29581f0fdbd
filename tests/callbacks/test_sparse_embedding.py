"""A table with sparse gradients, as `nn.Embedding(sparse=True)` trains: dry run, fit, scores and predictions."""

from pathlib import Path

import pytest
import torch
from helpers.networks import made
from helpers.training import Lit, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, fit_laplace


def tokens(sparse: bool) -> Lit:
    return Lit(made(lambda: nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Flatten(), nn.Linear(12, 3))))


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_sparse_gradients_change_nothing(structure: str, tmp_path: Path) -> None:
    x = torch.randint(6, (7, 4))
    loader = DataLoader(TensorDataset(x, x.sum(1) % 3), 3)
    probs, scores = [], []
    for sparse in (False, True):
        module, laplace = tokens(sparse), LaplaceCallback(structure=structure, tune=None, progress=False)
        runner = trainer(tmp_path, laplace)
        runner.fit(module, loader)
        assert module.net[0].sparse == sparse
        scores.append(runner.test(module, loader, verbose=False)[0]["test_nll_laplace"])
        probs.append(torch.cat([prediction.probs for prediction in runner.predict(module, loader)]))
    torch.testing.assert_close(probs[1], probs[0])
    assert scores[1] == pytest.approx(scores[0])
    again = fit_laplace(module.net, loader, structure=structure)
    torch.testing.assert_close(again.predict(x).probs, probs[1])
