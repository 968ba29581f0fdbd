"""The diagonal of a batch's GGN, `Σₙ diag(JₙᵀΛₙJₙ)`, by one backward pass (Laplacian autoencoders, section 3).

A matrix `M`, at the outputs `Λ`, is carried back through the network, and at every layer turned into the diagonal of
its weights' block (appendix E, algorithm 1). Three modes say what of `M` is carried:

- `exact`:   `M` itself, as columns `S` with `M = SSᵀ`; at a bottleneck of `R` features `R` of them are enough.
- `approx`:  `diag(M)` alone, as if the features of a layer were uncorrelated. Time and memory are those of an ordinary
  backward pass, linear in the number of pixels.
- `mixed`:   `M` where a tensor has at most `threshold` features per example, `diag(M)` elsewhere.

`exact` by the columns of `fit_curvature` takes over where a weight is used in a way that has no rule here, or where no
bottleneck makes this way the cheaper one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_bayes.curvature.accumulate import make_accumulator
from lightning_bayes.curvature.backprop.op import RuleError
from lightning_bayes.curvature.backprop.trace import Layout, Probe, probe, run
from lightning_bayes.curvature.backprop.walk import Walk
from lightning_bayes.curvature.fit import HESSIANS, CurvatureSum
from lightning_bayes.curvature.graph import keeps_rows, uses
from lightning_bayes.curvature.plan import Plan, make_plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.borrowed import borrowed, unwrap
from lightning_bayes.network.processes import Processes
from lightning_bayes.network.subset import Subset

MODES = HESSIANS
THRESHOLD = 256  # features per example up to which "mixed" carries the whole matrix


@dataclass
class _Learned:
    """Of the network, from the first batch."""

    threshold: float | None = None
    layout: Layout | None = None
    plan: Plan | None = None  # of `fit_curvature`, where that is the way


@dataclass(frozen=True)
class BatchDiagonal:
    """`diag Σₙ JₙᵀΛₙJₙ` of the weights of `subset`, batch by batch. The network is left as it was.

    What cannot be done is refused, by name, with the first batch.
    """

    network: nn.Module
    subset: Subset
    likelihood: Likelihood
    mode: str = "auto"
    threshold: float = THRESHOLD
    _learned: _Learned = field(default_factory=_Learned, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}: use one of {', '.join(map(repr, MODES))}")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must not be negative, got {self.threshold}")

    def __call__(self, x: Any, y: Tensor) -> Tensor:
        """Summed over the batch.  # [P]"""
        network, learned = unwrap(self.network), self._learned
        with borrowed(network, self.subset.names), torch.no_grad():
            x = _own(x)
            if learned.threshold is None:
                self._learn(network, x)
            return self._walk(network, x, y) if learned.plan is None else self._by_columns(network, learned.plan, x, y)

    def _learn(self, network: nn.Module, x: Any) -> None:
        threshold = {"exact": math.inf, "approx": 0.0}.get(self.mode, self.threshold)
        try:
            found = probe(network, self.subset, x)
            if self.mode == "auto" and found.largest <= threshold:
                threshold = math.inf
            merges = _rehearse(network, self.subset, found, threshold)
            if threshold == math.inf:  # the walk needs to know whose each row is
                merges = merges and keeps_rows(uses(found.f), len(found.f))
            self._learned.layout = found.layout
        except RuleError:
            if threshold < math.inf:
                raise
            merges = False
        if threshold == math.inf and not merges:
            with torch.enable_grad():
                self._learned.plan = make_plan(network, x, self.subset)
        self._learned.threshold = threshold

    def _by_columns(self, network: nn.Module, plan: Plan, x: Any, y: Tensor) -> Tensor:
        """The path of `fit_curvature`, for this batch alone."""
        first = next(iter(self.subset.parameters(network).values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        accumulator = make_accumulator("diag", plan, "expand", dtype, first.device)
        total = CurvatureSum(network, plan, accumulator, self.likelihood, "ggn", 1, 0, Processes())
        with torch.enable_grad():
            total.add(x, y)
        return total.finish().structure.diagonal()

    def _walk(self, network: nn.Module, x: Any, y: Tensor) -> Tensor:
        threshold, layout = self._learned.threshold, self._learned.layout
        assert threshold is not None
        assert layout is not None
        parameters = list(self.subset.parameters(network).values())
        f, ops = run(network, self.subset, x)
        self.likelihood.check(f, y)
        walk = Walk(ops, f, layout.of(ops) if threshold > 0 else {}, threshold, parameters)
        by_root = walk.output_is_whole and not self.likelihood.has_diagonal_fisher
        Λ = self.likelihood.fisher_root(f, y) if by_root else self.likelihood.fisher_diagonal(f, y)
        del f  # it would keep the whole graph
        (walk.from_root if by_root else walk.from_diagonal)(Λ)
        found = [_or_zeros(walk.found[id(p)], p) for p in parameters]
        return self.subset.narrow(torch.cat([d.reshape(-1) for d in found]))


def choose_mode(network: nn.Module, subset: Subset, likelihood: Likelihood, x: Any, threshold: float) -> str:
    """For "auto": "exact" where `M` is never large, else "mixed"; refuses, by name, what "mixed" has no rule for."""
    network = unwrap(network)
    with borrowed(network, subset.names), torch.no_grad():
        found = probe(network, subset, _own(x))
        if found.largest <= threshold:
            return "exact"
        _rehearse(network, subset, found, threshold)
    return "mixed"


def _rehearse(network: nn.Module, subset: Subset, found: Probe, threshold: float) -> bool:
    """The walk for the few examples of a probe, with `Λ = I`, to raise what it raises; whether it merges columns."""
    walk = Walk(found.ops, found.f, found.layout.of(found.ops), threshold, subset.parameters(network).values())
    merges = walk.merges(found.f[0].numel())
    if merges or threshold < math.inf:
        walk.from_diagonal(torch.ones_like(found.f, dtype=torch.promote_types(found.f.dtype, torch.float32)))
    return merges


def _or_zeros(d: Tensor | None, p: Tensor) -> Tensor:
    """In at least float32."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p, dtype=wide) if d is None else d.to(wide)


def _own(x: Any) -> Any:
    """A copy of the input, because a network may write into it; without gradients of its own."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, x)
