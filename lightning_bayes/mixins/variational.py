"""`VariationalMixin`: a module with a Gaussian `q` over its weights; the base of both variational mixins.

    q(w_λ) = N(μ_λ, σ_λ²)                                     (Variational Laplace paper, eq. (2))
    KL_λ = ½ ((σ_λ² + μ_λ²)/s_λ² − 1 + log(s_λ²/σ_λ²))        (eq. (12), from the prior N(0, s_λ²))

μ are the network's own parameters; the parameters log σ are added, and start at `log s − 3`. The loss of an example
gets `(β/N) Σ_λ KL_λ`. (The printed eq. (30) has σ² where eq. (12) has the prior's s².)

The mixin defines the public names and Lightning hooks of the module. The work is done by `GaussianWeights`, its
one private attribute `_variational`, and by `VariationalCallback`, which scores and predicts with the posterior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.mixins.log_sigma import BELOW_PRIOR, LogSigma, MixinBase, check_patterns, matches
from lightning_bayes.mixins.options import (
    PriorStdError,
    VariationalOptions,
    find_priors,
    from_weight_decay,
    options_from,
    plain,
    warn_of_optimizers,
)
from lightning_bayes.mixins.training_step import Gradients, StepChecks, with_known_gradient, without_wrong
from lightning_bayes.network import Subset
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.output import Output, unwrap_output, wrap_output
from lightning_bayes.network.subset import flat, parts
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.options.use import UseOptions
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.fingerprint import fingerprint
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer import PosteriorCallback
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.module import network_of, refuse_sharded

_KEY = "variational"  # in a checkpoint
_MIXIN_FIRST = "name the mixin before your module, as in class Bayes(VariationalLaplaceMixin, LitNet)"


class VariationalError(RuntimeError):
    """A module that cannot be made variational; the message says what to change."""


class VariationalMixin(MixinBase):
    """Weights with a Gaussian each; the base of `VariationalLaplaceMixin` and `VariationalInferenceMixin`."""

    log_sigma: LogSigma
    _variational: GaussianWeights

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(VariationalMixin):
            raise TypeError(
                f"{_MIXIN_FIRST}: class {cls.__name__} has it the other way round, and would be a plain module"
            )

    @property
    def posterior(self) -> GaussianPosterior:
        """`N(μ, diag σ²)` over the network's present weights."""
        return self._variational.posterior()

    def weights_and_log_sigma(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name, for the weights that are not frozen."""
        return self._variational.pairs()

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        own = super().configure_callbacks()
        return [*(own if isinstance(own, Sequence) else [own]), VariationalCallback(self._variational)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_KEY] = self._variational.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._variational.load_state_dict(checkpoint.get(_KEY, {}))
        self._variational.add_missing_log_sigma(checkpoint["state_dict"])


def make_variational(
    module: VariationalMixin,
    given: Mapping[str, Any] | None,
    *,
    name: str,
    predictive: PredictiveOption,
    unused: tuple[str, ...],
) -> None:
    """In a mixin's `__init__`; for the arguments see `options_from`."""
    options = options_from(given, name=name, predictive=predictive, unused=unused)
    # `load_from_checkpoint` finds it here, even if the user's module saves no hyperparameters.
    module.hparams["variational"] = plain(given)
    module._variational = GaussianWeights(module, options)
    module.log_sigma = module._variational.log_sigma


class VariationalCallback(PosteriorCallback):
    """Uses the module's present posterior. It stores nothing, because the module's weights are the posterior."""

    def __init__(self, q: GaussianWeights) -> None:
        options = {field.name: getattr(q.options, field.name) for field in fields(UseOptions)}
        super().__init__(q.options.likelihood, **options)
        self._q = q

    def _find_posterior(self) -> GaussianPosterior | None:
        if self._module is None:
            return None
        now, before = self._module.posterior, self._posterior
        assert isinstance(now, GaussianPosterior)
        if (
            before is not None
            and unwrap_output(before.network) is unwrap_output(now.network)
            and (before.subset.names, before.device) == (now.subset.names, now.device)
        ):
            now = replace(now, plans=before.plans)  # which do not depend on the weights' values
        self._posterior = now
        return now

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "a variational module")

    def _check_module(self, module: LightningModule) -> None:
        pass

    def _begin_dry_run(self, trainer: Trainer) -> None:
        """The mixin checks every step itself, and the callback stores nothing."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._q.begin(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._q.checks.raise_pending()
        super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._q.checks.raise_pending()
        super().on_train_end(trainer, pl_module)


class GaussianWeights:
    """The Gaussian `q` of a module whose layers exist, its part of the loss, and its state."""

    def __init__(self, module: LightningModule, options: VariationalOptions) -> None:
        self.module, self.options = module, options
        self.n_data = options.n_data  # N; if it is to be counted, None until training starts
        self.read_as = Output(options.network.output, options.network.class_dim)  # completed by the first batch
        self.draws = 0  # number of random draws so far
        self.called_vl_loss = False  # by the present training step
        self.checks = StepChecks(module, options.likelihood)
        self.checked_kinks = False  # in the present fit
        weights = self._candidates()
        stds, self.decayed = find_priors(options.prior_std, weights, self.network)
        self.prior_std = {name: s for name, s in stds.items() if name not in self.decayed}  # s, where known
        start = {name: math.log(s) - BELOW_PRIOR for name, s in stds.items()}
        self.log_sigma = LogSigma({n: torch.full_like(p.detach(), start[n]) for n, p in weights.items()})

    def _candidates(self) -> dict[str, nn.Parameter]:
        """The trainable weights of the network by their names in the module, without the deterministic ones."""
        kind = type(self.module).__name__
        if hasattr(self.module, "log_sigma"):
            raise VariationalError(f"{kind} already has an attribute log_sigma, which the mixin needs: rename it")
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
                f"__init__ of your module, and {_MIXIN_FIRST}"
            )
        patterns = self.options.deterministic
        check_patterns(patterns, weights, "deterministic")
        weights = {name: p for name, p in weights.items() if not any(matches(name, pattern) for pattern in patterns)}
        if not weights:
            raise VariationalError("every weight is deterministic: leave some out of variational's 'deterministic'")
        return weights

    # -- the weights and their posterior -------------------------------------------------------------------------------

    @property
    def network(self) -> nn.Module:
        return network_of(self.module, self.options.network.name)

    @property
    def trainer(self) -> Trainer | None:
        """The module's Trainer, if it has one."""
        if self.module.fabric is not None:
            return None
        try:
            return self.module.trainer
        except RuntimeError:  # Lightning raises if the module is not attached
            return None

    def pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name, for the weights that are not frozen."""
        weights = dict(self.module.named_parameters())
        return {n: (weights[n], log_σ) for n, log_σ in self.log_sigma.items() if weights[n].requires_grad}

    def trainable(self) -> list[nn.Parameter]:
        """All parameters that train, without log σ."""
        log_σ = {id(p) for p in self.log_sigma.parameters()}
        return [p for p in self.module.parameters() if p.requires_grad and id(p) not in log_σ]

    def posterior(self) -> GaussianPosterior:
        network = wrap_output(unwrap(self.network), self.read_as)
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

    # -- the KL divergence in the loss ---------------------------------------------------------------------------------

    @property
    def kl_weight(self) -> float:
        """`β/N`, the weight of the KL divergence in the loss of an example."""
        if self.n_data is None:
            raise VariationalError(
                "the number of training examples is not known before training starts: set variational={'n_data': …}"
            )
        return self.options.beta / self.n_data

    def kl(self) -> Tensor:
        """`Σ_λ D_KL(q(w_λ) ‖ p(w_λ))`, eq. (12), with a graph."""
        return torch.stack([kl_divergence(μ, log_σ, self._s(n)) for n, (μ, log_σ) in self.pairs().items()]).sum()

    @torch.no_grad()
    def add_kl(self, value: Tensor, gradients: Gradients, is_wrong: Tensor) -> tuple[Tensor, Tensor]:
        """The KL divergence, and the loss `value + β/N · KL` with the sum of the `gradients` of `value` and those of
        the KL divergence; the sum is zero if the step is wrong."""
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
        """Log means over the examples of an epoch. The ELBO is that of one example, `(1/N) L`."""
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

    # -- the start of training, and checkpoints ------------------------------------------------------------------------

    def begin(self, trainer: Trainer) -> None:
        """Set what needs the data and the optimizers: N, and a prior from weight decay."""
        self.checked_kinks, self.checks = False, StepChecks(self.module, self.options.likelihood)
        if self.options.n_data is None:
            self.n_data = count_examples(trainer, "set variational={'n_data': …}")
        assert self.n_data is not None
        pairs = self.pairs()
        decayed = {name: pairs[name][0] for name in self.decayed if name in pairs}
        others = set(self.module.parameters()) - set(decayed.values()) - set(self.log_sigma.parameters())
        known = {name for name in decayed if name in self.prior_std}  # from a checkpoint or an earlier fit
        prior_std = from_weight_decay(trainer.optimizers, decayed, others, self.n_data, known)
        with torch.no_grad():
            for name in prior_std.keys() - known:
                self.log_sigma[name].fill_(math.log(prior_std[name]) - BELOW_PRIOR)
        self.prior_std.update(prior_std)
        warn_of_optimizers(trainer.optimizers, pairs)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds besides the parameters."""
        from_decay = {name: self.prior_std[name] for name in self.decayed if name in self.prior_std}
        output = asdict(self.read_as)
        return {"n_data": self.n_data, "draws": self.draws, "prior_std": from_decay, "output": output}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state is empty for a checkpoint of the module before it was variational."""
        self.draws = state.get("draws", 0)
        self.read_as = Output(**state.get("output", asdict(self.read_as)))
        if self.options.n_data is None:
            self.n_data = state.get("n_data")
        self.prior_std.update({n: s for n, s in state.get("prior_std", {}).items() if n in self.decayed})

    def add_missing_log_sigma(self, weights: dict[str, Tensor]) -> None:
        """Add log σ to the `weights` of a checkpoint that has none, because the module was not variational then."""
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
