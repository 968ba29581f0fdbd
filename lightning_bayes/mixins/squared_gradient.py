"""The squared-gradient term `R = (S/2) Σ_λ σ_λ² ḡ_λ²` (eq. (30) of the Variational Laplace paper) and its gradient.

`ḡ` depends on the weights, so the gradient of R contains second derivatives of the sampled loss `ℓ̃` with Hessian `H̃`:

    ∂R/∂log σ_λ = S σ_λ² ḡ_λ²,      ∂R/∂θ = S H̃ v   with   v = σ² ḡ.

- `exact`: R with its graph, for a backward pass through the first backward pass.
- `by_differences`: R and its gradient, with `H̃ v` as the difference of two gradients, `(ḡ(θ + εv) − ḡ(θ))/ε`. A second
  ordinary forward and backward pass is cheaper than double backward, and needs no second derivatives of operators.
- `with_true_labels`: the same, but the second pass also gives the gradient for the true labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.mixins.training_step import ForwardCall, Gradients
from lightning_bayes.network.accumulation import widest
from lightning_bayes.network.borrowed import at_weights
from lightning_bayes.network.subset import flat, parts
from lightning_bayes.trainer.dry_run import mean_nll

LARGEST_HESSIAN = 20_000  # weights


def exact(nll: Tensor, weights: Sequence[nn.Parameter], log_σ: Sequence[Tensor], S: int) -> Tensor:
    """`R` for the mean loss `nll` of `S` examples, with a graph."""
    gradients = torch.autograd.grad(nll, list(weights), create_graph=True, allow_unused=True)
    used = [(g, l) for g, l in zip(gradients, log_σ, strict=True) if g is not None]
    if not used:
        return nll.new_zeros(())
    return squared_gradient([g for g, _ in used], [l for _, l in used], S)


def squared_gradient(gradients: Iterable[Tensor], log_σ: Iterable[Tensor], S: int) -> Tensor:
    """`(S/2) Σ_λ σ_λ² ḡ_λ²`, where `ḡ` is the gradient of a mean over `S` examples.

    >>> squared_gradient([torch.tensor([0.5])], [torch.tensor([0.0])], S=4)
    tensor(0.5000)
    """
    terms = [((2 * widen(l)).exp() * widen(g).square()).sum() for g, l in zip(gradients, log_σ, strict=True)]
    return 0.5 * S * torch.stack(terms).sum()


def hessian_term(nll: Tensor, weights: Sequence[Tensor], log_σ: Sequence[Tensor]) -> Tensor:
    """`½ Σ_λ σ_λ² ∂²nll/∂w_λ²`, which replaces the squared gradient in eq. (20); with a graph.

    For study on small networks: it takes a backward pass for every weight. If the log-likelihood is convex in a weight,
    `H_λλ = −N ∂²nll/∂w_λ² > β/s_λ²`, the objective grows with σ without bound (eq. (24)).
    """
    if sum(w.numel() for w in weights) > LARGEST_HESSIAN:
        raise ValueError(
            f"estimator='hessian' is for networks of at most {LARGEST_HESSIAN} weights, because it takes a backward "
            "pass for each: use estimator='fisher'"
        )
    gradients = torch.autograd.grad(nll, list(weights), create_graph=True, allow_unused=True)
    total = nll.new_zeros(())
    for w, g, l in zip(weights, gradients, log_σ, strict=True):
        if g is None or not g.requires_grad:
            continue  # the loss does not depend on w, or is linear in it
        diagonal = []
        for position, entry in enumerate(g.reshape(-1)):
            (row,) = torch.autograd.grad(entry, w, create_graph=True, allow_unused=True)
            diagonal.append(entry.new_zeros(()) if row is None else row.reshape(-1)[position])
        total = total + 0.5 * ((2 * l.reshape(-1)).exp() * torch.stack(diagonal)).sum()
    return total


def gradients_of(loss: Tensor, parameters: Sequence[nn.Parameter], keep_graph: bool = False) -> Gradients:
    """The gradient of each parameter that `loss` depends on. Do not change it in place: two may be the same tensor."""
    gradients = torch.autograd.grad(loss, list(parameters), retain_graph=keep_graph, allow_unused=True)
    return {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}


def by_differences(
    call: ForwardCall,
    likelihood: Likelihood,
    y: Tensor,
    gradients: Gradients,
    log_σ: Mapping[nn.Parameter, nn.Parameter],
) -> tuple[Tensor, Gradients]:
    """`R` for labels `y`, and its gradient in the weights and in log σ. `gradients` are those of the mean NLL of `y` at
    the output of `call`; R gets a gradient for the same parameters."""
    S = len(call.output)
    if not any(p in log_σ for p in gradients):
        return call.output.new_zeros(()), {}
    direction = Direction.of(gradients, log_σ)
    ε = step_size(direction.v, direction.slope, reach(likelihood, call.output.detach(), y))
    with at_weights(call.network, direction.moves(ε)), call.repeated() as f:
        moved = gradients_of(mean_nll(likelihood, f, y), direction.parameters)
    of_weights = direction.unflatten((direction.flatten(moved) - direction.ḡ).mul_(S / ε), moved)
    return 0.5 * S * direction.slope.to(call.output.dtype), of_weights | direction.of_log_σ(S)


def with_true_labels(
    call: ForwardCall,
    likelihood: Likelihood,
    y: Tensor,
    y_true: Tensor,
    gradients: Gradients,
    log_σ: Mapping[nn.Parameter, nn.Parameter],
    sign: int,
) -> tuple[Tensor, Gradients]:
    """`R`, and the gradient of its sum with the mean NLL `ℓ` of the true labels, in one pass at `μ + εv`:

        ∂/∂θ (ℓ + (S/ε) ℓ̃)(μ + εv) − (S/ε) ḡ(μ) = ∂ℓ/∂θ + S H̃ v + ε ∂²ℓ/∂θ² v + O(ε²).

    The last term is an error; a random `sign` of ε makes it zero on average.
    """
    S = len(call.output)
    if not any(p in log_σ for p in gradients):
        with call.repeated() as f:
            return f.new_zeros(()), gradients_of(mean_nll(likelihood, f, y_true), list(gradients))
    direction = Direction.of(gradients, log_σ)
    ε = sign * shared_step_size(direction.v, direction.slope, reach(likelihood, call.output.detach(), y), S)
    with at_weights(call.network, direction.moves(ε)), call.repeated() as f:
        loss = mean_nll(likelihood, f, y_true) + S / ε * mean_nll(likelihood, f, y)
        moved = gradients_of(loss, direction.parameters)
    of_weights = direction.unflatten(direction.flatten(moved).sub_(direction.ḡ * (S / ε)), moved)
    return 0.5 * S * direction.slope.to(call.output.dtype), of_weights | direction.of_log_σ(S)


@dataclass(frozen=True)
class Direction:
    """`v = σ² ḡ`. Parameters without a σ come last and do not move."""

    parameters: list[nn.Parameter]
    ḡ: Tensor  # of all parameters, flat
    v: Gradients
    squares: Tensor  # σ² ḡ²
    log_σ: list[nn.Parameter]

    @staticmethod
    @torch.no_grad()
    def of(gradients: Gradients, log_σ: Mapping[nn.Parameter, nn.Parameter]) -> Direction:
        weights = [p for p in gradients if p in log_σ]
        parameters = [*weights, *(p for p in gradients if p not in log_σ)]
        of_weights = [log_σ[p] for p in weights]
        ḡ = flat([gradients[p] for p in parameters])
        σ2 = flat(of_weights).mul_(2).exp_()
        v = σ2.mul_(ḡ[: len(σ2)])
        return Direction(parameters, ḡ, dict(zip(weights, parts(v, weights), strict=True)), v * ḡ[: len(v)], of_weights)

    @property
    def slope(self) -> Tensor:
        """`ḡᵀv`, the derivative of the loss in this direction."""
        return widest(self.squares.sum())

    def moves(self, ε: Tensor) -> Gradients:
        """`εv`."""
        weights = list(self.v)
        return dict(zip(weights, parts(flat(self.v.values()).mul_(ε), weights), strict=True))

    def flatten(self, gradients: Gradients) -> Tensor:
        """Gradients of all parameters as one vector; missing ones are zero."""
        return flat([gradients[p] if p in gradients else torch.zeros_like(p) for p in self.parameters])

    def unflatten(self, vector: Tensor, like: Gradients) -> Gradients:
        """The parts of a vector, for parameters that have a gradient in `like`."""
        pairs = zip(self.parameters, parts(vector, self.parameters), strict=True)
        return {p: part for p, part in pairs if p in like}

    def of_log_σ(self, S: int) -> Gradients:
        """`∂R/∂log σ`."""
        return dict(zip(self.log_σ, parts(S * self.squares, self.log_σ), strict=True))


@torch.no_grad()
def step_size(v: Gradients, slope: Tensor, reach: Tensor) -> Tensor:
    """`ε` for which the gradient changes by about the root of its rounding error, whatever the size of σ and weights.

    The first-order change of the loss along v is `ε ḡᵀv = ε Σ σ² ḡ²`, and may be as large as `reach`. If v barely
    changes the loss, the size of the weights is the limit. Both limits are multiplied by the root of the dtype's
    precision. In float32 the error of `H̃ v` is 1e-3 to 4e-2 for any σ and batch size, from untrained networks to
    networks that are certain of every label.
    """
    length, size = (widest(flat(tensors).norm()) for tensors in (v.values(), v))
    ε = _root_precision(v) * torch.minimum(reach / slope, 0.6 * torch.where(size > 0, size, 1.0) / length)
    return torch.where(ε.isfinite() & (ε > 0), ε, 1.0).clamp_max(1e30)  # 1 for v = 0


def shared_step_size(v: Gradients, slope: Tensor, reach: Tensor, S: int) -> Tensor:
    """`ε` for a pass that the true labels share, at most ten times `S` times the root of the precision.

    The true labels' gradient is off by `ε ∂²ℓ/∂θ² v`, which is `ε/S` of `∂R/∂θ` if the two Hessians are alike; the
    rounding error of `(S/ε) ḡ` is about the precision times `S/ε`. With this limit both are at most a few thousandths
    of the gradients for any σ. For a small σ, the other limits alone would make `H̃ v`, a small part of the sum, more
    precise than necessary, and the error in the true labels' gradient too large.
    """
    return step_size(v, slope, reach).clamp_max(10 * S * _root_precision(v))


def _root_precision(v: Gradients) -> float:
    """The root of the coarsest precision among the weights; `v` itself has the finest."""
    return max(torch.finfo(p.dtype).eps for p in v) ** 0.5


def reach(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """The change of the mean loss, in nats, when outputs move by about their own size.

    With residuals r and centred outputs f (sizes are roots of the mean square over examples) it is `‖r‖ ‖f‖`. The
    logits of class labels must not move by more than about 1, and the mean over `S` examples, which move in different
    directions, changes less than each of them. A Gaussian's loss is quadratic and may change by much more than 1.
    """
    S = len(f)
    size_r = widest(likelihood.residual(f, y)).square().sum() / S
    f = widest(f)
    size_f = (f - f.mean(0) * (S > 1)).square().sum() / S
    if likelihood.has_probs:
        return 2 * (size_r * (1 + size_f)).sqrt() / S**0.25
    return 3 * (1 + (size_r * size_f).sqrt()).sqrt()
