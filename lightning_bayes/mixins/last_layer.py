"""`VariationalLastLayerMixin`: a Gaussian over the last layer, trained with the network and without samples (Harrison,
Willes & Snoek 2024, "Variational Bayesian last layers").

The outputs are `f = W φ(x)`, with a one appended to the features `φ` for the bias. For `q(W) = Π_k N(w̄_k, S_k)` the
output `f_k` of a known input is Gaussian,

    m_k = w̄_kᵀ φ,    v_k = φᵀ S_k φ,

and the expected negative log-likelihood is known exactly (regression, theorem 1) or has a bound (classes, theorem 2):

    regression      −log N(y | m, σ²) + ½ Σ_k v_k/σ_k²
    classes         log Σ_k exp(m_k + ½ v_k) − m_y              (Jensen's inequality, without noise on the logits)

    loss = mean over the batch + (β/N) (KL(q ‖ N(0, s²)) − log p(σ²)).

`S_k = L_k L_kᵀ` with a triangular `L_k`, whose diagonal is the mixin's `exp(log σ)`:

    KL = Σ_k ½ (Σ_i (Σ_j L_ij² + w̄_i²)/s_i² − I + Σ_i log s_i²/L_ii²).

So the entries below the diagonal add only `½ Σ L_ij²/s_i²` to the KL divergence of independent weights. The noise of a
regression has the inverse-Wishart prior with `ν` degrees of freedom and the scale of the given `noise_std`:

    −log p(σ²) = Σ_k ((ν + K + 1) log σ_k + ½ noise_std²/σ_k²).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.arguments import format_names
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.mixins.gaussian_weights import GaussianWeights, VariationalError
from lightning_bayes.mixins.training_step import Step, StepError, run_step
from lightning_bayes.mixins.variational import (
    CURVATURE,
    SAMPLING,
    VariationalMixin,
    VariationalOptions,
    make_variational,
)
from lightning_bayes.mixins.variational_inference import scaled_gradients
from lightning_bayes.network import private
from lightning_bayes.network.messages import warn
from lightning_bayes.options.predictive import GLM
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.structures import Layout, PerOutput, PerOutputBlockDiagonal, Piece

LARGEST = 2**28  # maximum number of entries of the dense covariances
NU = 1.0  # ν, degrees of freedom of the noise's prior
Calls = list[tuple[Tensor, Tensor]]  # inputs and outputs of the last layer


class VariationalLastLayerMixin(VariationalMixin):
    """Train the last layer of any LightningModule by variational inference, and all other weights as usual: `class
    Bayes(VariationalLastLayerMixin, YourModule): pass`.

    Your `training_step` does not change. It returns the mean negative log-likelihood from one forward pass of the
    network, whose outputs are those of its last `nn.Linear`. If noise is learned, the returned loss is ignored.

    `posterior` is the Gaussian over the last layer's weights. `validate` and `test` score it next to the network at the
    mean; `predict` returns `Prediction`s.

    Args:
        variational: a dictionary with the keys of `VariationalOptions`.
    """

    _variational: LastLayerGaussian

    def __init__(self, *args: Any, variational: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unused = (*CURVATURE, *SAMPLING, "deterministic")
        make_variational(self, variational, name="vbll", predictive=GLM(), unused=unused, gaussian=LastLayerGaussian)
        self.last_layer_gaussian = self._variational.extra

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Run your step, and return the bound instead of the negative log-likelihood."""
        q = self._variational
        is_due = q.checks.is_due
        with q.recorded_layer() as calls:
            step = run_step(q, super().training_step, batch, batch_idx)
        if not isinstance(step, Step):
            return step
        with torch.autocast(step.f.device.type, enabled=False):
            v = q.output_variance(step, calls, is_due)
            nll = q.likelihood.nll_bound_per_example(step.f, v, step.y).mean()
            off_diagonal = q.off_diagonal_kl()
            value = nll + q.kl_weight * (off_diagonal + q.noise_penalty())
        gradients = scaled_gradients(q, value, [*q.trainable(), *q.log_sigma.parameters()])
        kl, loss = q.add_kl(value.detach(), gradients, step.is_wrong)
        q.log(len(step.f), nll, kl + off_diagonal)
        return step.with_loss(loss)


