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
        self._count = 0  # of batches
        self._noted: list[tuple[int, Tensor]] = []
        self._outputs = torch.empty(0)  # of no example
        self._with_nonfinite_input: int | None = None  # the first such batch

    def add(self, x: Any, f: Tensor, y: Tensor) -> Tensor:
        """Returns the targets, zero where they are wrong: such may not break what comes before the next look."""
        if type(self._likelihood).check is Likelihood.check:
            self._likelihood.check_fit(f, y)
        else:  # of the author's own
            self._likelihood.check(f, y)
        wrong = self._likelihood.wrong_targets(f, y)  # [*y.shape]
        first = y.flatten().take(wrong.flatten().byte().argmax().reshape(1))[0]
        numbers = (f.isfinite().all().logical_not(), inputs.nonfinite(x, f.device), wrong.any(), first)
        self._noted.append((self._count, torch.stack([number.double() for number in numbers])))
        self._outputs = f[:0]
        return y.masked_fill(wrong, 0)

    def end_batch(self) -> None:
        self._count += 1
        if self._count == 1 or self._count % EVERY == 0:
            self.look()

    def look(self) -> None:
        """Raise what was wrong with the first bad batch since the last look."""
        if not self._noted:
            return
        batches, numbers = zip(*self._noted, strict=True)
        self._noted = []
        for batch, (bad_output, bad_input, bad_target, target) in zip(
            batches, torch.stack(numbers).tolist(), strict=True
        ):
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
