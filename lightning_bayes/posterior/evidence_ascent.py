"""A few steps uphill in the evidence of one curvature (Immer et al. 2021; tutorial, section 4): with Adam in
`η = (log δ₁, …, log δ_L, log σ)`,

    η ← η + Adam(∇_η log p(D | η) / N).

The curvature is that of one pass over the data and does not change. In its eigenbasis a prior is added to the
eigenvalues alone, so that a step needs neither data nor a decomposition.

Where the evidence is that of the linear model's optimum, which weights in training are far from, it chooses the priors
only. The noise is that of the network's own residuals: with the approximate curvature of a structure, the linear
model's would promise a fit without any.
"""

from __future__ import annotations

import math

import torch

from lightning_bayes.network.accumulation import in_float64, number_like
from lightning_bayes.posterior.evidence import Evidence
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.tuning import LARGEST


@torch.inference_mode(False)
def ascend(
    posterior: LaplacePosterior, steps: int, lr: float, at: str = "weights", noise: bool = True
) -> LaplacePosterior:
    """The same curvature with other priors of its layers, and, if `noise`, another noise of a Gaussian likelihood. The
    evidence is taken `at` the weights or the linear model's optimum, as in `log_marginal_likelihood`; the prior that
    the posterior has is one number, or one per layer."""
    bound = math.log(LARGEST)
    layers = len(posterior.subset.layers)
    log_δ = in_float64(posterior.prior_precision).expand(layers).log().requires_grad_()
    log_ρ = torch.zeros_like(log_δ[0]).requires_grad_()  # of the noise, relative to what it is
    σ = posterior.likelihood.tunable_noise if noise else None
    variables = [log_δ] if σ is None else [log_δ, log_ρ]
    of_prior = Evidence(posterior, at, torch.Size([layers]))
    of_noise = of_prior if at == "weights" else Evidence(posterior, "weights", torch.Size([layers]))
    optimizer = torch.optim.Adam(variables, lr, maximize=True)
    for _ in range(steps):
        with torch.enable_grad():
            δ, ρ = log_δ.exp(), log_ρ.exp()
            if of_noise is of_prior:
                evidence = of_prior(δ, ρ)
            else:
                evidence = of_prior(δ, ρ.detach()) + (0 if σ is None else of_noise(δ.detach(), ρ))
        gradients = torch.autograd.grad(evidence / posterior.n_data, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.grad = gradient
        optimizer.step()
        with torch.no_grad():
            log_δ.clamp_(-bound, bound)
            log_ρ.clamp_(-bound, bound)
    with torch.no_grad():
        moved = posterior if σ is None else posterior.with_noise(number_like(σ, ρ) * log_ρ.exp())
        return moved.with_prior(log_δ.exp())
