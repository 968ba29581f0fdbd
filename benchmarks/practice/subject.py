"""A trained network for the methods: its data as loaders that count how often they are read, and fits that several
methods share."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.practice.tasks import Part
from benchmarks.practice.training import EVALUATION_BATCH, Trained
from lightning_bayes import Gaussian, LaplacePosterior, fit_laplace
from lightning_bayes.likelihoods import Likelihood


class Counted(Dataset):
    """A dataset that counts how many examples were read."""

    def __init__(self, part: Part) -> None:
        self.part, self.reads = part, 0

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return self.part.x[index], self.part.y[index]

    @property
    def passes(self) -> float:
        return self.reads / len(self)


class Subject:
    """A trained network with cached fits. Each method that uses a fit is charged its full cost."""

    def __init__(self, trained: Trained) -> None:
        self.trained, self.setup, self.task = trained, trained.setup, trained.task
        self.network = trained.module.net
        self._train, self._val = Counted(self.task.train), Counted(self.task.val)
        self.train = DataLoader(self._train, batch_size=EVALUATION_BATCH)
        self.val = DataLoader(self._val, batch_size=EVALUATION_BATCH)
        self._fits: dict[Any, tuple[LaplacePosterior, float]] = {}
        self._charged = 0.0
        self._start = time.perf_counter()

    @property
    def is_regression(self) -> bool:
        return self.setup.kind == "regression"

    def restart(self) -> None:
        """Start a new method: reset the counts and the clock."""
        self._train.reads = self._val.reads = 0
        self._charged, self._start = 0.0, time.perf_counter()

    def cost(self) -> dict[str, float]:
        """Seconds and passes over the data since `restart`."""
        seconds = time.perf_counter() - self._start + self._charged
        return {"seconds": seconds, "train_passes": self._train.passes, "val_passes": self._val.passes}

    def fit(self, structure: str = "kron", subset: str = "all", noise_std: float | None = None) -> LaplacePosterior:
        """A posterior with prior precision 1; for a regression, at a given noise or at noise 1."""
        what = (structure, subset, noise_std)
        if what not in self._fits:
            start = time.perf_counter()
            posterior = fit_laplace(
                self.network, self.train, self.likelihood(noise_std), structure=structure, subset=subset
            )
            self._fits[what] = posterior, time.perf_counter() - start
        else:
            self._charged += self._fits[what][1]
            self._train.reads += len(self._train)
        return self._fits[what][0]

    def likelihood(self, noise_std: float | None = None) -> str | Likelihood:
        if not self.is_regression or noise_std is None:
            return self.setup.kind
        return Gaussian(noise_std)

    def outputs(self, part: Tensor, network: torch.nn.Module | None = None) -> Tensor:
        """The network's outputs at the trained weights.  # [N, C]"""
        with torch.no_grad():
            return torch.cat([(network or self.network)(x) for x in part.split(EVALUATION_BATCH)])

    def validation_outputs(self) -> Tensor:
        self._val.reads += len(self._val)
        return self.outputs(self.task.val.x)

    def train_rmse(self) -> float:
        self._train.reads += len(self._train)
        return float((self.outputs(self.task.train.x) - self.task.train.y).square().mean().sqrt())

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer with its state at the end of training."""
        made = self.trained.module.configure_optimizers()
        optimizer = made[0][0] if isinstance(made, tuple) else made
        optimizer.load_state_dict(self.trained.optimizer_state)
        return optimizer

    def mean_inverse_batch(self) -> float:
        """The mean of 1/B over the training batches; the last batch is smaller."""
        N, B = len(self.task.train), self.setup.training.batch_size
        steps = math.ceil(N / B)
        return ((steps - 1) / B + 1 / (N - (steps - 1) * B)) / steps
