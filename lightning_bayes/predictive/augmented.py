"""Test-time augmentation: `Augmented`, the mixture of the predictions at several views of each input,

    p(y | x) = Σᵥ p(y | tᵥ(x)) / V,

for views `t₁ … t_V` that leave the target unchanged, such as a flip or a small shift of an image. What differs between
the views is part of the epistemic uncertainty (see `predictive.mixture`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_bayes.arguments import format_value, instance, listed
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network.borrowed import copied_generator, preserved_rng
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.predictive.mixture import PREDICTORS, Mixture, Predictor, check_shapes, naming
from lightning_bayes.predictive.prediction import Prediction


@dataclass(frozen=True, eq=False)
class Augmented(Mixture):
    """The mixture of a predictor's predictions at several views of each input.

    All views share the predictor's random numbers, so they differ only by what the views change. A random view draws
    from the global generators of PyTorch and Python, which are seeded for each call of `predict` and restored after
    it: one transform for the whole batch gives an input the same views in any batch.

    Args:
        predictor: a posterior, or a predictor such as a `DeepEnsemble`.
        views: functions from a batch of inputs to one of the same length. The input itself is a view only if the list
            has one that returns it: `[lambda x: x, flip]`. Repeat a random transform to draw it several times:
            `[transform] * 8`.
    """

    predictor: GaussianPosterior | Predictor
    views: Sequence[Callable[[Any], Any]]

    def __post_init__(self) -> None:
        instance("predictor", self.predictor, (GaussianPosterior, Predictor), PREDICTORS)
        object.__setattr__(self, "views", tuple(listed("views", self.views, "functions x → x")))
        if not self.views:
            raise ValueError("views is an empty list: give at least one function, such as lambda x: x")
        for number, view in enumerate(self.views):
            if not callable(view):
                raise TypeError(f"views must be functions x → x, but views[{number}] is {format_value(view)}")

    @property
    def likelihood(self) -> Likelihood:
        return self.predictor.likelihood

    @property
    def device(self) -> torch.device:
        return self.predictor.device

    @property
    def network(self) -> nn.Module:
        return self.predictor.network

    @property
    def part_weights(self) -> Sequence[float]:
        return [1 / len(self.views)] * len(self.views)

    def predict_each(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "glm",
        *,
        generator: torch.Generator | None = None,
    ) -> list[Prediction]:
        """The prediction at each view of `x`."""
        check_generator(generator)
        generator = copied_generator(self.device) if generator is None else generator
        with preserved_rng(self.device):
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            viewed = [view(x) for view in self.views]
        before, predictions = generator.get_state(), []
        for number, part in enumerate(viewed):
            generator.set_state(before)
            with naming(f"view {number}"):
                predictions.append(self.predictor.predict(part, predictive, generator=generator))
        check_shapes(predictions, "views", "return as many examples as they get, in the same order")
        return predictions
