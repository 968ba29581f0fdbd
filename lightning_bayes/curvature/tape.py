"""The operations of one forward pass, with their inputs, outputs and vector–Jacobian products.

A `TorchFunctionMode` sees each operation as the author of the network wrote it: `F.softsign` is one operation. Autograd
builds its graph at the same time: it knows which tensors depend on the parameters, and has the backward pass of each
operation. The network computes the same as without the tape. If it overwrites a tensor in place, the tape keeps the old
values.

Two small batches show how each tensor relates to the examples: it has a row for each example, or the entries of an
example lie elsewhere (time first, positions merged into the batch), or all examples share it.
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

from lightning_bayes.jacobian.calls import Version
from lightning_bayes.jacobian.checks import check_examples_apart, check_output
from lightning_bayes.jacobian.gradients import disagreeing, quiet
from lightning_bayes.network import CurvatureError, Subset, inputs
from lightning_bayes.network.errors import first_line, is_missing_rule, log_slow_path
from lightning_bayes.network.inputs import tensors
from lightning_bayes.network.private import pytree


class RuleError(CurvatureError):
    """No rule propagates a diagonal through an operation; the message names the operation."""


@dataclass(eq=False)
class Op:
    """One operation. Its `tracked` inputs are the chosen parameters and tensors that depend on them."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    outputs: list[Tensor]  # only outputs that depend on the parameters
    places: list[int]  # positions of the outputs among all returned tensors
    tracked: list[Tensor]
    versions: list[Version]  # of all input tensors
    recorded: bool = True  # whether the outputs' autograd graph can be used for this operation
    where: str = ""  # " in <module>"

    @property
    def all_tensors(self) -> list[Tensor]:
        """All inputs and outputs."""
        return [*(version.tensor for version in self.versions), *self.outputs]

    def argument(self, name: str, position: int | None = None, default: Any = None) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position is not None and len(self.args) > position else default

    def run(self, replacements: dict[int, Tensor]) -> list[Tensor]:
        """Run the operation with some inputs, given by `id`, replaced by other tensors."""
        args, kwargs = replace_tensors((self.args, self.kwargs), replacements)
        returned = tensors(self.func(*args, **kwargs))
        return [returned[place] for place in self.places]

    def pull(self, cotangents: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
        """`Jᵀc` for the given tracked inputs, from one `c` per output (`None` for zero)."""
        gradients = _grad(*self._graph(cotangents, inputs))
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, gradients, strict=True)]

    def pull_many(self, cotangents: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
        """`Jᵀc` for `K` columns `c` per output.  # [K, *output] -> [K, *input]"""
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
        """Outputs, inputs and cotangents for autograd: of the recorded graph, or of a second run if one input may
        depend on another."""
        outputs, leaves = self.outputs, list(inputs)
        if not self.recorded or len(self.tracked) > 1:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in inputs]
                outputs = self.run({id(t): leaf for t, leaf in zip(inputs, leaves, strict=True)})
        used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
        return [o for o, _ in used], leaves, [c.to(o.dtype) for o, c in used]


def replace_tensors(tree: Any, replacements: dict[int, Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: replacements.get(id(leaf), leaf), tree)


def _grad(
    outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor], **options: Any
) -> Sequence[Tensor | None]:
    if not outputs:
        return [None] * len(inputs)
    return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True, **options)


