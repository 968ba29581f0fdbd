"""The Variational Laplace objective and the evidence lower bound, as pure functions.

For a minibatch of `S` examples out of `N`, with `ḡ = (1/S) ∂ log P(ỹ | x, w = μ)/∂w` the gradient for labels `ỹ` drawn
from the model, the objective is (Variational Laplace paper, eq. (30))

    (1/S) L_VL = (1/S) log P(y | x, w = μ) − (S/2) Σ_λ σ_λ² ḡ_λ² − (β/N) Σ_λ KL_λ

with the KL divergence of eq. (12),

    KL_λ = ½ ((σ_λ² + μ_λ²)/s_λ² − 1 + log(s_λ²/σ_λ²)).

The printed eq. (30) has σ² in the place of the prior's s², in the denominator and under the logarithm. Losses are the
negatives of these, to be minimised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_bayes.likelihoods.outputs import widen

LARGEST_HESSIAN = 20_000  # weights


def kl_divergence(μ: Tensor, log_σ: Tensor, s: float) -> Tensor:
    """`Σ_λ D_KL(N(μ, σ²) ‖ N(0, s²))`, eq. (12).

    >>> kl_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), 1.0)
    tensor(0.5000)
    """
    μ, log_σ = widen(μ), widen(log_σ)
    return 0.5 * (((2 * log_σ).exp() + μ.square()) / s**2 - 1 - 2 * (log_σ - math.log(s))).sum()


def kl_with_gradients(μ: Tensor, log_σ: Tensor, s: float) -> tuple[Tensor, Tensor, Tensor]:
    """`kl_divergence`, and its gradients `μ/s²` and `σ²/s² − 1`, without a graph and in few passes over the weights.

    >>> kl_with_gradients(torch.tensor([1.0]), torch.tensor([0.0]), 1.0)
    (tensor(0.5000), tensor([1.]), tensor([0.]))
    """
    distance = widen(log_σ) - math.log(s)
    of_log_σ = torch.expm1(2 * distance)
    of_μ = widen(μ) / s**2
    twice = of_log_σ.sum() + torch.dot(widen(μ).reshape(-1), of_μ.reshape(-1)) - 2 * distance.sum()
    return 0.5 * twice, of_μ, of_log_σ


def squared_gradient(gradients: Iterable[Tensor], log_σ: Iterable[Tensor], S: int) -> Tensor:
    """`(S/2) Σ_λ σ_λ² ḡ_λ²`, where `ḡ` is the gradient of a mean over `S` examples.

    >>> squared_gradient([torch.tensor([0.5])], [torch.tensor([0.0])], S=4)
    tensor(0.5000)
    """
    terms = [((2 * widen(l)).exp() * widen(g).square()).sum() for g, l in zip(gradients, log_σ, strict=True)]
    return 0.5 * S * torch.stack(terms).sum()


def hessian_term(nll: Tensor, weights: Sequence[Tensor], log_σ: Sequence[Tensor]) -> Tensor:
    """`½ Σ_λ σ_λ² ∂²nll/∂w_λ²`, in the place of the squared gradient in eq. (20); with a graph.

    For study, on small networks: it takes a backward pass for every weight. Where the log-likelihood is convex in a
    weight, `H_λλ = −N ∂²nll/∂w_λ² > β/s_λ²`, the objective rises with σ without bound (eq. (24)).
    """
    if sum(w.numel() for w in weights) > LARGEST_HESSIAN:
        raise ValueError(
            f"curvature='hessian' is for networks of at most {LARGEST_HESSIAN} weights, because it takes a backward "
            "pass for each: use curvature='fisher'"
        )
    gradients = torch.autograd.grad(nll, list(weights), create_graph=True, allow_unused=True)
    total = nll.new_zeros(())
    for w, g, l in zip(weights, gradients, log_σ, strict=True):
        if g is None or not g.requires_grad:
            continue  # not used, or linear in it
        diagonal = []
        for position, entry in enumerate(g.reshape(-1)):
            (row,) = torch.autograd.grad(entry, w, create_graph=True, allow_unused=True)
            diagonal.append(entry.new_zeros(()) if row is None else row.reshape(-1)[position])
        total = total + 0.5 * ((2 * l.reshape(-1)).exp() * torch.stack(diagonal)).sum()
    return total
