"""The training points that a posterior in function space is conditioned on (see `function_space`).

Each of the `N` training points gets a random number that is a function of the seed and of the example's index. The `M`
points with the smallest numbers are kept, so the choice does not depend on batches or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import plain_values
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import DataError, Processes, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.loaders import ObservedLoader, check_loader
from lightning_bayes.network.private import pytree
from lightning_bayes.network.processes import uniforms
from lightning_bayes.options.predictive import GP
from lightning_bayes.posterior.gaussian import PosteriorError

if TYPE_CHECKING:
    from lightning_bayes.posterior.laplace import LaplacePosterior

_JOINT = 4096  # up to this many outputs of all points, "auto" treats them jointly
_LARGEST = 2**27  # entries of the kernel between all points
_DRAW = -1  # the draw number of `uniforms` that chooses points; labels use 0, 1, …


@dataclass(frozen=True, eq=False)
class TrainingPoints:
    """The inputs of `M` training points, and the output Fisher at these points, `Λ = SSᵀ`."""

    x: Any
    root: Tensor  # S [M, C, R]
    index: Tensor  # positions in the data [M]
    has_target: Tensor  # [M]
    outputs: str

    def __len__(self) -> int:
        return len(self.root)

    @property
    def is_independent(self) -> bool:
        return _is_independent(self.outputs, *self.root.shape[:2])

    def times(self, factor: float | Tensor) -> TrainingPoints:
        """The same points with `Λ` multiplied by the square of the factor."""
        return replace(self, root=self.root * torch.as_tensor(factor).to(self.root))

    def with_root(self, root: Tensor) -> TrainingPoints:
        """The same points with another `Λ`, which stays zero for points without a target."""
        return replace(self, root=root.cpu() * self.has_target.reshape(-1, 1, 1))


class PointSelection:
    """Selects points during a fit."""

    def __init__(self, options: GP, network: nn.Module, seed: int, processes: Processes | None) -> None:
        self._options, self._network, self._seed = options, network, seed
        self._processes = processes or Processes()
        self._best = _Smallest(network, options.points)
        self._seen, self._C = 0, 0  # numbers of examples, and of outputs per example

    def watched(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Iterate over the loader and keep points. Unsupported outputs, or more points than the kernel can hold, raise
        an error during the pass."""
        return ObservedLoader(self._network, check_loader(loader), self._keep)

    def put_into(self, posterior: LaplacePosterior) -> LaplacePosterior:
        """The fitted posterior with its points."""
        x, y, index = self._best.gathered(self._processes)
        roots = []
        for part in torch.arange(len(index), device="cpu").split(256):
            rows = part.tolist()
            f = _outputs(self._network, inputs.take(self._network, x, rows))
            roots.append(_root(posterior.likelihood, f, y[rows].to(f.device)).cpu())
        ignored = posterior.likelihood.ignore_index
        has_target = torch.ones(len(y), device="cpu") if ignored is None else (y.reshape(len(y), -1) != ignored).any(1)
        points = TrainingPoints(x, torch.cat(roots), index, has_target.bool(), self._options.outputs)
        return replace(posterior, points=points)

    def _keep(self, x: Any, y: Tensor) -> None:
        self._check_outputs(x)
        index = self._processes.examples(self._seen, inputs.batch_size(x), torch.device("cpu"))
        self._seen += len(index)
        if self._options.points is None:
            self._check_size(self._seen * self._processes.size)
        self._best.add(uniforms(self._seed, _DRAW, index, torch.Size(()), torch.float64), index, x, y)

    def _check_outputs(self, x: Any) -> None:
        if self._C:
            return
        f = _outputs(self._network, inputs.take(self._network, x, [0]))
        if f.ndim > 2:
            raise PosteriorError(
                f"gp= supports outputs [B] and [B, C], but the network's have shape {list(f.shape)}: leave it out"
            )
        self._C = f.numel()
        if self._options.points is not None:
            self._check_size(self._options.points)

    def _check_size(self, M: int) -> None:
        C, outputs = self._C, self._options.outputs
        independent = _is_independent(outputs, M, C)
        if (C * M**2 if independent else (C * M) ** 2) <= _LARGEST:
            return
        most = int((_LARGEST / C) ** 0.5 if independent else _LARGEST**0.5 / C)
        what = "all training points" if self._options.points is None else f"{M} points"
        advice = "" if independent else ", or outputs='independent'"
        raise PosteriorError(
            f"the kernel between {what} with {C} outputs is too large to condition on: use GP(points={most}) or "
            f"fewer{advice}"
        )


