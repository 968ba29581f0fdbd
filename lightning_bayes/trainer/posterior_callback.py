"""`PosteriorCallback`: everything that a callback does with a posterior once it has one.

It scores MAP and the posterior side by side in `validate` and `test`, returns `Prediction`s from `predict`, and stores
the posterior in checkpoints and in a separate file. Subclasses define how the posterior is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.curvature.fit import read_by_targets
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.borrowed import generator_on
from lightning_bayes.network.messages import warn
from lightning_bayes.network.output import Output, output_of, unwrap_output, wrap_output
from lightning_bayes.network.private import uncompiled
from lightning_bayes.network.processes import is_sharded
from lightning_bayes.options.callback import PredictStepWord, UseOptions
from lightning_bayes.options.fit import Network, Prior, network_option
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord, predictive_option
from lightning_bayes.options.tuning import CalibrateWord
from lightning_bayes.plots.figure import require_matplotlib
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.files import read, read_any
from lightning_bayes.posterior.prior import GaussianPrior
from lightning_bayes.predictive import Prediction
from lightning_bayes.predictive.draws import SharedDraws
from lightning_bayes.predictive.dropout import dropout_layers
from lightning_bayes.predictive.evaluate import Predict
from lightning_bayes.trainer.checkpoints import (
    CheckpointInfo,
    File,
    PosteriorFile,
    SpawnResultFile,
    as_file,
    exists,
    is_of_weights,
    is_unaveraged,
    list_checkpoints,
    put_posterior,
    sidecar_path,
)
from lightning_bayes.trainer.dry_run import DryRun, LossFit, explain
from lightning_bayes.trainer.module import PredictStep, check_module, network_of, refuse_variational
from lightning_bayes.trainer.private import (
    callbacks_of,
    class_name,
    forward_context,
    is_default_predict_step,
    is_dev_run,
    is_launched,
    load_validation,
    module_of_callback,
    set_callbacks,
)
from lightning_bayes.trainer.report import TrainerScores, score_module, shows_bars

_UNAVERAGED = (
    "the Trainer's weight averaging has loaded the weights from before the average, but the checkpoint's posterior "
    "belongs to the average: use a new Trainer"
)


def _option(field: str) -> Any:
    return property(lambda callback: getattr(callback.use, field))


class PosteriorCallback(Callback):
    """The base of all callbacks: what they share once they have a posterior over the weights of a LightningModule.

    Every callback takes these arguments. They can all be plain words and numbers, as in a configuration file.

    Args:
        likelihood: "classification", "binary" or "regression", or a `Likelihood`.
        network: the name of the submodule that maps x to f, by default the module's own `forward`; or
            `Network(name, output, class_dim)`.
        predictive: "glm", "bnn", "dropout" or "map", or an option such as `GLM(link="probit", samples=100)`.
            `LaplaceCallback` also takes "gp" and `GP(points=…)`.
        calibrate: "auto" corrects predictions on the first validation dataloader, if there is one: by a temperature of
            the probabilities ("probs"), or by a factor on a regression's variance and the degrees of freedom of its
            tails. "outputs" fits a temperature for the network's outputs instead. None disables calibration.

        name: suffix of the logged numbers; each callback of a Trainer needs a different name.
        ood: whether dataloaders after the first have out-of-distribution data.
        plots: write a reliability diagram (for a regression, a calibration curve) to the logger, or as a PNG file.
        save: where to write the posterior's own file: a file, a folder, True, False, or None. With None the file is
            written, unless logger and checkpoints are both off and the file would go into the working directory.
        predict_step: "replace" the module's own `predict_step` in `trainer.predict`, "keep" it, or return the results
            of "both".

        seed: the seed of all random draws.
        progress: show progress bars.
    """

    name: str = _option("name")
    predictive: PredictiveOption = _option("predictive")
    network: Network = _option("network")
    calibrate: CalibrateWord | None = _option("calibrate")
    ood: bool = _option("ood")
    plots: bool = _option("plots")
    save: bool | str | None = _option("save")
    predict_step: PredictStepWord = _option("predict_step")
    seed: int = _option("seed")
    progress: bool = _option("progress")

    trains_at_its_weights: ClassVar[bool] = True  # False if the training step runs at samples around the weights
    keeps_points: ClassVar[bool] = False  # whether the posterior stores training points, for predictive="gp"
    priority: ClassVar[int] = 2  # callbacks with a lower number run first, whatever their order on the Trainer
    # Error-message text: why a Trainer can have only one of these callbacks; empty if it can have several
    why_one: ClassVar[str] = ""
    # Error-message text: which weights this callback supports, and what the user should do; empty if it supports all
    only_weights: ClassVar[str] = ""

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        network: str | Network | None = None,
        predictive: PredictiveWord | PredictiveOption = "glm",
        calibrate: CalibrateWord | None = "auto",
        name: str = "posterior",
        ood: bool = False,
        plots: bool = False,
        save: bool | str | None = None,
        predict_step: PredictStepWord = "replace",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        super().__init__()
        self.likelihood = resolve(likelihood)
        self.use = use = UseOptions(
            name=name, predictive=predictive_option(predictive), network=network_option(network), calibrate=calibrate,
            ood=ood, plots=plots, save=save, predict_step=predict_step, seed=seed, progress=progress,
        )  # fmt: skip
        self.likelihood.choose_link(use.predictive.link)  # raises an error for an unknown link
        if use.predictive.kind == "gp" and not self.keeps_points:
            raise ValueError(f"{type(self).__name__} keeps no training points for predictive='gp': use LaplaceCallback")
        if plots:
            require_matplotlib()
        self._module: LightningModule | None = None  # the module of the last run or fit
        self._read_as = Output(use.network.output, use.network.class_dim)  # completed by the first batch
        self._posterior: GaussianPosterior | None = None
        self._stored: dict[str, Any] | None = None  # the state from a checkpoint, until the module is known
        self._file = PosteriorFile(use.name, use.save)
        self._spawn_result = SpawnResultFile()
        self._has_trained = False  # whether the current `fit` has trained at all
        self._dry_run: DryRun | None = None  # None after the first step
        self._scores: TrainerScores | None = None  # set during `validate` and `test`
        self._predict_step: PredictStep | None = None  # set during `predict`
        self._draws: SharedDraws | None = None  # set during `validate`, `test` and `predict`
        self._said_replaced = False
        self._is_unaveraged = False  # whether the checkpoint's posterior belongs to other weights than the module's
        self._checkpoint: Any = None  # the checkpoint of the current `validate`, `test` or `predict`

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[{self.name}]"

    # -- the posterior -------------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> GaussianPosterior:
        """The posterior. Without one, raises an error that says how to get it."""
        posterior = self._find_posterior()
        if posterior is None:
            raise RuntimeError(self._missing())
        return posterior

    @property
    def posterior_path(self) -> File | None:
        """The posterior's file, once it has been written."""
        self._read_spawn_result()
        return self._file.path

    def predict(self, x: Any) -> Prediction:
        """The posterior's prediction with this callback's settings; all batches share the weight samples."""
        generator = generator_on(self.posterior.device) if self._draws is None else self._draws
        # Mixed precision is for the network, not for integrals over its outputs; and tensors made in Lightning's
        # inference mode could never be used with gradients.
        with torch.inference_mode(False), torch.autocast(self.posterior.device.type, enabled=False):
            return self.posterior.predict(x, self.predictive, generator=generator.manual_seed(self.seed))

    def evaluate(
        self, module: LightningModule, dataloader: Any, ood_dataloaders: Any = (), trainer: Trainer | None = None
    ) -> dict[str, float]:
        """Return what `trainer.test` logs, for a module without `test_step`: `nll_map`, `nll_<name>`, …"""
        check_module(module, trainer)
        self._module, predictors = module, self._predictors(with_map=True)
        return score_module(predictors, self.likelihood, module, dataloader, ood_dataloaders, trainer)

    def _predictors(self, with_map: bool) -> dict[str, Predict]:
        """The predictions to score. Only the first callback of a Trainer scores MAP."""

        def predict_map(x: Any) -> Prediction:
            return self.posterior.predict(x, predictive="map", calibrated=False)

        return {self.name: self.predict, "map": predict_map} if with_map else {self.name: self.predict}

    def _missing(self) -> str:
        return (
            f"{type(self).__name__} {self.name!r} has no posterior yet: run trainer.fit, load a checkpoint that was "
            f"written after it, or call fit_now{self.only_weights and '; '}{self.only_weights}"
        )

    def _read_spawn_result(self) -> None:
        """In the parent of launched processes, load the callback's state that rank zero wrote."""
        content = self._spawn_result.read()
        if content is not None:
            self._posterior = self._stored = None
            self.load_state_dict(content["state"])
            path = content["posterior_path"]
            self._file.path = None if path is None else as_file(path)
            self._module = self._module or module_of_callback(self)

    def _find_posterior(self) -> GaussianPosterior | None:
        """The posterior on the network and device that the callback last saw."""
        self._read_spawn_result()
        posterior, state = self._posterior, self._stored
        if self._module is None:
            return posterior
        network = self.network_in(self._module)
        if posterior is not None:
            own = unwrap_output(inputs.whole_network(posterior.network))
            if own is unwrap_output(network) and not posterior.is_elsewhere():
                return posterior
            state = posterior.state_dict()
        if state is not None:
            self._posterior = GaussianPosterior.from_state_dict(network, state, self._own_likelihood())
        return self._posterior

    def network_in(self, module: LightningModule) -> nn.Module:
        """The part of the module that maps x to f."""
        return wrap_output(uncompiled(network_of(module, self.network.name)), self._read_as)

    def _shows_progress(self, trainer: Trainer | None) -> bool:
        return self.progress and shows_bars(trainer)

    def read_by_targets(self, module: LightningModule, x: Any, y: Any) -> Any:
        """Learn the class dimension of the outputs from a batch. Returns x, in a container if the network needs one."""
        network = self.network_in(module)
        x = inputs.contained(network, x, y)
        self._read_as = output_of(read_by_targets(network, x, y, self.likelihood))
        return x

    def _own_likelihood(self) -> Likelihood | None:
        """A likelihood defined by the user, which a file cannot store."""
        return None if type(self.likelihood).__module__.startswith("lightning_bayes.") else self.likelihood

    # -- fit -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._module, self._is_unaveraged = pl_module, False
        run_last(trainer, posterior_callbacks(trainer))
        names = [callback.name for callback in posterior_callbacks(trainer)]
        if names.count(self.name) > 1:
            raise ValueError(f"two callbacks on one Trainer are named {self.name!r}: give each a different name=")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_trained = False
        if self.why_one and sum(isinstance(callback, type(self)) for callback in callbacks_of(trainer)) > 1:
            raise ValueError(f"{self.why_one}: give the Trainer one {type(self).__name__}")
        network = network_of(pl_module, self.network.name)  # raise for a wrong name before training, not after it
        if self.predictive.kind == "dropout":
            dropout_layers(network)  # raises if there is none
        self._check_module(pl_module)

    def _check_module(self, module: LightningModule) -> None:
        """Raise an error if a posterior of this module would be meaningless."""
        problem = f"{type(self).__name__} needs a loss that is only the negative log-likelihood"
        refuse_variational(module, problem, "train the module without the mixin")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_trained = True
        self._spawn_result.clear()
        self._posterior = self._stored = None  # the old posterior belongs to the weights before this training
        self._dry_run = DryRun(self)
        if not is_dev_run(trainer):
            self._file.check(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, only_missing=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed run with nothing left to train never reaches `on_train_end`.
        if not self._has_trained and trainer.train_dataloader is not None:
            load_validation(trainer)
            device = pl_module.device
            pl_module.to(trainer.strategy.root_device)  # Lightning has already moved it away
            try:
                self._finish(trainer, pl_module, only_missing=True)
            finally:
                pl_module.to(device)
        if is_launched(trainer):
            path = None if self._file.path is None else str(self._file.path)
            self._spawn_result.write(trainer, {"state": self.state_dict(), "posterior_path": path})

    def _finish(self, trainer: Trainer, module: LightningModule, only_missing: bool) -> None:
        """Fit and store the posterior. `only_missing` is True after a `fit` without a step: then fit only the
        posteriors that do not exist yet."""

    # -- the dry run on the first batch --------------------------------------------------------------------------------

    @property
    def needs_targets(self) -> bool:
        """Whether the fit asks the module for the targets of a batch."""
        return True

    def try_fit(self, network: nn.Module, x: Any, y: Tensor) -> None:
        """Fit a posterior to one or two examples, to raise errors before training."""

    def judge_loss(self, fit: LossFit, outputs: Tensor | None) -> None:
        """Warn if the loss does not belong to the likelihood."""
        if not fit.fits:
            warn(f"{self.name}: {explain(fit, self.likelihood, outputs)}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._dry_run is not None:
            self._dry_run.begin(trainer, pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._dry_run is None:
            return
        fit, outputs = self._dry_run.compare(trainer, pl_module, loss), self._dry_run.f
        self._end_dry_run()
        if fit is not None:
            self.judge_loss(fit, outputs)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        had_no_loss = self._dry_run is not None and pl_module.automatic_optimization
        self._end_dry_run()
        if had_no_loss:  # the step has returned no loss: repeat the dry run on the next batch
            self._dry_run = DryRun(self)

    def _end_dry_run(self) -> None:
        if self._dry_run is not None:
            self._dry_run.stop()
            self._dry_run = None

    # -- validate and test ---------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._scores = None
        if trainer.state.fn == "fit":  # the weights have no posterior during training
            return
        problem = self._why_unused(trainer)
        if problem:
            warn(f"nothing is scored: {problem}")
            return
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        stage = "test" if trainer.testing else "val"
        self._scores = TrainerScores(self.likelihood, pl_module, loaders, self.use.ood, stage)
        self._draws = SharedDraws(pl_module.device)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._scores is not None:
            predictors = self._predictors(with_map=posterior_callbacks(trainer)[0] is self)
            with torch.inference_mode(False), forward_context(trainer):
                self._scores.add(trainer, predictors, batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._scores is not None and self.use.plots:
            self._scores.draw(trainer)
        self._scores = self._draws = None  # release the loaders and weight samples

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _why_unused(self, trainer: Trainer) -> str:
        """Message text: why the current weights have no posterior; empty if they have one. Without a posterior, the
        callers warn, and only the module's own steps run."""
        if self._is_unaveraged:
            return _UNAVERAGED
        self._load_sidecar(trainer)
        return self._missing() if self._find_posterior() is None else ""

    # -- predict -------------------------------------------------------------------------------------------------------

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draws = SharedDraws(pl_module.device)
        callbacks = [callback for callback in posterior_callbacks(trainer) if callback.use.predict_step != "keep"]
        if self not in callbacks:
            self._load_sidecar(trainer)
        if not callbacks or callbacks[0] is not self:
            return
        problems = {callback: callback._why_unused(trainer) for callback in callbacks}
        callbacks = [callback for callback, problem in problems.items() if not problem]
        if not callbacks and is_default_predict_step(pl_module.predict_step):  # nothing could run
            raise RuntimeError(problems[self])
        for callback, problem in problems.items():
            if problem:
                warn(f"predict returns no prediction of {callback.name!r}: {problem}")
        if not callbacks:
            return
        self._predict_step = PredictStep(pl_module, callbacks)
        if not self._said_replaced:
            self._said_replaced = self._predict_step.say_replaced()
        self._predict_step.install(self._predict_step.run)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_predict_step()
        self._draws = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_predict_end(trainer, pl_module)
        self._end_dry_run()

    def _restore_predict_step(self) -> None:
        if self._predict_step is not None:
            self._predict_step.remove()
            self._predict_step = None

    # -- checkpoints and files -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._posterior is not None:
            return {"posterior": None if self._posterior.is_sharded else self._posterior.state_dict()}
        return {"posterior": self._stored}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A checkpoint from the middle of training has no posterior. The callback keeps its own, which rejects the other
        # weights.
        if state_dict["posterior"] is not None:
            self._posterior, self._stored = None, state_dict["posterior"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            self._is_unaveraged = is_unaveraged(pl_module, checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the posterior as a checkpoint stores it."""
        own = {**self.__dict__, "_posterior": None, "_scores": None, "_draws": None}
        return {**own, "_stored": self.state_dict().get("posterior")}

    def store(self, trainer: Trainer, checkpoints: list[CheckpointInfo] | None = None) -> None:
        """Write the posterior's file, and put the posterior into the checkpoints of its weights; on all processes."""
        if is_dev_run(trainer):
            return
        self._file.write(trainer, self.posterior)
        if not is_sharded(inputs.whole_network(self.posterior.network)):  # one file cannot store its weights
            self._put_into(trainer, self._list_checkpoints(trainer) if checkpoints is None else checkpoints)

    def _put_into(self, trainer: Trainer, checkpoints: list[CheckpointInfo]) -> None:
        for checkpoint in checkpoints:
            if checkpoint.in_memory:
                self._put(trainer, checkpoint, self.posterior)

    def _list_checkpoints(self, trainer: Trainer) -> list[CheckpointInfo]:
        return list_checkpoints(trainer, trainer.lightning_module, self.state_key, self.name)

    def _put(self, trainer: Trainer, checkpoint: CheckpointInfo, posterior: GaussianPosterior) -> None:
        put_posterior(trainer, checkpoint.path, self.state_key, self.name, self.state_dict(), posterior)

    def _load_sidecar(self, trainer: Trainer) -> None:
        """Load the posterior of a weights-only checkpoint from the file next to it."""
        self._checkpoint = trainer.ckpt_path
        path = trainer.ckpt_path and sidecar_path(trainer.ckpt_path, self.name)
        if trainer.state.fn != "fit" and path and self._module is not None and exists(path):
            network = self.network_in(self._module)
            self._posterior = GaussianPosterior.load(path, network, self._own_likelihood())
        if self.only_weights and trainer.ckpt_path:
            posterior = self._find_posterior()
            if posterior is not None and not is_of_weights(posterior):
                raise PosteriorError(
                    f"the network's weights are not those the posterior was fitted to: {self.only_weights}"
                )


def posterior_callbacks(trainer: Trainer) -> list[PosteriorCallback]:
    """The posterior callbacks of a Trainer, by priority."""
    callbacks = [callback for callback in callbacks_of(trainer) if isinstance(callback, PosteriorCallback)]
    return sorted(callbacks, key=lambda callback: callback.priority)


def run_last(trainer: Trainer, last: list[Any]) -> None:
    """Move the callbacks `last` to the end, just before checkpoints. They must run after weight averaging, which
    changes the weights when training ends."""
    callbacks = callbacks_of(trainer)
    checkpoints = [callback for callback in callbacks if class_name(callback, {"Checkpoint"})]
    moved = {id(callback) for callback in (*last, *checkpoints)}
    # A new list: Lightning may be iterating over the old one.
    set_callbacks(trainer, [*(other for other in callbacks if id(other) not in moved), *last, *checkpoints])


class CallbackPrior:
    """The prior of a callback. Its mean or posterior may be a file, which is read when it is first needed.

    Args:
        prior: a prior whose mean, if it is a state dict, may be that of the module or of its network.
        within: the name of the network in the module, if it is a submodule.
        check: raises an error for a prior that the other settings exclude.
    """

    def __init__(self, prior: Prior, within: str | None, check: Callable[[Prior], Any]) -> None:
        # The weights of a state dict may be the parameters that are about to train.
        self.prior, self._within, self._check = replace(prior, mean=_copied(prior.mean)), within, check
        check(self.prior)

    def read(self, network: nn.Module) -> Prior:
        """The prior for this network, with its files read."""
        prior = self.prior
        if isinstance(prior.posterior, (str, PathLike)):
            # The posterior may have been fitted to other weights of the network.
            prior = replace(prior, posterior=GaussianPosterior.from_state_dict(network, read(prior.posterior)))
        if isinstance(prior.mean, (str, PathLike)):
            saved = read_any(prior.mean, "prior mean")
            prior = replace(prior, mean=saved.get("state_dict", saved) if isinstance(saved, Mapping) else saved)
        if prior is not self.prior:
            self._check(prior)
            self.prior = prior
        if not isinstance(prior.mean, Mapping):
            return prior
        mean: dict[str, Tensor] = {}
        for name, _ in uncompiled(network).named_parameters():  # look up both the network's and the module's name
            weight = prior.mean.get(name, prior.mean.get(f"{self._within}.{name}"))
            if weight is not None:
                mean[name] = weight
        return replace(prior, mean=mean)

    def means(self, network: nn.Module, subset: Subset) -> dict[str, Tensor]:
        """The prior mean `m` of each parameter; empty if it is zero."""
        m = GaussianPrior.of(self.read(network), subset).mean
        if m is None:
            return {}
        parts = m.split([shape.numel() for shape in subset.shapes])
        return {name: part.reshape(s) for name, part, s in zip(subset.names, parts, subset.shapes, strict=True)}


def _copied(weights: Any) -> Any:
    if isinstance(weights, Mapping):
        return {name: _copied(weight) for name, weight in weights.items()}
    return weights.detach().clone() if isinstance(weights, Tensor) else weights
