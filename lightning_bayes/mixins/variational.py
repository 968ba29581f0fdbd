"""`VariationalMixin`: what Variational Laplace and variational inference share.

Both give every weight of the user's network a Gaussian `q(w_λ) = N(μ_λ, σ_λ²)` (Variational Laplace paper, eq. (2)),
with the network's own parameters for μ, and parameters `log_sigma` beside them that start at `log s − 3`. Both add the
KL divergence from the prior `N(0, s²)` to the loss, and both end in a diagonal `GaussianPosterior`.

Private names begin with `_variational`, to keep out of the way of the user's module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.mixins.callback import VariationalCallback
from lightning_bayes.mixins.known_gradient import Gradients, hand_over
from lightning_bayes.mixins.log_sigma import LogSigma
from lightning_bayes.mixins.objective import kl_divergence, kl_with_gradients
from lightning_bayes.mixins.options import Settings, VariationalOptions, plain, settings_from
from lightning_bayes.mixins.patterns import check_patterns, matches
from lightning_bayes.mixins.prior_std import PriorStdError, find_priors, from_weight_decay, warn_of_optimizers
from lightning_bayes.mixins.watched_step import Step, StepError, call_step, check_loss, loss_of, one_call, watching
from lightning_bayes.network import Subset
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.fingerprint import fingerprint
from lightning_bayes.structures import Diagonal
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.loss_check import mean_nll
from lightning_bayes.trainer.module import network_of, split_batch

if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object
BELOW_PRIOR = 3.0  # where log σ starts, section 5.1
_STATE = "variational"  # key in a checkpoint
_ORDER = "name the mixin before your module, as in class Bayes(VariationalLaplaceMixin, LitNet)"


class VariationalError(RuntimeError):
    """A module that cannot be made variational as it is; the message says what to change."""


@dataclass
class _State:
    """What a variational module knows besides its parameters."""

    settings: Settings
    prior: dict[str, float] = field(default_factory=dict)  # s by name, as far as it is known
    decayed: tuple[str, ...] = ()  # names whose s comes from weight decay
    n_data: int | None = None
    draws: int = 0  # random draws so far; each has its number
    explicit: bool = False  # whether the running step has called the objective itself
    looked: bool = False  # whether the network was searched for kinks


class VariationalMixin(_Base):
    """Weights with a Gaussian each; the base of `VariationalLaplaceMixin` and `VariationalInferenceMixin`.

    Args:
        variational: a dictionary with the keys of `VariationalOptions`.
    """

    _variational_defaults: ClassVar[dict[str, Any]]  # of `Settings`, and the keys that are `unused`

    log_sigma: LogSigma

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if LightningModule in order and order.index(LightningModule) < order.index(VariationalMixin):
            raise TypeError(f"{_ORDER}: class {cls.__name__} has it the other way round, and would be a plain module")

    def __init__(self, *args: Any, variational: VariationalOptions | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = settings_from(variational, **self._variational_defaults)
        self._variational = _State(settings, n_data=settings.n_data)
        # Where `load_from_checkpoint` finds it, also if the user's module saves no hyperparameters.
        self.hparams["variational"] = plain(variational)
        self._variational_make_log_sigma()

    def _variational_make_log_sigma(self) -> None:
        state, weights = self._variational, self._variational_candidates()
        network = self._variational_network()
        found = find_priors(state.settings.prior_std, weights, network)
        state.decayed = tuple(name for name, prior in found.items() if prior.provisional)
        state.prior = {name: prior.std for name, prior in found.items() if not prior.provisional}
        start = {name: math.log(prior.std) - BELOW_PRIOR for name, prior in found.items()}
        self.log_sigma = LogSigma({n: torch.full_like(p.detach(), start[n]) for n, p in weights.items()})

    def _variational_candidates(self) -> dict[str, nn.Parameter]:
        """The trainable weights of the network, by their names in this module, but for the deterministic ones."""
        if hasattr(self, "log_sigma"):
            raise VariationalError(
                f"{type(self).__name__} already has an attribute log_sigma, the name that the mixin needs: rename it"
            )
        inside = {id(p) for p in self._variational_network().parameters()}
        every = {name: p for name, p in self.named_parameters() if id(p) in inside and p.requires_grad}
        for name, p in every.items():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise VariationalError(
                    f"{name} has no shape before the first batch: run one through the lazy layers in __init__"
                )
        every = {name: p for name, p in every.items() if p.is_floating_point()}
        if not every:
            raise VariationalError(
                f"{type(self).__name__} has no trainable weights when the mixin looks for them: make the layers in the "
                f"__init__ of your module, and {_ORDER}"
            )
        deterministic = self._variational.settings.deterministic
        check_patterns(deterministic, every, "deterministic")
        kept = {name: p for name, p in every.items() if not any(matches(name, pattern) for pattern in deterministic)}
        if not kept:
            raise VariationalError("every weight is deterministic: leave some out of variational's 'deterministic'")
        return kept

    def _variational_network(self) -> nn.Module:
        return network_of(self, self._variational.settings.network)

    # -- the posterior and its KL divergence -----------------------------------------------------------------------

    @property
    def posterior(self) -> GaussianPosterior:
        """`N(μ, diag σ²)` over the network's weights as they are now."""
        network = unwrap(self._variational_network())
        log_σ = {id(μ): l for μ, l in self.weights_and_log_sigma().values()}
        mine = {name: p for name, p in network.named_parameters() if id(p) in log_σ}
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be differentiated later
            mean = torch.cat([widen(p.detach()).reshape(-1) for p in mine.values()])
            precision = torch.cat([(-2 * widen(log_σ[id(p)].detach())).exp().reshape(-1) for p in mine.values()])
            return GaussianPosterior(
                network=network,
                subset=Subset(tuple(mine), tuple(p.shape for p in mine.values())),
                likelihood=self._variational.settings.likelihood,
                mean=mean,
                precision=Diagonal(precision),
                n_data=self._variational.n_data or 0,
                fingerprint=fingerprint(network),
            )

    def weights_and_log_sigma(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """`(μ, log σ)` by name, of the weights that are not frozen now."""
        weights = dict(self.named_parameters())
        return {n: (weights[n], log_σ) for n, log_σ in self.log_sigma.items() if weights[n].requires_grad}

    def _variational_kl(self) -> Tensor:
        """`Σ_λ D_KL(q(w_λ) ‖ p(w_λ))`, eq. (12), with its graph."""
        pairs = self.weights_and_log_sigma()
        return torch.stack(
            [kl_divergence(μ, log_σ, self._variational_prior(n)) for n, (μ, log_σ) in pairs.items()]
        ).sum()

    def _variational_prior(self, name: str) -> float:
        """`s` of a weight."""
        if name not in self._variational.prior:
            raise PriorStdError(
                f"prior_std='weight_decay' of {name} is known when training starts: run trainer.fit, or give a number"
            )
        return self._variational.prior[name]

    def _variational_kl_weight(self) -> float:
        """`β/N`, of the KL divergence in the loss of an example."""
        if self._variational.n_data is None:
            raise VariationalError(
                "the number of training examples is not known before training starts: set variational={'n_data': …}"
            )
        return self._variational.settings.beta / self._variational.n_data

    @torch.no_grad()
    def _variational_with_kl(self, value: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
        """The KL divergence, and the loss `value + β/N · KL`, which hands over the given gradients of `value` and its
        own."""
        weight, kl = self._variational_kl_weight(), value.new_zeros(())
        for name, (μ, log_σ) in self.weights_and_log_sigma().items():
            term, *its = kl_with_gradients(μ, log_σ, self._variational_prior(name))
            kl = kl + term
            for p, g in zip((μ, log_σ), its, strict=True):
                gradients[p] = torch.add(gradients[p], g, alpha=weight) if p in gradients else g.mul_(weight)
        with torch.enable_grad():
            return kl, hand_over(value + weight * kl, gradients)

    # -- training --------------------------------------------------------------------------------------------------

    def _variational_step(self, batch: Any, batch_idx: int) -> Any:
        """Run the user's own step: a `Step`, or, where there is nothing to add, what it returned."""
        state, network = self._variational, self._variational_network()
        state.explicit = False
        with watching(network) as calls:
            returned = call_step(super().training_step, batch, batch_idx)
        if state.explicit:
            return returned
        if not self.automatic_optimization:
            raise StepError(
                "under manual optimization your own training_step differentiates the loss: use self.vl_loss(f, y) there"
            )
        loss = loss_of(returned)
        if loss is None:
            return returned
        call = one_call(calls, self, state.settings.network)
        _, y = split_batch(self, batch)
        likelihood, f = state.settings.likelihood, call.output
        likelihood.check(f.detach(), y)
        if state.settings.loss == "likelihood":
            return Step(returned, mean_nll(likelihood, f, y), call, y)
        check_loss(self, loss, mean_nll(likelihood, f.detach(), y), f)
        return Step(returned, loss, call, y)

    def _variational_trainable(self) -> list[nn.Parameter]:
        """All parameters that train, but for log σ."""
        log_σ = {id(p) for p in self.log_sigma.parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in log_σ]

    def _variational_log(self, S: int, nll: Tensor, kl: Tensor, squared_gradient: Tensor | None = None) -> None:
        """Means over the examples of an epoch; the ELBO is that of one example, `(1/N) L`."""
        trainer = self._trainer
        if trainer is None or trainer.barebones or not trainer.training:
            return
        nll, kl = nll.detach(), kl.detach()
        ell = -nll if squared_gradient is None else -nll - squared_gradient.detach()
        terms = {"kl": kl, "ell": ell, "elbo": ell - self._variational_kl_weight() * kl}
        if squared_gradient is not None:
            terms["squared_gradient"] = squared_gradient.detach()
        for name, value in terms.items():
            self.log(f"train_{name}", value, on_step=False, on_epoch=True, batch_size=S, sync_dist=True)

    # -- Lightning's hooks -----------------------------------------------------------------------------------------

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        found = super().configure_callbacks()
        return [*(found if isinstance(found, Sequence) else [found]), VariationalCallback(self._variational.settings)]

    def _variational_begin(self, trainer: Trainer) -> None:
        """What is known only when optimizers and data are there; the callback calls it when training starts."""
        state, weights = self._variational, self.weights_and_log_sigma()
        state.looked = False
        if state.settings.n_data is None:
            state.n_data = count_examples(trainer, "set variational={'n_data': …}")
        assert state.n_data is not None
        mine = {name: weights[name][0] for name in state.decayed if name in weights}
        others = set(self.parameters()) - set(mine.values()) - set(self.log_sigma.parameters())
        known = {name for name in mine if name in state.prior}  # by a checkpoint
        found = from_weight_decay(trainer.optimizers, mine, others, state.n_data, known)
        with torch.no_grad():
            for name in found.keys() - known:
                self.log_sigma[name].fill_(math.log(found[name]) - BELOW_PRIOR)
        state.prior.update(found)
        warn_of_optimizers(trainer.optimizers, weights)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        state = self._variational
        from_decay = {name: state.prior[name] for name in state.decayed if name in state.prior}
        checkpoint[_STATE] = {"n_data": state.n_data, "draws": state.draws, "prior_std": from_decay}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state, stored = self._variational, checkpoint.get(_STATE, {})
        state.draws = stored.get("draws", 0)
        if state.settings.n_data is None:
            state.n_data = stored.get("n_data")
        state.prior.update({n: s for n, s in stored.get("prior_std", {}).items() if n in state.decayed})
        self._variational_fill(checkpoint["state_dict"])

    def _variational_fill(self, weights: dict[str, Tensor]) -> None:
        """A checkpoint of the same module before it was variational has no log σ."""
        own = {f"log_sigma.{key}": value for key, value in self.log_sigma.state_dict().items()}
        missing = [key for key in own if key not in weights]
        if missing:
            rank_zero_warn(
                f"the checkpoint has no log σ for {len(missing)} of {len(own)} parameters: they start at the prior's "
                f"standard deviation times e^−{BELOW_PRIOR:g}"
            )
            weights.update({key: own[key] for key in missing})
