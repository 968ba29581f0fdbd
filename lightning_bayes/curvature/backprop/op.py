"""One operation of a forward pass, and its vector–Jacobian products by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_bayes.curvature.gradients import disagreeing, quiet
from lightning_bayes.curvature.recorder import Version
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.inputs import tensors
from lightning_bayes.network.slow_path import first_line, is_missing_rule, log_slow_path


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
