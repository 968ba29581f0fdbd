"""A Laplace fit of a network whose weights are sharded over processes (`ModelParallelStrategy`, FSDP2).

| settings                                                        | what each process holds                 |
|-----------------------------------------------------------------|-----------------------------------------|
| `subset="last_layer"`, `structure="full"`, "kron" or "diag"     | the last layer and its posterior, whole |
| `structure="diag"` of all weights, `curvature="fisher_mc"` or   | the posterior of its shard of weights   |
| "empirical_fisher"                                              |                                         |

All other settings need the whole network on every process, so they raise an error before training.

A sharded network must run on all processes at once. So all processes read their data in lockstep, and a process that
has finished its share runs a spare batch until all have finished.
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
from lightning_bayes.options.fit import curvature_estimate
from lightning_bayes.posterior import ShardedPosterior
from lightning_bayes.trainer.data import ExactPass, is_countable
from lightning_bayes.trainer.module import refuse_sharded
from lightning_bayes.trainer.private import class_name

if TYPE_CHECKING:
    from lightning_bayes.callbacks.laplace import LaplaceCallback

STRUCTURES = ("auto", "full", "kron", "diag")
_SHARDED = "ModelParallelStrategy"
_WAY_OUT = (
    "use strategy='ddp' or a single device, or subset='last_layer', or structure='diag' with curvature='fisher_mc' or "
    "'empirical_fisher'"
)


def check_sharded(callback: LaplaceCallback, trainer: Trainer) -> None:
    """Raise for settings that cannot run under the Trainer's strategy."""
    if class_name(trainer.strategy, {_SHARDED}) is None or not callback.fits_shards:
        refuse_sharded(trainer, type(callback).__name__)
    else:
        check_settings(callback)


def check_settings(callback: LaplaceCallback) -> None:
    """Raise for settings that cannot run on sharded weights."""
    kind, options, tune = type(callback).__name__, callback.options, callback.tune
    if callback.subset != "last_layer" and not is_diagonal(callback):
        raise RuntimeError(f"{kind} needs the whole network on every process, but {_SHARDED} shards it: {_WAY_OUT}")
    unsupported = {
        f"structure={options.structure.kind!r}": options.structure.kind not in STRUCTURES,
        "predictive='gp'": options.gp is not None,
        "iterate=True": tune is not None and tune.iterate,
        "weights='best'": callback.weights == "best",
        "prior=": options.prior.posterior is not None,
    }
    if is_diagonal(callback):
        unsupported |= {
            "predictive='glm' (not 'bnn' or 'map')": callback.predictive.kind not in ("bnn", "map"),
            f"tune={tune and tune.method!r}": tune is not None and tune.method != "auto",
            "Prior(temperature=…)": options.prior.temperature != 1,
            "Prior(mean=…)": options.prior.mean is not None,
        }
    for setting, is_unsupported in unsupported.items():
        if is_unsupported:
            raise RuntimeError(
                f"{kind} with {setting} needs the whole network on every process, but {_SHARDED} shards it: "
                "leave it out, or use strategy='ddp' or a single device"
            )


def is_diagonal(callback: LaplaceCallback) -> bool:
    """Whether the fit is a diagonal over all weights, which can stay sharded."""
    options = callback.options
    estimate, _ = curvature_estimate(options.curvature, options.structure)
    return options.subset in ("all", "auto") and options.structure.kind == "diag" and estimate in CURVATURES


def fit_diagonal(
    callback: LaplaceCallback, network: nn.Module, data: ExactPass, spare: tuple[Any, Tensor], processes: Processes
) -> ShardedPosterior:
    """The sharded diagonal posterior over all weights. All processes must call this function together."""
    options = callback.options
    estimate, samples = curvature_estimate(options.curvature, options.structure)
    total = ShardedDiagonalSum(network, callback.likelihood, estimate, samples, callback.seed, processes)
    for batch in in_lockstep(data, processes, inputs.device_of(network)):
        total.add(*(spare if batch is None else batch), counts=batch is not None)
    return ShardedPosterior.from_curvature(network, total.finish(), options.prior_precision)


def check_sharded_data(loader: Any) -> None:
    """Raise for data without a length."""
    if not is_countable(loader):
        raise DataError(
            f"under {_SHARDED} all processes read the data in lockstep, but these have no length: use a dataset with a "
            "length, or strategy='ddp'"
        )


def in_lockstep(data: ExactPass, processes: Processes, device: torch.device) -> Iterator[tuple[Any, Tensor] | None]:
    """Yield the batches of this process's share, then None until all processes have read their shares."""
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


class LockstepLoader:
    """The inputs of the last layer, and the targets, for each batch of this process. All processes run the network the
    same number of times."""

    def __init__(self, network: GatheredLayer, data: ExactPass, spare: Any, processes: Processes) -> None:
        self._network, self._data, self._spare, self._processes = network, data, spare, processes

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for batch in in_lockstep(self._data, self._processes, inputs.device_of(self._network)):
            features = self._network.features(self._spare if batch is None else batch[0])
            if batch is not None:
                yield features, batch[1]

    def __len__(self) -> int:
        return len(self._data)

    @property
    def reads_once(self) -> bool:
        return self._data.reads_once


class LastLayerProbe:
    """Checks in the first training step whether the last layer of a sharded network can be gathered."""

    def __init__(self, network: nn.Module) -> None:
        self._stack, self._read_as = ExitStack(), output_of(network)
        self._watch: LayerWatch = self._stack.enter_context(watching(network))
        self._problem: NetworkError | None = None
        self._stack.callback(unwrap_output(network).register_forward_pre_hook(self._forget_calls).remove)
        self._stack.callback(unwrap_output(network).register_forward_hook(self._check_output).remove)

    def _forget_calls(self, module: nn.Module, args: Any) -> None:
        self._watch.calls.clear()

    def _check_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook that runs after each call of the network; a training step may call the network several times."""
        f = self._read_as.select(output)
        self._watch.f = None if f is None else f.detach()
        try:
            if f is not None:
                self._watch.features()
        except NetworkError as problem:
            self._problem = problem

    def end(self) -> None:
        """Raise, before the optimizer's step, if the layer cannot be gathered. If the step did not call the network,
        nothing is checked."""
        self.stop()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        self._stack.close()
