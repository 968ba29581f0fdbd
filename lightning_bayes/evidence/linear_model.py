"""Fit the linearised network to data (GLM paper, eq. (10); tutorial, section 6), by passes over a loader.

With the network's weights `θ̃`, outputs `f` and Jacobians `J`, a prior precision `Λ` and a temperature `T`,

    h(θ, x) = f(x) + J(x) (θ − θ̃),      L(θ) = −(1/T) Σₙ log p(yₙ | h(θ, xₙ)) + ½ dᵀΛd,
    ∇L(θ) = −(1/T) Σₙ Jₙᵀrₙ + Λd,        ∇²L(θ) v = (1/T) Σₙ JₙᵀΛₙJₙ v + Λv,

where `d = θ − m` is the distance from the prior's mean, and `rₙ` and `Λₙ` are the residual and the output Hessian at
`h(θ, xₙ)`. `L` is convex if `−log p(y | f)` is convex in `f`. Newton's method finds its minimum `θ⋆`. Each Newton
equation is solved by conjugate gradients, preconditioned by the fitted precision. Every product is one pass over the
data. If the Jacobian is small, its factors are kept from the first pass, and later passes do not run the network.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from lightning_bayes.curvature.accumulate import STRUCTURES, ColumnSum, FisherRoot
from lightning_bayes.curvature.data_pass import DataPass
from lightning_bayes.jacobian.products import Jacobian
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import Processes, inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.float64 import float64_device, in_float64
from lightning_bayes.posterior.at_mean import linearised_outputs
from lightning_bayes.posterior.gaussian import PosteriorError
from lightning_bayes.posterior.jacobian_factors import HELD, factors, places
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.structures import Structure

Product = Callable[[Tensor], Tensor]  # V -> VA: multiplies each row of V by the symmetric matrix A  # [..., n]


def conjugate_gradients(
    product: Product, B: Tensor, tolerance: float, products: int, precondition: Product | None = None
) -> Tensor:
    """`A⁻¹b` for each row `b`, with at most `products` products.

    A row is solved when its residual is at most `tolerance` times the initial residual. Residuals are measured in the
    norm of the preconditioner `M⁻¹`, by default the identity.  # [..., n]
    """
    X, R = torch.zeros_like(B), B
    Z = R if precondition is None else precondition(R)
    P, rz = Z, (R * Z).sum(-1, keepdim=True)
    goal = tolerance**2 * rz
    for _ in range(products):
        unsolved = rz > goal
        if not unsolved.any():
            break
        AP = product(P)
        step = torch.where(unsolved, rz / (P * AP).sum(-1, keepdim=True), 0.0)
        X, R = X + step * P, R - step * AP
        Z = R if precondition is None else precondition(R)
        previous, rz = rz, (R * Z).sum(-1, keepdim=True)
        P = Z + torch.where(unsolved, rz / previous, 0.0) * P
    return X


_SUFFICIENT = 1e-4  # share of the predicted decrease that a step must reach (Armijo)
_SHORTEST = 2.0**-40


class LinearModel:
    """The linearised network of a posterior on the training data in `loader`.

    Weights `θ` of the linear model are represented by a posterior with the mean `θ` and the `shift` `θ − θ̃`. Its
    curvature stores the log-likelihood, the gradient and the squared error at `h(θ, ·)`.

    Args:
        loader: the training data `(x, y)`, the same in each pass.
        processes: the processes that share the data.
        on_pass: called after each pass.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        processes: Processes | None = None,
        on_pass: Callable[[], object] = lambda: None,
    ) -> None:
        self._loader, self._processes = loader, processes or Processes()
        self._on_pass = on_pass
        self._kept: list[Batch] | None = None
        self.passes = 0

    def minimum(self, posterior: LaplacePosterior, passes: int, tolerance: float) -> tuple[LaplacePosterior, float]:
        """`θ⋆` by Newton's method from `θ̃`, and `‖∇L(θ⋆)‖` relative to `‖∇L(θ̃)‖`, in at most `passes` passes."""
        last = self.passes + passes
        current = self.at(posterior, torch.zeros_like(posterior.mean))
        initial = gradient_norm(current)
        residual = 1.0 if initial > 0 else 0.0
        while residual > tolerance and last - self.passes >= 2:
            moved = self.step(current, forcing(residual, tolerance), last - self.passes)
            if moved is None:
                break
            current, residual = moved, gradient_norm(moved) / initial
        return current, residual

    def step(self, posterior: LaplacePosterior, tolerance: float, passes: int) -> LaplacePosterior | None:
        """One Newton step that decreases the loss, with its equation solved to `tolerance`; None if no step length
        decreases the loss. The step takes at least two and at most `passes` passes."""
        Λ, T, last = posterior.prior_matrix(), posterior.temperature, self.passes + passes

        def hessian(v: Tensor) -> Tensor:
            return self.product(posterior, v) / T + Λ.matmul(v)

        loss, g = loss_of(posterior), loss_gradient(posterior)
        s = conjugate_gradients(hessian, -g, tolerance, passes - 1, posterior.precision.solve)
        slope, length = float((g * s).sum()), 1.0
        shift = torch.zeros_like(posterior.mean) if posterior.shift is None else posterior.shift
        while self.passes < last and length >= _SHORTEST:
            moved = self.at(posterior, shift + length * s)
            change = float(loss_of(moved) - loss)
            if change <= _SUFFICIENT * length * slope + 1e-12 * abs(float(loss)):
                return moved
            length *= _shorter(change / length, slope, float((loss_gradient(moved) * s).sum()))
        return None

    def at(self, posterior: LaplacePosterior, shift: Tensor) -> LaplacePosterior:
        """The posterior moved to the weights `θ̃ + shift` of the linear model."""
        sums = torch.zeros_like(posterior.mean)
        device = float64_device(posterior.device)
        totals = torch.zeros(3, dtype=torch.float64, device=device)  # examples, log-likelihood, squared error
        with self._processes.raising_together():
            for batch in self._batches(posterior):
                h = batch.outputs(shift)
                error = posterior.likelihood.squared_error(h, batch.y)
                fit = in_float64(posterior.likelihood.log_likelihood_per_example(h, batch.y)).sum()
                unknown = fit.new_tensor(math.nan)
                totals += torch.stack([fit.new_tensor(len(h)), fit, unknown if error is None else error.to(fit)])
                sums += batch.pull(posterior.likelihood.residual(h, batch.y))
        self._processes.sum_([sums, totals])
        n, fit, error = totals.cpu()
        if n != posterior.n_data:
            raise PosteriorError(
                f"a pass over the loader has {int(n)} examples, but the posterior was fitted to {posterior.n_data}: "
                "pass the training data, each example once in each pass"
            )
        squared_error = None if error.isnan() else error
        known = {"log_likelihood": fit, "gradient": -sums, "squared_error": squared_error}
        mean = weights_of(posterior) + shift
        return replace(posterior, mean=mean, shift=shift, curvature=replace(posterior.curvature, **known))

    def product(self, posterior: LaplacePosterior, v: Tensor) -> Tensor:
        """`Σₙ JₙᵀΛₙJₙ v` with `Λₙ` at the posterior's outputs.  # [P] -> [P]"""

        def cotangent(batch: Batch) -> Tensor:
            h = batch.f.detach() if posterior.shift is None else batch.outputs(posterior.shift)
            return _hessian_product(posterior.likelihood, h, batch.y, batch.push(v))

        return self.pulled(posterior, cotangent)

    def pulled(self, posterior: LaplacePosterior, cotangent: Callable[[Batch], Tensor]) -> Tensor:
        """`Σₙ Jₙᵀuₙ`, where `cotangent` computes the `uₙ` of a batch.  # [B, ...] -> [P]"""
        sums = torch.zeros_like(posterior.mean)
        with self._processes.raising_together():
            for batch in self._batches(posterior):
                sums += batch.pull(cotangent(batch))
        self._processes.sum_([sums])
        return sums

    def refitted(self, posterior: LaplacePosterior, root_at: FisherRoot | None = None) -> LaplacePosterior:
        """Recompute the curvature `Σₙ JₙᵀΛ(h(θ, xₙ))Jₙ` at the posterior's mean `θ`, in one pass over the data. By
        default `Λ` is the output Fisher at the linear model's outputs; `root_at` returns a root of another one."""
        self.passes += 1
        H = _curvature_at(posterior, self._loader, root_at)
        self._on_pass()
        return replace(posterior, curvature=replace(posterior.curvature, structure=H)).with_prior(
            posterior.prior_precision
        )

    def _batches(self, posterior: LaplacePosterior) -> Iterator[Batch]:
        """One pass over the data."""
        self.passes += 1
        posterior.check_weights()
        yield from self._read(posterior) if self._kept is None else self._kept
        self._on_pass()

    def _read(self, posterior: LaplacePosterior) -> Iterator[Batch]:
        """Yield the batches of the loader, and keep them if their Jacobians are small."""
        rows = posterior.curvature.n_outputs  # 0 if the outputs have not been counted yet
        is_small = 0 < rows * posterior.subset.size * posterior.mean.element_size() <= HELD
        start, batches = 0, list[Batch]()
        for batch in self._loader:
            x, y = inputs.to_device(inputs.split_targets(posterior.network, batch), posterior.device)
            # For a whole input, the factors take a backward pass per example, but a product takes one for all examples.
            is_small = is_small and not isinstance(x, inputs.WholeInput)
            with torch.inference_mode(False), borrowed(posterior.network, posterior.subset.names):
                of_batch = (KeptBatch if is_small else NetworkBatch)(posterior, x, y, start)
                yield of_batch
            if is_small:
                batches.append(of_batch)
            start += len(y)
        self._kept = batches if is_small else None


