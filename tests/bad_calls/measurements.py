"""Linear measurements: their likelihood, the posterior of an image, and its methods."""

import math
from typing import Any

import torch

from bad_calls.callbacks import counts, flags, positives, words
from bad_calls.cases import Of, Table, Things
from lightning_bayes import Gaussian, LinearMeasurement, MeasurementPosterior, fit_measurements
from lightning_bayes.likelihoods import LikelihoodError

A = torch.ones(2, 3)

likelihood = Table(
    "LinearMeasurement", lambda t, **given: LinearMeasurement(**{"A": A, **given}), LinearMeasurement, named=False
)
for _bad in (0.0, -1.0, math.nan, math.inf, torch.ones(2)):
    likelihood("noise_std", _bad, "needs one positive, finite noise_std", error=LikelihoodError)
for _given in ("small", None, True, []):
    likelihood("noise_std", _given, "noise_std", "must be a number or a vector of numbers", error=LikelihoodError)
for _A, _words in (
    (None, "a pair of functions (apply, adjoint), got None"),
    ("radon", "got 'radon'"),
    ((1, 2), "a pair of functions"),
    (torch.ones(3), "must be a floating-point matrix"),
    (A.long(), "must be a floating-point matrix"),
    (A * 0, "A is zero everywhere"),
    (A * math.nan, "NaN or infinite"),
    (torch.ones(0, 3), "has no measurements"),
):
    likelihood("A", _A, _words, error=LikelihoodError)


def _fit(t: Things, **given: Any) -> MeasurementPosterior:
    arguments = {"network": t.net(), "x": t.x[:1], "y": torch.zeros(2), "likelihood": LinearMeasurement(A)}
    return fit_measurements(**{**arguments, **given})


measured = Table("fit_measurements", _fit, fit_measurements)
words(measured, "prior", "mean")
positives(measured, "variance", "length", "tv_rate")
flags(measured, "progress")
for _bad in (-1, 2.5, "ten", True):
    measured("exact_up_to", _bad, "must be a whole number of at least 0")
measured("network", 3, "must be a trained nn.Module, got 3")
measured("x", Of(lambda t: t.x, "five"), "one image, but the network returns 5", named=False)
measured("x", Of(lambda t: t.x[:1] * math.nan, "NaN"), "output is not finite at this input", named=False)
measured("y", [1.0, 2.0], "must be a tensor of measurements")
measured("y", torch.zeros(3), "needs targets of shape [1, 2]", named=False)
measured("y", torch.zeros(2).long(), "needs floating-point targets", named=False)
measured("y", torch.tensor([math.nan, 0.0]), "target nan", named=False)
measured("likelihood", "regression", "must be LinearMeasurement(A, noise_std), got 'regression'")
measured("likelihood", Gaussian(), "must be LinearMeasurement(A, noise_std)")
measured("likelihood", LinearMeasurement(torch.ones(2, 4)), "A has 4 columns, but an example has 3", named=False)
measured("prior", "tv", "needs images [1, C, H, W], but the network returns [1, 3]", named=False)
measured("blocks", ["0"], "must map names to lists")
measured("blocks", {"a": "0"}, "must map names to lists")
measured("blocks", {"a": ["0"]}, "no block contains the parameter 2.weight")
measured("blocks", {"a": ["0", "2"], "b": ["nothing"]}, "which has no parameters in the network", named=False)
measured("blocks", {"a": ["0", "2"]}, "leave out blocks=", prior="gaussian")


def _method(name: str) -> Table:
    signature = [*getattr(MeasurementPosterior, name).__annotations__]
    signature.remove("return")
    return Table(f"MeasurementPosterior.{name}", lambda t, **given: getattr(_fit(t), name)(**given), signature)


tuning, functional, sample, sample_prior, evidence = (
    _method(name) for name in ("tune", "functional", "sample", "sample_prior", "log_marginal_likelihood")
)
flags(tuning, "noise", "progress")
counts(tuning, "steps")
flags(functional, "joint")
for _table in (sample, sample_prior):
    counts(_table, "n")
    _table.anything_goes("generator", "PyTorch's own check")
words(evidence, "at")
for _name in ("φ", "noise_std", "seed"):
    evidence.anything_goes(_name, "what tune passes; a wrong shape is PyTorch's own error")

MEASUREMENTS = [likelihood, measured, tuning, functional, sample, sample_prior, evidence]
