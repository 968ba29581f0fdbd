"""`LaplaceCallback`: train as usual, then one exact pass over the training data for a Laplace posterior."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.callbacks.base import PosteriorCallback, check_word, describe
from lightning_bayes.callbacks.block_summary import block_summary
from lightning_bayes.callbacks.data import check_validation, exact_pass, single, validation_pass
from lightning_bayes.callbacks.dry_run import Undecomposed, check_memory
from lightning_bayes.callbacks.module import network_of, refuse_variational
from lightning_bayes.callbacks.plain import plain_values
from lightning_bayes.callbacks.scoring import forward_context
from lightning_bayes.callbacks.strategy import refuse_sharded
from lightning_bayes.curvature import Processes, choose_subset
from lightning_bayes.curvature.accumulate import SHARINGS, STRUCTURES
from lightning_bayes.curvature.preserve import preserved_rng
from lightning_bayes.curvature.roots import CURVATURES
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import LaplacePosterior, fit_laplace
from lightning_bayes.posterior.laplace import DAMPINGS
from lightning_bayes.posterior.tuning import METHODS

_TRIED = {"full": 1024, "kron": 1_000_000}  # weights up to which a dry run makes the matrices of the structure


class LaplaceCallback(PosteriorCallback):
    """A Laplace posterior at the end of training, and its predictions in `test` and `predict`.

    Training itself is not touched. All arguments are plain words and numbers.

    Args:
        likelihood: "classification", "binary" or "regression" (or a `Likelihood`).
        structure: "kron", "diag" or "full".
        subset: "all", "last_layer", or a list of parameter or module names.
        curvature: "ggn", "fisher_mc" or "empirical_fisher".
        prior_precision: a number, or one per layer.
        tune: how to choose the prior (and a regression's noise) after the fit: "marglik", "mackay", "grid" (on the
            first validation dataloader), or None to keep what was given.
        per_layer: tune one prior per layer.
        predictive: "glm", "bnn" or "map".
        link: "probit", "bridge" or "mc"; by default the likelihood's first.
        samples: drawn where a prediction draws.
        network: the submodule that maps x to f; by default the module's own `forward`.
        name: suffix of the logged numbers, and key among several callbacks.
        temperature: of the likelihood.
        damping: None, "glm" or "ritter"; see `fit_laplace`.
        weight_sharing: "expand" or "reduce"; see `fit_laplace`.
        mc_samples: labels drawn per example for "fisher_mc".
        ood: dataloaders after the first hold out-of-distribution data.
        plots: write a reliability diagram (of a regression, its calibration curve) to the logger, or as a PNG file.
        seed: of everything that is drawn.
        progress: show a progress bar during the fit.
        predict_step: "replace" the module's own in `trainer.predict`, "keep" it, or return "both".
    """

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        structure: str = "kron",
        subset: str | list[str] = "all",
        curvature: str = "ggn",
        prior_precision: float | list[float] = 1.0,
        tune: str | None = "marglik",
        per_layer: bool = False,
        predictive: str = "glm",
        link: str | None = None,
        samples: int = 100,
        network: str | None = None,
        name: str = "laplace",
        temperature: float = 1.0,
        damping: str | None = None,
        weight_sharing: str = "expand",
        mc_samples: int = 1,
        ood: bool = False,
        plots: bool = False,
        seed: int = 0,
        progress: bool = True,
        predict_step: str = "replace",
    ) -> None:
        super().__init__(name, likelihood, predictive, link, samples, network, ood, plots, seed, predict_step)
        check_word("structure", structure, tuple(STRUCTURES))
        check_word("curvature", curvature, tuple(CURVATURES))
        check_word("tune", tune, (None, *METHODS))
        check_word("damping", damping, DAMPINGS)
        check_word("weight_sharing", weight_sharing, tuple(SHARINGS))
        self.structure, self.subset, self.curvature = structure, plain_values(subset), curvature
        self.prior_precision, self.tune, self.per_layer = plain_values(prior_precision), tune, per_layer
        self.temperature, self.damping = temperature, damping
        self.weight_sharing, self.mc_samples, self.progress = weight_sharing, mc_samples, progress

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_sharded(trainer, "LaplaceCallback")

    def _check_module(self, module: LightningModule) -> None:
        # A Laplace posterior around the means is something to compare with, where the weights are said to be weights.
        if self.network is None and self.subset == "all":
            around = "for a Laplace posterior around the means name its network= or its subset= of weights"
            refuse_variational(module, "LaplaceCallback would take its log σ for weights", around)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # What cannot work is better known before training than after it.
        single(trainer.train_dataloader)
        if self.tune == "grid":
            check_validation(trainer)

    def try_fit(self, network: nn.Module, x: Any, y: Tensor) -> None:
        words, weights = self._words(), choose_subset(network, x, self.subset)
        if self.structure == "full":
            first = next(iter(weights.parameters(network).values()))
            check_memory(weights.size, first.dtype, first.device)
        if weights.size > _TRIED.get(self.structure, math.inf):  # the gradients are the same, the matrices are not made
            words.update(structure="diag", damping=None)
        fit_laplace(network, [(x, y)], **words, processes=Undecomposed())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fit_now(trainer, pl_module, trainer.train_dataloader)
        self.store(trainer)

    def fit_now(self, trainer: Trainer | None, module: LightningModule, dataloader: Any) -> LaplacePosterior:
        """Fit to the module's present weights: one exact pass over `dataloader`'s data, then tuning."""
        self._check_module(module)
        self._module = module
        with preserved_rng(), forward_context(trainer):
            self._posterior = posterior = self._fit(trainer, module, dataloader)
        self._report(trainer, posterior)
        return posterior

    def _fit(self, trainer: Trainer | None, module: LightningModule, dataloader: Any) -> LaplacePosterior:
        processes = Processes.current()
        limit = None if trainer is None else trainer.limit_train_batches
        data = exact_pass(dataloader, module, trainer, limit, processes)
        quiet = trainer is not None and (not trainer.is_global_zero or trainer.progress_bar_callback is None)
        posterior = fit_laplace(
            network_of(module, self.network),
            data,
            **self._words(),
            progress=self.progress and not quiet,
            processes=processes,
            probe=data.probe(),
        )
        if self.tune is None:
            return posterior
        validation = validation_pass(trainer, module) if self.tune == "grid" else None
        return posterior.tune_prior(self.tune, loader=validation, per_layer=self.per_layer)

    def _words(self) -> dict[str, Any]:
        """The arguments of `fit_laplace` that are this callback's own."""
        return {
            "likelihood": self.likelihood,
            "structure": self.structure,
            "subset": self.subset,
            "curvature": self.curvature,
            "prior_precision": self.prior_precision,
            "temperature": self.temperature,
            "damping": self.damping,
            "samples": self.mc_samples,
            "seed": self.seed,
            "weight_sharing": self.weight_sharing,
        }

    def _report(self, trainer: Trainer | None, posterior: LaplacePosterior) -> None:
        blocks = block_summary(posterior.curvature.structure)
        what = f"{self.structure} posterior over {posterior.subset.size} weights" + (f" ({blocks})" if blocks else "")
        self.report(trainer, what, {"n_data": posterior.n_data, **describe(posterior)})
