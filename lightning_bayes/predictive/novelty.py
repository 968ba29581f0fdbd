"""`posterior.novelty(x)`: the share of a weak prior's variance that the data have left at an input.

A variance is not comparable between inputs: where the network's gradients are small, every variance is small. Its share
of the prior's variance is comparable. For the weights of the last layer, with the input `a`,

    novelty(x) = tr(J Σ Jᵀ) / tr(J Σ₀ Jᵀ) = Σ_j ã_j² ρ/(μ_j + ρ) / ‖a‖²  ∈ [0, 1],        ã = Qᵀa,

where `Q diag(μ) Qᵀ = Σ_o H_oo` is the layer's curvature summed over outputs: for a Kronecker block, and for every
regression, a multiple of the second moments `Σₙ aaᵀ` of the training inputs. The prior is as strong as one average
training example, `ρ = tr(Σ_o H_oo) / (I N)`, so the score depends on no prior, and weaker priors rank inputs alike.

Directions that no training example has used keep all their variance, as in NuSA (Cook et al. 2020) and ViM (Wang et al.
2022); the others are scaled as in a Mahalanobis distance with normalised features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.jacobian.plan import find_last_layer
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.accumulation import cast_like
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.posterior.gaussian import GaussianPosterior, PlanCache, PosteriorError, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.structures import Structure
from lightning_bayes.structures.factor import Factor


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The data's information on the last layer's inputs, which does not depend on the prior."""

    layer: Subset
    factor: Factor  # Q diag(μ) Qᵀ
    prior: Tensor  # ρ
    plans: PlanCache

    def novelty_of(self, a: Tensor) -> Tensor:
        """# [T, I] positions of one example, or [B, T, I] -> [B], the mean over positions"""
        shares = self.factor.expand(self.prior / (self.factor.spectrum + self.prior), -1)[0]
        left = self.factor.rotate(a).square() @ cast_like(shares, a)
        return (left / a.square().sum(-1).clamp(min=torch.finfo(a.dtype).tiny)).mean(-1)


@implements("novelty")
def novelty(posterior: GaussianPosterior, x: Any) -> Tensor:
    """# [B]"""
    posterior.check_weights()
    network = posterior.network
    structure = posterior.curvature.structure if isinstance(posterior, LaplacePosterior) else posterior.precision
    with torch.inference_mode(False):
        x = inputs.to_device(inputs.contained(network, x), posterior.device)
        last = posterior.plans.shared(structure, lambda: _last_layer(posterior, structure, x))
        with borrowed(network, last.layer.names):
            return last.novelty_of(cast_like(_inputs(network, last, x), last.factor.values)).detach()


def _last_layer(posterior: GaussianPosterior, structure: Structure, x: Any) -> LastLayer:
    network, subset, plans = posterior.network, posterior.subset, PlanCache()
    with borrowed(network, [name for name, _ in network.named_parameters()]):
        names = find_last_layer(network, x)
    if subset.mask is not None or not set(names) <= set(subset.names):
        raise PosteriorError(
            f"novelty needs all weights of the last layer ({', '.join(names)}), but the posterior lacks some: fit "
            "subset='all' or 'last_layer'"
        )
    layer = Subset(names, tuple(subset.shapes[subset.names.index(name)] for name in names))
    with borrowed(network, names):
        plan = plans.find_or_make(network, layer, x)
    if plan.unmatched_parameters or len(plan.layers) != 1 or plan.layers[0].layout.shape[0] != 1:
        raise PosteriorError(f"{names[0]}: novelty needs a last layer that is one product with a weight matrix")
    layout = plan.layers[0].layout
    starts = [subset.starts[name] for name in names]
    own = [torch.arange(start, start + s.numel(), device="cpu") for start, s in zip(starts, layer.shapes, strict=True)]
    rows = layout.gather(torch.cat(own)).unflatten(-1, layout.shape)[
        0
    ]  # the positions of [W b] in the posterior [O, I]
    for block in structure.parameter_blocks(subset):
        order = block.places.argsort()
        at = torch.searchsorted(block.places[order], rows).clamp(max=len(order) - 1)
        if (block.places[order][at] == rows).all():
            factor = block.matrix.input_factor(order[at])
            return LastLayer(layer, factor, factor.trace / (factor.size * posterior.n_data), plans)
    raise PosteriorError(f"{names[0]}: novelty needs the last layer's weights in one block of the posterior")


def _inputs(network: nn.Module, last: LastLayer, x: Any) -> Tensor:
    """The layer's inputs, with a one for the bias.  # [B, T, I]"""
    plan, parameters = last.plans.find_or_make(network, last.layer, x), last.layer.parameters(network)
    with plan.recorder(parameters, inputs.batch_size(x)) as recorder:
        f = inputs.call(network, x)
    matched = plan.match(f, recorder.calls, parameters)
    if matched.mixed and len(f) > 1:
        return torch.cat([_inputs(network, last, example) for example in inputs.take_each(network, x)])
    (layer,), (calls,) = plan.layers, matched.calls
    a = layer.inputs(calls)
    assert a is not None  # the layer has a weight
    return a[0] if layer.bias is None else torch.cat([a[0], a.new_ones(*a.shape[1:3], 1)], -1)
