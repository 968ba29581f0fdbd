"""`BlockPrior`: a Gaussian prior over weights whose covariance is a sum of fixed matrices with tunable factors.

Weights are `θ ~ N(0, Σ)` with `Σ = Σ_d Σ_r w_dr B_dr`, where `d` counts the blocks of a network:

| prior        | factors                                                                             |
|--------------|-------------------------------------------------------------------------------------|
| `"gaussian"` | one variance `s²` for all weights: `Σ = s²I`                                        |
| `"ard"`      | one variance per block: `w_d = s_d²`, automatic relevance determination             |
| `"filters"`  | variance and length per block: within each filter of a convolution the covariance   |
|              | of two weights falls with their distance `r` on the grid, `w_dr = s_d² exp(−r/ℓ_d)` |

Filters of 3 × 3 have six distances, so six matrices `B_dr` (the pairs of weights at distance `r`) span all lengths `ℓ`.
A quantity that is linear in `Σ`, such as a kernel `JΣJᵀ`, is a sum of fixed matrices with the same factors `w_dr`. The
matrices are computed once. Weights outside such filters (biases, norms, 1 × 1 convolutions, linear layers) are
independent.

`ExpectedVariation` is the expected total variation of an image under a `BlockPrior`, and the prior over the lengths
`ℓ_d` that follows from this expectation (TV-PredCP; Antorán et al. 2022, "A probabilistic deep image prior for
computational tomography"; tutorial, section 7).
With block `d` of the weights random and all others at `θ̃`, the image of the linearised network is Gaussian, and so is
the difference `Δₑ ~ N(μₑ, vₑ)` of two neighbouring pixels. The mean of its absolute value is that of a folded normal:

    κ_d = E[TV(x)] = Σₑ √(2vₑ/π) exp(−μₑ²/2vₑ) + μₑ erf(μₑ/√(2vₑ)),        vₑ = Σ_r w_dr · ΔₑJ B_dr JᵀΔₑᵀ.

The prior over the lengths gives `κ_d` an exponential distribution, `Π_d Exp(κ_d; λ) |∂κ_d/∂ℓ_d|`, which favours a small
variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import word
from lightning_bayes.jacobian.products import FixedJacobian
from lightning_bayes.network import Subset, SubsetError
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.posterior.gaussian import PosteriorError

PRIORS = ("gaussian", "ard", "filters")
_ROWS = 2**25  # numbers in a chunk of Jacobian rows


@dataclass(frozen=True, eq=False)
class Segment:
    """A parameter's range in the flat vector, and the size of its filters."""

    start: int
    stop: int
    block: int
    kernel: tuple[int, ...] = ()  # of a convolution; empty for independent weights


