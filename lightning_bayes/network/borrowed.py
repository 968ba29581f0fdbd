"""The user's module is borrowed: what is changed to look inside it is put back, also after an exception.

A network at other weights for a moment: in place, or in one functional call.

A guard against activation checkpointing, where running a layer again in the backward pass would be wrong.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as module_hooks
from torch.utils import checkpoint

from lightning_bayes.network.processes import local, reshard
from lightning_bayes.network.subset import copies


def unwrap(network: nn.Module) -> nn.Module:
    """The module behind `torch.compile`, whose parameters have the names that its author gave them."""
    return getattr(network, "_orig_mod", network)


@contextmanager
def borrowed(network: nn.Module, tracked: Iterable[str]) -> Iterator[None]:
    """Eval mode, gradients for the `tracked` parameters only, plain kernels, and no trace left behind.

    Hooks that may change gradients, as training does with clipping, are suspended. Forward hooks are part of the
    function, and stay.
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
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                # Autograd can neither batch nor flatten sparse gradients, and those scaled by frequency are not
                # derivatives.
                for option in ("sparse", "scale_grad_by_freq"):
                    stack.callback(setattr, module, option, getattr(module, option))
                    setattr(module, option, False)
        for hooks in _gradient_hooks(modules, parameters.values()):
            stack.enter_context(_emptied(hooks))
        stack.callback(_require, list(parameters.values()), [p.requires_grad for p in parameters.values()])
        stack.enter_context(preserved_rng(next((p.device for p in parameters.values()), None)))
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


def _gradient_hooks(modules: list[nn.Module], parameters: Iterable[nn.Parameter]) -> list[dict[int, Any]]:
    """The dictionaries of hooks on gradients. They are private, but torch has no public way to list or suspend hooks,
    and the handles that users hold refer to them."""
    found: list[Any] = [module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks]
    for module in modules:
        found += module._backward_hooks, module._backward_pre_hooks
    for p in parameters:
        found += p._backward_hooks, p._post_accumulate_grad_hooks
    return [hooks for hooks in found if hooks]


@contextmanager
def _emptied(hooks: dict[int, Any]) -> Iterator[None]:
    """Without the hooks, which come back in their order."""
    suspended = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        added = dict(hooks)
        hooks.clear()
        hooks.update(suspended | added)


def _restore_modes(modules: list[nn.Module], training: list[bool]) -> None:
    for module, was in zip(modules, training, strict=True):
        if module.training != was:
            module.training = was


def _require(parameters: Iterable[nn.Parameter], wanted: list[bool]) -> None:
    for p, gradient in zip(parameters, wanted, strict=True):
        if p.requires_grad != gradient:
            p.requires_grad_(gradient)


@contextmanager
def preserved_rng(device: torch.device | None = None) -> Iterator[None]:
    """A shuffling loader or a random transform draws from the global generators: give them back as they were, those of
    the host and of the network's `device`. No other device is touched: a first look initialises it."""
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.restore()


@dataclass(frozen=True)
class RandomState:
    """The global generators of Python, numpy and torch at one moment, on the host and on one device."""

    python: Any
    numpy: Any
    cpu: Tensor
    device: torch.device | None
    of_device: Tensor | None

    @staticmethod
    def now(device: torch.device | None) -> RandomState:
        numpy: Any = sys.modules.get("numpy")
        getter = getattr(_module_of(device), "get_rng_state", None)  # the CPU and the meta device have none
        return RandomState(
            random.getstate(),
            numpy.random.get_state() if numpy else None,
            torch.get_rng_state(),
            device,
            None if getter is None else getter(*_named(getter, device)),
        )

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.of_device is not None:
            setter = _module_of(self.device).set_rng_state
            setter(self.of_device, *_named(setter, self.device, 1))


def _module_of(device: torch.device | None) -> Any:
    """What `torch.cuda` is to CUDA; None where there is none."""
    return None if device is None else getattr(torch, device.type, None)


def _named(function: Any, device: torch.device | None, before: int = 0) -> tuple[Any, ...]:
    """The device as an argument; `torch.mps`, which has one device, takes none."""
    return (device,) if len(inspect.signature(function).parameters) > before else ()


def generator_on(device: torch.device) -> torch.Generator:
    """A new generator of that device, or of the CPU if the device has none."""
    try:
        return torch.Generator(device)
    except RuntimeError:
        return torch.Generator()


def copied_generator(device: torch.device) -> torch.Generator:
    """A generator that goes on as the device's global one would."""
    now, generator = RandomState.now(device), generator_on(device)
    return generator.set_state(now.cpu if now.of_device is None else now.of_device)


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


@contextmanager
def at_weights(network: nn.Module, moves: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Add `moves` to the parameters in place, and put the parameters back bit by bit.

    A backward pass reads weights too, and activation checkpointing runs the network again in it, so it must end inside
    the context. Of a parameter that is sharded over processes, the move is that of this process's shard.
    """
    reshard(network)
    shards = [local(p) for p in moves]
    before = copies(shards)
    try:
        if shards:
            with torch.no_grad():
                torch._foreach_add_(shards, list(moves.values()))
        torch.clear_autocast_cache()  # which holds 16-bit copies of the weights
        yield
    finally:
        reshard(network)
        if shards:
            with torch.no_grad():
                torch._foreach_copy_(shards, before)
        torch.clear_autocast_cache()


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any = None) -> Any:
    """`functional_call` with other parameters and buffers, also of a module that has two names: there PyTorch's own,
    left to tie weights itself, puts a wrong tensor back."""
    named = chain(module.named_parameters(), module.named_buffers())
    values = {id(t): tensors[name] for name, t in named if name in tensors}
    places = {
        ".".join(filter(None, ("module", prefix, name))): values[id(t)]
        for prefix, owner in module.named_modules()
        for name, t in chain(owner._parameters.items(), owner._buffers.items())
        if id(t) in values
    }
    return functional_call(_Inside(module), places, args, kwargs, tie_weights=False)


class _Inside(nn.Module):
    """A module inside another: a functional call refuses a scripted or a `DataParallel` one at the top."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@contextmanager
def refuse_recomputation(error: Exception, reentrant_only: bool = False) -> Iterator[None]:
    """Raise `error` where a layer is checkpointed, in both of torch's forms or in the reentrant one only. Torch has no
    hook for this: the names that `checkpoint` itself looks up are replaced while the context lasts."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    with ExitStack() as stack:
        stack.enter_context(_replaced(checkpoint.CheckpointFunction, "apply", refuse))
        if not reentrant_only:
            stack.enter_context(_replaced(checkpoint, "_checkpoint_hook", refuse))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)  # a class may inherit it
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
