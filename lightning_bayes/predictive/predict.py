"""Posterior and x to a `Prediction`.

- `glm`: the linearised network (GLM paper, eqs. (10) and (13)), whose exact Hessian the GGN is. Outputs are Gaussian in
  closed form; with many outputs (1,000 classes, images) they are sampled, by forward-mode products with weight samples,
  so that neither cost nor memory grow with the square of the outputs. A classifier's default link is then "mc".
- `bnn`: the network itself at weight samples (eq. (9)).
- `map`: the network at the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import count, flag, word
from lightning_bayes.curvature import inputs
from lightning_bayes.curvature.preserve import borrowed, preserved_rng
from lightning_bayes.likelihoods import ClassPredictive, Likelihood, Predictive
from lightning_bayes.likelihoods.outputs import check_generator, draw_gaussian
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.predictive.linearised import Linearised
from lightning_bayes.predictive.prediction import Prediction

PREDICTIVES = ("glm", "bnn", "map")
MANY = 64  # outputs per example from which the linearised network is sampled


def predict(
    posterior: GaussianPosterior,
    x: Any,
    predictive: str = "glm",
    link: str | None = None,
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Prediction:
    word("predictive", predictive, PREDICTIVES)
    count("samples", samples)
    check_generator(generator)
    likelihood = posterior.likelihood
    with preserved_rng():
        if predictive == "map":
            found = likelihood.point(outputs(posterior, x))
        elif predictive == "bnn":
            found = likelihood.from_samples(sample_functions(posterior, x, samples, generator, linearised=False))
        elif outputs(posterior, inputs.take(x, [0])).numel() > MANY:
            found = _of_many_outputs(posterior, x, link, samples, generator)
        else:
            found = _of_gaussian(likelihood, *posterior.functional(x), link, samples, generator)
    return Prediction.from_predictive(found)


def _of_gaussian(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    link: str | None,
    samples: int,
    generator: torch.Generator | None,
) -> Predictive:
    """The integral over outputs with this mean and covariance of each example.  # [B, ...], [B, C, C]"""
    if mean.ndim == 1:
        return likelihood.integrate(mean, covariance.reshape(mean.shape), link, samples, generator)
    if mean.ndim == 2:
        return likelihood.integrate(mean, covariance, link, samples, generator)
    if likelihood.choose_link(link) == "mc":
        draws = draw_gaussian(mean.flatten(1), covariance, samples, generator)
        return likelihood.from_samples(draws.reshape(-1, *mean.shape))
    # Dense outputs are independent given f: every position is an example with the C × C block of its own outputs.
    B, C, *positions = mean.shape
    blocks = covariance.reshape(B, C, -1, C, mean[0, 0].numel()).diagonal(dim1=2, dim2=4).movedim(-1, 1)  # [B, R, C, C]
    found = likelihood.integrate(mean.flatten(2).mT.flatten(0, 1), blocks.flatten(0, 1), link, samples, generator)

    def back(t: Tensor) -> Tensor:
        return t.unflatten(0, (B, -1)).movedim(1, -1).unflatten(-1, positions)

    return replace(found, mean=back(found.mean), epistemic=back(found.epistemic), aleatoric=back(found.aleatoric))


def _of_many_outputs(
    posterior: GaussianPosterior, x: Any, link: str | None, samples: int, generator: torch.Generator | None
) -> Predictive:
    """From functions drawn from the linearised network. What has a closed form gets the outputs' exact mean, and their
    variances from the draws."""
    likelihood = posterior.likelihood
    likelihood.choose_link(link)
    draws = sample_functions(posterior, x, samples, generator)  # [S, B, ...]
    classes = issubclass(likelihood.predictive, ClassPredictive)
    if link in (None, "mc") and (classes or likelihood.links[0] == "mc"):
        return likelihood.from_samples(draws)
    mean = outputs(posterior, x)
    found = likelihood.integrate(mean, (draws - mean).square().mean(0), link, samples=0)
    if classes and link == "probit":  # which has a closed form of the probabilities alone
        return replace(likelihood.from_samples(draws), mean=found.mean)
    return found


def outputs(posterior: GaussianPosterior, x: Any) -> Tensor:
    """`f(x)` at the mean."""
    with _at_mean(posterior, x) as x:
        return inputs.call(posterior.network, x)


def sample_functions(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None = None,
    linearised: bool = True,
) -> Tensor:
    """`n` functions drawn from the posterior, evaluated at `x`: one weight sample for all inputs, so that the draws are
    smooth in x. Of the linearised network `f(x) + J(x)(θ − θ*)`, or of the network itself.  # [n, B, ...]"""
    count("n", n)
    check_generator(generator)
    flag("linearised", linearised)
    draws = []
    with _at_mean(posterior, x) as x:
        network = Linearised(posterior.network, posterior.subset.parameters(posterior.network), x)
        for _ in range(n):
            moves = _unflatten(posterior, posterior.sample(1, generator)[0] - posterior.mean)
            draws.append(network(moves) if linearised else network.at(moves))
    return torch.stack(draws)


@contextmanager
def _at_mean(posterior: GaussianPosterior, x: Any) -> Iterator[Any]:
    posterior.check_weights()
    inputs.batch_size(x)  # an error where x holds no tensor
    with torch.inference_mode(False), borrowed(posterior.network, ()), torch.no_grad():
        yield inputs.to_device(x, posterior.device)


def _unflatten(posterior: GaussianPosterior, flat: Tensor) -> dict[str, Tensor]:
    """A vector over the subset as one tensor per parameter, zero outside a subnetwork."""
    subset = posterior.subset
    if subset.mask is not None:
        whole = flat.new_zeros(subset.full_size)
        whole[subset.mask.to(flat.device)] = flat
        flat = whole
    parts = flat.split([shape.numel() for shape in subset.shapes])
    parameters = subset.parameters(posterior.network).values()
    return {n: t.reshape(p.shape).to(p.dtype) for n, t, p in zip(subset.names, parts, parameters, strict=True)}
