"""A likelihood averaged over a spread of the outputs: `E_ε[log p(y | f + ε)]`, for given draws of `ε`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bayes.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class ExpectedLikelihood(Likelihood):
    """Of one batch: with residual `E[r]` and Fisher `E[Λ]`."""

    of: Likelihood
    spread: Tensor  # ε [S, B, ...]

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        return self._mean(self.of.log_likelihood_per_example, f, y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self._mean(self.of.residual, f, y)

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """A root of the average, with as many columns as there are outputs."""
        roots = torch.cat([self.of.fisher_root(f + ε, y) for ε in self.spread])  # [S·K, B, C]
        flat = roots.reshape(*roots.shape[:2], -1)  # [S·K, B, C]
        average = torch.einsum("kbc,kbd->bcd", flat, flat) / len(self.spread)
        values, vectors = torch.linalg.eigh(average)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # [B, C, K]
        return root.movedim(-1, 0).reshape(-1, *f.shape)

    def _mean(self, function: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
        return torch.stack([function(f + ε, y) for ε in self.spread]).mean(0)

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def n_targets(self, y: Tensor) -> int:
        return self.of.n_targets(y)

    def check(self, f: Tensor, y: Tensor) -> None:
        self.of.check(f, y)
