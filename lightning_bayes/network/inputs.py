"""Batches `(x, y)`, and how a network is called on them.

`x` is a tensor; a tuple, list or dict of tensors, for a network with several inputs; or an input that an adapter puts
into a `Container`.

Each kind of input has an adapter in `network/adapters`: a `Container` subclass that registers itself. `contained` tries
the registered classes in turn. The network never sees a container, only its `arguments`.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_bayes.arguments import format_names
from lightning_bayes.network.borrowed import borrowed, call_with
from lightning_bayes.network.errors import PLAIN, DataError, NetworkError, is_out_of_memory
from lightning_bayes.network.output import network_name, output_of, unwrap_output
from lightning_bayes.network.private import pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]
Splitter = Callable[[nn.Module, Any, str], "tuple[Any, Any] | None"]


CONTAINERS: list[type[Container]] = []  # the registered classes, the latest first
SPLITTERS: list[Splitter] = []  # functions that split batches that are not pairs `(x, y)`


class Container(ABC):
    """An input of `size` examples, from which any examples can be selected. Subclasses are registered."""

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
        """The rows of the output that belong to the examples."""
        return f

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        """`x` in a container, or None if this class is not the container for `x`. Some classes also look at the number
        of targets."""
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


class PartialNetwork(nn.Module, ABC):
    """The last part of a network. The `whole` network computes this part's inputs, the `features`."""

    @property
    @abstractmethod
    def whole(self) -> nn.Module: ...

    @abstractmethod
    def features(self, x: Any) -> Container: ...


def whole_network(network: nn.Module) -> nn.Module:
    """The network that a partial one belongs to; any other network is returned unchanged."""
    return network.whole if isinstance(network, PartialNetwork) else network


