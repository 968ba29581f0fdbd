"""`PosteriorCallback`: everything that a callback does with a posterior once it has one.

It scores MAP and posterior side by side in `validate` and `test`, answers `predict` with `Prediction`s, and keeps the
posterior in checkpoints and in a file of its own. Subclasses say how the posterior is made.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.arguments import word
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.posterior import GaussianPosterior, LaplacePosterior
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.predictive import Prediction
from lightning_bayes.predictive.held_out import Scoring
from lightning_bayes.predictive.output_law import PREDICTIVES
from lightning_bayes.trainer.arguments import check_save, check_use
from lightning_bayes.trainer.checkpoints import Stored, beside, has_unaveraged_weights, put_posterior, survey
from lightning_bayes.trainer.data import validation_pass
from lightning_bayes.trainer.dry_run import DryRun, check_writable
from lightning_bayes.trainer.files import File, as_file, exists, posterior_file, save_posterior
from lightning_bayes.trainer.held_out_choice import tune_and_calibrate, validation_data
from lightning_bayes.trainer.launched import Mailbox, module_of
from lightning_bayes.trainer.loss_check import LossFit, explain
from lightning_bayes.trainer.module import network_of, refuse_variational
from lightning_bayes.trainer.predict_step import PREDICT_STEPS, PredictStep
from lightning_bayes.trainer.private import is_dev_run, is_launched, load_validation
from lightning_bayes.trainer.scoring import ScoringCallback, scoring_callbacks
from lightning_bayes.trainer.strategy import on_device, run_last


class PosteriorCallback(ScoringCallback):
    """Use a posterior over the weights of any LightningModule."""

    tune: str | None = None
    calibrate: str | None = None

    trains_at_its_weights: ClassVar[bool] = True  # and not at samples around them

    def __init__(
        self,
        name: str,
        likelihood: str | Likelihood,
        predictive: str,
        link: str | None,
        samples: int,
        network: str | None,
        ood: bool,
        plots: bool,
        seed: int,
        predict_step: str = "replace",
        save: bool | str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.likelihood = resolve(likelihood)
        word("predictive", predictive, PREDICTIVES)
        check_use(name, self.likelihood, link, samples, network, ood, plots, seed)
        word("predict_step", predict_step, PREDICT_STEPS)
        check_save(save)
        self.predictive, self.link, self.samples = predictive, link, samples
        self.network, self.ood, self.plots, self.seed = network, ood, plots, seed
        self.save = save
        self._posterior_path: File | None = None
        self._mailbox = Mailbox()
        self._has_trained = False  # in the `fit` that runs
        self._posterior: GaussianPosterior | None = None
        self._stored: dict[str, Any] | None = None  # of a checkpoint, until the module is there
        self._module: LightningModule | None = None
        self.predict_step = predict_step
        self._predict_step: PredictStep | None = None  # while `predict` runs
        self._said_replaced = False
        self._dry_run: DryRun | None = None  # of a running fit

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[{self.name}]"

    @property
    def posterior(self) -> GaussianPosterior:
        """The posterior; before there is one, an error that says how to get it."""
        found = self._find_posterior()
        if found is None:
            raise RuntimeError(self._missing())
        return found

    def _missing(self) -> str:
        return (
            f"{type(self).__name__} {self.name!r} has no posterior yet: run trainer.fit, load a checkpoint that was "
            "written after it, or call fit_now"
        )

    @property
    def posterior_path(self) -> File | None:
        """The posterior's own file, once it has been written."""
        self._receive()
        return self._posterior_path

    def _receive(self) -> None:
        """In the parent of processes that have trained: what they have left."""
        content = self._mailbox.receive()
        if content is not None:
            self._posterior = self._stored = None
            self.load_state_dict(content["state"])
            path = content["posterior_path"]
            self._posterior_path = None if path is None else as_file(path)
            self._module = self._module or module_of(self)

    def _find_posterior(self) -> GaussianPosterior | None:
        """The posterior, on the network (and device) that the callback last saw."""
        self._receive()
        held, state = self._posterior, self._stored
        network = None if self._module is None else unwrap(network_of(self._module, self.network))
        if held is not None:
            if held.network is network and not held.is_elsewhere():
                return held
            state = held.state_dict()
        if network is not None and state is not None:
            self._posterior = GaussianPosterior.from_state_dict(network, state, self.likelihood_if_own())
        return self._posterior

    def likelihood_if_own(self) -> Any:
        """A likelihood of the user's own, which no file can hold."""
        return None if type(self.likelihood).__module__.startswith("lightning_bayes.") else self.likelihood

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._posterior is not None:
            return {"posterior": self._posterior.state_dict()}
        return {"posterior": self._stored}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A checkpoint from the middle of training has none: what the callback holds is of other weights, and says so.
        if state_dict["posterior"] is not None:
            self._posterior, self._stored = None, state_dict["posterior"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit" and has_unaveraged_weights(pl_module, checkpoint):
            rank_zero_warn(
                "the Trainer's weight averaging has loaded the checkpoint's weights from before the average, which its "
                "posterior is of: test the checkpoint with a new Trainer, or without averaging among the callbacks"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what a checkpoint would hold of the posterior."""
        return {**self.__dict__, "_posterior": None, "_stored": self.state_dict().get("posterior")}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._module = pl_module
        run_last(trainer, scoring_callbacks(trainer))
        names = [callback.name for callback in scoring_callbacks(trainer)]
        if names.count(self.name) > 1:
            raise ValueError(f"two callbacks on one Trainer are named {self.name!r}: give each a name= of its own")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_trained = False
        network_of(pl_module, self.network)  # a wrong name is an error before training, not after it
        self._check_module(pl_module)

    def _check_module(self, module: LightningModule) -> None:
        """Raise for a module that the posterior would be meaningless for."""
        problem = f"{type(self).__name__} needs a loss that is the negative log-likelihood alone"
        refuse_variational(module, problem, "train the module without the mixin")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_trained = True
        self._mailbox.clear()
        self._posterior = self._stored = None  # of the weights before this training
        self._begin_dry_run(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed run with nothing left to train never reaches `on_train_end`.
        if not self._has_trained and trainer.train_dataloader is not None:
            load_validation(trainer)
            with on_device(trainer, pl_module):
                self._fit_untrained(trainer, pl_module)
        if is_launched(trainer):
            path = None if self._posterior_path is None else str(self._posterior_path)
            self._mailbox.send(trainer, {"state": self.state_dict(), "posterior_path": path})

    def _fit_untrained(self, trainer: Trainer, module: LightningModule) -> None:
        """After a `fit` without a step: what a checkpoint has not brought."""

    def store(self, trainer: Trainer, checkpoints: list[Stored] | None = None) -> None:
        """Write the posterior's own file, and put it into the checkpoints of its weights; on all processes."""
        if is_dev_run(trainer):
            return
        self._save(trainer, self.posterior)
        self._put_into(trainer, self._survey(trainer) if checkpoints is None else checkpoints)

    def _put_into(self, trainer: Trainer, checkpoints: list[Stored]) -> None:
        for checkpoint in checkpoints:
            if checkpoint.in_memory:
                self._put(trainer, checkpoint, self.posterior)

    def _save(self, trainer: Trainer, posterior: GaussianPosterior) -> None:
        self._posterior_path = posterior_file(trainer, f"{self.name}_posterior.pt", self.save, self._posterior_path)
        if self._posterior_path is not None and trainer.is_global_zero:
            save_posterior(posterior, self._posterior_path)

    def _survey(self, trainer: Trainer) -> list[Stored]:
        return survey(trainer, trainer.lightning_module, self.state_key, self.name)

    def _put(self, trainer: Trainer, checkpoint: Stored, posterior: GaussianPosterior) -> None:
        put_posterior(trainer, checkpoint.path, self.state_key, self.name, self.state_dict(), posterior)

    def _warn_without_posterior(self, trainer: Trainer) -> None:
        self._load_beside(trainer)
        super()._warn_without_posterior(trainer)

    def _load_beside(self, trainer: Trainer) -> None:
        """A checkpoint of weights only has the posterior in a file beside it."""
        path = trainer.ckpt_path and beside(trainer.ckpt_path, self.name)
        if trainer.state.fn != "fit" and path and self._module is not None and exists(path):
            network = unwrap(network_of(self._module, self.network))
            self._posterior = GaussianPosterior.load(path, network, self.likelihood_if_own())

    def _by_grid(
        self, trainer: Trainer | None, module: LightningModule, posterior: LaplacePosterior
    ) -> LaplacePosterior:
        """The prior with the best score of the very predictions that will be made."""
        link = self.link or (None if self.calibrate is None else self.likelihood.calibrated_link)
        options: dict[str, Any] = {"predictive": self.predictive, "link": link, "samples": self.samples}
        return posterior.tune_prior("grid", validation_pass(trainer, module), seed=self.seed, **options)

    def _held_out_choice(
        self, trainer: Trainer | None, module: LightningModule, posterior: LaplacePosterior, of: str = ""
    ) -> LaplacePosterior:
        """Tuned, if by "auto", and calibrated, if at all, on validation data. What came of it is said and, unless it is
        `of` other weights than those in memory, logged."""
        if self.tune != "auto" and self.calibrate is None:
            return posterior
        place = None if self.calibrate is None else "outputs" if self.calibrate == "outputs" else "probs"
        scoring = Scoring(self.predictive, self.link, self.samples, self.seed, place)
        tune = None if self.predictive == "map" else self.tune  # the plain network has no prior
        data = partial(validation_data, trainer, module)
        posterior, scores = tune_and_calibrate(posterior, data, scoring, tune, self.calibrate)
        if scores is not None:
            scores.say(self.name, of)
            if not of:
                self._log(trainer, scores.numbers(self.name))
        return posterior

    def _log(self, trainer: Trainer | None, numbers: dict[str, float]) -> None:
        if trainer is not None and not is_dev_run(trainer):
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
                logger.save()

    def report(self, trainer: Trainer | None, what: str, numbers: dict[str, float]) -> None:
        """Say and log what was fitted."""
        text = ", ".join(f"{key} {value:.6g}" for key, value in numbers.items())
        rank_zero_info(f"{self.name}: {what}; {text}")
        self._log(trainer, {f"{key}_{self.name}": v for key, v in numbers.items()})

    # -- the dry run on the first batch ----------------------------------------------------------------------------

    @property
    def needs_targets(self) -> bool:
        """Whether the fit asks the module for the targets of a batch."""
        return True

    def try_fit(self, network: nn.Module, x: Any, y: Tensor) -> None:
        """Fit a posterior to one or two examples, for the errors that this may raise."""

    def align_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """The targets in the shape that the fit compares with outputs `f`."""
        return y

    def judge_loss(self, fit: LossFit, outputs: Tensor | None) -> None:
        """Warn of a loss that is not the likelihood's."""
        if not fit.fits:
            kind = type(self.likelihood).__name__
            rank_zero_warn(
                f"{self.name}: the loss of the training step, {fit.loss:.6g} for the first batch, does not depend on "
                f"the network's outputs as the negative log-likelihood of {kind} does, whose mean is {fit.nll:.6g}. "
                f"The posterior assumes this likelihood; {explain(self.likelihood, outputs)}"
            )

    def _begin_dry_run(self, trainer: Trainer) -> None:
        self._dry_run = DryRun(self)
        if is_dev_run(trainer):
            return
        path = posterior_file(trainer, f"{self.name}_posterior.pt", self.save, self._posterior_path)
        if isinstance(path, Path) and trainer.is_global_zero:
            check_writable(path.parent)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._dry_run is not None:
            self._dry_run.begin(trainer, pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._dry_run is None:
            return
        fit, outputs = self._dry_run.compare(trainer, pl_module, loss), self._dry_run.outputs
        self._end_dry_run()
        if fit is not None:
            self.judge_loss(fit, outputs)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_dry_run()

    def _end_dry_run(self) -> None:
        if self._dry_run is not None:
            self._dry_run.stop()
            self._dry_run = None

    # -- predict ---------------------------------------------------------------------------------------------------

    def predict(self, x: Any) -> Prediction:
        """The posterior's prediction in this callback's words; the same weight samples for every batch."""
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        # Mixed precision is for the network, not for integrals over its outputs; and what was computed in Lightning's
        # inference mode could never again be used with gradients.
        with torch.inference_mode(False), torch.autocast(self.posterior.device.type, enabled=False):
            return self.posterior.predict(x, self.predictive, self.link, self.samples, generator)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._load_beside(trainer)
        callbacks = [callback for callback in scoring_callbacks(trainer) if callback.predict_step != "keep"]
        if not callbacks or callbacks[0] is not self:
            return
        self._predict_step = PredictStep(pl_module, callbacks)
        if self._predict_step.replaces_own and not self._said_replaced:
            self._said_replaced = True
            rank_zero_info(
                f"{self.name}: predict returns the posterior's predictions instead of "
                f"{type(pl_module).__name__}.predict_step (predict_step='both' returns its output too, 'keep' it alone)"
            )
        self._predict_step.install()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back_predict_step()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back_predict_step()
        self._end_dry_run()

    def _give_back_predict_step(self) -> None:
        if self._predict_step is not None:
            self._predict_step.remove()
            self._predict_step = None


def is_of_weights(posterior: GaussianPosterior) -> bool:
    """Whether the network still has the weights that the posterior was fitted to."""
    try:
        posterior.check_weights()
    except PosteriorError:
        return False
    return True


def describe(posterior: LaplacePosterior) -> dict[str, float]:
    """The numbers that a Laplace posterior is known by."""
    numbers = {}
    if posterior.curvature.knows_likelihood:
        numbers["log_evidence"] = float(posterior.log_marginal_likelihood())
    numbers["effective_parameters"] = float(posterior.effective_parameters)
    prior, layers = posterior.prior_precision, posterior.subset.layers
    if prior.ndim == 0:
        numbers["prior_precision"] = float(prior)
    elif len(layers) == len(prior):
        named = zip(layers, prior.tolist(), strict=True)
        numbers.update({f"prior_precision/{layer}": value for layer, value in named})
    noise = getattr(posterior.likelihood, "noise_std", None)
    if noise is not None and getattr(noise, "ndim", 0) == 0:
        numbers["noise_std"] = float(noise)
    return numbers
