"""The exact pass over training data, and the data of a Trainer or data module.

A Trainer's own loader shuffles, and under DDP it pads or cuts the data to equal shares. In an exact pass every example
counts once on any number of processes: process `r` of `W` takes the examples `r, r + W, …` in the dataset's order,
without padding or dropping.

Outside of a Trainer's run, a copy of the data module is set up as a Trainer would do it, so the user's object does not
change. As in a run, the transfer hooks of the data module replace those of the module.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from lightning_bayes.network import DataError, Processes, inputs
from lightning_bayes.network.adapters import is_graph, labelled_nodes
from lightning_bayes.network.borrowed import borrowed, preserved_rng
from lightning_bayes.network.loaders import check_loader, reads_once
from lightning_bayes.network.messages import inform, warn
from lightning_bayes.options.fit import data_option
from lightning_bayes.trainer.module import ReplacedMethod, split_batch
from lightning_bayes.trainer.private import (
    TRANSFER_HOOKS,
    attached,
    class_name,
    convert_input,
    is_default_data_hook,
    is_dev_run,
    transfer_batch,
    users_sampler,
)

_NO_VALIDATION = (
    "tune='grid' needs validation data: give the module a validation_step and the Trainer a val_dataloader, or use "
    "tune='marglik'"
)


@dataclass
class ExactPass:
    """The `(x, y)` batches of this process, on the module's device. `probe` is the same on all processes."""

    loader: Any
    probe_loader: Any
    module: LightningModule
    trainer: Trainer | None
    stage: Literal["train", "val"] = "train"
    n_examples: int | None = None  # number of examples over all processes; None if unknown

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.loader:
            if self.trainer is not None and self.trainer.received_sigterm:
                raise SIGTERMException
            yield self._prepare(batch)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def reads_once(self) -> bool:
        return reads_once(self.loader)

    def probe(self) -> Any:
        """A batch with the first examples of the dataset, for tracing the network; None if the dataset cannot be
        indexed."""
        return None if self.probe_loader is None else self._prepare(next(iter(self.probe_loader)))

    def is_random(self) -> bool:
        """Whether the first examples change when they are read again, as augmented examples do."""
        if self.probe_loader is None:
            return False
        with borrowed(self.module, ()):
            first = self.probe()
            return any(differ(first, self.probe()) for _ in range(3))

    def _prepare(self, batch: Any) -> tuple[Any, Any]:
        return split_batch(self.module, to_module(batch, self.module, self.trainer), stage=self.stage)


def exact_pass(
    loader: Any,
    module: LightningModule,
    trainer: Trainer | None,
    limit: int | float | None = None,
    processes: Processes | None = None,
    max_batches: int | None = None,
) -> ExactPass:
    """One ordered pass over the dataset of `loader`, shared by `processes`. It ends after `limit` batches (or, if
    `limit` is a fraction, after that share of all batches), or after `max_batches`."""
    loader = single(loader)
    processes = processes or Processes()
    if not _is_indexed(loader):
        if processes.size > 1:
            warn(
                "the training data cannot be indexed, so each process passes over its own loader: examples that "
                "several loaders return count several times"
            )
        limits = [number for number in (limit, max_batches) if isinstance(number, int)]
        return ExactPass(_FirstBatches(loader, min(limits)) if limits else loader, None, module, trainer)
    size = batch_size(loader)  # None if the dataset itself returns whole batches
    indices = _indices(loader)
    for number in (limit, max_batches):
        indices = indices[: _examples_within(number, len(indices), size or 1)]
    if not indices:
        raise DataError("the data are empty: at least one example is needed")
    own_indices = indices[processes.rank :: processes.size]
    probe = _rebuild(loader, indices[:1] if size is None else indices[:3], size and 3)
    n_examples = None if size is None else len(indices)
    return ExactPass(_rebuild(loader, own_indices, size), probe, module, trainer, n_examples=n_examples)


def validation_pass(trainer: Trainer | None, module: LightningModule, loaders: Any = None) -> ExactPass:
    """All batches of the first validation dataloader, on every process, so that all processes choose the same prior.
    `loaders` defaults to the Trainer's validation dataloaders."""
    loader = first_loader(trainer.val_dataloaders if loaders is None and trainer is not None else loaders)
    if loader is None:
        raise RuntimeError(_NO_VALIDATION)
    limit = None if trainer is None else trainer.limit_val_batches
    return replace(exact_pass(loader, module, trainer, limit), stage="val")


