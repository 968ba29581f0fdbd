"""Whether several passes gave the same examples in the same order, by one number of each pass's outputs `f`:

    Σₙ Σ_c cos(n + √2 c) fₙ_c,

which examples that change places change by about `‖f‖`. Labels that are drawn (`curvature="fisher_mc"`) belong to an
example's place: in another order, a later pass is one over other labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.network import Processes
from lightning_bayes.network.accumulation import float64_device, in_float64

WANTED = "the same examples in the same order in each pass"
REMEDY = "pass a loader with shuffle=False and without random transforms, or use curvature='ggn'"


class PassOrder:
    """The numbers of all passes, of one process's examples."""

    def __init__(self, curvature: str) -> None:
        self._is_drawn = curvature == "fisher_mc"
        self._passes: list[Tensor] = []  # [2] each
        self._rounding = torch.finfo(torch.float64).eps
        self.begin()

    def begin(self) -> None:
        """A pass; the first has begun."""
        # On the outputs' device as soon as there are some.
        self._passes.append(torch.zeros(2, dtype=torch.float64, device="cpu"))

    def add(self, outputs: Tensor, examples: Tensor) -> None:
        """A batch, with the places of its examples."""
        if not self._is_drawn:
            return
        self._rounding = max(self._rounding, torch.finfo(outputs.dtype).eps)
        f = in_float64(outputs.reshape(len(outputs), -1))  # [B, C]
        c = 2**0.5 * torch.arange(f.shape[1], dtype=torch.float64, device=f.device)
        number = (f * (examples.to(c.device).unsqueeze(1) + c).cos()).sum()
        self._passes[-1] = self._passes[-1].to(f.device) + torch.stack([number, f.square().sum()])

    def is_same(self, processes: Processes, device: torch.device) -> bool:
        """In the last pass as in the first, on all processes, or nothing is drawn. Rounding is far below its root; two
        of 100,000 examples that change places are ten times that in float32."""
        if not self._is_drawn:
            return True
        first, last = numbers = torch.stack([self._passes[i].to(float64_device(device)) for i in (0, -1)])
        processes.sum_([numbers])
        return bool((first[0] - last[0]).abs() <= self._rounding**0.5 * first[1].sqrt())
