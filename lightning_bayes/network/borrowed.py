"""Borrow the user's module: check it, prepare it for a computation, and restore it, even after an exception.

`borrowed` prepares a network for curvature and prediction; `at_weights` and `call_with` run it at other weights, in
place or in one functional call. `RandomState` and `Buffers` restore the remaining state that a run may change.
"""

from __future__ import annotations

import hashlib
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

from lightning_bayes.arguments import format_value, instance, text
from lightning_bayes.network import private
from lightning_bayes.network.errors import CurvatureError
from lightning_bayes.network.processes import local, reshard
from lightning_bayes.network.subset import copies


def check_network(network: Any) -> nn.Module:
    """Return the module, without a `torch.compile` wrapper. Raise an error unless its weights have shapes and
    values."""
    network = private.uncompiled(instance("network", network, nn.Module, "an nn.Module that maps x to f"))
    for name, p in network.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise CurvatureError(
                f"{name} has no shape before the first batch: run a batch through the lazy layers first"
            )
        if p.is_meta:
            raise CurvatureError(f"{name} is on the meta device and has no values: use to_empty and load the weights")
    return network


def check_merged(network: nn.Module, unused: Iterable[str]) -> None:
    """Raise if `unused` weights belong to an adapter, such as one of `peft`, that is merged into its base layer."""
    layers = [(path, module) for path, module in network.named_modules() if hasattr(module, "unmerge")]
    merged = [path for path, layer in layers if getattr(layer, "merged", False) is True]
    for name in unused:
        for path in merged:
            if name.startswith(f"{path}."):
                raise CurvatureError(
                    f"{name} does not reach the output, because its adapter is merged into {path}: call "
                    "unmerge_adapter() first"
                )


def check_device(device: Any) -> torch.device:
    """Raise unless this machine has the device."""
    try:
        return torch.empty(0, device=device if isinstance(device, torch.device) else str(device)).device
    except (RuntimeError, AssertionError, TypeError):  # PyTorch raises these for a device that does not exist
        raise ValueError(f"device must exist on this machine, such as 'cpu', got {format_value(device)}") from None


def submodule(module: nn.Module, path: Any, error: type[Exception]) -> nn.Module:
    """Return the submodule at a dotted path. The error for a wrong path lists the existing names."""
    text("network", path, "the dotted name of a submodule")
    try:
        return module.get_submodule(path)
    except AttributeError:
        children = ", ".join(name for name, _ in module.named_children()) or "none"
        raise error(
            f"{type(module).__name__} has no submodule {path!r} (network=); its submodules are: {children}"
        ) from None


