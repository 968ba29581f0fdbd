"""The curvature memory of online Laplace: a leaky sum over optimizer steps (Laplacian autoencoders, eq. (65)).

A batch counts if its gradient does: it is measured before or in its training step, kept when its backward pass is over,
and added when the optimizer has moved. Batches of an unfinished accumulation are no part of the state, as their
gradients are no part of a checkpoint.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network import CurvatureError, Processes, Subset
from lightning_bayes.network.subset import resolve_subset


@dataclass
class CurvatureMemory:
    """`C ← (1 − α) C + (N/b) Σ_batch diag(JᵀΛJ)`, once per optimizer step, over the batch of all processes."""

    C: Tensor  # [P]
    subset: Subset
    n_data: int  # N
    memory_factor: float  # α
    average: bool  # whether the new term is multiplied by α
    scaling: str  # "dataset": N/b; "batch": 1
    global_step: int
    draws: int = 0  # samples so far; each has its number, and so the same noise after a restart
    _measured: Tensor | None = None  # Σ diag(JᵀΛJ) of this batch, whose gradient may not count
    _examples_measured: int = 0
    _waiting: Tensor | None = None  # since the last step
    _examples: int = 0

    def measure(self, diagonal: Tensor, examples: int) -> None:
        """A batch of this process; at several samples, several times."""
        diagonal = diagonal.to(self.C)
        self._measured = diagonal if self._measured is None else self._measured + diagonal
        self._examples_measured += examples

    def forget(self) -> None:
        """What was measured last and not kept."""
        self._measured, self._examples_measured = None, 0

    def keep(self) -> None:
        """The gradient of what was measured goes into the next step; several batches may be accumulated for one."""
        if self._measured is None:
            return
        if not bool(self._measured.isfinite().all()):
            raise CurvatureError(
                "the curvature of a batch is not finite, and would stay so in memory: look for inputs or weights that "
                "are not, or give max_std= for samples that go too far"
            )
        self._waiting = self._measured if self._waiting is None else self._waiting + self._measured
        self._examples += self._examples_measured
        self.forget()

    def end_step(self, global_step: int, processes: Processes) -> None:
        """If the optimizer has moved: leak once, and add what has come since it moved last."""
        if global_step == self.global_step:
            return
        self.global_step = global_step
        if self._waiting is None:  # all batches were skipped, and nothing has moved
            return
        b = torch.tensor(float(self._examples), dtype=torch.float64, device=self.C.device)
        processes.sum_([self._waiting, b])
        factor = self.n_data / float(b) if self.scaling == "dataset" else 1.0
        factor *= self.memory_factor if self.average else 1.0
        self.C = torch.add(self._waiting * factor, self.C, alpha=1 - self.memory_factor)
        self._waiting, self._examples = None, 0

    def draw(self, number: int, precision: Tensor, seed: int, rank: int, max_std: float | None) -> Tensor:
        """`ε/√H`, with noise that belongs to the seed, the draw's number and, if it is to differ, the rank.  # [P]"""
        device = precision.device if precision.device.type in ("cuda", "mps", "xpu") else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(_mixed(seed, number, rank))
        noise = torch.randn(precision.shape, generator=generator, dtype=precision.dtype, device=device)
        std = precision.rsqrt()
        return noise.to(precision.device).mul_(std if max_std is None else std.clamp_max_(max_std))

    def state(self) -> dict[str, Any]:
        return {"C": self.C, "names": list(self.subset.names), "draws": self.draws}


def stored_subset(network: nn.Module, state: dict[str, Any]) -> Subset:
    """The parameters whose curvature a checkpoint holds."""
    subset = resolve_subset(network, state["names"], ())
    if subset.size != state["C"].numel():
        raise CurvatureError(
            f"the checkpoint holds the curvature of {state['C'].numel()} weights, but {', '.join(state['names'])} have "
            f"{subset.size}: it is of another network"
        )
    return subset


def _mixed(*numbers: int) -> int:
    """A seed from several numbers: torch's generator on the CPU looks at 32 bits, in which all must have a part."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "big")
