"""`VariationalInferenceMixin`: Bayes by backprop (Blundell et al. 2015), with the parameters of Variational Laplace.

The expected log-likelihood is estimated at weights drawn by the reparameterisation (Variational Laplace paper, eqs. (4)
and (5)), `w = μ + σ ε` with `ε ~ N(0, 1)`:

    loss = mean NLL at w + (β/N) Σ_λ KL_λ,      ∂/∂μ = g,   ∂/∂log σ = g σ ε   with   g = ∂NLL/∂w.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import some
from lightning_bayes.mixins.gaussian_weights import GaussianWeights, Gradients
from lightning_bayes.mixins.local_reparameterization import LocalReparameterization, local_parameters
from lightning_bayes.mixins.step_checks import StepError
from lightning_bayes.mixins.variational import VariationalMixin, make_variational
from lightning_bayes.mixins.watched_step import Step, run_step
from lightning_bayes.network import Processes
from lightning_bayes.network.at_weights import at_weights
from lightning_bayes.network.borrowed import kept_buffers
from lightning_bayes.network.flat import flat, parts
from lightning_bayes.trainer.private import gradient_scale


class VariationalInferenceMixin(VariationalMixin):
    """Train any LightningModule by variational inference: `class Bayes(VariationalInferenceMixin, YourModule): pass`.

    Your `training_step` stays as it is: it runs at weights drawn from the posterior, and returns the mean negative
    log-likelihood from one forward pass of the network (a tensor, or a dict with `"loss"`).

    `log_sigma["net.0.weight"]` is the parameter log σ of a weight, `posterior` the Gaussian over all of them.
    `validate` and `test` score it beside the network at the mean, `predict` answers with `Prediction`s.

    Args:
        variational: a dictionary with the keys of `VariationalOptions`.
    """

    def __init__(self, *args: Any, variational: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_variational(self, variational, name="vi", predictive="bnn", unused=("curvature", "method"))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Yours at sampled weights, with the KL divergence added to its loss."""
        q, n = self._variational, self._variational.options.train_samples
        θ, log_σ = [*q.trainable(), *q.log_sigma.parameters()], dict(q.pairs().values())
        gradients: Gradients = {}
        nll: Any = 0.0
        is_wrong: Any = False
        for sample in range(n):
            q.draws += 1
            with sampled_weights(q, log_σ) as moves, kept_buffers(self, keep=sample > 0):
                step = run_step(q, super().training_step, batch, batch_idx)
                if not isinstance(step, Step):
                    return step
                g = scaled_gradients(q, step.loss, θ)
            nll, is_wrong = nll + step.loss.detach() / n, is_wrong | step.is_wrong
            used = [μ for μ in moves if μ in g]
            if used:
                of_log_σ = [moves[μ] for μ in used]
                torch._foreach_mul_(of_log_σ, [g[μ] for μ in used])  # g σ ε
                g |= {log_σ[μ]: t for μ, t in zip(used, of_log_σ, strict=True)}
            gradients |= g if n == 1 else {p: gradients.get(p, 0) + t / n for p, t in g.items()}
        kl, loss = q.add_kl(nll, gradients, is_wrong)
        q.log(len(step.f), nll, kl)
        return step.with_loss(loss)


@contextmanager
def sampled_weights(q: GaussianWeights, log_σ: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[Gradients]:
    """The module at sampled weights, and the move `σ ε` of each; with the local reparameterisation, the outputs of
    layers are sampled instead of the weights that have no move."""
    generator, local = new_generator(q), set[nn.Parameter]()
    if q.options.local_reparameterization:
        local = local_parameters(q.network) & set(log_σ)
    moves = _moves({μ: l for μ, l in log_σ.items() if μ not in local}, generator)
    with at_weights(q.module, moves):
        if not local:
            yield moves
            return
        with LocalReparameterization(q.network, {μ: log_σ[μ] for μ in local}, generator) as layers:
            yield moves
        _check_local(q.module, layers.unseen, layers.confused)


@torch.no_grad()
def _moves(log_σ: Mapping[nn.Parameter, nn.Parameter], generator: torch.Generator) -> Gradients:
    """`σ ε`, in one piece of memory."""
    if not log_σ:
        return {}
    σ = flat(log_σ.values()).exp_()
    noise = torch.randn(σ.shape, generator=generator, dtype=σ.dtype, device=σ.device)
    return dict(zip(log_σ, parts(noise.mul_(σ), list(log_σ)), strict=True))


def new_generator(q: GaussianWeights) -> torch.Generator:
    """Seeded by the number of the draw, so that a resumed run goes on as if it had not stopped."""
    key = f"{q.options.seed} {q.draws} {Processes.current().rank}".encode()
    seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
    return torch.Generator(device=q.module.device).manual_seed(seed)


def _check_local(module: nn.Module, unseen: set[nn.Parameter], confused: set[nn.Parameter]) -> None:
    names = [name for name, p in module.named_parameters() if p in unseen | confused]
    if unseen:
        raise StepError(
            f"local_reparameterization did not see how {some(names)} is used in the training step: call its layer as a "
            "module, turn it off, or make the parameter deterministic"
        )
    if confused:
        raise StepError(
            f"local_reparameterization cannot repeat the noise of {some(names)}, whose layer is called several times "
            "in one forward pass, for activation checkpointing: turn one of the two off"
        )


def scaled_gradients(q: GaussianWeights, loss: Tensor, θ: list[nn.Parameter]) -> Gradients:
    """With the loss scale of 16-bit mixed precision, without which small gradients vanish."""
    trainer = q.trainer
    scale = 1.0 if trainer is None else gradient_scale(trainer)
    gradients = torch.autograd.grad(loss * scale, θ, allow_unused=True)
    return {p: g / scale if scale != 1 else g for p, g in zip(θ, gradients, strict=True) if g is not None}
