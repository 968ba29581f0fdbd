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
    log_δ = posterior.prior_precision.expand(len(posterior.subset.layers)).log().requires_grad_()
    log_ρ = torch.zeros_like(log_δ[0]).requires_grad_()  # of the noise, relative to what it is
    σ = posterior.likelihood.tunable_noise if noise else None
    σ = None if σ is None else torch.as_tensor(σ, dtype=log_δ.dtype, device=log_δ.device)
    variables = [log_δ] if σ is None else [log_δ, log_ρ]
    optimizer = torch.optim.Adam(variables, lr, maximize=True)
    for _ in range(steps):
        with torch.enable_grad():
            δ, σ_now = log_δ.exp(), None if σ is None else σ * log_ρ.exp()
            if at == "weights" or σ_now is None:
                evidence = posterior.log_marginal_likelihood(δ, σ_now, at=at)
            else:
                evidence = posterior.log_marginal_likelihood(δ, σ_now.detach(), at=at)
                evidence = evidence + posterior.log_marginal_likelihood(δ.detach(), σ_now)
        gradients = torch.autograd.grad(evidence / posterior.n_data, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.grad = gradient
        optimizer.step()
        with torch.no_grad():
            log_δ.clamp_(-bound, bound)
            log_ρ.clamp_(-bound, bound)
    with torch.no_grad():
        return (posterior if σ is None else posterior.with_noise(σ * log_ρ.exp())).with_prior(log_δ.exp())
