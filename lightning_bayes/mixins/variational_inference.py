"""`VariationalInferenceMixin`: Bayes by backprop (Blundell et al. 2015), with the parameters of Variational Laplace.

The expected log-likelihood is estimated at weights drawn by the reparameterisation (Variational Laplace paper, eqs. (4)
and (5)), `w = μ + σ ε` with `ε ~ N(0, 1)`:

    loss = mean NLL at w + (β/N) Σ_λ KL_λ,      ∂/∂μ = g,   ∂/∂log σ = g σ ε   with   g = ∂NLL/∂w.

The local reparameterisation (Kingma et al. 2015) samples a layer's output instead of its weights. For independent
Gaussian weights, the output of a linear layer (or one position of a convolution) at a known input is Gaussian,

    z = W a + b,    E[z] = μ_W a + μ_b,    Var[z] = σ_W² a² + σ_b².

Every example then has different noise, which reduces the variance of the gradient. Positions of a convolution are
sampled independently. Weights of other layers are sampled themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.arguments import format_names
from lightning_bayes.mixins.gaussian_weights import GaussianWeights
from lightning_bayes.mixins.training_step import Gradients, Step, StepError, run_step
from lightning_bayes.mixins.variational import CURVATURE, LAST_LAYER, VariationalMixin, make_variational
from lightning_bayes.network import Processes, private
from lightning_bayes.network.borrowed import at_weights, kept_buffers
from lightning_bayes.network.subset import flat, parts
from lightning_bayes.options.predictive import BNN
from lightning_bayes.trainer.private import gradient_scale


class VariationalInferenceMixin(VariationalMixin):
    """Train any LightningModule by variational inference: `class Bayes(VariationalInferenceMixin, YourModule): pass`.

    Your `training_step` does not change. It runs at weights drawn from the posterior, and returns the mean negative
    log-likelihood from one forward pass of the network (a tensor, or a dict with `"loss"`).

    `log_sigma["net.0.weight"]` is the parameter log σ of a weight, and `posterior` the Gaussian over all weights.
    `validate` and `test` score the posterior next to the network at the mean; `predict` returns `Prediction`s.

    Args:
        variational: a dictionary with the keys of `VariationalOptions`.
    """

    def __init__(self, *args: Any, variational: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_variational(self, variational, name="vi", predictive=BNN(samples=10), unused=(*CURVATURE, *LAST_LAYER))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Run your step at sampled weights, and add the KL divergence to its loss."""
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
                private.foreach_mul_(of_log_σ, [g[μ] for μ in used])  # g σ ε
                g |= {log_σ[μ]: t for μ, t in zip(used, of_log_σ, strict=True)}
            gradients |= g if n == 1 else {p: gradients.get(p, 0) + t / n for p, t in g.items()}
        kl, loss = q.add_kl(nll, gradients, is_wrong)
        q.log(len(step.f), nll, kl)
        return step.with_loss(loss)


