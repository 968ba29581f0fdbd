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
from lightning_bayes.network.accumulation import float64_device, in_float64

EVERY = 64  # batches between two looks


class BatchChecks:
    """The outputs, inputs and targets of the batches of a pass; `overflowing` names a parameter whose sums are not
    finite, and `what` is counted."""

    def __init__(
        self, likelihood: Likelihood, overflowing: Callable[[], str | None] = lambda: None, what: str = "batch"
    ) -> None:
        self._likelihood, self._overflowing, self._what = likelihood, overflowing, what
        self._count = self._looked_at = 0  # batches
        self._noting = -1  # the last of which there is a note
        self._noted: Tensor | None = None  # four numbers of each that was not looked at yet [EVERY, 4]
        self._outputs = torch.empty(0, device="cpu")  # of no example
        self._with_nonfinite_input: int | None = None  # the first such batch

    def add(self, x: Any, f: Tensor, y: Tensor) -> Tensor:
        """Returns the targets, zero where they are wrong: such may not break what comes before the next look. Of parts
        of the same batch, which may come again, nothing is noted."""
        check_fit(self._likelihood, f, y)
        if self._noting == self._count:
            return y
        self._noting = self._count
        wrong, *of_targets = wrong_in(self._likelihood, f, y)
        numbers = (f.isfinite().all().logical_not(), inputs.nonfinite(x, f.device), *of_targets)
        if self._noted is None:
            self._noted = torch.zeros(EVERY, len(numbers), dtype=torch.float64, device=float64_device(f.device))
        self._noted[self._count - self._looked_at] = torch.stack([in_float64(number) for number in numbers])
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
                raise DataError(
                    f"{self._what} {batch}: the network's output is not finite; {culprit} NaN or infinite values"
                )
            if bad_target:
                problem = self._likelihood.wrong_target(target, self._outputs)
                raise type(problem)(f"{self._what} {batch}: {problem}")
            if bad_input and self._with_nonfinite_input is None:
                self._with_nonfinite_input = batch
        if self._with_nonfinite_input is not None and (name := self._overflowing()) is not None:
            raise DataError(
                f"{self._what} {self._with_nonfinite_input}: its input has NaN or infinite values, with which the "
                f"curvature of {name} is not finite"
            )


class FirstWrong:
    """The numbers of the first batch with which something is wrong, of any number of batches."""

    def __init__(self) -> None:
        self._noted: Tensor | None = None

    def note(self, is_wrong: Tensor, *numbers: Tensor) -> None:
        new = torch.stack([in_float64(number.detach()) for number in (is_wrong, *numbers)])
        self._noted = new if self._noted is None else torch.where(self._noted[0] > 0, self._noted, new)

    def look(self) -> list[float] | None:
        """The numbers since the last look; None if nothing was wrong."""
        noted, self._noted = self._noted, None
        is_wrong, *numbers = [0.0] if noted is None else noted.tolist()
        return numbers if is_wrong else None


def check_fit(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """What is free; and all that a `check` of the author's own does."""
    if type(likelihood).check is Likelihood.check:
        likelihood.check_fit(f, y)
    else:
        likelihood.check(f, y)


def wrong_in(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which targets are wrong, whether any is, and the first that is."""
    wrong = likelihood.wrong_targets(f, y)  # [*y.shape]
    return wrong, wrong.any(), y.flatten().take(wrong.flatten().byte().argmax().reshape(1))[0]
