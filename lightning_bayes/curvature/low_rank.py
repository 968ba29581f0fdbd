"""The largest eigenpairs of `H = Σₙ JₙᵀΛₙJₙ`, by products with blocks of vectors (see `lanczos`, `ggn_product`).

Each product is one pass over the data. The first pass learns also what all fits learn of the data, and the later ones
see the same examples; labels that are drawn belong to an example's place in the order of the data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, shown
from lightning_bayes.curvature.accumulate import Undecomposed
from lightning_bayes.curvature.batch_checks import BatchChecks
from lightning_bayes.curvature.curvature_sum import Curvature, data_totals, name_totals
from lightning_bayes.curvature.ggn_product import GGNProduct, output_fisher
from lightning_bayes.curvature.lanczos import BlockLanczos
from lightning_bayes.curvature.output_checks import check_output
from lightning_bayes.curvature.pass_order import REMEDY, WANTED, PassOrder
from lightning_bayes.curvature.plan import Plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, DataError, Processes, inputs
from lightning_bayes.network.accumulation import float64_device, in_float64
from lightning_bayes.network.errors import not_finite
from lightning_bayes.structures import LowRank

logger = logging.getLogger("lightning_bayes")

WORD = "lowrank"
RANK = 100  # by default
BLOCK = 16  # vectors in a block, at least
Batches = Callable[[str], Iterable[tuple[Any, Tensor]]]  # of one more pass, with what a progress bar says of it


class LowRankSum:
    """The products of one pass after the other."""

    def __init__(
        self,
        network: nn.Module,
        plan: Plan,
        likelihood: Likelihood,
        rank: int | None,
        curvature: str,
        samples: int,
        seed: int,
        processes: Processes | None,
        batches: Batches,
    ) -> None:
        self._network, self._plan, self._likelihood, self._curvature = network, plan, likelihood, curvature
        self._drawn = (samples, seed)
        self._processes, self._batches = processes or Processes(), batches
        self._order = PassOrder(curvature)
        self._parameters = plan.subset.parameters(network)
        first = next(iter(self._parameters.values()))
        dtype, P = torch.promote_types(first.dtype, torch.float32), plan.subset.size
        rank, width, most = _sizes(P, rank, plan.n_outputs)
        if isinstance(self._processes, Undecomposed):  # a trial
            rank, width, most = 1, 2, 2
        self._most_passes = -(-most // width)
        self._lanczos = BlockLanczos(P, rank, width, most, seed, dtype, first.device)
        self._product = GGNProduct(network, plan.subset, plan.n_activations)
        self._sum = torch.zeros_like(self._lanczos.block)
        self._gradient = torch.zeros(P, dtype=dtype, device=first.device)
        self._totals = torch.zeros(5, dtype=torch.float64, device=float64_device(first.device))  # see `data_totals`
        self._checks, self._n_data = BatchChecks(likelihood, self._overflowing), 0  # of the pass

    def blocks(self) -> list[tuple[str, str]]:
        return [(name, WORD) for name in self._plan.subset.names]

    def add(self, x: Any, y: Tensor) -> None:
        """A batch of the first pass."""
        f, y = self._add(x, y)
        outputs = f.detach()
        self._totals += data_totals(self._likelihood, outputs, y)
        cotangent = -self._likelihood.residual(outputs, y)
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(f, parameters, cotangent.to(f.dtype), materialize_grads=True)
        self._gradient += self._plan.subset.narrow(torch.cat([g.reshape(-1) for g in gradients]))

    def look(self) -> None:
        """Raise what was wrong with the batches so far."""
        self._checks.look()

    def finish(self, progress: bool = False) -> Curvature:
        """All further passes."""
        self._processes.sum_([self._gradient, self._totals])
        if self._totals[0] == 0:
            raise DataError("the loader is empty: curvature needs at least one batch")
        lanczos, n_data, n_passes = self._lanczos, int(self._totals[0]), 1
        lanczos.add(self._summed())
        while not self._over_all(lanczos.finished):
            self._sum = torch.zeros_like(lanczos.block)
            self._checks, self._n_data = BatchChecks(self._likelihood, self._overflowing), 0
            n_passes += 1
            self._order.begin()
            with self._processes.raising_together():
                for x, y in self._batches(f", pass {n_passes} of at most {self._most_passes}"):
                    self._add(x, y)
                self._checks.look()
            seen = self._over_all(self._n_data)
            if seen != n_data:
                raise DataError(
                    f"structure='lowrank' passes over the same data several times, but the loader gave {n_data} "
                    f"examples in the first pass and {seen} in pass {n_passes}: pass a list or a DataLoader"
                )
            if not self._order.is_same(self._processes, self._sum.device):
                raise DataError(f"structure='lowrank' with curvature='fisher_mc' needs {WANTED}: {REMEDY}")
            lanczos.add(self._summed())
        values, vectors = lanczos.eigenpairs()
        largest = max(lanczos.residuals()[: len(values)].tolist(), default=0.0)
        logger.info(
            "lowrank: %d eigenpairs, with residuals of at most %.1g of their eigenvalues, by %d products in %d passes",
            len(values),
            largest,
            lanczos.n_products,
            n_passes,
        )
        return Curvature(
            structure=LowRank(vectors.mT.contiguous(), values, rounding=lanczos.rounding),
            subset=self._plan.subset,
            likelihood=self._likelihood,
            kind=self._curvature,
            **name_totals(self._totals),
            gradient=self._gradient,
        )

    def _add(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs, with their graph, and the targets, without those that are wrong."""
        B = inputs.batch_size(x)
        f = inputs.call(self._network, x)
        check_output(f, B)
        outputs = f.detach()
        y = self._checks.add(x, outputs, y)
        examples = self._processes.examples(self._n_data, B, f.device)
        self._order.add(outputs, examples)
        fisher = output_fisher(self._likelihood, self._curvature, outputs, y, examples, *self._drawn)
        self._sum += self._product(x, f, fisher, self._lanczos.block)
        self._n_data += B
        self._checks.end_batch()
        return f, y

    def _summed(self) -> Tensor:
        """Over all data.  # [b, P]"""
        own = in_float64(self._lanczos.block[:, :8])
        total = own.clone()
        self._processes.sum_([self._sum, total])
        if not torch.allclose(total, self._processes.size * own, rtol=0, atol=1e-3 * float(own.abs().max())):
            raise CurvatureError(
                "structure='lowrank' has come to other vectors on another process, whose machine decomposes matrices "
                "in another way: fit it on one process, or on machines of one kind"
            )
        if (name := self._overflowing()) is not None:
            raise not_finite(name)
        return self._sum

    def _over_all(self, number: int) -> int:
        """The sum over processes, which raise and stop together: where only one did, the others would wait."""
        total = torch.tensor([int(number)], device=self._sum.device)
        self._processes.sum_([total])
        return int(total)

    def _overflowing(self) -> str | None:
        bad = (~self._sum.isfinite()).any(0).nonzero()
        return self._plan.subset.name_at(int(bad[0])) if len(bad) else None


def _sizes(P: int, rank: int | None, outputs: int) -> tuple[int, int, int]:
    """The rank, and how many vectors a block and the basis have. Outputs may repeat an eigenvalue once for each, which
    only a block that is as wide would see; more than `rank` of them are not asked for."""
    rank = min(RANK if rank is None else rank, P)
    width = max(BLOCK, min(outputs, rank), -(-rank // 4))
    return rank, width, min(2 * rank + 4 * width, P)


def n_vectors(P: int, rank: int | None, outputs: int) -> int:
    """The vectors of all weights that a fit holds: its basis, the block after it, its product, and the result."""
    rank, width, most = _sizes(P, rank, outputs)
    return most + 3 * width + rank


def check_rank(rank: Any, structure: str) -> None:
    """How many eigenpairs; None is the default."""
    if rank is None:
        return
    if structure not in (WORD, "kron"):
        raise ValueError(f"rank={shown(rank)} belongs to structure='lowrank' or 'kron', got structure={structure!r}")
    if isinstance(rank, str) and (structure == WORD or rank != "auto"):
        raise ValueError(
            f"rank must be a whole number of at least 1, got {shown(rank)}: 'auto' is a word for structure='kron' alone"
        )
    if rank != "auto":
        count("rank", rank)