class _Smallest:
    """The examples with the smallest keys; ties go to the earlier examples."""

    def __init__(self, network: nn.Module, number: int | None) -> None:
        self._network, self._number = network, number
        self._parts: list[_Examples] = []

    def add(self, keys: Tensor, index: Tensor, x: Any, y: Tensor) -> None:
        part = _Examples(keys, index, _plain(x), y)
        if self._number is None:
            self._parts.append(part.take(self._network, torch.arange(len(keys), device="cpu")))
            return
        self._parts.append(part.take(self._network, part.smallest(self._number)))
        if sum(len(part.keys) for part in self._parts) > 2 * self._number:
            self._parts = [self._smallest_of(self._parts)]

    def gathered(self, processes: Processes) -> tuple[Any, Tensor, Tensor]:
        """Inputs, targets and positions of these examples over all processes, in the order of the data."""
        with processes.raising_together():  # examples of different shapes cannot be joined
            own = [self._smallest_of(self._parts)] if self._parts else []
        parts = [part for parts in processes.gather(own) for part in parts]
        best = self._smallest_of(parts)
        best = best.take(self._network, best.index.argsort())
        return best.x, best.y, best.index

    def _smallest_of(self, parts: list[_Examples]) -> _Examples:
        examples = _Examples.cat(self._network, parts)
        return examples if self._number is None else examples.take(self._network, examples.smallest(self._number))


@dataclass(frozen=True, eq=False)
class _Examples:
    keys: Tensor  # [B]
    index: Tensor  # [B]
    x: Any
    y: Tensor

    def smallest(self, number: int) -> Tensor:
        order = self.index.argsort()
        return order[self.keys[order].argsort(stable=True)[:number]]

    def take(self, network: nn.Module, rows: Tensor) -> _Examples:
        """Copy some rows to the CPU, so the batch can be freed."""
        x = inputs.to_device(inputs.take(network, self.x, rows.tolist()), torch.device("cpu"))
        return _Examples(self.keys[rows], self.index[rows], x, self.y[rows.to(self.y.device)].cpu())

    @staticmethod
    def cat(network: nn.Module, parts: list[_Examples]) -> _Examples:
        if len(parts) == 1:
            return parts[0]
        keys, index, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("keys", "index", "y"))
        return _Examples(keys, index, _cat(network, [part.x for part in parts]), y)


def _cat(network: nn.Module, xs: list[Any]) -> Any:
    """Concatenate batches."""
    spec, leaves = pytree.tree_structure(xs[0]), [pytree.tree_leaves(x) for x in xs]
    try:
        columns = [
            torch.cat(column) if is_batched else column[0]
            for is_batched, column in zip(inputs.batched(network, xs[0]), zip(*leaves, strict=True), strict=True)
        ]
    except RuntimeError:
        shapes = sorted({str(list(leaf.shape[1:])) for x in xs for leaf in inputs.tensors(x)})
        raise DataError(
            f"training points of different shapes cannot be kept together ({', '.join(shapes)}): pad them to one "
            "shape, or leave gp= out"
        ) from None
    return pytree.tree_unflatten(columns, spec)


def _plain(x: Any) -> Any:
    """Convert `x` to tensors in tuples, lists and dictionaries, which a file can store."""
    x = plain_values(x)
    for leaf in pytree.tree_leaves(x):
        if not isinstance(leaf, (Tensor, bool, int, float, str, type(None))):
            raise DataError(
                f"training points with a {type(leaf).__name__} cannot be kept: pass inputs that are tensors, or tuples "
                "and dictionaries of them, or leave gp= out"
            )
    return x


@torch.inference_mode(False)
@torch.no_grad()
def _outputs(network: nn.Module, x: Any) -> Tensor:
    with borrowed(network, ()):
        return inputs.call(network, inputs.to_device(x, inputs.device_of(network)))


def _root(likelihood: Likelihood, f: Tensor, y: Tensor | None) -> Tensor:
    """# [B, C, R]"""
    columns = likelihood.fisher_root(f, y)
    return columns.reshape(len(columns), len(f), -1).permute(1, 2, 0)


def _is_independent(outputs: str, M: int, C: int) -> bool:
    return M * C > _JOINT if outputs == "auto" else outputs == "independent"
