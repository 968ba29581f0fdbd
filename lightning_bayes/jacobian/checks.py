"""Checks of a network's outputs, of the batches of a pass, and of the order of several passes.

Reading a value forces a device sync. So `BatchChecks` keeps a few numbers of each batch on the device; it reads those
of the first batch at once, and later those of many batches at a time.

`PassOrder` checks that several passes see the same examples in the same order, by comparing one number from the outputs
of each pass:

    Σₙ Σ_c cos(n + √2 c) fₙ_c,

which changes by about `‖f‖` if examples change places. Sampled labels (`curvature="fisher_mc"`) belong to an example's
position, so a pass in another order would use other labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, DataError, Processes, inputs
from lightning_bayes.network.float64 import float64_device, in_float64
from lightning_bayes.network.output import network_name

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # allowed relative difference of two results; 16-bit: 0.1
CHECK_INTERVAL = 64  # batches between two reads
SAME_ORDER = "the same examples in the same order in each pass"
ORDER_REMEDY = "pass a loader with shuffle=False and without random transforms, or use curvature='ggn'"


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
        raise _nonfinite_output(f"batch {batch}", inputs.has_nonfinite(x))


def _nonfinite_output(batch: str, has_bad_input: bool) -> DataError:
    culprit = "its input has" if has_bad_input else "its weights or activations overflow: it has"
    return DataError(f"{batch}: the network's output is not finite; {culprit} NaN or infinite values")


def check_examples_apart(network: nn.Module, f: Tensor, in_batch: Tensor) -> None:
    """Raise unless a few examples alone give the same outputs, `f`, as in the first rows of a batch, `in_batch`."""
    distance = torch.linalg.vector_norm((f - in_batch[: len(f)]).detach())
    if distance > TOLERANCE.get(f.dtype, 0.1) * f.detach().norm() + 1e-30:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        modules = network.named_modules()
        norms = [name for name, norm in modules if isinstance(norm, kinds) and norm.running_mean is None]
        culprit = f"{', '.join(norms)}: batch norm without running statistics" if norms else "or the network is random"
        raise CurvatureError(
            f"the output of {network_name(network)} for one example depends on another example of the batch "
            f"({culprit}); curvature needs independent examples"
        )


def agree(sums: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, bool]:
    """Whether two sums of gradients agree up to rounding, relative to each parameter's gradient or, if that is zero up
    to rounding, to the largest gradient."""
    norms = {name: float(torch.linalg.vector_norm(g)) for name, g in true.items()}
    largest = max(norms.values(), default=0.0)
    close = {}
    for name, g in true.items():
        tolerance = TOLERANCE.get(g.dtype, 0.1) * norms[name] + 100 * torch.finfo(g.dtype).eps * largest + 1e-30
        close[name] = bool(torch.linalg.vector_norm(sums[name] - g) <= tolerance)
    return close


def random_numbers(*shape: int, like: Tensor) -> Tensor:
    """Normal numbers, the same in every call: checks must not depend on a generator or advance one."""
    return torch.empty(shape, device="cpu").normal_(generator=torch.Generator().manual_seed(0)).to(like)


class BatchChecks:
    """Checks of the outputs, inputs and targets of a pass's batches.

    Args:
        overflowing: A function that returns the name of a parameter whose sums are not finite, or None.
        unit: What messages call a batch.
    """

    def __init__(
        self, likelihood: Likelihood, overflowing: Callable[[], str | None] = lambda: None, unit: str = "batch"
    ) -> None:
        self._likelihood, self._overflowing, self._unit = likelihood, overflowing, unit
        self._count = self._n_read = 0  # batches
        self._last_recorded = -1
        self._pending: Tensor | None = None  # four numbers of each batch that is not read yet [CHECK_INTERVAL, 4]
        self._outputs = torch.empty(0, device="cpu")  # with the outputs' shape and dtype, but without examples
        self._nonfinite_input: int | None = None  # the first batch with NaN or infinity in its input

    def add(self, x: Any, f: Tensor, y: Tensor) -> Tensor:
        """Record a batch, and return the targets with zeros instead of invalid ones, so that the code runs until the
        next read. Only the first call for a batch counts; further calls may pass its examples one by one."""
        check_fit(self._likelihood, f, y)
        if self._last_recorded == self._count:
            return y
        self._last_recorded = self._count
        wrong, *of_targets = wrong_in(self._likelihood, f, y)
        numbers = (f.isfinite().all().logical_not(), inputs.nonfinite(x, f.device), *of_targets)
        if self._pending is None:
            device = float64_device(f.device)
            self._pending = torch.zeros(CHECK_INTERVAL, len(numbers), dtype=torch.float64, device=device)
        self._pending[self._count - self._n_read] = torch.stack([in_float64(number) for number in numbers])
        self._outputs = f.new_empty(0, *f.shape[1:])
        return y.masked_fill(wrong, 0)

    def end_batch(self) -> None:
        self._count += 1
        if self._count == 1 or self._count % CHECK_INTERVAL == 0:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise the error of the first bad batch since the last read."""
        numbers = [] if self._pending is None else self._pending[: self._count - self._n_read].tolist()
        first, self._n_read = self._n_read, self._count
        for batch, (bad_output, bad_input, bad_target, target) in enumerate(numbers, start=first):
            if bad_output:
                raise _nonfinite_output(f"{self._unit} {batch}", bool(bad_input))
            if bad_target:
                problem = self._likelihood.wrong_target(target, self._outputs)
                raise type(problem)(f"{self._unit} {batch}: {problem}")
            if bad_input and self._nonfinite_input is None:
                self._nonfinite_input = batch
        if self._nonfinite_input is not None and (name := self._overflowing()) is not None:
            raise DataError(
                f"{self._unit} {self._nonfinite_input}: its input has NaN or infinite values, so the "
                f"curvature of {name} is not finite"
            )


