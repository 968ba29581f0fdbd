"""The fast diagonals of `BatchDiagonal`, added up over the data: `fit_curvature(..., hessian="approx")`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_bayes.curvature.accumulate import DiagonalAccumulator
from lightning_bayes.curvature.backprop.diagonal import BatchDiagonal
from lightning_bayes.curvature.curvature_sum import CurvatureSum
from lightning_bayes.curvature.output_checks import check_finite, check_output
from lightning_bayes.curvature.plan import Plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import inputs
from lightning_bayes.network.processes import Processes


class DiagonalSum(CurvatureSum):
    """A batch adds its diagonal by one backward pass, for any number of outputs."""

    def __init__(
        self,
        network: nn.Module,
        plan: Plan,
        blocks: DiagonalAccumulator,
        likelihood: Likelihood,
        hessian: str,
        processes: Processes | None,
    ) -> None:
        super().__init__(network, plan, blocks, likelihood, processes=processes)
        self._blocks = blocks
        self._of_batch = BatchDiagonal(network, replace(plan.subset, mask=None), likelihood, hessian)

    def _add(self, x: Any, y: Tensor, examples: Tensor) -> Tensor:
        diagonal = self._of_batch(x, y)  # first, on a copy of x: the network may write into its input
        f = inputs.call(self._network, x)
        check_output(f, inputs.batch_size(x))
        outputs = f.detach()
        check_finite(outputs, x, self._batches)
        self._blocks.add_diagonal(diagonal)
        self._add_gradient(f, -self._likelihood.residual(outputs, y))
        return outputs
