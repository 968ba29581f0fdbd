"""The diagonal of a batch's GGN, `Σₙ diag(JₙᵀΛₙJₙ)`, by one backward pass (Laplacian autoencoders, section 3).

A matrix `M`, at the outputs `Λ`, is carried back through the network, and at every layer turned into the diagonal of
its weights' block. Three modes say what of `M` is carried:

- `exact`:   `M` itself, as columns `S` with `M = SSᵀ`; at a bottleneck of `R` features `R` of them are enough.
- `approx`:  `diag(M)` alone, as if the features of a layer were uncorrelated. Time and memory are those of an ordinary
  backward pass, linear in the number of pixels.
- `mixed`:   `M` where a tensor has at most `threshold` features per example, `diag(M)` elsewhere.

`exact` by the columns of `fit_curvature` takes over where an operation has no rule here, or where no bottleneck makes
the other way cheaper.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import inputs
from lightning_bayes.curvature.accumulate import make_accumulator
from lightning_bayes.curvature.backprop.layers import layer_diagonal, layer_of
from lightning_bayes.curvature.backprop.rules import RuleError, backward, check_rule, squared_backward
from lightning_bayes.curvature.backprop.tape import Op, Tape
from lightning_bayes.curvature.fit import Sum
from lightning_bayes.curvature.plan import make_plan
from lightning_bayes.curvature.preserve import borrowed
from lightning_bayes.curvature.processes import Processes
from lightning_bayes.curvature.subset import Subset
from lightning_bayes.likelihoods import Likelihood

MODES = ("auto", "exact", "approx", "mixed")
THRESHOLD = 256  # features per example up to which "mixed" carries the whole matrix


@dataclass(frozen=True)
class BatchDiagonal:
    """`diag Σₙ JₙᵀΛₙJₙ` of the weights of `subset`, batch by batch. The network is left as it was."""

    network: nn.Module
    subset: Subset
    likelihood: Likelihood
    mode: str = "auto"
    threshold: float = THRESHOLD

    def __call__(self, x: Any, y: Tensor) -> Tensor:
        """Summed over the batch.  # [P]"""
        with borrowed(self.network, self.subset.names):
            threshold = {"exact": math.inf, "approx": 0.0, "mixed": self.threshold}[self.mode]
            return self._walk(x, y, threshold) if threshold < math.inf else self._exact(x, y)

    def _exact(self, x: Any, y: Tensor) -> Tensor:
        try:
            return self._walk(x, y, math.inf)
        except RuleError:
            return self._by_columns(x, y)

    def _by_columns(self, x: Any, y: Tensor) -> Tensor:
        """The path of `fit_curvature`, for this batch alone."""
        plan = make_plan(self.network, x, self.subset)
        first = next(iter(self.subset.parameters(self.network).values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        total = Sum(
            self.network,
            plan,
            make_accumulator("diag", plan, "expand", dtype, first.device),
            self.likelihood,
            "ggn",
            1,
            0,
            Processes(),
        )
        total.add(x, y)
        return total.finish().structure.diagonal()

    @torch.no_grad()
    def _walk(self, x: Any, y: Tensor, threshold: float) -> Tensor:
        parameters = self.subset.parameters(self.network)
        with Tape(parameters.values()) as tape:
            f = inputs.call(self.network, x)
        self.likelihood.check(f, y)
        uses = Counter(id(t) for op in tape.ops for t in op.tracked)
        if threshold == math.inf and any(uses[id(p)] > 1 for p in parameters.values()):
            raise RuleError("a layer that is used twice has cross terms, which this walk drops")
        found = {id(p): torch.zeros_like(p) for p in parameters.values()}
        walk = _Walk(len(f), threshold, found)
        walk.begin(f, self.likelihood, y)
        for op in reversed(tape.ops):
            walk.step(op)
        flat = torch.cat([found[id(p)].reshape(-1) for p in parameters.values()])
        return self.subset.narrow(flat)


def choose_mode(network: nn.Module, subset: Subset, likelihood: Likelihood, x: Any, threshold: float) -> str:
    """For "auto": "exact" where `M` is never large, else "mixed"; refuses, by name, what "mixed" has no rule for."""
    with borrowed(network, subset.names), torch.no_grad():
        with Tape(subset.parameters(network).values()) as tape:
            f = inputs.call(network, x)
        largest = max((_features(t, len(f)) for op in tape.ops for t in op.outputs), default=0.0)
        if max(f[0].numel(), largest) <= threshold:
            return "exact"
        for op in tape.ops:
            check_rule(op)
    return "mixed"


@dataclass
class _Carried:
    """What has arrived at a tensor: `diag(M)` `[B, …]`, or columns `[K, B, …]` in a basis."""

    diagonal: Tensor | None = None
    columns: Tensor | None = None
    basis: object = None

    def add(self, other: _Carried) -> None:
        if other.diagonal is not None:
            self.diagonal = other.diagonal if self.diagonal is None else self.diagonal + other.diagonal
        elif self.columns is None:
            self.columns, self.basis = other.columns, other.basis
        elif self.basis is other.basis:
            self.columns = self.columns + other.columns  # type: ignore[operator]
        else:  # columns of different origin: their cross terms are not known
            self.columns, self.basis = torch.cat([self.columns, other.columns]), object()  # type: ignore[list-item]


class _Walk:
    """One backward pass. Each tensor has the form that its size asks for."""

    def __init__(self, B: int, threshold: float, found: dict[int, Tensor]) -> None:
        self._B, self._threshold, self._found = B, threshold, found
        self._at: dict[int, _Carried] = {}

    def begin(self, f: Tensor, likelihood: Likelihood, y: Tensor) -> None:
        if self._is_whole(f):
            S = likelihood.fisher_root(f, y)
            self._at[id(f)] = _Carried(columns=S if f.ndim <= 2 else _apart(S), basis=object())
        else:
            self._at[id(f)] = _Carried(diagonal=likelihood.fisher_diagonal(f, y))

    def step(self, op: Op) -> None:
        arrived = [self._at.pop(id(o), None) for o in op.outputs]
        if not any(arrived):
            return
        if any(a is not None and a.columns is not None for a in arrived):
            self._carry_columns(op, arrived)
        else:
            d = [None if a is None else a.diagonal for a in arrived]
            for t, there in zip(op.tracked, squared_backward(op, d), strict=True):
                self._arrive(t, there)

    def _carry_columns(self, op: Op, arrived: list[_Carried | None]) -> None:
        columns, basis = _aligned(arrived)
        if len(op.outputs) == 1 and not self._at:  # all goes through here, and no more columns than features are needed
            columns[0], basis = self._compressed(columns[0], basis)
        features = [t for t in op.tracked if id(t) not in self._found]
        weights = [t for t in op.tracked if id(t) in self._found]
        if weights:
            assert columns[0] is not None
            for t, there in layer_diagonal(layer_of(op), op, columns[0], weights):
                self._found[id(t)] += there
        if not features:
            return
        for t, there in zip(features, backward(op, columns, features), strict=True):
            if self._is_whole(t):
                self._join(t, _Carried(columns=there, basis=basis))
            else:
                self._join(t, _Carried(diagonal=there.square().sum(0)))

    def _arrive(self, t: Tensor, d: Tensor) -> None:
        if id(t) in self._found:
            self._found[id(t)] += d
        elif self._is_whole(t):
            self._join(t, _Carried(columns=_spread(d), basis=object()))
        else:
            self._join(t, _Carried(diagonal=d))

    def _join(self, t: Tensor, carried: _Carried) -> None:
        if id(t) in self._at:
            self._at[id(t)].add(carried)
        else:
            self._at[id(t)] = carried

    def _is_whole(self, t: Tensor) -> bool:
        return _features(t, self._B) <= self._threshold

    def _compressed(self, S: Tensor | None, basis: object) -> tuple[Tensor | None, object]:
        """At a tensor of `R` features `R` columns do: the symmetric root of `SSᵀ`."""
        if S is None or S.shape[1] != self._B or S[0, 0].numel() >= len(S):
            return S, basis
        flat = S.flatten(2).movedim(0, -1)  # [B, R, K]
        λ, Q = torch.linalg.eigh(flat @ flat.mT)
        root = (Q * λ.clamp_min(0).sqrt().unsqueeze(-2)).movedim(-1, 0)  # [R, B, R]
        return root.reshape(-1, *S.shape[1:]), object()


def _features(t: Tensor, B: int) -> float:
    """Per example; a tensor whose first dimension does not count examples is never small."""
    return t[0].numel() if t.ndim and t.shape[0] == B else math.inf


def _aligned(arrived: list[_Carried | None]) -> tuple[list[Tensor | None], object]:
    """Columns of several outputs of one operation, in one basis."""
    bases = {id(a.basis) for a in arrived if a is not None}
    if len(bases) > 1 or any(a is not None and a.columns is None for a in arrived):
        raise RuleError("several outputs of one operation with columns of different origin: use hessian='approx'")
    return [None if a is None else a.columns for a in arrived], next(a.basis for a in arrived if a is not None)


def _spread(d: Tensor) -> Tensor:
    """`diag(d)` as columns, one feature in each.  # [B, …] -> [R, B, …]"""
    flat = d.flatten(1)
    eye = torch.eye(flat.shape[1], dtype=d.dtype, device=d.device)
    return (eye.unsqueeze(1) * flat.sqrt()).reshape(-1, *d.shape)


def _apart(S: Tensor) -> Tensor:
    """A dense output's columns at every position alone.  # [K, B, C, *positions] -> [K·R, B, C, *positions]"""
    flat = S.flatten(3)
    eye = torch.eye(flat.shape[3], dtype=S.dtype, device=S.device)
    return (flat.unsqueeze(1) * eye[:, None, None, :]).flatten(0, 1).reshape(-1, *S.shape[1:])
