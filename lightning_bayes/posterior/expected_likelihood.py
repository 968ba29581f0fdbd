"""A likelihood averaged over a spread of the outputs: `E_ε[log p(y | f + ε)]`, for given draws of `ε`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class ExpectedLikelihood(Likelihood):
    """Of one batch: with residual `E[r]` and Fisher `E[Λ]`."""

    of: Likelihood
    spread: Tensor  # ε [S, B, ...]

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        return self._mean(self.of.log_likelihood_per_example(*self._spread(f, y)))

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self._mean(self.of.residual(*self._spread(f, y)))

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """A root of the average, with as many columns as there are outputs."""
        columns = self.of.fisher_root(*self._spread(f, y))  # [K, S·B, C]
        columns = columns.reshape(len(columns), len(self.spread), len(f), -1)  # [K, S, B, C]
        average = torch.einsum("ksbc,ksbd->bcd", columns, columns) / len(self.spread)
        values, vectors = torch.linalg.eigh(average)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # [B, C, K]
        return root.movedim(-1, 0).reshape(-1, *f.shape)

    def _spread(self, f: Tensor, y: Any) -> tuple[Tensor, Any]:
        """All draws as one batch of `S·B` examples."""
        outputs = (f + self.spread).flatten(0, 1)
        return outputs, None if y is None else y.repeat(len(self.spread), *[1] * (y.ndim - 1))

    def _mean(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (len(self.spread), -1)).mean(0)

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def n_targets(self, y: Tensor) -> int:
        return self.of.n_targets(y)

    def check(self, f: Tensor, y: Tensor) -> None:
        self.of.check(f, y)
