"""Posterior and x to a `Prediction`: the law of the outputs (see `output_law`), integrated over by the likelihood, and
corrected by what was found on held-out data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import flag
from lightning_bayes.likelihoods import ClassPredictive, Predictive
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.input_graph import check_differentiable
from lightning_bayes.options.predictive import PredictiveOption, predictive_option
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.gaussian import Calibration, implements
from lightning_bayes.predictive.output_law import Integral, OutputLaw, output_law
from lightning_bayes.predictive.prediction import Prediction


@implements("predict", sharded=True)
def predict(
    posterior: GaussianPosterior,
    x: Any,
    predictive: str | PredictiveOption = "glm",
    *,
    generator: torch.Generator | None = None,
    calibrated: bool = True,
    differentiable: bool = False,
    split: bool = True,
) -> Prediction:
    option = predictive_option(predictive)
    check_generator(generator)
    flag("calibrated", calibrated)
    flag("split", split)
    check_differentiable(differentiable, x)
    likelihood, link = posterior.likelihood, option.link
    likelihood.choose_link(link)  # raises for an unknown link
    calibration = posterior.calibration_of(option.kind, link) if calibrated else None
    x = inputs.contained(posterior.network, x)
    with preserved_rng(posterior.device):
        law = output_law(posterior, x, option, generator, differentiable)
        default = None if calibration is None else calibration.link
        chosen = law.choose_link(likelihood, (link or default) if option.is_linear else None)
        drawn = option.samples if split or chosen == "mc" else 0  # beside a closed form only the split needs samples
        integral = Integral(likelihood, chosen, drawn, generator)
        prediction = Prediction.from_predictive(_corrected(law, integral, calibration))
        return prediction if differentiable else prediction.map(Tensor.detach)


def _corrected(law: OutputLaw, integral: Integral, calibration: Calibration | None) -> Predictive:
    """The predictive distribution for this law of the outputs, with the calibration's correction."""
    if calibration is None:
        return law.integrate(integral)
    predictive = law.tempered(calibration.output_temperature).integrate(integral)
    if isinstance(predictive, ClassPredictive):
        T = calibration.probs_temperature
        return predictive if T == 1 else predictive.tempered(T)
    s = calibration.variance_factor
    return replace(predictive, epistemic=s * predictive.epistemic, aleatoric=s * predictive.aleatoric)