@dataclass(frozen=True, eq=False)
class WholeInput(Container):
    """Examples that are computed together: they are rows of the output for one input, and the input is never split."""

    x: Any
    index: Tensor  # the rows of the output that are the examples, on the CPU

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
    """Apply `change` to every tensor of an input, including those in containers and in values of known types."""

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
    takes. A `forward` with a single argument that is no key of the mapping gets the whole mapping, or the value of its
    only key."""
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
    """Whether a parameter of `forward` is annotated as a `kind` (list or dict), or as a union that includes it."""
    try:
        annotation = get_type_hints(unwrap_output(network).forward).get(name)
    except Exception:  # evaluating an annotation may raise anything
        return False
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    types = [get_origin(choice) or choice for choice in choices]
    return any(isinstance(t, type) and issubclass(t, kind) for t in types)


# The cache of `batched`, by network and form of input. Storing it on the network would change the user's module.
_BATCHED: WeakKeyDictionary[nn.Module, dict[Any, list[bool]]] = WeakKeyDictionary()


def split_targets(network: nn.Module, batch: Any, stage: str = "train") -> tuple[Any, Tensor]:
    """`(x, y)` of a batch, with `x` in its container if it needs one."""
    x, y = split(network, batch, stage)
    if not isinstance(y, Tensor):
        raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}")
    return contained(network, x, y), y


def split(network: nn.Module, batch: Any, stage: str = "train") -> tuple[Any, Any]:
    """`(x, y)` of a pair, or of another batch that an adapter knows, such as graphs or a dict with `labels`."""
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1]
        raise DataError(
            f"a batch must be a pair (x, y), but the loader gave {len(batch)} parts; "
            "group several inputs as ((x1, x2), y)"
        )
    for splitter in SPLITTERS:
        pair = splitter(network, batch, stage)
        if pair is not None:
            return pair
    raise DataError(f"a batch must be a pair (x, y), but the loader gave a {type(batch).__name__}")


def contained(network: nn.Module, x: Any, y: Any = None) -> Any:
    """`x` in its container if it needs one; the targets `y` give the number of examples."""
    if isinstance(x, Container):
        return x
    if isinstance(network, PartialNetwork):
        return network.features(x)
    if isinstance(x, Mapping):
        x = dict(x)  # PyTorch does not look into the mappings of other libraries
    n_targets = len(y) if isinstance(y, Tensor) and y.ndim else None
    for kind in [] if isinstance(x, Tensor) and not x.is_nested else CONTAINERS:
        container = kind.wrap(network, x, n_targets)
        if container is not None:
            return container
    together = output_of(network).together
    if together or (n_targets is not None and _cannot_be_split(network, x, n_targets)):
        with borrowed(network, ()), torch.no_grad():
            n_rows = len(call(network, to_device(x, device_of(network))))
        if n_targets in (None, n_rows):
            return WholeInput(x, torch.arange(n_rows, device="cpu"))
        if not isinstance(x, Tensor) and not any(len(t) == n_targets for t in tensors(x) if t.ndim):
            raise DataError(f"a batch has {n_targets} targets, but the network's output for it has {n_rows} rows")
    return x


def _cannot_be_split(network: nn.Module, x: Any, n_targets: int) -> bool:
    """Whether no tensor has one row per example, as in a sequence with time first or a custom object, or whether a row
    alone gives a different output, as with the nodes of a graph."""
    if isinstance(x, Tensor):
        return x.ndim > 1 and len(x) > 0 and len(x) != n_targets and n_targets in x.shape
    if isinstance(x, (tuple, list, dict)):
        lengths = [len(t) for t in tensors(x) if t.ndim]
        if len(lengths) < 2:
            return False
        return n_targets not in lengths or (lengths[0] == n_targets and not any(batched(network, x)))
    return hasattr(x, "__dict__") and not isinstance(x, type) and not hasattr(x, "__array__")


def call(network: nn.Module, x: Any) -> Tensor:
    """`f(x)`; errors describe the input."""
    with explained(network, x):
        return run(network, x)


def run(network: nn.Module, x: Any, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """`f(x)`, optionally at other weights. The network gets a copy of `x`, because it may write into its input."""
    args, kwargs = arguments(network, map_tensors(x, Tensor.clone))
    returned = network(*args, **kwargs) if weights is None else call_with(network, weights, args, kwargs)
    f = returned if isinstance(returned, Tensor) else output_of(network)(returned)
    return x.rows(f) if isinstance(x, Container) else f


def batch_size(x: Any) -> int:
    """The number of examples: the length of the first tensor that has a dimension."""
    if isinstance(x, Container):
        if not x.size:
            raise DataError("a batch has no examples")
        return x.size
    for leaf in tensors(x):
        if leaf.ndim:
            if not len(leaf):
                raise DataError(f"a batch has no examples: its input has shape {tuple(leaf.shape)}")
            return leaf.shape[0]
    raise DataError(f"the network's input must contain a tensor with a batch dimension, but it is {type(x).__name__}")


def take(network: nn.Module, x: Any, examples: list[int] | slice) -> Any:
    """The given examples of `x`; parts that all examples share are passed on unchanged."""
    if isinstance(x, Container):
        return x.take(list(range(x.size))[examples] if isinstance(examples, slice) else examples)
    return map_batched(x, batched(network, x), lambda leaf: leaf[examples])


def take_each(network: nn.Module, x: Any) -> list[Any]:
    """Each example as a batch of one."""
    return [take(network, x, slice(n, n + 1)) for n in range(batch_size(x))]


def few(network: nn.Module, x: Any, count: int) -> Any:
    """The first `count` examples of `x`, repeated if there are fewer."""
    size = batch_size(x)
    return take(network, x, [n % size for n in range(count)])


def batched(network: nn.Module, x: Any) -> list[bool]:
    """Whether each leaf of `x` has a row per example. A tensor that all examples share may happen to have as many rows
    as there are examples, so the network is run, once for each form of input, to find out. All leaves are False if
    examples cannot be taken out of the batch."""
    leaves, spec = pytree.tree_flatten(x)
    size = batch_size(x)
    fits = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves]
    if sum(isinstance(leaf, Tensor) for leaf in leaves) == 1:
        return fits
    known = _BATCHED.setdefault(unwrap_output(network), {})
    form = (str(spec), *(leaf.ndim if isinstance(leaf, Tensor) else None for leaf in leaves))
    if form not in known:
        known[form] = _find_batched(network, x, fits)
    known[form] = [before and now for before, now in zip(known[form], fits, strict=True)]
    return known[form]


def _find_batched(network: nn.Module, x: Any, fits: list[bool]) -> list[bool]:
    """Which leaves must be split with the examples, among the leaves that have a row per example (`fits`): all of them,
    all but one, or only the first one, which defines the number of examples. The right choice gives examples taken out
    of the batch the same outputs as in the batch."""
    x, size = to_device(x, device_of(network)), batch_size(x)
    others = [i for i, fit in enumerate(fits) if fit][1:]
    rows = [size - 1, 0]
    with borrowed(network, ()), torch.no_grad():
        f = call(network, x)
        if not isinstance(f, Tensor):
            return fits
        tolerance = torch.finfo(f.dtype).eps ** 0.5
        for shared in ([], *([i] for i in others), others):
            flags = [fit and i not in shared for i, fit in enumerate(fits)]
            try:
                alone = call(network, map_batched(x, flags, lambda leaf: leaf[rows]))
                if torch.allclose(alone, f[rows], tolerance, tolerance * float(f.abs().max()), equal_nan=True):
                    return flags
            except Exception as error:  # a network may reject unexpected shapes with any exception
                if is_out_of_memory(error):
                    raise
    return [False] * len(fits)


def map_batched(x: Any, has_batch: list[bool], change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the leaves that have a row per example."""
    leaves, spec = pytree.tree_flatten(x)
    return pytree.tree_unflatten([change(v) if b else v for v, b in zip(leaves, has_batch, strict=True)], spec)


