"""`VariationalLaplaceMixin`: variational inference without sampling weights.

For a minibatch of `S` out of `N` examples, and with the gradient `ḡ = (1/S) ∂ log P(ỹ | x, w = μ)/∂w` for labels `ỹ`
drawn from the model, the objective is (Variational Laplace paper, eq. (30))

    (1/S) L_VL = (1/S) log P(y | x, w = μ) − R − (β/N) Σ_λ KL_λ   with   R = (S/2) Σ_λ σ_λ² ḡ_λ².

The objective is the expected log-likelihood, expanded to second order around the mean with the Fisher information
instead of the Hessian (eqs. (28) and (29)), minus the KL divergence from the prior. The loss is the negative objective.
`S` is the batch size of one process, whose gradient is squared; `N` counts the examples of all processes.

`ḡ` depends on the weights, so the gradient of R contains second derivatives of the sampled loss `ℓ̃` with Hessian `H̃`:

    ∂R/∂log σ_λ = S σ_λ² ḡ_λ²,      ∂R/∂θ = S H̃ v   with   v = σ² ḡ.

- `exact`: R as a differentiable tensor, so that the backward pass of the loss goes through the gradient `ḡ` (double
  backward).
- `by_differences`: R and its gradient, with `H̃ v` as the difference of two gradients, `(ḡ(θ + εv) − ḡ(θ))/ε`. A second
  ordinary forward and backward pass is cheaper than double backward, and needs no second derivatives of operators.
- `with_true_labels`: the same difference, but the second pass also gives the gradient of the loss of the true labels.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_bayes.arguments import instance
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.mixins.activations import warn_piecewise_linear
from lightning_bayes.mixins.gaussian_weights import GaussianWeights
from lightning_bayes.mixins.training_step import (
    ForwardCall,
    Gradients,
    Step,
    StepError,
    run_step,
    with_known_gradient,
    without_wrong,
)
from lightning_bayes.mixins.variational import LAST_LAYER, SAMPLING, VariationalMixin, make_variational
from lightning_bayes.network import Processes, private
from lightning_bayes.network.borrowed import at_weights
from lightning_bayes.network.float64 import widest
from lightning_bayes.network.processes import uniforms
from lightning_bayes.network.subset import flat, parts
from lightning_bayes.options.predictive import GLM
from lightning_bayes.trainer.dry_run import mean_nll

LARGEST_HESSIAN = 20_000  # number of weights


class VariationalLaplaceMixin(VariationalMixin):
    """Train any LightningModule by Variational Laplace: `class Bayes(VariationalLaplaceMixin, YourModule): pass`.

    Your `training_step` does not change. It returns the mean negative log-likelihood from one forward pass of the
    network (a tensor, or a dict with `"loss"`), which the true and the sampled labels share. A step of another form can
    return `self.vl_loss(f, y)`.

    `log_sigma["net.0.weight"]` is the parameter log σ of a weight, and `posterior` the Gaussian over all weights.
    `validate` and `test` score the posterior next to the network at the mean; `predict` returns `Prediction`s.

    Args:
        variational: a dictionary with the keys of `VariationalOptions`.
    """

    def __init__(self, *args: Any, variational: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_variational(self, variational, name="vl", predictive=GLM(samples=10), unused=(*SAMPLING, *LAST_LAYER))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Run your step, and return the Variational Laplace loss instead of the negative log-likelihood."""
        q = self._variational
        with _kernels(q):
            step = run_step(q, super().training_step, batch, batch_idx)
            if not isinstance(step, Step):
                return step
            if _uses_differences(q, step):
                squared_gradient, gradients = _by_differences(q, step)
                kl, loss = q.add_kl(step.loss.detach() + squared_gradient, gradients, step.is_wrong)
                q.log(len(step.f), step.loss, kl, squared_gradient)
            else:
                loss = _exact_loss(q, step.loss, step.f, step.y)
                gradients = gradients_of(loss, [*q.trainable(), *q.log_sigma.parameters()])
                loss = with_known_gradient(loss, without_wrong(gradients, step.is_wrong))
            if not q.checked_kinks:
                q.checked_kinks = True
                warn_piecewise_linear(step.call.network, None if step.call.kwargs else step.call.args)
            return step.with_loss(loss)

    def vl_loss(self, f: Tensor, y: Tensor, y_sampled: Tensor | None = None) -> Tensor:
        """`−(1/S) L_VL` of a minibatch, eq. (30), for outputs `f` with the graph of their forward pass.

        Args:
            f: outputs of the network.
            y: the true labels.
            y_sampled: labels drawn from the model at `f`; by default they are drawn here.
        """
        q = self._variational
        q.called_vl_loss = True
        instance("f", f, Tensor, "the network's outputs, a tensor")
        if not f.requires_grad:
            raise StepError("f does not depend on the weights: pass vl_loss the network's outputs with their graph")
        instance("y", y, Tensor, "a tensor of targets")
        if y_sampled is not None:
            instance("y_sampled", y_sampled, Tensor, "a tensor of targets")
        q.options.likelihood.check(f.detach(), y)
        return _exact_loss(q, mean_nll(q.options.likelihood, f, y), f, y, y_sampled)