class Tape(TorchFunctionMode):
    """Records every operation that depends on `parameters`, with the innermost of the `running` modules at that time.
    No other tensor may require gradients."""

    def __init__(self, parameters: Iterable[Tensor], running: Sequence[str] = ()) -> None:
        super().__init__()
        self._ops: list[Op] = []
        self._known = {id(p): p for p in parameters}  # kept alive, because ids are reused
        self._overwritten: dict[
            int, tuple[Tensor, str]
        ] = {}  # tensors overwritten through another tensor on the same memory, and the name of the operation
        self._running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list({id(t): t for t in tensors((args, kwargs))}.values())
        tracked = [t for t in arguments if t.requires_grad]
        if not tracked:
            return func(*args, **kwargs)
        for t in tracked:
            self._check_origin(t)
        name = _name(func)
        target = _target(name, args, kwargs)
        copies = {} if target is None else self._copies(target)
        versions = [Version.of(t) for t in arguments]
        result = func(*args, **kwargs)
        written = [version.tensor for version in versions if version.overwritten]
        if written:
            plain = _out_of_place(func, name) if len(written) == 1 and written[0] is target else None
            if plain is None or target is None:
                raise RuleError(
                    f"{name}{self._where()} writes into a tensor in place: use an operation that makes a new tensor, "
                    "or hessian='exact'"
                )
            self._replace(copies, target, name)
            func, name = plain, name.removesuffix("_")
            args, kwargs = replace_tensors((args, {k: v for k, v in kwargs.items() if k != "inplace"}), copies)
            tracked = [copies.get(id(t), t) for t in tracked]
            versions = [Version.of(copies.get(id(t), t)) for t in arguments]
        unchanged = {id(t) for t in arguments} - {id(t) for t in written}
        returned = tensors(result)
        places = [i for i, t in enumerate(returned) if t.requires_grad and id(t) not in unchanged]
        if places:
            outputs = [returned[i] for i in places]
            args, kwargs = replace_tensors((args, kwargs), {})  # a copy, because a list may grow after its use
            self._add(Op(func, args, kwargs, name, outputs, places, tracked, versions, not written, self._where()))
        return result

    def ops_to(self, f: Tensor) -> list[Op]:
        """The operations that `f` depends on, in order."""
        self._check_origin(f)
        needed, ops = {id(f)}, []
        for op in reversed(self._ops):
            if any(id(t) in needed for t in op.outputs):
                if any(version.overwritten for version in op.versions):
                    raise RuleError(
                        f"the input of {op.name}{op.where} was overwritten in place after its use: use an operation "
                        "that makes a new tensor"
                    )
                needed |= {id(t) for t in op.tracked}
                ops.append(op)
        return ops[::-1]

    def _add(self, op: Op) -> None:
        self._ops.append(op)
        self._known.update({id(t): t for t in op.outputs})

    def _check_origin(self, t: Tensor) -> None:
        """Raise an error if the origin of a tensor is unknown."""
        if id(t) in self._overwritten:
            name = self._overwritten[id(t)][1]
            raise RuleError(
                f"{name}{self._where()} writes in place into the memory of a tensor that is used afterwards: use an "
                "operation that makes a new tensor, or hessian='exact'"
            )
        if id(t) in self._known:
            return
        origin = "a tensor that requires gradients" if t.grad_fn is None else t.grad_fn.name()
        if origin == "BackwardHookFunctionBackward":  # from the inputs of a module with a backward hook
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
        """Copies of a tensor that is about to be overwritten, and of recorded tensors on the same memory."""
        memory = target.untyped_storage().data_ptr()
        copies = {id(target): target.detach().clone()}
        for op in self._ops:
            for t in op.all_tensors:
                if id(t) not in copies and t.untyped_storage().data_ptr() == memory:
                    copies[id(t)] = t.detach().clone()
        return copies

    def _replace(self, copies: dict[int, Tensor], target: Tensor, name: str) -> None:
        """Replace the recorded tensors with their copies."""
        for op in self._ops:
            before = op.all_tensors
            if any(id(t) in copies for t in before):
                op.args, op.kwargs = replace_tensors((op.args, op.kwargs), copies)
                op.outputs = [copies.get(id(t), t) for t in op.outputs]
                op.tracked = [copies.get(id(t), t) for t in op.tracked]
                op.versions = [Version.of(copies[id(v.tensor)]) if id(v.tensor) in copies else v for v in op.versions]
                op.recorded = False
                for t in before:
                    if id(t) in copies and t is not target:
                        self._overwritten[id(t)] = (t, name)
        for old, copy in copies.items():
            if self._known.pop(old, None) is not None:
                self._known[id(copy)] = copy

    def _where(self) -> str:
        return self._running[-1] if self._running else ""


@contextmanager
def running_modules(network: nn.Module) -> Iterator[list[str]]:
    """The modules whose `forward` is running, innermost last, as " in <name> (<class>)"."""
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
    if name == "__get__":  # the getter of a property such as `x.mT`
        return getattr(func.__self__, "__name__", name)
    return name


def _target(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that an operation will overwrite, judging by its name and options."""
    if kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__")):
        first = args[0] if args else kwargs.get("input")
        return first if isinstance(first, Tensor) else None
    return None


def _out_of_place(func: Any, name: str) -> Callable[..., Any] | None:
    """The version of an in-place operation that returns a new tensor."""
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
        """The kind of each output, by its `id`."""
        if tuple(op.name for op in ops) != self.names:
            raise RuleError(
                "the network's operations depend on the data, so it is unknown which tensors have a row for each "
                "example: use hessian='approx'"
            )
        return {
            id(t): kind
            for op, kinds in zip(ops, self.kinds, strict=True)
            for t, kind in zip(op.outputs, kinds, strict=True)
        }


def run(network: nn.Module, subset: Subset, x: Any, running: Sequence[str] = ()) -> tuple[Tensor, list[Op]]:
    """The output and the operations that lead to it; `network` must be borrowed (see `network.borrowed`)."""
    with torch.enable_grad(), Tape(subset.parameters(network).values(), running) as tape:
        f = inputs.call(network, x)
    check_output(f, inputs.batch_size(x))
    return f, tape.ops_to(f)


@dataclass(frozen=True)
class Probe:
    """The operations of a network on two examples."""

    f: Tensor
    ops: list[Op]
    signature: Signature

    @property
    def largest(self) -> float:
        """The largest number of features of an example in any tensor."""
        kinds = self.signature.kinds_of(self.ops)
        return max(t.numel() / 2 for op in self.ops for t in op.outputs if kinds[id(t)] is not Kind.SHARED)


def probe(network: nn.Module, subset: Subset, x: Any) -> Probe:
    """Run the network on two and on three examples of `x`."""
    with running_modules(network) as running:
        f, two = run(network, subset, inputs.few(network, x, 2), running)
    f_three, three = run(network, subset, inputs.few(network, x, 3))
    check_examples_apart(network, f, f_three)
    names = tuple(op.name for op in two)
    if names != tuple(op.name for op in three):
        raise RuleError(
            "the network's operations depend on the data or on the batch size, so no rule applies: use hessian='exact'"
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