def to_device(x: Any, device: torch.device) -> Any:
    """Move an input to a device. Inference-mode tensors are cloned for autograd."""
    non_blocking = device.type not in ("cpu", "mps")  # as in Lightning: both may read a tensor before it is copied

    def move(leaf: Tensor) -> Tensor:
        leaf = leaf.to(device, non_blocking=non_blocking)
        return leaf.clone() if leaf.is_inference() else leaf

    return map_tensors(x, move)


def device_of(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def has_nonfinite(x: Any) -> bool:
    # The sum is cheap, and finite only if all its terms are.
    return any(t.is_floating_point() and not (t.sum().isfinite() or t.isfinite().all()) for t in tensors(x))


def nonfinite(x: Any, device: torch.device) -> Tensor:
    """Whether `x` has NaN or infinite values, or values whose sum overflows, as a tensor: reading it would force a
    device sync."""
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors(x) if t.is_floating_point()]
    return ~torch.stack([torch.zeros((), device=device), *(total.to(device) for total in sums)]).isfinite().all()


_CASTS = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}


_QUOTED = 120  # maximum number of characters to quote from PyTorch's message


@contextmanager
def explained(network: nn.Module, x: Any) -> Iterator[None]:
    """Describe the network and its input `x` in errors that PyTorch raises inside the context."""
    try:
        yield
    except PLAIN as error:
        if type(error) not in PLAIN:
            raise
        raise NetworkError(_explanation(network, x, error)) from error


def _explanation(network: nn.Module, x: Any, error: Exception) -> str:
    kind = network_name(network)
    if isinstance(error, NotImplementedError) and "forward" in str(error):
        return f"{kind} has no forward: give it one that maps x to f, or use network= to name the submodule that does"
    leaves = tensors(x)
    shapes, dtypes = [str(list(leaf.shape)) for leaf in leaves], list(dict.fromkeys(leaf.dtype for leaf in leaves))
    noun = "an input of shape" if len(shapes) == 1 else "inputs of shapes"
    description = f"{noun} {format_names(shapes)} and {', '.join(map(str, dtypes))}"
    weights = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
    message = " ".join(str(error).split())
    message = message if len(message) <= _QUOTED else f"{message[: _QUOTED - 1]}…"
    way_out = "give it inputs as in training"
    if weights in _CASTS and weights not in dtypes and "dtype" in str(error):
        way_out = f"give it x.{_CASTS[weights]}()"
    elif isinstance(error, TypeError) and isinstance(x, Mapping):
        parameters = ", ".join(parameter.name for parameter in forward_parameters(network))
        way_out = f"its forward takes {parameters}, and x has {', '.join(map(repr, x))}"
    elif isinstance(error, TypeError):
        way_out = "give it the inputs that its forward takes, and group several as ((x1, x2), y)"
    return f"{kind} cannot be run on {description}, with weights of {weights} ({message}): {way_out}"
