"""The operations of one forward pass, in order, with what went in and came out.

A `TorchFunctionMode` sees each operation as the network's author wrote it: `F.softsign` is one, and not the absolute
value, sum and quotient that it is made of. No graph is needed, so that the pass runs without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_bayes.curvature.errors import CurvatureError


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. `tracked` are those of its inputs that depend on the chosen parameters, or are such."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    tracked: list[Tensor]

    @property
    def name(self) -> str:
        name = getattr(self.func, "__name__", str(self.func))
        # Properties such as `x.mT` come as the getter of a descriptor.
        owner = getattr(self.func, "__self__", None)
        return getattr(owner, "__name__", name) if name == "__get__" else name

    def run(self, replacements: dict[int, Tensor]) -> list[Tensor]:
        """The outputs with other tensors in the place of some inputs, by their `id`."""

        def swap(leaf: Any) -> Any:
            return replacements.get(id(leaf), leaf)

        args, kwargs = pytree.tree_map(swap, (self.args, self.kwargs))
        return _tensors(self.func(*args, **kwargs))


class Tape(TorchFunctionMode):
    """Records every operation that depends on `parameters`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._tracked = {id(p): p for p in parameters}  # holding them, because an id is one only while they live

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("inplace") is True:  # an input that is needed later must not be overwritten
            kwargs["inplace"] = False
        leaves = [t for t in _tensors((args, kwargs)) if id(t) in self._tracked]
        versions = [t._version for t in leaves]
        found = func(*args, **kwargs)
        if not leaves:
            return found
        if [t._version for t in leaves] != versions:
            raise CurvatureError(
                f"{getattr(func, '__name__', func)} overwrites its input in place, which curvature still needs: use "
                "the form that makes a new tensor"
            )
        outputs = [t for t in _tensors(found) if t.is_floating_point() and not any(t is leaf for leaf in leaves)]
        if outputs:
            self.ops.append(Op(func, args, kwargs, outputs, list(dict.fromkeys(leaves))))
            self._tracked.update({id(t): t for t in outputs})
        return found


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
