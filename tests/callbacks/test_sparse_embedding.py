"""A table with sparse gradients, as `nn.Embedding(sparse=True)` trains: dry run, fit, scores and predictions."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers.networks import made
from helpers.training import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, fit_laplace


class Tokens(L.LightningModule):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.net = made(lambda: nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Flatten(), nn.Linear(12, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_sparse_gradients_change_nothing(structure: str, tmp_path: Path) -> None:
    x = torch.randint(6, (7, 4))
    loader = DataLoader(TensorDataset(x, x.sum(1) % 3), 3)
    probs, scores = [], []
    for sparse in (False, True):
        module, laplace = Tokens(sparse), LaplaceCallback(structure=structure, tune=None, progress=False)
        runner = trainer(tmp_path, laplace)
        runner.fit(module, loader)
        assert module.net[0].sparse == sparse
        scores.append(runner.test(module, loader, verbose=False)[0]["test_nll_laplace"])
        probs.append(torch.cat([prediction.probs for prediction in runner.predict(module, loader)]))
    torch.testing.assert_close(probs[1], probs[0])
    assert scores[1] == pytest.approx(scores[0])
    again = fit_laplace(module.net, loader, structure=structure)
    torch.testing.assert_close(again.predict(x).probs, probs[1])
