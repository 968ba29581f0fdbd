"""`Output`: which part of a network's return value is its output `f`, and which dimension of `f` indexes the classes.

Inside the package every output is one tensor with its classes in dimension 1, as PyTorch's losses expect: `[B, C]` or
`[B, C, T]`. A Hugging Face model, for example, returns a `ModelOutput` with an entry `logits`, `[B, T, C]` for tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_bayes.network.errors import OutputError

DEFAULT_KEY = "logits"


@dataclass(frozen=True)
class Output:
    """How to read a network's return value. `options.Network` checks the user's values.

    Args:
        key: The entry, attribute or index of the return value that is `f`. With None, `f` is the returned tensor or its
            entry `logits`.
        class_dim: The class dimension; None means dimension 1.
        together: Whether only the output has a row per example, as for the nodes of a graph, so an input cannot be
            split.
        squeeze: Whether a single output has an extra dimension, `[B, 1]`, that its target lacks.
        listed: Whether an input is a list with one entry per example.
    """

    key: str | int | None = None
    class_dim: int | None = None
    together: bool = False
    squeeze: bool = False
    listed: bool = False

    @property
    def is_default(self) -> bool:
        return self == Output()

    def __call__(self, returned: Any) -> Any:
        """The output `f` with classes in dimension 1. Without a `key`, a value that contains no tensor is returned
        unchanged; callers check the type."""
        f = self.select(returned)
        if f is not None:
            return self.arranged(f)
        if self.key is None:
            return returned
        entries = f" with {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else ""
        raise OutputError(
            f"output={self.key!r} finds no tensor in the network's return value, a {type(returned).__name__}{entries}"
        )

    def select(self, returned: Any) -> Tensor | None:
        """The tensor in the network's own layout, or None if there is no such tensor."""
        if isinstance(returned, Tensor):
            return returned if self.key is None else None
        entry = _entry(returned, DEFAULT_KEY if self.key is None else self.key)
        return entry if isinstance(entry, Tensor) else None

    def arranged(self, f: Tensor) -> Tensor:
        """`f`, or its gradient, with classes in dimension 1."""
        if self.squeeze:
            return f.squeeze(-1)
        dim = self.class_dim
        if dim is None:
            return f
        if not -f.ndim < dim < f.ndim:
            raise OutputError(f"class_dim={dim} is not a dimension after the first of outputs of shape {list(f.shape)}")
        return f if dim in (1, 1 - f.ndim) else f.movedim(dim, 1)

    def with_targets(self, returned: Any, y: Tensor, classes: bool) -> Output:
        """Complete the options from the shape of the targets `y`.

        Class labels determine the class dimension, if none is given. If two dimensions are possible, token logits use
        the last one and plain tensors use dimension 1. Targets that are not class labels determine whether a single
        output has an extra dimension of size 1.
        """
        f = self.select(returned)
        # Compare all dimensions but the first: targets may exist for some rows only, as for the nodes of a graph.
        if self.class_dim is not None or f is None or f.ndim < 2 or y.shape[1:] != f.shape[1:-1]:
            return self
        if not classes or f.ndim < 3:
            return self if classes or f.shape[-1] != 1 else replace(self, squeeze=True)
        return self if self.is_ambiguous(returned, y) else replace(self, class_dim=-1)

    def is_ambiguous(self, returned: Any, y: Tensor) -> bool:
        """Whether a tensor has as many positions as classes, so labels do not determine the class dimension."""
        if self.class_dim is not None or not isinstance(returned, Tensor) or returned.ndim < 3:
            return False
        return y.shape[1:] == returned.shape[1:-1] == returned.shape[2:]


def wrap_output(network: nn.Module, output: Output) -> nn.Module:
    """A network that returns only `f`: `network` itself if `output` is the default."""
    network = unwrap_output(network)
    return network if output.is_default else _OutputView(network, output)


def read_as(network: nn.Module, key: str | int | None, class_dim: int | None) -> nn.Module:
    """The network with the output `key` and this `class_dim`, or unchanged if both are None."""
    output = Output(key, class_dim)
    return network if output.is_default else wrap_output(network, output)


def unwrap_output(network: nn.Module) -> nn.Module:
    """The user's own module."""
    return network._wrapped_network if isinstance(network, _OutputView) else network


def output_of(network: nn.Module) -> Output:
    return network._wrapped_output if isinstance(network, _OutputView) else Output()


def network_name(network: nn.Module) -> str:
    """The class name of the user's module, for messages."""
    return type(unwrap_output(network)).__name__


class _OutputView(nn.Module):
    """A wrapper without state: parameters, buffers, submodules, hooks and mode are looked up in the network itself, so
    their names and identities do not change. The network's hooks run once, inside its own call."""

    _wrapped_network: nn.Module
    _wrapped_output: Output

    def __init__(self, network: nn.Module, output: Output) -> None:
        # `nn.Module.__init__` is not called, because it would create empty state in the wrapper.
        self.__dict__.update(_wrapped_network=network, _wrapped_output=output)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copy and pickle
            raise AttributeError(name)
        return getattr(self._wrapped_network, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped_network, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped_output(self._wrapped_network(*args, **kwargs))

    def __reduce__(self) -> Any:
        return wrap_output, (self._wrapped_network, self._wrapped_output)


def _entry(returned: Any, key: str | int) -> Any:
    """The value at a key, index or attribute of the network's return value, or None if there is no such value."""
    if isinstance(returned, Mapping) and key in returned:
        return returned[key]
    if isinstance(key, str):
        return getattr(returned, key, None)
    try:
        return returned[key]
    except (TypeError, KeyError, IndexError):
        return None
