"""`PriorGroups`: the layers that share a prior precision.

The scale of weights before a normalisation is arbitrary, so a prior shared with other weights is meaningless there.
With a separate precision for each such layer, predictions do not depend on the scale (tutorial, section 6,
recommendation 2 and proposition 3): `log π(θ) ∝ λ' ‖θ'‖² + Σₙ λₙ ‖θₙ‖²`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.jacobian.normalised import normalised_layers
from lightning_bayes.network import DataError, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.checks import check_loader
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.laplace import LaplacePosterior

logger = logging.getLogger("lightning_bayes")


@dataclass(frozen=True, eq=False)
class PriorGroups:
    """`index` holds the group of each layer; None is one group of all layers."""

    index: Tensor | None = None  # [layers]

    @staticmethod
    def of(posterior: LaplacePosterior, groups: str | None) -> PriorGroups:
        if groups is None:
            return PriorGroups()
        if posterior.prior.precision is not None:
            raise PosteriorError(
                f"the prior is another posterior, with one factor on its precision: leave out groups={groups!r}"
            )
        layers = posterior.subset.layers
        if groups == "layers":
            return PriorGroups(torch.arange(len(layers), device=posterior.device))
        normalised = posterior.curvature.normalised
        if normalised is None:
            raise PosteriorError(
                "groups='normalised' needs the layers before a normalisation, which this posterior does not know: pass "
                "loader= to find them in its first batch"
            )
        if not normalised:
            logger.info("groups='normalised': no layer is directly before a normalisation; all share a prior")
        numbers = {layer: n for n, layer in enumerate(normalised)}
        index = [numbers.get(layer, len(numbers)) for layer in layers]
        return PriorGroups(torch.tensor(index, device=posterior.device).unique(return_inverse=True)[1])

    def pool(self, values: Tensor) -> Tensor:
        """Sum over the layers of each group.  # [layers] -> [groups], or []"""
        if self.index is None:
            return values.sum()
        return values.new_zeros(int(self.index.max()) + 1).index_add(0, self.index.to(values.device), values)

    def spread(self, values: Tensor) -> Tensor:
        """The value of each layer.  # [groups] -> [layers], or [] -> []"""
        return values if self.index is None else values[self.index.to(values.device)]


def with_normalised(posterior: LaplacePosterior, loader: Iterable[Any]) -> LaplacePosterior:
    """Find the layers before a normalisation by running the network on the first batch."""
    batch = next(iter(check_loader(loader)), None)
    if batch is None:
        raise DataError("the loader is empty: groups='normalised' needs an example to run the network on")
    posterior.check_weights()
    with torch.inference_mode(False), borrowed(posterior.network, posterior.subset.names):
        x = inputs.to_device(inputs.split_targets(posterior.network, batch)[0], posterior.device)
        names = normalised_layers(posterior.network, x, posterior.subset)
    return replace(posterior, curvature=replace(posterior.curvature, normalised=names))
