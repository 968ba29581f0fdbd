"""A Laplace fit of a network whose weights are sharded over processes (`ModelParallelStrategy`, FSDP2).

| words                                                                    | what each process holds                |
|--------------------------------------------------------------------------|----------------------------------------|
| `subset="last_layer"`, `structure="full"`, "kron" or "diag"              | the last layer and its posterior, whole |
| `structure="diag"` of all weights, `curvature="fisher_mc"` or             | the posterior of its own weights       |
| "empirical_fisher"                                                       |                                        |

What else there is needs the whole network on every process. It is refused by name, before training.

A sharded network runs on all processes or on none. So all of them go through their data in step, and one that has come
to the end of its share runs along until the last one has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_bayes.curvature.sharded_diagonal import CURVATURES, ShardedDiagonalSum
from lightning_bayes.network import DataError, NetworkError, Processes, inputs
from lightning_bayes.network.gathered_layer import GatheredLayer, LayerWatch, watching
from lightning_bayes.network.output import output_of, unwrap_output
from lightning_bayes.posterior import ShardedPosterior
from lightning_bayes.trainer.data import ExactPass, is_countable
from lightning_bayes.trainer.private import class_name
from lightning_bayes.trainer.strategy import refuse_sharded

if TYPE_CHECKING:
    from lightning_bayes.callbacks.laplace import LaplaceCallback

STRUCTURES = ("full", "kron", "diag")
_SHARDED = "ModelParallelStrategy"
_WAY_OUT = (
    "use strategy='ddp' or a single device, or subset='last_layer', or structure='diag' with curvature='fisher_mc' or "
    "'empirical_fisher'"
)


def check_sharded(callback: LaplaceCallback, trainer: Trainer) -> None:
    """Refuse what cannot run under the Trainer's strategy."""
    who = type(callback).__name__
    if class_name(trainer.strategy, {_SHARDED}) is None or not callback.fits_shards:
        refuse_sharded(trainer, who)
    else:
        check_sharded_words(callback)


def check_sharded_words(callback: LaplaceCallback) -> None:
    """Refuse what cannot run where weights are sharded over processes."""
    who = type(callback).__name__
    if callback.subset != "last_layer" and not is_diagonal(callback):
        raise RuntimeError(
            f"{who} needs every process to hold the whole network, which {_SHARDED} does not: {_WAY_OUT}"
        )
    refused = {
        f"structure={callback.structure!r}": callback.structure not in STRUCTURES,
        "gp_points=": callback.points.points != 0,
        "iterate=True": callback.iterate,
        "weights='best'": callback.weights == "best",
        "prior=": callback.has_prior,
    }
    if is_diagonal(callback):
        refused |= {
            "predictive='glm' (not 'bnn' or 'map')": callback.predictive not in ("bnn", "map"),
            f"tune={callback.tune!r}": callback.tune not in (None, "auto"),
            "temperature=": callback.temperature != 1,
            "prior_mean=": callback.has_prior_mean,
        }
    for words in [words for words, is_refused in refused.items() if is_refused]:
        raise RuntimeError(
            f"{who} with {words} needs every process to hold the whole network, which {_SHARDED} does not: leave it "
            "out, or use strategy='ddp' or a single device"
        )


def is_diagonal(callback: LaplaceCallback) -> bool:
    """Whether it fits a diagonal over all weights that can stay in shards."""
    return (callback.subset, callback.structure) == ("all", "diag") and callback.curvature in CURVATURES


def fit_diagonal(
    callback: LaplaceCallback, network: nn.Module, data: ExactPass, spare: tuple[Any, Tensor], processes: Processes
) -> ShardedPosterior:
    """The diagonal posterior over all weights, in shards; on all processes."""
    words = (callback.curvature, callback.mc_samples, callback.seed, processes)
    total = ShardedDiagonalSum(network, callback.likelihood, *words)
    for batch in in_step(data, processes, inputs.device_of(network)):
        total.add(*(spare if batch is None else batch), counts=batch is not None)
    return ShardedPosterior.from_curvature(network, total.finish(), callback.prior_precision)


def check_sharded_data(loader: Any) -> None:
    if not is_countable(loader):
        raise DataError(
            f"under {_SHARDED} all processes go through the data in step, but these have no length: use a dataset with "
            "a length, or strategy='ddp'"
        )


def in_step(data: ExactPass, processes: Processes, device: torch.device) -> Iterator[tuple[Any, Tensor] | None]:
    """The batches of a process's share, and None while others have some left."""
    batches = iter(data)
    while True:
        error: Exception | None = None
        try:
            batch = next(batches, None)
        except Exception as raised:
            batch, error = None, raised
        status = torch.tensor([batch is not None, error is not None], dtype=torch.float32, device=device)
        processes.sum_([status])
        n_running, n_failed = status.tolist()
        if n_failed:
            with processes.raising_together():
                if error is not None:
                    raise error
        if not n_running:
            return
        yield batch


class InStep:
    """The batches of a process's share as features of a last layer; all processes take as many steps."""

    def __init__(self, network: GatheredLayer, data: ExactPass, spare: Any, processes: Processes) -> None:
        self._network, self._data, self._spare, self._processes = network, data, spare, processes

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for batch in in_step(self._data, self._processes, inputs.device_of(self._network)):
            features = self._network.features(self._spare if batch is None else batch[0])
            if batch is not None:
                yield features, batch[1]

    def __len__(self) -> int:
        return len(self._data)

    @property
    def reads_once(self) -> bool:
        return self._data.reads_once


class FirstStep:
    """The first training step shows whether the last layer of a sharded network can be gathered."""

    def __init__(self, network: nn.Module) -> None:
        self._stack, self._read_as = ExitStack(), output_of(network)
        self._watch: LayerWatch = self._stack.enter_context(watching(network))
        self._problem: NetworkError | None = None
        self._stack.callback(unwrap_output(network).register_forward_pre_hook(self._begin).remove)
        self._stack.callback(unwrap_output(network).register_forward_hook(self._look).remove)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._watch.calls.clear()

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        """At each run of the network, of which a step may have several."""
        f = self._read_as.select(output)
        self._watch.f = None if f is None else f.detach()
        try:
            if f is not None:
                self._watch.features()
        except NetworkError as problem:
            self._problem = problem

    def end(self) -> None:
        """Before the optimizer's step: an error for a layer that cannot be gathered. A step that does not call the
        network as the fit will shows nothing."""
        self.stop()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        self._stack.close()