@contextmanager
def sampled_weights(q: GaussianWeights, log_σ: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[Gradients]:
    """Put the module at sampled weights, and yield their moves `σ ε`. With the local reparameterisation, some weights
    do not move: the output of their layer is sampled instead."""
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
        seen_wrongly = layers.unseen | layers.confused
        names = [name for name, p in q.module.named_parameters() if p in seen_wrongly]
        if layers.unseen:
            raise StepError(
                f"local_reparameterization did not see how {format_names(names)} is used in the training step: call "
                "its layer as a module, turn the option off, or make the parameter deterministic"
            )
        if layers.confused:
            raise StepError(
                f"local_reparameterization cannot repeat the noise of {format_names(names)} for activation "
                "checkpointing, because its layer runs several times in one forward pass: turn one of the two off"
            )


@torch.no_grad()
def _moves(log_σ: Mapping[nn.Parameter, nn.Parameter], generator: torch.Generator) -> Gradients:
    """The moves `σ ε` of all given weights, in one block of memory."""
    if not log_σ:
        return {}
    σ = flat(log_σ.values()).exp_()
    noise = torch.randn(σ.shape, generator=generator, dtype=σ.dtype, device=σ.device)
    return dict(zip(log_σ, parts(noise.mul_(σ), list(log_σ)), strict=True))


def new_generator(q: GaussianWeights) -> torch.Generator:
    """A generator seeded by the number of the draw, so a resumed run equals an uninterrupted one."""
    key = f"{q.options.seed} {q.draws} {Processes.current().rank}".encode()
    seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
    return torch.Generator(device=q.module.device).manual_seed(seed)


def scaled_gradients(q: GaussianWeights, loss: Tensor, θ: list[nn.Parameter]) -> Gradients:
    """Gradients computed with the loss scale of 16-bit mixed precision, because small gradients would vanish without
    this scale."""
    trainer = q.trainer
    scale = 1.0 if trainer is None else gradient_scale(trainer)
    gradients = torch.autograd.grad(loss * scale, θ, allow_unused=True)
    return {p: g / scale if scale != 1 else g for p, g in zip(θ, gradients, strict=True) if g is not None}


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
_SMALLEST = 1e-16  # variances are clamped to this value, because the derivative of the root is infinite at zero


class LocalReparameterization:
    """While active, for one call of `network`, layers with a weight or bias in `log_σ` return a sample.

    Activation checkpointing calls layers again in the backward pass, after the network's call. A repeated call gets the
    same noise as the first call, so the backward pass must end inside the context.
    """

    def __init__(self, network: nn.Module, log_σ: Mapping[nn.Parameter, Tensor], generator: torch.Generator) -> None:
        self._network, self._log_σ, self._generator = network, log_σ, generator
        self._hooks = ExitStack()
        self._drawn: dict[nn.Module, list[Tensor]] = {}  # the generator's state before each draw for a layer
        self._over = False
        self._seen: set[nn.Parameter] = set()
        self.confused: set[nn.Parameter] = set()  # weights of layers with several calls, one of which was repeated

    def __enter__(self) -> LocalReparameterization:
        for layer in self._network.modules():
            if type(layer) in _LAYERS and any(p in self._log_σ for p in layer.parameters(recurse=False)):
                # This hook is prepended, so that the user's hooks see the sampled output.
                hook = layer.register_forward_hook(self._sample, prepend=True, with_kwargs=True)
                self._hooks.enter_context(hook)
        self._hooks.enter_context(self._network.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    @property
    def unseen(self) -> set[nn.Parameter]:
        """Parameters in `log_σ` whose layers the network did not call; empty before the network has run."""
        return set(self._log_σ) - self._seen if self._over else set()

    def _sample(self, layer: nn.Module, args: Any, kwargs: Any, z: Tensor) -> Tensor:
        a = args[0] if args else kwargs["input"]
        with torch.autocast(z.device.type, enabled=False):  # a small variance vanishes in 16 bits
            spread = _variance(layer, a, z, self._σ2(layer.weight), self._σ2(layer.bias))
            generator = self._generator_of(layer)
            noise = torch.randn(z.shape, generator=generator, dtype=spread.dtype, device=spread.device)
            return z + (spread.clamp_min(_SMALLEST).sqrt() * noise).to(z.dtype)

    def _σ2(self, parameter: Any) -> Tensor | None:
        """The variance `σ²` of a parameter; None if the parameter has no distribution."""
        if parameter is None or parameter not in self._log_σ:
            return None
        self._seen.add(parameter)
        return (2 * self._log_σ[parameter]).exp()

    def _generator_of(self, layer: nn.Module) -> torch.Generator:
        drawn = self._drawn.setdefault(layer, [])
        if not self._over:
            drawn.append(self._generator.get_state())
            return self._generator
        if len(drawn) > 1:  # this repeated call may belong to any of the earlier calls
            self.confused.update(p for p in layer.parameters(recurse=False) if p in self._log_σ)
        return torch.Generator(self._generator.device).set_state(drawn[0])

    def _end(self, *_: Any) -> None:
        self._over = True


def local_parameters(network: nn.Module) -> set[nn.Parameter]:
    """The weights and biases of plain linear and convolutional layers that no other layer shares."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in network.modules():
        for p in layer.parameters(recurse=False):
            owners.setdefault(p, []).append(layer)
    # Exact types only, because a subclass of a layer may use its weight differently.
    return {p for p, layers in owners.items() if len(layers) == 1 and type(layers[0]) in _LAYERS}


def _variance(layer: nn.Module, a: Tensor, z: Tensor, of_weight: Tensor | None, of_bias: Tensor | None) -> Tensor:
    """`σ_W² a² + σ_b²`, in the shape of z."""
    if of_weight is None:
        assert of_bias is not None
        positions = len(layer.kernel_size) if isinstance(layer, _CONVOLUTIONS) else 0
        return of_bias.reshape(-1, *[1] * positions).expand_as(z)
    squares = a.to(of_weight).square()
    if isinstance(layer, _CONVOLUTIONS):
        return private.conv_forward(layer, squares, of_weight, of_bias)
    return F.linear(squares, of_weight, of_bias)