@dataclass(frozen=True, eq=False)
class BlockPrior:
    """The prior of the blocks. Its hyperparameters `φ` are the logarithms of the variances `s_d²`, followed by those of
    the lengths `ℓ_d`."""

    kind: str
    blocks: tuple[str, ...]
    segments: tuple[Segment, ...]

    @staticmethod
    def of(network: nn.Module, subset: Subset, kind: str, blocks: Mapping[str, Sequence[str]] | None) -> BlockPrior:
        """`blocks` names the parameters or modules of each block; by default each child of the network is a block."""
        word("prior", kind, PRIORS)
        _check_blocks(subset, kind, blocks)
        names = ("all",) if kind == "gaussian" else tuple(dict.fromkeys(_block_of(n, blocks) for n in subset.names))
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        kernels = {
            f"{n}.weight".lstrip("."): m.kernel_size for n, m in network.named_modules() if isinstance(m, convolutions)
        }
        segments = []
        for name, shape in zip(subset.names, subset.shapes, strict=True):
            block = 0 if kind == "gaussian" else names.index(_block_of(name, blocks))
            kernel = tuple(kernels.get(name, ())) if kind == "filters" else ()
            start = subset.starts[name]
            segments.append(Segment(start, start + shape.numel(), block, kernel if math.prod(kernel) > 1 else ()))
        return BlockPrior(kind, names, tuple(segments))

    @property
    def size(self) -> int:
        return self.segments[-1].stop

    @cached_property
    def with_length(self) -> tuple[int, ...]:
        """The blocks that have filters and therefore a length."""
        return tuple(sorted({s.block for s in self.segments if s.kernel}))

    @property
    def n_parameters(self) -> int:
        return len(self.blocks) + len(self.with_length)

    @cached_property
    def distances(self) -> dict[tuple[int, ...], Tensor]:
        """The distances between the weights of a filter.  # {kernel: [k, k]}"""
        distances = {}
        for kernel in {s.kernel for s in self.segments if s.kernel}:
            places = torch.cartesian_prod(
                *(torch.arange(n, dtype=torch.float64, device="cpu") for n in kernel)
            ).reshape(-1, len(kernel))
            # These are square roots of exact integers, so equal distances are equal numbers.
            distances[kernel] = (places.unsqueeze(1) - places).square().sum(2).sqrt()
        return distances

    @cached_property
    def terms(self) -> tuple[tuple[int, float], ...]:
        """The block and the distance of each `B_dr`."""
        return tuple(
            (d, r)
            for d in range(len(self.blocks))
            for r in sorted({0.0, *(r for s in self.segments if s.block == d for r in self._distances_of(s))})
        )

    def start(self, variance: float, length: float = 1.0) -> Tensor:
        """`φ` with the same variance and length for all blocks.  # [n_parameters]"""
        logs = [math.log(variance)] * len(self.blocks) + [math.log(length)] * len(self.with_length)
        return torch.tensor(logs, dtype=torch.float64, device="cpu")

    def variances(self, φ: Tensor) -> Tensor:
        """# [blocks]"""
        return φ[: len(self.blocks)].exp()

    def lengths(self, φ: Tensor) -> Tensor:
        """The lengths of the blocks with filters.  # [with_length]"""
        return φ[len(self.blocks) :].exp()

    def weights(self, φ: Tensor) -> Tensor:
        """`w_dr`, differentiable.  # [terms]"""
        s2, lengths = self.variances(φ), dict(zip(self.with_length, self.lengths(φ), strict=True))
        return torch.stack([s2[d] if r == 0 else s2[d] * (-r / lengths[d]).exp() for d, r in self.terms])

    def inner(self, term: int, U: Tensor, V: Tensor) -> Tensor:
        """`uᵀB_dr v` for each row `u` of `U` and `v` of `V`.  # [k, P], [l, P] -> [k, l]"""
        total = U.new_zeros(len(U), len(V))
        for s, Bv in self._products(term, V):
            total += U[:, s.start : s.stop] @ Bv.mT
        return total

    def squares(self, term: int, V: Tensor) -> Tensor:
        """`vᵀB_dr v` for each row.  # [k, P] -> [k]"""
        total = V.new_zeros(len(V))
        for s, Bv in self._products(term, V):
            total += (V[:, s.start : s.stop] * Bv).sum(1)
        return total

    def _products(self, term: int, V: Tensor) -> Iterator[tuple[Segment, Tensor]]:
        """The segments of a term, with `B_dr v` for each row: the sum over the weights at distance `r`.  # [k, n]"""
        d, r = self.terms[term]
        for s in self.segments:
            if s.block == d and r in self._distances_of(s):
                v = V[:, s.start : s.stop]
                yield s, v if r == 0 else self._by_filter(v, s, (self.distances[s.kernel] == r).to(v))

    def covariance_times(self, V: Tensor, φ: Tensor) -> Tensor:
        """`Σv` for each row `v` of `V`, differentiable in `φ`.  # [k, P]"""
        return self._times(V, lambda s: self._filter_covariance(s, φ))

    def root_times(self, E: Tensor, φ: Tensor) -> Tensor:
        """Turn rows of independent numbers into rows with covariance `Σ`.  # [k, P]"""

        def root(s: Segment) -> Tensor:
            C = self._filter_covariance(s, φ)
            return C.sqrt() if C.ndim == 0 else torch.linalg.cholesky(C)

        return self._times(E, root)

    def _times(self, V: Tensor, matrix: Callable[[Segment], Tensor]) -> Tensor:
        return torch.cat([self._by_filter(V[:, s.start : s.stop], s, matrix(s)) for s in self.segments], 1)

    def penalty(self, θ: Tensor, φ: Tensor) -> Tensor:
        """`θᵀΣ⁻¹θ`, differentiable.  # [P] -> []"""
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for s in self.segments:
            C, part = self._filter_covariance(s, φ), in_float64(θ[s.start : s.stop])
            if C.ndim == 0:
                total = total + part.square().sum() / C
            else:
                filters = part.reshape(-1, len(C))
                total = total + (filters * torch.linalg.solve(C, filters.mT).mT).sum()
        return total

    def _filter_covariance(self, s: Segment, φ: Tensor) -> Tensor:
        """A variance `[]`, or the covariance of a filter's weights `[k, k]`."""
        s2 = self.variances(φ)[s.block]
        if not s.kernel:
            return s2
        length = self.lengths(φ)[self.with_length.index(s.block)]
        return s2 * (-self.distances[s.kernel].to(length) / length).exp()

    def _distances_of(self, s: Segment) -> frozenset[float]:
        return frozenset(self.distances[s.kernel].flatten().tolist()) if s.kernel else frozenset((0.0,))

    @staticmethod
    def _by_filter(v: Tensor, s: Segment, C: Tensor) -> Tensor:
        """`C` times each filter, or a number times each weight.  # [k, n]"""
        if C.ndim == 0:
            return v * C.to(v)
        return (v.reshape(len(v), -1, len(C)) @ C.to(v).mT).reshape(v.shape)


