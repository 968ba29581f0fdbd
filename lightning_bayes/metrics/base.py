"""The base class of the metrics: one additive float64 state, with the same value for any split, order or number of
processes.

The state of a metric is either `sums`, a tensor that batches and processes add up, or `rows`, all values seen, for
metrics that need all values together. Three properties of torchmetrics shape this file:

- `module.to(torch.bfloat16)` would cast the states, and a bfloat16 count stops at 256; these states keep their dtype.
- A process without data sends an empty placeholder with the metric's dtype and one axis; rows are therefore stored as
  flat float64 tensors.
- `MetricCollection` merges metrics permanently if their states agree after the first batch, as the states of 90 % and
  95 % coverage may. The name of a state therefore contains every setting that `update` depends on, so that different
  metrics are not merged.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import singledispatch
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bayes.arguments import flag
from lightning_bayes.metrics.functional.statistics import MetricInputError, accumulation_dtype, mean_compute


@singledispatch
def draw(metric: Metric, ax: Any, val: Any = None) -> tuple[Any, Any]:
    """Draw a metric and return (fig, ax). `lightning_bayes.plots` registers the function for each type of metric."""
    raise NotImplementedError(f"no plot is registered for {type(metric).__name__}: import lightning_bayes.plots.")


class AdditiveMetric(Metric):
    """Base class of the metrics. A subclass declares its state in `__init__` with `keep_sums` or `keep_rows`.

    Args:
        validate_args: check the values of each batch. `False` saves one device synchronisation per batch.
        kwargs: arguments of torchmetrics, such as `process_group` or `sync_on_compute`.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, validate_args: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validate_args = flag("validate_args", validate_args, MetricInputError)
        self.set_dtype(accumulation_dtype(torch.get_default_device()))

    def keep_sums(self, *shape: int, settings: Sequence[Any] = ()) -> None:
        """Declare one tensor of sums as the state."""
        dtype = accumulation_dtype(torch.get_default_device())
        self._declare(torch.zeros(shape, dtype=dtype), "sum", settings)

    def keep_rows(self, *shape: int, settings: Sequence[Any] = ()) -> None:
        """Declare all values seen as the state, each a row of `shape`."""
        self._row_shape = shape
        self._declare([], "cat", settings)

    def _declare(self, empty: Tensor | list[Tensor], reduction: str, settings: Sequence[Any]) -> None:
        self.keeps_rows = isinstance(empty, list)
        parts = ["rows" if self.keeps_rows else "sums", type(self).__name__, *map(str, settings)]
        self._state_name = "_".join(parts).replace(".", "_")  # torch allows no dots in names of buffers
        self.add_state(self._state_name, empty, dist_reduce_fx=reduction)

    def accumulate(self, new: Tensor) -> None:
        """Add the sums of a batch, or append its rows `[N, *shape]`."""
        new, state = new.detach(), getattr(self, self._state_name)
        if self.keeps_rows:
            state.append(new.reshape(-1))
        else:
            setattr(self, self._state_name, state + new)

    @property
    def sums(self) -> Tensor:
        """The sums so far: those of this process, or, inside `compute` and `gathered`, of all processes."""
        return getattr(self, self._state_name)

    @property
    def rows(self) -> Tensor:
        """All rows so far, `[N, *shape]`: those of this process, or, inside `compute` and `gathered`, of all
        processes."""
        state = getattr(self, self._state_name)
        if isinstance(state, list):  # the rows of the processes have not been gathered yet
            empty = torch.empty(0, dtype=accumulation_dtype(self.device), device=self.device)
            state = torch.cat(state) if state else empty
        return state.reshape(-1, *self._row_shape)

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which the state is gathered from all processes. Enter it on all of them."""
        return self.sync_context(dist_sync_fn=self.dist_sync_fn)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """Draw the metric's state, or the values `val` over time. Returns (fig, ax).

        `CalibrationError`, `RegressionCalibrationError`, `OODDetection` and `RiskCoverage` draw a diagram of their
        state, all other metrics the current value. With several processes, call it on all of them: the state is
        gathered first.
        """
        return draw.dispatch(type(self) if val is None else AdditiveMetric)(self, ax, val)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        def move(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=state.device)).device
            if not state.is_floating_point():
                return state.to(device)
            dtype = accumulation_dtype(device)  # some devices have no float64, so convert before moving there
            return state.to(device).to(dtype) if dtype == torch.float64 else state.to(dtype).to(device)

        return super()._apply(move, exclude_state)


class MeanMetric(AdditiveMetric):
    """A mean over examples, from the sums (Σ, n). NaN if nothing was counted."""

    batch_sums: ClassVar[Callable[..., Tensor]]  # computes (Σ, n) from the checked inputs of a batch

    def __init__(self, settings: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keep_sums(2, settings=settings)

    def compute(self) -> Tensor:
        """The mean over everything seen."""
        return mean_compute(self.sums)