# -- eq. (30) ----------------------------------------------------------------------------------------------------------


def _exact_loss(q: GaussianWeights, nll: Tensor, f: Tensor, y: Tensor, y_sampled: Tensor | None = None) -> Tensor:
    """The loss as a differentiable tensor, for double backward."""
    pairs = q.pairs().values()
    weights, log_σ = [μ for μ, _ in pairs], [l for _, l in pairs]
    if q.options.estimator == "hessian":
        squared_gradient = hessian_term(nll, weights, log_σ)
    else:
        sampled = nll
        if q.options.estimator == "fisher":
            sampled = mean_nll(q.options.likelihood, f, draw_labels(q, f, y) if y_sampled is None else y_sampled)
        squared_gradient = exact(sampled, weights, log_σ, len(f))
    kl = q.kl()
    q.log(len(f), nll, kl, squared_gradient)
    return nll + squared_gradient + q.kl_weight * kl


def _by_differences(q: GaussianWeights, step: Step) -> tuple[Tensor, Gradients]:
    """The squared-gradient term, and the gradient of its sum with the mean NLL."""
    likelihood, θ, log_σ = q.options.likelihood, q.trainable(), dict(q.pairs().values())
    if q.options.estimator == "empirical":
        y, sampled = step.y, gradients_of(step.loss, θ)
        gradients = dict(sampled)
    else:
        y, in_two = draw_labels(q, step.f, step.y), q.options.method != "finite_difference"
        sampled = gradients_of(mean_nll(likelihood, step.f, y), θ, keep_graph=not in_two)
        if in_two:
            return with_true_labels(step.call, likelihood, y, step.y, sampled, log_σ, draw_sign(q))
        gradients = gradients_of(step.loss, θ)  # computed last, because this frees the graph before the second pass
    term, term_gradients = by_differences(step.call, likelihood, y, sampled, log_σ)
    both = [p for p in term_gradients if p in gradients]
    if both:
        private.foreach_add_([term_gradients[p] for p in both], [gradients[p] for p in both])
    return term, gradients | term_gradients


def draw_sign(q: GaussianWeights) -> int:
    """1 or −1, chosen by the seed and the number of the draw, so it is the same on every process and in a resumed
    run."""
    return 2 * (hashlib.sha256(f"{q.options.seed} {q.draws}".encode()).digest()[0] & 1) - 1


def draw_labels(q: GaussianWeights, f: Tensor, y: Tensor) -> Tensor:
    """Labels drawn from the model. The random numbers depend on the index of the example, not on the process that has
    the example."""
    q.draws += 1
    f = f.detach()
    dtype = torch.promote_types(f.dtype, torch.float32)
    examples = Processes.current().examples(0, len(f), f.device)
    noise = uniforms(q.options.seed, q.draws, examples, q.options.likelihood.noise_shape(f), dtype)
    return q.options.likelihood.sample(f, noise, y)


# -- how it is computed ------------------------------------------------------------------------------------------------


def _uses_differences(q: GaussianWeights, step: Step) -> bool:
    if q.options.method == "exact" or q.options.estimator == "hessian":
        return False
    if _is_narrow(q):
        reason = "16-bit weights are too coarse"
    elif step.call.input_requires_grad:
        reason = "the network's input depends on trainable parameters outside of it"
    else:
        return True
    if q.options.method != "auto":
        raise ValueError(f"method={q.options.method!r} cannot be used, because {reason}: use 'exact' or 'auto'")
    return False


