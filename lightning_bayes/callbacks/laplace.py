"""`LaplaceCallback`: train as usual, then fit a Laplace posterior in an exact pass over the training data,

    θ ~ N(θ*, P⁻¹),    P = Σₙ JₙᵀΛₙJₙ / T + Λ,

around the trained weights `θ*`, with the prior precision `Λ`, by default `δI`; see `lightning_bayes.posterior.laplace`.
Then the prior precision `δ` is tuned, and the predictions are calibrated. The weights of the best and last checkpoints
can also get a posterior, each in a separate pass.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_bayes.arguments import word
from lightning_bayes.callbacks.sharded_fit import (
    LastLayerProbe,
    LockstepLoader,
    check_settings,
    check_sharded,
    check_sharded_data,
    fit_diagonal,
    is_diagonal,
)
from lightning_bayes.curvature import choose_subset
from lightning_bayes.curvature.fit import SMALL, check_passes
from lightning_bayes.curvature.low_rank import n_vectors
from lightning_bayes.curvature.sharded_diagonal import check_layers
from lightning_bayes.jacobian.cost import estimate_cost
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, Processes, Subset
from lightning_bayes.network.gathered_layer import gathered
from lightning_bayes.network.loaders import check_loader
from lightning_bayes.network.messages import inform, warn
from lightning_bayes.network.processes import is_sharded, reshard
from lightning_bayes.options.fit import CurvatureWord, FisherMC, LowRank, StructureOption, StructureWord, SubsetWord
from lightning_bayes.options.predictive import GP
from lightning_bayes.options.tuning import TuneWord, Tuning, tuning_option
from lightning_bayes.posterior import LaplacePosterior, Subnetwork, fit_laplace
from lightning_bayes.posterior.fit import LaplaceOptions, fit_posterior
from lightning_bayes.posterior.prior import GaussianPrior
from lightning_bayes.trainer.checkpoints import (
    CheckpointError,
    WeightsWord,
    checkpoints_to_fit,
    is_of_weights,
    save_interrupt_checkpoint,
    share,
    weights_of,
)
from lightning_bayes.trainer.data import (
    Epoch,
    ExactPass,
    FitLoader,
    check_validation,
    count_examples,
    data_processes,
    first_loader,
    is_datamodule,
    loaders_of,
    validation_pass,
)
from lightning_bayes.trainer.dry_run import check_memory
from lightning_bayes.trainer.held_out_choice import choose_on_validation
from lightning_bayes.trainer.module import check_module, refuse_variational
from lightning_bayes.trainer.posterior_callback import CallbackPrior, PosteriorCallback
from lightning_bayes.trainer.private import datamodule_of, is_dev_run
from lightning_bayes.trainer.report import block_summary, describe, end_live_display, fit_context, report

# A dry run builds the structure's matrices only if the number of weights does not exceed this limit.
DRY_RUN_LIMITS = {"full": 1024, "kron": 1_000_000, "ekfac": 1_000_000}


class LaplaceCallback(PosteriorCallback):
    """Fit a Laplace posterior at the end of training, and use it in `test` and `predict`.

    Training itself does not change. Under `ModelParallelStrategy`, which shards the weights over processes, it supports
    `subset="last_layer"`, or all weights with `structure="diag"` and `curvature="fisher_mc"` or "empirical_fisher".

    Args:
        likelihood: "classification", "binary" or "regression", or a `Likelihood`.

        structure: "auto" ("full" for a small regression, otherwise "kron"), "kron", "ekfac" (a second pass), "diag",
            "full" or "lowrank" (several passes), or an option such as `Kron(rank="auto")`; for a `Subnetwork`, "full".
        subset: "auto" (all weights; only the last layer if there are more than a million weights and a prediction would
            take more than about 20 forward passes), "all", "last_layer", a list of parameter or module names, or a
            `Subnetwork`.
        curvature: "auto", "ggn", "fisher_mc" (or `FisherMC(samples=3)`) or "empirical_fisher"; see `fit_laplace`.
        prior_precision: a number, or one per layer; with a posterior as `prior`, a factor on its precision.
        prior: `Prior(mean=…, temperature=…)`, or a posterior or its file. It has no effect on training: add
            `prior.penalty(network)` to your loss.

        tune: how to choose the prior (and a regression's noise) after the fit: "auto" (on the first validation
            dataloader, or without one by the evidence), "marglik", "mackay" or "linear" (by the evidence), "grid" (on
            validation data), or `Tuning(method, groups, iterate, …)`; None keeps the prior.
        weights: which weights get a posterior: "last" (the weights at the end of training), "best" (the weights of the
            best checkpoint), or "both" (these two, and the weights of every last checkpoint). Checkpoints with these
            weights store the posterior.
        data: the data to fit to, if not the training data (for example the same examples without augmentation): a
            DataLoader, the name of a method or attribute of the data module or module, or
            `FitData(loader, max_batches)`.
        name: suffix of the logged numbers; each callback of a Trainer needs a different name.
        use: network, predictive, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    keeps_points: ClassVar[bool] = True
    fits_shards: ClassVar[bool] = True  # but `check_sharded` refuses most settings

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        structure: StructureWord | StructureOption = "auto",
        subset: SubsetWord | list[str] | Subnetwork = "auto",
        curvature: CurvatureWord | FisherMC = "auto",
        prior_precision: float | list[float] = 1.0,
        prior: Any = None,
        tune: TuneWord | Tuning | None = "auto",
        weights: WeightsWord = "both",
        data: Any = None,
        name: str = "laplace",
        **use: Any,
    ) -> None:
        super().__init__(likelihood, name=name, **use)
        gp = self.predictive if isinstance(self.predictive, GP) else None
        self.options = LaplaceOptions.of(structure, subset, curvature, prior_precision, prior, gp)
        self._prior = CallbackPrior(self.options.prior, self.network.name, self.options.with_prior)
        self.tune = tuning_option(tune)
        self.options.check_tuning(self.tune, self.likelihood)
        self.weights = word("weights", weights, get_args(WeightsWord))
        self._data = FitLoader(data)
        check_passes(self.structure, self._data.source)
        self._probe: LastLayerProbe | None = None  # checks the last layer of a sharded network
        self._n_data: int | None = None  # number of training examples; None if they cannot be counted
        self._by_evidence = False  # whether the evidence has chosen the prior of the last fit
        # Path of the checkpoint whose weights the posterior was fitted to, if they differ from the module's current
        # weights
        self._best_path: str | None = None

    @property
    def structure(self) -> StructureOption:
        return self.options.structure

    @property
    def subset(self) -> Any:
        return self.options.subset

    @property
    def prior_precision(self) -> Any:
        return self.options.prior_precision

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(
        self, trainer: Trainer | None, module: LightningModule, dataloader: Any, val_dataloader: Any = None
    ) -> LaplacePosterior:
        """Fit to the module's current weights: one exact pass over the training data, then tuning and calibration.

        Args:
            trainer: provides precision, limits and loggers; it need not have run. None for defaults.
            module: the module with its trained weights.
            dataloader: the training data; or a data module, which need not be set up, or the module itself, for both
                training and validation data.
            val_dataloader: the data to tune and calibrate on; by default those of the data module, or the Trainer's.
        """
        check_module(module, trainer)
        if is_datamodule(dataloader) or dataloader is module:
            with loaders_of(dataloader, module, trainer) as (owner, train, validation):
                data = self._data.loader(train, owner, module)
                return self.fit_now(trainer, module, data, validation if val_dataloader is None else val_dataloader)
        check_loader(dataloader, "dataloader", "batches")
        if first_loader(val_dataloader) is not None:
            check_loader(first_loader(val_dataloader), "val_dataloader", "batches")
        if self.tune is not None and self.tune.method == "grid":
            validation_pass(trainer, module, val_dataloader)  # raises an error now if there are no validation data
        self._posterior = posterior = self._fitted(trainer, module, dataloader, validation=val_dataloader)
        self._best_path = None
        self._report(trainer, posterior)
        return posterior

    def write_file(self, trainer: Trainer) -> None:
        """Write the posterior's separate file, if `save` asks for one."""
        self._file.write(trainer, self.posterior)

    def _fitted(
        self, trainer: Trainer | None, module: LightningModule, loader: Any, of: str = "", validation: Any = None
    ) -> LaplacePosterior:
        self._check_module(module)
        self._module = module
        posterior = self._pass(trainer, module, loader)
        if posterior.is_sharded:
            return posterior
        with fit_context(trainer, module):
            if self.tune is not None and self.tune.by_evidence:
                data = self._data.exact_pass(trainer, module, loader) if self.tune.iterate else None
                shown = self._shows_progress(trainer)
                posterior = posterior.tune_prior(self.tune, data, progress=shown, processes=Processes.current())
            posterior, self._by_evidence = choose_on_validation(
                trainer, module, posterior, self.use, self.tune, of, validation
            )
            return posterior

    def _pass(self, trainer: Trainer | None, module: LightningModule, loader: Any) -> LaplacePosterior:
        """The posterior of the module's current weights, not yet tuned or calibrated."""
        # Batch norm statistics differ between processes. Checkpoints and DDP's next step use those of rank zero.
        share(list(module.buffers()))
        with fit_context(trainer, module):
            data = self._data.exact_pass(trainer, module, loader)
            probe = data.probe()
            x = None if probe is None else self.read_by_targets(module, *probe)
            network, processes = self.network_in(module), data_processes(trainer)
            batches: ExactPass | LockstepLoader = data
            if is_sharded(network):
                check_settings(self)  # not checked yet if `fit_now` is called outside of a Trainer's run
                if is_diagonal(self):
                    return fit_diagonal(self, network, data, (x, probe[1]), processes)
                network = layer = gathered(network, x)
                batches, x = LockstepLoader(layer, data, x, processes), layer.features(x)
            return fit_laplace(
                network,
                batches,
                **self._fit_kwargs(),
                prior=self._prior.read(network),
                progress=self._shows_progress(trainer),
                processes=processes,
                probe=x,
            )

    def _fit_kwargs(self) -> dict[str, Any]:
        """The arguments of `fit_laplace` that this callback's settings determine."""
        names = ("structure", "subset", "curvature", "prior_precision", "gp")
        return {"likelihood": self.likelihood, "seed": self.seed, **{n: getattr(self.options, n) for n in names}}

    def _report(self, trainer: Trainer | None, posterior: LaplacePosterior, of: str = "") -> None:
        blocks = block_summary(posterior.curvature.structure)
        what = f"{posterior.curvature.structure.word} posterior over {posterior.subset.size} weights{of}"
        what += f" ({blocks})" if blocks else ""
        # "auto" has chosen another estimator because there are outputs at many positions
        if self.options.curvature == "auto" and posterior.curvature.kind != "ggn":
            what += f", by curvature={posterior.curvature.kind!r}"
        report(trainer, self.name, what, {"n_data": posterior.n_data, **describe(posterior, self._by_evidence)})

    def _missing(self) -> str:
        if self._best_path is None and not self._checkpoint:
            return f"{super()._missing()}(trainer, module, datamodule) for trained weights"
        if self._best_path is None:
            path = os.path.basename(str(self._checkpoint))
            return (
                f"{type(self).__name__} {self.name!r} has no posterior yet, and {path} contains none: load its weights "
                "into the module, then call the callback's fit_now(trainer, module, datamodule), or "
                "lightning_bayes.fit(module, datamodule, trainer=trainer)"
            )
        return (
            f"{type(self).__name__} {self.name!r} fitted the best weights (weights='best'), but the module has "
            f"others: use ckpt_path='best' or load {self._best_path}, or fit with weights='both'"
        )

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        check_sharded(self, trainer)
        if stage == "fit":
            self._data.epoch = Epoch()  # the state of a checkpoint is loaded after this hook

    def _check_module(self, module: LightningModule) -> None:
        # A Laplace posterior of explicitly named weights around the means is a useful comparison.
        if self.network.name is None and (self.subset in ("all", "auto") or isinstance(self.subset, Subnetwork)):
            around = "pass network= or a subset= of weights for a Laplace posterior around the means"
            refuse_variational(module, "LaplaceCallback would treat its log σ as weights", around)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._data.owner(datamodule_of(trainer), pl_module)  # raises an error if `data=` names nothing that exists
        has_best = any(hasattr(callback, "best_model_path") for callback in trainer.checkpoint_callbacks)
        if self.weights == "best" and not has_best and not is_dev_run(trainer):
            raise RuntimeError("weights='best' needs a best checkpoint: give the Trainer a ModelCheckpoint(monitor=…)")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._data.check_training_data(trainer, partial(check_passes, self.structure))
        if self._data.source is None:
            with suppress(DataError):
                self._n_data = count_examples(trainer)
        if self.tune is not None and self.tune.method == "grid":
            check_validation(trainer)
        network = self.network_in(pl_module)
        if is_sharded(network):
            self._data.check_training_data(trainer, check_sharded_data)
            if is_diagonal(self):
                check_layers(network)
            else:
                self._probe = LastLayerProbe(network)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self._probe is not None:
            self._probe.stop()

    def try_fit(self, network: nn.Module, x: Any, y: Tensor) -> None:
        arguments = self._fit_kwargs()
        if isinstance(self.subset, Subnetwork):  # which weights the trial fit uses does not matter
            trial = replace(self.subset, by="random")
            chosen = trial.in_network(network, (), self.options.prior_precision, torch.Tensor)
            arguments["subset"], arguments["prior_precision"] = chosen
        weights = choose_subset(network, x, arguments["subset"])
        GaussianPrior.of(self._prior.read(network), weights)
        first = next(iter(weights.parameters(network).values()))
        if self.subset in ("all", "auto"):
            self._announce_cost(network, x, weights)
        if weights.size > DRY_RUN_LIMITS.get(self.structure.kind, math.inf):
            arguments["structure"] = "diag"  # needs the same gradients but no large matrices
        likelihood, seed = arguments.pop("likelihood"), arguments.pop("seed")
        options = LaplaceOptions.of(**arguments, prior=None)
        trial_run = fit_posterior(network, [(x, y)], likelihood, options, seed=seed, dry_run=True)
        n_outputs = trial_run.curvature.n_outputs // trial_run.n_data  # number of outputs of one example
        if isinstance(self.structure, LowRank):
            check_memory("lowrank", n_vectors(weights.size, self.structure.rank, n_outputs), weights.size, first)
        elif self.structure.kind == "full":  # stores one row per output, or a matrix and its Cholesky factor
            rows = 3 * self._n_data * n_outputs if self._n_data is not None else math.inf
            check_memory("full", int(min(rows, 2 * weights.size)), weights.size, first)

    def _announce_cost(self, network: nn.Module, x: Any, weights: Subset) -> None:
        """For a large network, report what the posterior will cost, and what the other choice of weights would cost."""
        everything = choose_subset(network, x, "all")
        if everything.size <= SMALL:
            return
        sampled = self.options.curvature == "fisher_mc" or isinstance(self.options.curvature, FisherMC)
        n = math.inf if self._n_data is None else self._n_data  # unknown: without what does not grow with the data

        def described(subset: Subset) -> str:
            cost = estimate_cost(network, x, subset, sampled)
            tune = "" if self.tune is None else f"{_number(cost.tune)} forward passes of the validation data to tune, "
            return (
                f"about {_number(cost.epochs(n))} plain epochs to fit, {tune}and {_number(cost.predict)} forward "
                "passes of a batch to predict"
            )

        if weights.size == everything.size:
            own, other, subset = f"all {weights.size:,} weights", choose_subset(network, x, "last_layer"), "last_layer"
        else:
            own, other, subset = f"the last layer ({weights.size:,} weights)", everything, "all"
        inform(
            f"{self.name}: a posterior over {own} takes {described(weights)}; with subset={subset!r} "
            f"({other.size:,} weights), {described(other)}"
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._data.epoch.count(batch_idx, trainer.is_last_batch)

    def _finish(self, trainer: Trainer, module: LightningModule, only_missing: bool) -> None:
        reshard(module)
        end_live_display(trainer)
        try:
            self._fit_weights(trainer, module, only_missing)
        except SIGTERMException:
            save_interrupt_checkpoint(trainer, self.name)
            raise

    def _fit_weights(self, trainer: Trainer, module: LightningModule, only_missing: bool) -> None:
        """Fit the weights in memory and in checkpoints that `weights` selects."""
        sharded = is_sharded(self.network_in(module))  # a single-file checkpoint cannot store shards
        checkpoints = [] if is_dev_run(trainer) or sharded else self._list_checkpoints(trainer)
        best = next((checkpoint for checkpoint in checkpoints if checkpoint.role == "best"), None)
        elsewhere = self.weights == "best" and best is not None and not best.in_memory
        if only_missing:
            checkpoints = [checkpoint for checkpoint in checkpoints if not checkpoint.has_posterior]
        if not elsewhere:
            held = self._find_posterior() if only_missing else None
            if held is None or not is_of_weights(held):
                self.fit_now(trainer, module, self._loader(trainer, module))
                self.store(trainer, checkpoints)
            else:
                self._put_into(trainer, checkpoints)
        for group in checkpoints_to_fit(checkpoints, self.weights):
            try:
                with weights_of(trainer, module, group[0].path):
                    of = f" of {os.path.basename(group[0].path)}"
                    posterior = self._fitted_to(trainer, module, group[0].path, of)
                    self._report(None, posterior, of)
                    for checkpoint in group:
                        self._put(trainer, checkpoint, posterior)
                    if elsewhere:
                        self._file.write(trainer, posterior)
            except CheckpointError as error:
                if elsewhere:
                    raise
                warn(str(error))
        self._best_path = best.path if elsewhere and best is not None else None

    def _fitted_to(self, trainer: Trainer, module: LightningModule, path: str, of: str) -> LaplacePosterior:
        """Fit with the weights of the checkpoint at `path` loaded into the module."""
        return self._fitted(trainer, module, self._loader(trainer, module), of)

    def _loader(self, trainer: Trainer, module: LightningModule) -> Any:
        return self._data.loader(trainer.train_dataloader, datamodule_of(trainer), module)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": asdict(self._data.epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._data.epoch = Epoch(**state_dict.get("epoch", {}))


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
