"""The dry run: what can be known of a posterior with the first batch, before the first step of an optimizer.

The batch is split, the network runs on it, outputs and targets are held against the likelihood, and the callback tries
its fit on two examples. Then the loss of the module's own step is compared with the likelihood. Nothing of the user's
is changed by it: weights, gradients, buffers, modes and random numbers are as they were. No process waits for another,
so that an error on one of them leaves none hanging.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_bayes.network import CurvatureError, DataError, inputs
from lightning_bayes.network.borrowed import RandomState, borrowed, eager, kept_buffers, preserved_rng
from lightning_bayes.network.errors import OutputError, is_out_of_memory
from lightning_bayes.network.output import Output, output_of, unviewed
from lightning_bayes.network.processes import is_sharded
from lightning_bayes.trainer.data import as_list
from lightning_bayes.trainer.loss_check import LossFit, Reading, Watch, compare_gradients, compare_values
from lightning_bayes.trainer.module import ModuleError, is_variational, split_batch
from lightning_bayes.trainer.private import forward_context, gradient_scale, is_compiled

if TYPE_CHECKING:
    from lightning_bayes.trainer.posterior_callback import PosteriorCallback

EXAMPLES = 2  # that a fit is tried on


class DryRun:
    """Of one callback, on the first batch of one run of `fit`."""

    def __init__(self, callback: PosteriorCallback) -> None:
        self._callback = callback
        self._waiting = True  # for the first batch
        self._watch: Watch | None = None
        self.f: Tensor | None = None  # outputs before the step, in eval mode; None for a sharded network
        self._x: Any = None
        self._y: Any = None
        self._rng: RandomState | None = None  # at the start of the batch

    def begin(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Before the first batch's step: raise for what cannot work, and look on while the step runs."""
        self.stop()
        if not self._waiting:
            return
        self._waiting, callback = False, self._callback
        network = callback.network_in(module)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()):
            return  # the first step gives the lazy layers their shape
        pair = split_training_batch(trainer, module, batch, callback.needs_targets)
        if pair is None:
            return
        x, y = pair
        if isinstance(y, Tensor):
            x = inputs.contained(network, x, y)
        size, modules = inputs.batch_size(x), [network]
        if not isinstance(y, Tensor):
            raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}: {_SPLIT}")
        if not is_sharded(network):  # whose first forward pass must be the step's own
            with preserved_rng(module.device), forward_context(trainer), kept_buffers(network):
                self.f, modules = _run(network, callback.network.name, x, size)
                callback.read_by_targets(module, x, y)
                before, network = output_of(network), callback.network_in(module)
                after = output_of(network)
                if (before.class_dim, before.squeeze) != (after.class_dim, after.squeeze):
                    self.f = after.arranged(self.f)
                callback.likelihood.check(self.f, y)
                some = slice(EXAMPLES)
                callback.try_fit(network, inputs.take(network, x, some), y[some])
        if module.automatic_optimization and not is_compiled(module):
            self._watch = Watch(modules, size, None if self.f is None else self.f.shape, Reading(network, x))
        self._x, self._y, self._rng = x, y, RandomState.now(module.device)

    def compare(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> LossFit | None:
        """With the loss before its backward pass: how it relates to the likelihood; None if that cannot be known."""
        y, f, watch, likelihood = self._y, self.f, self._watch, self._callback.likelihood
        if y is None or not module.automatic_optimization or is_variational(module):  # whose mixin compares itself
            return None
        # Lightning has divided by the batches to accumulate, and 16-bit precision has scaled.
        scale = trainer.accumulate_grad_batches / gradient_scale(trainer)
        seen = [] if watch is None else watch.outputs
        with torch.autocast(module.device.type, enabled=False):
            if watch and seen and f is None:
                outputs = watch.reading(seen[0].detach())
                likelihood.check(outputs, y)
            fit = compare_gradients(likelihood, loss, seen, y, scale, watch.reading) if watch and seen else None
        if fit is None and f is not None and self._rng is not None and self._callback.trains_at_its_weights:
            network = self._callback.network_in(module)
            now = _in_own_mode(network, self._x, self._rng, trainer)
            if isinstance(now, Tensor) and now.shape == f.shape:
                fit = compare_values(likelihood, loss, now, y, scale)
        return fit

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = self.f = self._x = self._y = None


def split_training_batch(trainer: Trainer, module: LightningModule, batch: Any, needed: bool = True) -> Any:
    """`(x, y)` of a training batch, with nothing drawn from the global generators; None where neither the module nor
    the batch says, and it is not `needed`."""
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


def check_memory(structure: str, n_vectors: int, size: int, like: Tensor) -> None:
    """Refuse a full matrix and its Cholesky factor, or the basis that a low rank is found in, that the device cannot
    hold."""
    needed, device = n_vectors * size * torch.promote_types(like.dtype, torch.float32).itemsize, like.device
    available = _memory(device)
    if needed > available:
        smaller = "" if structure == "full" else "a smaller rank=, "
        raise CurvatureError(
            f"structure={structure!r} over {size} weights needs {needed / 1e9:.3g} GB, but {device} has "
            f"{available / 1e9:.3g} GB: use {smaller}structure='kron' or 'diag', or subset='last_layer'"
        )


_SPLIT = "give the module a method split_batch(self, batch) that returns (x, y)"


def _run(network: nn.Module, path: str | None, x: Any, size: int) -> tuple[Tensor, list[nn.Module]]:
    """The outputs, as the fit will see them, and the modules that return them, the network first."""
    what = f"the network {path!r}" if path else f"the network {type(network).__name__}"
    read_as = output_of(network)
    returned: list[tuple[nn.Module, Any]] = []  # weak references: activations need not be kept

    def note(module: nn.Module, args: Any, output: Any) -> None:
        tensor = read_as.select(output) if module is unviewed(network) else Output().select(output)
        if tensor is not None:
            returned.append((module, weakref.ref(tensor)))

    with borrowed(network, ()), torch.no_grad(), _silence(), ExitStack() as stack:
        stack.callback(register_module_forward_hook(note).remove)
        try:
            f = inputs.call(network, x)
        except Exception as error:  # of the user's own network, which may raise anything
            if is_out_of_memory(error) or isinstance(error, OutputError):
                raise
            shapes = ", ".join(str(list(t.shape)) for t in inputs.tensors(x))
            problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
            raise ModuleError(
                f"{what} cannot be run on the x of a batch, of shape {shapes} ({problem}): name the "
                f"submodule that maps x to f with network=, or {_SPLIT}"
            ) from error
    if not isinstance(f, Tensor):
        raise CurvatureError(
            f"{what} must return one tensor, but it returned {type(f).__name__}: name the submodule that does with "
            "network=, or the entry that is f with output="
        )
    if f.ndim == 0 or len(f) != size:
        raise CurvatureError(
            f"of {what} the output must have one row per example, but {size} examples gave an output of "
            f"shape {tuple(f.shape)}: name the submodule that gives it with network="
        )
    modules = dict.fromkeys([unviewed(network), *(module for module, t in reversed(returned) if _is_same(t(), f))])
    return f, [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _is_same(t: Tensor | None, f: Tensor) -> bool:
    """Whether both are one tensor, its dimensions perhaps in another order."""
    return t is not None and t.data_ptr() == f.data_ptr() and t.numel() == f.numel()


def _in_own_mode(network: nn.Module, x: Any, rng: RandomState, trainer: Trainer) -> Any:
    """The outputs in training, at the random numbers that the step began with; None where they cannot be had."""
    if any(isinstance(module, nn.SyncBatchNorm) and module.training for module in network.modules()):
        return None  # it would wait for all processes
    # On copies: the graph of the step still needs the buffers as they are.
    buffers = {name: b.detach().clone() for name, b in network.named_buffers()}
    with preserved_rng(rng.device), torch.no_grad(), eager(), forward_context(trainer), _silence():
        rng.restore()
        try:
            return inputs.run(network, x, buffers)
        except Exception as error:  # anything, for the step itself may never call the network so
            if is_out_of_memory(error):
                raise
            return None


@contextmanager
def _silence() -> Iterator[None]:
    """The step itself will say what the network warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _memory(device: torch.device) -> float:
    """What is free; on the host, and on a device that shares its memory, all there is."""
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        return float(free + module.memory_reserved(device) - module.memory_allocated(device))  # torch holds some back
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # unknown on this system
        return float("inf")