def check_validation(trainer: Trainer) -> None:
    """Before training: raise if there will be no validation data for tuning."""
    loaders = trainer.val_dataloaders  # None before Lightning has loaded them
    if not trainer.enable_validation or (loaders is not None and first_loader(loaders) is None):
        raise RuntimeError(_NO_VALIDATION)


def count_examples(trainer: Trainer, instead: str = "pass n_data=") -> int:
    """The number of examples that training draws from, over all processes. If it is unknown, raise an error that says
    what to do `instead`."""
    loader = single(trainer.train_dataloader, instead)
    if not _is_indexed(loader):
        raise DataError(f"the training data cannot be counted, because they have no length: {instead}")
    size = batch_size(loader)
    if size is None:
        raise DataError(f"the training data cannot be counted, because the dataset gives whole batches: {instead}")
    batches = drawn_batches(trainer)
    return _count_elements(loader, _indices(loader)[: None if batches is None else size * batches])


def drawn_batches(trainer: Trainer, loader: Any = None) -> int | None:
    """The number of leading batches that training draws from; None if training draws from all of them, as with shuffled
    data even under a limit. `loader` defaults to the Trainer's training dataloader."""
    loader = single(trainer.train_dataloader if loader is None else loader)
    # Under `fast_dev_run`, a limit of one batch would make this batch the whole dataset.
    limit = None if is_dev_run(trainer) else trainer.limit_train_batches
    sampler = sampler_of(loader)
    in_order = isinstance(sampler, SequentialSampler) or getattr(sampler, "shuffle", True) is False
    if limit is None or _is_whole(limit) or not in_order:
        return None
    return replicas(trainer) * (limit if isinstance(limit, int) else int(limit * len(loader)))


def passed_batches(trainer: Trainer, loader: Any) -> int | float | None:
    """The number (or fraction) of leading training batches that a fit passes over: all batches that training draws
    from. For a stream, and under `fast_dev_run`, it is the number of batches in one epoch."""
    if is_dev_run(trainer) or not _is_indexed(single(loader)):
        return trainer.limit_train_batches
    return drawn_batches(trainer, loader)


def replicas(trainer: Trainer) -> int:
    """The number of processes that see different data; tensor-parallel processes see the same data."""
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)


def is_countable(loader: Any) -> bool:
    loader = single(loader)
    return _is_indexed(loader) and batch_size(loader) is not None


def is_sized(loader: Any) -> bool:
    """Whether the number of batches is known."""
    try:
        len(loader)
    except TypeError:
        return False
    return True


def differ(a: Any, b: Any) -> bool:
    pairs = zip(inputs.tensors(a), inputs.tensors(b), strict=False)
    return any(x.shape != y.shape or not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def to_module(batch: Any, module: LightningModule, trainer: Trainer | None) -> Any:
    """Convert and transfer a batch as the Trainer would, through the transfer hooks."""
    if trainer is not None:
        batch = convert_input(trainer, batch)
    return transfer_batch(module, batch)


_WITH_FIT_NOW = "train without this callback, then call its fit_now(trainer, module, dataloader) with the one to use"


def single(loader: Any, instead: str = _WITH_FIT_NOW) -> Any:
    """The only dataloader; raise an error that says what to do `instead` if there are several."""
    loaders = as_list(getattr(loader, "flattened", loader))  # a CombinedLoader of Lightning has that attribute
    if len(loaders) != 1:
        raise DataError(
            f"there are {len(loaders)} training dataloaders, but a posterior needs one that has each example once: "
            f"{instead}"
        )
    return loaders[0]


def as_list(loaders: Any) -> list[Any]:
    """The dataloaders (or batches) of a Trainer, which may be one, a sequence or a dict."""
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def first_loader(loaders: Any) -> Any:
    """The first dataloader, or None if there is none, for example because a hook returned an empty list."""
    while isinstance(loaders, (list, tuple, dict)):
        loaders = next(iter(as_list(loaders)), None)
    return loaders


def batch_size(loader: Any) -> int | None:
    """Examples per batch; None if the dataset itself returns batches."""
    if getattr(loader, "batch_sampler", None) is None:
        return None
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1


def sampler_of(loader: Any) -> Any:
    """The sampler of examples, or the batch sampler itself if it has no sampler of examples."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or getattr(loader, "batch_size", None) is not None:
        return getattr(loader, "sampler", None)
    return getattr(batches, "sampler", batches)


def _is_indexed(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _indices(loader: DataLoader[Any]) -> list[int]:
    """The examples that the loader can return, in the dataset's order."""
    sampler = users_sampler(sampler_of(loader))
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(int(i) for i in sampler.indices)
    if not isinstance(sampler, (RandomSampler, SequentialSampler, DistributedSampler)):
        warn(
            f"the training loader uses a {type(sampler).__name__}, but the posterior counts every "
            "example of the dataset once: to leave some out, give the loader a Subset"
        )
    return list(range(len(loader.dataset)))  # type: ignore[arg-type]


def _count_elements(loader: DataLoader[Any], indices: list[int]) -> int:
    """Count the dataset's elements; for graphs with targets on nodes, count labelled nodes."""
    if not indices or "torch_geometric" not in sys.modules:
        return len(indices)
    with preserved_rng():  # a transform may draw random numbers
        if not is_graph(loader.dataset[indices[0]]):
            return len(indices)
        labelled = [labelled_nodes(loader.dataset[i], "train") for i in indices]
    return sum(1 if nodes is None else len(nodes) for nodes in labelled)


def _rebuild(loader: DataLoader[Any], indices: list[int], batch_size: int | None) -> DataLoader[Any]:
    workers: dict[str, Any] = {"num_workers": min(loader.num_workers, len(indices))}
    if workers["num_workers"]:
        workers.update(worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context)
    return DataLoader(
        Subset(loader.dataset, indices),
        batch_size=batch_size,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        **workers,
    )


def _examples_within(limit: int | float | None, n: int, size: int) -> int | None:
    """The number of examples that a limit allows. An integer limit is a number of batches, a fraction is a share of the
    batches."""
    if limit is None or _is_whole(limit):
        return None
    return size * (limit if isinstance(limit, int) else int(limit * math.ceil(n / size)))


def _is_whole(limit: int | float) -> bool:
    return limit == 1.0 and isinstance(limit, float)  # 1 is one batch


@dataclass
class _FirstBatches:
    """The first batches of a loader without an index."""

    loader: Any
    batches: int

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.batches)

    @property
    def reads_once(self) -> bool:
        return reads_once(self.loader)