class LastLayerGaussian(GaussianWeights):
    """The Gaussian `q` of the last layer. `extra` has the parameters that log σ lacks: the entries of `L_k` below the
    diagonal `[K, I, I]`, and the logarithm of the noise, one for each output."""

    def __init__(self, module: LightningModule, options: VariationalOptions) -> None:
        self.learns_noise = options.learn_noise and options.likelihood.tunable_noise is not None
        super().__init__(module, replace(options, loss="likelihood") if self.learns_noise else options)
        K, I = self.rows.shape
        self.extra = nn.ParameterDict()
        if options.covariance == "dense":
            if K * I * I > LARGEST:
                raise VariationalError(
                    f"the dense covariances of {self.layer_name} have {K * I * I:,} entries: set "
                    "variational={'covariance': 'diagonal'}"
                )
            self.extra["off_diagonal"] = self.rows.new_zeros(K, I, I)
        if self.learns_noise:
            σ = torch.as_tensor(options.likelihood.noise_std).to(self.rows)
            self.extra["log_noise_std"] = σ.log().expand(K).clone() if K > 1 else σ.log().reshape(())
        self._precision: tuple[Any, PerOutput] | None = None

    @property
    def layer_name(self) -> str:
        return self._last_linear()[0]

    @property
    def rows(self) -> Tensor:
        """log σ of each output's weights, and of its bias if it has one.  # [K, I]"""
        return torch.cat([log_σ.reshape(len(log_σ), -1) for log_σ in self.log_sigma.values()], 1)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with the current noise."""
        if not self.learns_noise:
            return self.options.likelihood
        return self.options.likelihood.with_noise(self.extra["log_noise_std"].exp())

    def pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name. A weight that is frozen later keeps its distribution."""
        weights = dict(self.module.named_parameters())
        return {name: (weights[name], log_σ) for name, log_σ in self.log_sigma.items()}

    def roots(self) -> Tensor:
        """`L_k`.  # [K, I, I]"""
        return widen(self.extra["off_diagonal"]).tril(-1) + torch.diag_embed(widen(self.rows).exp())

    def posterior(self) -> GaussianPosterior:
        posterior = super().posterior()
        with torch.inference_mode(False), torch.no_grad():
            if self.learns_noise:
                posterior = replace(posterior, likelihood=self.likelihood)
            if "off_diagonal" not in self.extra:
                return posterior
            K = len(self.rows)
            weight, *bias = posterior.subset.shapes
            pieces = Piece(0, (1, *weight)), *(Piece(weight.numel(), (1, K, 1)) for _ in bias)
            precision = PerOutputBlockDiagonal((self._block(),), (Layout(pieces),), (self.layer_name,))
            return replace(posterior, precision=precision)

    def _block(self) -> PerOutput:
        """The precision, decomposed again only if the parameters have changed."""
        own = [*self.log_sigma.parameters(), self.extra["off_diagonal"]]
        key = [(id(p), p.device, p.dtype, private.write_count(p)) for p in own]
        if self._precision is None or self._precision[0] != key:
            self._precision = key, PerOutput.from_covariance_roots(self.roots())
        return self._precision[1]

    def kl(self) -> Tensor:
        return super().kl() + self.off_diagonal_kl()

    def off_diagonal_kl(self) -> Tensor | float:
        """`½ Σ L_ij²/s_i²` of the entries below the diagonal."""
        if "off_diagonal" not in self.extra:
            return 0.0
        squares = widen(self.extra["off_diagonal"]).tril(-1).square().sum((0, 2))  # [I]
        widths = [log_σ.shape[1:].numel() for log_σ in self.log_sigma.values()]
        parts = zip(squares.split(widths), self.log_sigma, strict=True)
        return sum(0.5 * part.sum() / self._s(name) ** 2 for part, name in parts)

    def noise_penalty(self) -> Tensor | float:
        """`−log p(σ²)`, up to a constant."""
        if not self.learns_noise:
            return 0.0
        log_σ = widen(self.extra["log_noise_std"])
        scale = torch.as_tensor(self.options.likelihood.noise_std).to(log_σ)
        return ((NU + len(self.rows) + 1) * log_σ + 0.5 * (scale.log() - log_σ).mul(2).exp()).sum()

    @contextmanager
    def recorded_layer(self) -> Iterator[Calls]:
        calls: Calls = []

        def record(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            calls.append((args[0] if args else kwargs["input"], output))

        with self._last_linear()[1].register_forward_hook(record, with_kwargs=True):
            yield calls

    def output_variance(self, step: Step, calls: Calls, check_values: bool) -> Tensor:
        """`v`, in the shape of the outputs; raises if they are not the outputs of the last layer."""
        name = self.layer_name
        if len(calls) != 1:
            raise StepError(
                f"the network called {name}, its last nn.Linear, {len(calls)} times, not once: call it once, as a "
                f"module, or name another network with variational={{'network': …}}"
            )
        ((φ, z),), f = calls, step.call.tensor.detach()
        is_output = z.numel() == f.numel()
        if is_output and check_values:
            is_output = torch.equal(z.detach().reshape(f.shape).to(f.dtype), f)
        if not is_output:
            raise StepError(
                f"the network's outputs are not those of {name}, its last nn.Linear: register the output layer last, "
                "and move what follows it out of the network that variational={'network': …} names"
            )
        φ = widen(φ)
        if len(self.log_sigma) > 1:
            φ = torch.cat([φ, φ.new_ones(*φ.shape[:-1], 1)], -1)  # [..., I]
        if "off_diagonal" in self.extra:
            v = torch.einsum("...i,kij->...kj", φ, self.roots()).square().sum(-1)
        else:
            v = φ.square() @ (2 * widen(self.rows)).exp().mT
        return step.call.read(v.reshape(f.shape))

    def begin(self, trainer: Trainer) -> None:
        super().begin(trainer)
        trained = {p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
        untrained = [f"last_layer_gaussian.{name}" for name, p in self.extra.items() if p not in trained]
        if untrained and trained:
            warn(f"no optimizer has {format_names(untrained)}: give it self.parameters()")

    def add_missing_log_sigma(self, weights: dict[str, Tensor]) -> None:
        super().add_missing_log_sigma(weights)
        for name, value in self.extra.state_dict().items():
            weights.setdefault(f"last_layer_gaussian.{name}", value)

    def _candidates(self) -> dict[str, nn.Parameter]:
        """The trainable weights of the last layer by their names in the module."""
        weights = super()._candidates()
        name, layer = self._last_linear()
        own = {n: p for n, p in weights.items() if p is layer.weight or p is layer.bias}
        if not any(p is layer.weight for p in own.values()):
            raise VariationalError(f"the weight of {name}, the last nn.Linear of the network, is frozen or computed")
        owners = sum(layer.weight is p for module in self.network.modules() for p in module.parameters(recurse=False))
        if owners > 1:
            raise VariationalError(
                f"another layer shares the weight of {name}: a Gaussian of the last layer needs its own"
            )
        return own

    def _last_linear(self) -> tuple[str, nn.Linear]:
        layers = [(name, layer) for name, layer in self.network.named_modules() if isinstance(layer, nn.Linear)]
        if not layers:
            raise VariationalError(
                f"{type(self.network).__name__} has no nn.Linear: the outputs of the network must be those of one"
            )
        name, layer = layers[-1]
        return name or type(layer).__name__, layer
