"""The parts that all metrics share: checked inputs as flat float64 tensors, and sums that batches and processes add up.

Metrics take probabilities, not logits: values in [0, 1] that sum to one over the class axis, up to the rounding of
their dtype. The shapes of `probs` and `target` select the layout:

- `probs` `[B, C, ...]` with `target` `[B, ...]`: one probability per class;
- `probs` with the shape of `target`: P(y = 1), read as the two classes `[1 - p, p]`.

Inputs are upcast to float64 (float32 on devices without it), so results do not depend on how the data is split.

A mean over examples is the pair (Σ, n). The other metrics sum a row of values `v` per example, grouped by a score `s`:

- **cells**: `n` cells of equal width on `[low, high]`, with `sums[k] = Σ v` over the examples in cell `k`. Memory is
  constant. Scores outside the range count in the outermost cells.
- **ties**: one group per distinct score. The sums do not depend on the order of equal scores, so the metrics do not
  depend on the order or split of the data.

Both groupings return rows in ascending order of the score, so exact metrics and histograms share their final
computation.
"""

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bayes.arguments import format_value, integer

Norm = Literal["l1", "l2", "max"]


class MetricInputError(ValueError):
    """Raised if a metric receives an input or setting that it cannot use; the message says what to pass instead."""


@cache
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device: float64, or float32 on devices without it, such as Apple's MPS."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def classification_inputs(
    probs: Tensor, target: Tensor, ignore_index: int | None = None, validate: bool = True
) -> tuple[Tensor, Tensor]:
    """Probabilities `[N, C]` and labels `[N]`, flattened over dense positions, without ignored labels."""
    check_tensors(probs=probs, target=target)
    check_label(ignore_index)
    if not probs.is_floating_point():
        raise MetricInputError(f"probs must be floating-point probabilities, got {probs.dtype}.")
    if target.is_floating_point() or target.is_complex():
        raise MetricInputError(f"target must contain integer class labels, got {target.dtype}.")
    tolerance = max(1e-4, 4 * torch.finfo(probs.dtype).eps)
    probs, target = _widen(probs), target.long()
    if probs.shape == target.shape:
        if validate:
            _check_not_one_hot(probs, target, tolerance)
        probs = torch.stack([1 - probs, probs], dim=-1)  # [..., 2]
    elif probs.ndim >= 2 and probs.shape[:1] + probs.shape[2:] == target.shape:
        probs = probs.movedim(1, -1)  # [B, ..., C]
    else:
        raise MetricInputError(
            f"probs must have shape [B, C, ...] for target [B, ...], or target's own shape for P(y = 1); "
            f"got probs {list(probs.shape)} and target {list(target.shape)}."
        )
    n_classes = probs.shape[-1]
    probs, target = probs.reshape(-1, n_classes), target.reshape(-1)  # [N, C], [N]
    if ignore_index is not None:
        counted = target != ignore_index  # [N]
        probs, target = probs[counted], target[counted]
    if validate:
        _check_probabilities(probs, tolerance)
        if bool(((target < 0) | (target >= n_classes)).any()):
            raise MetricInputError(
                f"target must lie in 0..{n_classes - 1} for {n_classes} classes, got values from {int(target.min())} "
                f"to {int(target.max())}; pass ignore_index to skip a label."
            )
    return probs, target