@contextmanager
def borrowed(network: nn.Module, tracked: Iterable[str]) -> Iterator[None]:
    """Put the network into eval mode, with gradients for the `tracked` parameters only and with plain kernels.

    - Hooks on gradients, such as clipping, belong to training and are suspended. Forward hooks are part of the function
      and stay.
    - Frozen parameters get no graph, so a last layer needs no backward pass through the rest of the network.
    - Attention uses the math kernel without the fast path of `nn.MultiheadAttention`: fused kernels hide the
      projections of attention and cannot be differentiated for many outputs at once.
    - Autocast is off, because curvature squares the rounding errors of 16-bit activations.
    """
    names = set(tracked)
    parameters = dict(network.named_parameters())
    device = next((p.device for p in parameters.values()), None)
    with ExitStack() as stack:
        modules = list(network.modules())
        stack.callback(_set_each, modules, "training", [module.training for module in modules])
        for module in modules:
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                # Autograd can neither batch nor flatten sparse gradients, and gradients scaled by frequency are not
                # derivatives.
                for option in ("sparse", "scale_grad_by_freq"):
                    stack.callback(setattr, module, option, getattr(module, option))
                    setattr(module, option, False)
        for hooks in private.gradient_hooks(modules, parameters.values()):
            stack.enter_context(_suspended(hooks))
        required = [p.requires_grad for p in parameters.values()]
        stack.callback(_set_each, parameters.values(), "requires_grad", required)
        stack.enter_context(preserved_rng(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu" if device is None else device.type, enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(eager())
        if any(isinstance(module, nn.RNNBase) for module in modules):
            # cuDNN's recurrent kernels have no backward in eval mode.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        network.eval()
        _set_each(parameters.values(), "requires_grad", [name in names for name in parameters])
        yield


@contextmanager
def _suspended(hooks: dict[int, Any]) -> Iterator[None]:
    """Remove the hooks, and put them back in order, before any hooks that were added in the meantime."""
    suspended = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        added = dict(hooks)
        hooks.clear()
        hooks.update(suspended | added)


def _set_each(things: Iterable[Any], name: str, values: list[bool]) -> None:
    for thing, value in zip(things, values, strict=True):
        if getattr(thing, name) != value:
            setattr(thing, name, value)


@contextmanager
def preserved_rng(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global random generators of the host and of the network's `device`, because a shuffling loader or a
    random transform may draw from them. Reading the random state of any other device would initialise that device."""
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.restore()


@dataclass(frozen=True)
class RandomState:
    """The state of the global generators of Python, NumPy and PyTorch, on the host and on one device."""

    python: Any
    numpy: Any
    cpu: Tensor
    device: torch.device | None
    of_device: Tensor | None

    @staticmethod
    def now(device: torch.device | None) -> RandomState:
        numpy: Any = sys.modules.get("numpy")
        getter = getattr(_device_module(device), "get_rng_state", None)  # None for the CPU and the meta device
        return RandomState(
            random.getstate(),
            numpy.random.get_state() if numpy else None,
            torch.get_rng_state(),
            device,
            None if getter is None else getter(*_device_argument(getter, device)),
        )

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.of_device is not None:
            setter = _device_module(self.device).set_rng_state
            setter(self.of_device, *_device_argument(setter, self.device, 1))


def _device_module(device: torch.device | None) -> Any:
    """`torch.cuda` for a CUDA device, and so on; None if there is no such module."""
    return None if device is None else getattr(torch, device.type, None)


def _device_argument(function: Any, device: torch.device | None, before: int = 0) -> tuple[Any, ...]:
    """The device as an argument, or no argument for `torch.mps`, whose functions take no device."""
    return (device,) if len(inspect.signature(function).parameters) > before else ()


def generator_on(device: torch.device) -> torch.Generator:
    """A new generator on the device, or on the CPU if the device has no generators."""
    try:
        return torch.Generator(device)
    except RuntimeError:
        return torch.Generator()


def numbered_generator(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator on the device, or on the CPU, whose seed depends on all numbers."""
    # Torch's CPU generator uses 32 bits of its seed, so they must depend on all numbers.
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return generator_on(device).manual_seed(int.from_bytes(digest, "big"))


def copied_generator(device: torch.device) -> torch.Generator:
    """A generator in the same state as the device's global one."""
    now, generator = RandomState.now(device), generator_on(device)
    return generator.set_state(now.cpu if now.of_device is None else now.of_device)


class Buffers:
    """The values of a module's buffers, to be restored later."""

    def __init__(self, module: nn.Module) -> None:
        owned = [(m, name, b) for m in module.modules() for name, b in private.own_buffers(m).items() if b is not None]
        self._saved = [(owner, name, buffer, buffer.detach().clone()) for owner, name, buffer in owned]

    @torch.no_grad()
    def restore(self) -> None:
        """Write into the original tensors, even if the network has replaced them."""
        for owner, name, buffer, value in self._saved:
            private.own_buffers(owner)[name] = buffer.copy_(value)


@contextmanager
def kept_buffers(module: nn.Module, keep: bool = True) -> Iterator[None]:
    """Restore buffers: batch norm statistics must be updated once per step, even if the network runs more often."""
    buffers = Buffers(module) if keep else None
    try:
        yield
    finally:
        if buffers is not None:
            buffers.restore()


def eager() -> AbstractContextManager[Any]:
    """Run compiled submodules uncompiled: a compiled graph hides the layers."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


@contextmanager
def at_weights(network: nn.Module, moves: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Add `moves` to the parameters in place, and restore the parameters exactly.

    A backward pass must end inside the context, because it reads the weights, and activation checkpointing runs the
    network again during the backward pass. For a sharded parameter, the move applies to this process's shard.
    """
    reshard(network)
    shards = [local(p) for p in moves]
    before = copies(shards)
    try:
        if shards:
            with torch.no_grad():
                private.foreach_add_(shards, list(moves.values()))
        torch.clear_autocast_cache()  # it stores 16-bit copies of the weights
        yield
    finally:
        reshard(network)
        if shards:
            with torch.no_grad():
                private.foreach_copy_(shards, before)
        torch.clear_autocast_cache()


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any = None) -> Any:
    """`functional_call` with other parameters and buffers. This function replaces a tied tensor in all its places,
    because with `tie_weights=True` PyTorch restores a wrong tensor in a module that has two names."""
    named = chain(module.named_parameters(), module.named_buffers())
    values = {id(t): tensors[name] for name, t in named if name in tensors}
    places = {
        ".".join(filter(None, ("module", prefix, name))): values[id(t)]
        for prefix, owner in module.named_modules()
        for name, t in chain(private.own_parameters(owner).items(), private.own_buffers(owner).items())
        if id(t) in values
    }
    return functional_call(_Outer(module), places, args, kwargs, tie_weights=False)


class _Outer(nn.Module):
    """A parent module, because `functional_call` rejects a scripted module or `DataParallel` at the top level."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
