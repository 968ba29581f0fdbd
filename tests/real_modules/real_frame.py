"""What a real module is taken through: fit, test, predict, save and load, ours beside MAP.

A case is a module as its author would write it, its data, and the words of the callback that differ from the defaults.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers.training import trainer
from helpers.untouched import untouched
from torch import Tensor, nn

from lightning_bayes import GaussianPosterior, LaplaceCallback, Prediction
from lightning_bayes.curvature import blocks as input_sum
from lightning_bayes.trainer.module import split_batch

TRAINED, HELD_OUT = 8, 6


class Ordinary(L.LightningModule):
    """The steps that most modules have in common."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx), batch_size=1)

    validation_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Classifier(Ordinary):
    """A network of another library, which maps images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


@dataclass(frozen=True)
class Real:
    """One row.

    Args:
        module: makes the LightningModule.
        loader: its data, by the number of examples and a seed.
        shape: of a prediction of `HELD_OUT` examples: the class dimension is the second.
        words: of `LaplaceCallback`.
        in_default: whether `make test` also runs it.
    """

    module: Callable[[], L.LightningModule]
    loader: Callable[[int, int], Any]
    shape: tuple[int, ...]
    words: dict[str, Any] = field(default_factory=dict)
    in_default: bool = False


@dataclass
class Journey:
    """One module on its way; a step is taken when it is first asked for."""

    case: Real
    folder: Path

    @cached_property
    def fitted(self) -> tuple[L.LightningModule, LaplaceCallback, L.Trainer]:
        L.seed_everything(0, verbose=False)
        module, callback = self.case.module(), LaplaceCallback(progress=False, **self.case.words)
        run = trainer(self.folder, callback, max_epochs=1, gradient_clip_val=1.0)
        run.fit(module, self.case.loader(TRAINED, 0), self.case.loader(HELD_OUT, 1))
        return module, callback, run

    @property
    def held_out(self) -> Any:
        return self.case.loader(HELD_OUT, 2)

    @cached_property
    def scores(self) -> dict[str, float]:
        module, _, run = self.fitted
        (logged,) = run.test(module, self.held_out, verbose=False)
        return logged

    @cached_property
    def predictions(self) -> list[Prediction]:
        module, _, run = self.fitted
        predictions: Any = run.predict(module, self.held_out)
        return predictions

    def check_scores(self) -> None:
        metrics = ("nll", "rmse") if self.is_regression else ("nll", "acc", "ece", "brier")
        for metric in metrics:
            for who in ("laplace", "map"):
                assert torch.tensor(self.scores[f"test_{metric}_{who}"]).isfinite(), (metric, who)

    def check_predictions(self) -> None:
        values = [p.mean if self.is_regression else p.probs for p in self.predictions]
        mean = torch.cat([v for v in values if v is not None])
        assert mean.shape == self.case.shape
        assert mean.isfinite().all()
        if self.case.words.get("likelihood", "classification") == "classification":
            torch.testing.assert_close(mean.sum(1), torch.ones_like(mean[:, 0]), rtol=0, atol=1e-4)

    def check_loaded(self) -> None:
        """The file on a copy of the module predicts the same, and so does a checkpoint in a new Trainer."""
        module, callback, run = self.fitted
        expected = self.predictions
        path, checkpoint = self.folder / "posterior.pt", self.folder / "module.ckpt"
        callback.posterior.save(path)
        run.save_checkpoint(checkpoint)
        network = copy.deepcopy(module.get_submodule(callback.network.name or ""))
        loaded = GaussianPosterior.load(path, network)
        assert repr(loaded) == repr(callback.posterior)
        x = self.split(module, next(iter(self.held_out)))
        generator = torch.Generator().manual_seed(callback.seed)
        same(loaded.predict(x, callback.predictive, generator=generator), expected[0])
        again = LaplaceCallback(progress=False, **self.case.words)
        fresh, new = trainer(self.folder, again), self.case.module()
        actual: Any = fresh.predict(new, self.held_out, ckpt_path=str(checkpoint), weights_only=True)
        for one, two in zip(actual, expected, strict=True):
            same(one, two)

    def check_untouched(self) -> None:
        """By a fit to the trained weights and a prediction: weights, mode, hooks, random state and gradients."""
        module, callback, _ = self.fitted
        batch = next(iter(self.held_out))
        with untouched(module):
            callback.fit_now(None, module, self.case.loader(TRAINED, 0))
            callback.predict(self.split(module, batch))

    def check_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many live tensors, and as many bytes, in and after a pass of 3k batches as in one of k; and in as many
        predictions."""
        module, callback, _ = self.fitted
        # Rows of a block are gathered up to a bound, whatever the number of batches: here they go after each batch.
        monkeypatch.setattr(input_sum, "FULL", 1)
        monkeypatch.setattr(input_sum, "WIDE", 10**6)
        k, batch = 2, next(iter(self.case.loader(TRAINED, 0)))
        x = self.split(module, batch)
        batches, of_predict = Batches(batch, 3 * k + 1), []
        gc.collect()
        gc.freeze()  # what there is before is not counted, which would take long
        try:
            callback.fit_now(None, module, batches)
            for _ in range(3 * k + 1):
                callback.predict(x)
                of_predict.append(count_live())
        finally:
            gc.unfreeze()
        for counts in (max(batches.passes, key=len), of_predict):
            assert counts[k] == counts[3 * k]

    def split(self, module: L.LightningModule, batch: Any) -> Any:
        """The input, without targets."""
        return split_batch(module, batch, predicting=True)[0]

    @property
    def is_regression(self) -> bool:
        return self.case.words.get("likelihood") == "regression"


@dataclass
class Batches:
    """The same batch `n` times; before each the live tensors are counted."""

    batch: Any
    n: int
    passes: list[list[tuple[int, int]]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        self.passes.append([])
        for batch in repeat(self.batch, self.n):
            self.passes[-1].append(count_live())
            yield batch


def count_live() -> tuple[int, int]:
    """The tensors that Python knows of, and their bytes."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return len(tensors), sum(t.numel() * t.element_size() for t in tensors)


def same(one: Prediction, two: Prediction) -> None:
    for name in ("probs", "mean", "epistemic", "aleatoric"):
        value = getattr(two, name)
        if value is not None:
            torch.testing.assert_close(getattr(one, name), value, rtol=1e-3, atol=1e-5)
