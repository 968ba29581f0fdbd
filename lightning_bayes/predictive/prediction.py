"""What a predictive answers: tensors, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.likelihoods import ClassPredictive, Predictive


@dataclass(frozen=True, eq=False)
class Prediction:
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
        common = {
            "epistemic": predictive.epistemic,
            "aleatoric": predictive.aleatoric,
            "entropy": predictive.entropy,
        }
        if isinstance(predictive, ClassPredictive):
            prediction = Prediction(**common, probs=predictive.probs)
        else:
            prediction = Prediction(**common, mean=predictive.mean, variance=predictive.variance)
        return prediction.map(Tensor.detach)

    @property
    def epistemic_score(self) -> Tensor:
        """One number per example: the epistemic variance summed over outputs.  # [B]"""
        return self.epistemic.flatten(1).sum(1) if self.epistemic.ndim > 1 else self.epistemic

    @property
    def entropy_score(self) -> Tensor:
        """One number per example: the entropy, averaged over positions or labels.  # [B]"""
        return self.entropy.flatten(1).mean(1) if self.entropy.ndim > 1 else self.entropy

    def to(self, *args: Any, **kwargs: Any) -> Prediction:
        """On another device or in another dtype, with the arguments of `Tensor.to`."""
        return self.map(lambda t: t.to(*args, **kwargs))

    def cpu(self) -> Prediction:
        return self.to(torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.epistemic)

    def map(self, change: Callable[[Tensor], Tensor]) -> Prediction:
        """`change` applied to every tensor."""
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **{name: change(t) for name, t in present.items()})
