"""Vector–Jacobian products: of many columns to every layer's output at once, and per example where no rule applies.

Both run vectorised where PyTorch has batching rules for every operator of the network, and fall back, once per network,
to a loop where it has not (custom functions, fused recurrent kernels).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from lightning_bayes.curvature import inputs
from lightning_bayes.curvature.recorder import Call

MEMORY = 2**25  # bytes that the gradients of one chunk may take: beyond it, caches suffer more than calls save
CACHE = 2**22  # bytes of a layer's own gradients that are worked on at a time


class LayerGradients:
    """`columnsᵀ ∂f/∂z` for the output `z` of every call."""

    def __init__(self) -> None:
        self._batched = True
        self._buffers: list[Tensor] = []

    def __call__(self, f: Tensor, calls: list[Call], columns: Tensor) -> list[Tensor]:
        """Valid until the next call.  # columns [k, *f.shape] -> one [k, *z.shape] per call"""
        columns = columns.to(f.dtype)
        edges = [call.edge for call in calls]
        if self._batched and len(columns) > 1 and all(call.layer.batches for call in calls):
            try:
                with quiet():
                    found = torch.autograd.grad(
                        f, edges, columns, retain_graph=True, allow_unused=True, is_grads_batched=True
                    )
                return [_or_zero(g, call, columns) for g, call in zip(found, calls, strict=True)]
            except RuntimeError:
                self._batched = False
        if len(columns) == 1:
            found = torch.autograd.grad(f, edges, columns[0], retain_graph=True, allow_unused=True)
            return [
                _or_zero(g if g is None else g.unsqueeze(0), call, columns)
                for g, call in zip(found, calls, strict=True)
            ]
        return self._looped(f, calls, columns)

    def _looped(self, f: Tensor, calls: list[Call], columns: Tensor) -> list[Tensor]:
        """An example's columns lie together, as its own gradient needs them, and in memory that the next call reuses:
        new memory would cost more than the copy."""
        shapes = [(call.output_shape[0], len(columns), *call.output_shape[1:]) for call in calls]
        if [g.shape for g in self._buffers] != shapes or self._buffers[0].dtype != columns.dtype:
            self._buffers = [columns.new_empty(shape) for shape in shapes]
        edges = [call.edge for call in calls]
        for k, column in enumerate(columns):
            found = torch.autograd.grad(f, edges, column, retain_graph=True, allow_unused=True)
            for buffer, g in zip(self._buffers, found, strict=True):
                buffer[:, k] = 0 if g is None else g
        return [buffer.movedim(1, 0) for buffer in self._buffers]

    @staticmethod
    def chunk_size(calls: list[Call], f: Tensor) -> int:
        per_column = max(sum(call.output_shape.numel() for call in calls), f.numel()) * f.element_size()
        return max(1, MEMORY // max(per_column, 1))


class ParameterGradients:
    """Per-example gradients of parameters that no layer rule covers, exact, and as slow as that is."""

    def __init__(self, network: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self._network, self._parameters = network, parameters
        self._vectorised = True

    def __call__(self, x: Any, columns: Tensor, consume: Callable[[dict[str, Tensor], slice], None]) -> None:
        """Hand the gradients `{name: [k, b, numel]}` of a few examples at a time, and which those are, to `consume`."""
        K, B = columns.shape[:2]
        size = sum(p.numel() * p.element_size() for p in self._parameters.values())
        chunk = max(1, MEMORY // max(K * size, 1))
        for start in range(0, B, chunk):
            part = slice(start, min(start + chunk, B))
            consume(self._some(inputs.take(x, part), columns[:, part]), part)

    def _some(self, x: Any, columns: Tensor) -> dict[str, Tensor]:
        if self._vectorised:
            try:
                with quiet():
                    return self._vmapped(x, columns)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError):
                self._vectorised = False
        return self._looped(x, columns)

    def _vmapped(self, x: Any, columns: Tensor) -> dict[str, Tensor]:
        parameters = {name: p.detach() for name, p in self._parameters.items()}
        dims = inputs.batch_dims(x)

        def one(x_n: Any, columns_n: Tensor) -> dict[str, Tensor]:
            def f(p: dict[str, Tensor]) -> Tensor:
                module = NetworkCall(self._network)
                prefixed = {f"network.{name}": value for name, value in p.items()}
                return functional_call(module, prefixed, (inputs.add_batch_dim(x_n, dims),)).squeeze(0)

            output, pullback = vjp(f, parameters)[:2]
            return vmap(lambda c: pullback(c.to(output.dtype))[0])(columns_n)

        found = vmap(one, in_dims=(dims, 1), out_dims=1)(x, columns)
        return {name: g.reshape(*g.shape[:2], -1) for name, g in found.items()}  # [k, b, numel]

    def _looped(self, x: Any, columns: Tensor) -> dict[str, Tensor]:
        K, B = columns.shape[:2]
        names, parameters = list(self._parameters), list(self._parameters.values())
        found = {n: p.new_zeros(K, B, p.numel()) for n, p in self._parameters.items()}
        for b in range(B):
            f = inputs.call(self._network, inputs.take(x, slice(b, b + 1)))
            for k in range(K):
                cotangent = columns[k, b : b + 1].to(f.dtype)
                grads = torch.autograd.grad(f, parameters, cotangent, retain_graph=k < K - 1, allow_unused=True)
                for name, g in zip(names, grads, strict=True):
                    if g is not None:
                        found[name][k, b] = g.flatten()
        return found


class NetworkCall(nn.Module):
    """`functional_call` passes arguments its own way; this passes them ours."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.training = network.training

    def forward(self, x: Any) -> Tensor:
        return inputs.bare_call(self.network, x)


@contextmanager
def quiet() -> Iterator[None]:
    """Without PyTorch's note on operators that have no batching rule of their own: it is right, only slower."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def _or_zero(g: Tensor | None, call: Call, columns: Tensor) -> Tensor:
    return columns.new_zeros(len(columns), *call.output_shape) if g is None else g
