"""`PosteriorCallback`: everything that a callback does with a posterior once it has one.

It scores MAP and posterior side by side in `validate` and `test`, answers `predict` with `Prediction`s, and keeps the
posterior in checkpoints and in a file of its own. Subclasses say how the posterior is made.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_bayes.callbacks.checkpoints import Stored, beside, has_unaveraged_weights, put_posterior, survey
from lightning_bayes.callbacks.files import File, as_file, exists, load_posterior, posterior_file, save_posterior
from lightning_bayes.callbacks.launched import Mailbox, is_launched, module_of
from lightning_bayes.callbacks.module import network_of, refuse_variational, split_batch
from lightning_bayes.callbacks.scoring import ScoringCallback, scoring_callbacks
from lightning_bayes.callbacks.strategy import load_validation, on_device, run_last
from lightning_bayes.curvature.preserve import unwrap
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.posterior import GaussianPosterior, LaplacePosterior
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.predictive import Prediction
from lightning_bayes.predictive.predict import PREDICTIVES


class PosteriorCallback(ScoringCallback):
    """Use a posterior over the weights of any LightningModule."""

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
        save: bool | str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.likelihood = resolve(likelihood)
        check_word("predictive", predictive, PREDICTIVES)
        self.likelihood.choose_link(link)
        self.predictive, self.link, self.samples = predictive, link, samples
        self.network, self.ood, self.plots, self.seed = network, ood, plots, seed
        self.save = save
        self._posterior_path: File | None = None
        self._mailbox = Mailbox()
        self._has_trained = False  # in the `fit` that runs
        self._posterior: GaussianPosterior | None = None
        self._stored: dict[str, Any] | None = None  # of a checkpoint, until the module is there
        self._module: LightningModule | None = None
        self._users_step: Any = None  # while `predict` runs: the module's own `predict_step`, if it was an attribute
        self._swapped = False

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
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
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
            self._posterior = load_posterior(path, network, self.likelihood_if_own())

    def report(self, trainer: Trainer | None, what: str, numbers: dict[str, float]) -> None:
        """Say and log what was fitted."""
        text = ", ".join(f"{key} {value:.6g}" for key, value in numbers.items())
        rank_zero_info(f"{self.name}: {what}; {text}")
        if trainer is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            for logger in trainer.loggers:
                logger.log_metrics({f"{key}_{self.name}": v for key, v in numbers.items()}, step=trainer.global_step)
                logger.save()

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
        callbacks = scoring_callbacks(trainer)
        if callbacks[0] is not self:
            return

        def predict_step(batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
            x, _ = split_batch(pl_module, batch, predicting=True)
            found = {callback.name: callback.predict(x) for callback in callbacks}
            return found if len(found) > 1 else next(iter(found.values()))

        self._users_step, self._swapped = pl_module.__dict__.get("predict_step"), True
        pl_module.predict_step = predict_step  # type: ignore[method-assign]

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back_predict_step(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back_predict_step(pl_module)

    def _give_back_predict_step(self, module: LightningModule) -> None:
        if not self._swapped:
            return
        self._swapped = False
        del module.predict_step
        if self._users_step is not None:
            module.predict_step, self._users_step = self._users_step, None  # type: ignore[method-assign]


def is_of_weights(posterior: GaussianPosterior) -> bool:
    """Whether the network still has the weights that the posterior was fitted to."""
    try:
        posterior.check_weights()
    except PosteriorError:
        return False
    return True


def check_word(argument: str, word: Any, known: tuple[Any, ...]) -> None:
    """Refuse an unknown word when the callback is made, not when training has ended."""
    if word not in known:
        raise ValueError(f"unknown {argument} {word!r}: use one of {', '.join(map(repr, known))}")


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
