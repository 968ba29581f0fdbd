"""What a callback's fit is made from: its data (`FitLoader`, `Epoch`) and its prior (`CallbackPrior`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.checks import check_loader
from lightning_bayes.options.network import data_option
from lightning_bayes.options.prior import Prior
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.files import read, read_any
from lightning_bayes.posterior.prior import GaussianPrior
from lightning_bayes.trainer.data import ExactPass, exact_pass, is_sized, owner_among, owner_of, passed_batches, single
from lightning_bayes.trainer.strategy import data_processes

_OPEN = (
    "the training data have no length, and training has not reached their end: the posterior uses {} batches, as many "
    "as an epoch took; FitData(max_batches=…) sets another number"
)
_WHOLE = (
    "the fit takes all training data, although limit_train_batches={} ends an epoch earlier: limit it with "
    "data=FitData(max_batches=…)"
)
_RANDOM = (
    "the data differ each time they are read, as augmented data do, so the posterior depends on the random seed: pass "
    "data= the same examples without augmentation (a DataLoader, or the name of a method of the data module or module "
    "that returns one)"
)


@dataclass
class Epoch:
    """How far training has read data without a length. A checkpoint stores it."""

    batches: int = 0  # of the longest epoch so far
    has_ended: bool = False  # whether an epoch has exhausted the data

    def count(self, batch_idx: int, is_last: bool) -> None:
        self.batches, self.has_ended = max(self.batches, batch_idx + 1), self.has_ended or is_last

    def is_open(self, loader: Any) -> bool:
        """Whether the data may be endless, as far as training knows."""
        return self.batches > 0 and not self.has_ended and not is_sized(single(loader))


class FitLoader:
    """The data of a fit after training, as `data=` says: the training data, a loader, or the name of one."""

    def __init__(self, data: Any) -> None:
        option = data_option(data)
        self.source, self._max_batches = option.loader, option.max_batches
        if self.source is not None and not isinstance(self.source, str):
            check_loader(self.source, "data", "batches")
        self.epoch, self._warned_random, self._reported_whole = Epoch(), False, False

    def check_name(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise for a name that neither the data module nor the module has."""
        if isinstance(self.source, str):
            owner_of(trainer, module, self.source)

    def check_training_data(self, trainer: Trainer, check: Callable[[Any], None] = lambda loader: None) -> None:
        """Raise for several training dataloaders, and run `check` on the one, if the fit uses the training data."""
        if self.source is None:
            check(single(trainer.train_dataloader))

    def loader(self, trainer: Trainer, module: LightningModule) -> Any:
        if self.source is None:
            return trainer.train_dataloader
        owner = owner_of(trainer, module, self.source) if isinstance(self.source, str) else None
        return self._from(owner)

    def loader_of(self, owner: Any, module: LightningModule, train: Any) -> Any:
        """Outside of a Trainer's run: the loader of a data module, whose training data are `train`."""
        if self.source is None:
            return train
        return self._from(owner_among([owner, module], self.source) if isinstance(self.source, str) else None)

    def _from(self, owner: Any) -> Any:
        if not isinstance(self.source, str):
            return self.source
        loader = getattr(owner, self.source)
        return loader() if callable(loader) else loader

    def exact_pass(
        self, trainer: Trainer | None, module: LightningModule, loader: Any, alone: bool = False
    ) -> ExactPass:
        """This process's share of the data, or all of them if it works `alone`."""
        limit = None
        if trainer is not None and self.source is None:
            limit = passed_batches(trainer, loader)
            if self._max_batches is None and not isinstance(limit, int) and self.epoch.is_open(loader):
                limit = self.epoch.batches
                rank_zero_warn(_OPEN.format(limit))
        processes = Processes() if alone else data_processes(trainer)
        data = exact_pass(loader, module, trainer, limit, processes, self._max_batches)
        if trainer is not None and limit is None:
            self._report_whole(trainer, loader)
        if not alone and not self._warned_random and data.is_random():
            self._warned_random = True
            rank_zero_warn(_RANDOM)
        return data

    def _report_whole(self, trainer: Trainer, loader: Any) -> None:
        """Say once that the fit takes more batches than an epoch of training."""
        limit, loader = trainer.limit_train_batches, single(loader)
        if self._reported_whole or self.source is not None or self._max_batches is not None or not is_sized(loader):
            return
        if (limit if isinstance(limit, int) else int(limit * len(loader))) < len(loader):
            self._reported_whole = True
            rank_zero_info(_WHOLE.format(limit))


class CallbackPrior:
    """The prior of a callback, whose mean or posterior may be files. They are read when they are first needed.

    Args:
        prior: its state dict may be that of the module or of its network.
        within: the name of the network in the module, if it is a submodule.
        check: raises for a prior that does not go with the other settings.
    """

    def __init__(self, prior: Prior, within: str | None, check: Callable[[Prior], Any]) -> None:
        # A state dict holds the very weights that are about to train.
        self.prior, self._within, self._check = replace(prior, mean=_copied(prior.mean)), within, check
        check(self.prior)

    def read(self, network: nn.Module) -> Prior:
        """The prior for this network, with its files read."""
        prior = self.prior
        if isinstance(prior.posterior, (str, PathLike)):
            # The network may have other weights than the posterior was fitted to.
            prior = replace(prior, posterior=GaussianPosterior.from_state_dict(network, read(prior.posterior)))
        if isinstance(prior.mean, (str, PathLike)):
            saved = read_any(prior.mean, "prior mean")
            prior = replace(prior, mean=saved.get("state_dict", saved) if isinstance(saved, Mapping) else saved)
        if prior is not self.prior:
            self._check(prior)
            self.prior = prior
        if not isinstance(prior.mean, Mapping):
            return prior
        weights = {name: self._weight(name) for name, _ in unwrap(network).named_parameters()}
        return replace(prior, mean={name: weight for name, weight in weights.items() if weight is not None})

    def means(self, network: nn.Module, subset: Subset) -> dict[str, Tensor]:
        """`m` of each parameter; empty if it is zero."""
        m = GaussianPrior.of(self.read(network), subset).mean
        if m is None:
            return {}
        parts = m.split([shape.numel() for shape in subset.shapes])
        return {name: part.reshape(s) for name, part, s in zip(subset.names, parts, subset.shapes, strict=True)}

    def _weight(self, name: str) -> Tensor | None:
        """By its name in the network, or in the module around it."""
        return self.prior.mean.get(name, self.prior.mean.get(f"{self._within}.{name}"))


def _copied(weights: Any) -> Any:
    if isinstance(weights, Mapping):
        return {name: _copied(weight) for name, weight in weights.items()}
    return weights.detach().clone() if isinstance(weights, Tensor) else weights