class Batch(ABC):
    """A batch's outputs at `θ̃`, and products with its Jacobian."""

    f: Tensor  # [B, ...]

    def __init__(self, y: Tensor, start: int) -> None:
        self.y, self.examples = y, slice(start, start + len(y))

    def outputs(self, d: Tensor) -> Tensor:
        """`f + Jd`.  # [P] -> [B, ...]"""
        return self.f.detach() + self.push(d)

    @abstractmethod
    def push(self, v: Tensor) -> Tensor:
        """`Jv`.  # [P] -> [B, ...]"""

    @abstractmethod
    def pull(self, u: Tensor) -> Tensor:
        """`Jᵀu`.  # [B, ...] -> [P]"""


class NetworkBatch(Batch):
    """Computes each product by a pass through the network."""

    def __init__(self, posterior: LaplacePosterior, x: Any, y: Tensor, start: int) -> None:
        super().__init__(y, start)
        self._posterior = posterior
        self._parameters = posterior.subset.parameters(posterior.network)
        self.f = inputs.call(posterior.network, x)
        self._jacobian = Jacobian(posterior.network, posterior.subset, x, self.f)

    @torch.no_grad()
    def push(self, v: Tensor) -> Tensor:
        return self._jacobian.value_and_push(v)[1]

    def pull(self, u: Tensor) -> Tensor:
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(self.f, parameters, u.to(self.f.dtype), allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        flat = torch.cat([part.detach().reshape(-1) for part in parts])
        return self._posterior.subset.narrow(flat).to(self._posterior.mean)


class KeptBatch(Batch):
    """Computes products from the factors of the Jacobian, without the network."""

    def __init__(self, posterior: LaplacePosterior, x: Any, y: Tensor, start: int) -> None:
        super().__init__(y, start)
        self._like = posterior.mean
        self._parts = list(factors(posterior, torch.ones_like(posterior.mean), x))
        self._places = {layout: places(layout, posterior.subset) for part in self._parts for layout in part.layers}
        self.f = torch.cat([part.f for part in self._parts])

    @torch.no_grad()
    def push(self, v: Tensor) -> Tensor:
        Jv = torch.cat([part.push(v, self._places) for part in self._parts])
        return Jv.to(self.f).view_as(self.f)

    @torch.no_grad()
    def pull(self, u: Tensor) -> Tensor:
        total, rows = torch.zeros_like(self._like), u.reshape(len(u), -1).to(self._like)
        for part, of_part in zip(self._parts, rows.split([len(part.f) for part in self._parts]), strict=True):
            part.pull(of_part, self._places, total)
        return total


def weights_of(posterior: LaplacePosterior) -> Tensor:
    """`θ̃`, the network's weights.  # [P]"""
    return posterior.mean if posterior.shift is None else posterior.mean - posterior.shift


def loss_of(posterior: LaplacePosterior) -> Tensor:
    """`L(θ)`, in float64."""
    fit = posterior.curvature.log_likelihood
    assert fit is not None
    d = posterior.prior.distance(posterior.mean)
    penalty = in_float64(d * posterior.prior_matrix().matmul(d)).sum().cpu()
    return 0.5 * penalty - fit / posterior.temperature


def loss_gradient(posterior: LaplacePosterior) -> Tensor:
    """`∇L(θ)`.  # [P]"""
    g = posterior.curvature.gradient
    assert g is not None
    return posterior.prior_matrix().matmul(posterior.prior.distance(posterior.mean)) + g / posterior.temperature


def gradient_norm(posterior: LaplacePosterior, M: Structure | None = None) -> float:
    """`‖∇L(θ)‖` in the norm of `M⁻¹`; `M` is the posterior's precision by default."""
    g = loss_gradient(posterior)
    return float((g * (M or posterior.precision).solve(g)).sum().clamp_min(0).sqrt())


def forcing(residual: float, tolerance: float) -> float:
    """The tolerance of a Newton equation: loose far from the optimum, and never tighter than necessary."""
    return max(min(0.5, residual**0.5), 0.1 * tolerance / residual)


def _shorter(change: float, slope: float, end_slope: float) -> float:
    """The minimum of the cubic on [0, 1] with these slopes at its ends and this change between them, clamped to
    [0.1, 0.7]."""
    a = slope + end_slope - 3 * change
    root = math.sqrt(max(a * a - slope * end_slope, 0.0))
    below = end_slope - slope + 2 * root
    lowest = 1 - (end_slope + root - a) / below if below > 0 else 0.5
    return min(max(lowest, 0.1), 0.7)


def _hessian_product(likelihood: Likelihood, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """`−∂² log p(y | f)/∂f² u`: minus a vector-Jacobian product of the residual `∂ log p(y | f)/∂f`, because the matrix
    is symmetric.  # [B, ...]"""
    change: Tensor = vjp(lambda f: likelihood.residual(f, y), f)[1](u)[0]
    return -change


def _curvature_at(posterior: LaplacePosterior, loader: Iterable[Any], root_at: FisherRoot | None) -> Structure:
    """`Σₙ JₙᵀΛ(h(θ, xₙ))Jₙ`, in as many passes as the structure needs."""

    def fisher_root_at(x: Any, y: Tensor, examples: Tensor) -> Tensor:
        assert posterior.shift is not None
        h = linearised_outputs(posterior, x, posterior.shift)
        check_outputs(h.shape)
        return posterior.likelihood.fisher_root(h, y)

    known = posterior.curvature

    def batches(description: str) -> Iterator[tuple[Any, Tensor]]:
        for batch in loader:
            yield inputs.to_device(inputs.split_targets(posterior.network, batch), posterior.device)

    def make_sum(x: Any, y: Tensor) -> ColumnSum:
        options = (str(known.structure.word), known.weight_sharing)
        with posterior.linearised(x) as (plan, _):
            return ColumnSum(
                posterior.network, plan, posterior.likelihood, *options, fisher_root=root_at or fisher_root_at
            )

    with torch.inference_mode(False), borrowed(posterior.network, posterior.subset.names):
        return DataPass(posterior.likelihood).fit(batches, make_sum).structure


def check_refit(posterior: LaplacePosterior, what: str) -> None:
    """Raise an error if the curvature cannot be recomputed; `what` names the call."""
    H = posterior.curvature.structure
    if H.word is None:
        raise PosteriorError(f"{type(H).__name__} has no word for structure=: set its class attribute `word`")
    if H.word not in STRUCTURES:
        raise PosteriorError(
            f"{what} recomputes the curvature in one pass, which structure={H.word!r} does not support: fit "
            "structure='kron', 'ekfac', 'diag' or 'full'"
        )
    if posterior.damping is not None or posterior.curvature.kind != "ggn":
        raise PosteriorError(f"{what} needs curvature='ggn' without damping: fit the posterior again")
    if posterior.curvature.hessian != "exact":
        raise PosteriorError(f"{what} needs a fit with hessian='exact', not {posterior.curvature.hessian!r}")


def check_outputs(shape: Sequence[int]) -> None:
    if len(shape) > 2:
        raise PosteriorError(
            "a curvature at the linear model's outputs supports outputs [B] and [B, C], but the network's have shape "
            f"{list(shape)}: use a network with one label per example"
        )


def check_convex(posterior: LaplacePosterior, advice: str) -> None:
    if not posterior.likelihood.is_convex:
        raise PosteriorError(
            f"the linear model of {type(posterior.likelihood).__name__} is not convex and has no single optimum: "
            f"{advice}"
        )
