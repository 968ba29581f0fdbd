"""The code of the L2M page runs, and its numbers are those of the formulas."""

from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_docs_code import DOCS, run_page
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import L2MCallback
from lightning_bayes.posterior.l2m import fisher_factor


class LitNet(L.LightningModule):
    """The module that a reader of the page already has; it asks for one epoch, to save the test's time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def on_test_end(self) -> None:
        self.tested = dict(self.trainer.callback_metrics)

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(L.LightningDataModule):
    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=8)

    train_dataloader = test_dataloader = loader


def checkpoint_of(seed: int, folder: Path) -> str:
    """The last checkpoint of one training with the callback."""
    torch.manual_seed(seed)
    checkpoint = ModelCheckpoint(folder / str(seed))
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[L2MCallback(), checkpoint]
    )
    trainer.fit(LitNet(), Data())
    return checkpoint.best_model_path


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    paths = [checkpoint_of(seed, tmp_path) for seed in range(2)]
    given = {"model": LitNet(), "dm": Data(), "paths": paths, "LitNet": LitNet, "x": x, "test_loader": Data().loader()}
    names = run_page(DOCS / "l2m.md", **given)
    said = {f"test_{score}_{of}" for score in ("nll", "acc", "ece", "brier") for of in ("map", "l2m")}
    assert said <= set(names["model"].tested)
    assert names["l2m"].posterior.n_data == 24
    one, two = (p.predict(x, "map").probs for p in names["ensemble"].posteriors)
    torch.testing.assert_close(names["plain"].probs, (one + two) / 2)
    assert not torch.allclose(one, two)
    torch.testing.assert_close(names["prediction"].probs.sum(1), torch.ones(5))
    assert set(names["evaluate"](names["ensemble"], Data().loader())) == {"nll", "acc", "ece", "brier"}


def test_the_variance_of_a_batch_mean_is_the_formula_of_the_page() -> None:
    """Over all subsets, not over samples of them: N = 7, every B."""
    h = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    N, fisher = 7, (h - h.mean()).square().sum()
    for B in range(1, N):
        means = torch.stack([h[list(batch)].mean() for batch in combinations(range(N), B)])
        torch.testing.assert_close(fisher_factor(N, B) * means.var(correction=0), fisher)


def test_the_factor_that_the_page_names() -> None:
    assert "With 50,000 examples in batches of 128 it is 6.4 million" in (DOCS / "l2m.md").read_text(encoding="utf-8")
    assert fisher_factor(50_000, 128) == pytest.approx(6.4e6, rel=0.01)
