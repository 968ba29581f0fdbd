"""`VariationalInferenceMixin`: Bayes by backprop (Blundell et al. 2015), with the parameters of Variational Laplace.

The expected log-likelihood is estimated at weights drawn by the reparameterisation (Variational Laplace paper, eqs. (4)
and (5)), `w = μ + σ ε` with `ε ~ N(0, 1)`:

    loss = mean NLL at w + (β/N) Σ_λ KL_λ,      ∂/∂μ = g,   ∂/∂log σ = g σ ε   with   g = ∂NLL/∂w.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_bayes.mixins.known_gradient import Gradients
from lightning_bayes.mixins.local_reparameterization import LocalReparameterization, local_parameters
from lightning_bayes.mixins.variational import VariationalMixin
from lightning_bayes.mixins.watched_step import Step, StepError, with_loss
from lightning_bayes.network import Processes
from lightning_bayes.network.at_weights import at_weights
from lightning_bayes.network.borrowed import kept_buffers


class VariationalInferenceMixin(VariationalMixin):
    """Train any LightningModule by variational inference: `class Bayes(VariationalInferenceMixin, YourModule): pass`.

    Your `training_step` stays as it is: it runs at weights drawn from the posterior, and returns the mean negative
    log-likelihood from one forward pass of the network (a tensor, or a dict with `"loss"`).

    `log_sigma["net.0.weight"]` is the parameter log σ of a weight, `posterior` the Gaussian over all of them.
    `validate` and `test` score it beside the network at the mean, `predict` answers with `Prediction`s.

    Args:
        variational: a dictionary with the keys of `VariationalOptions`.
    """

    _variational_defaults: ClassVar[dict[str, Any]] = {
        "name": "vi",
        "predictive": "bnn",
        "unused": ("curvature", "method"),
    }

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Yours at sampled weights, with the KL divergence added to its loss."""
        state, n = self._variational, self._variational.settings.train_samples
        θ = [*self._variational_trainable(), *self.log_sigma.parameters()]
        gradients: Gradients = {}
        nll: Any = 0.0
        for sample in range(n):
            state.draws += 1
            with self._variational_sampled() as noise, kept_buffers(self, keep=sample > 0):
                step = self._variational_step(batch, batch_idx)
                if not isinstance(step, Step):
                    return step
                found = self._variational_gradients(step.loss, θ)
            nll = nll + step.loss.detach() / n
            found = _with_noise(found, noise)
            gradients |= found if n == 1 else {p: gradients.get(p, 0) + g / n for p, g in found.items()}
        kl, loss = self._variational_with_kl(nll, gradients)
        self._variational_log(step.size, nll, kl)
        return with_loss(step.returned, loss)

    @contextmanager
    def _variational_sampled(self) -> Iterator[dict[nn.Parameter, tuple[nn.Parameter, Tensor]]]:
        """The module at sampled weights: for each that was moved, its log σ and the move `σ ε`."""
        pairs = dict(self.weights_and_log_sigma().values())
        generator = self._variational_generator()
        local: set[nn.Parameter] = set()
        if self._variational.settings.local_reparameterization:
            local = local_parameters(self._variational_network()) & set(pairs)
        with torch.no_grad():
            moves = {
                μ: torch.randn(μ.shape, generator=generator, dtype=μ.dtype, device=μ.device).mul_(log_σ.exp())
                for μ, log_σ in pairs.items()
                if μ not in local
            }
        with at_weights(self, moves):
            if not local:
                yield {μ: (pairs[μ], move) for μ, move in moves.items()}
                return
            network = self._variational_network()
            with LocalReparameterization(network, {μ: pairs[μ] for μ in local}, generator) as layers:
                yield {μ: (pairs[μ], move) for μ, move in moves.items()}
            self._variational_check_local(layers.unseen, layers.confused)

    def _variational_check_local(self, unseen: set[nn.Parameter], confused: set[nn.Parameter]) -> None:
        names = [name for name, p in self.named_parameters() if p in unseen | confused]
        some = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        if unseen:
            raise StepError(
                f"local_reparameterization did not see how {some} is used in the training step: call its layer as a "
                "module, turn it off, or make the parameter deterministic"
            )
        if confused:
            raise StepError(
                f"local_reparameterization cannot repeat the noise of {some}, whose layer is called several times in "
                "one forward pass, for activation checkpointing: turn one of the two off"
            )

    def _variational_gradients(self, loss: Tensor, θ: list[nn.Parameter]) -> Gradients:
        """With the loss scale of 16-bit mixed precision, without which small gradients vanish."""
        scaler = None if self._trainer is None else getattr(self._trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        found = torch.autograd.grad(loss * scale, θ, allow_unused=True)
        return {p: g / scale if scale != 1 else g for p, g in zip(θ, found, strict=True) if g is not None}

    def _variational_generator(self) -> torch.Generator:
        """Seeded by the number of the draw, so that a resumed run goes on as if it had not stopped."""
        state = self._variational
        key = f"{state.settings.seed} {state.draws} {Processes.current().rank}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
        return torch.Generator(device=self.device).manual_seed(seed)


def _with_noise(found: Gradients, noise: dict[nn.Parameter, tuple[nn.Parameter, Tensor]]) -> Gradients:
    """The gradient of log σ through the weights that were moved, `g σ ε`."""
    through = {log_σ: found[μ] * move for μ, (log_σ, move) in noise.items() if μ in found}
    return {**found, **through}
