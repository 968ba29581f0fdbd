"""`WeightMoments`: the running mean and variance of weights along an optimizer's path, the diagonal of SWAG.

For `S` snapshots `θ_s` (Maddox et al. 2019, section 3.3)

    θ ~ N(θ_SWA, diag(Σ)),    θ_SWA = Σ_s θ_s / S,    Σ = Σ_s θ_s² / S − θ_SWA²,

accumulated by Welford's rule, which loses no digits if weights move little. A weight that has not moved gets the
variance of its rounding error, `(ε·max(|θ|, rms θ))²`, so every precision is finite.

The running statistics of batch norms belong to the weights of training steps, not to their mean. `update_statistics`
recomputes them in one pass, as averages over batches weighted by their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.subset import resolve_subset
from lightning_bayes.posterior.fingerprint import fingerprint
from lightning_bayes.posterior.gaussian import GaussianPosterior
from lightning_bayes.structures import Diagonal


@dataclass
class WeightMoments:
    """The moments of all floating-point parameters of a network, by name."""

    snapshots: int = 0
    mean: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)  # Σ_s (θ_s − mean)²

    @torch.no_grad()
    def add(self, network: nn.Module) -> None:
        """Add the current weights."""
        self.snapshots += 1
        for name, p in network.named_parameters():
            if not p.is_floating_point():
                continue
            θ = p.detach().to(torch.promote_types(p.dtype, torch.float32))
            if name not in self.mean:
                self.mean[name], self.squares[name] = torch.zeros_like(θ), torch.zeros_like(θ)
            mean, squares = self.mean[name].to(θ.device), self.squares[name].to(θ.device)
            Δ = θ - mean
            self.mean[name] = mean.add_(Δ, alpha=1 / self.snapshots)
            self.squares[name] = squares.addcmul_(Δ, θ - mean)

    @torch.no_grad()
    def put_mean(self, network: nn.Module) -> None:
        """Copy the averaged weights into the network."""
        for name, p in network.named_parameters():
            if name in self.mean:
                p.copy_(self.mean[name])

    def posterior(self, network: nn.Module, likelihood: Likelihood, n_data: int) -> GaussianPosterior:
        """The posterior around the network's weights, which must be the mean."""
        subset = resolve_subset(network, "all", ())
        with torch.inference_mode(False), torch.no_grad():
            mean = subset.flatten(network)
            mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
            squares = torch.cat([self.squares[name].reshape(-1) for name in subset.names]).to(mean)
            typical = mean.square().mean().sqrt()
            rounding = torch.finfo(mean.dtype).eps * mean.abs().clamp(min=float(typical) or 1.0)
            precision = 1 / (squares / self.snapshots).clamp(min=rounding.square())
            weights = fingerprint(network)
        return GaussianPosterior(network, subset, likelihood, mean, Diagonal(precision), n_data, weights)

    def state(self) -> dict[str, Any]:
        """Copies, because training may continue while a checkpoint is written."""
        mean, squares = ({name: t.clone() for name, t in part.items()} for part in (self.mean, self.squares))
        return {"snapshots": self.snapshots, "mean": mean, "squares": squares}


def with_statistics(network: nn.Module) -> list[Any]:
    """The layers with running statistics."""
    return [m for m in network.modules() if getattr(m, "running_mean", None) is not None and hasattr(m, "momentum")]


def update_statistics(network: nn.Module, batches: Iterable[Any]) -> None:
    """Recompute the running statistics from inputs x. Weights, modes, gradients and random states do not change."""
    layers = with_statistics(network)
    momenta = [layer.momentum for layer in layers]
    with borrowed(network, ()), torch.no_grad():
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.train()
            seen = largest = 0
            for x in batches:
                x = inputs.contained(network, x)
                size = inputs.batch_size(x)
                if size == 1 and largest > 1:  # a last batch of one example has no variance
                    continue
                seen, largest = seen + size, max(largest, size)
                for layer in layers:
                    layer.momentum = size / seen
                inputs.call(network, x)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