class FirstWrong:
    """Numbers that describe the first bad batch of many."""

    def __init__(self) -> None:
        self._pending: Tensor | None = None

    def note(self, is_wrong: Tensor, *numbers: Tensor) -> None:
        new = torch.stack([in_float64(number.detach()) for number in (is_wrong, *numbers)])
        self._pending = new if self._pending is None else torch.where(self._pending[0] > 0, self._pending, new)

    def read(self) -> list[float] | None:
        """The numbers since the last read, or None if nothing was wrong."""
        pending, self._pending = self._pending, None
        is_wrong, *numbers = [0.0] if pending is None else pending.tolist()
        return numbers if is_wrong else None


def check_fit(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Run the checks that need no device sync, or a `check` that the likelihood overrides."""
    if type(likelihood).check is Likelihood.check:
        likelihood.check_fit(f, y)
    else:
        likelihood.check(f, y)


def wrong_in(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which targets are invalid, whether any is, and the first invalid one."""
    wrong = likelihood.wrong_targets(f, y)  # [*y.shape]
    return wrong, wrong.any(), y.flatten().take(wrong.flatten().byte().argmax().reshape(1))[0]


class PassOrder:
    """The order of the examples in several passes of one process; only sampled labels depend on it."""

    def __init__(self, curvature: str) -> None:
        self._is_sampled = curvature == "fisher_mc"
        self._passes: list[Tensor] = []  # [2] each
        self._rounding = torch.finfo(torch.float64).eps
        self.begin()

    def begin(self) -> None:
        """Begin another pass. The constructor begins the first."""
        # The sum moves to the outputs' device with the first batch.
        self._passes.append(torch.zeros(2, dtype=torch.float64, device="cpu"))

    def add(self, outputs: Tensor, examples: Tensor) -> None:
        """Add a batch, with the positions of its examples."""
        if not self._is_sampled:
            return
        self._rounding = max(self._rounding, torch.finfo(outputs.dtype).eps)
        f = in_float64(outputs.reshape(len(outputs), -1))  # [B, C]
        c = 2**0.5 * torch.arange(f.shape[1], dtype=torch.float64, device=f.device)
        number = (f * (examples.to(c.device).unsqueeze(1) + c).cos()).sum()
        self._passes[-1] = self._passes[-1].to(f.device) + torch.stack([number, f.square().sum()])

    def is_same(self, processes: Processes, device: torch.device) -> bool:
        """Whether the last pass had the order of the first one, on all processes. The tolerance is the square root of
        the rounding error: in float32, swapping two of 100,000 examples exceeds it tenfold."""
        if not self._is_sampled:
            return True
        first, last = numbers = torch.stack([self._passes[i].to(float64_device(device)) for i in (0, -1)])
        processes.sum_([numbers])
        return bool((first[0] - last[0]).abs() <= self._rounding**0.5 * first[1].sqrt())
