"""A quiet Trainer, and users' modules with their data."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.networks import made, mlp
from helpers.tensors import real
from lightning_bayes import Bernoulli, Categorical, Gaussian
from lightning_bayes.likelihoods import Likelihood

FEATURES, OUTPUTS, NOISE = 3, 3, 0.6
TASKS: dict[str, Likelihood] = {
    "classification": Categorical(),
    "binary": Bernoulli(),
    "regression": Gaussian(NOISE),
}


def trainer(folder: Path, *callbacks: L.Callback, **arguments: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return L.Trainer(**{**quiet, **arguments})


class NoAveraging(L.Callback):
    """In place of a callback that older versions of Lightning do not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pytest.skip("this version of Lightning has no EMAWeightAveraging")


EMAWeightAveraging: Any = getattr(L.pytorch.callbacks, "EMAWeightAveraging", NoAveraging)


class SaveAt(L.Callback):
    """Saves a checkpoint at a step (and batch), before the hooks of the callbacks after it."""

    def __init__(self, path: Path, step: int, batch: int | None = None) -> None:
        self.path, self.step, self.batch = path, step, batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        at = trainer.global_step == self.step and not self.path.exists()
        if at and self.batch in (None, batch_idx):
            trainer.save_checkpoint(self.path)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


class Lit(L.LightningModule):
    """A user's module: a network, a loss of its outputs, and an optimizer."""

    def __init__(self, net: nn.Module, loss: Any = F.cross_entropy, optimizer: Any = sgd) -> None:
        super().__init__()
        self.net, self.loss, self.optimizer = net, loss, optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class LitNet(Lit):
    """The loss is the mean negative log-likelihood; three outputs, biases, and AdamW."""

    decay = 0.1

    def __init__(self, task: str = "classification", seed: int = 0) -> None:
        super().__init__(made(lambda: mlp(FEATURES, 4, OUTPUTS), seed))
        self.task = task

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(*batch)

    def nll(self, x: Tensor, y: Tensor) -> Tensor:
        f = self(x)
        if self.task == "classification":
            return F.cross_entropy(f, y)
        if self.task == "binary":
            return F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(1).mean()
        return -torch.distributions.Normal(f, NOISE).log_prob(y).sum(1).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.nll(*batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.nll(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A short memory, so that it matters what the optimizer has seen.
        return torch.optim.AdamW(self.parameters(), 0.02, betas=(0.8, 0.9), weight_decay=self.decay)


def dataset(task: str = "classification", n: int = 11, seed: int = 1) -> TensorDataset:
    f = real(n, OUTPUTS, seed=seed + 1000)
    targets = {"classification": f.argmax(1), "binary": (f > 0).double(), "regression": f}
    return TensorDataset(real(n, FEATURES, seed=seed), targets[task])


def loader(task: str = "classification", n: int = 11, batch_size: int = 4, seed: int = 1) -> DataLoader[Any]:
    """Uneven batches, always in the same order."""
    return DataLoader(dataset(task, n, seed), batch_size)