def regression_inputs(
    mean: Tensor, variance: Tensor, target: Tensor, df: float | Tensor | None = None, validate: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Mean, variance, target and degrees of freedom as flat `[N]` tensors; each element is one prediction."""
    check_tensors(mean=mean, variance=variance, target=target)
    if not mean.shape == variance.shape == target.shape:
        raise MetricInputError(
            f"mean, variance and target must have one shape, got {list(mean.shape)}, {list(variance.shape)} and "
            f"{list(target.shape)}."
        )
    freedom = None if df is None else _degrees_of_freedom(df, mean, validate)
    mean, variance, target = (_widen(x).reshape(-1) for x in (mean, variance, target))  # [N]
    if validate:
        for name, value in (("mean", mean), ("variance", variance), ("target", target)):
            if not bool(value.isfinite().all()):
                raise MetricInputError(f"{name} must be finite, but contains NaN or infinity.")
        if not bool((variance > 0).all()):
            raise MetricInputError(f"variance must be positive, got a minimum of {float(variance.min()):g}.")
    return mean, variance, target, freedom


def _degrees_of_freedom(df: float | Tensor, mean: Tensor, validate: bool) -> Tensor:
    """# [N]"""
    freedom: Any = df
    if isinstance(df, (int, float)) and not isinstance(df, bool):
        freedom = mean.new_tensor(df, dtype=accumulation_dtype(mean.device)).expand(mean.shape)
    check_tensors(df=freedom)
    if freedom.shape != mean.shape:
        raise MetricInputError(f"df must be a number, or have the mean's shape {list(mean.shape)}.")
    freedom = _widen(freedom).reshape(-1)
    if validate and not bool((freedom > 2).all()):
        raise MetricInputError(f"df must be more than 2, or the variance is infinite; got {float(freedom.min()):g}.")
    return freedom


def score_inputs(score: Tensor, label: Tensor, names: tuple[str, str], validate: bool = True) -> tuple[Tensor, Tensor]:
    """A real-valued score and a 0/1 label as flat `[N]` tensors."""
    score_name, label_name = names
    check_tensors(**{score_name: score, label_name: label})
    if score.shape != label.shape:
        raise MetricInputError(
            f"{score_name} and {label_name} must have one shape, got {list(score.shape)} and {list(label.shape)}."
        )
    score, label = flat_score(score_name, score, validate), _widen(label).reshape(-1)  # [N]
    if validate and not bool(((label == 0) | (label == 1)).all()):
        raise MetricInputError(f"{label_name} must be boolean, or contain only 0 and 1.")
    return score, label


def flat_score(name: str, score: Tensor, validate: bool = True) -> Tensor:
    """A real-valued score as a flat `[N]` tensor. Infinite scores are allowed: only their order matters."""
    check_tensors(**{name: score})
    score = _widen(score).reshape(-1)  # [N]
    if validate and bool(score.isnan().any()):
        raise MetricInputError(f"{name} contains NaN.")
    return score


def check_tensors(**values: Any) -> None:
    """Raise an error for values that are not real (or boolean) tensors."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise MetricInputError(f"{name} must be a tensor, got {format_value(value)}; use torch.as_tensor.")
        if value.is_complex():
            raise MetricInputError(f"{name} must be real, got {value.dtype}.")


def check_label(ignore_index: int | None) -> int | None:
    return None if ignore_index is None else integer("ignore_index", ignore_index, MetricInputError)


def _widen(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.device))


def _check_not_one_hot(probs: Tensor, target: Tensor, tolerance: float) -> None:
    """Raise an error for one-hot targets. They have the shape of `probs`, like independent yes/no labels; but only with
    one-hot targets do all rows of both tensors sum to one."""
    if probs.ndim < 2 or probs.shape[1] < 2 or probs.numel() == 0:
        return
    if bool((target.sum(1) == 1).all()) and bool(((probs.sum(1) - 1).abs() <= tolerance).all()):
        raise MetricInputError(
            f"target of shape {list(target.shape)} is one-hot, as probs sum to one over the class axis (1): pass class "
            "labels, target.argmax(1)."
        )


def _check_probabilities(probs: Tensor, tolerance: float) -> None:
    if probs.shape[-1] < 2:
        raise MetricInputError(
            "probs has a class axis of length 1. Squeeze it to pass P(y = 1) in the shape of target."
        )
    if not bool(((probs >= 0) & (probs <= 1 + tolerance)).all()):
        raise MetricInputError(
            "probs must be in [0, 1] and contain no NaN; apply a softmax or sigmoid to logits first."
        )
    error = (probs.sum(-1) - 1).abs()  # [N]
    if bool((error > tolerance).any()):
        raise MetricInputError(
            f"probs must sum to one over the class axis (1), but are off by up to {float(error.max()):.3g}."
        )


def sum_and_count(value: Tensor) -> Tensor:
    """(Σ value, number of values) of a tensor `[N]`: `[2]`."""
    return torch.stack([value.sum(), value.new_tensor(value.numel())])


def mean_compute(sums: Tensor) -> Tensor:
    """Σ / n; NaN if nothing was counted."""
    return sums[0] / sums[1]


def norm_of_gaps(gap: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """The weighted mean (`"l1"`), root mean square (`"l2"`) or largest (`"max"`) of gaps `[K]`.

    The weights add up to one. If nothing was counted, the weights and the result are NaN.
    """
    if norm == "l1":
        return (weight * gap).sum()
    if norm == "l2":
        return (weight * gap.square()).sum().sqrt()
    return torch.where(weight.isnan(), weight, gap).max()


def cell_sums(score: Tensor, values: Tensor, n: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Sums of `values` `[N, K, V]` over `n` equal cells of `score` `[N, K]`, column by column: `[K, n, V]`.

    Cells are closed on the left, the last one on both sides.

    >>> cell_sums(torch.tensor([[0.1], [0.2], [0.9]]), torch.ones(3, 1, 1), n=2)
    tensor([[[2.],
             [1.]]])
    """
    columns = score.shape[1]
    # Clamp before the conversion: the integer value of an infinite score is undefined.
    cell = ((score - low) / (high - low) * n).clamp(0, n - 1).long()  # [N, K]
    index = (cell + n * torch.arange(columns, device=cell.device)).reshape(-1)  # [N·K]
    flat = values.reshape(-1, values.shape[-1])  # [N·K, V]
    return flat.new_zeros(columns * n, flat.shape[-1]).index_add_(0, index, flat).reshape(columns, n, -1)


def tie_sums(score: Tensor, values: Tensor) -> Tensor:
    """Sums of `values` `[N, V]` over the G distinct values of `score` `[N]`, in ascending order: `[G, V]`.

    >>> tie_sums(torch.tensor([2.0, -1.0, 2.0]), torch.tensor([[1.0], [5.0], [2.0]]))
    tensor([[5.],
            [3.]])
    """
    distinct, group = torch.unique(score, return_inverse=True)  # [G], [N]
    return values.new_zeros(len(distinct), values.shape[-1]).index_add_(0, group, values)


def equal_mass_sums(sums: Tensor, n: int) -> Tensor:
    """Regroup ordered sums `[G, V]`, whose first value is a count, into `n` bins of exactly equal count: `[n, V]`.

    A group that straddles a border is split in proportion, as if its examples were in random order.

    >>> equal_mass_sums(torch.tensor([[3.0, 6.0], [1.0, 9.0]]), n=2)  # count, value
    tensor([[ 2.,  4.],
            [ 2., 11.]])
    """
    sums = sums[sums[:, 0] > 0]  # [G, V]
    if len(sums) == 0:
        return sums.new_zeros(n, sums.shape[-1])
    running = torch.cat([torch.zeros_like(sums[:1]), running_sum(sums)])  # [G + 1, V]
    mass = running[:, 0].contiguous()  # [G + 1]
    border = torch.arange(n + 1, dtype=mass.dtype, device=mass.device) * mass[-1] / n  # [n + 1]
    group = (torch.searchsorted(mass, border, right=True) - 1).clamp(max=len(sums) - 1)  # [n + 1]
    share = (border - mass[group]) / sums[group, 0]  # [n + 1]
    return (running[group] + share[:, None] * sums[group]).diff(dim=0)


def running_sum(t: Tensor) -> Tensor:
    """`t.cumsum(0)`; under `torch.use_deterministic_algorithms` it runs on the CPU, because CUDA has no deterministic
    kernel.

    >>> running_sum(torch.tensor([1.0, 2.0, 4.0]))
    tensor([1., 3., 7.])
    """
    if torch.are_deterministic_algorithms_enabled() and t.device.type != "cpu":
        return t.cpu().cumsum(0).to(t.device)
    return t.cumsum(0)
