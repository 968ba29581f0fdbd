"""`GaussianPrior`: the prior `N(m, Λ⁻¹)` of a Laplace posterior, up to its strength `δ`, the prior precision:

    Λ = diag(δ)      around `m`, which is zero or pretrained weights,
    Λ = δ·P₀         of another posterior `N(m, P₀⁻¹)`, for datasets that arrive one after another.

With the curvature `H` of the new data, the sum `P = H + Λ` is exact for full and diagonal matrices. The sum of two
Kronecker products is not a Kronecker product. In that case, the factors are added, which is an approximation (Ritter et
al. 2018, "Online structured Laplace approximations for overcoming catastrophic forgetting").

A prior precision is one number, one per layer, or one per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import format_names, format_value
from lightning_bayes.likelihoods.outputs import vector
from lightning_bayes.network import Subset
from lightning_bayes.network.float64 import number_like
from lightning_bayes.network.subset import layer_of, resolve_subset
from lightning_bayes.options.fit import Prior
from lightning_bayes.structures import Diagonal, Structure, StructureError

if TYPE_CHECKING:
    from lightning_bayes.posterior.gaussian import GaussianPosterior

Weights = Tensor | Mapping[str, Tensor]
_ONE_FACTOR = "with a posterior as prior=, prior_precision is a factor on that posterior's precision: pass one number"


class PriorError(ValueError):
    """Raised if a prior does not fit the posterior: it has the wrong size or sign, or covers other weights."""


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """`N(m, Λ⁻¹)` with `Λ = diag(δ)` or `δ·P₀`."""

    mean: Tensor | None = None  # m [P]; None is zero
    precision: Structure | None = None  # P₀; None is the identity

    def distance(self, θ: Tensor) -> Tensor:
        """`θ − m`.  # [P]"""
        return θ if self.mean is None else θ - self.mean

    def matrix(self, δ: Tensor, subset: Subset) -> Structure:
        """`Λ`."""
        if self.precision is None:
            return Diagonal(per_parameter(δ, subset).expand(subset.size))
        if δ.ndim:
            raise PriorError(_ONE_FACTOR)
        return self.precision.scale(δ)

    def added_to(self, H: Structure, δ: Tensor, subset: Subset) -> Structure:
        """`P = H + Λ`."""
        if self.precision is None:
            return H.add_prior(per_parameter(δ, subset))
        try:
            return H.add_approximately(self.matrix(δ, subset))
        except StructureError as error:
            raise PriorError(f"prior= cannot be added to this curvature: {error}") from None

    def to(self, like: Tensor) -> GaussianPrior:
        """The same prior on the device and in the dtype of `like`."""
        return GaussianPrior(
            None if self.mean is None else self.mean.to(like),
            None if self.precision is None else self.precision.to(like.device, like.dtype),
        )

    def to_state(self) -> dict[str, Any]:
        return {"mean": self.mean, "precision": None if self.precision is None else self.precision.to_state()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> GaussianPrior:
        precision = state["precision"]
        return GaussianPrior(state["mean"], None if precision is None else Structure.from_state(precision))

    @staticmethod
    def of(prior: Prior, subset: Subset) -> GaussianPrior:
        """The prior that `prior=` of `fit_laplace` describes, for the weights of `subset`."""
        if prior.posterior is not None:
            _check_same_subset(prior.posterior, subset)
            return GaussianPrior(prior.posterior.mean.detach(), prior.posterior.precision)
        return GaussianPrior() if prior.mean is None else GaussianPrior(_flat(prior.mean, subset))


def check_prior(prior: Prior) -> None:
    """Check everything about a prior that does not depend on the network; files are checked when they are read."""
    from lightning_bayes.posterior.gaussian import GaussianPosterior

    posterior, mean = (None if isinstance(given, (str, PathLike)) else given for given in (prior.posterior, prior.mean))
    if posterior is not None:
        if not isinstance(posterior, GaussianPosterior):
            raise PriorError(f"prior must be a posterior, such as one from fit_laplace, got {format_value(posterior)}")
        if posterior.is_sharded:
            raise PriorError("prior= is sharded over processes: pass prior.gather(network)")
    elif isinstance(mean, Mapping):
        if "fingerprint" in mean:
            raise PriorError("the prior's mean must contain weights, but this is a posterior's file: pass prior=file")
        for name, value in mean.items():
            if not isinstance(value, Tensor):
                raise PriorError(f"the prior's mean must contain tensors, got {format_value(value)} for {name!r}")
    elif isinstance(mean, Tensor):
        if mean.ndim != 1 or not mean.is_floating_point():
            raise PriorError(f"the prior's mean must be a vector of weights [P], got {format_value(mean)}")
        _check_values("the vector", mean)
    elif mean is not None:
        raise PriorError(f"the prior's mean must be a flat tensor of weights or a state dict, got {format_value(mean)}")


def check_fits(prior: Prior, network: nn.Module, subset: str | Sequence[str] | Tensor) -> None:
    """Check before a pass over the data that the prior covers the same weights. The last layer is only known after a
    pass."""
    if (prior.posterior is None and prior.mean is None) or (isinstance(subset, str) and subset == "last_layer"):
        return
    GaussianPrior.of(prior, resolve_subset(network, subset, ()))


def _check_same_subset(prior: GaussianPosterior, subset: Subset) -> None:
    own = prior.subset
    same_mask = own.mask is subset.mask or (
        own.mask is not None and subset.mask is not None and torch.equal(own.mask.cpu(), subset.mask.cpu())
    )
    if (own.names, own.shapes) != (subset.names, subset.shapes) or not same_mask:
        raise PriorError(
            f"prior= covers {own.size} weights ({format_names(own.names, 2)}), but the fit covers {subset.size} "
            f"({format_names(subset.names, 2)}): choose the same subset= of the same network"
        )


def _flat(weights: Weights, subset: Subset) -> Tensor:
    """# [P]"""
    if isinstance(weights, Tensor):
        if len(weights) != subset.size:
            raise PriorError(
                f"the prior's mean has {len(weights)} numbers, but there are {subset.size} weights "
                f"({format_names(subset.names, 2)}): pass one for each, in the order of posterior.mean"
            )
        return weights.detach().clone()  # training may change the tensor
    parts = []
    for name, shape in zip(subset.names, subset.shapes, strict=True):
        if name not in weights or weights[name].shape != shape:
            other = "none" if name not in weights else f"shape {list(weights[name].shape)}"
            raise PriorError(f"the prior's mean needs {name} of shape {list(shape)}, but the state dict has {other}")
        _check_values(name, weights[name])
        parts.append(weights[name].detach().reshape(-1))
    return subset.narrow(torch.cat(parts)).clone()


def _check_values(name: str, weights: Tensor) -> None:
    if weights.is_meta or not weights.is_floating_point():
        raise PriorError(f"the prior's mean must contain real numbers, but {name} is {format_value(weights)}")
    if not weights.isfinite().all():
        raise PriorError(f"the prior's mean has NaN or infinite weights in {name}")


def check_precision(prior_precision: Any) -> None:
    """Check everything about a prior precision that does not depend on the network."""
    _check_positive(vector("prior_precision", prior_precision, PriorError))


def _check_positive(precision: Tensor) -> None:
    least, most = precision.detach().aminmax()
    if not (least > 0 and most < math.inf):  # NaN fails both comparisons
        wrong = least if not least > 0 else most
        raise PriorError(f"prior_precision must be positive and finite, got {wrong.item():g}")


def as_precision(prior_precision: float | Tensor | Sequence[float], subset: Subset, like: Tensor) -> Tensor:
    """A checked tensor `[]`, `[layers]` or `[P]`, in the dtype and on the device of `like`."""
    vector("prior_precision", prior_precision, PriorError)
    precision = number_like(prior_precision, like)
    _check_positive(precision)
    precision = precision.reshape(()) if precision.numel() == 1 else precision
    if precision.shape not in ((), (len(subset.layers),), (subset.size,)):
        raise PriorError(
            f"prior_precision must be a number, one for each of the {len(subset.layers)} layers "
            f"({format_names(subset.layers, 4)}), or one for each of the {subset.size} parameters, but it has shape "
            f"{tuple(precision.shape)}"
        )
    return precision


def per_parameter(precision: Tensor, subset: Subset) -> Tensor:
    """`δ` of each parameter; a scalar stays a scalar.  # [] or [P]"""
    if precision.ndim == 0 or precision.shape == (subset.size,):
        return precision
    return precision[subset.layer_index.to(precision.device)]


def per_layer_sums(values: Tensor, subset: Subset) -> Tensor:
    """# [P] -> [layers]"""
    sums = values.new_zeros(len(subset.layers))
    if subset.mask is not None:
        return sums.index_add_(0, subset.layer_index.to(values.device), values)
    parts = values.split([shape.numel() for shape in subset.shapes])
    owners = [subset.layers.index(layer_of(name)) for name in subset.names]
    return sums.index_add_(0, torch.tensor(owners, device=sums.device), torch.stack([part.sum() for part in parts]))
