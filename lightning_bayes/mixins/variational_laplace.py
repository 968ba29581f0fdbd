"""`VariationalLaplaceMixin`: variational inference without sampling weights.

For a minibatch of `S` out of `N` examples, and with the gradient `ḡ = (1/S) ∂ log P(ỹ | x, w = μ)/∂w` for labels `ỹ`
drawn from the model, the objective is (Variational Laplace paper, eq. (30))

    (1/S) L_VL = (1/S) log P(y | x, w = μ) − (S/2) Σ_λ σ_λ² ḡ_λ² − (β/N) Σ_λ KL_λ.

It is the expected log-likelihood, expanded to second order around the mean with the Fisher information instead of the
Hessian (eqs. (28) and (29)), minus the KL divergence from the prior. The loss is its negative. `S` is the batch size of
one process, whose gradient is squared; `N` counts the examples of all processes.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_bayes.arguments import instance
from lightning_bayes.mixins.activations import warn_piecewise_linear
from lightning_bayes.mixins.squared_gradient import by_differences, exact, gradients_of, hessian_term, with_true_labels
from lightning_bayes.mixins.training_step import (
    Gradients,
    Step,
    StepError,
    run_step,
    with_known_gradient,
    without_wrong,
)
from lightning_bayes.mixins.variational import GaussianWeights, VariationalMixin, make_variational
from lightning_bayes.network import Processes
from lightning_bayes.network.noise import uniforms
from lightning_bayes.options.predictive import GLM
from lightning_bayes.trainer.dry_run import mean_nll


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
        unused = ("train_samples", "local_reparameterization")
        make_variational(self, variational, name="vl", predictive=GLM(samples=10), unused=unused)

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
    """The loss with its graph, for double backward."""
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
        gradients = gradients_of(step.loss, θ)  # last, to free the graph before the second pass
    term, term_gradients = by_differences(step.call, likelihood, y, sampled, log_σ)
    both = [p for p in term_gradients if p in gradients]
    if both:
        torch._foreach_add_([term_gradients[p] for p in both], [gradients[p] for p in both])
    return term, gradients | term_gradients


def draw_sign(q: GaussianWeights) -> int:
    """1 or −1, by the number of the draw: the same on every process and in a resumed run."""
    return 2 * (hashlib.sha256(f"{q.options.seed} {q.draws}".encode()).digest()[0] & 1) - 1


def draw_labels(q: GaussianWeights, f: Tensor, y: Tensor) -> Tensor:
    """Labels drawn from the model. The random numbers belong to the example, not to the process that it is on."""
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
    """Full precision, because an inner gradient has no loss scale, and kernels that support double backward where that
    is needed."""
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
