"""`L2MCallback`: train as usual, and compute the posterior from the optimizer's second moment `v̂`,

    P = N·B·v̂ · (N − 1)/(N − B) / c² + δ    (`scaling="dataset"`)
    P = v̂ + δ + ε                            (`scaling="paper"`: Perone et al., eq. (6))

for batches of `B` of `N` examples and a loss of `c` times the mean negative log-likelihood; see
`lightning_bayes.posterior.moments`. There is no pass over the data: the callback counts `N` and `B` and recognises `c`
during training, and reads the optimizer's buffers at the end, or when `fit_now` is called.

A step uses `Σ wᵢ gᵢ`, over examples that were drawn without replacement from `N`. At the optimum, the average of the
square of this gradient is

    (N·Σ wᵢ² − (Σ wᵢ)²) · S²/(N − 1),

where `N·S²` is the diagonal of the centred empirical Fisher. A batch of `B` has `wᵢ = 1/B`, which gives
`S²/B · (N − B)/(N − 1)`. If batches differ in size or gradients are accumulated, `B` is the batch size that would give
the same average of `N·Σ wᵢ² − (Σ wᵢ)²` over the steps that the optimizer remembers.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any, get_args

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.arguments import count, plain_values, word
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, inputs
from lightning_bayes.network.messages import warn
from lightning_bayes.network.processes import is_sharded, reshard
from lightning_bayes.network.subset import trainable
from lightning_bayes.options.fit import prior_option
from lightning_bayes.options.tuning import TuneWord, Tuning, tuning_option
from lightning_bayes.posterior import LaplacePosterior
from lightning_bayes.posterior.gaussian import NEEDS_WHOLE
from lightning_bayes.posterior.moments import (
    Scaling,
    check_l2m,
    check_optimizers,
    default_loss_scale,
    fisher_factor,
    fit_l2m,
    longest_memory,
    mean_only,
)
from lightning_bayes.trainer import data
from lightning_bayes.trainer.dry_run import LossFit, recognise_scale, split_training_batch
from lightning_bayes.trainer.held_out_choice import choose_on_validation
from lightning_bayes.trainer.posterior_callback import CallbackPrior, PosteriorCallback
from lightning_bayes.trainer.private import class_name, is_dev_run
from lightning_bayes.trainer.report import describe, fit_context, report

_UNREADABLE = {"FSDPStrategy", "XLAFSDPStrategy", "DeepSpeedStrategy"}


class L2MCallback(PosteriorCallback):
    """Compute a diagonal Laplace posterior from the optimizer's second moment, and use it in `test` and `predict`.

    Args:
        likelihood: "classification", "binary" or "regression", or a `Likelihood`.

        scaling: "dataset", the curvature of the dataset's log-likelihood, or "paper", `v̂ + δ + ε` without scaling.
        prior_precision: a number, or one per layer; None takes the optimizer's weight decay.
        prior: `Prior(mean=…)`, the mean of the prior when the evidence tunes it.
        loss_scale: the `c` of a loss that is `c` times the mean negative log-likelihood. The default matches torch's
            losses, which average over all `C` targets of an example: `1/C`, and `2σ²/C` for the mean squared error. On
            the first batch, the measured scale is compared with the default: a sum over targets or half the squared
            error is recognised, and any other scale gives a warning.
        n_data: the number of training examples; None counts them.

        tune: how to choose the prior at the end: "auto" (on the first validation dataloader; without one the weight
            decay stays), "marglik" or "mackay", which make one forward pass over the training data for their
            likelihood, "grid" (on the first validation dataloader), `Tuning(method, groups, …)`, or None.
        name: suffix of the logged numbers; each callback of a Trainer needs a different name.
        use: network, predictive, calibrate, ood, plots, save, predict_step, seed and progress; see `PosteriorCallback`.
    """

    only_weights = (
        "the optimizer's second moment belongs to the last weights only: test those, or use LaplaceCallback for the "
        "best"
    )

    def __init__(
        self,
        likelihood: str | Likelihood = "classification",
        *,
        scaling: Scaling = "dataset",
        prior_precision: float | list[float] | None = None,
        prior: Any = None,
        loss_scale: float | None = None,
        n_data: int | None = None,
        tune: TuneWord | Tuning | None = "auto",
        name: str = "l2m",
        **use: Any,
    ) -> None:
        super().__init__(likelihood, name=name, **use)
        self.scaling, self.prior_precision = word("scaling", scaling, get_args(Scaling)), plain_values(prior_precision)
        check_l2m(self.prior_precision, loss_scale)
        self._prior = CallbackPrior(prior_option(prior), self.network.name, mean_only)
        self.loss_scale, self.n_data = loss_scale, None if n_data is None else count("n_data", n_data)
        self.tune = tuning_option(tune)
        if self._method == "linear":
            raise ValueError(
                "tune='linear' needs the gradient of the training loss, which L2M does not have: use 'marglik'"
            )
        self._counts = scaling == "dataset"  # whether to count batch sizes and data
        self._batches, self._resumed, self._decay = EffectiveBatchSize(), False, 1.0

    @property
    def _method(self) -> str | None:
        return None if self.tune is None else self.tune.method

    # -- the posterior -----------------------------------------------------------------------------------------------

    def fit_now(self, trainer: Trainer, module: LightningModule) -> LaplacePosterior:
        """Read the optimizers of a running or finished `fit`, with the module's current weights as the mean."""
        self._module = module
        self._count_step(trainer, module)  # another callback may call `fit_now` before this callback's hook runs
        if self._counts and not self._batches.steps:
            raise RuntimeError(
                f"L2MCallback {self.name!r} has seen no optimizer step: add it to the callbacks of the "
                "Trainer that trains, or call fit_l2m with n_data= and batch_size="
            )
        reshard(module)
        tuned = self.prior_precision is None and self._method not in (None, "auto")
        with warnings.catch_warnings():
            # The validation data choose the prior, so missing weight decay is fine
            if self._method == "auto" and trainer.val_dataloaders is not None:
                warnings.filterwarnings("ignore", "the optimizer has no weight decay")
            network = self.network_in(module)
            posterior = fit_l2m(
                network,
                trainer.optimizers,
                self.likelihood,
                n_data=self._batches.n_data,
                batch_size=self._batches.size,
                scaling=self.scaling,
                prior_precision=1.0 if tuned else self.prior_precision,
                prior=self._prior.read(network),
                loss_scale=self.loss_scale or self._batches.loss_scale or None,
                n_outputs=self._batches.n_targets or 1,
            )
        if not posterior.is_sharded:
            with fit_context(trainer, module):
                if self.tune is not None and self._needs_evidence(trainer):
                    processes, limit = Processes.current(), data.drawn_batches(trainer)
                    batches = data.exact_pass(trainer.train_dataloader, module, trainer, limit, processes)
                    posterior = posterior.with_log_likelihood(batches, processes).tune_prior(self.tune)
                posterior, _ = choose_on_validation(trainer, module, posterior, self.use, self.tune)
        self._posterior = posterior
        return posterior

    def _needs_evidence(self, trainer: Trainer) -> bool:
        """Whether the evidence tunes the prior; always False in a development run."""
        return self.tune is not None and self.tune.by_evidence and not is_dev_run(trainer)

    # -- before training ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._resumed = False
        kind = class_name(trainer.strategy, _UNREADABLE)
        if kind is not None:
            raise RuntimeError(
                f"L2MCallback cannot read the optimizer's state under {kind}: use strategy='ddp', or "
                "ModelParallelStrategy (FSDP2) for a network that needs sharding"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        network = self.network_in(pl_module)
        check_optimizers(trainer.optimizers, trainable(network))
        self._prior.read(network)  # raises an error if the file of the prior is missing
        if is_sharded(network) and self.predictive.is_linear:
            raise RuntimeError(f"predictive='glm' {NEEDS_WHOLE}: use predictive='bnn' or 'map'")
        if is_sharded(network) and self._method not in (None, "auto"):
            raise RuntimeError(f"tune={self._method!r} {NEEDS_WHOLE}: give prior_precision= or weight decay")
        if self._counts and self.loss_scale is None:
            default_loss_scale(self.likelihood, 1)
        if trainer.gradient_clip_val:
            warn(
                f"gradients are clipped at {trainer.gradient_clip_val:g}: in clipped steps, the optimizer's second "
                "moment, and with it L2M's precision, is too small"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self._resumed:
            self._batches = EffectiveBatchSize(self.n_data or 0, global_step=trainer.global_step)
        self._resumed = False
        self._decay = longest_memory(trainer.optimizers, trainable(self.network_in(pl_module)))
        self._count_step(trainer, pl_module)  # the checkpoint may have been written before this callback's hook
        if self._method == "grid":
            data.check_validation(trainer)
        if not self._counts and not self._needs_evidence(trainer):
            return
        loader = data.single(trainer.train_dataloader, "use scaling='paper', or LaplaceCallback and its fit_now")
        self._batches.n_data, size = self._count_data(trainer, loader), data.batch_size(loader)
        if self._counts and size is not None:
            fisher_factor(self._batches.n_data, size * data.replicas(trainer) * trainer.accumulate_grad_batches)

    def _count_data(self, trainer: Trainer, loader: Any) -> int:
        if self.n_data is not None and not (self._needs_evidence(trainer) and data.is_countable(loader)):
            return self.n_data
        counted = data.count_examples(trainer)
        if self.n_data not in (None, counted):
            raise ValueError(
                f"n_data is {self.n_data}, but tune={self._method!r} evaluates the likelihood of the training data, "
                f"which are {counted} examples: leave n_data= out, or give prior_precision= instead of tune="
            )
        return counted

    # -- during and after training -----------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if not self._counts:
            return
        pair = split_training_batch(trainer, pl_module, batch, self.needs_targets)
        x, y = (batch, None) if pair is None else pair
        if not self._batches.n_targets:
            self._batches.n_targets = max(1, sum(t[0].numel() for t in inputs.tensors(y)))
        if isinstance(y, Tensor):
            x = inputs.contained(self.network_in(pl_module), x, y)
        self._batches.add(inputs.batch_size(x) * data.replicas(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._count_step(trainer, pl_module)
        # Only now is the batch size in examples known for graphs, whose examples are nodes
        if self._batches.steps == 1 and data.replicas(trainer) == 1:
            fisher_factor(self._batches.n_data, self._batches.size)

    def _count_step(self, trainer: Trainer, module: LightningModule) -> None:
        # Lightning divides the loss by the number of accumulated batches, even if the epoch ends earlier.
        parts = trainer.accumulate_grad_batches if module.automatic_optimization else None
        self._batches.count_step(trainer.global_step, parts, self._decay)

    @property
    def needs_targets(self) -> bool:
        return self._counts and self.loss_scale is None

    def judge_loss(self, fit: LossFit, outputs: Tensor | None) -> None:
        """Learn the scale of the loss. The second moment contains its square, which `scaling="dataset"` divides out and
        `scaling="paper"` ignores."""
        if not self._counts:
            return
        super().judge_loss(fit, outputs)
        if fit.scale is not None:
            n_targets = self._batches.n_targets
            scale = recognise_scale(self.name, self.likelihood, fit.scale, self.loss_scale, n_targets)
            self._batches.loss_scale = scale or self._batches.loss_scale

    def _finish(self, trainer: Trainer, module: LightningModule, only_missing: bool) -> None:
        can_read = self._resumed and (self._batches.steps or not self._counts)
        if only_missing and (self._find_posterior() is not None or not can_read):
            return
        posterior = self.fit_now(trainer, module)
        numbers = {"n_data": posterior.n_data, "batch_size": self._batches.size} if self._counts else {}
        what = f"second-moment posterior over {posterior.subset.size} weights"
        report(trainer, self.name, what, {**numbers, **describe(posterior, self._needs_evidence(trainer))})
        self.store(trainer)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "batches": asdict(self._batches)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._batches, self._resumed = EffectiveBatchSize(**state_dict["batches"]), True


@dataclass
class EffectiveBatchSize:
    """Counts the batches and examples of each step, in plain numbers that a checkpoint can store."""

    n_data: int = 0  # N, the number of examples that batches are drawn from
    n_targets: int = 0  # number of targets of one example, over which a mean loss averages too
    loss_scale: float = 0.0  # the scale of the first batch's loss; 0 for the default
    global_step: int = 0
    waiting: int = 0  # batches since the last step
    waiting_inverse: float = 0.0  # Σ 1/b over the waiting batches
    steps: float = 0.0  # number of steps; `steps`, `squares` and `sums` decay like the optimizer's average
    squares: float = 0.0  # the sum of Σ wᵢ² over steps
    sums: float = 0.0  # the sum of (Σ wᵢ)² over steps

    @property
    def size(self) -> float:
        """`B`. If each step used one batch, `B` is the harmonic mean of the batch sizes."""
        if not self.steps:
            return 1.0
        squares, sums = self.squares / self.steps, self.sums / self.steps
        return 1 / (squares + (1 - sums) / self.n_data if self.n_data else squares)

    def add(self, examples: int) -> None:
        """Add a batch; `examples` counts those of all processes. The batch's mean loss is part of the next step."""
        self.waiting, self.waiting_inverse = self.waiting + 1, self.waiting_inverse + 1 / examples

    def count_step(self, global_step: int, parts: int | None, decay: float) -> None:
        """Count a step if the optimizer has made one. The step used the sum of the waiting batches' mean losses,
        divided by `parts` (default: the number of waiting batches). `decay` is the decay of the optimizer's average."""
        if global_step == self.global_step or not self.waiting:
            return
        parts = parts or self.waiting
        self.steps = decay * self.steps + 1
        self.squares = decay * self.squares + self.waiting_inverse / parts**2
        self.sums = decay * self.sums + (self.waiting / parts) ** 2
        self.global_step, self.waiting, self.waiting_inverse = global_step, 0, 0.0
