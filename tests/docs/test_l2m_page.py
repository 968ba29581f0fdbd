"""The code of the pages on L2M and on ensembles runs, and its numbers are those of the formulas."""

from itertools import combinations
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_docs_code import DOCS, Data, Model, run_page, scores

from lightning_bayes import L2MCallback
from lightning_bayes.posterior.moments import fisher_factor


class LitNet(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Even(Data):
    batch_size = 8  # of 24 examples


def checkpoint_of(seed: int, folder: Path) -> str:
    """The last checkpoint of one training with the callback."""
    torch.manual_seed(seed)
    checkpoint = ModelCheckpoint(folder / str(seed))
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[L2MCallback(), checkpoint]
    )
    trainer.fit(LitNet(), Even())
    return checkpoint.best_model_path


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page(DOCS / "l2m.md", model=LitNet(), dm=Even())
    assert scores("map", "l2m") <= set(names["model"].tested)
    assert names["l2m"].posterior.n_data == 24


def test_ensembles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    paths = [checkpoint_of(seed, tmp_path) for seed in range(2)]
    names = run_page(DOCS / "ensembles.md", paths=paths, LitNet=LitNet, x=x, test_loader=Even().loader())
    one, two = (p.predict(x, "map").probs for p in names["ensemble"].posteriors)
    torch.testing.assert_close(names["plain"].probs, (one + two) / 2)
    assert not torch.allclose(one, two)
    torch.testing.assert_close(names["prediction"].probs.sum(1), torch.ones(5))
    assert set(names["evaluate"](names["ensemble"], Even().loader())) == {"nll", "acc", "ece", "brier"}
    disagreement = ((one - names["plain"].probs).square() + (two - names["plain"].probs).square()) / 2
    torch.testing.assert_close(names["plain"].epistemic, disagreement)


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
