"""The data of a post-hoc fit: those of training, or others that the user names, as far as they go.

The prior of a callback, `prior=` and `prior_mean=`: objects, or, for a configuration file, paths to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.arguments import count, text
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.checks import check_loader
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.files import read, read_any
from lightning_bayes.posterior.prior import Prior, check_prior
from lightning_bayes.trainer.data import ExactPass, exact_pass, is_sized, owner_among, owner_of, passed_batches, single
from lightning_bayes.trainer.strategy import data_processes

_OPEN = (
    "the training data have no length, and training has not seen their end: the posterior is that of {} batches, as "
    "many as training has taken in an epoch; max_batches= sets another number"
)
_WHOLE = (
    "the posterior's pass takes all training data, although limit_train_batches={} ends an epoch before: max_batches= "
    "or data= limits it"
)
_RANDOM = (
    "the data differ each time they are read, as augmented data do, so that the posterior depends on the random seed: "
    "give data= the same examples without augmentation (a DataLoader, or the name of a method of the data module or "
    "module that returns one)"
)


@dataclass
class Epoch:
    """What training has seen of data that do not say how many they are; plain numbers, which a checkpoint holds."""

    batches: int = 0  # of the longest epoch so far
    has_ended: bool = False  # whether the data of one have come to their end

    def count(self, batch_idx: int, is_last: bool) -> None:
        self.batches, self.has_ended = max(self.batches, batch_idx + 1), self.has_ended or is_last

    def is_open(self, loader: Any) -> bool:
        """Whether nothing is known of the data's end, which may never come."""
        return self.batches > 0 and not self.has_ended and not is_sized(single(loader))


class FitData:
    """`data` is None for the training data, a loader, or the name of a method that returns one."""

    def __init__(self, data: Any, max_batches: int | None) -> None:
        if isinstance(data, str):
            text("data", data, "a loader, or the name of a method that returns one")
        elif data is not None:
            check_loader(data, "data", "batches")
        if max_batches is not None:
            count("max_batches", max_batches)
        self._data, self._max_batches = data, max_batches
        self.epoch, self._warned, self._said_whole = Epoch(), False, False

    def check_name(self, trainer: Trainer, module: LightningModule) -> None:
        """An error for a name that neither the data module nor the module knows."""
        if isinstance(self._data, str):
            owner_of(trainer, module, self._data)

    def check_training_data(self, trainer: Trainer, check: Callable[[Any], None] = lambda loader: None) -> None:
        """If those are the data: an error for several training dataloaders, and whatever `check` says of the one; none
        is loaded before training starts."""
        if self._data is None:
            check(single(trainer.train_dataloader))

    def loader(self, trainer: Trainer, module: LightningModule) -> Any:
        if self._data is None:
            return trainer.train_dataloader
        if not isinstance(self._data, str):
            return self._data
        loader = getattr(owner_of(trainer, module, self._data), self._data)
        return loader() if callable(loader) else loader

    def loader_of(self, owner: Any, module: LightningModule, train: Any) -> Any:
        """Outside of a Trainer's run: that of a data module, or `train`, which is its training data."""
        if not isinstance(self._data, str):
            return train if self._data is None else self._data
        loader = getattr(owner_among([owner, module], self._data), self._data)
        return loader() if callable(loader) else loader

    def exact_pass(
        self, trainer: Trainer | None, module: LightningModule, loader: Any, alone: bool = False
    ) -> ExactPass:
        """As far as `max_batches`, or what training has seen, goes: this process's share, or, `alone`, all of it."""
        limit = None
        if trainer is not None and self._data is None:
            limit = passed_batches(trainer, loader)
            if self._max_batches is None and not isinstance(limit, int) and self.epoch.is_open(loader):
                limit = self.epoch.batches
                rank_zero_warn(_OPEN.format(limit))
        processes = Processes() if alone else data_processes(trainer)
        data = exact_pass(loader, module, trainer, limit, processes, self._max_batches)
        if trainer is not None and limit is None:
            self._say_whole(trainer, loader)
        if not alone and not self._warned and data.is_random():
            self._warned = True
            rank_zero_warn(_RANDOM)
        return data

    def _say_whole(self, trainer: Trainer, loader: Any) -> None:
        """Once, if the pass takes more batches than an epoch of training."""
        limit, loader = trainer.limit_train_batches, single(loader)
        if self._said_whole or self._data is not None or self._max_batches is not None or not is_sized(loader):
            return
        if (limit if isinstance(limit, int) else int(limit * len(loader))) < len(loader):
            self._said_whole = True
            rank_zero_info(_WHOLE.format(limit))


class GivenPrior:
    """What is wrong for any network is refused when it is made; files are read when they are first needed.

    Args:
        prior: a posterior, or the file of one.
        prior_mean: weights, flat or as the state dict of the module or its network; or a file of one of these, such as
            a checkpoint.
        within: the submodule of the LightningModule that is the network, if it is not the module itself.
        others: of `check_prior`.
    """

    def __init__(self, prior: Any, prior_mean: Any, within: str | None, **others: Any) -> None:
        self._prior, self._within, self._others = prior, within, others
        self._mean = _copied(prior_mean)  # a state dict has the very weights that are about to train
        if prior is not None and prior_mean is not None:
            check_prior(prior, prior_mean)
        self._check()

    @property
    def is_posterior(self) -> bool:
        return self._prior is not None

    @property
    def has_mean(self) -> bool:
        return self._mean is not None

    def words(self, network: nn.Module) -> dict[str, Any]:
        """The arguments of `fit_laplace`, for this network."""
        if isinstance(self._prior, (str, PathLike)):
            # The network may have other weights than the posterior was fitted to.
            self._prior = GaussianPosterior.from_state_dict(network, read(self._prior))
        if isinstance(self._mean, (str, PathLike)):
            saved = read_any(self._mean, "prior mean")
            self._mean = saved.get("state_dict", saved) if isinstance(saved, Mapping) else saved
        self._check()
        mean = self._mean
        if isinstance(mean, Mapping):
            mean = {name: self._weight(name) for name, _ in unwrap(network).named_parameters()}
            mean = {name: weight for name, weight in mean.items() if weight is not None}
        return {"prior": self._prior, "prior_mean": mean}

    def means(self, network: nn.Module, subset: Subset) -> dict[str, Tensor]:
        """`m` of each parameter; none where it is zero."""
        m = Prior.of(None, self.words(network)["prior_mean"], subset).mean
        if m is None:
            return {}
        parts = m.split([shape.numel() for shape in subset.shapes])
        return {name: part.reshape(s) for name, part, s in zip(subset.names, parts, subset.shapes, strict=True)}

    def _weight(self, name: str) -> Tensor | None:
        """By its name in the network, or in the module around it."""
        assert isinstance(self._mean, Mapping)
        return self._mean.get(name, self._mean.get(f"{self._within}.{name}"))

    def _check(self) -> None:
        prior, mean = (None if isinstance(given, (str, PathLike)) else given for given in (self._prior, self._mean))
        check_prior(prior, mean, **self._others)


def _copied(weights: Any) -> Any:
    if isinstance(weights, Mapping):
        return {name: _copied(weight) for name, weight in weights.items()}
    return weights.detach().clone() if isinstance(weights, Tensor) else weights
