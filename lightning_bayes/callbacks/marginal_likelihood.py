"""`MarginalLikelihoodCallback`: learn the prior of each layer, and a regression's noise, while the network trains, from
the training data alone (Immer et al. 2021; tutorial, section 4). The weights maximise

    Σₙ log p(yₙ | f(xₙ; θ)) − ½ Σ_l δ_l ‖θ_l‖².

The callback adds the gradient of the second term to that of the user's loss (see `hyperparameters`). Every `F` epochs
after `B` epochs of burn-in, one exact pass gives the curvature at the current weights, and its evidence

    log p(D | δ, σ) ≈ log p(D, θ | δ, σ) − ½ log det P(δ, σ)

is climbed in log δ and log σ by Adam, or by MacKay's fixed point. The posterior belongs to the weights and priors with
the largest evidence.

Before training, the callback checks that it can work beside the Trainer's other callbacks, that monitors see its
numbers, and that training is long enough to learn a prior.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bayes.arguments import count, format_value
from lightning_bayes.callbacks.hyperparameters import BestEvidence, Hyperparameters, LossScale, PriorGradient
from lightning_bayes.callbacks.laplace import LaplaceCallback
from lightning_bayes.evidence.prior_groups import PriorGroups
from lightning_bayes.evidence.tuning import ascend, fixed_point
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.options.structure import FisherMC, StructureOption
from lightning_bayes.options.tuning import Learning, learning_option
from lightning_bayes.posterior import LaplacePosterior, PosteriorError, Subnetwork
from lightning_bayes.trainer.checkpoints import callback_state
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.loss_check import LossFit
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.private import acts_at_validation, callbacks_of, class_name, is_dev_run
from lightning_bayes.trainer.report import describe

_DETERMINED = 0.9  # γ/d above which a network may be too small


class MarginalLikelihoodCallback(LaplaceCallback):
    """Learn the strength of regularisation from the training data, and end with the posterior that belongs to it.

    The module does not change: its loss is compared with the likelihood on the first batch, and the prior is added to
    the gradients at the scale of the loss. Its optimizer must have no weight decay.

    Args:
        likelihood: "classification", "binary" or "regression", or a `Likelihood`, whose noise is the initial one.

        evidence: "marglik" or "mackay", at the current weights, "linear", at the optimum of the linearised network, or
            `Learning(method, steps, lr, noise, keep, …)`.
        every_n_epochs: `F`, epochs between two passes over the training data.
        burn_in_epochs: `B`, epochs before the first pass.

        structure: "kron", "ekfac" (a second pass), "diag" or "full", or an option such as `Kron(rank="auto")`.
        subset: "all", "last_layer", or a list of parameter or module names; other weights get no prior.
        curvature: as in `LaplaceCallback`.
        prior_precision: the initial one: a number, or one per layer.
        prior: `Prior(mean=…, temperature=…)`.
        data: as in `LaplaceCallback`.
        name: suffix of the logged numbers; `log_evidence_<name>` can be monitored.
        use: network, predictive, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    priority = 1  # after an average of the weights, and before posteriors of the final weights
    keeps_points: ClassVar[bool] = False
    fits_shards: ClassVar[bool] = False  # the prior acts on the gradients of weights that every process holds

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        evidence: str | Learning = "marglik",
        every_n_epochs: int = 1,
        burn_in_epochs: int = 0,
        structure: str | StructureOption = "kron",
        subset: str | list[str] = "all",
        curvature: str | FisherMC = "auto",
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
                f"subset must name whole layers or parameters, to have a prior in training, got {format_value(subset)}"
            )
        if self.structure.is_truncated:
            raise ValueError(
                "structure='lowrank' leaves curvature out, so its evidence is too high to learn a prior from: use "
                "'kron', 'ekfac', 'diag' or 'full'"
            )
        if self.options.prior.posterior is not None:
            raise ValueError("prior= is a posterior, whose strength cannot be learned by layer: use Prior(mean=…)")
        self.learning = learning_option(evidence)
        self.every_n_epochs = count("every_n_epochs", every_n_epochs)
        self.burn_in_epochs = count("burn_in_epochs", burn_in_epochs, least=0)
        self._forget()

    def _forget(self) -> None:
        """Reset what belongs to one training."""
        self._hyperparameters = Hyperparameters()
        self._best: BestEvidence | None = None
        self._numbers: dict[str, float] = {}  # of the last pass, as they are logged
        self._refitted = 0  # epochs of training when it was made
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
        """Do the refit that a checkpoint of an epoch's last batch was written before."""
        if self._resumed:
            self._learn(trainer, module, trainer.current_epoch)

    def _learn(self, trainer: Trainer, module: LightningModule, epochs: int) -> bool:
        """Refit if a refit is due after this many epochs, and return whether it was."""
        after = epochs - self.burn_in_epochs
        due = (after >= 0 and after % self.every_n_epochs == 0) or is_dev_run(trainer)
        if not due or self._refitted >= epochs:  # a resumed run may come here twice
            return False
        self._refit(trainer, module, tune=True)
        self._refitted = epochs
        return True

    def _refit(self, trainer: Trainer, module: LightningModule, tune: bool) -> None:
        """Make a pass over the data and, if `tune`, climb its evidence."""
        posterior = self._pass(trainer, module, self._data.loader(trainer, module))
        self._gradient.compare_n_data(trainer, posterior.n_data)
        self._forget_other_best(posterior.subset.names)
        if not math.isfinite(posterior.log_marginal_likelihood()):
            raise PosteriorError(
                f"{self.name}: the evidence is not finite: training has diverged; lower the learning rate"
            )
        if tune:
            posterior = self._climb(trainer, posterior)
        numbers = describe(posterior, by_evidence=True)
        evidence = numbers["log_evidence"]  # at the weights, with which the network itself predicts
        if self.learning.method == "linear":
            numbers["linear_evidence"] = float(posterior.log_marginal_likelihood(at="optimum"))
        if self.learning.method == "mackay" and "noise_std" in numbers:
            numbers["noise_precision"] = numbers["noise_std"] ** -2
        self._numbers = {f"{key}_{self.name}": value for key, value in numbers.items()}
        is_best = tune and self.learning.keep == "best" and math.isfinite(evidence)
        is_best = is_best and (self._best is None or evidence > self._best.log_evidence)
        if trainer.strategy.broadcast(is_best):
            self._best = BestEvidence.of(module, evidence, self._hyperparameters, posterior.subset.names)

    def _forget_other_best(self, parameters: tuple[str, ...]) -> None:
        """The evidence of another subset, before layers were thawed, belongs to another model."""
        if self._best is not None and self._best.parameters != parameters:
            self._best = None
            rank_zero_info(f"{self.name}: other weights train now, so the search for the best evidence starts again")

    def _climb(self, trainer: Trainer, posterior: LaplacePosterior) -> LaplacePosterior:
        learning = self.learning
        if learning.method == "mackay":
            groups = PriorGroups.of(posterior, "layers")
            tuned, _ = fixed_point(posterior, groups, learning.noise, learning.steps, tolerance=1e-4)
        else:
            at = "optimum" if learning.method == "linear" else "weights"
            tuned = ascend(posterior, learning.steps, learning.lr, at, learning.noise)
        δ, before = tuned.prior_precision.reshape(-1).tolist(), self._hyperparameters
        δ, ρ = trainer.strategy.broadcast((δ, _noise_of(tuned) / _noise_of(posterior)))  # the same to the last bit
        learned = dict(zip(posterior.subset.layers, δ, strict=True))
        self._hyperparameters = Hyperparameters({**before.prior_precision, **learned}, before.noise * ρ)
        return tuned

    def _report(self, trainer: Trainer | None, posterior: LaplacePosterior, of: str = "") -> None:
        self._by_evidence = True
        super()._report(trainer, posterior, of)
        γ, d = float(posterior.effective_parameters), posterior.subset.size
        if γ > _DETERMINED * d and not of:
            rank_zero_info(
                f"{self.name}: the data determine {γ:.4g} of {d} weights, nearly all: a larger network may learn more "
                "from them"
            )

    # -- before training ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._forget()  # a checkpoint is loaded after this

    def _check_module(self, module: LightningModule) -> None:
        PosteriorCallback._check_module(self, module)  # its log σ would get a prior, too

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        check_companions(trainer, self.learning.keep)
        check_monitors(trainer, self.name)
        if not self._refitted:
            check_length(trainer, self.burn_in_epochs, self.every_n_epochs)
        if self.subset != "last_layer":  # known at the first batch
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
            self._best.restore(module)
            self._hyperparameters = self._best.hyperparameters
        if not only_missing and not self._refitted:
            rank_zero_warn(
                f"{self.name}: training has ended before the prior was learned: lower burn_in_epochs="
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


_OF_LAST_WEIGHTS = {  # what these callbacks do with the weights that training ends with
    "WeightAveraging": "averaged",
    "StochasticWeightAveraging": "averaged",
    "SWAGCallback": "averaged",
    "L2MCallback": "followed",
    "OnlineLaplaceCallback": "followed",
}
_LOGGED = ("log_evidence", "linear_evidence", "effective_parameters", "prior_precision", "noise_")


def check_companions(trainer: Trainer, keep: str) -> None:
    """Raise for a second prior, and if `keep="best"` would replace the weights of another callback."""
    callbacks = callbacks_of(trainer)
    if sum(class_name(callback, {"MarginalLikelihoodCallback"}) is not None for callback in callbacks) > 1:
        raise ValueError("a network has one prior: give the Trainer one MarginalLikelihoodCallback")
    names = [name for callback in callbacks if (name := class_name(callback, set(_OF_LAST_WEIGHTS)))]
    if names and keep == "best":
        raise ValueError(
            f"keep='best' would replace the weights that {names[0]} has {_OF_LAST_WEIGHTS[names[0]]} when training "
            "ends: use keep='last'"
        )


def check_monitors(trainer: Trainer, name: str) -> None:
    """Raise for a monitor that is read at validation, when the numbers are still those of the epoch before."""
    for callback in callbacks_of(trainer):
        if _monitors(callback, name) and acts_at_validation(trainer, callback):
            argument = "check" if class_name(callback, {"EarlyStopping"}) else "save"
            raise ValueError(
                f"{type(callback).__name__} reads {callback.monitor!r} at validation, but an epoch's evidence is known "
                f"at its end: use {argument}_on_train_epoch_end=True"
            )


def is_monitored(trainer: Trainer, name: str) -> bool:
    """Whether a callback, such as a checkpoint or early stopping, reads one of the numbers at every epoch."""
    return any(_monitors(callback, name) for callback in callbacks_of(trainer))


def check_length(trainer: Trainer, burn_in_epochs: int, every_n_epochs: int) -> None:
    """Raise for a training that ends before the first prior is learned."""
    first, epochs = burn_in_epochs or every_n_epochs, trainer.max_epochs or 0
    if first > epochs > 0 and trainer.max_steps <= 0 and not is_dev_run(trainer):
        raise ValueError(
            f"burn_in_epochs={burn_in_epochs} and every_n_epochs={every_n_epochs} learn the first prior after {first} "
            f"epochs, but max_epochs={epochs}: lower them, or train longer"
        )


def _monitors(callback: Any, name: str) -> bool:
    """Whether it reads a number that is logged under `name`."""
    monitor = getattr(callback, "monitor", None)
    return isinstance(monitor, str) and monitor.startswith(_LOGGED) and monitor.endswith(f"_{name}")
