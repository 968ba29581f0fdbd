"""The largest eigenpairs of a symmetric positive semi-definite matrix `H` that is known by products with blocks of
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

import torch
from torch import Tensor

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
