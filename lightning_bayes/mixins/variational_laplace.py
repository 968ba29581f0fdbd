"""`VariationalLaplaceMixin`: the posterior's width in the loss, without sampling a weight.

The expected log-likelihood is expanded to second order around the mean, with the Fisher information in the place of the
Hessian, which leaves a squared gradient (Variational Laplace paper, eqs. (28) to (30)):

    loss = mean NLL at μ + (S/2) Σ_λ σ_λ² ḡ_λ² + (β/N) Σ_λ KL_λ.

`S` is the number of examples whose gradient is squared together, which is the batch of one process; `N` counts the
examples of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_bayes.arguments import instance
from lightning_bayes.mixins.activations import warn_piecewise_linear
from lightning_bayes.mixins.objective import hessian_term
from lightning_bayes.mixins.squared_gradient import by_differences, exact, gradients_of
from lightning_bayes.mixins.variational import VariationalMixin
from lightning_bayes.mixins.watched_step import Step, StepError, with_loss
from lightning_bayes.network import Processes
from lightning_bayes.network.noise import uniforms
from lightning_bayes.trainer.loss_check import mean_nll


class VariationalLaplaceMixin(VariationalMixin):
    """Train any LightningModule by Variational Laplace: `class Bayes(VariationalLaplaceMixin, YourModule): pass`.

    Your `training_step` stays as it is: it returns the mean negative log-likelihood from one forward pass of the
    network (a tensor, or a dict with `"loss"`). That pass is shared by the true and the sampled labels. A step of
    another form can return `self.vl_loss(f, y)` itself.

    `log_sigma["net.0.weight"]` is the parameter log σ of a weight, `posterior` the Gaussian over all of them.
    `validate` and `test` score it beside the network at the mean, `predict` answers with `Prediction`s.

    Args:
        variational: a dictionary with the keys of `VariationalOptions`.
    """

    _variational_defaults: ClassVar[dict[str, Any]] = {
        "name": "vl",
        "predictive": "glm",
        "unused": ("train_samples", "local_reparameterization"),
    }

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Yours, with the Variational Laplace loss in the place of the negative log-likelihood."""
        with self._variational_kernels():
            step = self._variational_step(batch, batch_idx)
            if not isinstance(step, Step):
                return step
            return with_loss(step.returned, self._variational_loss(step))

    def vl_loss(self, f: Tensor, y: Tensor, y_sampled: Tensor | None = None) -> Tensor:
        """`−(1/S) L_VL` of a minibatch, eq. (30), for outputs `f` with the graph of their forward pass.

        Args:
            f: outputs of the network.
            y: the true labels.
            y_sampled: labels drawn from the model at `f`; drawn here if not given.
        """
        self._variational.explicit = True
        instance("f", f, Tensor, "the network's outputs, a tensor")
        if not f.requires_grad:
            raise StepError("f does not depend on the weights: hand vl_loss the network's outputs with their graph")
        instance("y", y, Tensor, "a tensor of targets")
        if y_sampled is not None:
            instance("y_sampled", y_sampled, Tensor, "a tensor of targets")
        likelihood, S = self._variational.settings.likelihood, len(f)
        likelihood.check(f.detach(), y)
        nll = mean_nll(likelihood, f, y)
        term = self._variational_exact_term(nll, f, y, y_sampled)
        kl = self._variational_kl()
        self._variational_log(S, nll, kl, term)
        return nll + term + self._variational_kl_weight() * kl

    def _variational_loss(self, step: Step) -> Tensor:
        if self._variational_differences(step):
            kl, term, loss = self._variational_two_passes(step)
        else:
            term = self._variational_exact_term(step.loss, step.f, step.y)
            kl = self._variational_kl()
            loss = step.loss + term + self._variational_kl_weight() * kl
        self._variational_log(step.size, step.loss, kl, term)
        if not self._variational.looked:
            self._variational.looked = True
            warn_piecewise_linear(step.call.network, None if step.call.kwargs else step.call.args)
        return loss

    def _variational_exact_term(self, nll: Tensor, f: Tensor, y: Tensor, y_sampled: Tensor | None = None) -> Tensor:
        """The squared-gradient term (or, for study, its relatives), with its graph."""
        settings = self._variational.settings
        pairs = self.weights_and_log_sigma().values()
        weights, log_σ = [μ for μ, _ in pairs], [l for _, l in pairs]
        if settings.curvature == "hessian":
            return hessian_term(nll, weights, log_σ)
        if settings.curvature == "fisher":
            nll = mean_nll(settings.likelihood, f, self._variational_labels(f, y) if y_sampled is None else y_sampled)
        return exact(nll, weights, log_σ, len(f))

    def _variational_two_passes(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """The KL divergence, the squared-gradient term, and a loss whose gradient is computed here."""
        likelihood, θ = self._variational.settings.likelihood, self._variational_trainable()
        if self._variational.settings.curvature == "empirical":
            y, sampled = step.y, gradients_of(step.loss, θ)
            gradients = dict(sampled)
        else:
            y = self._variational_labels(step.f, step.y)
            sampled = gradients_of(mean_nll(likelihood, step.f, y), θ, keep_graph=True)
            gradients = gradients_of(step.loss, θ)  # last, so that the graph is gone before the second pass
        term, its = by_differences(step.call, likelihood, y, sampled, dict(self.weights_and_log_sigma().values()))
        for p, g in its.items():
            gradients[p] = g.add_(gradients[p]) if p in gradients else g
        kl, loss = self._variational_with_kl(step.loss.detach() + term, gradients)
        return kl, term, loss

    def _variational_labels(self, f: Tensor, y: Tensor) -> Tensor:
        """Labels drawn from the model; each example has its own random numbers, whatever process it is on."""
        state = self._variational
        state.draws += 1
        f = f.detach()
        dtype = torch.promote_types(f.dtype, torch.float32)
        examples = Processes.current().examples(0, len(f), f.device)
        uniform = uniforms(state.settings.seed, state.draws, examples, f.shape[1:], dtype)
        return state.settings.likelihood.sample(f, uniform, y)

    def _variational_differences(self, step: Step) -> bool:
        """Whether this step is computed by finite differences."""
        settings = self._variational.settings
        if settings.method == "exact" or settings.curvature == "hessian":
            return False
        reason = None
        if self._variational_is_narrow():
            reason = "16-bit weights are too coarse for"
        elif step.call.input_requires_grad:
            reason = "the network's input depends on trainable parameters outside of it, which is not for"
        if reason is not None and settings.method == "finite_difference":
            raise ValueError(f"{reason} method='finite_difference': use 'exact' or 'auto'")
        return reason is None

    def _variational_is_narrow(self) -> bool:
        return any(log_σ.dtype in (torch.float16, torch.bfloat16) for log_σ in self.log_sigma.values())

    @contextmanager
    def _variational_kernels(self) -> Iterator[None]:
        """Full precision, because an inner gradient has no loss scale; and, where the backward pass is differentiated,
        operators that can be."""
        settings = self._variational.settings
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            if settings.method == "exact" or settings.curvature == "hessian" or self._variational_is_narrow():
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                if any(isinstance(module, nn.RNNBase) for module in self.modules()):
                    stack.enter_context(_plain_recurrent_kernels())
            yield


@contextmanager
def _plain_recurrent_kernels() -> Iterator[None]:
    """Those of cuDNN and oneDNN have no second derivative."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TF32.*", category=UserWarning)  # said by any setting of oneDNN
        with torch.backends.cudnn.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False):
            yield
