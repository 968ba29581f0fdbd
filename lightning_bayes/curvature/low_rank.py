"""The largest eigenpairs of `H = Σₙ JₙᵀΛₙJₙ` from products with blocks of vectors. Each product takes one pass over the
data.

Block Lanczos with full reorthogonalisation (Golub and Underwood 1977) starts from a random block `Q₁`. Each product
`HQⱼ` is orthogonalised twice against the whole basis, and the rest is the next block. A block of `b` vectors finds an
eigenvalue at most `b` times, so it must be at least as wide as the largest multiplicity. Random directions, orthogonal
to the basis, replace directions that vanish. If the product of `H` with a block of random directions vanishes, nothing
of `H` is left.

After `m` vectors, `HQ = [Q Q⁺] B` with the next block `Q⁺` and a small matrix `B`. Ritz pairs that have not converged
could overestimate `H`. The Nyström approximation in the same subspace cannot overestimate `H`, and needs no further
product:

    Ĥ = HQ (QᵀHQ)⁺ (HQ)ᵀ = [Q Q⁺] B T⁺ Bᵀ [Q Q⁺]ᵀ ⪯ H,    T = QᵀHQ.

`Ĥ` grows with the subspace and equals `H` once the subspace contains the whole range of `H`. The result is the largest
eigenpairs of `Ĥ`, without eigenvalues of `T` that are only rounding errors. In a null space half of these errors are
negative, so the most negative one shows their size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.accumulate import first_nonfinite
from lightning_bayes.curvature.data_pass import Batch, BatchSum, Fisher
from lightning_bayes.jacobian.plan import Plan
from lightning_bayes.jacobian.products import GGNProduct, output_fisher
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Processes
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.messages import detail
from lightning_bayes.structures import LowRank

WORD = "lowrank"
BLOCK = 16  # minimum number of vectors in a block
ZERO = 1  # a direction below this multiple of the largest eigenvalue's rounding has vanished
NOTHING = 10  # a product below this multiple of the same rounding shows that nothing of `H` is left
CONVERGED = 0.1  # maximum relative residual of a converged pair; this loses 1e-5 to 1e-3 of the sum of eigenvalues


class LowRankSum(BatchSum):
    """The product of `H` with one block of vectors in each pass. A dry run makes one product with two vectors."""

    needs_same_labels = True

    def __init__(
        self, network: nn.Module, plan: Plan, likelihood: Likelihood, fisher: Fisher, rank: int, dry_run: bool = False
    ) -> None:
        super().__init__(network, plan.subset, likelihood, fisher)
        rank, width, most = (1, 2, 2) if dry_run else _sizes(plan.subset.size, rank, plan.n_outputs)
        self._most_passes, self._n_passes = -(-most // width), 0
        self._lanczos = BlockLanczos(plan.subset.size, rank, width, most, fisher.seed, self.dtype, self.device)
        self._product = GGNProduct(network, plan.subset, plan.n_activations)
        self._begin_pass()

    def blocks(self) -> list[tuple[str, str]]:
        return [(name, WORD) for name in self.subset.names]

    def add(self, batch: Batch) -> None:
        sampled = (batch.examples, self.fisher.samples, self.fisher.seed)
        Λ = output_fisher(self.likelihood, self.fisher.kind, batch.outputs, batch.y, *sampled)
        self._sum += self._product(batch.x, batch.f, Λ, self._lanczos.block)

    @property
    def sums(self) -> list[Tensor]:
        return [self._sum, self._start]

    def overflowing(self) -> str | None:
        return first_nonfinite(self._sum.abs().amax(0), self.subset)

    def end_pass(self, processes: Processes) -> str | None:
        start = in_float64(self._lanczos.block[:, :8])
        if not torch.allclose(self._start, processes.size * start, rtol=0, atol=1e-3 * float(start.abs().max())):
            raise CurvatureError(
                "structure='lowrank' computed different vectors on another process, where rounding differs: fit it "
                "on one process, or on machines of the same kind"
            )
        self._lanczos.add(self._sum)
        self._n_passes += 1
        finished = torch.tensor([int(self._lanczos.finished)], device=self._sum.device)
        processes.sum_([finished])  # if only one process stopped, the others would wait for it
        if finished:
            return None
        self._begin_pass()
        return f", pass {self._n_passes + 1} of at most {self._most_passes}"

    def structure(self) -> LowRank:
        values, vectors = self._lanczos.eigenpairs()
        detail(
            "lowrank: %d eigenpairs, with residuals of at most %.1g of their eigenvalues, by %d products in %d passes",
            len(values),
            max(self._lanczos.residuals()[: len(values)].tolist(), default=0.0),
            self._lanczos.n_products,
            self._n_passes,
        )
        return LowRank(vectors.mT.contiguous(), values, rounding=self._lanczos.rounding)

    def _begin_pass(self) -> None:
        self._sum = torch.zeros_like(self._lanczos.block)
        self._start = in_float64(self._lanczos.block[:, :8]).clone()  # to compare the vectors of all processes


def _sizes(P: int, rank: int, outputs: int) -> tuple[int, int, int]:
    """The rank, and the numbers of vectors in a block and in the basis. The multiplicity of an eigenvalue can be the
    number of outputs, and a block of `b` vectors finds at most `b` copies of it. So a block has at least as many
    vectors as there are outputs, or `rank` vectors if that is fewer."""
    rank = min(rank, P)
    width = max(BLOCK, min(outputs, rank), -(-rank // 4))
    return rank, width, min(2 * rank + 4 * width, P)


def n_vectors(P: int, rank: int, outputs: int) -> int:
    """The number of vectors that a fit keeps in memory: the basis, the next block, its product, and the result."""
    rank, width, most = _sizes(P, rank, outputs)
    return most + 3 * width + rank


class BlockLanczos:
    """Call `add` with the product of `H` and `block` until `finished`.

    Args:
        size: the size of the matrix.
        rank: the number of eigenpairs.
        width: the number of vectors in a block.
        most: the largest number of vectors in the basis.
        seed: the seed of the random vectors, which are the same on every process and device.
    """

    def __init__(
        self, size: int, rank: int, width: int, most: int, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size, self._rank, self._most = size, min(rank, size), min(most, size)
        self._dtype, self._device, self._eps = dtype, device, torch.finfo(dtype).eps
        self._generator = torch.Generator().manual_seed(seed)
        self._blocks: list[Tensor] = []  # [b, P] each
        self._blocks.append(self._random(min(width, size)))
        self._fresh = len(self.block)  # the number of random vectors in the last block
        # n vectors in the basis, of which m have been multiplied
        self._B = torch.zeros(len(self.block), 0, dtype=torch.float64, device="cpu")  # [n, m]
        self.finished = False

    @property
    def block(self) -> Tensor:
        """The vectors to multiply next.  # [b, P]"""
        return self._blocks[-1]

    @property
    def n_products(self) -> int:
        """The number of products of `H` with a vector."""
        return self._B.shape[1]

    def add(self, product: Tensor) -> None:
        """Add the product `H block`.  # [b, P]"""
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
        """The largest eigenpairs of `Ĥ` in descending order, without zeros.  # [k], [k, P]"""
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
        """Eigenvalues below this value are indistinguishable from rounding."""
        t, _ = self._ritz()
        return max(-2 * float(t[-1]), 4 * self._eps * float(t[0]))

    def residuals(self) -> Tensor:
        """The residuals of the largest Ritz pairs, relative to their values.  # [k]"""
        t, Y = self._ritz()
        rest = torch.linalg.vector_norm(self._B[len(t) :] @ Y, dim=0)
        return (rest / t.clamp(min=torch.finfo(t.dtype).tiny))[: self._rank]

    def _has_converged(self) -> bool:
        """Whether `rank` eigenpairs have converged. The answer is False if fewer than `rank` eigenpairs were found,
        because some may be missing."""
        t, _ = self._ritz()
        if len(t) < self._rank or t[self._rank - 1] <= self.rounding:
            return False
        return bool((self.residuals() <= CONVERGED).all())

    def _ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenpairs of `T`, in descending order.  # [m], [m, m]"""
        T = self._B[: self._B.shape[1]]
        t, Y = torch.linalg.eigh((T + T.mT) / 2)
        return t.flip(0), Y.flip(1)

    def _random(self, count: int) -> Tensor:
        """Random orthonormal vectors, orthogonal to the basis.  # [count, P]"""
        noise = torch.randn(count, self._size, generator=self._generator, dtype=torch.float64, device="cpu")
        return self._orthonormal(self._project(noise.to(self._device, self._dtype))[1], 0.0)[0]

    def _project(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients of the vectors in the basis, and their rest outside the basis.
        # [b, P] -> [n, b], [b, P]"""
        total = torch.zeros(sum(map(len, self._blocks)), len(vectors), dtype=torch.float64, device="cpu")
        for _ in range(2):  # the second time makes the rest orthogonal up to rounding
            parts = []
            for block in self._blocks:
                part = vectors @ block.mT  # [b, b']
                vectors = vectors - part @ block
                parts.append(part.cpu().double().mT)
            total += torch.cat(parts) if parts else total
        return total, vectors

    def _orthonormal(self, rows: Tensor, zero: float) -> tuple[Tensor, Tensor]:
        """An orthonormal basis of the rows, without directions below `zero`, and the coefficients of the rows in it.
        # [b, P] -> [b', P], [b', b]"""
        Q, triangle = torch.linalg.qr(rows.mT)  # [P, b], [b, b]
        rotation, s, Yt = torch.linalg.svd(triangle.cpu().double())
        kept = s > zero
        directions = (Q @ rotation[:, kept].to(Q)).mT
        _, directions = self._project(directions)  # a small rest is less orthogonal to the basis than a large one
        gram = directions @ directions.mT
        return 1.5 * directions - 0.5 * gram @ directions, s[kept].unsqueeze(1) * Yt[kept]
