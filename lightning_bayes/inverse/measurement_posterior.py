"""A linearised network as the prior of an inverse problem: its posterior in the space of the measurements.

One image `x = f(θ̃) + J(θ − θ̃)` of the linearised network, weights `θ ~ N(0, Σ)`, and few measurements of it,
`y = Ax + η` with noise `η ~ N(0, σ²I)` (tutorial, section 7). There are far fewer measurements than weights, so that
everything is done with the `d_y × d_y` matrix of the measurements' covariance,

    S = AJΣJᵀAᵀ + σ²I,        r = y − A(f(θ̃) − Jθ̃),

    log p(y) = log N(r; 0, S),
    Cov[x | y] = JΣJᵀ − JΣJᵀAᵀ S⁻¹ AJΣJᵀ,        E[x | y] = f(θ̃) − Jθ̃ + JΣJᵀAᵀ S⁻¹ r.

The mean is that of the linear model (`mean="linear"`), or the trained network's own image f(θ̃) (`mean="network"`). `J`
is never built: `S` is a sum over the prior's terms, each from backward passes for the rows of `AJ`, a few at a time;
images are drawn by pushing weights through `J` and conditioning them on measurements of their own (Matheron's rule).
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
from lightning_bayes.inverse import lanczos_quadrature as probes
from lightning_bayes.inverse.block_prior import BlockPrior, ExpectedVariation
from lightning_bayes.jacobian.products import FixedJacobian
from lightning_bayes.likelihoods import LinearMeasurement
from lightning_bayes.network import inputs
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.network.subset import resolve_subset
from lightning_bayes.posterior.gaussian import PosteriorError

PRIORS = ("gaussian", "ard", "filters", "tv")
MEANS = ("network", "linear")
_ROWS = 2**26  # numbers of rows of AJ that are held at a time
_MOST = 2**33  # bytes of kernels
_PROBES, _LANCZOS = 16, 60


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
    """The posterior of the image that a trained network makes of `x`, given its measurements `y`.

    Args:
        network: Trained, from an input to an image; the linearised network around its weights is the model.
        x: One input, as the network takes it, with a batch dimension of one.
        y: Measurements `[1, d_y]` or `[d_y]`.
        likelihood: `LinearMeasurement(A, noise_std)`.
        prior: "gaussian" (one variance for all weights), "ard" (one per block), "filters" (and a length within the
            filters of each block), or "tv" (the same, with a prior that makes a small total variation likely).
        blocks: Parameters or modules of each block, by name; by default each child of the network is a block.
        mean: Of the image: the "network"'s own, or the "linear" model's.
        variance: To start from; by default the mean square of the weights.
        length: To start from; by default one pixel of a filter.
        tv_rate: `λ` of the total variation's exponential distribution.
        exact_up_to: Measurements up to which `S` is built; with more of them there are only products with it.
        progress: Whether to show a bar.
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
            f"measurements are those of one image, but the network returns {len(products.f)} for this input: pass one "
            "example, with a batch dimension of one"
        )
    y = y.detach().clone().reshape(1, -1)
    likelihood.check(products.f, y)
    y = y.to(products.f)
    if bool(y.isfinite().logical_not().any()):
        raise PosteriorError("the measurements have NaN or infinite values: leave their rows of A out")
    θ = subset.flatten(network)
    kind = BlockPrior.of(network, subset, "filters" if prior == "tv" else prior, blocks)
    if variance is None and not θ.any():
        raise PosteriorError("all weights are zero, and say nothing of their variance: pass variance=")
    start = kind.start(float(θ.square().mean()) if variance is None else positive("variance", variance), length)
    offset = products.f - products.push(θ.unsqueeze(0))[0]  # f(θ̃) − Jθ̃ [1, ...]
    kernel = _kernel(products, likelihood, kind, y.shape[1], progress) if y.shape[1] <= exact_up_to else None
    variation = ExpectedVariation.of(products, kind, θ) if prior == "tv" else None
    return MeasurementPosterior(products, likelihood, y[0], θ, offset, kind, start, mean, kernel, variation, tv_rate)


