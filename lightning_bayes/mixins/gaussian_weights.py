"""`GaussianWeights`: the Gaussian `q` over a module's weights that the variational mixins train.

    q(w_λ) = N(μ_λ, σ_λ²)                                     (Variational Laplace paper, eq. (2))
    KL_λ = ½ ((σ_λ² + μ_λ²)/s_λ² − 1 + log(s_λ²/σ_λ²))        (eq. (12), from the prior N(0, s_λ²))

μ are the network's own parameters. Beside them stand parameters log σ, which start at `log s − 3`. The loss of an
example gets `(β/N) Σ_λ KL_λ`. (The printed eq. (30) has σ² where eq. (12) has the prior's s².)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.mixins.log_sigma import BELOW_PRIOR, LogSigma, check_patterns, matches
from lightning_bayes.mixins.options import (
    PriorStdError,
    VariationalOptions,
    find_priors,
    from_weight_decay,
    warn_of_optimizers,
)
from lightning_bayes.mixins.step_checks import StepChecks
from lightning_bayes.network import Subset
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.output import Output, viewed
from lightning_bayes.network.subset import flat, parts
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.fingerprint import fingerprint
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.module import network_of

Gradients = dict[nn.Parameter, Tensor]
MIXIN_FIRST = "name the mixin before your module, as in class Bayes(VariationalLaplaceMixin, LitNet)"


class VariationalError(RuntimeError):
    """A module that cannot be made variational as it is; the message says what to change."""


class GaussianWeights:
    """All that a variational module knows and does besides what Lightning calls; it is the mixins' one private
    attribute, `_variational`, of the user's module, whose layers must be made before it."""

    def __init__(self, module: LightningModule, options: VariationalOptions) -> None:
        self.module, self.options = module, options
        self.n_data = options.n_data  # N; None until training starts, if it is to be counted
        self.read_as = Output(options.network.output, options.network.class_dim)  # completed by the first batch
        self.draws = 0  # random draws so far; each has its number
        self.called_vl_loss = False  # by the training step that runs
        self.checks = StepChecks(module, options.likelihood)
        self.checked_kinks = False  # in the fit that runs
        weights = self._candidates()
        stds, self.decayed = find_priors(options.prior_std, weights, self.network)
        self.prior_std = {name: s for name, s in stds.items() if name not in self.decayed}  # s, where known
        start = {name: math.log(s) - BELOW_PRIOR for name, s in stds.items()}
        self.log_sigma = LogSigma({n: torch.full_like(p.detach(), start[n]) for n, p in weights.items()})

    def _candidates(self) -> dict[str, nn.Parameter]:
        """The trainable weights of the network, by their names in the module, but for the deterministic ones."""
        kind = type(self.module).__name__
        if hasattr(self.module, "log_sigma"):
            raise VariationalError(
                f"{kind} already has an attribute log_sigma, the name that the mixin needs: rename it"
            )
        inside = {id(p) for p in self.network.parameters()}
        weights = {name: p for name, p in self.module.named_parameters() if id(p) in inside and p.requires_grad}
        for name, p in weights.items():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise VariationalError(
                    f"{name} has no shape before the first batch: run one through the lazy layers in __init__"
                )
        weights = {name: p for name, p in weights.items() if p.is_floating_point()}
        if not weights:
            raise VariationalError(
                f"{kind} has no trainable weights when the mixin looks for them: make the layers in the "
                f"__init__ of your module, and {MIXIN_FIRST}"
            )
        patterns = self.options.deterministic
        check_patterns(patterns, weights, "deterministic")
        weights = {name: p for name, p in weights.items() if not any(matches(name, pattern) for pattern in patterns)}
        if not weights:
            raise VariationalError("every weight is deterministic: leave some out of variational's 'deterministic'")
        return weights

    # -- the weights and their posterior ---------------------------------------------------------------------------

    @property
    def network(self) -> nn.Module:
        return network_of(self.module, self.options.network.name)

    @property
    def trainer(self) -> Trainer | None:
        """The module's, if it is attached to one."""
        if self.module.fabric is not None:
            return None
        try:
            return self.module.trainer
        except RuntimeError:  # how Lightning says that there is none
            return None

    def pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name, of the weights that are not frozen now."""
        weights = dict(self.module.named_parameters())
        return {n: (weights[n], log_σ) for n, log_σ in self.log_sigma.items() if weights[n].requires_grad}

    def trainable(self) -> list[nn.Parameter]:
        """All parameters that train, but for log σ."""
        log_σ = {id(p) for p in self.log_sigma.parameters()}
        return [p for p in self.module.parameters() if p.requires_grad and id(p) not in log_σ]

    def posterior(self) -> GaussianPosterior:
        network = viewed(unwrap(self.network), self.read_as)
        log_σ = {id(μ): l for μ, l in self.pairs().values()}
        weights = {name: p for name, p in network.named_parameters() if id(p) in log_σ}
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be differentiated later
            mean = torch.cat([widen(p.detach()).reshape(-1) for p in weights.values()])
            precision = torch.cat([(-2 * widen(log_σ[id(p)].detach())).exp().reshape(-1) for p in weights.values()])
            return GaussianPosterior(
                network=network,
                subset=Subset(tuple(weights), tuple(p.shape for p in weights.values())),
                likelihood=self.options.likelihood,
                mean=mean,
                precision=Diagonal(precision),
                n_data=self.n_data or 0,
                fingerprint=fingerprint(network),
            )

    # -- the KL divergence in the loss -----------------------------------------------------------------------------

    @property
    def kl_weight(self) -> float:
        """`β/N`, of the KL divergence in the loss of an example."""
        if self.n_data is None:
            raise VariationalError(
                "the number of training examples is not known before training starts: set variational={'n_data': …}"
            )
        return self.options.beta / self.n_data

    def kl(self) -> Tensor:
        """`Σ_λ D_KL(q(w_λ) ‖ p(w_λ))`, eq. (12), with its graph."""
        return torch.stack([kl_divergence(μ, log_σ, self._s(n)) for n, (μ, log_σ) in self.pairs().items()]).sum()

    @torch.no_grad()
    def add_kl(self, value: Tensor, gradients: Gradients, is_wrong: Tensor) -> tuple[Tensor, Tensor]:
        """The KL divergence, and the loss `value + β/N · KL`, which passes on the known `gradients` of `value` and
        those of the KL divergence; zeros where the step is wrong."""
        pairs = self.pairs()
        if not pairs:
            kl, gradients = value.new_zeros(()), without_wrong(gradients, is_wrong)
        else:
            μ, log_σ = ([pair[which] for pair in pairs.values()] for which in (0, 1))
            kl, of_μ, of_log_σ = kl_with_gradients(μ, log_σ, [self._s(name) for name in pairs], self.kl_weight)
            sums = dict(zip([*μ, *log_σ], [*parts(of_μ, μ), *parts(of_log_σ, log_σ)], strict=True))
            both = [p for p in sums if p in gradients]
            if both:
                torch._foreach_add_([sums[p] for p in both], [gradients[p] for p in both])
            for vector in (of_μ, of_log_σ):
                vector.masked_fill_(is_wrong, 0)
            gradients = without_wrong({p: g for p, g in gradients.items() if p not in sums}, is_wrong) | sums
        with torch.enable_grad():
            return kl, with_known_gradient(value + self.kl_weight * kl, gradients)

    def _s(self, name: str) -> float:
        """The prior's standard deviation of a weight."""
        if name not in self.prior_std:
            raise PriorStdError(
                f"prior_std='weight_decay' of {name} is known when training starts: run trainer.fit, or give a number"
            )
        return self.prior_std[name]

    def log(self, S: int, nll: Tensor, kl: Tensor, squared_gradient: Tensor | None = None) -> None:
        """Means over the examples of an epoch; the ELBO is that of one example, `(1/N) L`."""
        trainer = self.trainer
        if trainer is None or trainer.barebones or not trainer.training:
            return
        nll, kl = nll.detach(), kl.detach()
        ell = -nll if squared_gradient is None else -nll - squared_gradient.detach()
        terms = {"kl": kl, "ell": ell, "elbo": ell - self.kl_weight * kl}
        if squared_gradient is not None:
            terms["squared_gradient"] = squared_gradient.detach()
        for name, value in terms.items():
            self.module.log(f"train_{name}", value, on_step=False, on_epoch=True, batch_size=S, sync_dist=True)

    # -- the beginning of training, and checkpoints ----------------------------------------------------------------

    def begin(self, trainer: Trainer) -> None:
        """What is known only when optimizers and data are there: N, and a prior from weight decay."""
        self.checked_kinks, self.checks = False, StepChecks(self.module, self.options.likelihood)
        if self.options.n_data is None:
            self.n_data = count_examples(trainer, "set variational={'n_data': …}")
        assert self.n_data is not None
        pairs = self.pairs()
        decayed = {name: pairs[name][0] for name in self.decayed if name in pairs}
        others = set(self.module.parameters()) - set(decayed.values()) - set(self.log_sigma.parameters())
        known = {name for name in decayed if name in self.prior_std}  # by a checkpoint, or an earlier fit
        prior_std = from_weight_decay(trainer.optimizers, decayed, others, self.n_data, known)
        with torch.no_grad():
            for name in prior_std.keys() - known:
                self.log_sigma[name].fill_(math.log(prior_std[name]) - BELOW_PRIOR)
        self.prior_std.update(prior_std)
        warn_of_optimizers(trainer.optimizers, pairs)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds besides the parameters."""
        from_decay = {name: self.prior_std[name] for name in self.decayed if name in self.prior_std}
        state = {"n_data": self.n_data, "draws": self.draws, "prior_std": from_decay}
        return {**state, "output": asdict(self.read_as)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state.get("draws", 0)
        self.read_as = Output(**state.get("output", asdict(self.read_as)))
        if self.options.n_data is None:
            self.n_data = state.get("n_data")
        self.prior_std.update({n: s for n, s in state.get("prior_std", {}).items() if n in self.decayed})

    def add_missing_log_sigma(self, weights: dict[str, Tensor]) -> None:
        """A checkpoint of the same module before it was variational has no log σ: give its `weights` ours."""
        own = {f"log_sigma.{key}": value for key, value in self.log_sigma.state_dict().items()}
        missing = [key for key in own if key not in weights]
        if missing:
            rank_zero_warn(
                f"the checkpoint has no log σ for {len(missing)} of {len(own)} parameters: they start at the prior's "
                f"standard deviation times e^−{BELOW_PRIOR:g}"
            )
            weights.update({key: own[key] for key in missing})


def kl_divergence(μ: Tensor, log_σ: Tensor, s: float) -> Tensor:
    """`Σ_λ D_KL(N(μ, σ²) ‖ N(0, s²))`, eq. (12).

    >>> kl_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), 1.0)
    tensor(0.5000)
    """
    μ, log_σ = widen(μ), widen(log_σ)
    return 0.5 * (((2 * log_σ).exp() + μ.square()) / s**2 - 1 - 2 * (log_σ - math.log(s))).sum()


def kl_with_gradients(
    μ: Sequence[Tensor], log_σ: Sequence[Tensor], s: Sequence[float], weight: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `kl_divergence` over several tensors, and its gradients `μ/s²` and `σ²/s² − 1` times `weight`, each as
    one vector, without a graph and in few passes over the weights.

    >>> kl_with_gradients([torch.tensor([1.0])], [torch.tensor([0.0])], [1.0])
    (tensor(0.5000), tensor([1.]), tensor([0.]))
    """
    distance, of_μ = widen(flat(log_σ)), widen(flat(μ))  # log σ/s and μ/s
    torch._foreach_sub_(parts(distance, log_σ), [math.log(t) for t in s])
    torch._foreach_div_(parts(of_μ, μ), list(s))
    distance *= 2
    of_log_σ = torch.expm1(distance)
    twice = torch.dot(of_μ, of_μ) + distance.neg_().add_(of_log_σ).sum()
    torch._foreach_mul_(parts(of_μ, μ), [weight / t for t in s])
    return 0.5 * twice, of_μ, of_log_σ.mul_(weight)


@torch.no_grad()
def without_wrong(gradients: Gradients, is_wrong: Tensor) -> Gradients:
    """The gradients, or zeros where `is_wrong`, on the device. They may be NaN, which times zero is NaN."""
    return {p: g.masked_fill(is_wrong, 0) for p, g in gradients.items()}


def with_known_gradient(value: Tensor, gradients: Gradients) -> Tensor:
    """`value` with the given gradients; a parameter without one is not part of the graph.

    Lightning differentiates what `training_step` returns, with the loss scale of mixed precision, accumulation and the
    hooks of DDP. A gradient that was computed inside the step reaches the parameters in the same way.

    >>> w = nn.Parameter(torch.ones(2))
    >>> (3 * with_known_gradient(torch.tensor(5.0), {w: torch.tensor([1.0, 2.0])})).backward()
    >>> w.grad
    tensor([3., 6.])
    """
    loss: Tensor = _KnownGradient.apply(value.detach(), list(gradients.values()), *gradients)
    return loss


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *torch._foreach_mul(ctx.gradients, cotangent))
