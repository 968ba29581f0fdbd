"""`MarginalLikelihoodCallback`: learn the prior of each layer, and the noise of a regression, during training from the
training data alone (Immer et al. 2021; tutorial, section 4). The weights maximise

    Σₙ log p(yₙ | f(xₙ; θ)) − ½ Σ_l δ_l ‖θ_l‖².

The callback adds the gradient of the second term to that of the user's loss (see `PriorGradient`). Every `F` epochs
after `B` epochs of burn-in, one exact pass gives the curvature at the current weights, and its evidence

    log p(D | δ, σ) ≈ log p(D, θ | δ, σ) − ½ log det P(δ, σ)

is maximised in log δ and log σ by Adam or by MacKay's fixed point. The final posterior is fitted at the weights and
priors with the largest evidence.

The loss of the module does not contain the prior. If the loss is `c` times the mean negative log-likelihood of `N`
examples, the gradient of `½ Σ_l δ_l ‖θ_l‖²` at the same scale gives

    ∂loss/∂θ_l + c · δ_l θ_l / N.

`c` is 1 for a mean negative log-likelihood, and `2σ²/C` for the mean squared error of `C` outputs. Such a loss does not
change when `σ` is tuned: at another `σ`, it is `c · (σ/σ₀)²` times the negative log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.arguments import count, format_names, format_value
from lightning_bayes.callbacks.laplace import LaplaceCallback
from lightning_bayes.curvature import choose_subset
from lightning_bayes.evidence.evidence import PriorGroups
from lightning_bayes.evidence.tuning import ascend, fixed_point
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, Subset, inputs
from lightning_bayes.network.float64 import float64_device
from lightning_bayes.network.messages import inform, warn
from lightning_bayes.network.subset import layer_of
from lightning_bayes.options.fit import CurvatureWord, FisherMC, StructureOption, StructureWord, SubsetWord
from lightning_bayes.options.tuning import EvidenceWord, Learning, learning_option
from lightning_bayes.posterior import LaplacePosterior, PosteriorError, Subnetwork
from lightning_bayes.posterior.moments import default_loss_scale
from lightning_bayes.posterior.prior import PriorError, as_precision
from lightning_bayes.trainer.checkpoints import callback_state, copied_tensors, restore_tensors
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.dry_run import SAME_SCALE, LossFit, split_training_batch
from lightning_bayes.trainer.posterior_callback import CallbackPrior, PosteriorCallback
from lightning_bayes.trainer.private import acts_at_validation, callbacks_of, class_name, is_dev_run, scale_before_step
from lightning_bayes.trainer.report import describe

_DETERMINED = 0.9  # a network may be too small if the data determine more than this share of its weights


class MarginalLikelihoodCallback(LaplaceCallback):
    """Learn the strength of regularisation from the training data, and fit a posterior with it.

    The module does not change. The callback compares its loss with the likelihood on the first batch, and adds the
    prior's gradient at the scale of the loss. The optimizer must have no weight decay.

    Args:
        likelihood: "classification", "binary" or "regression", or a `Likelihood` with the initial noise.

        evidence: "marglik" or "mackay", at the current weights, "linear", at the optimum of the linearised network, or
            `Learning(method, steps, lr, noise, keep, …)`.
        every_n_epochs: `F`, epochs between two passes over the training data.
        burn_in_epochs: `B`, epochs before the first pass.

        structure: "kron", "ekfac" (a second pass), "diag" or "full", or an option such as `Kron(rank="auto")`.
        subset: "all", "last_layer", or a list of parameter or module names; other weights get no prior.
        curvature: as in `LaplaceCallback`.
        prior_precision: the initial prior precision: a number, or one per layer.
        prior: `Prior(mean=…, temperature=…)`.
        data: as in `LaplaceCallback`.
        name: suffix of the logged numbers; `log_evidence_<name>` can be monitored.
        use: network, predictive, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    why_one = "a network can have only one prior"
    priority = 1  # after weight averaging, and before posteriors of the final weights
    keeps_points: ClassVar[bool] = False
    fits_shards: ClassVar[bool] = False  # the prior's gradient needs all weights on every process

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        evidence: EvidenceWord | Learning = "marglik",
        every_n_epochs: int = 1,
        burn_in_epochs: int = 0,
        structure: StructureWord | StructureOption = "kron",
        subset: SubsetWord | list[str] = "all",
        curvature: CurvatureWord | FisherMC = "auto",
        prior_precision: float | list[float] = 1.0,
        prior: Any = None,
        data: Any = None,
        name: str = "marglik",
        **use: Any,
    ) -> None:
        super().__init__(
            likelihood, structure=structure, subset=subset, curvature=curvature, prior_precision=prior_precision,
            prior=prior, tune=None, weights="both", data=data, name=name, **use,
        )  # fmt: skip
        if isinstance(subset, Subnetwork):
            raise ValueError(
                f"subset must name whole layers or parameters, to get a prior in training, got {format_value(subset)}"
            )
        if self.structure.is_truncated:
            raise ValueError(
                "structure='lowrank' omits curvature, so its evidence is too high to learn a prior from: use "
                "'kron', 'ekfac', 'diag' or 'full'"
            )
        if self.options.prior.posterior is not None:
            raise ValueError("prior= is a posterior, and its strength cannot be learned per layer: use Prior(mean=…)")
        self.learning = learning_option(evidence)
        self.every_n_epochs = count("every_n_epochs", every_n_epochs)
        self.burn_in_epochs = count("burn_in_epochs", burn_in_epochs, least=0)
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one training run."""
        self._hyperparameters = Hyperparameters()
        self._best: BestEvidence | None = None
        self._numbers: dict[str, float] = {}  # the numbers that the last pass logged
        self._refitted = 0  # the number of epochs trained before that pass
        self._resumed = False
        scale = LossScale(self.name, self.likelihood, self.learning.loss_scale)
        prior = self.options.prior_precision, self._prior
        self._gradient = PriorGradient(self.name, self.network_in, self.subset, *prior, scale)

    # -- the posterior -----------------------------------------------------------------------------------------------

    def _fit_kwargs(self) -> dict[str, Any]:
        σ, ρ = self.likelihood.tunable_noise, self._hyperparameters.noise
        likelihood = self.likelihood if σ is None or ρ == 1 else self.likelihood.with_noise(σ * ρ)
        return {**super()._fit_kwargs(), "likelihood": likelihood}

    def _pass(self, trainer: Trainer | None, module: LightningModule, loader: Any) -> LaplacePosterior:
        posterior, known = super()._pass(trainer, module, loader), self._hyperparameters.prior_precision
        if not known:
            return posterior
        given = posterior.prior_precision.expand(len(posterior.subset.layers)).tolist()
        layers = zip(posterior.subset.layers, given, strict=True)
        return posterior.with_prior([known.get(layer, δ) for layer, δ in layers])

    def _fitted_to(self, trainer: Trainer, module: LightningModule, path: str, of: str) -> LaplacePosterior:
        stored, own = callback_state(trainer, path, self.state_key, "hyperparameters"), self._hyperparameters
        self._hyperparameters = own if stored is None else Hyperparameters(**stored)
        try:
            return super()._fitted_to(trainer, module, path, of)
        finally:
            self._hyperparameters = own

    def _catch_up(self, trainer: Trainer, module: LightningModule) -> None:
        """If training was resumed from a checkpoint that was written just before a refit, run this refit now."""
        if self._resumed:
            self._learn(trainer, module, trainer.current_epoch)

    def _learn(self, trainer: Trainer, module: LightningModule, epochs: int) -> bool:
        """Refit if a refit is due after this many epochs; return whether there was a refit."""
        after = epochs - self.burn_in_epochs
        due = (after >= 0 and after % self.every_n_epochs == 0) or is_dev_run(trainer)
        if not due or self._refitted >= epochs:  # a resumed run may already have made this refit
            return False
        self._refit(trainer, module, tune=True)
        self._refitted = epochs
        return True

    def _refit(self, trainer: Trainer, module: LightningModule, tune: bool) -> None:
        """Make a pass over the data and, if `tune`, maximise the evidence."""
        posterior = self._pass(trainer, module, self._loader(trainer, module))
        self._gradient.compare_n_data(trainer, posterior.n_data)
        self._forget_other_best(posterior.subset.names)
        if not math.isfinite(posterior.log_marginal_likelihood()):
            raise PosteriorError(
                f"{self.name}: the evidence is not finite: training has diverged; lower the learning rate"
            )
        if tune:
            posterior = self._climb(trainer, posterior)
        numbers = describe(posterior, by_evidence=True)
        evidence = numbers["log_evidence"]  # at the current weights, with which predictions are made
        if self.learning.method == "linear":
            numbers["linear_evidence"] = float(posterior.log_marginal_likelihood(at="optimum"))
        if self.learning.method == "mackay" and "noise_std" in numbers:
            numbers["noise_precision"] = numbers["noise_std"] ** -2
        self._numbers = {f"{key}_{self.name}": value for key, value in numbers.items()}
        is_best = tune and self.learning.keep == "best" and math.isfinite(evidence)
        is_best = is_best and (self._best is None or evidence > self._best.log_evidence)
        if trainer.strategy.broadcast(is_best):
            weights = {name: t.cpu() for name, t in copied_tensors(module).items()}
            self._best = BestEvidence(evidence, self._hyperparameters, posterior.subset.names, weights)

    def _forget_other_best(self, parameters: tuple[str, ...]) -> None:
        """Forget the best evidence if the set of training parameters has changed, because evidences of different models
        cannot be compared."""
        if self._best is not None and self._best.parameters != parameters:
            self._best = None
            inform(f"{self.name}: the trainable weights have changed, so the search for the best evidence starts again")

    def _climb(self, trainer: Trainer, posterior: LaplacePosterior) -> LaplacePosterior:
        learning = self.learning
        if learning.method == "mackay":
            groups = PriorGroups.of(posterior, "layers")
            tuned, _ = fixed_point(posterior, groups, learning.noise, learning.steps, tolerance=1e-4)
        else:
            at = "optimum" if learning.method == "linear" else "weights"
            tuned = ascend(posterior, learning.steps, learning.lr, at, learning.noise)
        δ, before = tuned.prior_precision.reshape(-1).tolist(), self._hyperparameters
        δ, ρ = trainer.strategy.broadcast((δ, _noise_of(tuned) / _noise_of(posterior)))  # bitwise equal everywhere
        learned = dict(zip(posterior.subset.layers, δ, strict=True))
        self._hyperparameters = Hyperparameters({**before.prior_precision, **learned}, before.noise * ρ)
        return tuned

    def _report(self, trainer: Trainer | None, posterior: LaplacePosterior, of: str = "") -> None:
        self._by_evidence = True
        super()._report(trainer, posterior, of)
        γ, d = float(posterior.effective_parameters), posterior.subset.size
        if γ > _DETERMINED * d and not of:
            inform(
                f"{self.name}: the data determine {γ:.4g} of {d} weights, nearly all: a larger network may learn more "
                "from them"
            )

    # -- before training ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._forget()  # the state of a checkpoint is loaded after this hook

    def _check_module(self, module: LightningModule) -> None:
        # Unlike `LaplaceCallback`, always refuse a variational module: its log σ would get a prior
        PosteriorCallback._check_module(self, module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        check_companions(trainer, self.learning.keep)
        check_monitors(trainer, self.name)
        if not self._refitted:
            check_length(trainer, self.burn_in_epochs, self.every_n_epochs)
        if self.subset != "last_layer":  # the last layer is known only at the first batch
            self._gradient.choose(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._gradient.n_data = self.learning.n_data or count_examples(trainer)
        self._catch_up(trainer, pl_module)

    # -- training ----------------------------------------------------------------------------------------------------

    def judge_loss(self, fit: LossFit, outputs: Tensor | None) -> None:
        super().judge_loss(fit, outputs)
        self._gradient.scale.measured = fit.scale

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gradient.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._gradient.begin_batch(trainer, pl_module, batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gradient.batches += 1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # Gradients are summed over batches and processes and unscaled by now, and not yet clipped.
        self._gradient.add(trainer, pl_module, optimizer, self._hyperparameters)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        learned = self._learn(trainer, pl_module, trainer.current_epoch + 1)
        if not learned and not self._refitted and is_monitored(trainer, self.name):
            self._refit(trainer, pl_module, tune=False)
        pl_module.log_dict(self._numbers, on_step=False, on_epoch=True, batch_size=1)

    def _finish(self, trainer: Trainer, module: LightningModule, only_missing: bool) -> None:
        if only_missing:
            self._catch_up(trainer, module)
        if self._gradient.subset is not None:
            self._forget_other_best(self._gradient.subset.names)
        if self._best is not None and self.learning.keep == "best":
            restore_tensors(module, self._best.weights)
            self._hyperparameters = self._best.hyperparameters
        if not only_missing and not self._refitted:
            warn(
                f"{self.name}: training ended before the prior was learned: lower burn_in_epochs="
                f"{self.burn_in_epochs} or every_n_epochs={self.every_n_epochs}"
            )
        super()._finish(trainer, module, only_missing)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "hyperparameters": asdict(self._hyperparameters),
            "best": None if self._best is None else self._best.state(),
            "numbers": self._numbers,
            "refitted": self._refitted,
            "loss_scale": self._gradient.scale.agreed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._hyperparameters = Hyperparameters(**state_dict["hyperparameters"])
        self._best = None if state_dict["best"] is None else BestEvidence.from_state(state_dict["best"])
        self._numbers, self._refitted, self._resumed = state_dict["numbers"], state_dict["refitted"], True
        self._gradient.scale.agreed = state_dict["loss_scale"]


def _noise_of(posterior: LaplacePosterior) -> float:
    """A number proportional to `σ`; 1 if there is no noise to learn."""
    σ = posterior.likelihood.tunable_noise
    return 1.0 if σ is None else float(torch.as_tensor(σ).reshape(-1)[0])


_OF_LAST_WEIGHTS = {  # what these callbacks do with the weights at the end of training, for an error message
    "WeightAveraging": "averaged",
    "StochasticWeightAveraging": "averaged",
    "SWAGCallback": "averaged",
    "L2MCallback": "followed",
    "OnlineLaplaceCallback": "followed",
}
_LOGGED = ("log_evidence", "linear_evidence", "effective_parameters", "prior_precision", "noise_")


def check_companions(trainer: Trainer, keep: str) -> None:
    """Raise if `keep="best"` would replace the weights of another callback."""
    names = [name for callback in callbacks_of(trainer) if (name := class_name(callback, set(_OF_LAST_WEIGHTS)))]
    if names and keep == "best":
        raise ValueError(
            f"keep='best' would replace the weights that {names[0]} has {_OF_LAST_WEIGHTS[names[0]]} when training "
            "ends: use keep='last'"
        )


def check_monitors(trainer: Trainer, name: str) -> None:
    """Raise an error for a callback that reads one of the logged numbers at validation, when they are still from the
    previous epoch."""
    for callback in callbacks_of(trainer):
        if _monitors(callback, name) and acts_at_validation(trainer, callback):
            argument = "check" if class_name(callback, {"EarlyStopping"}) else "save"
            raise ValueError(
                f"{type(callback).__name__} reads {callback.monitor!r} at validation, but an epoch's evidence is known "
                f"at its end: use {argument}_on_train_epoch_end=True"
            )


def is_monitored(trainer: Trainer, name: str) -> bool:
    """Whether a callback, such as a checkpoint or early stopping, reads one of the numbers logged under `name`."""
    return any(_monitors(callback, name) for callback in callbacks_of(trainer))


def check_length(trainer: Trainer, burn_in_epochs: int, every_n_epochs: int) -> None:
    """Raise if training ends before the first prior is learned."""
    first, epochs = burn_in_epochs or every_n_epochs, trainer.max_epochs or 0
    if first > epochs > 0 and trainer.max_steps <= 0 and not is_dev_run(trainer):
        raise ValueError(
            f"burn_in_epochs={burn_in_epochs} and every_n_epochs={every_n_epochs} learn the first prior after {first} "
            f"epochs, but max_epochs={epochs}: lower them, or train longer"
        )


def _monitors(callback: Any, name: str) -> bool:
    """Whether the callback monitors a number logged under `name`."""
    monitor = getattr(callback, "monitor", None)
    return isinstance(monitor, str) and monitor.startswith(_LOGGED) and monitor.endswith(f"_{name}")


@dataclass(frozen=True)
class Hyperparameters:
    prior_precision: dict[str, float] = field(default_factory=dict)  # δ_l by the layer's name
    noise: float = 1.0  # σ/σ₀, relative to the given likelihood


@dataclass(frozen=True)
class BestEvidence:
    """The largest evidence so far, with its hyperparameters and weights. Numbers and tensors only, for a checkpoint."""

    log_evidence: float
    hyperparameters: Hyperparameters
    # Names of the parameters in the posterior: evidences of different parameters cannot be compared
    parameters: tuple[str, ...]
    weights: dict[str, Tensor]  # parameters and buffers of the module, copied to the CPU

    def state(self) -> dict[str, Any]:
        return {**vars(self), "hyperparameters": asdict(self.hyperparameters)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> BestEvidence:
        return BestEvidence(**{**state, "hyperparameters": Hyperparameters(**state["hyperparameters"])})


Parameters = Mapping[str, nn.Parameter]


class PriorGradient:
    """Adds the prior's gradient to the gradients of the chosen parameters before each optimizer step."""

    def __init__(
        self,
        name: str,
        network_in: Callable[[LightningModule], nn.Module],
        subset: SubsetWord | list[str],
        prior_precision: Any,
        prior: CallbackPrior,
        scale: LossScale,
    ) -> None:
        self._name, self._network_in, self._of = name, network_in, subset
        self._given, self._prior, self.scale = prior_precision, prior, scale
        self._means: dict[str, Tensor] = {}  # the prior mean m of each parameter
        self.subset: Subset | None = None  # parameters that get a prior; None before the first batch of an epoch
        self._x: Any = None  # inputs of the first batch of an epoch
        self._n_targets = 1
        self._of_layers: dict[str, float] = {}  # the user's prior precision of each layer
        self.n_data = 0  # N
        self._said_n_data = False
        self.batches = 0  # the number of batches whose gradients have been accumulated since the last step

    def choose(self, trainer: Trainer, module: LightningModule, x: Any = None) -> Subset | None:
        """The parameters that get a prior; None before lazy layers have parameters."""
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
        self.subset = None  # a schedule may unfreeze layers

    def begin_batch(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        if self.subset is None:
            x, y = split_training_batch(trainer, module, batch)
            self._x = inputs.contained(self._network_in(module), x, y)
            self._n_targets = max(1, sum(t[0].numel() for t in inputs.tensors(y)))
            self.subset = self.choose(trainer, module, self._x)

    def add(self, trainer: Trainer, module: LightningModule, optimizer: Any, learned: Hyperparameters) -> None:
        # Lightning divides the loss by the number of accumulated batches, even if the epoch ends earlier.
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
        """Warn if the pass that learns the prior has a different number of examples than training."""
        if self.n_data and self.n_data != n_data and not self._said_n_data and not is_dev_run(trainer):
            self._said_n_data = True
            warn(
                f"{self._name}: the evidence uses {n_data} examples, but the prior in training assumes "
                f"{self.n_data}: make n_data= and data= agree"
            )

    def _priors(self, subset: Subset, learned: Hyperparameters) -> dict[str, float]:
        """`δ` of each parameter: the learned value, or the given value before any is learned."""
        if self._of_layers.keys() != set(subset.layers):  # numbers, because reading a tensor forces a device sync
            given = as_precision(self._given, subset, torch.empty((), dtype=torch.float64, device="cpu"))
            self._of_layers = dict(zip(subset.layers, given.expand(len(subset.layers)).tolist(), strict=True))
        δ = {**self._of_layers, **learned.prior_precision}
        return {name: δ[layer_of(name)] for name in subset.names}


class LossScale:
    """The scale `c`, measured on the first batch; it is the same on all processes and after a restart."""

    def __init__(self, name: str, likelihood: Likelihood, given: float | None) -> None:
        self._name, self._likelihood, self._given = name, likelihood, given
        self.measured: float | None = None  # None if this process could not measure it
        self.agreed: float | None = None  # None before `agree` has been called

    def agree(self, n_targets: int, module: LightningModule) -> float:
        """The mean of the scale over the processes that could measure it. The first call must be made on all processes
        together."""
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
                warn(
                    f"{self._name}: loss_scale={self._given:.4g} was given, but the loss of the first batch is {c:.4g} "
                    "times the mean negative log-likelihood: the given value is used"
                )
            return self._given
        if c is None:
            c = default_loss_scale(self._likelihood, n_targets)
            tell = inform if automatic else warn  # the loss is never compared under manual optimization, so warn
            tell(
                f"{self._name}: the loss could not be compared with the likelihood: it is taken to be {c:.4g} times "
                "the mean negative log-likelihood; set loss_scale= if it is not"
            )
        usual = {scale / over for scale in self._likelihood.loss_scales for over in (1, n_targets)}
        return next((scale for scale in usual if math.isclose(c, scale, rel_tol=SAME_SCALE)), c)


def check_optimizers(optimizers: Iterable[Any], parameters: Parameters, name: str) -> None:
    """Raise an error for an optimizer with weight decay, which would be a second prior, or with a line search, which
    compares losses that do not contain the prior."""
    names = {p: label for label, p in parameters.items()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            decayed = [names[p] for p in group["params"] if p in names]
            if decayed and group.get("weight_decay", 0):
                raise ValueError(
                    f"{kind} has weight_decay={group['weight_decay']:g} for {format_names(decayed)}, but {name} "
                    "already learns their prior: configure the optimizer with weight_decay=0 (AdamW's default "
                    "is 0.01)"
                )
            if group.get("line_search_fn") is not None:
                raise ValueError(
                    f"{kind} with line_search_fn={group['line_search_fn']!r} compares losses, which do not contain the "
                    f"prior of {name}: leave line_search_fn out, or use another optimizer"
                )


@torch.no_grad()
def add_prior_gradient(
    optimizer: Any,
    parameters: Parameters,
    strengths: Mapping[str, float],
    scale: float = 1.0,
    means: Mapping[str, Tensor] | None = None,
) -> None:
    """Add `scale · strength · (θ − m)` to the optimizer's next gradients, because these gradients are still multiplied
    by `scale`.

    A parameter without a gradient is skipped, as in torch's weight decay. For `SGD` the strength is at most `1/lr`,
    because a step with strength `1/lr` already moves the weights to `m`, and a larger strength would overshoot.
    """
    names = {p: name for name, p in parameters.items()}
    for group in optimizer.param_groups:
        lr = float(group["lr"]) if isinstance(optimizer, torch.optim.SGD) else 0.0
        most = 1 / lr if lr > 0 else math.inf
        for p in group["params"]:
            if p.grad is not None and p in names:
                m = (means or {}).get(names[p])
                p.grad.add_(p if m is None else p - m.to(p), alpha=scale * min(strengths[names[p]], most))
