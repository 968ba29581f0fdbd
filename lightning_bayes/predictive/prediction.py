"""`Prediction`: the result of a predictive, as tensors.

A `Prediction` stores the results of the integral over outputs. Everything else follows from them and is computed on
access. The first dimension of each tensor is the `B` examples; dense outputs have positions after classes or outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_bayes.arguments import between, format_value, instance, listed
from lightning_bayes.likelihoods import ClassPredictive, Predictive
from lightning_bayes.metrics.functional.student_t import half_width, student_entropy, student_nll
from lightning_bayes.network import DataError

if TYPE_CHECKING:
    import numpy as np

Self = TypeVar("Self", bound="TensorFields")


@dataclass(frozen=True, eq=False)
class TensorFields:
    """A dataclass of tensors, some of which may be None."""

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """The same tensors on another device or in another dtype; takes the arguments of `Tensor.to`."""
        return self.map(lambda t: t.to(*args, **kwargs))

    def cpu(self: Self) -> Self:
        return self.to(torch.device("cpu"))

    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply `change` to each tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(t) for name, t in values.items() if isinstance(t, Tensor)})


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(TensorFields):
    """The predictive distribution of a batch.

    Classification has `probs` `[B, C, …]`, and yes/no labels have `probs` `[B, …]`, the probability of yes. A
    regression has the `mean` and `variance` (noise included) of a Gaussian, or, with `df` degrees of freedom, of a
    Student-t with the same variance and heavier tails. All predictions have the two sources of uncertainty per output
    (Kwon et al. 2020): `epistemic`, which more data would reduce, and `aleatoric`, which is in the data. They also have
    the `entropy` of the predictive distribution and its epistemic part, the `mutual_information` of target and weights,
    in nats per label or output.

    `novelty` `[B]` is the share of a weak prior's variance at the input that the data have not removed, and `novelty_p`
    the share of held-out inputs that are at least as novel. If an input comes from the same distribution as the
    held-out ones, `novelty_p ≤ α` has a probability of at most α. The `energy` of classes, `−log Σ_c exp f_c` of the
    outputs (Liu et al. 2020), has the shape of the entropy.

    `prediction[examples]` selects examples by a number, a slice, a list or a mask; a number keeps the batch dimension.
    `Prediction.cat` joins the batches that `trainer.predict` returns.
    """

    epistemic: Tensor
    aleatoric: Tensor
    entropy: Tensor
    probs: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    df: Tensor | None = None  # more than 2; None or infinity: a Gaussian
    mutual_information: Tensor | None = None  # None: not known
    novelty: Tensor | None = None  # [B]; None: not known
    novelty_p: Tensor | None = None  # [B]; None: no held-out data
    energy: Tensor | None = None  # None: the targets are not classes

    @staticmethod
    def from_predictive(predictive: Predictive, df: float | Tensor = math.inf) -> Prediction:
        information = predictive.mutual_information
        prediction = Prediction(
            predictive.epistemic, predictive.aleatoric, predictive.entropy, mutual_information=information
        )
        if isinstance(predictive, ClassPredictive):
            return replace(prediction, probs=predictive.probs)
        mean, variance = predictive.mean, predictive.variance
        if not isinstance(df, Tensor):
            if math.isinf(df):
                return replace(prediction, mean=mean, variance=variance)
            df = torch.full_like(mean, df)
        return replace(prediction, mean=mean, variance=variance, df=df, entropy=student_entropy(variance, df))

    @property
    def kind(self) -> str:
        """ "classification", "binary" or "regression"."""
        if self.probs is None:
            return "regression"
        return "binary" if self.probs.shape == self.entropy.shape else "classification"

    @property
    def label(self) -> Tensor:
        """The most likely class; for yes/no labels, 1 if the probability of a yes exceeds 0.5.  # [B, …]"""
        probs = self._of_classes("label", "its best guess is `mean`")
        return (probs > 0.5).long() if self.kind == "binary" else probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`.  # [B, …]"""
        probs = self._of_classes("confidence", "use `std` or `interval(level)`")
        return torch.maximum(probs, 1 - probs) if self.kind == "binary" else probs.amax(1)

    @property
    def std(self) -> Tensor:
        """The standard deviation of a real target, noise included.  # [B, …]"""
        return self._of_real_targets("std", "use `confidence`, `entropy` or `epistemic`")[1].sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that contains a real target with probability `level`, for each
        output separately.  # [B, …] each"""
        between("level", level, 0, 1, borders=False)
        way = "use sets of classes instead: posterior.conformalize(loader, level).sets(prediction)"
        mean, variance = self._of_real_targets("interval", way)
        half = half_width(level, variance, self.df)
        return mean - half, mean + half

    def log_prob(self, y: Tensor) -> Tensor:
        """The log-density of each real target.  # [B, …]"""
        instance("y", y, Tensor, "a tensor of targets")
        mean, variance = self._of_real_targets("log_prob", "take the log of `probs`")
        y = real_targets(mean, y.to(mean.device))
        return -student_nll((y - mean).square() / variance, variance, self.df)

    @property
    def epistemic_score(self) -> Tensor:
        """One number per example: the epistemic variance summed over outputs.  # [B]"""
        return self.epistemic.flatten(1).sum(1) if self.epistemic.ndim > 1 else self.epistemic

    @property
    def entropy_score(self) -> Tensor:
        """One number per example: the entropy, averaged over positions or labels.  # [B]"""
        return self.entropy.flatten(1).mean(1) if self.entropy.ndim > 1 else self.entropy

    def __len__(self) -> int:
        return len(self.epistemic)

    def __getitem__(self, examples: Any) -> Prediction:
        """The prediction of some examples: a number, a slice, a list or tensor of numbers, or a mask `[B]`."""
        index = _rows(examples, len(self))
        return self.map(lambda t: t[index if isinstance(index, slice) else index.to(t.device)])

    def __iter__(self) -> Iterator[Prediction]:
        """Iterate over the examples, as predictions of one example each."""
        return (self[n] for n in range(len(self)))

    @staticmethod
    def cat(predictions: Sequence[Prediction]) -> Prediction:
        """The predictions of several batches as one."""
        _check_alike(listed("predictions", predictions, "predictions, as trainer.predict returns"))
        tensors: dict[str, Any] = {}
        if any(prediction.df is not None for prediction in predictions):  # an infinite df is a Gaussian
            predictions = [
                p if p.df is not None else replace(p, df=torch.full_like(mean_of(p), math.inf)) for p in predictions
            ]
        for field in fields(Prediction):
            parts = [getattr(prediction, field.name) for prediction in predictions]
            tensors[field.name] = None if any(part is None for part in parts) else torch.cat(parts)
        return replace(predictions[0], **tensors)

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """All fields and the derived `label` and `confidence`, or `std`, as arrays by name, for instance for
        `np.savez(path, **prediction.numpy())`."""
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        derived = {"std": self.std} if self.probs is None else {"label": self.label, "confidence": self.confidence}
        return {name: t.detach().cpu().numpy() for name, t in {**stored, **derived}.items() if t is not None}

    def __repr__(self) -> str:
        name = "mean" if self.probs is None else "probs"
        main = mean_of(self)
        place = "" if main.device.type == "cpu" else f", {main.device}"
        dtype = str(main.dtype).removeprefix("torch.")
        return f"Prediction({self.kind} of {len(self)}, {name} {list(main.shape)}, {dtype}{place})"

    def _of_classes(self, what: str, way_out: str) -> Tensor:
        if self.probs is None:
            raise AttributeError(f"a prediction of real targets has no {what}: {way_out}")
        return self.probs

    def _of_real_targets(self, what: str, way_out: str) -> tuple[Tensor, Tensor]:
        if self.mean is None or self.variance is None:
            raise AttributeError(f"a prediction of classes has no {what}: {way_out}")
        return self.mean, self.variance


def mean_of(prediction: Prediction) -> Tensor:
    """The mean of real targets, or the probabilities of classes.  # [B, …]"""
    mean = prediction.mean if prediction.probs is None else prediction.probs
    assert mean is not None
    return mean


torch.serialization.add_safe_globals([Prediction])  # so that torch.load(weights_only=True) reads saved predictions


def real_targets(mean: Tensor, y: Tensor) -> Tensor:
    """`y` in the shape of its predicted mean: dimensions of size one may be missing, as in `[B]` for `[B, 1]`."""
    given, expected = ([*t.shape[:1], *(n for n in t.shape[1:] if n != 1)] for t in (y, mean))
    if given != expected:
        raise unfit_targets(mean, y, "real targets", mean.shape)
    return y.reshape(mean.shape)


def unfit_targets(main: Tensor, y: Tensor, what: str, shape: torch.Size) -> DataError:
    """The error for targets whose shape does not match the prediction."""
    return DataError(
        f"predictions of shape {list(main.shape)} need {what} of shape {list(shape)}, got {y.dtype} of shape "
        f"{list(y.shape)}"
    )


def _rows(examples: Any, size: int) -> slice | Tensor:
    """An index of rows that keeps the batch dimension."""
    if isinstance(examples, slice):  # torch has no negative steps
        return (
            examples
            if (examples.step or 1) > 0
            else torch.tensor(range(size)[examples], dtype=torch.long, device="cpu")
        )
    try:
        none = isinstance(examples, list) and not examples  # torch would read it as floats
        index = examples if isinstance(examples, Tensor) else torch.as_tensor(examples, device="cpu")
        index = index.long() if none else index
    except (TypeError, ValueError, RuntimeError):
        index = torch.tensor(math.nan, device="cpu")
    is_mask = index.dtype == torch.bool
    if isinstance(examples, tuple) or index.is_floating_point() or index.is_complex() or index.ndim > 1:
        raise IndexError(
            f"index a prediction by its examples, with a number, slice, list or mask, got {format_value(examples)}"
        )
    if is_mask and index.shape != (size,):
        raise IndexError(f"a mask needs the shape of the examples, [{size}], got {format_value(examples)}")
    index = index if is_mask else index.reshape(-1).long()
    if not is_mask and len(index) and not (-size <= int(index.min()) and int(index.max()) < size):
        raise IndexError(f"there are {size} examples, got the index {format_value(examples)}")
    return index


def _check_alike(predictions: Sequence[Any]) -> None:
    """Raise an error for predictions that cannot be joined."""
    if not len(predictions):
        raise ValueError("predictions is an empty list: cat needs at least one")
    for prediction in predictions:
        if isinstance(prediction, dict):
            names = list(prediction)
            raise TypeError(
                f"predictions contains dictionaries of several callbacks: choose one of {format_value(names)}, as in "
                f"Prediction.cat([batch[{format_value(names[0])}] for batch in predictions])"
            )
        if isinstance(prediction, (list, tuple)):
            raise TypeError("predictions contains one list per dataloader: pass one of them, such as predictions[0]")
        if not isinstance(prediction, Prediction):
            raise TypeError(f"predictions must be a list of predictions, got one with {format_value(prediction)}")
    first = predictions[0]
    for prediction in predictions[1:]:
        if prediction.kind != first.kind:
            raise ValueError(f"predictions are of different kinds, {first.kind} and {prediction.kind}")
        mean, other = mean_of(first), mean_of(prediction)
        if other.device != mean.device:
            raise ValueError(
                f"predictions are on several devices, {mean.device} and {other.device}: move them to one, as in "
                "[prediction.cpu() for prediction in predictions]"
            )
        if other.shape[1:] != mean.shape[1:]:
            shapes = f"{list(mean.shape)} and {list(other.shape)}"
            raise ValueError(
                f"predictions have different outputs, of shapes {shapes}: only the first dimension may differ"
            )
