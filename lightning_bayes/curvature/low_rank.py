"""The largest eigenpairs of `H = Σₙ JₙᵀΛₙJₙ`, by products with blocks of vectors (see `lanczos`, `ggn_product`).

Each product is one pass over the data. The first pass learns also what all fits learn of the data, and the later ones
see the same examples; labels that are drawn belong to an example's place in the order of the data.

The largest eigenpairs of a symmetric positive semi-definite matrix `H` that is known by products with blocks of
vectors: block Lanczos with full reorthogonalisation (Golub and Underwood 1977).

From a random block `Q₁`, each product `HQⱼ` is made orthogonal to the whole basis, twice, and what is left of it is the
next block. A block of `b` vectors meets an eigenvalue `b` times at most, so that it must be as wide as eigenvalues are
repeated. Directions that vanish are replaced by random ones, orthogonal to the basis: where `H` has nothing left to
give, they show it.

After `m` vectors, `HQ = [Q Q⁺] B` with the next block `Q⁺` and a small matrix `B`. Ritz pairs that have not converged
could overstate `H`. The Nyström approximation of the same subspace cannot, and needs no further product:

    Ĥ = HQ (QᵀHQ)⁺ (HQ)ᵀ = [Q Q⁺] B T⁺ Bᵀ [Q Q⁺]ᵀ ⪯ H,    T = QᵀHQ.

It grows with the subspace, and is `H` where this holds all of it. Its largest eigenpairs are the answer. Those of `T`
that are only rounding are left out. In a null space half of the rounding is negative, which shows how large it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.accumulate import Undecomposed
from lightning_bayes.curvature.curvature_sum import Curvature, data_totals, name_totals
from lightning_bayes.jacobian.checks import REMEDY, WANTED, BatchChecks, PassOrder, check_output
from lightning_bayes.jacobian.plan import Plan
from lightning_bayes.jacobian.products import GGNProduct, output_fisher
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, DataError, Processes, inputs
from lightning_bayes.network.accumulation import float64_device, in_float64
from lightning_bayes.network.errors import not_finite
from lightning_bayes.structures import LowRank

logger = logging.getLogger("lightning_bayes")

WORD = "lowrank"
BLOCK = 16  # vectors in a block, at least
Batches = Callable[[str], Iterable[tuple[Any, Tensor]]]  # of one more pass, with what a progress bar says of it


class LowRankSum:
    """The products of one pass after the other."""

    def __init__(
        self,
        network: nn.Module,
        plan: Plan,
        likelihood: Likelihood,
        rank: int,
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


def _sizes(P: int, rank: int, outputs: int) -> tuple[int, int, int]:
    """The rank, and how many vectors a block and the basis have. Outputs may repeat an eigenvalue once for each, which
    only a block that is as wide would see; more than `rank` of them are not asked for."""
    rank = min(rank, P)
    width = max(BLOCK, min(outputs, rank), -(-rank // 4))
    return rank, width, min(2 * rank + 4 * width, P)


def n_vectors(P: int, rank: int, outputs: int) -> int:
    """The vectors of all weights that a fit holds: its basis, the block after it, its product, and the result."""
    rank, width, most = _sizes(P, rank, outputs)
    return most + 3 * width + rank


ZERO = 1  # times the rounding of the largest eigenvalue: below it, a direction has vanished
NOTHING = 10  # times the same: a product below it shows that nothing is left
CONVERGED = 0.1  # the residual of an eigenpair, relative to its eigenvalue: a tenth costs 1e-5 to 1e-3 of their sum


class BlockLanczos:
    """Asks for the product of `H` with `block`, again and again until it is `finished`.

    Args:
        size: of the matrix.
        rank: how many eigenpairs are wanted.
        width: of a block.
        most: vectors in the basis, at most.
        seed: of the random vectors, which are the same on every process and device.
    """

    def __init__(
        self, size: int, rank: int, width: int, most: int, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size, self._rank, self._most = size, min(rank, size), min(most, size)
        self._dtype, self._device, self._eps = dtype, device, torch.finfo(dtype).eps
        self._generator = torch.Generator().manual_seed(seed)
        self._blocks: list[Tensor] = []  # [b, P] each
        self._blocks.append(self._random(min(width, size)))
        self._fresh = len(self.block)  # how many vectors of the last block are random
        # m of n vectors have been multiplied.
        self._B = torch.zeros(len(self.block), 0, dtype=torch.float64, device="cpu")  # [n, m]
        self.finished = False

    @property
    def block(self) -> Tensor:
        """What is to be multiplied next.  # [b, P]"""
        return self._blocks[-1]

    @property
    def n_products(self) -> int:
        """Of `H` with a vector."""
        return self._B.shape[1]

    def add(self, product: Tensor) -> None:
        """`H block`.  # [b, P]"""
        inside, rest = self._project(product)  # [n, b], [b, P]
        m, b = self._B.shape[1], len(self.block)
        self._B = torch.cat([self._B, inside], dim=1)
        rounding = self._eps * float(torch.linalg.matrix_norm(self._B, 2))
        directions, S = self._orthonormal(rest, ZERO * rounding)  # [b', P], [b', b]
        self._B = torch.cat([self._B, torch.cat([S.new_zeros(len(S), m), S], dim=1)])
        exhausted = self._fresh == b and float(product.norm()) <= NOTHING * rounding * b**0.5
        self._blocks.append(directions)
        room = min(b, self._size - m - b)
        self._fresh = room - len(directions)
        self.finished = exhausted or room == 0 or m + b >= self._most or self._has_converged()
        if self._fresh > 0 and not self.finished:
            self._blocks[-1] = torch.cat([directions, self._random(self._fresh)])
            self._B = torch.cat([self._B, self._B.new_zeros(self._fresh, m + b)])

    def eigenpairs(self) -> tuple[Tensor, Tensor]:
        """The largest of `Ĥ`, in falling order; those that are zero are left out.  # [k], [k, P]"""
        t, Y = self._ritz()
        kept = t > self.rounding
        root = self._B @ (Y[:, kept] * t[kept].rsqrt())  # Ĥ = [Q Q⁺] root rootᵀ [Q Q⁺]ᵀ
        vectors, s, _ = torch.linalg.svd(root, full_matrices=False)
        values = s.square()
        wanted = values > self.rounding
        wanted[self._rank :] = False
        coefficients = vectors[:, wanted].mT.to(self._blocks[0])  # [k, n]
        U = torch.zeros(len(coefficients), self._size, dtype=self._dtype, device=self._device)
        for part, block in zip(coefficients.split([*map(len, self._blocks)], dim=1), self._blocks, strict=True):
            U.addmm_(part, block)
        return values[wanted].to(U), U

    @property
    def rounding(self) -> float:
        """Below which an eigenvalue is not known."""
        t, _ = self._ritz()
        return max(-2 * float(t[-1]), self._eps * float(t[0]))

    def residuals(self) -> Tensor:
        """Of the wanted Ritz pairs, relative to their values.  # [k]"""
        t, Y = self._ritz()
        rest = torch.linalg.vector_norm(self._B[len(t) :] @ Y, dim=0)
        return (rest / t.clamp(min=torch.finfo(t.dtype).tiny))[: self._rank]

    def _has_converged(self) -> bool:
        """As many pairs as are wanted: of fewer, nothing says that they are all."""
        t, _ = self._ritz()
        if len(t) < self._rank or t[self._rank - 1] <= self.rounding:
            return False
        return bool((self.residuals() <= CONVERGED).all())

    def _ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenpairs of `T`, in falling order.  # [m], [m, m]"""
        T = self._B[: self._B.shape[1]]
        t, Y = torch.linalg.eigh((T + T.mT) / 2)
        return t.flip(0), Y.flip(1)

    def _random(self, count: int) -> Tensor:
        """Orthonormal, and orthogonal to the basis.  # [count, P]"""
        noise = torch.randn(count, self._size, generator=self._generator, dtype=torch.float64, device="cpu")
        return self._orthonormal(self._project(noise.to(self._device, self._dtype))[1], 0.0)[0]

    def _project(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients within the basis, and what is left.  # [b, P] -> [n, b], [b, P]"""
        total = torch.zeros(sum(map(len, self._blocks)), len(vectors), dtype=torch.float64, device="cpu")
        for _ in range(2):  # what is left of a vector is orthogonal to the basis up to rounding after the second time
            parts = []
            for block in self._blocks:
                part = vectors @ block.mT  # [b, b']
                vectors = vectors - part @ block
                parts.append(part.cpu().double().mT)
            total += torch.cat(parts) if parts else total
        return total, vectors

    def _orthonormal(self, rows: Tensor, zero: float) -> tuple[Tensor, Tensor]:
        """An orthonormal basis of the rows but for directions below `zero`, and the rows' coefficients in it.
        # [b, P] -> [b', P], [b', b]"""
        Q, triangle = torch.linalg.qr(rows.mT)  # [P, b], [b, b]
        turn, s, Yt = torch.linalg.svd(triangle.cpu().double())
        kept = s > zero
        directions = (Q @ turn[:, kept].to(Q)).mT
        _, directions = self._project(directions)  # a small rest is not as orthogonal to the basis as a large one
        gram = directions @ directions.mT
        return 1.5 * directions - 0.5 * gram @ directions, s[kept].unsqueeze(1) * Yt[kept]
