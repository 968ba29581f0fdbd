"""Which examples' gradients a step of the optimizer has averaged, counted while training runs.

A step uses `Σ wᵢ gᵢ`, over examples that were drawn without replacement from `N`. At the optimum its square is on
average

    (N·Σ wᵢ² − (Σ wᵢ)²) · S²/(N − 1),

where `N·S²` is the diagonal of the centred empirical Fisher. A batch of `B` has `wᵢ = 1/B`, so that this is
`S²/B · (N − B)/(N − 1)`. Batches of uneven sizes, or several that are accumulated, count as the one `B` that has the
same average, over the steps that the optimizer remembers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EffectiveBatchSize:
    """Plain numbers, which a checkpoint holds."""

    n_data: int = 0  # the N examples that batches are drawn from
    n_targets: int = 0  # of one example; a mean loss averages over them too
    loss_scale: float = 0.0  # that the first batch's loss had; 0 for the default
    global_step: int = 0
    waiting: int = 0  # batches since the last step
    waiting_inverse: float = 0.0  # Σ 1/b over those
    steps: float = 0.0  # with the weights of the optimizer's own average, as what follows
    squares: float = 0.0  # of Σ wᵢ²
    sums: float = 0.0  # of (Σ wᵢ)²

    @property
    def size(self) -> float:
        """`B`, the harmonic mean over steps where each has used one batch."""
        if not self.steps:
            return 1.0
        squares, sums = self.squares / self.steps, self.sums / self.steps
        return 1 / (squares + (1 - sums) / self.n_data if self.n_data else squares)

    def add(self, examples: int) -> None:
        """A batch, of all processes together, whose mean loss goes into the next step."""
        self.waiting, self.waiting_inverse = self.waiting + 1, self.waiting_inverse + 1 / examples

    def count_step(self, global_step: int, parts: int | None, decay: float) -> None:
        """If there was a step: it has used the sum of the waiting batches' means over `parts`, by default their
        number; the average that the optimizer keeps forgets by `decay`."""
        if global_step == self.global_step or not self.waiting:
            return
        parts = parts or self.waiting
        self.steps = decay * self.steps + 1
        self.squares = decay * self.squares + self.waiting_inverse / parts**2
        self.sums = decay * self.sums + (self.waiting / parts) ** 2
        self.global_step, self.waiting, self.waiting_inverse = global_step, 0, 0.0
