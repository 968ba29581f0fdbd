"""The curvature memory of online Laplace: a leaky sum over optimizer steps (Laplacian autoencoders, eq. (65))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import Processes

_STATE = ("C", "draws", "global_step")


@dataclass
class CurvatureMemory:
    """`C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ)`, once per optimizer step, over the batch of all processes."""

    C: Tensor  # [P]
    n_data: int  # N
    memory_factor: float  # α
    average: bool  # whether the new term is multiplied by α
    scaling: str  # "dataset": N/b; "batch": 1
    draws: int = 0  # samples so far; each has its number, and so the same noise after a restart
    global_step: int = 0
    _waiting: Tensor | None = None  # Σ diag(JᵀΛJ) since the last step
    _examples: int = 0

    def add(self, diagonal: Tensor, examples: int) -> None:
        """A batch of this process; several may be accumulated for one step."""
        diagonal = diagonal.to(self.C)
        self._waiting = diagonal if self._waiting is None else self._waiting + diagonal
        self._examples += examples

    def end_step(self, global_step: int, processes: Processes) -> None:
        """The optimizer has moved: leak once, and add what has come since it moved last."""
        if global_step == self.global_step or self._waiting is None:
            return
        b = torch.tensor(float(self._examples), dtype=torch.float64, device=self.C.device)
        processes.sum_([self._waiting, b])
        factor = self.n_data / float(b) if self.scaling == "dataset" else 1.0
        new = self._waiting * (factor * (self.memory_factor if self.average else 1.0))
        self.C = (1 - self.memory_factor) * self.C + new
        self.global_step, self._waiting, self._examples = global_step, None, 0

    def draw(self, precision: Tensor, seed: int, rank: int, max_std: float | None) -> Tensor:
        """`ε/√H`, with noise that belongs to the seed, the draw's number and, if it is to differ, the rank.  # [P]"""
        self.draws += 1
        generator = torch.Generator(device="cpu").manual_seed((seed * 1_000_003 + self.draws) * 65_536 + rank)
        noise = torch.randn(precision.shape, generator=generator, dtype=precision.dtype).to(precision.device)
        std = precision.rsqrt()
        return noise * (std if max_std is None else std.clamp_max(max_std))

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load(self, state: dict[str, Any]) -> None:
        self.C = state["C"].to(self.C)
        self.draws, self.global_step = state["draws"], state["global_step"]
