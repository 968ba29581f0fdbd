"""One operation of a forward pass, and its vector–Jacobian products by autograd.

The operations of one forward pass, in order, with what went in and came out.

A `TorchFunctionMode` sees each operation as the network's author wrote it: `F.softsign` is one, not its parts. The
graph that autograd builds beside it knows what depends on the parameters, and has each operation's backward pass. The
network computes what it always does. Where it overwrites a tensor in place, the tape keeps the old values.

A network's operations on one batch, and how each tensor relates to the examples.

Two small batches show it, before the first large one: a tensor has a row for each example, or an example's entries are
somewhere else in it (time first, positions merged into the batch), or all examples share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_bayes.jacobian.checks import check_examples_apart, check_output
from lightning_bayes.jacobian.gradients import disagreeing, quiet
from lightning_bayes.jacobian.recorder import Version
from lightning_bayes.network import CurvatureError, Subset, inputs
from lightning_bayes.network.errors import first_line, is_missing_rule, log_slow_path
from lightning_bayes.network.inputs import tensors


class RuleError(CurvatureError):
    """An operation through which a diagonal cannot be carried, by name."""


@dataclass(eq=False)
class Op:
    """`tracked` are those of the inputs that depend on the chosen parameters, or are such."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    outputs: list[Tensor]  # those that depend on the parameters
    places: list[int]  # of the outputs among all tensors that the function returns
    tracked: list[Tensor]
    versions: list[Version]  # of all tensors that went in
    recorded: bool = True  # whether the graph behind the outputs begins with this operation
    where: str = ""  # " in <module>"

    @property
    def held(self) -> list[Tensor]:
        return [*(version.tensor for version in self.versions), *self.outputs]

    def argument(self, name: str, position: int | None = None, default: Any = None) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position is not None and len(self.args) > position else default

    def run(self, replacements: dict[int, Tensor]) -> list[Tensor]:
        """The outputs with other tensors instead of some inputs, by their `id`."""
        args, kwargs = swapped((self.args, self.kwargs), replacements)
        returned = tensors(self.func(*args, **kwargs))
        return [returned[place] for place in self.places]

    def pull(self, cotangents: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
        """`Jᵀc` for some of the tracked inputs, from one `c` per output (`None` for zero)."""
        gradients = _grad(*self._graph(cotangents, inputs))
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, gradients, strict=True)]

    def pull_many(self, cotangents: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The same for `K` columns at once.  # [K, *output] -> [K, *input]"""
        outputs, leaves, columns = self._graph(cotangents, inputs)
        K = next(len(c) for c in cotangents if c is not None)
        gradients: Sequence[Tensor | None] | None = None
        try:
            with quiet():
                gradients = _grad(outputs, leaves, columns, is_grads_batched=True)
        except RuntimeError as error:
            if not is_missing_rule(error):
                raise
            reason = f"PyTorch cannot batch a backward pass through {self.name}{self.where} ({first_line(error)})"
            log_slow_path(reason, "columns are taken one at a time")
        if gradients is None or (columns and disagreeing(gradients, outputs, leaves, columns)):
            rows = [_grad(outputs, leaves, [c[k] for c in columns]) for k in range(K)]
            gradients = [None if gs[0] is None else torch.stack(gs) for gs in zip(*rows, strict=True)]
        return [t.new_zeros(K, *t.shape) if g is None else g for t, g in zip(inputs, gradients, strict=True)]

    def _graph(
        self, cotangents: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Outputs, inputs and cotangents for autograd: of the recorded graph if no input is behind another in it, else
        of the operation run again."""
        outputs, leaves = self.outputs, list(inputs)
        if not self.recorded or len(self.tracked) > 1:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in inputs]
                outputs = self.run({id(t): leaf for t, leaf in zip(inputs, leaves, strict=True)})
        used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
        return [o for o, _ in used], leaves, [c.to(o.dtype) for o, c in used]


def swapped(tree: Any, replacements: dict[int, Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: replacements.get(id(leaf), leaf), tree)


def _grad(
    outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor], **options: Any
) -> Sequence[Tensor | None]:
    if not outputs:
        return [None] * len(inputs)
    return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True, **options)


class Tape(TorchFunctionMode):
    """Records every operation that depends on `parameters`, which must be all that have gradients, and in which of the
    modules that are `running` it was."""

    def __init__(self, parameters: Iterable[Tensor], running: Sequence[str] = ()) -> None:
        super().__init__()
        self._ops: list[Op] = []
        self._known = {id(p): p for p in parameters}  # held, because an id means something only while its owner lives
        self._overwritten: dict[int, tuple[Tensor, str]] = {}  # through another tensor on the same memory, by whom
        self._running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list({id(t): t for t in tensors((args, kwargs))}.values())
        tracked = [t for t in given if t.requires_grad]
        if not tracked:
            return func(*args, **kwargs)
        for t in tracked:
            self._check(t)
        name = _name(func)
        target = _target(name, args, kwargs)
        copies = {} if target is None else self._copies(target)
        versions = [Version.of(t) for t in given]
        result = func(*args, **kwargs)
        written = [version.tensor for version in versions if version.overwritten]
        if written:
            plain = _out_of_place(func, name) if len(written) == 1 and written[0] is target else None
            if plain is None or target is None:
                raise RuleError(
                    f"{name}{self._where()} writes into a tensor in place: write it so that it makes a new tensor, or "
                    "use hessian='exact'"
                )
            self._replace(copies, target, name)
            func, name = plain, name.removesuffix("_")
            args, kwargs = swapped((args, {k: v for k, v in kwargs.items() if k != "inplace"}), copies)
            tracked = [copies.get(id(t), t) for t in tracked]
            versions = [Version.of(copies.get(id(t), t)) for t in given]
        unchanged = {id(t) for t in given} - {id(t) for t in written}
        returned = tensors(result)
        places = [i for i, t in enumerate(returned) if t.requires_grad and id(t) not in unchanged]
        if places:
            outputs = [returned[i] for i in places]
            args, kwargs = swapped((args, kwargs), {})  # a list may grow after it has been concatenated
            self._add(Op(func, args, kwargs, name, outputs, places, tracked, versions, not written, self._where()))
        return result

    def ops_to(self, f: Tensor) -> list[Op]:
        """The operations that `f` depends on, in order."""
        self._check(f)
        needed, kept = {id(f)}, []
        for op in reversed(self._ops):
            if any(id(t) in needed for t in op.outputs):
                if any(version.overwritten for version in op.versions):
                    raise RuleError(
                        f"the input of {op.name}{op.where} was overwritten in place after it had been used: "
                        "replace the in-place operation on it by one that makes a new tensor"
                    )
                needed |= {id(t) for t in op.tracked}
                kept.append(op)
        return kept[::-1]

    def _add(self, op: Op) -> None:
        self._ops.append(op)
        self._known.update({id(t): t for t in op.outputs})

    def _check(self, t: Tensor) -> None:
        """Where a tensor comes from must be known."""
        if id(t) in self._overwritten:
            name = self._overwritten[id(t)][1]
            raise RuleError(
                f"{name}{self._where()} writes in place into memory that another tensor shares, which is used "
                "afterwards: write it so that it makes a new tensor, or use hessian='exact'"
            )
        if id(t) in self._known:
            return
        origin = "a tensor that asks for gradients itself" if t.grad_fn is None else t.grad_fn.name()
        if origin == "BackwardHookFunctionBackward":  # what a module with a backward hook makes of its inputs
            node, number = t.grad_fn.next_functions[t.output_nr]  # type: ignore[union-attr]
            for source in list(self._known.values()):
                edge = torch.autograd.graph.get_gradient_edge(source)
                if edge.node is node and edge.output_nr == number:
                    args = (source, source)
                    self._add(Op(Tensor.view_as, args, {}, "view_as", [t], [0], [source], [], False, self._where()))
                    return
        raise RuleError(
            f"there is no rule to back-propagate a diagonal through {origin}{self._where()}, of shape "
            f"{tuple(t.shape)}: use hessian='exact', which works for every network"
        )

    def _copies(self, target: Tensor) -> dict[int, Tensor]:
        """Of a tensor that is about to be overwritten, and of those on the same memory that the tape needs."""
        memory = target.untyped_storage().data_ptr()
        copies = {id(target): target.detach().clone()}
        for op in self._ops:
            for t in op.held:
                if id(t) not in copies and t.untyped_storage().data_ptr() == memory:
                    copies[id(t)] = t.detach().clone()
        return copies

    def _replace(self, copies: dict[int, Tensor], target: Tensor, name: str) -> None:
        """From here on the tape holds the copies instead of the tensors."""
        for op in self._ops:
            held = op.held
            if any(id(t) in copies for t in held):
                op.args, op.kwargs = swapped((op.args, op.kwargs), copies)
                op.outputs = [copies.get(id(t), t) for t in op.outputs]
                op.tracked = [copies.get(id(t), t) for t in op.tracked]
                op.versions = [Version.of(copies[id(v.tensor)]) if id(v.tensor) in copies else v for v in op.versions]
                op.recorded = False
                for t in held:
                    if id(t) in copies and t is not target:
                        self._overwritten[id(t)] = (t, name)
        for old, copy in copies.items():
            if self._known.pop(old, None) is not None:
                self._known[id(copy)] = copy

    def _where(self) -> str:
        return self._running[-1] if self._running else ""


@contextmanager
def running_modules(network: nn.Module) -> Iterator[list[str]]:
    """Those whose `forward` has begun and not ended, the innermost last, as " in <name> (<class>)"."""
    running: list[str] = []

    def begin(place: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: running.append(place)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in network.named_modules():
            kind = type(module).__name__
            place = f" in {name} ({kind})" if name else f" in {kind}"
            stack.enter_context(module.register_forward_pre_hook(begin(place)))
            stack.enter_context(module.register_forward_hook(end, always_call=True))
        yield running


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property such as `x.mT` comes as the getter of a descriptor
        return getattr(func.__self__, "__name__", name)
    return name


def _target(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that an operation is going to overwrite, by its name and options."""
    if kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__")):
        first = args[0] if args else kwargs.get("input")
        return first if isinstance(first, Tensor) else None
    return None


def _out_of_place(func: Any, name: str) -> Callable[..., Any] | None:
    """The operation that makes a new tensor of what this one writes."""
    if not name.endswith("_"):
        return func
    owners = [owner for owner in (Tensor, torch, F) if hasattr(owner, name) and hasattr(owner, name[:-1])]
    return getattr(owners[0], name[:-1]) if owners and name not in ("copy_", "fill_", "set_", "zero_") else None


class Kind(Enum):
    ROWS = "a row for each example"
    ENTRIES = "each entry belongs to one example"
    SHARED = "the same for all examples"


@dataclass(frozen=True)
class Signature:
    """The names of a network's operations, and the kinds of their outputs."""

    names: tuple[str, ...]
    kinds: tuple[tuple[Kind, ...], ...]

    def kinds_of(self, ops: list[Op]) -> dict[int, Kind]:
        """By the `id` of each operation's outputs."""
        if tuple(op.name for op in ops) != self.names:
            raise RuleError(
                "the network's path depends on the data, so that it is unknown which tensors have a row for each "
                "example: use hessian='approx'"
            )
        return {
            id(t): kind
            for op, kinds in zip(ops, self.kinds, strict=True)
            for t, kind in zip(op.outputs, kinds, strict=True)
        }


def run(network: nn.Module, subset: Subset, x: Any, running: Sequence[str] = ()) -> tuple[Tensor, list[Op]]:
    """The output and the operations behind it; `network` must be borrowed (see `network.borrowed`)."""
    with torch.enable_grad(), Tape(subset.parameters(network).values(), running) as tape:
        f = inputs.call(network, x)
    check_output(f, inputs.batch_size(x))
    return f, tape.ops_to(f)


@dataclass(frozen=True)
class Probe:
    """A network on two examples, with the modules that its operations are in."""

    f: Tensor
    ops: list[Op]
    signature: Signature

    @property
    def largest(self) -> float:
        """The most features that an example has in any tensor."""
        kinds = self.signature.kinds_of(self.ops)
        return max(t.numel() / 2 for op in self.ops for t in op.outputs if kinds[id(t)] is not Kind.SHARED)


def probe(network: nn.Module, subset: Subset, x: Any) -> Probe:
    """By two and by three examples of `x`."""
    with running_modules(network) as running:
        f, two = run(network, subset, inputs.few(network, x, 2), running)
    f_three, three = run(network, subset, inputs.few(network, x, 3))
    check_examples_apart(network, f, f_three)
    names = tuple(op.name for op in two)
    if names != tuple(op.name for op in three):
        raise RuleError(
            "the network's path depends on the data or on the size of the batch, so that no rule fits: use "
            "hessian='exact'"
        )
    kinds = tuple(
        tuple(_kind(t.shape, u.shape) for t, u in zip(a.outputs, b.outputs, strict=True))
        for a, b in zip(two, three, strict=True)
    )
    return Probe(f, two, Signature(names, kinds))


def _kind(two: torch.Size, three: torch.Size) -> Kind:
    if two == three:
        return Kind.SHARED
    return Kind.ROWS if (two[0], three[0]) == (2, 3) and two[1:] == three[1:] else Kind.ENTRIES
