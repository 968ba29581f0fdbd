"""`posterior.novelty(x)`: the share of a weak prior's variance at an input that the data have not removed.

A variance is not comparable between inputs: where the network's gradients are small, every variance is small. Its share
of the prior's variance is comparable. For the weights of the last layer, with the input `a`,

    novelty(x) = tr(J Σ Jᵀ) / tr(J Σ₀ Jᵀ) = Σ_j ã_j² ρ/(μ_j + ρ) / ‖a‖²  ∈ [0, 1],        ã = Qᵀa,

where `Q diag(μ) Qᵀ = Σ_o H_oo` is the layer's curvature summed over outputs. For a Kronecker block, and for every
regression, this sum is a multiple of the second moments `Σₙ aaᵀ` of the training inputs `a`. The prior is as strong as
one average training example, `ρ = tr(Σ_o H_oo) / (I N)`, so the score does not depend on the posterior's prior, and
weaker priors rank inputs similarly.

Directions that no training example has used keep all their variance, as in NuSA (Cook et al. 2020) and ViM (Wang et al.
2022); the other directions are scaled as in a Mahalanobis distance with normalised features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.output_gaussian import LayerJacobian
from lightning_bayes.jacobian.plan import LayerUse, PlanCache, find_last_layer
from lightning_bayes.network import CurvatureError, Subset, SubsetError, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.float64 import cast_like
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError, implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.structures import Structure
from lightning_bayes.structures.factor import Factor

Posterior = TypeVar("Posterior", bound=GaussianPosterior)


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The data's information about the last layer's inputs, which does not depend on the prior."""

    layer: Subset
    factor: Factor  # Q diag(μ) Qᵀ
    prior: Tensor  # ρ
    plans: PlanCache

    def novelty_of(self, a: Tensor) -> Tensor:
        """# [T, I] positions of one example, or [B, T, I] -> [B], the mean over positions"""
        shares = self.factor.expand(self.prior / (self.factor.spectrum + self.prior), -1)[0]
        a = cast_like(a, self.factor.values)
        left = self.factor.rotate(a).square() @ cast_like(shares, a)
        return (left / a.square().sum(-1).clamp(min=torch.finfo(a.dtype).tiny)).mean(-1)


@implements("novelty")
def novelty(posterior: GaussianPosterior, x: Any) -> Tensor:
    """# [B]"""
    last = last_layer(posterior, x)
    if isinstance(last, str):
        raise PosteriorError(last)
    return _score(posterior, last, x)[0]


class NoveltyScore:
    """The novelty of `x`, if the posterior has it. A linearised network's passes contain the inputs of its last layer:
    if `observe` sees them, the score needs no further pass."""

    def __init__(self, posterior: GaussianPosterior, x: Any) -> None:
        self._posterior, self._x = posterior, x
        self._last = "its weights are sharded" if posterior.is_sharded else last_layer(posterior, x)
        self._parts: list[Tensor] = []

    def observe(self, jacobian: LayerJacobian) -> None:
        if isinstance(self._last, str):
            return
        for layer, calls in zip(jacobian.plan.layers, jacobian.matched.calls, strict=True):
            if layer.weight is not None and layer.weight.name in self._last.layer.names:
                self._parts.append(self._last.novelty_of(_layer_inputs(layer, calls)))

    def outputs(self) -> Tensor | None:
        """The network's outputs, from a forward pass that also gives the score; None for a posterior without a score.
        # [B, ...]"""
        if isinstance(self._last, str):
            return None
        novelty, f = _score(self._posterior, self._last, self._x)
        self._parts = [novelty]
        return f

    def value(self) -> Tensor | None:
        """# [B]"""
        if not self._parts and self.outputs() is None:
            return None
        return torch.cat(self._parts).detach()


def novelty_p(known: Tensor, scores: Tensor) -> Tensor:
    """`(1 + #{known ≥ s}) / (n + 1)` for sorted known scores: a conformal p-value. An input that is exchangeable with
    the known ones has `p ≤ α` with a probability of at most `α`.  # [n], [B] -> [B]"""
    as_novel = len(known) - torch.searchsorted(known.to(scores), scores)
    return (1 + as_novel).to(scores) / (len(known) + 1)