# -- a data module outside of a Trainer's run --------------------------------------------------------------------------


def is_datamodule(thing: Any) -> bool:
    """Whether `thing` is a data module of `lightning` or `pytorch_lightning`. A LightningModule has the same hooks but
    is not a data module."""
    return hasattr(thing, "prepare_data") and hasattr(thing, "setup") and not isinstance(thing, (nn.Module, type))


@contextmanager
def loaders_of(owner: Any, module: LightningModule, trainer: Trainer | None) -> Iterator[tuple[Any, Any, Any]]:
    """Set up a copy of the data module, or of the module itself, for a fit. Yields the copy, its training loader, and
    its validation loaders or None."""
    if is_default_data_hook(owner, "train_dataloader"):
        raise DataError(
            f"{type(owner).__name__} has no train_dataloader, and a posterior needs the training data: give it one, or "
            "pass a data module or a DataLoader"
        )
    processes = Processes.current()
    with ExitStack() as stack:
        stack.enter_context(preserved_rng(module.device))
        copied = copy.copy(owner)  # `setup` may set attributes on the copy
        if isinstance(copied, nn.Module):  # the copy must not share the dicts of its layers
            vars(copied).update({name: dict(vars(copied)[name]) for name in ("_modules", "_parameters", "_buffers")})
        for thing in (module, copied):
            stack.enter_context(attached(thing, trainer))
        if not _is_set_up(owner):
            with processes.raising_together():  # one process prepares the data before the others read them
                if processes.rank == 0:
                    copied.prepare_data()
            stack.callback(copied.teardown, "fit")
            with processes.raising_together():
                copied.setup("fit")
        for name in TRANSFER_HOOKS:
            method = ReplacedMethod(module, name)
            stack.callback(method.remove)
            method.install(method.original if is_default_data_hook(copied, name) else getattr(copied, name))
        validation = None if is_default_data_hook(copied, "val_dataloader") else copied.val_dataloader()
        yield copied, copied.train_dataloader(), None if first_loader(validation) is None else validation


def _is_set_up(owner: Any) -> bool:
    """Whether a data module is still set up from training. Setting it up again could split the data differently, so
    that the posterior would be tuned on training examples."""
    own_trainer = None if isinstance(owner, nn.Module) else getattr(owner, "trainer", None)
    if own_trainer is None or not own_trainer.global_step:
        return False
    if not is_default_data_hook(owner, "teardown"):
        warn(
            f"{type(owner).__name__} was torn down after training and is set up again: fix the seed of a random split, "
            "or else the posterior is tuned on training examples, or pass the training and validation loaders"
        )
        return False
    if own_trainer.train_dataloader is not None:
        return True
    try:  # the Trainer has run `test` since, and may have trained with another data module's data
        owner.train_dataloader()
    except (AttributeError, TypeError):  # `setup("fit")` has not run
        return False
    return True


