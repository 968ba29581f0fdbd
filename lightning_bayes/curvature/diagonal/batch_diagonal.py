"""The diagonal of a batch's GGN, `Σₙ diag(JₙᵀΛₙJₙ)`, by one backward pass (Laplacian autoencoders, section 3).

A matrix `M`, at the outputs `Λ`, is carried back through the network, and at every layer turned into the diagonal of
its weights' block (appendix E, algorithm 1). Three modes say which part of `M` is carried:

- `exact`:   `M` itself, as columns `S` with `M = SSᵀ`; at a bottleneck of `R` features `R` of them are enough.
- `approx`:  `diag(M)` alone, as if a layer's features were uncorrelated, at the cost of an ordinary backward pass.
- `mixed`:   `M` where a tensor has at most `threshold` features per example, `diag(M)` elsewhere.

`exact` by the columns of `fit_curvature` takes over where a weight is used in a way that has no rule here, or where no
bottleneck makes this way the cheaper one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_bayes.curvature.accumulate import DiagonalAccumulator
from lightning_bayes.curvature.curvature_sum import CurvatureSum
from lightning_bayes.curvature.diagonal.tape import Probe, RuleError, Signature, probe, run
from lightning_bayes.curvature.diagonal.walk import Walk
from lightning_bayes.jacobian.checks import BatchChecks, check_output
from lightning_bayes.jacobian.graph import keeps_rows, uses
from lightning_bayes.jacobian.plan import Plan, make_plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, Subset, inputs
from lightning_bayes.network.borrowed import borrowed, unwrap

MODES = ("auto", "exact", "approx", "mixed")
THRESHOLD = 256  # features per example up to which "mixed" carries the whole matrix


class BatchDiagonal:
    """`diag Σₙ JₙᵀΛₙJₙ` of the weights of `subset`, batch by batch. The first batch shows which way is the cheapest;
    what cannot be done is refused with it, by name. Outputs and targets are looked at now and then; `checks=False` is
    for a caller that does."""

    def __init__(
        self,
        network: nn.Module,
        subset: Subset,
        likelihood: Likelihood,
        mode: str = "auto",
        threshold: float = THRESHOLD,
        checks: bool = True,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}: use one of {', '.join(map(repr, MODES))}")
        if not threshold >= 0:
            raise ValueError(f"threshold must not be negative, got {threshold}")
        self.network, self.subset, self.likelihood = network, subset, likelihood
        self.mode, self.threshold = mode, threshold
        self._checks = BatchChecks(likelihood, unit="curvature measurement") if checks else None
        self._way: Callable[[nn.Module, Any, Tensor], Tensor] | None = None

    def __call__(self, x: Any, y: Tensor) -> Tensor:
        """Summed over the batch.  # [P]"""
        network = unwrap(self.network)
        with borrowed(network, self.subset.names), torch.no_grad():
            x = _own(x)
            self._way = self._way or self._find_way(network, x)
            return self._way(network, x, y)

    def look(self) -> None:
        """Raise what was wrong with the outputs or targets of a batch since the last look."""
        if self._checks is not None:
            self._checks.raise_pending()

    def _find_way(self, network: nn.Module, x: Any) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        threshold = {"exact": math.inf, "approx": 0.0}.get(self.mode, self.threshold)
        try:
            few = probe(network, self.subset, x)
            if self.mode == "auto" and few.largest <= threshold:
                threshold = math.inf
            merges = _rehearse(network, self.subset, few, threshold)
            # An exact walk needs to know whose each row is.
            if threshold < math.inf or (merges and keeps_rows(uses(few.f), len(few.f))):
                return partial(self._walk, threshold, few.signature)
        except RuleError:
            if threshold < math.inf:
                raise
        with torch.enable_grad():
            return partial(self._by_columns, make_plan(network, x, self.subset))

    def _by_columns(self, plan: Plan, network: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The path of `fit_curvature`, for this batch alone."""
        total = CurvatureSum(network, plan, self.likelihood, checks=self._checks)
        with torch.enable_grad():
            total.add(x, y)
        return total.structure().diagonal()

    def _walk(self, threshold: float, signature: Signature, network: nn.Module, x: Any, y: Tensor) -> Tensor:
        parameters = list(self.subset.parameters(network).values())
        f, ops = run(network, self.subset, x)
        if self._checks is not None:
            y = self._checks.add(x, f.detach(), y)
            self._checks.end_batch()
        walk = Walk(ops, f, signature.kinds_of(ops) if threshold > 0 else {}, threshold, parameters)
        by_root = walk.output_is_whole and not self.likelihood.has_diagonal_fisher
        Λ = self.likelihood.fisher_root(f, y) if by_root else self.likelihood.fisher_diagonal(f, y)
        del f  # it would keep the whole graph
        if by_root:
            walk.from_root(Λ, self.likelihood.couples_outputs)
        else:
            walk.from_diagonal(Λ)
        diagonals = [_or_zeros(walk.diagonals[id(p)], p) for p in parameters]
        return self.subset.narrow(torch.cat([d.reshape(-1) for d in diagonals]))


class DiagonalSum(CurvatureSum):
    """The fast diagonals of all batches: `fit_curvature(..., hessian="approx")`."""

    def __init__(
        self, network: nn.Module, plan: Plan, likelihood: Likelihood, hessian: str, processes: Processes | None
    ) -> None:
        super().__init__(network, plan, likelihood, processes=processes)
        self._of_batch = BatchDiagonal(network, replace(plan.subset, mask=None), likelihood, hessian, checks=False)

    def blocks(self) -> list[tuple[str, str]]:
        return [(name, f"{self._of_batch.mode} diagonal") for name in self._plan.subset.names]

    def _add(self, x: Any, y: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        f = inputs.call(self._network, x)
        check_output(f, inputs.batch_size(x))
        outputs = f.detach()
        y = self._checks.add(x, outputs, y)
        diagonal = self._of_batch(x, y)
        assert isinstance(self._accumulator, DiagonalAccumulator)
        self._accumulator.add_diagonal(diagonal)
        self._add_gradient(f, -self._likelihood.residual(outputs, y))
        return outputs, y


def choose_mode(network: nn.Module, subset: Subset, likelihood: Likelihood, x: Any, threshold: float) -> str:
    """For "auto": "exact" where `M` is never large, else "mixed"; refuses, by name, what "mixed" has no rule for."""
    network = unwrap(network)
    with borrowed(network, subset.names), torch.no_grad():
        few = probe(network, subset, _own(x))
        if few.largest <= threshold:
            return "exact"
        _rehearse(network, subset, few, threshold)
    return "mixed"


def _rehearse(network: nn.Module, subset: Subset, few: Probe, threshold: float) -> bool:
    """The walk for the few examples of a probe, with `Λ = I`, to raise what it raises; whether it merges columns."""
    f, kinds = few.f, few.signature.kinds_of(few.ops)
    walk = Walk(few.ops, f, kinds, threshold, subset.parameters(network).values())
    merges = bool(walk.stops(f[0].numel()))
    if merges or threshold < math.inf:
        walk.from_diagonal(torch.ones_like(f, dtype=torch.promote_types(f.dtype, torch.float32)))
    return merges


def _or_zeros(d: Tensor | None, p: Tensor) -> Tensor:
    """In at least float32."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p, dtype=wide) if d is None else d.to(wide)


def _own(x: Any) -> Any:
    """A copy of the input, because a network may write into it; without gradients of its own."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), x)
