"""`LaplaceCallback(structure="diag", hessian=…)` fits with the fast diagonal, and refuses what has no rule in time."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Diag, LaplaceCallback, fit_laplace
from lightning_bayes.curvature.diagonal import RuleError


class Net(L.LightningModule):
    def __init__(self, sort: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 4))
        self.sort, self.steps = sort, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x).tanh()).tanh()
        return self.last(h.sort().values if self.sort else h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(11, 3, generator=generator), torch.randint(4, (11,), generator=generator))


def fitted(module: Net, folder: Path, hessian: str) -> LaplaceCallback:
    callback = LaplaceCallback(structure=Diag(method=hessian), tune=None, progress=False, save=False)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], default_root_dir=folder, logger=False)
    trainer.fit(module, DataLoader(data(), batch_size=4))
    return callback


@pytest.mark.parametrize("hessian", ["exact", "approx"])
def test_the_callback_passes_it_on(tmp_path: Path, hessian: str) -> None:
    torch.manual_seed(0)
    module = Net()
    found = fitted(module, tmp_path, hessian).posterior.precision.diagonal()
    x, y = data().tensors
    expected = {name: fit_laplace(module, [(x, y)], structure=Diag(method=name)) for name in ("exact", "approx")}
    torch.testing.assert_close(found, expected[hessian].precision.diagonal())
    assert not torch.allclose(*(posterior.precision.diagonal() for posterior in expected.values()), rtol=1e-3)


def test_what_has_no_rule_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module = Net(sort=True)
    with pytest.raises(RuleError, match=r"through sort.*use hessian='exact'"):
        fitted(module, tmp_path, "approx")
    assert module.steps == 0