def _check_blocks(subset: Subset, kind: str, blocks: Mapping[str, Sequence[str]] | None) -> None:
    if blocks is None:
        return
    if kind == "gaussian":
        raise SubsetError("prior='gaussian' has one variance for all weights: leave out blocks=, or use prior='ard'")
    if not isinstance(blocks, Mapping) or any(isinstance(members, str) for members in blocks.values()):
        raise SubsetError("blocks= must map names to lists of modules or parameters, such as {'head': ['head']}")
    for block, members in blocks.items():
        for member in members:
            if not any(name == member or name.startswith(f"{member}.") for name in subset.names):
                raise SubsetError(f"block {block!r} names {member!r}, which has no parameters in the network")


def _block_of(name: str, blocks: Mapping[str, Sequence[str]] | None) -> str:
    if blocks is None:
        return name.partition(".")[0]
    for block, members in blocks.items():
        if any(name == member or name.startswith(f"{member}.") for member in members):
            return block
    raise SubsetError(f"no block contains the parameter {name}: add it or its module to one in blocks=")


@dataclass(frozen=True, eq=False)
class ExpectedVariation:
    """`κ_d` as a function of the hyperparameters, from `μ` and the parts of `v`."""

    prior: BlockPrior
    μ: Tensor  # [blocks, edges]
    parts: Tensor  # ΔJ B_dr JᵀΔᵀ [terms, edges]

    @staticmethod
    def of(products: FixedJacobian, prior: BlockPrior, θ: Tensor) -> ExpectedVariation:
        """Linearise around the weights `θ̃`, with one backward pass for each pair of neighbouring pixels and one forward
        pass for each block."""
        if len(products.shape) < 4:
            raise PosteriorError(
                f"the total variation needs images [1, C, H, W], but the network returns {list(products.shape)}: "
                "reshape its output, or use prior='filters'"
            )
        alone = torch.zeros(len(prior.blocks), len(θ)).to(θ)
        for s in prior.segments:
            alone[s.block, s.start : s.stop] = θ[s.start : s.stop]
        rest = products.f - products.push(alone)  # the image without block d [blocks, 1, ...]
        μ = torch.stack([differences(image) for image in rest])
        pairs = _pairs(products.shape).to(products.f.device)  # [edges, 2]
        parts = []
        for chunk in pairs.split(max(1, _ROWS // (prior.size + products.f.numel()))):
            U = products.f.new_zeros(len(chunk), products.f.numel())
            U.scatter_(1, chunk[:, :1], -1.0).scatter_(1, chunk[:, 1:], 1.0)
            rows = products.pull(U.reshape(len(chunk), *products.shape))
            parts.append(torch.stack([prior.squares(term, rows).cpu().double() for term in range(len(prior.terms))]))
        return ExpectedVariation(prior, μ.cpu().double(), torch.cat(parts, 1))

    def __call__(self, φ: Tensor) -> Tensor:
        """`κ_d`.  # [n_parameters] -> [blocks]"""
        w = self.prior.weights(φ)
        block_of_term = torch.tensor([d for d, _ in self.prior.terms], device="cpu")
        v = φ.new_zeros(self.μ.shape).index_add(0, block_of_term, w.unsqueeze(1) * self.parts)
        v = v.clamp_min(1e-300)
        folded = (2 * v / math.pi).sqrt() * (-self.μ.square() / (2 * v)).exp()
        return (folded + self.μ * (self.μ / (2 * v).sqrt()).erf()).sum(1)

    def log_density(self, φ: Tensor, rate: float) -> Tensor:
        """`Σ_d log λ − λκ_d + log |∂κ_d/∂ℓ_d|` over the blocks with a length; differentiable."""
        blocks = self.prior.with_length
        if not blocks:
            return φ.new_zeros(())
        if not φ.requires_grad:
            return self.log_density(φ.detach().requires_grad_(), rate).detach()
        with torch.enable_grad():
            κ = self(φ)
            (slope,) = torch.autograd.grad(κ.sum(), φ, create_graph=True)  # κ_d depends only on the length of block d
        slope = slope[len(self.prior.blocks) :] / self.prior.lengths(φ)  # ∂κ_d/∂ℓ_d
        κ = κ[list(blocks)]
        return (math.log(rate) - rate * κ + slope.abs().clamp_min(1e-300).log()).sum()


def differences(image: Tensor) -> Tensor:
    """Differences of neighbouring pixels, in the order of `_pairs`.  # [B, C, H, W, ...] -> [edges]"""
    return torch.cat([image.diff(dim=dim).reshape(-1) for dim in range(2, image.ndim)])


def total_variation(image: Tensor) -> Tensor:
    """`Σₑ |Δₑ|`; differentiable."""
    return differences(image).abs().sum()


def _pairs(shape: torch.Size) -> Tensor:
    """The two positions of each pair of neighbouring pixels in the flat image.  # [edges, 2]"""
    place = torch.arange(shape.numel(), device="cpu").reshape(shape)
    pairs = []
    for dim in range(2, len(shape)):
        n = shape[dim]
        first, second = place.narrow(dim, 0, n - 1), place.narrow(dim, 1, n - 1)
        pairs.append(torch.stack([first.reshape(-1), second.reshape(-1)], 1))
    return torch.cat(pairs)