class KnownInputs:
    """Held-out batches; the first pass over them also computes the novelty of their inputs."""

    def __init__(self, posterior: GaussianPosterior, loader: Iterable[Any]) -> None:
        self._posterior, self._loader = posterior, loader
        self._scores: list[Tensor] = []
        self._has_all = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_all:
            yield from self._loader
            return
        self._scores.clear()
        for batch in self._loader:
            score = NoveltyScore(self._posterior, inputs.split(self._posterior.network, batch, "val")[0]).value()
            self._scores += [] if score is None else [score]
            yield batch
        self._has_all = True

    def keep_in(self, posterior: Posterior) -> Posterior:
        """Return the posterior with these scores, so its predictions can compare new scores with them."""
        return replace(posterior, known_novelty=torch.cat(self._scores).sort().values) if self._scores else posterior


def last_layer(posterior: GaussianPosterior, x: Any) -> LastLayer | str:
    """The last layer, or the reason why there is no score."""
    structure = posterior.curvature.structure if isinstance(posterior, LaplacePosterior) else posterior.precision

    def make() -> LastLayer | str:
        with torch.inference_mode(False):
            few = inputs.to_device(inputs.contained(posterior.network, x), posterior.device)
            try:
                return _make_last_layer(posterior, structure, few)
            except (PosteriorError, SubsetError, CurvatureError) as error:
                return f"there is no novelty for this posterior: {error}"

    return posterior.plans.shared(structure, make)


def _make_last_layer(posterior: GaussianPosterior, structure: Structure, x: Any) -> LastLayer:
    network, subset, plans = posterior.network, posterior.subset, PlanCache()
    with borrowed(network, [name for name, _ in network.named_parameters()]):
        names = find_last_layer(network, x)
    if subset.mask is not None or not set(names) <= set(subset.names):
        raise PosteriorError(
            f"it lacks weights of the last layer ({', '.join(names)}); fit subset='all' or 'last_layer'"
        )
    layer = Subset(names, tuple(subset.shapes[subset.names.index(name)] for name in names))
    with borrowed(network, names):
        plan = plans.find_or_make(network, layer, x)
    if plan.unmatched_parameters or len(plan.layers) != 1 or plan.layers[0].layout.shape[0] != 1:
        raise PosteriorError(f"the last layer ({names[0]}) is not a single product with a weight matrix")
    layout = plan.layers[0].layout
    starts = [subset.starts[name] for name in names]
    own = [torch.arange(start, start + s.numel(), device="cpu") for start, s in zip(starts, layer.shapes, strict=True)]
    rows = layout.gather(torch.cat(own)).unflatten(-1, layout.shape)[
        0
    ]  # the positions of [W b] in the posterior [O, I]
    for block in structure.parameter_blocks(subset):
        if not (block.places == rows[0, 0]).any():
            continue  # skip the block without sorting its places
        order = block.places.argsort()
        at = torch.searchsorted(block.places[order], rows).clamp(max=len(order) - 1)
        if (block.places[order][at] == rows).all():
            factor = block.matrix.input_factor(order[at])
            return LastLayer(layer, factor, factor.trace / (factor.size * posterior.n_data), plans)
    raise PosteriorError(f"the last layer's weights ({names[0]}) are not in one block of the posterior")


def _score(posterior: GaussianPosterior, last: LastLayer, x: Any) -> tuple[Tensor, Tensor]:
    posterior.check_weights()
    network = posterior.network
    with torch.inference_mode(False), borrowed(network, last.layer.names):
        x = inputs.to_device(inputs.contained(network, x), posterior.device)
        a, f = _inputs(network, last, x)
    return last.novelty_of(a).detach(), f.detach()


def _inputs(network: nn.Module, last: LastLayer, x: Any) -> tuple[Tensor, Tensor]:
    """The layer's inputs, with a one for the bias, and the network's outputs.  # [B, T, I], [B, ...]"""
    plan, parameters = last.plans.find_or_make(network, last.layer, x), last.layer.parameters(network)
    with plan.recorder(parameters, inputs.batch_size(x)) as recorder:
        f = inputs.call(network, x)
    matched = plan.match(f, recorder.calls, parameters)
    if matched.mixed and len(f) > 1:
        parts = [_inputs(network, last, example)[0] for example in inputs.take_each(network, x)]
        return torch.cat(parts), f
    (layer,), (calls,) = plan.layers, matched.calls
    return _layer_inputs(layer, calls), f


def _layer_inputs(layer: LayerUse, calls: list[Call]) -> Tensor:
    """The layer's inputs, with a one for the bias if there is a bias.  # [B, T, I]"""
    a = layer.inputs(calls)
    assert a is not None  # the layer has a weight
    return a[0] if layer.bias is None else torch.cat([a[0], a.new_ones(*a.shape[1:3], 1)], -1)
