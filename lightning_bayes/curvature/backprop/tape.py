"""The operations of one forward pass, in order, with what went in and came out.

A `TorchFunctionMode` sees each operation as the network's author wrote it: `F.softsign` is one, not its parts. The
graph that autograd builds beside it knows what depends on the parameters, and has each operation's backward pass. The
network computes what it always does. Where it overwrites a tensor in place, the tape keeps the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.backprop.op import Op, RuleError, swapped
from lightning_bayes.curvature.recorder import Version
from lightning_bayes.network.inputs import tensors


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
