"""What the metrics here share: one additive float64 state, the same value for any split, order or number of processes.

A metric's state is either `sums`, a tensor that batches and processes add up, or `rows`, all the values seen where
only the whole sample gives the exact answer. Three habits of torchmetrics are dealt with once, here:

- `module.to(torch.bfloat16)` would cast the states, and a bfloat16 count stops at 256: ours keep their dtype;
- a process without data sends an empty placeholder of the metric's dtype and one axis: so rows are flat float64;
- `MetricCollection` merges metrics for good if their states agree after the first batch, as those of 90 % and 95 %
  coverage may: so a state's name carries every setting that matters to `update`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bayes.arguments import flag
from lightning_bayes.metrics.functional.inputs import MetricInputError, accumulation_dtype, mean_compute


class AdditiveMetric(Metric):
    """Base of the metrics here; a subclass declares its state in `__init__` with `keep_sums` or `keep_rows`.

    Args:
        validate_args: check the values of every batch. Off, it saves the device a synchronisation per batch.
        kwargs: torchmetrics' own, such as `process_group` or `sync_on_compute`.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, validate_args: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validate_args = flag("validate_args", validate_args, MetricInputError)
        self._state_name = ""
        self.set_dtype(accumulation_dtype(torch.get_default_device()))

    def keep_sums(self, *shape: int, settings: Sequence[Any] = ()) -> None:
        """Let the state be one tensor of sums."""
        self._state_name = _state_name("sums", type(self), settings)
        dtype = accumulation_dtype(torch.get_default_device())
        self.add_state(self._state_name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def keep_rows(self, *shape: int, settings: Sequence[Any] = ()) -> None:
        """Let the state be all values seen, each a row of `shape`."""
        self._state_name = _state_name("rows", type(self), settings)
        self._row_shape = shape
        self.add_state(self._state_name, [], dist_reduce_fx="cat")

    def accumulate(self, new: Tensor) -> None:
        """Add a batch's sums, or append its rows `[N, *shape]`."""
        new, state = new.detach(), getattr(self, self._state_name)
        if isinstance(state, list):
            state.append(new.reshape(-1))
        else:
            setattr(self, self._state_name, state + new)

    @property
    def sums(self) -> Tensor:
        """The sums so far; over all processes inside `compute`."""
        return getattr(self, self._state_name)

    @property
    def rows(self) -> Tensor:
        """All rows so far, `[N, *shape]`; over all processes inside `compute`."""
        state = getattr(self, self._state_name)
        if isinstance(state, list):
            nothing = torch.empty(0, dtype=accumulation_dtype(self.device), device=self.device)
            state = torch.cat(state) if state else nothing
        return state.reshape(-1, *self._row_shape)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """Draw `val`, a value or a list of values over time; without it, what the metric holds. Returns (fig, ax).

        Under several processes call it on all of them: what the metric holds is gathered first.
        """
        from lightning_bayes.plots.figure import require_matplotlib

        require_matplotlib()
        return self._plot(val, ax)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        def move(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=state.device)).device
            if not state.is_floating_point():
                return state.to(device)
            dtype = accumulation_dtype(device)  # a device without float64 can neither receive nor make it
            return state.to(device).to(dtype) if dtype == torch.float64 else state.to(dtype).to(device)

        return super()._apply(move, exclude_state)


class MeanMetric(AdditiveMetric):
    """A metric that is a mean over examples, from the sums (Σ, n). NaN where nothing was counted."""

    def __init__(self, settings: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keep_sums(2, settings=settings)

    def compute(self) -> Tensor:
        """The mean over everything seen."""
        return mean_compute(self.sums)


def _state_name(kind: str, metric: type, settings: Sequence[Any]) -> str:
    return "_".join([kind, metric.__name__, *map(str, settings)]).replace(".", "_")  # a state's name takes no dots
