"""What is wrong with a batch, noted without waiting for the device that computes it.

A look at one number of a tensor makes the host wait until the device has computed it. So a few numbers of each batch
stay on the device: of the first batch they are looked at as soon as it is through, then those of many at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, inputs

EVERY = 64  # batches between two looks


class BatchChecks:
    """The outputs, inputs and targets of the batches of a pass; `overflowing` names a parameter whose sums are not
    finite."""

    def __init__(self, likelihood: Likelihood, overflowing: Callable[[], str | None]) -> None:
        self._likelihood, self._overflowing = likelihood, overflowing
        self._count = self._looked_at = 0  # batches
        self._noting = -1  # the last of which there is a note
        self._noted: Tensor | None = None  # four numbers of each that was not looked at yet [EVERY, 4]
        self._outputs = torch.empty(0)  # of no example
        self._with_nonfinite_input: int | None = None  # the first such batch

    def add(self, x: Any, f: Tensor, y: Tensor) -> Tensor:
        """Returns the targets, zero where they are wrong: such may not break what comes before the next look. Of parts
        of the same batch, which may come again, nothing is noted."""
        if type(self._likelihood).check is Likelihood.check:
            self._likelihood.check_fit(f, y)
        else:  # of the author's own
            self._likelihood.check(f, y)
        if self._noting == self._count:
            return y
        self._noting = self._count
        wrong = self._likelihood.wrong_targets(f, y)  # [*y.shape]
        first = y.flatten().take(wrong.flatten().byte().argmax().reshape(1))[0]
        numbers = (f.isfinite().all().logical_not(), inputs.nonfinite(x, f.device), wrong.any(), first)
        if self._noted is None:
            self._noted = torch.zeros(EVERY, len(numbers), dtype=torch.float64, device=f.device)
        self._noted[self._count - self._looked_at] = torch.stack([number.double() for number in numbers])
        self._outputs = f.new_empty(0, *f.shape[1:])
        return y.masked_fill(wrong, 0)

    def end_batch(self) -> None:
        self._count += 1
        if self._count == 1 or self._count % EVERY == 0:
            self.look()

    def look(self) -> None:
        """Raise what was wrong with the first bad batch since the last look."""
        numbers = [] if self._noted is None else self._noted[: self._count - self._looked_at].tolist()
        first, self._looked_at = self._looked_at, self._count
        for batch, (bad_output, bad_input, bad_target, target) in enumerate(numbers, start=first):
            if bad_output:
                culprit = "its input has" if bad_input else "its weights or activations overflow: it has"
                raise DataError(f"batch {batch}: the network's output is not finite; {culprit} NaN or infinite values")
            if bad_target:
                raise self._likelihood.wrong_target(target, self._outputs)
            if bad_input and self._with_nonfinite_input is None:
                self._with_nonfinite_input = batch
        if self._with_nonfinite_input is not None and (name := self._overflowing()) is not None:
            raise DataError(
                f"batch {self._with_nonfinite_input}: its input has NaN or infinite values, with which the curvature "
                f"of {name} is not finite"
            )
