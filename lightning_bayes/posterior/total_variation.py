"""The expected total variation of an image under a prior over weights, and the prior over its lengths (TV-PredCP).

Antorán et al. 2022, "A probabilistic deep image prior for computational tomography" (tutorial, section 7). With block
`d` of the weights random and all others at `θ̃`, the linearised network's image is Gaussian, and so is the difference
`Δₑ ~ N(μₑ, vₑ)` of each two neighbouring pixels. Its absolute value has a mean in closed form, that of a folded normal:

    κ_d = E[TV(x)] = Σₑ √(2vₑ/π) exp(−μₑ²/2vₑ) + μₑ erf(μₑ/√(2vₑ)),        vₑ = Σ_r w_dr · ΔₑJ B_dr JᵀΔₑᵀ,

differentiable in the prior's variances and lengths any number of times. The prior over the lengths makes `κ_d`
exponentially distributed, Π_d Exp(κ_d; λ) |∂κ_d/∂ℓ_d|: small variation is likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bayes.curvature.jacobian_products import JacobianProducts
from lightning_bayes.posterior.block_prior import BlockPrior
from lightning_bayes.posterior.gaussian import PosteriorError

_ROWS = 2**25  # numbers of Jacobian rows at a time


@dataclass(frozen=True, eq=False)
class ExpectedVariation:
    """`κ_d` as a function of the hyperparameters; `μ` and the parts of `v` are known."""

    prior: BlockPrior
    μ: Tensor  # [blocks, edges]
    parts: Tensor  # ΔJ B_dr JᵀΔᵀ [terms, edges]

    @staticmethod
    def of(products: JacobianProducts, prior: BlockPrior, θ: Tensor) -> ExpectedVariation:
        """Around weights `θ̃`, by a backward pass for each pair of neighbours and a forward one for each block."""
        if len(products.shape) < 4:
            raise PosteriorError(
                f"the total variation is that of images [1, C, H, W], but the network returns {list(products.shape)}: "
                "reshape its output, or use prior='filters'"
            )
        alone = torch.zeros(len(prior.blocks), len(θ)).to(θ)
        for s in prior.segments:
            alone[s.block, s.start : s.stop] = θ[s.start : s.stop]
        rest = products.f - products.push(alone)  # the image without block d [blocks, 1, ...]
        μ = torch.stack([differences(image) for image in rest])
        pairs = _pairs(products.shape).to(products.f.device)  # [edges, 2]
        parts = []
        for some in pairs.split(max(1, _ROWS // (prior.size + products.f.numel()))):
            U = products.f.new_zeros(len(some), products.f.numel())
            U.scatter_(1, some[:, :1], -1.0).scatter_(1, some[:, 1:], 1.0)
            rows = products.pull(U.reshape(len(some), *products.shape))
            parts.append(torch.stack([prior.squares(term, rows).cpu().double() for term in range(len(prior.terms))]))
        return ExpectedVariation(prior, μ.cpu().double(), torch.cat(parts, 1))

    def __call__(self, φ: Tensor) -> Tensor:
        """`κ_d`.  # [n_parameters] -> [blocks]"""
        w = self.prior.weights(φ)
        block_of_term = torch.tensor([d for d, _ in self.prior.terms], device="cpu")
        v = φ.new_zeros(self.μ.shape).index_add(0, block_of_term, w.unsqueeze(1) * self.parts)
        v = v.clamp_min(1e-300)
        folded = (2 * v / math.pi).sqrt() * (-self.μ.square() / (2 * v)).exp()
        return (folded + self.μ * (self.μ / (2 * v).sqrt()).erf()).sum(1)

    def log_density(self, φ: Tensor, rate: float) -> Tensor:
        """`Σ_d log λ − λκ_d + log |∂κ_d/∂ℓ_d|` over the blocks with a length, differentiable."""
        blocks = self.prior.with_length
        if not blocks:
            return φ.new_zeros(())
        if not φ.requires_grad:
            return self.log_density(φ.detach().requires_grad_(), rate).detach()
        with torch.enable_grad():
            κ = self(φ)
            (slope,) = torch.autograd.grad(κ.sum(), φ, create_graph=True)  # κ_d depends on no other block's length
        slope = slope[len(self.prior.blocks) :] / self.prior.lengths(φ)  # ∂κ_d/∂ℓ_d
        κ = κ[list(blocks)]
        return (math.log(rate) - rate * κ + slope.abs().clamp_min(1e-300).log()).sum()


def differences(image: Tensor) -> Tensor:
    """Of neighbours in each direction, in the order of `_pairs`.  # [B, C, H, W] or with more dimensions -> [edges]"""
    return torch.cat([image.diff(dim=dim).reshape(-1) for dim in range(2, image.ndim)])


def total_variation(image: Tensor) -> Tensor:
    """`Σₑ |Δₑ|`, differentiable."""
    return differences(image).abs().sum()


def _pairs(shape: torch.Size) -> Tensor:
    """Places of neighbours in the flat image.  # [edges, 2]"""
    place = torch.arange(shape.numel(), device="cpu").reshape(shape)
    pairs = []
    for dim in range(2, len(shape)):
        n = shape[dim]
        first, second = place.narrow(dim, 0, n - 1), place.narrow(dim, 1, n - 1)
        pairs.append(torch.stack([first.reshape(-1), second.reshape(-1)], 1))
    return torch.cat(pairs)
