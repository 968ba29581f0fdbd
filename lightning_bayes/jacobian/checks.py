"""What must hold of a network and its outputs, and whether two ways to the same numbers agree.

What is wrong with a batch, noted without waiting for the device that computes it.

A look at one number of a tensor makes the host wait until the device has computed it. So a few numbers of each batch
stay on the device: of the first batch they are looked at as soon as it is through, then those of many at once.

Whether several passes gave the same examples in the same order, by one number of each pass's outputs `f`:

    Σₙ Σ_c cos(n + √2 c) fₙ_c,

which examples that change places change by about `‖f‖`. Labels that are drawn (`curvature="fisher_mc"`) belong to an
example's place: in another order, a later pass is one over other labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, DataError, Processes, inputs
from lightning_bayes.network.accumulation import float64_device, in_float64

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of two ways to compute the same number; 16-bit: 0.1


def check_output(f: Any, size: int) -> None:
    if not isinstance(f, Tensor):
        raise CurvatureError(
            f"the network must return one tensor, but it returned {type(f).__name__}: name the entry that is f with "
            "output="
        )
    if f.ndim == 0 or f.shape[0] != size:
        raise CurvatureError(
            f"the network's output must have one row per example, but {size} examples gave an output of shape "
            f"{tuple(f.shape)}"
        )
    if not f.requires_grad:
        raise CurvatureError(
            "the network's output does not depend on any chosen parameter: is it computed under torch.no_grad(), or "
            "detached, or is the subset not used?"
        )


def check_finite(f: Tensor, x: Any, batch: int) -> None:
    if not f.isfinite().all():
        culprit = "its input has" if inputs.has_nonfinite(x) else "its weights or activations overflow: it has"
        raise DataError(f"batch {batch}: the network's output is not finite; {culprit} NaN or infinite values")


def check_examples_apart(network: nn.Module, f: Tensor, beside: Tensor) -> None:
    """The first examples must give what they give beside others."""
    apart = torch.linalg.vector_norm((f - beside[: len(f)]).detach())
    if apart > TOLERANCE.get(f.dtype, 0.1) * f.detach().norm() + 1e-30:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        modules = network.named_modules()
        norms = [name for name, norm in modules if isinstance(norm, kinds) and norm.running_mean is None]
        culprit = f"{', '.join(norms)}: batch norm without running statistics" if norms else "or is it random?"
        raise CurvatureError(
            f"the output of {type(network).__name__} for one example depends on another example of the batch "
            f"({culprit}); curvature needs examples that do not see each other"
        )


def agree(sums: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, bool]:
    """Whether two ways to a sum of gradients gave the same, up to rounding: that of each parameter's gradient, or, of a
    gradient that is zero up to rounding, that of the largest."""
    norms = {name: float(torch.linalg.vector_norm(g)) for name, g in true.items()}
    largest = max(norms.values(), default=0.0)
    close = {}
    for name, g in true.items():
        tolerance = TOLERANCE.get(g.dtype, 0.1) * norms[name] + 100 * torch.finfo(g.dtype).eps * largest + 1e-30
        close[name] = bool(torch.linalg.vector_norm(sums[name] - g) <= tolerance)
    return close


def random_numbers(*shape: int, like: Tensor) -> Tensor:
    """Normal, and the same in every call: for checks, which must not depend on a generator nor move one."""
    return torch.empty(shape, device="cpu").normal_(generator=torch.Generator().manual_seed(0)).to(like)


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
