"""The user's module is borrowed: what is changed to look inside it is put back, also after an exception."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def unwrap(network: nn.Module) -> nn.Module:
    """The module behind `torch.compile`, whose parameters have the names that its author gave them."""
    return getattr(network, "_orig_mod", network)


@contextmanager
def borrowed(network: nn.Module, tracked: Iterable[str]) -> Iterator[None]:
    """Eval mode, gradients for the `tracked` parameters only, plain kernels, and no trace left behind.

    Frozen parameters get no graph, so that a last layer costs no backward pass through the rest. Attention runs on the
    math kernel, and without `nn.MultiheadAttention`'s fused fast path, because the fused ones hide their projections
    and cannot be differentiated for many outputs at a time. Autocast is off: curvature squares what it rounds.
    """
    names = set(tracked)
    parameters = dict(network.named_parameters())
    with ExitStack() as stack:
        modules = list(network.modules())
        stack.callback(_restore_modes, modules, [module.training for module in modules])
        for module in modules:
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                # Sparse gradients are the same numbers, but autograd can neither batch nor flatten them.
                stack.callback(setattr, module, "sparse", True)
                module.sparse = False
        stack.callback(_require, list(parameters.values()), [p.requires_grad for p in parameters.values()])
        stack.enter_context(preserved_rng())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        device = next((p.device.type for p in parameters.values()), "cpu")
        stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(eager())
        if any(isinstance(module, nn.RNNBase) for module in modules):
            # cuDNN's recurrent kernels have no backward in eval mode.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        network.eval()
        _require(parameters.values(), [name in names for name in parameters])
        yield


def _restore_modes(modules: list[nn.Module], training: list[bool]) -> None:
    for module, was in zip(modules, training, strict=True):
        if module.training != was:
            module.training = was


def _require(parameters: Iterable[nn.Parameter], wanted: list[bool]) -> None:
    for p, gradient in zip(parameters, wanted, strict=True):
        if p.requires_grad != gradient:
            p.requires_grad_(gradient)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """A shuffling loader or a random transform draws from the global generators: give them back as they were."""
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=range(_n_devices())):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


@cache
def _n_devices() -> int:
    """Of CUDA; asking for them loads a driver each time."""
    return torch.cuda.device_count()


@contextmanager
def kept_buffers(module: nn.Module, keep: bool = True) -> Iterator[None]:
    """Put buffers back: a batch norm's statistics move once per step, however often the network runs."""
    buffers = Buffers(module) if keep else None
    try:
        yield
    finally:
        if buffers is not None:
            buffers.restore()


class Buffers:
    """The values of a module's buffers at one moment, which can be put back."""

    def __init__(self, module: nn.Module) -> None:
        present = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        self._saved = [(owner, name, buffer, buffer.detach().clone()) for owner, name, buffer in present]

    @torch.no_grad()
    def restore(self) -> None:
        for owner, name, buffer, value in self._saved:
            owner._buffers[name] = buffer.copy_(value)  # where the network has put another tensor, the first one


def eager() -> AbstractContextManager[Any]:
    """Sub-modules compiled in place run uncompiled: a compiled graph shows no layers."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