def _is_narrow(q: GaussianWeights) -> bool:
    return any(log_σ.dtype in (torch.float16, torch.bfloat16) for log_σ in q.log_sigma.values())


@contextmanager
def _kernels(q: GaussianWeights) -> Iterator[None]:
    """Turn autocast off, because gradients computed inside the step have no loss scale. Select kernels that support
    double backward if the step needs it."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(q.module.device.type, enabled=False))
        if q.options.method == "exact" or q.options.estimator == "hessian" or _is_narrow(q):
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if any(isinstance(module, nn.RNNBase) for module in q.module.modules()):
                # The kernels of cuDNN and oneDNN have no second derivative. Setting any flag of oneDNN warns of TF32.
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message=".*TF32.*", category=UserWarning)
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


# -- the squared-gradient term and its gradient ------------------------------------------------------------------------


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
    """The gradient of each parameter that `loss` depends on. Do not change the gradients in place: two of them may be
    the same tensor."""
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
    the output of `call`; the gradient of R has the same parameters."""
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
    """The direction `v = σ² ḡ` in which the weights move. Parameters without a σ come last in `parameters` and do not
    move."""

    parameters: list[nn.Parameter]
    ḡ: Tensor  # gradients of all `parameters` as one vector
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
        """Gradients of all parameters as one vector; missing gradients become zeros."""
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

    The first-order change of the loss along v is `ε ḡᵀv = ε Σ σ² ḡ²`, and may be as large as `reach`. If the loss
    barely changes along v, the norm of the weights limits `ε v` instead. Both limits are multiplied by the square root
    of the dtype's machine epsilon. In float32 the error of `H̃ v` is 1e-3 to 4e-2 for any σ and batch size, from
    untrained networks to networks that are certain of every label.
    """
    length, size = (widest(flat(tensors).norm()) for tensors in (v.values(), v))
    ε = _root_precision(v) * torch.minimum(reach / slope, 0.6 * torch.where(size > 0, size, 1.0) / length)
    return torch.where(ε.isfinite() & (ε > 0), ε, 1.0).clamp_max(1e30)  # ε is 1 if v is zero


def shared_step_size(v: Gradients, slope: Tensor, reach: Tensor, S: int) -> Tensor:
    """`ε` for a pass that also gives the gradient of the true labels: `step_size`, but at most `10 S` times the square
    root of the machine epsilon.

    The error of the true labels' gradient is `ε ∂²ℓ/∂θ² v`, which is `ε/S` times `∂R/∂θ` if the Hessians of `ℓ` and
    `ℓ̃` are alike. The rounding error of `(S/ε) ḡ`, relative to `ḡ`, is about `S/ε` times the machine epsilon. With
    this limit both errors are at most a few thousandths of the gradients for any σ. For a small σ, the other limits
    alone would make `H̃ v`, a small part of the sum, more precise than necessary, and the error in the true labels'
    gradient too large.
    """
    return step_size(v, slope, reach).clamp_max(10 * S * _root_precision(v))


def _root_precision(v: Gradients) -> float:
    """Square root of the largest machine epsilon among the weights' dtypes. The tensors in `v` do not show it, because
    they all have the widest of these dtypes."""
    return max(torch.finfo(p.dtype).eps for p in v) ** 0.5


def reach(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """The change of the mean loss, in nats, when outputs move by about their own size.

    This change is about `‖r‖ ‖f‖`, for residuals r and centred outputs f, with norms that are roots of the mean square
    over examples. The logits of class labels must not move by more than about 1, and the mean over `S` examples, which
    move in different directions, changes less than each of them. A Gaussian's loss is quadratic and may change by much
    more than 1.
    """
    S = len(f)
    size_r = widest(likelihood.residual(f, y)).square().sum() / S
    f = widest(f)
    size_f = (f - f.mean(0) * (S > 1)).square().sum() / S
    if likelihood.has_probs:
        return 2 * (size_r * (1 + size_f)).sqrt() / S**0.25
    return 3 * (1 + (size_r * size_f).sqrt()).sqrt()
