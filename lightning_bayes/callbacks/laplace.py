"""`LaplaceCallback`: train as usual, then an exact pass over the training data for a Laplace posterior,

    θ ~ N(θ*, P⁻¹),    P = Σₙ JₙᵀΛₙJₙ / T + Λ,

around the trained weights `θ*`, with the prior `Λ = δI` or another; see `lightning_bayes.posterior.laplace`. Then the
prior precision `δ` is tuned, and the predictions are calibrated. The same is done, in a pass of its own, for the
weights of the best and last checkpoints.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_bayes.arguments import count, plain_values, word
from lightning_bayes.callbacks.fit_data import Epoch, FitData, GivenPrior
from lightning_bayes.callbacks.sharded_fit import (
    FirstStep,
    InStep,
    check_sharded,
    check_sharded_data,
    check_sharded_words,
    fit_diagonal,
    is_diagonal,
)
from lightning_bayes.callbacks.trainer_subnetwork import asks_trainer, source_of, with_posterior
from lightning_bayes.curvature import choose_subset
from lightning_bayes.curvature.fit import check_options, check_passes, check_updatable
from lightning_bayes.curvature.low_rank import n_vectors
from lightning_bayes.curvature.sharded_diagonal import check_layers
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import Processes
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.checks import check_loader
from lightning_bayes.network.gathered_layer import gathered
from lightning_bayes.network.processes import is_sharded, reshard
from lightning_bayes.posterior import LaplacePosterior, Subnetwork, fit_laplace
from lightning_bayes.posterior.fit import check_laplace
from lightning_bayes.posterior.prior import Prior
from lightning_bayes.posterior.subnetwork import structure_for
from lightning_bayes.posterior.training_points import PointOptions
from lightning_bayes.trainer.checkpoints import (
    WEIGHTS,
    CheckpointError,
    checkpoints_to_fit,
    is_of_weights,
    save_interrupt_checkpoint,
    weights_of,
)
from lightning_bayes.trainer.data import (
    ExactPass,
    check_validation,
    first_loader,
    is_datamodule,
    loaders_of,
    validation_pass,
)
from lightning_bayes.trainer.dry_run import check_memory
from lightning_bayes.trainer.held_out_choice import check_iteration, check_tuning, choose_on_validation
from lightning_bayes.trainer.module import check_module, refuse_variational
from lightning_bayes.trainer.options import UseOptions
from lightning_bayes.trainer.posterior_callback import PosteriorCallback
from lightning_bayes.trainer.private import forward_context, is_dev_run
from lightning_bayes.trainer.report import bars_of, block_summary, describe, end_live_display, report, shows_bars
from lightning_bayes.trainer.strategy import data_processes, share

_TRIED = {
    "full": 1024,
    "kron": 1_000_000,
    "ekfac": 1_000_000,
}  # weights up to which a dry run makes the matrices of the structure


class LaplaceCallback(PosteriorCallback):
    """A Laplace posterior at the end of training, and its predictions in `test` and `predict`.

    Training itself is not touched. All arguments are plain words and numbers. Where the weights are sharded over
    processes (`ModelParallelStrategy`), it fits `subset="last_layer"`, and `structure="diag"` with
    `curvature="fisher_mc"` or "empirical_fisher"; what else there is, is refused before training.

    Args:
        likelihood: "classification", "binary" or "regression" (or a `Likelihood`).
        network: the submodule that maps x to f; by default the module's own `forward`.
        output: the key, attribute or index of f in what the network returns; by default a tensor, or its `logits`.
        class_dim: the dimension of f that counts classes; by default the shape of the targets says which it is.

        structure: "kron", "ekfac" (a second pass), "diag", "full" or "lowrank" (several passes); for a `Subnetwork`,
            "kron" is "full".
        subset: "all", "last_layer", a list of parameter or module names, or a `Subnetwork`.
        weights: whose posterior is fitted: "both", those that training ends with and those of every best and last
            checkpoint, each in a pass of its own; "last", those that training ends with; or "best", those of the best
            checkpoint. The posterior goes into the checkpoints that hold its weights.
        prior_precision: a number, or one per layer; with `prior`, a factor on its precision.
        prior_mean: the weights that the prior is around, by default zero: a flat tensor, the state dict of the module
            or network, or a file of one of these, such as a checkpoint.
        prior: a posterior that is the prior, or its file; see `fit_laplace`. In training it is not at work: add
            `prior.penalty(network)` to your loss.
        updatable: keep what `posterior.update` needs to add data to structure="kron"; in checkpoints, too.

        tune: how to choose the prior (and a regression's noise) after the fit: "auto" (on the first validation
            dataloader, or without one by the evidence), "marglik", "mackay" or "linear" (the evidence by name), "grid"
            (validation data), or None to keep what was given.
        per_layer: tune one prior per layer, for "marglik", "mackay" and "linear".
        prior_groups: for the same, "normalised" tunes one prior for each layer directly before a normalisation and one
            for the rest; "layers" is `per_layer=True`.
        iterate: for "linear", find prior and optimum of the linearised network together, by further passes over the
            training data; see `tune_prior`.
        passes: of those, at most.
        calibrate: "auto" finds one number on the first validation dataloader, if there is one, by which predictions are
            corrected: a temperature of the probabilities, or a factor on a regression's variance; "outputs" is a
            temperature of the network's outputs instead; None finds none.

        predictive: "glm", "bnn", "map", or "gp" with training points.
        link: "probit", "pairwise", "bridge" or "mc"; by default that of the calibration, or the likelihood's first.
        samples: drawn where a prediction draws.
        predict_step: "replace" the module's own in `trainer.predict`, "keep" it, or return "both".

        name: suffix of the logged numbers, and key among several callbacks.
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write a reliability diagram (of a regression, its calibration curve) to the logger, or as a PNG file.
        save: where the posterior's own file goes: a file, a folder, True, False, or None, which writes it unless both
            logger and checkpoints are off and it would go into the working directory.

        data: what the pass goes over instead of the training data, for instance the same examples without
            augmentation: a DataLoader, or the name of a method or attribute of the data module or module.
        max_batches: the pass ends after so many batches. By default it takes all data that training draws from, also
            with `limit_train_batches`, which leaves none out if they are shuffled; of data without a length, whose end
            training has not seen, as many batches as an epoch has taken.
        curvature: "auto", "ggn", "fisher_mc" or "empirical_fisher"; see `fit_laplace`.
        mc_samples: labels drawn per example for "fisher_mc".
        hessian: "exact", or "approx", "mixed" or "auto" for a fast `structure="diag"`; see `fit_laplace`.
        weight_sharing: "expand" or "reduce"; see `fit_laplace`.
        rank: how many eigenpairs `structure="lowrank"`, or each factor of "kron", keeps; see `fit_laplace`.
        temperature: of the likelihood.
        damping: None, "glm" or "ritter"; see `fit_laplace`.
        gp_points: training points to keep for predictive="gp", in checkpoints, too: a number, or None for all.
        gp_selection: "random" or "leverage"; see `fit_laplace`.
        gp_weighting: "prior" or "data"; see `fit_laplace`.
        gp_outputs: "auto", "joint" or "independent"; see `fit_laplace`.
        seed: of everything that is drawn.
        progress: show a progress bar during the fit.
    """

    fits_shards: ClassVar[bool] = True  # some of its words, where weights are sharded over processes

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        network: str | None = None,
        output: str | int | None = None,
        class_dim: int | None = None,
        structure: str = "kron",
        subset: str | list[str] | Subnetwork = "all",
        weights: str = "both",
        prior_precision: float | list[float] = 1.0,
        prior_mean: Any = None,
        prior: Any = None,
        updatable: bool = False,
        tune: str | None = "auto",
        per_layer: bool = False,
        prior_groups: str | None = None,
        iterate: bool = False,
        passes: int = 10,
        calibrate: str | None = "auto",
        predictive: str = "glm",
        link: str | None = None,
        samples: int = 100,
        predict_step: str = "replace",
        name: str = "laplace",
        ood: bool = False,
        plots: bool = False,
        save: bool | str | None = None,
        data: Any = None,
        max_batches: int | None = None,
        curvature: str = "auto",
        mc_samples: int = 1,
        hessian: str = "exact",
        weight_sharing: str = "expand",
        rank: int | str | None = None,
        temperature: float = 1.0,
        damping: str | None = None,
        gp_points: int | None = 0,
        gp_selection: str = "random",
        gp_weighting: str = "prior",
        gp_outputs: str = "auto",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        use = UseOptions(
            name=name, likelihood=resolve(likelihood), predictive=predictive, link=link, samples=samples,
            network=network, output=output, class_dim=class_dim,
            ood=ood, plots=plots, seed=seed, predict_step=predict_step, save=save,
            has_points=gp_points != 0,
        )  # fmt: skip
        super().__init__(use)
        structure = structure_for(subset, structure)
        self.structure, self.subset, self.curvature = structure, plain_values(subset), curvature
        self.prior_precision, self.tune, self.per_layer = plain_values(prior_precision), tune, per_layer
        self.calibrate, self.weights, self.temperature, self.damping = calibrate, weights, temperature, damping
        self.weight_sharing, self.mc_samples, self.progress = weight_sharing, mc_samples, progress
        self.rank = rank
        self.hessian, self.points = hessian, PointOptions(gp_points, gp_selection, gp_weighting, gp_outputs)
        names = "all" if isinstance(subset, Subnetwork) else self.subset
        check_options(structure, names, curvature, weight_sharing, progress, hessian, rank)
        check_laplace(structure, self.prior_precision, temperature, damping)
        self._given = GivenPrior(
            prior, prior_mean, network, structure=structure, has_points=gp_points != 0, damping=damping,
            prior_precision=self.prior_precision,
        )  # fmt: skip
        joined = structure if self._given.is_posterior else None
        check_tuning(tune, per_layer, calibrate, damping, prior_groups=prior_groups, joined=joined, structure=structure)
        self.updatable = check_updatable(updatable, structure)
        check_passes(structure, data)
        check_iteration(tune, iterate, passes, self.likelihood)
        self.prior_groups, self.iterate, self.passes = prior_groups, iterate, passes
        count("mc_samples", mc_samples)
        word("weights", weights, WEIGHTS)
        self.priority = 3 if asks_trainer(subset) else self.priority  # after the callback whose posterior it needs
        self._data = FitData(data, max_batches)
        self._first_step: FirstStep | None = None  # of a sharded network
        self._by_evidence = False  # whether the evidence has chosen the prior of the last fit
        self._best_path: str | None = None  # where the posterior is, if it is of other weights than those in memory

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(
        self, trainer: Trainer | None, module: LightningModule, dataloader: Any, val_dataloader: Any = None
    ) -> LaplacePosterior:
        """Fit to the module's present weights: one exact pass over the training data, then tuning and calibration.

        Args:
            trainer: whose precision, limits and loggers are used, or None; it need not have run.
            module: with its trained weights.
            dataloader: of the training data; or a data module, which need not be set up, or the module itself, for
                both its training and its validation data.
            val_dataloader: to tune and calibrate on; by default that of the data module, or the Trainer's.
        """
        check_module(module, trainer)
        if is_datamodule(dataloader) or dataloader is module:
            with loaders_of(dataloader, module, trainer) as loaders:
                data = self._data.loader_of(loaders.owner, module, loaders.train)
                validation = loaders.validation if val_dataloader is None else val_dataloader
                return self.fit_now(trainer, module, data, validation)
        check_loader(dataloader, "dataloader", "batches")
        if first_loader(val_dataloader) is not None:
            check_loader(first_loader(val_dataloader), "val_dataloader", "batches")
        if self.tune == "grid":
            validation_pass(trainer, module, val_dataloader)  # without one, an error before the pass, not after it
        self._posterior = posterior = self._fitted(trainer, module, dataloader, validation=val_dataloader)
        self._best_path = None
        self._report(trainer, posterior)
        return posterior

    def write_file(self, trainer: Trainer) -> None:
        """The posterior's own file, where `save` says."""
        self._file.write(trainer, self.posterior)

    def _fitted(
        self, trainer: Trainer | None, module: LightningModule, loader: Any, of: str = "", validation: Any = None
    ) -> LaplacePosterior:
        self._check_module(module)
        self._module = module
        posterior = self._pass(trainer, module, loader)
        if posterior.is_sharded:
            return posterior
        with preserved_rng(module.device), forward_context(trainer), bars_of(trainer):
            if self.tune not in (None, "auto", "grid"):
                options: dict[str, Any] = {"per_layer": self.per_layer, "prior_groups": self.prior_groups}
                if self.iterate:
                    data = self._data.exact_pass(trainer, module, loader)
                    options.update(loader=data, iterate=True, passes=self.passes, processes=Processes.current())
                    options.update(progress=self.progress and shows_bars(trainer))
                posterior = posterior.tune_prior(self.tune, **options)
            words = self.use, self.tune, self.calibrate, of
            posterior, self._by_evidence = choose_on_validation(
                trainer, module, posterior, *words, validation, progress=self.progress
            )
            return posterior

    def _pass(self, trainer: Trainer | None, module: LightningModule, loader: Any) -> LaplacePosterior:
        """The posterior of the module's present weights, not yet tuned or calibrated."""
        # Each process has its own batch norm statistics; rank zero's are those of checkpoints, and of DDP's next step.
        share(list(module.buffers()))
        with preserved_rng(module.device), forward_context(trainer), bars_of(trainer):
            data = self._data.exact_pass(trainer, module, loader)
            probe = data.probe()
            x = None if probe is None else self.read_by_targets(module, *probe)
            network, processes = self.network_in(module), data_processes(trainer)
            batches: ExactPass | InStep = data
            if is_sharded(network):
                check_sharded_words(self)  # `fit_now` may be called outside of a Trainer's run
            if is_sharded(network) and is_diagonal(self):
                return fit_diagonal(self, network, data, (x, probe[1]), processes)
            if is_sharded(network):
                network = layer = gathered(network, x)
                batches, x = InStep(layer, data, x, processes), layer.features(x)
            return fit_laplace(
                network,
                batches,
                **self._words(),
                **self._given.words(network),
                subset=with_posterior(self.subset, trainer),
                progress=self.progress and shows_bars(trainer),
                processes=processes,
                probe=x,
            )

    def _words(self) -> dict[str, Any]:
        """The arguments of `fit_laplace` that are this callback's own, but its subset."""
        of_model = ("likelihood", "structure", "curvature", "prior_precision", "temperature", "damping")
        names = (*of_model, "seed", "weight_sharing", "hessian", "rank", "updatable")
        points = {f"gp_{name}": value for name, value in asdict(self.points).items()}
        return {"samples": self.mc_samples, **points, **{name: getattr(self, name) for name in names}}

    @property
    def has_prior(self) -> bool:
        """Whether the prior is another posterior."""
        return self._given.is_posterior

    @property
    def has_prior_mean(self) -> bool:
        return self._given.has_mean

    def _report(self, trainer: Trainer | None, posterior: LaplacePosterior, of: str = "") -> None:
        blocks = block_summary(posterior.curvature.structure)
        what = f"{self.structure} posterior over {posterior.subset.size} weights{of}"
        what += f" ({blocks})" if blocks else ""
        what += f", by curvature={posterior.curvature.kind!r}" if self._chose_estimate(posterior) else ""
        report(trainer, self.name, what, {"n_data": posterior.n_data, **describe(posterior, self._by_evidence)})

    def _chose_estimate(self, posterior: LaplacePosterior) -> bool:
        """Whether "auto" has taken the Monte-Carlo estimate for outputs at many positions."""
        return self.curvature == "auto" and posterior.curvature.kind != "ggn"

    def _missing(self) -> str:
        if self._best_path is None and not self._checkpoint:
            return f"{super()._missing()}(trainer, module, datamodule) for trained weights"
        if self._best_path is None:
            path = os.path.basename(str(self._checkpoint))
            return (
                f"{type(self).__name__} {self.name!r} has no posterior yet, and {path} holds none: load its weights "
                "into the module, then call the callback's fit_now(trainer, module, datamodule), or "
                "lightning_bayes.fit(module, datamodule, trainer=trainer)"
            )
        return (
            f"{type(self).__name__} {self.name!r} has fitted the best weights (weights='best'), which are not those in "
            f"memory: use ckpt_path='best' or load {self._best_path}, or fit with weights='both'"
        )

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        check_sharded(self, trainer)
        if stage == "fit":
            self._data.epoch = Epoch()  # what a checkpoint holds comes after this

    def _check_module(self, module: LightningModule) -> None:
        # A Laplace posterior around the means is something to compare with, where the weights are said to be weights.
        if self.network is None and (self.subset == "all" or isinstance(self.subset, Subnetwork)):
            around = "for a Laplace posterior around the means name its network= or its subset= of weights"
            refuse_variational(module, "LaplaceCallback would take its log σ for weights", around)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # What cannot work is better known before training than after it.
        self._data.check_name(trainer, pl_module)
        if asks_trainer(self.subset):
            source_of(self.subset, trainer)
        has_best = any(hasattr(callback, "best_model_path") for callback in trainer.checkpoint_callbacks)
        if self.weights == "best" and not has_best and not is_dev_run(trainer):
            raise RuntimeError("weights='best' needs a best checkpoint: give the Trainer a ModelCheckpoint(monitor=…)")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._data.check_training_data(trainer, partial(check_passes, self.structure))
        if self.tune == "grid":
            check_validation(trainer)
        network = self.network_in(pl_module)
        if is_sharded(network):
            self._data.check_training_data(trainer, check_sharded_data)
        if is_sharded(network) and is_diagonal(self):
            check_layers(network)
        elif is_sharded(network):
            self._first_step = FirstStep(network)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        step, self._first_step = self._first_step, None
        if step is not None:
            step.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self._first_step is not None:
            self._first_step.stop()

    def try_fit(self, network: nn.Module, x: Any, y: Tensor) -> None:
        subset, words = self.subset, self._words()
        if isinstance(subset, Subnetwork):  # any weights will do
            trial, prior = replace(subset, by="random"), self.prior_precision
            subset, words["prior_precision"] = trial.in_network(network, (), prior, torch.Tensor)
        weights = choose_subset(network, x, subset)
        Prior.of(**self._given.words(network), subset=weights)
        first = next(iter(weights.parameters(network).values()))
        if self.structure == "full":
            check_memory("full", 2 * weights.size, weights.size, first)
        if weights.size > _TRIED.get(self.structure, math.inf):  # the gradients are the same, the matrices are not made
            words.update(structure="diag", damping=None, rank=None)
        tried = fit_laplace(network, [(x, y)], **words, subset=subset, dry_run=True)
        if self.structure == "lowrank" and not isinstance(self.rank, str):  # of whose memory the outputs decide
            n = n_vectors(weights.size, self.rank, tried.curvature.n_outputs // tried.n_data)
            check_memory("lowrank", n, weights.size, first)

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
        """The posteriors of the weights in memory and of those in checkpoints, by what `weights` says."""
        sharded = is_sharded(self.network_in(module))  # whose parts no checkpoint of one file holds
        checkpoints = [] if is_dev_run(trainer) or sharded else self._list_checkpoints(trainer)
        best = next((checkpoint for checkpoint in checkpoints if checkpoint.role == "best"), None)
        elsewhere = self.weights == "best" and best is not None and not best.in_memory
        if only_missing:
            checkpoints = [checkpoint for checkpoint in checkpoints if not checkpoint.has_posterior]
        if not elsewhere:
            held = self._find_posterior() if only_missing else None
            if held is None or not is_of_weights(held):
                self.fit_now(trainer, module, self._data.loader(trainer, module))
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
                rank_zero_warn(str(error))
        self._best_path = best.path if elsewhere and best is not None else None

    def _fitted_to(self, trainer: Trainer, module: LightningModule, path: str, of: str) -> LaplacePosterior:
        """While the module has the weights of the checkpoint at `path`."""
        return self._fitted(trainer, module, self._data.loader(trainer, module), of)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": asdict(self._data.epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._data.epoch = Epoch(**state_dict.get("epoch", {}))
