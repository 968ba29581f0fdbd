"""What learning by the marginal likelihood keeps: priors and noise, and the weights with the best evidence.

Numbers and tensors only, which a checkpoint holds.

The prior's part of a gradient, for a training whose loss has none: where the loss is `c` times the mean negative
log-likelihood of `N` examples, that of `½ Σ_l δ_l ‖θ_l‖²` is, at the same scale,

    ∂loss/∂θ_l + c · δ_l θ_l / N.

`c` is 1 for a mean negative log-likelihood, and `2σ²/C` for the mean squared error of `C` outputs. Such a loss does not
know that `σ` is tuned: at another `σ`, it is `c · (σ/σ₀)²` times the negative log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.arguments import format_names
from lightning_bayes.callbacks.fit_data import CallbackPrior
from lightning_bayes.curvature import choose_subset
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, Subset, inputs
from lightning_bayes.network.accumulation import float64_device
from lightning_bayes.network.subset import layer_of
from lightning_bayes.posterior.l2m import default_loss_scale
from lightning_bayes.posterior.prior import PriorError, as_precision
from lightning_bayes.trainer.dry_run import split_training_batch
from lightning_bayes.trainer.loss_check import SAME_SCALE
from lightning_bayes.trainer.private import is_dev_run, scale_before_step


@dataclass(frozen=True)
class Hyperparameters:
    prior_precision: dict[str, float] = field(default_factory=dict)  # δ_l, by the layer's name
    noise: float = 1.0  # σ/σ₀, relative to the likelihood that was given


@dataclass(frozen=True)
class BestEvidence:
    """The largest evidence so far, with the hyperparameters and weights that it belongs to."""

    log_evidence: float
    hyperparameters: Hyperparameters
    parameters: tuple[str, ...]  # that it is the evidence of; that of others is no larger or smaller
    weights: dict[str, Tensor]  # parameters and buffers of the module, copied to the CPU

    @staticmethod
    def of(
        module: nn.Module, log_evidence: float, hyperparameters: Hyperparameters, parameters: tuple[str, ...]
    ) -> BestEvidence:
        weights = {name: t.detach().cpu().clone() for name, t in _tensors(module).items()}
        return BestEvidence(log_evidence, hyperparameters, parameters, weights)

    @torch.no_grad()
    def restore(self, module: nn.Module) -> None:
        """Put the weights back."""
        for name, t in _tensors(module).items():
            t.copy_(self.weights[name])

    def state(self) -> dict[str, Any]:
        return {
            "log_evidence": self.log_evidence,
            "hyperparameters": asdict(self.hyperparameters),
            "parameters": self.parameters,
            "weights": self.weights,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> BestEvidence:
        return BestEvidence(**{**state, "hyperparameters": Hyperparameters(**state["hyperparameters"])})


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


Parameters = Mapping[str, nn.Parameter]


class PriorGradient:
    """Adds the prior's part to the gradients of the chosen parameters, before each step of an optimizer."""

    def __init__(
        self,
        name: str,
        network_in: Callable[[LightningModule], nn.Module],
        subset: str | list[str],
        prior_precision: Any,
        prior: CallbackPrior,
        scale: LossScale,
    ) -> None:
        self._name, self._network_in, self._of = name, network_in, subset
        self._given, self._prior, self.scale = prior_precision, prior, scale
        self._means: dict[str, Tensor] = {}  # m of each parameter
        self.subset: Subset | None = None  # from an epoch's first batch on
        self._x: Any = None  # of that batch
        self._n_targets = 1
        self._of_layers: dict[str, float] = {}  # the given prior precision
        self.n_data = 0  # N
        self._said_n_data = False
        self.batches = 0  # whose gradients wait for the step

    def choose(self, trainer: Trainer, module: LightningModule, x: Any = None) -> Subset | None:
        """The parameters that have a prior here, and nowhere else; None before lazy layers have any."""
        network = self._network_in(module)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()):
            return None
        subset = choose_subset(network, x, self._of)
        if as_precision(self._given, subset, torch.ones((), device="cpu")).numel() not in (1, len(subset.layers)):
            raise PriorError(f"prior_precision must be one number, or one for each of the {len(subset.layers)} layers")
        check_optimizers(trainer.optimizers, subset.parameters(network), self._name)
        self._means = self._prior.means(network, subset)
        return subset

    def begin_epoch(self) -> None:
        self.subset = None  # a schedule may thaw layers

    def begin_batch(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        if self.subset is None:
            x, y = split_training_batch(trainer, module, batch)
            self._x = inputs.contained(self._network_in(module), x, y)
            self._n_targets = max(1, sum(t[0].numel() for t in inputs.tensors(y)))
            self.subset = self.choose(trainer, module, self._x)

    def add(self, trainer: Trainer, module: LightningModule, optimizer: Any, learned: Hyperparameters) -> None:
        # Lightning divides a loss by the batches to accumulate, also where an epoch ends before they are complete.
        part = self.batches / trainer.accumulate_grad_batches if module.automatic_optimization else 1.0
        self.batches = 0
        if not part:  # no step has returned a loss
            return
        c = self.scale.agree(self._n_targets, module)
        self.subset, self._x = self.subset or self.choose(trainer, module, self._x), None
        if self.subset is None:
            return
        factor = c * learned.noise**2 * part / self.n_data
        strengths = {name: factor * δ for name, δ in self._priors(self.subset, learned).items()}
        parameters = self.subset.parameters(self._network_in(module))
        add_prior_gradient(optimizer, parameters, strengths, scale_before_step(trainer, optimizer), self._means)

    def compare_n_data(self, trainer: Trainer, n_data: int) -> None:
        """With those of a pass, whose evidence knows of no others."""
        if self.n_data and self.n_data != n_data and not self._said_n_data and not is_dev_run(trainer):
            self._said_n_data = True
            rank_zero_warn(
                f"{self._name}: the evidence is that of {n_data} examples, but in training the prior counts as for "
                f"{self.n_data}: make n_data= and data= agree, for priors are learned from the former"
            )

    def _priors(self, subset: Subset, learned: Hyperparameters) -> dict[str, float]:
        """`δ` of each parameter; what is not learned yet is what was given."""
        if self._of_layers.keys() != set(subset.layers):  # as numbers, which a step need not wait for
            given = as_precision(self._given, subset, torch.empty((), dtype=torch.float64, device="cpu"))
            self._of_layers = dict(zip(subset.layers, given.expand(len(subset.layers)).tolist(), strict=True))
        δ = {**self._of_layers, **learned.prior_precision}
        return {name: δ[layer_of(name)] for name in subset.names}


class LossScale:
    """`c`, from the loss of the first batch: the same number on all processes, and after a restart."""

    def __init__(self, name: str, likelihood: Likelihood, given: float | None) -> None:
        self._name, self._likelihood, self._given = name, likelihood, given
        self.measured: float | None = None  # on this process
        self.agreed: float | None = None  # by all of them

    def agree(self, n_targets: int, module: LightningModule) -> float:
        """When all processes have seen a loss."""
        if self.agreed is None:
            numbers = [self.measured or 0.0, float(self.measured is not None)]
            known = torch.tensor(numbers, dtype=torch.float64, device=float64_device(module.device))
            Processes.current().sum_([known])
            total, n = known.tolist()
            self.agreed = self._choose(total / n if n else None, n_targets, module.automatic_optimization)
        return self.agreed

    def _choose(self, c: float | None, n_targets: int, automatic: bool) -> float:
        if self._given is not None:
            if c is not None and not math.isclose(c, self._given, rel_tol=SAME_SCALE):
                rank_zero_warn(
                    f"{self._name}: loss_scale={self._given:.4g} was given, but the loss of the first batch is {c:.4g} "
                    "times the mean negative log-likelihood: the prior counts as if the former were right"
                )
            return self._given
        if c is None:
            c = default_loss_scale(self._likelihood, n_targets)
            say = rank_zero_info if automatic else rank_zero_warn  # nothing else will say that the loss is another one
            say(
                f"{self._name}: the loss could not be compared with the likelihood, and is taken for {c:.4g} times its "
                "mean negative logarithm; loss_scale= says otherwise"
            )
        usual = {scale / over for scale in self._likelihood.loss_scales for over in (1, n_targets)}
        return next((scale for scale in usual if math.isclose(c, scale, rel_tol=SAME_SCALE)), c)


def check_optimizers(optimizers: Iterable[Any], parameters: Parameters, name: str) -> None:
    """Refuse an optimizer that has a prior of its own, or that a gradient alone leads astray."""
    names = {p: label for label, p in parameters.items()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            decayed = [names[p] for p in group["params"] if p in names]
            if decayed and group.get("weight_decay", 0):
                raise ValueError(
                    f"{kind} has weight_decay={group['weight_decay']:g} for {format_names(decayed)}, but {name} is "
                    "their prior and learns its strength: configure the optimizer with weight_decay=0 (AdamW's default "
                    "is 0.01)"
                )
            if group.get("line_search_fn") is not None:
                raise ValueError(
                    f"{kind} with line_search_fn={group['line_search_fn']!r} compares losses, in which the prior of "
                    f"{name} is not: leave line_search_fn out, or use another optimizer"
                )


@torch.no_grad()
def add_prior_gradient(
    optimizer: Any,
    parameters: Parameters,
    strengths: Mapping[str, float],
    scale: float = 1.0,
    means: Mapping[str, Tensor] | None = None,
) -> None:
    """Add `strength · (θ − m)` to the gradients that the optimizer is about to use, which are `scale` times what they
    stand for.

    A parameter without a gradient is left alone, as by torch's own weight decay. For `SGD` no strength is above `1/lr`,
    with which gradient descent takes weights to `m` in one step: more would throw them beyond it.
    """
    names = {p: name for name, p in parameters.items()}
    for group in optimizer.param_groups:
        lr = float(group["lr"]) if isinstance(optimizer, torch.optim.SGD) else 0.0
        most = 1 / lr if lr > 0 else math.inf
        for p in group["params"]:
            if p.grad is not None and p in names:
                m = (means or {}).get(names[p])
                p.grad.add_(p if m is None else p - m.to(p), alpha=scale * min(strengths[names[p]], most))
