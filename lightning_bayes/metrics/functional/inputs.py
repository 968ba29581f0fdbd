"""What a metric accepts, checked in one place, and the flat float64 tensors it works on.

A metric never guesses. Probabilities are probabilities: values in [0, 1] that sum to one over the class axis, up to the
rounding of their dtype; logits are refused. Shapes alone tell the two layouts apart:

- `probs` `[B, C, ...]` with `target` `[B, ...]`: one probability per class;
- `probs` of `target`'s own shape: P(y = 1), read as the two classes `[1 - p, p]`.

Everything is upcast to float64 (float32 on devices without it), so that sums do not depend on how the data is split.

A mean over examples as two additive numbers, (Σ, n), which any number of processes can add up.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, format_value, integer, word


class MetricInputError(ValueError):
    """A metric was given something it cannot use; the message says what, and what to give instead."""


@cache
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device: float64, or float32 where it has none, as on Apple's MPS."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def classification_inputs(
    probs: Tensor, target: Tensor, ignore_index: int | None = None, validate: bool = True
) -> tuple[Tensor, Tensor]:
    """Probabilities `[N, C]` and labels `[N]`, flattened over dense positions, ignored labels dropped."""
    check_tensors(probs=probs, target=target)
    check_label(ignore_index)
    if not probs.is_floating_point():
        raise MetricInputError(f"probs must be floating-point probabilities, got {probs.dtype}.")
    if target.is_floating_point() or target.is_complex():
        raise MetricInputError(f"target must hold integer class labels, got {target.dtype}.")
    tolerance = max(1e-4, 4 * torch.finfo(probs.dtype).eps)
    probs, target = _widen(probs), target.long()
    if probs.shape == target.shape:
        if validate:
            _refuse_one_hot(probs, target, tolerance)
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
    mean: Tensor, variance: Tensor, target: Tensor, validate: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and target as flat `[N]` tensors; every element counts once."""
    check_tensors(mean=mean, variance=variance, target=target)
    if not mean.shape == variance.shape == target.shape:
        raise MetricInputError(
            f"mean, variance and target must have one shape, got {list(mean.shape)}, {list(variance.shape)} and "
            f"{list(target.shape)}."
        )
    mean, variance, target = (_widen(x).reshape(-1) for x in (mean, variance, target))  # [N]
    if validate:
        for name, value in (("mean", mean), ("variance", variance), ("target", target)):
            if not bool(value.isfinite().all()):
                raise MetricInputError(f"{name} must be finite, but holds NaN or infinity.")
        if not bool((variance > 0).all()):
            raise MetricInputError(f"variance must be positive, got a minimum of {float(variance.min()):g}.")
    return mean, variance, target


def score_inputs(score: Tensor, label: Tensor, names: tuple[str, str], validate: bool = True) -> tuple[Tensor, Tensor]:
    """A real-valued score and a 0/1 label as flat `[N]` tensors; infinite scores are ordered like any other."""
    check_tensors(**{names[0]: score, names[1]: label})
    if score.shape != label.shape:
        raise MetricInputError(
            f"{names[0]} and {names[1]} must have one shape, got {list(score.shape)} and {list(label.shape)}."
        )
    score, label = _widen(score).reshape(-1), _widen(label).reshape(-1)  # [N]
    if validate:
        if bool(score.isnan().any()):
            raise MetricInputError(f"{names[0]} holds NaN.")
        if not bool(((label == 0) | (label == 1)).all()):
            raise MetricInputError(f"{names[1]} must be boolean, or hold only 0 and 1.")
    return score, label


def check_tensors(**given: Any) -> None:
    """Refuse what is no tensor of real numbers (or of truth values)."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise MetricInputError(f"{name} must be a tensor, got {format_value(value)}; use torch.as_tensor.")
        if value.is_complex():
            raise MetricInputError(f"{name} must be real, got {value.dtype}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse an option that is not one of `choices`."""
    word(name, value, choices, MetricInputError)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse a number, of bins or classes, that is not a whole one."""
    count(name, value, least, MetricInputError)


def check_label(ignore_index: Any) -> None:
    """Refuse a label that no target can have."""
    if ignore_index is not None:
        integer("ignore_index", ignore_index, MetricInputError)


def _widen(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.device))


def _refuse_one_hot(probs: Tensor, target: Tensor, tolerance: float) -> None:
    """By their shape they would be read as labels of their own, but labels of their own hardly ever sum to one in every
    example, in `probs` and in `target` alike."""
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
            "probs has a class axis of length 1; squeeze it, and P(y = 1) of target's shape is read as two classes."
        )
    if not bool(((probs >= 0) & (probs <= 1 + tolerance)).all()):
        raise MetricInputError("probs must lie in [0, 1] and hold no NaN; apply a softmax or sigmoid to logits first.")
    error = (probs.sum(-1) - 1).abs()  # [N]
    if bool((error > tolerance).any()):
        raise MetricInputError(
            f"probs must sum to one over the class axis (1), but are off by up to {float(error.max()):.3g}."
        )


def sum_and_count(value: Tensor) -> Tensor:
    """(Σ value, number of values) of a tensor `[N]`: `[2]`."""
    return torch.stack([value.sum(), value.new_tensor(value.numel())])


def mean_compute(sums: Tensor) -> Tensor:
    """Σ / n; NaN where nothing was counted."""
    return sums[0] / sums[1]
