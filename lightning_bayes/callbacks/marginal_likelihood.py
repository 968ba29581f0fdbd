"""`MarginalLikelihoodCallback`: learn the prior of each layer, and a regression's noise, while the network trains, from
the training data alone (Immer et al. 2021; tutorial, section 4). The weights maximise

    Σₙ log p(yₙ | f(xₙ; θ)) − ½ Σ_l δ_l ‖θ_l‖²,

whose second term is added to the gradients of the user's loss (see `prior_gradient`). Every `F` epochs after `B` epochs
of burn-in one exact pass gives the curvature at the weights of the moment, and its evidence

    log p(D | δ, σ) ≈ log p(D, θ | δ, σ) − ½ log det P(δ, σ)

is climbed in log δ and log σ by Adam, or by MacKay's fixed point. The weights and priors of the largest evidence are
kept, and are those of the posterior.

What learning by the marginal likelihood asks of a Trainer, before training: callbacks that it can work beside,
monitors that see its numbers, and time enough to learn a prior.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bayes.arguments import count, flag, format_value, positive, word
from lightning_bayes.callbacks.hyperparameters import BestEvidence, Hyperparameters, LossScale, PriorGradient
from lightning_bayes.callbacks.laplace import LaplaceCallback
from lightning_bayes.curvature.low_rank import WORD as LOW_RANK
from lightning_bayes.evidence.prior_groups import PriorGroups
from lightning_bayes.evidence.tuning import ascend, fixed_point
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import LaplacePosterior, PosteriorError, Subnetwork
from lightning_bayes.trainer.checkpoints import callback_state
from lightning_bayes.trainer.data import count_examples
from lightning_bayes.trainer.loss_check import LossFit
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.private import acts_at_validation, callbacks_of, class_name, is_dev_run
from lightning_bayes.trainer.report import describe

EVIDENCES = {"marglik": "weights", "linear": "optimum"}  # where each is taken
MODES = ("gradient", "mackay")
_DETERMINED = 0.9  # γ/d above which a network may be too small


class MarginalLikelihoodCallback(LaplaceCallback):
    """Learn the strength of regularisation from the training data, and end with the posterior that belongs to it.

    The module stays as it is: its loss is compared with the likelihood on the first batch, and the prior is added to
    the gradients at the loss's own scale. Its optimizer must have no weight decay.

    Args:
        likelihood: "classification", "binary" or "regression" (or a `Likelihood`, whose noise is the first one).
        network: the submodule that maps x to f; by default the module's own `forward`.
        output: the key, attribute or index of f in what the network returns; by default a tensor, or its `logits`.
        class_dim: the dimension of f that counts classes; by default the shape of the targets says which it is.

        structure: "kron", "ekfac" (a second pass), "diag" or "full".
        subset: "all", "last_layer", or a list of parameter or module names; other weights get no prior.
        prior_precision: to begin with: a number, or one per layer.
        prior_mean: the weights that the prior is around, by default zero; see `LaplaceCallback`.
        noise: whether to learn a regression's noise, too.

        every_n_epochs: `F`, between two passes over the training data.
        burn_in_epochs: `B`, before the first.
        steps: on the evidence after each pass, at most.
        lr: of these steps, in log δ and log σ.
        mode: "gradient" steps by Adam, or "mackay", his fixed point.
        evidence: that chooses the priors: "marglik", at the weights of the moment, or "linear", at the optimum of the
            linearised network.
        keep: at the end of training the weights and priors with the "best" evidence (at the weights), or the "last".

        loss_scale: the `c` of a loss that is `c` times the mean negative log-likelihood. By default that of the first
            batch.
        n_data: examples in the training data; None counts them.

        calibrate: "auto" finds one number on the first validation dataloader, if there is one, by which predictions are
            corrected; "outputs" is a temperature of the network's outputs instead; None finds none.
        predictive: "glm", "bnn" or "map".
        link: "probit", "pairwise", "bridge" or "mc"; by default that of the calibration, or the likelihood's first.
        samples: drawn where a prediction draws.
        predict_step: "replace" the module's own in `trainer.predict`, "keep" it, or return "both".

        name: suffix of the logged numbers, and key among several callbacks; `log_evidence_<name>` can be monitored.
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write a reliability diagram (of a regression, its calibration curve) to the logger, or as a PNG file.
        save: where the posterior's own file goes: a file, a folder, True, False, or None, which writes it unless both
            logger and checkpoints are off and it would go into the working directory.

        data: what the passes go over instead of the training data, for instance the same examples without
            augmentation: a DataLoader, or the name of a method or attribute of the data module or module.
        curvature: "auto", "ggn", "fisher_mc" or "empirical_fisher"; see `fit_laplace`.
        mc_samples: labels drawn per example for "fisher_mc".
        hessian: "exact", or "approx", "mixed" or "auto" for a fast `structure="diag"`; see `fit_laplace`.
        weight_sharing: "expand" or "reduce"; see `fit_laplace`.
        seed: of everything that is drawn.
        progress: show a progress bar during each pass.
    """

    turn = 1  # after an average of the weights, and before posteriors of those that training ends with

    fits_shards: ClassVar[bool] = False  # the prior acts on the gradients of weights that every process holds

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        network: str | None = None,
        output: str | int | None = None,
        class_dim: int | None = None,
        structure: str = "kron",
        subset: str | list[str] = "all",
        prior_precision: float | list[float] = 1.0,
        prior_mean: Any = None,
        noise: bool = True,
        every_n_epochs: int = 1,
        burn_in_epochs: int = 0,
        steps: int = 10,
        lr: float = 0.1,
        mode: str = "gradient",
        evidence: str = "marglik",
        keep: str = "best",
        loss_scale: float | None = None,
        n_data: int | None = None,
        calibrate: str | None = "auto",
        predictive: str = "glm",
        link: str | None = None,
        samples: int = 100,
        predict_step: str = "replace",
        name: str = "marglik",
        ood: bool = False,
        plots: bool = False,
        save: bool | str | None = None,
        data: Any = None,
        curvature: str = "auto",
        mc_samples: int = 1,
        hessian: str = "exact",
        weight_sharing: str = "expand",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        if isinstance(subset, Subnetwork):
            raise ValueError(
                f"subset must name whole layers or parameters, to have a prior in training, got {format_value(subset)}"
            )
        if structure == LOW_RANK:
            raise ValueError(
                "structure='lowrank' leaves curvature out, so that its evidence is too high to learn a prior from: use "
                "'kron', 'ekfac', 'diag' or 'full'"
            )
        super().__init__(
            likelihood, network=network, output=output, class_dim=class_dim,
            structure=structure, subset=subset, prior_precision=prior_precision, prior_mean=prior_mean,
            tune=None, calibrate=calibrate, predictive=predictive, link=link, samples=samples,
            predict_step=predict_step, name=name, ood=ood, plots=plots, save=save, data=data, curvature=curvature,
            mc_samples=mc_samples, hessian=hessian, weight_sharing=weight_sharing, seed=seed, progress=progress,
        )  # fmt: skip
        self.noise = flag("noise", noise)
        self.every_n_epochs, self.burn_in_epochs = count("every_n_epochs", every_n_epochs), burn_in_epochs
        count("burn_in_epochs", burn_in_epochs, least=0)
        self.steps, self.lr = count("steps", steps), positive("lr", lr)
        self.mode, self.evidence = word("mode", mode, MODES), word("evidence", evidence, tuple(EVIDENCES))
        self.keep = word("keep", keep, ("best", "last"))
        if mode == "mackay" and evidence == "linear":
            raise ValueError("mode='mackay' is the fixed point of evidence='marglik': use mode='gradient' for 'linear'")
        self.loss_scale = None if loss_scale is None else positive("loss_scale", loss_scale)
        self.n_data = None if n_data is None else count("n_data", n_data)
        self._forget()

    def _forget(self) -> None:
        """What belongs to one training."""
        self._hyperparameters = Hyperparameters()
        self._best: BestEvidence | None = None
        self._numbers: dict[str, float] = {}  # of the last pass, as they are logged
        self._refitted = 0  # epochs of training when it was made
        self._resumed = False
        scale = LossScale(self.name, self.likelihood, self.loss_scale)
        prior = self.prior_precision, self._given
        self._gradient = PriorGradient(self.name, self.network_in, self.subset, *prior, scale)

    # -- the posterior -----------------------------------------------------------------------------------------------

    def _words(self) -> dict[str, Any]:
        σ, ρ = self.likelihood.tunable_noise, self._hyperparameters.noise
        likelihood = self.likelihood if σ is None or ρ == 1 else self.likelihood.with_noise(σ * ρ)
        return {**super()._words(), "likelihood": likelihood}

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
        """A checkpoint of an epoch's last batch comes before that epoch's refit."""
        if self._resumed:
            self._learn(trainer, module, trainer.current_epoch)

    def _learn(self, trainer: Trainer, module: LightningModule, epochs: int) -> bool:
        """After so many epochs, the refit that is due; whether there was one."""
        after = epochs - self.burn_in_epochs
        due = (after >= 0 and after % self.every_n_epochs == 0) or is_dev_run(trainer)
        if not due or self._refitted >= epochs:  # a run that is resumed may come here twice
            return False
        self._refit(trainer, module, tune=True)
        self._refitted = epochs
        return True

    def _refit(self, trainer: Trainer, module: LightningModule, tune: bool) -> None:
        """One pass over the data and, to `tune`, steps on its evidence."""
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
        if self.evidence == "linear":
            numbers["linear_evidence"] = float(posterior.log_marginal_likelihood(at="optimum"))
        if self.mode == "mackay" and "noise_std" in numbers:
            numbers["noise_precision"] = numbers["noise_std"] ** -2
        self._numbers = {f"{key}_{self.name}": value for key, value in numbers.items()}
        is_best = tune and self.keep == "best" and math.isfinite(evidence)
        is_best = is_best and (self._best is None or evidence > self._best.log_evidence)
        if trainer.strategy.broadcast(is_best):
            self._best = BestEvidence.of(module, evidence, self._hyperparameters, posterior.subset.names)

    def _forget_other_best(self, parameters: tuple[str, ...]) -> None:
        """The evidence of another subset, before layers were thawed, is that of another model."""
        if self._best is not None and self._best.parameters != parameters:
            self._best = None
            rank_zero_info(f"{self.name}: other weights are trained than before: their best evidence is sought anew")

    def _climb(self, trainer: Trainer, posterior: LaplacePosterior) -> LaplacePosterior:
        if self.mode == "gradient":
            tuned = ascend(posterior, self.steps, self.lr, EVIDENCES[self.evidence], self.noise)
        else:
            groups = PriorGroups.of(posterior, per_layer=True, prior_groups=None)
            tuned, _ = fixed_point(posterior, groups, self.noise, self.steps, tolerance=1e-4)
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
            self._forget()  # what a checkpoint holds comes after this

    def _check_module(self, module: LightningModule) -> None:
        PosteriorCallback._check_module(self, module)  # its log σ would get a prior, too

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        check_companions(trainer, self.keep)
        check_monitors(trainer, self.name)
        if not self._refitted:
            check_length(trainer, self.burn_in_epochs, self.every_n_epochs)
        if self.subset != "last_layer":  # which is known at the first batch
            self._gradient.choose(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._gradient.n_data = self.n_data or count_examples(trainer)
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
        if self._best is not None and self.keep == "best":
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
    """One number that is proportional to `σ`; 1 where there is none to learn."""
    σ = posterior.likelihood.tunable_noise
    return 1.0 if σ is None else float(torch.as_tensor(σ).reshape(-1)[0])


_OF_LAST_WEIGHTS = {  # what a callback does in training with the weights that training ends with
    "WeightAveraging": "averaged",
    "StochasticWeightAveraging": "averaged",
    "SWAGCallback": "averaged",
    "L2MCallback": "followed",
    "OnlineLaplaceCallback": "followed",
}
_LOGGED = ("log_evidence", "linear_evidence", "effective_parameters", "prior_precision", "noise_")


def check_companions(trainer: Trainer, keep: str) -> None:
    """One prior, and with `keep="best"` no callback whose own weights would be replaced."""
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
    """Refuse a monitor that is read at validation, when the numbers are still those of an epoch before."""
    for callback in callbacks_of(trainer):
        if _monitors(callback, name) and acts_at_validation(trainer, callback):
            argument = "check" if class_name(callback, {"EarlyStopping"}) else "save"
            raise ValueError(
                f"{type(callback).__name__} reads {callback.monitor!r} at validation, but an epoch's evidence is known "
                f"at its end: use {argument}_on_train_epoch_end=True"
            )


def is_monitored(trainer: Trainer, name: str) -> bool:
    """Whether a callback, as Lightning's for checkpoints and early stopping, asks for a number at every epoch."""
    return any(_monitors(callback, name) for callback in callbacks_of(trainer))


def check_length(trainer: Trainer, burn_in_epochs: int, every_n_epochs: int) -> None:
    """Refuse a training that is known to end before the first prior is learned."""
    first, epochs = burn_in_epochs or every_n_epochs, trainer.max_epochs or 0
    if first > epochs > 0 and trainer.max_steps <= 0 and not is_dev_run(trainer):
        raise ValueError(
            f"burn_in_epochs={burn_in_epochs} and every_n_epochs={every_n_epochs} learn the first prior after {first} "
            f"epochs, but max_epochs={epochs}: lower them, or train longer"
        )


def _monitors(callback: Any, name: str) -> bool:
    """Whether it asks for a number that is logged under `name`."""
    monitor = getattr(callback, "monitor", None)
    return isinstance(monitor, str) and monitor.startswith(_LOGGED) and monitor.endswith(f"_{name}")
