"""The posterior of an image given linear measurements, with a linearised network as the prior.

The model is one image `x = f(θ̃) + J(θ − θ̃)` of the linearised network with weights `θ ~ N(0, Σ)`, and measurements
`y = Ax + η` with noise `η ~ N(0, σ²I)` (tutorial, section 7). There are far fewer measurements than weights, so all
computations use the `d_y × d_y` covariance of the measurements,

    S = AJΣJᵀAᵀ + σ²I,        r = y − A(f(θ̃) − Jθ̃),

    log p(y) = log N(r; 0, S),
    Cov[x | y] = JΣJᵀ − JΣJᵀAᵀ S⁻¹ AJΣJᵀ,        E[x | y] = f(θ̃) − Jθ̃ + JΣJᵀAᵀ S⁻¹ r.

The mean is that of the linear model (`mean="linear"`), or the trained network's image `f(θ̃)` (`mean="network"`). `J`
is never built: `S` is a sum over the prior's terms, computed from a few rows of `AJ` at a time by backward passes.
Images are drawn by Matheron's rule: push prior weights through `J`, and correct them with simulated measurements.

For many measurements, the log density `log N(r; 0, S)` is computed from products with `S` alone.

Conjugate gradients give `S⁻¹r`. Stochastic Lanczos quadrature gives `log det S = tr log S`, the mean of `zᵀ log(S) z`
over random signs `z`: a few Lanczos steps from `z` give a tridiagonal `T` with `zᵀ log(S) z ≈ ‖z‖² e₁ᵀ log(T) e₁`. The
gradient in the parameters of `S` has an unbiased estimate from the same random signs,

    ∂ log N = ½ aᵀ ∂S a − ½ E[uᵀ ∂S z],        a = S⁻¹r,  u = S⁻¹z.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bayes.arguments import count, flag, instance, positive, word
from lightning_bayes.evidence.linear_model import Product, conjugate_gradients
from lightning_bayes.inverse.block_prior import BlockPrior, ExpectedVariation
from lightning_bayes.jacobian.products import FixedJacobian
from lightning_bayes.likelihoods import LinearMeasurement
from lightning_bayes.network import inputs
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.messages import warn
from lightning_bayes.network.subset import resolve_subset
from lightning_bayes.posterior.gaussian import PosteriorError

_LARGE_RESIDUAL = 1e-2  # the relative residual above which to warn


def random_signs(count: int, n: int, seed: int, like: Tensor) -> Tensor:
    """# [count, n]"""
    drawn = torch.randint(0, 2, (count, n), generator=torch.Generator().manual_seed(seed), device="cpu")
    return (2 * drawn - 1).to(like)


def log_density(product: Product, r: Tensor, Z: Tensor, solved: Tensor, steps: int) -> Tensor:
    """`log N(r; 0, S)` from random signs `Z` and `S⁻¹r` in `solved`.  # [n], [k, n], [n] -> []"""
    return -0.5 * (r @ solved + log_determinant(product, Z, steps) + len(r) * math.log(2 * math.pi))


def log_determinant(product: Product, Z: Tensor, steps: int) -> Tensor:
    """`log det S`, estimated by the mean of `zᵀ log(S) z` over the random signs `Z`."""
    α, β = _lanczos(product, Z, min(steps, Z.shape[1]))  # [k, m], [k, m - 1]
    T = torch.diag_embed(α) + torch.diag_embed(β, 1) + torch.diag_embed(β, -1)
    values, vectors = torch.linalg.eigh(T)
    smallest = torch.finfo(values.dtype).tiny
    return (vectors[:, 0].square() * values.clamp_min(smallest).log()).sum(1).mean() * Z.shape[1]


def solve(product: Product, B: Tensor) -> Tensor:
    """`S⁻¹b` for each row, to a relative residual of 1e-6.  # [k, n]"""
    X = conjugate_gradients(product, B, tolerance=1e-6, products=1000)
    residual = float(((B - product(X)).norm(dim=1) / B.norm(dim=1)).max())
    if residual > _LARGE_RESIDUAL:
        warn("conjugate gradients stopped at a relative residual of %.1g: raise the noise, or use float64", residual)
    return X


