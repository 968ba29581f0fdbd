"""The dry run: errors of a later fit, raised on the first batch and before the first step of an optimizer.

The batch is split, the network runs on it, its outputs and targets are checked against the likelihood, and the callback
tries its fit on two examples. Then the loss of the module's own step is compared with the likelihood. The dry run
restores weights, gradients, buffers, modes and random numbers. It has no collective operations, so an error on one
process cannot deadlock the others.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_bayes.network import CurvatureError, DataError, inputs
from lightning_bayes.network.borrowed import RandomState, borrowed, eager, kept_buffers, preserved_rng
from lightning_bayes.network.errors import OutputError, first_line, is_out_of_memory
from lightning_bayes.network.output import network_name, output_of, unwrap_output
from lightning_bayes.network.processes import is_sharded
from lightning_bayes.trainer.data import as_list
from lightning_bayes.trainer.loss_check import (
    LossFit,
    OutputReader,
    OutputRecorder,
    compare_gradients,
    compare_values,
)
from lightning_bayes.trainer.module import ModuleError, is_variational, split_batch
from lightning_bayes.trainer.private import forward_context, gradient_scale, is_compiled

if TYPE_CHECKING:
    from lightning_bayes.trainer.posterior_callback import PosteriorCallback

EXAMPLES = 2  # for the trial fit
_SPLIT = "give the module a method split_batch(self, batch) that returns (x, y)"


class DryRun:
    """The dry run of one callback, on the first batch of a `fit`."""

    def __init__(self, callback: PosteriorCallback) -> None:
        self._callback = callback
        self._has_begun = False
        self._recorder: OutputRecorder | None = None
        self.f: Tensor | None = None  # outputs before the step, in eval mode; None for a sharded network
        self._x: Any = None
        self._y: Any = None
        self._rng: RandomState | None = None  # at the start of the batch

    def begin(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Before the first step: raise for anything that cannot work, and record the outputs of the step."""
        self.stop()
        if self._has_begun:
            return
        self._has_begun, callback = True, self._callback
        network = callback.network_in(module)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()):
            return  # the first step gives lazy layers their shape
        pair = split_training_batch(trainer, module, batch, callback.needs_targets)
        if pair is None:
            return
        x, y = pair
        if not isinstance(y, Tensor):
            inputs.batch_size(x)  # raises if x holds no tensor either
            raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}: {_SPLIT}")
        x = inputs.contained(network, x, y)
        size, modules = inputs.batch_size(x), [network]
        if not is_sharded(network):  # its first forward pass must be the step's own
            with preserved_rng(module.device), forward_context(trainer), kept_buffers(network):
                self.f, modules = _run(network, callback.network.name, x, size)
                callback.read_by_targets(module, x, y)
                before, network = output_of(network), callback.network_in(module)
                after = output_of(network)
                if (before.class_dim, before.squeeze) != (after.class_dim, after.squeeze):
                    self.f = after.arranged(self.f)
                callback.likelihood.check(self.f, y)
                examples = slice(EXAMPLES)
                callback.try_fit(network, inputs.take(network, x, examples), y[examples])
        if module.automatic_optimization and not is_compiled(module):
            shape = None if self.f is None else self.f.shape
            self._recorder = OutputRecorder(modules, size, shape, OutputReader(network, x))
        self._x, self._y, self._rng = x, y, RandomState.now(module.device)

    def compare(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> LossFit | None:
        """Before the backward pass: compare the loss with the likelihood; None if that is not possible."""
        y, f, recorder, likelihood = self._y, self.f, self._recorder, self._callback.likelihood
        if y is None or not module.automatic_optimization or is_variational(module):  # the mixin compares its own loss
            return None
        # Lightning has divided the loss by the number of accumulated batches, and 16-bit precision has scaled it.
        scale = trainer.accumulate_grad_batches / gradient_scale(trainer)
        fit = None
        if recorder is not None and recorder.outputs:
            with torch.autocast(module.device.type, enabled=False):
                if f is None:
                    likelihood.check(recorder.read(recorder.outputs[0].detach()), y)
                fit = compare_gradients(likelihood, loss, recorder.outputs, y, scale, recorder.read)
        if fit is None and f is not None and self._rng is not None and self._callback.trains_at_its_weights:
            outputs = _training_outputs(self._callback.network_in(module), self._x, self._rng, trainer)
            if isinstance(outputs, Tensor) and outputs.shape == f.shape:
                fit = compare_values(likelihood, loss, outputs, y, scale)
        return fit

    def stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = self.f = self._x = self._y = None


def split_training_batch(trainer: Trainer, module: LightningModule, batch: Any, needed: bool = True) -> Any:
    """`(x, y)` of a training batch, without moving the global random state. Returns None if the batch has no known form
    and its parts are not `needed`."""
    loaders = trainer.train_dataloader
    if isinstance(loaders, (dict, list, tuple)) and len(loaders) == 1:
        (batch,) = as_list(batch)
    with preserved_rng(module.device), torch.no_grad():
        try:
            return split_batch(module, batch)
        except ModuleError:
            if needed or hasattr(module, "split_batch"):
                raise
            return None


def _run(network: nn.Module, path: str | None, x: Any, size: int) -> tuple[Tensor, list[nn.Module]]:
    """The outputs as the fit will see them, and the modules that return them, the network first."""
    name = f"the network {path!r}" if path else f"the network {network_name(network)}"
    reader = OutputReader(network, x)
    returned: list[tuple[nn.Module, weakref.ref[Tensor]]] = []  # weak, because activations need not be kept

    def record(module: nn.Module, args: Any, output: Any) -> None:
        tensor = reader.select(module, output)
        if tensor is not None:
            returned.append((module, weakref.ref(tensor)))

    with borrowed(network, ()), torch.no_grad(), _no_warnings(), register_module_forward_hook(record):
        try:
            f = inputs.call(network, x)
        except Exception as error:  # the user's network may raise anything
            if is_out_of_memory(error) or isinstance(error, OutputError):
                raise
            shapes = ", ".join(str(list(t.shape)) for t in inputs.tensors(x))
            problem = f"{type(error).__name__}: {first_line(error) or 'no message'}"
            raise ModuleError(
                f"{name} cannot be run on the x of a batch, of shape {shapes} ({problem}): name the "
                f"submodule that maps x to f with network=, or {_SPLIT}"
            ) from error
    if not isinstance(f, Tensor):
        raise CurvatureError(
            f"{name} must return one tensor, but it returned {type(f).__name__}: name the submodule that does with "
            "network=, or the entry that is f with output="
        )
    if f.ndim == 0 or len(f) != size:
        raise CurvatureError(
            f"{name} must return one row per example, but {size} examples gave an output of shape {tuple(f.shape)}: "
            "name the submodule that does with network="
        )
    modules = dict.fromkeys([unwrap_output(network), *(module for module, t in reversed(returned) if _is_same(t(), f))])
    return f, [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _is_same(t: Tensor | None, f: Tensor) -> bool:
    """Whether both are the same tensor, up to the order of its dimensions."""
    return t is not None and t.data_ptr() == f.data_ptr() and t.numel() == f.numel()


def _training_outputs(network: nn.Module, x: Any, rng: RandomState, trainer: Trainer) -> Any:
    """The outputs in training mode, with the random numbers that the step began with; None if that fails."""
    if any(isinstance(module, nn.SyncBatchNorm) and module.training for module in network.modules()):
        return None  # it would wait for all processes
    # On copies, because the graph of the step still needs the buffers.
    buffers = {name: b.detach().clone() for name, b in network.named_buffers()}
    with preserved_rng(rng.device), torch.no_grad(), eager(), forward_context(trainer), _no_warnings():
        rng.restore()
        try:
            return inputs.run(network, x, buffers)
        except Exception as error:  # the step itself may never call the network like this
            if is_out_of_memory(error):
                raise
            return None


@contextmanager
def _no_warnings() -> Iterator[None]:
    """The step itself will repeat the warnings of the network."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_memory(structure: str, n_vectors: int, size: int, like: Tensor) -> None:
    """Raise if the device cannot hold the vectors of a structure: a full matrix and its Cholesky factor, or the basis
    in which a low rank is found."""
    needed, device = n_vectors * size * torch.promote_types(like.dtype, torch.float32).itemsize, like.device
    available = _free_memory(device)
    if needed > available:
        smaller = "" if structure == "full" else "a smaller rank=, "
        raise CurvatureError(
            f"structure={structure!r} over {size} weights needs {needed / 1e9:.3g} GB, but {device} has "
            f"{available / 1e9:.3g} GB: use {smaller}structure='kron' or 'diag', or subset='last_layer'"
        )


def _free_memory(device: torch.device) -> float:
    """Free bytes of the device; for the host, and a device that shares its memory, all bytes."""
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        return float(free + module.memory_reserved(device) - module.memory_allocated(device))  # torch reserves some
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # unknown on this system
        return float("inf")
