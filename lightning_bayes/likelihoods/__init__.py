"""Likelihoods `p(y | f)` of targets given a network's outputs, and their predictive distributions.

| word | likelihood | outputs `f` | targets `y` |
|---|---|---|---|
| `"classification"` | `Categorical()` | logits `[B, C, …]` | class indices `[B, …]` |
| `"binary"` | `Bernoulli()` | logits `[B]`, `[B, L, …]` | 0 or 1, the same shape |
| `"regression"` | `Gaussian()` | means `[B, …]` | real, the same shape |
| | `HeteroscedasticGaussian()` | means and log-variances `[B, 2D, …]` | real `[B, D, …]` |
| | `LinearMeasurement(A)` | images or vectors `[B, …]` | measurements `[B, d_y]` of all outputs |
"""

from lightning_bayes.likelihoods.base import ClassPredictive, LabelPredictive, Likelihood, Predictive, resolve
from lightning_bayes.likelihoods.classes import Bernoulli, Categorical
from lightning_bayes.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from lightning_bayes.likelihoods.linear_measurement import LinearMeasurement
from lightning_bayes.likelihoods.outputs import LikelihoodError

__all__ = [
    "Bernoulli",
    "Categorical",
    "ClassPredictive",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LabelPredictive",
    "Likelihood",
    "LikelihoodError",
    "LinearMeasurement",
    "Predictive",
    "resolve",
]
