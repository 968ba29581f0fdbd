"""The diagonal of a batch's GGN, `Σₙ diag(JₙᵀΛₙJₙ)`, in one backward pass (Laplacian autoencoders, section 3).

A matrix `M`, which is `Λ` at the outputs, is carried back through the network. At every layer, it gives the diagonal of
the block of the layer's weights (appendix E, algorithm 1). The mode decides which part of `M` is carried:

- `exact`:   `M` itself, as columns `S` with `M = SSᵀ`; at a bottleneck of `R` features, `R` columns are enough.
- `approx`:  only `diag(M)`, as if the features of a layer were uncorrelated, at the cost of an ordinary backward pass.
- `mixed`:   `M` if a tensor has at most `threshold` features per example, `diag(M)` otherwise.
- `auto`:    `exact` if no tensor has more features than `threshold`, `mixed` otherwise.

`exact` falls back to the columns of `fit_curvature` if an operation has no rule here, or if no bottleneck makes the
walk cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_bayes.arguments import word
from lightning_bayes.curvature.accumulate import first_nonfinite
from lightning_bayes.curvature.column_sum import ColumnSum
from lightning_bayes.curvature.data_pass import Batch, BatchSum, Fisher
from lightning_bayes.curvature.diagonal.tape import Probe, RuleError, Signature, probe, run
from lightning_bayes.curvature.diagonal.walk import Walk
from lightning_bayes.jacobian.checks import BatchChecks, check_output
from lightning_bayes.jacobian.graph import keeps_rows, uses
from lightning_bayes.jacobian.plan import Plan, make_plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, Subset, inputs
from lightning_bayes.network.borrowed import borrowed, unwrap
from lightning_bayes.structures import Diagonal

MODES = ("auto", "exact", "approx", "mixed")
THRESHOLD = 256  # the largest number of features per example for which "mixed" carries the whole matrix


class BatchDiagonal:
    """`diag Σₙ JₙᵀΛₙJₙ` over the weights of `subset`, batch by batch. The first one decides on the cheapest method, or
    raises an error that names an unsupported operation. `checks=False` is for a caller that checks outputs and targets
    itself."""

    def __init__(
        self,
        network: nn.Module,
        subset: Subset,
        likelihood: Likelihood,
        mode: str = "auto",
        threshold: float = THRESHOLD,
        checks: bool = True,
    ) -> None:
        word("mode", mode, MODES)
        if not threshold >= 0:
            raise ValueError(f"threshold must not be negative, got {threshold}")
        self.network, self.subset, self.likelihood = network, subset, likelihood
        self.mode, self.threshold = mode, threshold
        self._checks = BatchChecks(likelihood, unit="curvature measurement") if checks else None
        self._method: Callable[[nn.Module, Any, Tensor], Tensor] | None = None

    def __call__(self, x: Any, y: Tensor) -> Tensor:
        """The sum over the batch.  # [P]"""
        network = unwrap(self.network)
        with borrowed(network, self.subset.names), torch.no_grad():
            x = _copy(x)
            self._method = self._method or self._choose_method(network, x)
            return self._method(network, x, y)

    def raise_pending(self) -> None:
        """Raise an error for the first invalid batch since the last check."""
        if self._checks is not None:
            self._checks.raise_pending()

    def _choose_method(self, network: nn.Module, x: Any) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        threshold = {"exact": math.inf, "approx": 0.0}.get(self.mode, self.threshold)
        try:
            trial = probe(network, self.subset, x)
            if self.mode == "auto" and trial.largest <= threshold:
                threshold = math.inf
            merges = _rehearse(network, self.subset, trial, threshold)
            # An exact walk has to know the example of each row.
            if threshold < math.inf or (merges and keeps_rows(uses(trial.f), len(trial.f))):
                return partial(self._walk, threshold, trial.signature)
        except RuleError:
            if threshold < math.inf:
                raise
        with torch.enable_grad():
            return partial(self._by_columns, make_plan(network, x, self.subset))

    def _by_columns(self, plan: Plan, network: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The method of `fit_curvature`, for one batch."""
        total = ColumnSum(network, plan, self.likelihood)
        with torch.enable_grad():
            f, recorded = total.forward(x)
            check_output(f, inputs.batch_size(x))
            y = self._check(x, f.detach(), y)
            total.add(Batch(x, y, f, recorded, torch.arange(len(f), device=f.device)))
        total.end_pass(Processes())
        return total.structure().diagonal()

    def _walk(self, threshold: float, signature: Signature, network: nn.Module, x: Any, y: Tensor) -> Tensor:
        parameters = list(self.subset.parameters(network).values())
        f, ops = run(network, self.subset, x)
        y = self._check(x, f.detach(), y)
        walk = Walk(ops, f, signature.kinds_of(ops) if threshold > 0 else {}, threshold, parameters)
        by_root = walk.output_is_whole and not self.likelihood.has_diagonal_fisher
        Λ = self.likelihood.fisher_root(f, y) if by_root else self.likelihood.fisher_diagonal(f, y)
        del f  # it would keep the whole graph alive
        if by_root:
            walk.from_root(Λ, self.likelihood.couples_outputs)
        else:
            walk.from_diagonal(Λ)
        diagonals = [_or_zeros(walk.diagonals[id(p)], p) for p in parameters]
        return self.subset.narrow(torch.cat([d.reshape(-1) for d in diagonals]))

    def _check(self, x: Any, outputs: Tensor, y: Tensor) -> Tensor:
        """The targets, with zeros for invalid ones until the next look."""
        if self._checks is not None:
            y = self._checks.add(x, outputs, y)
            self._checks.end_batch()
        return y


class DiagonalSum(BatchSum):
    """The sum of fast diagonals over all batches: `fit_curvature(..., structure=Diag(method="approx"))`."""

    def __init__(self, network: nn.Module, subset: Subset, likelihood: Likelihood, hessian: str) -> None:
        super().__init__(network, subset, likelihood, Fisher())
        self._of_batch = BatchDiagonal(network, replace(subset, mask=None), likelihood, hessian, checks=False)
        self._diagonal = torch.zeros(subset.size, dtype=self.dtype, device=self.device)

    def blocks(self) -> list[tuple[str, str]]:
        return [(name, f"{self._of_batch.mode} diagonal") for name in self.subset.names]

    def add(self, batch: Batch) -> None:
        self._diagonal += self.subset.narrow(self._of_batch(batch.x, batch.y))

    @property
    def sums(self) -> list[Tensor]:
        return [self._diagonal]

    def overflowing(self) -> str | None:
        return first_nonfinite(self._diagonal, self.subset)

    def structure(self) -> Diagonal:
        return Diagonal(self._diagonal)


def choose_mode(network: nn.Module, subset: Subset, x: Any, threshold: float) -> Literal["exact", "mixed"]:
    """The mode for "auto": "exact" if `M` is never large, otherwise "mixed"; an error names an operation without a
    rule."""
    network = unwrap(network)
    with borrowed(network, subset.names), torch.no_grad():
        trial = probe(network, subset, _copy(x))
        if trial.largest <= threshold:
            return "exact"
        _rehearse(network, subset, trial, threshold)
    return "mixed"


def _rehearse(network: nn.Module, subset: Subset, trial: Probe, threshold: float) -> bool:
    """Walk back through the few examples of a probe with `Λ = I`, for its errors; returns whether it merges columns."""
    f, kinds = trial.f, trial.signature.kinds_of(trial.ops)
    walk = Walk(trial.ops, f, kinds, threshold, subset.parameters(network).values())
    merges = bool(walk.stops(f[0].numel()))
    if merges or threshold < math.inf:
        walk.from_diagonal(torch.ones_like(f, dtype=torch.promote_types(f.dtype, torch.float32)))
    return merges


def _or_zeros(d: Tensor | None, p: Tensor) -> Tensor:
    """In at least float32."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p, dtype=wide) if d is None else d.to(wide)


def _copy(x: Any) -> Any:
    """A copy of the input without gradients, because the network may write into it."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), x)
