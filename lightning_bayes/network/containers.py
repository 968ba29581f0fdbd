"""`Container`: an input whose examples are not the rows of its tensors, and the registry of such inputs.

Each kind of input has an adapter in `network/adapters`: a `Container` subclass that registers itself.
`inputs.contained` asks the registered classes in turn whether an input is theirs. The network never sees a container,
only its `arguments`.

| container    | the network gets                                   | an example is              |
|--------------|----------------------------------------------------|----------------------------|
| `Graphs`     | PyTorch Geometric's `Data` or `Batch`, or its parts | a graph                   |
| `Packed`     | a `PackedSequence`                                 | a sequence                 |
| `Nested`     | a nested tensor                                    | one of its tensors         |
| `Sequences`  | a list of tensors                                  | one of them                |
| `Bags`       | words and the offsets at which bags begin          | a bag                      |
| `Features`   | the inputs of a gathered last layer                | a row                      |
| `WholeInput` | any input, always complete                         | a row of the output: a node |
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_bayes.network.output import unwrap_output
from lightning_bayes.network.private import pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]
Splitter = Callable[[nn.Module, Any, str], "tuple[Any, Any] | None"]


CONTAINERS: list[type[Container]] = []  # the registered classes, the latest first
SPLITTERS: list[Splitter] = []  # of batches that are not pairs `(x, y)`


class Container(ABC):
    """An input of `size` examples that can be taken in any selection. Subclasses are registered."""

    def __init_subclass__(cls) -> None:
        CONTAINERS.insert(0, cls)

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def take(self, examples: list[int]) -> Container: ...

    @abstractmethod
    def arguments(self, network: nn.Module) -> Arguments:
        """The arguments for the network's call."""

    @abstractmethod
    def map(self, change: Change) -> Container:
        """Apply `change` to every tensor."""

    def rows(self, f: Tensor) -> Tensor:
        """The examples' rows of the output."""
        return f

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        """`x` in a container, or None if it is an input of another kind. The number of targets helps to tell."""
        return None


@dataclass(frozen=True, eq=False)
class ValueContainer(Container):
    """A container around a single argument of the network."""

    value: Any

    @staticmethod
    def holds(x: Any) -> bool:
        """Whether the type alone identifies `x` as a value of this kind."""
        return False

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        return cls(x) if cls.holds(x) else None

    def arguments(self, network: nn.Module) -> Arguments:
        return (self.value,), {}

    @abstractmethod
    def map(self, change: Change) -> ValueContainer: ...


def register_splitter(split: Splitter) -> Splitter:
    """Register `split(network, batch, stage)`, which returns `(x, y)`, or None for a batch of another kind."""
    SPLITTERS.append(split)
    return split


@dataclass(frozen=True, eq=False)
class WholeInput(Container):
    """Examples that are computed together: rows of the output of one input, which is never split."""

    x: Any
    index: Tensor  # of the rows, on the CPU

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def kind(self) -> str:
        return type(self.x.value if isinstance(self.x, ValueContainer) else self.x).__name__

    def take(self, examples: list[int]) -> WholeInput:
        return replace(self, index=self.index[examples])

    def arguments(self, network: nn.Module) -> Arguments:
        return arguments(network, self.x)

    def map(self, change: Change) -> WholeInput:
        return replace(self, x=map_tensors(self.x, change))

    def rows(self, f: Tensor) -> Tensor:
        return f[self.index.to(f.device)]


def tensors(x: Any) -> list[Tensor]:
    """All tensors of an input."""
    collected: list[Tensor] = []
    map_tensors(x, lambda t: collected.append(t) or t)  # type: ignore[func-returns-value]
    return collected


def map_tensors(x: Any, change: Change) -> Any:
    """Apply `change` to every tensor of an input, in containers and values of known types too."""

    def change_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, Container):
            return leaf.map(change)
        for kind in CONTAINERS:
            if issubclass(kind, ValueContainer) and kind.holds(leaf):
                return kind(leaf).map(change).value
        return leaf

    return pytree.tree_map(change_leaf, x, is_leaf=lambda node: isinstance(node, PackedSequence))


def arguments(network: nn.Module, x: Any) -> Arguments:
    """Positional arguments for a tuple or list, and keyword arguments for those entries of a mapping that `forward`
    takes. A `forward` with one argument of another name gets the mapping, or its only entry."""
    if isinstance(x, Container):
        return x.arguments(network)
    if isinstance(x, Mapping):
        parameters = forward_parameters(network)
        names = [p.name for p in parameters]
        if len(names) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD and names[0] not in x:
            takes_dict = is_annotated(network, names[0], dict) or names[0] in ("batch", "data", "inputs")
            return ((x,) if takes_dict or len(x) > 1 else tuple(x.values())), {}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters) or not names
        return (), {name: value for name, value in x.items() if takes_all or name in names}
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


def forward_parameters(network: nn.Module) -> list[inspect.Parameter]:
    """The parameters of the network's `forward`, or none if it has no signature."""
    try:
        return list(inspect.signature(unwrap_output(network).forward).parameters.values())
    except (TypeError, ValueError):
        return []


def is_annotated(network: nn.Module, name: str, kind: type) -> bool:
    """Whether a parameter of `forward` is annotated as a `kind`, a list or dict, or as one of several types with it."""
    try:
        annotation = get_type_hints(unwrap_output(network).forward).get(name)
    except Exception:  # evaluating an annotation may raise anything
        return False
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    types = [get_origin(choice) or choice for choice in choices]
    return any(isinstance(t, type) and issubclass(t, kind) for t in types)