def _lanczos(product: Product, Z: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The diagonals of `T` for each row of `Z`, with full reorthogonalisation.  # [k, n] -> [k, m], [k, m - 1]"""
    Q = [Z / Z.norm(dim=1, keepdim=True)]
    α, β = [], []
    for m in range(steps):
        W = product(Q[m])
        α.append((W * Q[m]).sum(1))
        basis = torch.stack(Q, 1)  # [k, m + 1, n]
        for _ in range(2):
            W = W - torch.einsum("kmn,km->kn", basis, torch.einsum("kmn,kn->km", basis, W))
        norm = W.norm(dim=1)
        if m == steps - 1:
            break
        β.append(norm)
        Q.append(W / norm.clamp_min(torch.finfo(W.dtype).tiny).unsqueeze(1))
    return torch.stack(α, 1), torch.stack(β, 1) if β else Z.new_zeros(len(Z), 0)


PRIORS = ("gaussian", "ard", "filters", "tv")
MEANS = ("network", "linear")
_ROWS = 2**26  # numbers in a chunk of rows of AJ
_MOST = 2**33  # largest size of all kernels together, in bytes
_PROBES, _LANCZOS_STEPS = 16, 60


@torch.inference_mode(False)
def fit_measurements(
    network: nn.Module,
    x: Any,
    y: Tensor,
    likelihood: LinearMeasurement,
    prior: str = "ard",
    blocks: Mapping[str, Sequence[str]] | None = None,
    mean: str = "network",
    variance: float | None = None,
    length: float = 1.0,
    tv_rate: float = 1.0,
    exact_up_to: int = 4000,
    progress: bool = False,
) -> MeasurementPosterior:
    """The posterior of the image that a trained network computes from `x`, given measurements `y`.

    Args:
        network: A trained network from an input to an image, which is linearised around its weights.
        x: One input, with a batch dimension of one.
        y: Measurements `[1, d_y]` or `[d_y]`.
        likelihood: `LinearMeasurement(A, noise_std)`.
        prior: "gaussian" (one variance for all weights), "ard" (one variance per block), "filters" (one variance and
            one length per block, for the weights within its filters), or "tv" (like "filters", with a prior over the
            lengths that makes a small total variation likely).
        blocks: The parameters or modules of each block, by name; by default each child of the network is a block.
        mean: The mean image: the output of the "network", or that of the "linear" model.
        variance: The initial variance; by default the mean square of the weights.
        length: The initial length, in pixels of a filter.
        tv_rate: `λ` of the exponential distribution of the total variation.
        exact_up_to: The largest number of measurements for which `S` is built; for more, only products with `S` are
            computed.
        progress: Show a progress bar.
    """
    word("prior", prior, PRIORS)
    word("mean", mean, MEANS)
    positive("tv_rate", tv_rate)
    positive("length", length)
    count("exact_up_to", exact_up_to, 0)
    flag("progress", progress)
    instance("likelihood", likelihood, LinearMeasurement, "LinearMeasurement(A, noise_std)")
    instance("network", network, nn.Module, "a trained nn.Module")
    instance("y", y, Tensor, "a tensor of measurements [1, d_y] or [d_y]")
    subset = resolve_subset(network, "all", ())
    x = inputs.to_device(x, inputs.device_of(network))
    products = FixedJacobian(network, subset, x)
    if len(products.f) != 1:
        raise PosteriorError(
            f"the measurements are of one image, but the network returns {len(products.f)} for this input: pass one "
            "example, with a batch dimension of one"
        )
    y = y.detach().clone().reshape(1, -1)
    likelihood.check(products.f, y)
    y = y.to(products.f)
    if bool(y.isfinite().logical_not().any()):
        raise PosteriorError("the measurements have NaN or infinite values: remove them and their rows of A")
    θ = subset.flatten(network)
    kind = BlockPrior.of(network, subset, "filters" if prior == "tv" else prior, blocks)
    if variance is None and not θ.any():
        raise PosteriorError("all weights are zero, so their variance is unknown: pass variance=")
    start = kind.start(float(θ.square().mean()) if variance is None else positive("variance", variance), length)
    offset = products.f - products.push(θ.unsqueeze(0))[0]  # f(θ̃) − Jθ̃ [1, ...]
    kernel = _kernel(products, likelihood, kind, y.shape[1], progress) if y.shape[1] <= exact_up_to else None
    variation = ExpectedVariation.of(products, kind, θ) if prior == "tv" else None
    return MeasurementPosterior(products, likelihood, y[0], θ, offset, kind, start, mean, kernel, variation, tv_rate)


@dataclass(frozen=True, eq=False)
class MeasurementPosterior:
    """The posterior of one image, returned by `fit_measurements`. `tune` returns a new one."""

    products: FixedJacobian
    likelihood: LinearMeasurement
    y: Tensor  # [d_y]
    θ: Tensor  # θ̃ [P]
    offset: Tensor  # f(θ̃) − Jθ̃ [1, ...]
    prior: BlockPrior
    φ: Tensor  # logarithms of the prior's hyperparameters
    mean: str
    kernel: Tensor | None  # AJ B_dr JᵀAᵀ [terms, d_y, d_y], or None if there are too many measurements
    variation: ExpectedVariation | None
    tv_rate: float

    @property
    def noise_std(self) -> float:
        return float(self.likelihood.noise_std)

    @cached_property
    def residual(self) -> Tensor:
        """`r = y − A(f(θ̃) − Jθ̃)`.  # [d_y]"""
        return (self.y - self.likelihood.map(self.offset)[0]).cpu().double()

    def log_marginal_likelihood(
        self, φ: Tensor | None = None, noise_std: Tensor | float | None = None, at: str = "linear", seed: int = 0
    ) -> Tensor:
        """`log p(y)` of the linear model, or with `at="network"` the Laplace evidence at the network's weights. It is
        differentiable in `φ` and the noise. With more than `exact_up_to` measurements it is a stochastic estimate."""
        word("at", at, MEANS)
        φ = self.φ if φ is None else φ
        σ = torch.as_tensor(self.noise_std if noise_std is None else noise_std, dtype=torch.float64, device="cpu")
        if self.kernel is None:
            if at == "network":
                raise PosteriorError(
                    "with more than exact_up_to measurements, only the evidence of the linear model is available: "
                    "use at='linear'"
                )
            return self._estimated_evidence(φ, σ, seed)
        root = self._root(φ, σ)
        logdet = 2 * root.diagonal().log().sum()
        d = len(self.y)
        if at == "linear":
            whitened = torch.linalg.solve_triangular(root, self.residual.unsqueeze(1), upper=False)
            return -0.5 * (whitened.square().sum() + logdet + d * math.log(2 * math.pi))
        error = (self.y - self.likelihood.map(self.products.f)[0]).cpu().double()
        fit = -0.5 * (error / σ).square().sum() - d * (σ.log() + 0.5 * math.log(2 * math.pi))
        return fit - 0.5 * (logdet - 2 * d * σ.log() + self.prior.penalty(self.θ, φ))

    def objective(self, φ: Tensor, noise_std: Tensor | float, seed: int = 0) -> Tensor:
        """The function that `tune` maximises: the evidence, plus the log density of the prior "tv"."""
        evidence = self.log_marginal_likelihood(φ, noise_std, seed=seed)
        return evidence if self.variation is None else evidence + self.variation.log_density(φ, self.tv_rate)

    @torch.inference_mode(False)
    def tune(self, noise: bool = True, steps: int = 100, progress: bool = False) -> MeasurementPosterior:
        """Maximise the objective in the variances, the lengths and, if `noise`, the noise: by L-BFGS, or by Adam if the
        objective is a stochastic estimate."""
        flag("noise", noise)
        count("steps", steps)
        flag("progress", progress)
        φ = self.φ.clone().requires_grad_()
        log_σ = torch.tensor(math.log(self.noise_std), dtype=torch.float64, device="cpu", requires_grad=noise)
        free = [φ, log_σ] if noise else [φ]
        bar = tqdm(total=steps, desc="evidence", disable=not progress)

        def loss(seed: int = 0) -> Tensor:
            value = -self.objective(self._within(φ), log_σ.exp(), seed)
            gradients = torch.autograd.grad(value, free)
            for p, g in zip(free, gradients, strict=True):
                p.grad = g
            bar.set_postfix(objective=f"{-float(value.detach()):.5g}")
            bar.update()
            return value.detach()

        with torch.enable_grad(), bar:
            if self.kernel is not None:
                lbfgs = torch.optim.LBFGS(free, max_iter=steps, line_search_fn="strong_wolfe", tolerance_change=1e-9)
                lbfgs.step(loss)
            else:
                adam = torch.optim.Adam(free, lr=0.1)
                for step in range(steps):
                    loss(step)
                    adam.step()
        tuned, σ = self._within(φ.detach()), float(log_σ.detach().exp())
        if not (tuned.isfinite().all() and math.isfinite(σ)):
            raise PosteriorError("the search found no maximum of the evidence: start from another variance=")
        return replace(self, φ=tuned, likelihood=self.likelihood.with_noise(σ))

    def functional(self, joint: bool = False) -> tuple[Tensor, Tensor]:
        """The mean of the image `[*image]`, and the variances of its pixels without noise `[*image]`, or with `joint`
        their covariance `[d_x, d_x]`."""
        flag("joint", joint)
        if self.kernel is None:
            raise PosteriorError(
                f"exact variances need the matrix S of the {len(self.y)} measurements: use sample(n), or fit with "
                f"exact_up_to={len(self.y)}"
            )
        whitened = torch.linalg.solve_triangular(self._S, self._cross, upper=False)  # S^{-½}AJΣJᵀ [d_y, d_x]
        parts = []
        for ids in torch.arange(self.products.f.numel(), device="cpu").split(self._chunk):
            units = _unit_rows(ids, self.products.f.numel()).to(self.products.f)
            rows = self.products.pull(units.reshape(len(ids), *self.products.shape))  # of J [k, P]
            if joint:
                pushed = self._pushed(rows)  # [k, d_x]
                parts.append(pushed - whitened[:, ids].mT @ whitened)
            else:
                variances = (rows * self.prior.covariance_times(rows, self.φ)).sum(1).cpu().double()
                parts.append(variances - whitened[:, ids].square().sum(0))
        covariance = torch.cat(parts)
        if joint:
            return self.image(), 0.5 * (covariance + covariance.mT)
        return self.image(), covariance.clamp_min(0).reshape(self.products.shape[1:])

    def image(self) -> Tensor:
        """The mean of the posterior.  # [*image]"""
        if self.mean == "network":
            return self.products.f[0].cpu().double()
        correction = self._back_projected(self._solve(self.residual.unsqueeze(0)))  # [1, d_x]
        return (self.offset.cpu().double() + correction.reshape(self.offset.shape))[0]

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw images by Matheron's rule.  # [n, *image]"""
        count("n", n)
        prior = self._prior_images(n, generator)  # [n, *image]
        noise = _normal(n, len(self.y), generator, self.θ.dtype) * self.noise_std
        simulated = self.likelihood.map(prior.to(self.products.f)).cpu().double() + noise  # [n, d_y]
        return self.image() + prior - self._back_projected(self._solve(simulated)).reshape(prior.shape)

    def sample_prior(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw images `Jθ` of the linear model before any measurement, around zero.  # [n, *image]"""
        count("n", n)
        return self._prior_images(n, generator)

    def _prior_images(self, n: int, generator: torch.Generator | None) -> Tensor:
        E = _normal(n, self.prior.size, generator, self.θ.dtype).to(self.θ)
        return self.products.push(self.prior.root_times(E, self.φ))[:, 0].cpu().double()

    @cached_property
    def _cross(self) -> Tensor:
        """`AJΣJᵀ`, by a forward and a backward pass for each measurement.  # [d_y, d_x]"""
        ids = torch.arange(len(self.y), device="cpu")
        return torch.cat([self._back_projected(_unit_rows(part, len(ids))) for part in ids.split(self._chunk)])

    def _back_projected(self, B: Tensor) -> Tensor:
        """`JΣJᵀAᵀb` for each row `b` of `B`.  # [k, d_y] -> [k, d_x]"""
        return self._pushed(_pull_measurements(self.products, self.likelihood, B))

    def _pushed(self, V: Tensor) -> Tensor:
        """`JΣv` for each row `v` of `V`.  # [k, P] -> [k, d_x]"""
        return self.products.push(self.prior.covariance_times(V, self.φ)).flatten(1).cpu().double()

    @property
    def _chunk(self) -> int:
        return _chunk_size(self.prior, self.products)

    @cached_property
    def _S(self) -> Tensor:
        """The Cholesky factor of `S`.  # [d_y, d_y]"""
        return self._root(self.φ, torch.tensor(self.noise_std, dtype=torch.float64, device="cpu"))

    def _root(self, φ: Tensor, σ: Tensor) -> Tensor:
        assert self.kernel is not None
        K = torch.tensordot(self.prior.weights(φ), self.kernel, dims=1)
        S = K + σ.square() * torch.eye(len(K), dtype=K.dtype, device=K.device)
        root, info = torch.linalg.cholesky_ex(S)
        if info:
            raise PosteriorError(
                f"the measurements' covariance is singular to rounding with noise_std={σ.item():.3g}: raise the noise, "
                "or tune fewer hyperparameters"
            )
        return root

    def _solve(self, B: Tensor) -> Tensor:
        """`S⁻¹b` for each row `b` of `B`.  # [k, d_y]"""
        if self.kernel is not None:
            return torch.cholesky_solve(B.mT, self._S).mT
        return solve(self._product(self.φ, self.noise_std), B)

    def _product(self, φ: Tensor, σ: float) -> Product:
        """The function that maps rows `v` to `Sv`."""

        def product(V: Tensor) -> Tensor:
            pulled = _pull_measurements(self.products, self.likelihood, V)
            pushed = self.products.push(self.prior.covariance_times(pulled, φ))
            return self.likelihood.map(pushed[:, 0]).cpu().double() + σ**2 * V

        return product

    def _estimated_evidence(self, φ: Tensor, σ: Tensor, seed: int) -> Tensor:
        """The evidence by Lanczos quadrature, plus a term of value zero that has the gradient of the evidence."""
        r = self.residual
        Z = random_signs(_PROBES, len(r), seed, r)
        with torch.no_grad():
            product = self._product(φ.detach(), float(σ.detach()))
            solved = solve(product, torch.cat([r.unsqueeze(0), Z]))
            a, U = solved[0], solved[1:]
            value = log_density(product, r, Z, a, _LANCZOS_STEPS)
            rows = torch.cat([a.unsqueeze(0), U, Z])
            va, vu, vz = _pull_measurements(self.products, self.likelihood, rows).cpu().split([1, _PROBES, _PROBES])
        fit = (va * self.prior.covariance_times(va, φ)).sum() + σ.square() * a.square().sum()
        trace = (vu * self.prior.covariance_times(vz, φ)).sum() + σ.square() * (U * Z).sum()
        surrogate = 0.5 * (fit - trace / _PROBES)
        return value + surrogate - surrogate.detach()

    def _within(self, φ: Tensor) -> Tensor:
        """`φ` clamped to bounds: variances within a factor of three million of the start, so that `S` can be
        decomposed; and lengths between those at which a filter's weights are independent, or equal, to rounding."""
        blocks = len(self.prior.blocks)
        variances = torch.minimum(torch.maximum(φ[:blocks], self.φ[:blocks] - 15), self.φ[:blocks] + 15)
        lengths = torch.minimum(torch.maximum(φ[blocks:], self.φ[blocks:].clamp_max(-3)), self.φ[blocks:].clamp_min(4))
        return torch.cat([variances, lengths])


def _kernel(
    products: FixedJacobian, likelihood: LinearMeasurement, prior: BlockPrior, d_y: int, progress: bool
) -> Tensor:
    """`AJ B_dr JᵀAᵀ` for each term, from pairs of chunks of rows of `AJ`. To save memory, the second chunk of each pair
    is recomputed.  # [terms, d_y, d_y]"""
    size = 8 * len(prior.terms) * d_y**2
    if size > _MOST:
        raise PosteriorError(
            f"the kernels of {d_y} measurements and {len(prior.terms)} terms of the prior take {size / 1e9:.0f} GB: "
            f"use exact_up_to={d_y - 1}, to use only products, or a prior with fewer terms, such as 'ard'"
        )

    def rows(ids: Tensor) -> Tensor:
        return in_float64(_pull_measurements(products, likelihood, _unit_rows(ids, d_y)))

    kernel = torch.zeros(len(prior.terms), d_y, d_y, dtype=torch.float64, device="cpu")
    chunks = torch.arange(d_y, device="cpu").split(_chunk_size(prior, products))
    for n, ids in enumerate(tqdm(chunks, desc="measurements", disable=not progress)):
        V = rows(ids)
        for other in chunks[: n + 1]:
            W = V if other is ids else rows(other)
            for term in range(len(prior.terms)):
                inner = prior.inner(term, V, W).cpu()
                kernel[term, ids[:, None], other] = inner
                kernel[term, other[:, None], ids] = inner.mT
    return kernel


def _normal(n: int, size: int, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    """Normal numbers, drawn on the generator's device.  # float64 [n, size]"""
    device = "cpu" if generator is None else generator.device
    return torch.randn(n, size, generator=generator, device=device, dtype=dtype).cpu().double()


def _chunk_size(prior: BlockPrior, products: FixedJacobian) -> int:
    return max(1, _ROWS // (prior.size + products.f.numel()))


def _unit_rows(ids: Tensor, n: int) -> Tensor:
    """Rows of the identity.  # [k, n]"""
    rows = torch.zeros(len(ids), n, device="cpu")
    rows[torch.arange(len(ids), device="cpu"), ids] = 1
    return rows


def _pull_measurements(products: FixedJacobian, likelihood: LinearMeasurement, V: Tensor) -> Tensor:
    """`JᵀAᵀv` for each row `v` of `V`.  # [k, d_y] -> [k, P]"""
    return products.pull(likelihood.map.adjoint(V.to(products.f), products.shape[1:]).unsqueeze(1))
