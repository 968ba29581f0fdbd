"""What a predictive answers: tensors, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_bayes.likelihoods import ClassPredictive, Predictive

Self = TypeVar("Self", bound="TensorFields")


@dataclass(frozen=True, eq=False)
class TensorFields:
    """A dataclass of tensors, some of which may be missing."""

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """On another device or in another dtype, with the arguments of `Tensor.to`."""
        return self.map(lambda t: t.to(*args, **kwargs))

    def cpu(self: Self) -> Self:
        return self.to(torch.device("cpu"))

    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """`change` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(t) for name, t in values.items() if isinstance(t, Tensor)})


@dataclass(frozen=True, eq=False)
class Prediction(TensorFields):
    """Classification: `probs`; regression: `mean` and `variance` (noise included). For both the two sources of
    uncertainty, per output (Kwon et al. 2020): `epistemic`, which more data would remove, and `aleatoric`, which is in
    the data; and the `entropy` of the predictive distribution, per example."""

    epistemic: Tensor
    aleatoric: Tensor
    entropy: Tensor
    probs: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None

    @staticmethod
    def from_predictive(predictive: Predictive) -> Prediction:
        prediction = Prediction(predictive.epistemic, predictive.aleatoric, predictive.entropy)
        if isinstance(predictive, ClassPredictive):
            prediction = replace(prediction, probs=predictive.probs)
        else:
            prediction = replace(prediction, mean=predictive.mean, variance=predictive.variance)
        return prediction.map(Tensor.detach)

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