@dataclass(frozen=True, eq=False)
class MeasurementPosterior:
    """Of one image; made by `fit_measurements`. Nothing is mutated: `tune` returns another one."""

    products: FixedJacobian
    likelihood: LinearMeasurement
    y: Tensor  # [d_y]
    θ: Tensor  # θ̃ [P]
    offset: Tensor  # f(θ̃) − Jθ̃ [1, ...]
    prior: BlockPrior
    φ: Tensor  # the prior's hyperparameters, as logarithms
    mean: str
    kernel: Tensor | None  # AJ B_dr JᵀAᵀ [terms, d_y, d_y], or None where there are too many measurements
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
        """`log p(y)` of the linear model; or, at the "network"'s weights, what `LaplacePosterior` calls so. It is
        differentiable in `φ` and the noise. With more than `exact_up_to` measurements it is estimated by probes."""
        word("at", at, MEANS)
        φ = self.φ if φ is None else φ
        σ = torch.as_tensor(self.noise_std if noise_std is None else noise_std, dtype=torch.float64, device="cpu")
        if self.kernel is None:
            if at == "network":
                raise PosteriorError("the evidence by probes is that of the linear model: at='linear'")
            return self._probed(φ, σ, seed)
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
        """What `tune` maximises: the evidence, and with the prior "tv" its log density."""
        evidence = self.log_marginal_likelihood(φ, noise_std, seed=seed)
        return evidence if self.variation is None else evidence + self.variation.log_density(φ, self.tv_rate)

    @torch.inference_mode(False)
    def tune(self, noise: bool = True, steps: int = 100, progress: bool = False) -> MeasurementPosterior:
        """With the variances, lengths and, if `noise`, the noise that maximise the objective: by L-BFGS, or, where
        it is estimated by probes, by Adam."""
        flag("noise", noise)
        count("steps", steps)
        flag("progress", progress)
        φ, log_σ = (
            self.φ.clone().requires_grad_(),
            torch.tensor(math.log(self.noise_std), dtype=torch.float64, device="cpu"),
        )
        log_σ.requires_grad_(noise)
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
                options: dict[str, Any] = {
                    "max_iter": steps,
                    "line_search_fn": "strong_wolfe",
                    "tolerance_change": 1e-9,
                }
                torch.optim.LBFGS(free, lr=1.0, **options).step(loss)
            else:
                adam = torch.optim.Adam(free, lr=0.1)
                for step in range(steps):
                    loss(step)
                    adam.step()
        tuned, σ = self._within(φ.detach()), float(log_σ.detach().exp())
        if not (tuned.isfinite().all() and math.isfinite(σ)):
            raise PosteriorError("the evidence has no maximum that the search could find: start from another variance=")
        return replace(self, φ=tuned, likelihood=self.likelihood.with_noise(σ))

    def functional(self, joint: bool = False) -> tuple[Tensor, Tensor]:
        """The image's mean `[*image]`, and its variances `[*image]`, or if `joint` the covariance `[d_x, d_x]` of all
        pixels, without noise."""
        flag("joint", joint)
        if self.kernel is None:
            raise PosteriorError(
                f"exact variances of {len(self.y)} measurements need S itself: use sample(n), or fit with exact_up_to="
                f"{len(self.y)}"
            )
        whitened = torch.linalg.solve_triangular(self._S, self._cross, upper=False)  # S^{-½}AJΣJᵀ [d_y, d_x]
        parts = []
        for ids in torch.arange(self.products.f.numel(), device="cpu").split(self._few):
            rows = self.products.pull(self._units(ids))  # of J [k, P]
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
        """The posterior's mean.  # [*image]"""
        if self.mean == "network":
            return self.products.f[0].cpu().double()
        move = self._explained(self._solve(self.residual.unsqueeze(0)))  # [1, d_x]
        return (self.offset.cpu().double() + move.reshape(self.offset.shape))[0]

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Images: weights of the prior, pushed through `J` and conditioned on the measurements.  # [n, *image]"""
        count("n", n)
        return self.image() + self._moves(n, generator)

    def sample_prior(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Images of the linear model before any measurement, around zero: `Jθ`.  # [n, *image]"""
        count("n", n)
        return self._prior_moves(n, generator)[:, 0]

    def _moves(self, n: int, generator: torch.Generator | None) -> Tensor:
        drawn = self._prior_moves(n, generator)  # [n, 1, *image]
        noise = _normal(n, len(self.y), generator, self.θ.dtype) * self.noise_std
        seen = self.likelihood.map(drawn[:, 0].flatten(1).reshape(n, *self.products.shape[1:]).to(self.products.f))
        correction = self._explained(self._solve(seen.cpu().double() + noise))  # [n, d_x]
        return (drawn.flatten(1) - correction).reshape(n, *self.products.shape[1:])

    def _prior_moves(self, n: int, generator: torch.Generator | None) -> Tensor:
        E = _normal(n, self.prior.size, generator, self.θ.dtype).to(self.θ)
        return self.products.push(self.prior.root_times(E, self.φ)).cpu().double()

    @cached_property
    def _cross(self) -> Tensor:
        """`AJΣJᵀ`, a forward and a backward pass for each measurement.  # [d_y, d_x]"""
        rows = []
        for ids in torch.arange(len(self.y), device="cpu").split(self._few):
            rows.append(self._pushed(self.products.pull(_rows_of_map(self.likelihood, self.products, ids))))
        return torch.cat(rows)

    def _explained(self, B: Tensor) -> Tensor:
        """`JΣJᵀAᵀb` of rows.  # [k, d_y] -> [k, d_x]"""
        adjoint = self.likelihood.map.adjoint(B.to(self.products.f), self.products.shape[1:])
        return self._pushed(self.products.pull(adjoint.unsqueeze(1)))

    def _pushed(self, V: Tensor) -> Tensor:
        """`JΣv` of rows.  # [k, P] -> [k, d_x]"""
        return self.products.push(self.prior.covariance_times(V, self.φ)).flatten(1).cpu().double()

    @property
    def _few(self) -> int:
        return _rows_at_a_time(self.prior, self.products)

    @cached_property
    def _S(self) -> Tensor:
        """# the Cholesky factor [d_y, d_y]"""
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
        """`S⁻¹b` of rows.  # [k, d_y]"""
        if self.kernel is not None:
            return torch.cholesky_solve(B.mT, self._S).mT
        return probes.solve(self._product(self.φ, self.noise_std), B)

    def _product(self, φ: Tensor, σ: float) -> probes.Product:
        A, shape = self.likelihood.map, self.products.shape[1:]

        def product(V: Tensor) -> Tensor:
            pulled = self.products.pull(A.adjoint(V.to(self.products.f), shape).unsqueeze(1))
            pushed = self.products.push(self.prior.covariance_times(pulled, φ))
            return A(pushed[:, 0]).cpu().double() + σ**2 * V

        return product

    def _probed(self, φ: Tensor, σ: Tensor, seed: int) -> Tensor:
        """The value without a graph, plus a surrogate of value zero with the gradient of `probes`."""
        A, shape, r = self.likelihood.map, self.products.shape[1:], self.residual
        Z = probes.random_signs(_PROBES, len(r), seed, r)
        with torch.no_grad():
            product = self._product(φ.detach(), float(σ.detach()))
            solved = probes.solve(product, torch.cat([r.unsqueeze(0), Z]))
            a, U = solved[0], solved[1:]
            value = probes.log_density(product, r, Z, a, _LANCZOS)
            rows = torch.cat([a.unsqueeze(0), U, Z])
            pulled = self.products.pull(A.adjoint(rows.to(self.products.f), shape).unsqueeze(1)).cpu()
        va, vu, vz = pulled[:1], pulled[1 : 1 + _PROBES], pulled[1 + _PROBES :]
        fit = (va * self.prior.covariance_times(va, φ)).sum() + σ.square() * a.square().sum()
        trace = (vu * self.prior.covariance_times(vz, φ)).sum() + σ.square() * (U * Z).sum()
        surrogate = 0.5 * (fit - trace / _PROBES)
        return value + surrogate - surrogate.detach()

    def _within(self, φ: Tensor) -> Tensor:
        """Variances at most a factor of three million from where they start, with which `S` can be decomposed; lengths
        beyond which a filter's weights are independent, or one, to rounding."""
        blocks = len(self.prior.blocks)
        variances = torch.minimum(torch.maximum(φ[:blocks], self.φ[:blocks] - 15), self.φ[:blocks] + 15)
        lengths = torch.minimum(torch.maximum(φ[blocks:], self.φ[blocks:].clamp_max(-3)), self.φ[blocks:].clamp_min(4))
        return torch.cat([variances, lengths])

    def _units(self, ids: Tensor) -> Tensor:
        U = self.products.f.new_zeros(len(ids), self.products.f.numel())
        U[torch.arange(len(ids), device="cpu"), ids] = 1
        return U.reshape(len(ids), *self.products.shape)


def _kernel(
    products: FixedJacobian, likelihood: LinearMeasurement, prior: BlockPrior, d_y: int, progress: bool
) -> Tensor:
    """`AJ B_dr JᵀAᵀ` of each term; rows of `AJ` are made again for each pair of parts that do not fit together.
    # [terms, d_y, d_y]"""
    size = 8 * len(prior.terms) * d_y**2
    if size > _MOST:
        raise PosteriorError(
            f"the kernels of {d_y} measurements and {len(prior.terms)} terms of the prior take {size / 1e9:.0f} GB: "
            f"use exact_up_to={d_y - 1}, for products alone, or a prior with fewer terms, as 'ard'"
        )
    kernel = torch.zeros(len(prior.terms), d_y, d_y, dtype=torch.float64, device="cpu")
    parts = torch.arange(d_y, device="cpu").split(_rows_at_a_time(prior, products))
    for n, ids in enumerate(tqdm(parts, desc="measurements", disable=not progress)):
        V = in_float64(products.pull(_rows_of_map(likelihood, products, ids)))
        for other in parts[: n + 1]:
            W = V if other is ids else in_float64(products.pull(_rows_of_map(likelihood, products, other)))
            for term in range(len(prior.terms)):
                inner = prior.inner(term, V, W).cpu()
                kernel[term, ids[:, None], other] = inner
                kernel[term, other[:, None], ids] = inner.mT
    return kernel


def _normal(n: int, size: int, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    """Drawn on the generator's device, by default on the CPU.  # float64 [n, size]"""
    device = "cpu" if generator is None else generator.device
    return torch.randn(n, size, generator=generator, device=device, dtype=dtype).cpu().double()


def _rows_at_a_time(prior: BlockPrior, products: FixedJacobian) -> int:
    return max(1, _ROWS // (prior.size + products.f.numel()))


def _rows_of_map(likelihood: LinearMeasurement, products: FixedJacobian, ids: Tensor) -> Tensor:
    """# [k, 1, *image]"""
    d_y = likelihood.noise_shape(products.f).numel()
    picks = products.f.new_zeros(len(ids), d_y)
    picks[torch.arange(len(ids), device="cpu"), ids] = 1
    return likelihood.map.adjoint(picks, products.shape[1:]).unsqueeze(1)
