"""`Subnetwork`: single weights that get a full covariance, while all others keep their trained values.

Daxberger et al. (2021) choose the subnetwork `S` whose posterior `N(θ_S; θ*_S, P_S⁻¹) Π_r δ(θ_r − θ*_r)` is closest to
the posterior of all weights in the Wasserstein distance. If the posterior of all weights factorises, with marginal
variances `σ²`, the distance is

    W₂² = Σ_{i ∉ S} σᵢ²,

so the subnetwork of the weights with the largest marginal variances minimises the distance. Only the choice assumes
independence: the posterior of the subnetwork has all correlations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, format_names, format_value
from lightning_bayes.arguments import seed as check_seed
from lightning_bayes.curvature.fit import check_processes
from lightning_bayes.network import DataError, Processes, SubsetError
from lightning_bayes.network.borrowed import check_network
from lightning_bayes.network.messages import warn
from lightning_bayes.network.subset import resolve_subset, trainable
from lightning_bayes.posterior.gaussian import GaussianPosterior
from lightning_bayes.posterior.prior import as_precision, per_parameter

Criterion = Literal["laplace_diag", "magnitude", "random"]


@dataclass(frozen=True)
class Subnetwork:
    """`n` single weights, for `subset=` of `fit_laplace` and `LaplaceCallback`.

    Args:
        n: the number of weights.
        by: the criterion: the largest marginal variance of a diagonal Laplace posterior ("laplace_diag", one more pass
            over the data) or of a fitted posterior, such as that of a `SWAGCallback`; the largest "magnitude"; or
            "random".
        seed: the seed of "random".
    """

    n: int
    by: Criterion | GaussianPosterior = "laplace_diag"
    seed: int = 0

    def __post_init__(self) -> None:
        count("n", self.n)
        check_seed("seed", self.seed)
        if not isinstance(self.by, GaussianPosterior):
            if not isinstance(self.by, str) or self.by not in get_args(Criterion):
                known = ", ".join(map(repr, get_args(Criterion)))
                raise ValueError(f"unknown by {format_value(self.by)}: use one of {known}, or a fitted posterior")
        elif self.by.is_sharded:
            raise ValueError("by is a posterior whose weights are sharded over processes: gather it first")

    def in_network(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        prior_precision: float | Tensor | Sequence[float],
        diagonal: Callable[[], Tensor],
        processes: Processes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The positions of the chosen weights among all trainable weights, the same on all processes, and their prior
        precision. `diagonal` computes the diagonal of the curvature by a pass over `loader`.  # [n]"""
        check_processes(processes)
        whole = resolve_subset(check_network(network), "all", ())
        with torch.inference_mode(False), torch.no_grad():
            δ = as_precision(prior_precision, whole, whole.flatten(network))
            if self.by == "laplace_diag":
                if isinstance(loader, Iterator):
                    raise DataError(
                        "Subnetwork(by='laplace_diag') passes over the data twice, but the loader is an iterator: pass "
                        "a list or a DataLoader"
                    )
                H = diagonal()
                positions = self._largest(1 / (H + per_parameter(δ, whole)), processes or Processes())
                self._warn_of_dead_weights(H[positions])
            else:
                positions = self._largest(self._scores(network), processes or Processes())
            if δ.ndim:
                chosen = resolve_subset(network, positions, ())
                layers = [whole.layers.index(layer) for layer in chosen.layers]
                δ = δ[positions] if len(δ) == whole.size else δ[layers]
        return positions, δ

    def _largest(self, scores: Tensor, processes: Processes) -> Tensor:
        most = int((scores > -torch.inf).sum())
        if self.n > most:
            raise SubsetError(f"Subnetwork(n={self.n}) asks for more weights than the {most} that are available")
        positions = scores.argsort(descending=True, stable=True)[: self.n]
        if processes.rank > 0:
            positions.zero_()  # rounding may differ between devices, so all processes use the choice of rank 0
        processes.sum_([positions])
        return positions.sort().values

    def _warn_of_dead_weights(self, H: Tensor) -> None:
        dead = int((H == 0).sum())
        if 2 * dead > self.n:
            warn(
                "%d of the %d chosen weights have no curvature, because no training output depends on them (dead "
                "units, or inputs that are always zero). Their variance equals the prior's, which is the largest "
                "possible: choose by='magnitude', or by= the posterior of a SWAGCallback",
                dead,
                self.n,
            )

    def _scores(self, network: nn.Module) -> Tensor:
        """The scores of all trainable weights; −∞ excludes a weight.  # [P]"""
        parameters = trainable(network)
        if isinstance(self.by, GaussianPosterior):
            return _marginal_variances(self.by, parameters)
        weights = torch.cat([p.detach().reshape(-1).abs() for p in parameters.values()])
        if self.by == "magnitude":
            return weights
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(len(weights), generator=generator, dtype=torch.float64, device="cpu").to(weights)


def _marginal_variances(posterior: GaussianPosterior, parameters: dict[str, nn.Parameter]) -> Tensor:
    """The variance of each parameter in another posterior, −∞ for parameters that this posterior does not cover. Their
    names differ if the other posterior's network contains this network as a submodule.  # [P]"""
    subset, variances = posterior.subset, posterior.precision.inverse_diagonal()
    if subset.mask is not None:
        flat = variances.new_full((subset.full_size,), -torch.inf)
        flat[subset.mask.to(flat.device)] = variances
        variances = flat
    parts = variances.split([shape.numel() for shape in subset.shapes])
    of_object = {id(p): part for p, part in zip(subset.parameters(posterior.network).values(), parts, strict=True)}
    of_name = dict(zip(subset.names, parts, strict=True))
    if not any(id(p) in of_object for p in parameters.values()):  # the network is a copy
        of_object = {id(p): of_name[name] for name, p in parameters.items() if name in of_name}
    outside = [variances.new_full((p.numel(),), -torch.inf) for p in parameters.values()]
    scores = [of_object.get(id(p), other) for p, other in zip(parameters.values(), outside, strict=True)]
    if not of_object or any(len(score) != p.numel() for p, score in zip(parameters.values(), scores, strict=True)):
        raise SubsetError(
            f"by is a posterior of another network, over {format_names(subset.names)}: pass one of this network"
        )
    return torch.cat(scores).to(next(iter(parameters.values())).device)
