"""Networks, loaders and inputs that cannot be used: one sentence each, where torch's own is hard to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from lightning_bayes.arguments import format_value, instance, text
from lightning_bayes.network.containers import forward_parameters, tensors
from lightning_bayes.network.errors import PLAIN, CurvatureError, DataError, NetworkError

_CASTS = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}
_LONGEST = 120  # characters of torch's own message within ours


def check_network(network: Any) -> nn.Module:
    """A module whose weights have shapes and values."""
    instance("network", network, nn.Module, "an nn.Module that maps x to f")
    for name, p in network.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise CurvatureError(f"{name} has no shape before the first batch: run one through the lazy layers first")
        if p.is_meta:
            raise CurvatureError(f"{name} is on the meta device and has no values: use to_empty and load the weights")
    return network


def check_merged(network: nn.Module, unused: Iterable[str]) -> None:
    """Refuse `unused` weights of an adapter (as of `peft`) that is merged into its base layer: they do nothing."""
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
    """One that this machine has."""
    try:
        return torch.empty(0, device=device if isinstance(device, torch.device) else str(device)).device
    except (RuntimeError, AssertionError, TypeError):  # torch's own ways to say that it has no such device
        raise ValueError(f"device must be one of this machine's, such as 'cpu', got {format_value(device)}") from None


def submodule(module: nn.Module, path: Any, error: type[Exception]) -> nn.Module:
    """The submodule at a dotted path, or an error with the existing names."""
    text("network", path, "the dotted name of a submodule")
    try:
        return module.get_submodule(path)
    except AttributeError:
        children = ", ".join(name for name, _ in module.named_children()) or "none"
        raise error(
            f"{type(module).__name__} has no submodule {path!r} (network=); its submodules are: {children}"
        ) from None


def check_loader(loader: Any, name: str = "loader", batches: str = "(x, y) batches") -> Any:
    """Something that gives batches when it is iterated."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise DataError(
            f"{name} is a {type(loader).__name__}, which gives single examples: pass DataLoader(dataset, batch_size=…)"
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not iterable or isinstance(loader, (str, bytes, Tensor, type, nn.Module)):
        raise TypeError(f"{name} must be an iterable of {batches}, such as a DataLoader, got {format_value(loader)}")
    return loader


def reads_once(loader: Any) -> bool:
    """Whether a loader, or what it wraps, is an iterator, which gives its batches once."""
    return isinstance(loader, Iterator) or getattr(loader, "reads_once", False)


@contextmanager
def explained(network: nn.Module, x: Any) -> Iterator[None]:
    """An error while `network` runs on `x` says what was run on what."""
    try:
        yield
    except PLAIN as error:
        if type(error) not in PLAIN:
            raise
        raise NetworkError(_explanation(network, x, error)) from error


def _explanation(network: nn.Module, x: Any, error: Exception) -> str:
    kind = type(network).__name__
    if isinstance(error, NotImplementedError) and "forward" in str(error):
        return f"{kind} has no forward: give it one that maps x to f, or name the submodule that does with network="
    leaves = tensors(x)
    shapes, dtypes = [str(list(leaf.shape)) for leaf in leaves], list(dict.fromkeys(leaf.dtype for leaf in leaves))
    few = ", ".join(shapes[:3]) + (", …" if len(shapes) > 3 else "")
    what = f"{'an input of shape' if len(shapes) == 1 else 'inputs of shapes'} {few} and {', '.join(map(str, dtypes))}"
    weights = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
    said = " ".join(str(error).split())
    said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"
    way_out = _way_out(network, x, error, dtypes, weights)
    return f"{kind} cannot be run on {what}, with weights of {weights} ({said}): {way_out}"


def _way_out(
    network: nn.Module, x: Any, error: Exception, dtypes: list[torch.dtype], weights: torch.dtype | None
) -> str:
    if weights in _CASTS and weights not in dtypes and "dtype" in str(error):
        return f"give it x.{_CASTS[weights]}()"
    if isinstance(error, TypeError) and isinstance(x, Mapping):
        taken = ", ".join(parameter.name for parameter in forward_parameters(network))
        return f"its forward takes {taken}, and x has {', '.join(map(repr, x))}"
    if isinstance(error, TypeError):
        return "give it the inputs that its forward takes, several of them as ((x1, x2), y)"
    return "give it inputs as in training"