def data_processes(trainer: Trainer | None) -> Processes:
    """The processes that see different data. Tensor-parallel processes see the same data and count as one."""
    strategy: Any = None if trainer is None else trainer.strategy
    if class_name(strategy, {"ModelParallelStrategy"}) is None:
        return Processes.current()
    mesh = strategy.device_mesh["data_parallel"]
    return Processes(mesh.get_local_rank(), mesh.size(), mesh.get_group())


# -- the data of a fit after training ----------------------------------------------------------------------------------


_OPEN = (
    "the training data have no length, and training did not reach their end: the posterior uses {} batches, the "
    "number in an epoch; FitData(max_batches=…) sets another number"
)
_WHOLE = (
    "the fit uses all training data, although limit_train_batches={} ends an epoch earlier: limit it with "
    "data=FitData(max_batches=…)"
)
_RANDOM = (
    "the data differ each time they are read, as augmented data do, so the posterior depends on the random seed: pass "
    "data= the same examples without augmentation (a DataLoader, or the name of a method of the data module or module "
    "that returns one)"
)


@dataclass
class Epoch:
    """Progress through a training loader that has no length. A checkpoint stores it."""

    batches: int = 0  # number of batches in the longest epoch so far
    has_ended: bool = False  # whether an epoch has exhausted the data

    def count(self, batch_idx: int, is_last: bool) -> None:
        self.batches, self.has_ended = max(self.batches, batch_idx + 1), self.has_ended or is_last

    def is_open(self, loader: Any) -> bool:
        """Whether the data may be endless, as far as training knows."""
        return self.batches > 0 and not self.has_ended and not is_sized(single(loader))


class FitLoader:
    """The data of a fit after training, as given by `data=`: None for the training data, a loader, or the name of a
    method or attribute that has one."""

    def __init__(self, data: Any) -> None:
        option = data_option(data)
        self.source, self._max_batches = option.loader, option.max_batches
        if self.source is not None and not isinstance(self.source, str):
            check_loader(self.source, "data", "batches")
        self.epoch, self._warned_random, self._reported_whole = Epoch(), False, False

    def check_training_data(self, trainer: Trainer, check: Callable[[Any], None] = lambda loader: None) -> None:
        """If the fit uses the training data, raise an error for several dataloaders, and run `check` on a single
        dataloader."""
        if self.source is None:
            check(single(trainer.train_dataloader))

    def loader(self, train: Any, *owners: Any) -> Any:
        """The loader to use: `train` by default, the given loader, or the named one of the first of `owners` (data
        module and module) that has this name."""
        if not isinstance(self.source, str):
            return train if self.source is None else self.source
        loader = getattr(self.owner(*owners), self.source)
        return loader() if callable(loader) else loader

    def owner(self, *owners: Any) -> Any:
        """The first of `owners` that has an attribute with the given name; raise if none has it. Owners may be None."""
        existing = [owner for owner in owners if owner is not None]
        for owner in existing:
            if not isinstance(self.source, str) or hasattr(owner, self.source):
                return owner
        kinds = " or ".join(type(owner).__name__ for owner in existing)
        raise DataError(f"data={self.source!r} is neither a DataLoader nor a method or attribute of {kinds}")

    def exact_pass(
        self, trainer: Trainer | None, module: LightningModule, loader: Any, alone: bool = False
    ) -> ExactPass:
        """This process's share of the data, or all data if the process works `alone`."""
        limit = None
        if trainer is not None and self.source is None:
            limit = passed_batches(trainer, loader)
            if self._max_batches is None and not isinstance(limit, int) and self.epoch.is_open(loader):
                limit = self.epoch.batches
                warn(_OPEN.format(limit))
        processes = Processes() if alone else data_processes(trainer)
        data = exact_pass(loader, module, trainer, limit, processes, self._max_batches)
        if trainer is not None and limit is None and self.source is None and self._max_batches is None:
            self._report_whole(trainer, single(loader))
        if not alone and not self._warned_random and data.is_random():
            self._warned_random = True
            warn(_RANDOM)
        return data

    def _report_whole(self, trainer: Trainer, loader: Any) -> None:
        """Report once that the fit uses more batches than an epoch of training."""
        limit = trainer.limit_train_batches
        if self._reported_whole or not is_sized(loader):
            return
        if (limit if isinstance(limit, int) else int(limit * len(loader))) < len(loader):
            self._reported_whole = True
            inform(_WHOLE.format(limit))
