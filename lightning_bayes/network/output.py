"""`Output`: which part of what a network returns is its output `f`, and which dimension of `f` counts classes.

A Hugging Face model returns a `ModelOutput` with an entry `logits`, those of tokens as `[B, T, C]`. Here the outputs of
all networks are one tensor with its classes in dimension 1, as PyTorch's losses have them: `[B, C]`, or `[B, C, T]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_bayes.arguments import format_value, integer
from lightning_bayes.network.errors import OutputError

LOGITS = "logits"  # the entry that is the output where none is named


@dataclass(frozen=True)
class Output:
    """How to read what a network returns; it checks itself when it is made.

    Args:
        key: the entry, attribute or place of `f`; None for a tensor, or the `logits`.
        class_dim: the dimension that counts classes; None is dimension 1.
        together: whether examples are rows of the output only, and cannot be taken out of an input: the nodes of a
            graph.
        squeeze: whether the one output of an example has a dimension of its own, `[B, 1]`, that its target has not.
        listed: whether an input is a list with an entry for each example.
    """

    key: str | int | None = None
    class_dim: int | None = None
    together: bool = False
    squeeze: bool = False
    listed: bool = False
    error: InitVar[type[Exception]] = ValueError

    def __post_init__(self, error: type[Exception]) -> None:
        if self.key is not None and (isinstance(self.key, bool) or not isinstance(self.key, (str, int))):
            raise error(f"output must be a key, an attribute's name or an index, got {format_value(self.key)}")
        if self.key == "":
            raise error("output must name an entry of what the network returns, got an empty string")
        if self.class_dim is not None and integer("class_dim", self.class_dim, error) == 0:
            raise error("class_dim=0 is the dimension of the examples: use 1, or -1 for the last")

    @property
    def is_default(self) -> bool:
        return self == Output()

    def __call__(self, returned: Any) -> Any:
        """The output `f`, classes in dimension 1; what holds none is returned as it is, for others to refuse."""
        f = self.select(returned)
        if f is not None:
            return self.arranged(f)
        if self.key is None:
            return returned
        entries = f" with {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else ""
        raise OutputError(
            f"output={self.key!r} names no tensor in what the network returned, a {type(returned).__name__}{entries}"
        )

    def select(self, returned: Any) -> Tensor | None:
        """The tensor itself, as the network returned it; None where there is none."""
        if isinstance(returned, Tensor):
            return returned if self.key is None else None
        entry = _entry(returned, LOGITS if self.key is None else self.key)
        return entry if isinstance(entry, Tensor) else None

    def arranged(self, f: Tensor) -> Tensor:
        """`f`, or its gradient, with classes in dimension 1."""
        if self.squeeze:
            return f.squeeze(-1)
        dim = self.class_dim
        if dim is None:
            return f
        if not -f.ndim < dim < f.ndim:
            raise OutputError(f"class_dim={dim} is no dimension of outputs of shape {list(f.shape)} but the first")
        return f if dim in (1, 1 - f.ndim) else f.movedim(dim, 1)

    def with_targets(self, returned: Any, y: Tensor, classes: bool) -> Output:
        """The same with what the shape of the targets `y` says. Of class labels, the dimension that counts classes,
        where none is given; if two are possible, that of token logits is the last, and that of a tensor the first. Of
        others, whether one output has a dimension too many."""
        f = self.select(returned)
        if self.class_dim is not None or f is None or f.ndim < 2 or y.shape[1:] != f.shape[1:-1]:
            return self  # of the rows, targets may have some alone: the labelled nodes of a graph
        if not classes or f.ndim < 3:
            return self if classes or f.shape[-1] != 1 else replace(self, squeeze=True)
        return self if self.is_ambiguous(returned, y) else replace(self, class_dim=-1)

    def is_ambiguous(self, returned: Any, y: Tensor) -> bool:
        """Whether a tensor has as many positions as classes, so that the shape of class labels does not tell."""
        if self.class_dim is not None or not isinstance(returned, Tensor) or returned.ndim < 3:
            return False
        return y.shape[1:] == returned.shape[1:-1] == returned.shape[2:]


def viewed(network: nn.Module, output: Output) -> nn.Module:
    """The network, whose call returns the output alone: itself where the default reads it right."""
    network = unviewed(network)
    return network if output.is_default else _View(network, output)


def read_as(network: nn.Module, key: str | int | None, class_dim: int | None) -> nn.Module:
    """The network with the output that a caller names; without a name, as it was read before."""
    output = Output(key, class_dim)
    return network if output.is_default else viewed(network, output)


def unviewed(network: nn.Module) -> nn.Module:
    """The user's own module."""
    return network.parts_of_view()[0] if isinstance(network, _View) else network


def output_of(network: nn.Module) -> Output:
    return network.parts_of_view()[1] if isinstance(network, _View) else Output()


class _View(nn.Module):
    """A second module with the state of another: its weights, buffers, submodules and mode are the network's, and a
    call returns the output alone. Nothing is added to the network; its hooks run once."""

    __slots__ = ("__network", "__output")  # under names that no submodule of a network has

    def __new__(cls, network: nn.Module, output: Output) -> _View:
        # A class of the network's name, for messages.
        return super().__new__(type(type(network).__name__, (_View,), {"__slots__": ()}))

    def __init__(self, network: nn.Module, output: Output) -> None:
        object.__setattr__(self, "__dict__", network.__dict__)
        object.__setattr__(self, "_View__network", network)
        object.__setattr__(self, "_View__output", output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        network, output = self.parts_of_view()
        return output(network(*args, **kwargs))

    def __reduce__(self) -> Any:
        return viewed, self.parts_of_view()

    def parts_of_view(self) -> tuple[nn.Module, Output]:
        return self.__network, self.__output  # type: ignore[return-value]


def _entry(returned: Any, key: str | int) -> Any:
    """The value under a key, at a place, or of an attribute; None where there is none."""
    if isinstance(returned, Mapping) and key in returned:
        return returned[key]
    if isinstance(key, str):
        return getattr(returned, key, None)
    try:
        return returned[key]
    except (TypeError, KeyError, IndexError):
        return None
