"""`LaplacePosterior`: its precision is curvature plus prior, `P = H/T + Λ` (GLM paper, eq. (12)), stored separately.

`H = Σₙ JₙᵀΛₙJₙ` does not depend on the prior, and a Gaussian's noise only scales it. The posterior can therefore
compute its evidence for any prior and noise (see `evidence`). The prior is `N(m, Λ⁻¹)`, by default with `m = 0` and
`Λ = diag(δ)` (see `prior`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Curvature
from lightning_bayes.curvature.fit import log_likelihood
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.likelihoods.outputs import vector
from lightning_bayes.network import Processes, Subset
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.network.float64 import cast_like, float64_device, in_float64, number_like
from lightning_bayes.options.predictive import PredictiveOption, PredictiveWord
from lightning_bayes.options.tuning import CalibrateWord, TuneWord, Tuning
from lightning_bayes.posterior.function_space import GaussianProcess
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError, implementation
from lightning_bayes.posterior.prior import GaussianPrior, as_precision, per_layer_sums, per_parameter
from lightning_bayes.posterior.training_points import TrainingPoints
from lightning_bayes.structures import BlockDiagonal, Diagonal, Eigenbasis, Structure

Precision = float | Tensor | Sequence[float]
Laplace = TypeVar("Laplace", bound="LaplacePosterior")


class DeferredPrecision:
    """A prior precision that is computed on first use. Until then a snapshot of an optimizer (see `moments`) costs one
    vector instead of three.

    Args:
        compute: returns `δ`; it must not depend on anything that changes.
        subset: the weights of the prior.
        like: a tensor with the dtype and device of `δ`.
    """

    def __init__(self, compute: Callable[[], Tensor | float], subset: Subset, like: Tensor) -> None:
        self._compute, self._subset, self._like = compute, subset, like

    @cached_property
    def value(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self._like.device.type, enabled=False):
            return as_precision(self._compute(), self._subset, self._like)

    def __call__(self) -> Tensor:
        return self.value


@dataclass(frozen=True, eq=False, repr=False)
class LaplacePosterior(GaussianPosterior):
    """`N(θ*, (H/T + Λ)⁻¹)`."""

    curvature: Curvature = field(kw_only=True)
    given_precision: Tensor | DeferredPrecision = field(kw_only=True)  # see `prior_precision`
    prior: GaussianPrior = field(default_factory=GaussianPrior, kw_only=True)
    temperature: float = 1.0
    damping: str | None = None
    points: TrainingPoints | None = None  # the training points of its Gaussian process

    @classmethod
    def around(
        cls: type[Laplace],
        network: nn.Module,
        mean: Tensor,
        fingerprint: Tensor,
        curvature: Curvature,
        prior_precision: Precision | Callable[[], Tensor | float],
        temperature: float = 1.0,
        damping: str | None = None,
        prior: GaussianPrior | None = None,
    ) -> Laplace:
        """The posterior around the weights `mean` with this fingerprint. If `prior_precision` is a function, it is
        called on first use, and the curvature must be diagonal."""
        posterior = cls(
            network=network,
            subset=curvature.subset,
            likelihood=curvature.likelihood,
            mean=mean,
            precision=curvature.structure,
            n_data=curvature.n_data,
            fingerprint=fingerprint,
            curvature=curvature,
            given_precision=mean.new_ones(()),
            prior=(prior or GaussianPrior()).to(mean),
            temperature=temperature,
            damping=damping,
        )
        if not callable(prior_precision):
            return posterior.with_prior(prior_precision)
        deferred, H = DeferredPrecision(prior_precision, curvature.subset, mean), posterior.curvature_at()
        assert isinstance(H, Diagonal)
        return replace(posterior, given_precision=deferred, precision=H.add_deferred(deferred))

    @property
    def prior_precision(self) -> Tensor:
        """`δ`: a number, one per layer `[layers]`, or one per weight `[P]`."""
        given = self.given_precision
        return given if isinstance(given, Tensor) else given.value

    def _as_precision(self, prior_precision: Precision) -> Tensor:
        return as_precision(prior_precision, self.subset, self.mean)

    def _on(self, device: torch.device) -> dict[str, Any]:
        known = super()._on(device)
        g = self.curvature.gradient
        curvature = replace(
            self.curvature,
            structure=self.curvature.structure.to(device),
            likelihood=known["likelihood"],
            gradient=None if g is None else g.to(device),
        )
        prior = {"prior": self.prior.to(known["mean"]), "given_precision": self.prior_precision.to(device)}
        return {**known, "curvature": curvature, **prior}

    @property
    def noise_power(self) -> int:
        """`H ∝ σ^power`: Fisher and GGN have `1/σ²`, the outer product of gradients has `1/σ⁴`."""
        return -4 if self.curvature.kind in ("empirical_fisher", "second_moment") else -2

    @cached_property
    def process(self) -> GaussianProcess:
        """The posterior in function space; it needs training points."""
        return GaussianProcess(self)

    @property
    def effective_parameters(self) -> Tensor:
        """`γ = P − tr(ΛP⁻¹) = Σ λ/(λ + δ)`, the number of weights that the data determine."""
        if self.prior_precision.ndim == 0 and (basis := self.eigenbasis(torch.Size())) is not None:
            return self._determined(basis).sum()
        return self.effective_parameters_per_layer().sum()

    def effective_parameters_per_layer(self) -> Tensor:
        """`γ_l = d_l − Σ_{i∈l} δᵢ [P⁻¹]ᵢᵢ`.  # [layers]"""
        layers = len(self.subset.layers)
        if self.prior_precision.shape in ((), (layers,)):
            basis = self.eigenbasis(torch.Size([layers]))
            if basis is not None and basis.groups is not None:
                γ = self._determined(basis)
                return γ.new_zeros(layers).index_add(0, basis.groups, γ)
        return per_layer_sums(in_float64(1 - self.prior_shares()), self.subset)

    def _determined(self, basis: Eigenbasis) -> Tensor:
        """`λ/(λ + δ)` times the multiplicity of each column, computed without a subtraction from one that would
        cancel.  # [n]"""
        δ, λ = in_float64(self.prior_precision), basis.values / self.temperature
        return basis.counts * (λ / (λ + (δ if δ.ndim == 0 else δ[basis.groups])))

    def eigenbasis(self, prior_shape: torch.Size, vectors: Tensor | None = None) -> Eigenbasis | None:
        """The eigenbasis of `H` for priors of shape `[]`, `[layers]` or `[P]`; None if `P` is not diagonal in it."""
        if self.damping is not None or self.prior.precision is not None:
            return None
        groups = None
        if prior_shape == (self.subset.size,):
            groups = torch.arange(self.subset.size)
        elif prior_shape:
            groups = self.subset.layer_index
        device = float64_device(self.device)
        return self.curvature.structure.eigenbasis(vectors, None if groups is None else groups.to(device))

    def prior_shares(self) -> Tensor:
        """`δᵢ [P⁻¹]ᵢᵢ`, the share of the prior in each weight. If the prior is another posterior, these are terms of
        `tr(ΛP⁻¹)` that have the right sum over each layer.  # [P]"""
        if self.prior.precision is None:
            return per_parameter(self.prior_precision, self.subset) * self.precision.inverse_diagonal()
        return self.precision.trace_terms(self.prior_matrix())

    @property
    def has_exact_sum(self) -> bool:
        """Whether `P` is exactly `H/T + Λ`."""
        adds_factors = self.prior.precision is not None and isinstance(self.curvature.structure, BlockDiagonal)
        return self.damping is None and not adds_factors

    def check_exact_sum(self, what: str) -> None:
        if not self.has_exact_sum:
            raise PosteriorError(
                f"{what} needs the exact sum of curvature and prior: fit without damping, and with prior= of "
                "structure='full' or 'diag'"
            )

    @property
    def knows_optimum(self) -> bool:
        """Whether the optimum of the linear model is available in closed form."""
        is_whole = self.has_exact_sum and not self.curvature.structure.is_truncated
        return is_whole and self.curvature.gradient is not None

    def check_optimum(self, what: str) -> None:
        """Raise an error if the linear model has no optimum: in a direction that the curvature omits, the gradient
        would lead to infinity."""
        if self.curvature.structure.is_truncated:
            raise PosteriorError(
                f"{what} needs the curvature in all directions of the gradient, but "
                f"structure={self.curvature.structure.word!r} leaves some out: use tune_prior('marglik'), or 'auto' or "
                "'grid' with validation data"
            )
        self.check_exact_sum(what)

    def prior_matrix(self, prior_precision: Tensor | None = None) -> Structure:
        """`Λ`."""
        return self.prior.matrix(self.prior_precision if prior_precision is None else prior_precision, self.subset)

    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        noise_std: float | Tensor | None = None,
        at: str = "weights",
    ) -> Tensor:
        """The evidence, a pure and differentiable function of prior and noise (by default the posterior's).

        `at="weights"` treats the weights as a mode of the loss. `at="optimum"` uses the optimum of the linearised model
        instead (see `evidence`).
        """
        self.check_whole("the evidence")
        return implementation("log_marginal_likelihood")(self, prior_precision, noise_std, at)

    def loss_gradient(self) -> Tensor:
        """`g = −∂ log p(D | θ) / ∂θ` at the weights, for the linear model's optimum.  # [P]"""
        if self.curvature.gradient is None:
            raise PosteriorError(
                "the evidence at the linear model's optimum needs the gradient of the training loss, which this "
                "posterior does not have: fit one with fit_laplace"
            )
        self.check_optimum("the linear model's optimum")
        return self.curvature.gradient

    def least_loss(self, ρ: Tensor) -> Tensor:
        """A lower bound of `−log p(D | θ)` at noise `ρσ`."""
        n = self.curvature.n_outputs
        least = torch.as_tensor(self.likelihood.least_nll(n), dtype=torch.float64, device=ρ.device)
        return least if self.likelihood.tunable_noise is None else least + n * ρ.log()

    def in_float64(self: Laplace) -> Laplace:
        """The same posterior with a curvature, prior and mean in float64."""
        mean = in_float64(self.mean)
        # Move before casting, because the original device may not support float64.
        structure = self.curvature.structure.to(mean.device).to(dtype=mean.dtype)
        prior = self.prior.to(self.mean.to(mean.device)).to(mean)
        curvature, δ = replace(self.curvature, structure=structure), in_float64(self.prior_precision)
        return replace(self, mean=mean, curvature=curvature, prior=prior, given_precision=δ)

    def with_prior(self: Laplace, prior_precision: Precision) -> Laplace:
        """The same curvature with another prior."""
        # Inference tensors could not be differentiated later, and autocast would add in 16 bits.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            δ = self._as_precision(prior_precision).detach().clone()
            return replace(self, given_precision=δ, precision=self.precision_at(δ), calibrations=())

    def update(
        self, loader: Iterable[Any], progress: bool = False, processes: Processes | None = None, probe: Any = None
    ) -> LaplacePosterior:
        """Add data at the same weights, with the same prior. The result equals a fit to the old and new data together,
        exactly for structure="full" and "diag"; "kron" must have been fitted with `Kron(updatable=True)`.

        Args:
            loader: the new data `(x, y)`.
            progress: show a progress bar.
            processes: the processes that share the new data.
            probe: an input, for a process whose share of the data may be empty.
        """
        return implementation("update")(self, loader, progress, processes, probe)

    def with_noise(self, noise_std: float | Tensor) -> LaplacePosterior:
        """The same fit with a different noise in its Gaussian likelihood."""
        self.check_whole("with_noise")
        with torch.inference_mode(False), torch.no_grad():
            ρ = self.noise_ratio(vector("noise_std", noise_std, LikelihoodError))
            σ = number_like(noise_std, self.mean).detach().clone()
            likelihood = self.likelihood.with_noise(σ)
            known = self.curvature.squared_error
            curvature = replace(
                self.curvature,
                structure=self._scaled_curvature(ρ),
                likelihood=likelihood,
                log_likelihood=self.log_likelihood_at(ρ) if self.curvature.knows_likelihood else None,
                gradient=None if (g := self.curvature.gradient) is None else g / cast_like(ρ**2, self.mean),
                squared_error=None if known is None else self.squared_error * ρ.cpu().double() ** -2,
            )
            points = None if self.points is None else self.points.times(cast_like(1 / ρ, self.mean))
        moved = replace(self, curvature=curvature, likelihood=likelihood, points=points)
        return moved.with_prior(self.prior_precision)

    def with_log_likelihood(self, loader: Iterable[Any], processes: Processes | None = None) -> LaplacePosterior:
        """Compute the log-likelihood of the training data in one forward pass over `loader`, for a posterior that was
        computed without a pass over them."""
        self.check_whole("with_log_likelihood")
        self.check_weights()
        numbers = log_likelihood(self.network, loader, self.likelihood, processes)
        if numbers["n_data"] != self.n_data:
            raise PosteriorError(
                f"the loader holds {numbers['n_data']} examples, but the posterior was fitted to {self.n_data}: pass "
                "the training data, each example once"
            )
        return replace(self, curvature=replace(self.curvature, **numbers))

    def tune_prior(
        self,
        method: TuneWord | Tuning = "auto",
        loader: Iterable[Any] | None = None,
        *,
        predictive: PredictiveWord | PredictiveOption = "glm",
        calibrate: CalibrateWord | None = "auto",
        seed: int = 0,
        progress: bool = False,
        processes: Processes | None = None,
    ) -> LaplacePosterior:
        """Return a posterior with a tuned prior and, for regression by evidence, a tuned noise.

        Args:
            method: "auto" (by held-out data if there are any), "marglik" (gradients of the evidence), "mackay" (a fixed
                point of the evidence), "linear" (the evidence at the linear model's optimum) or "grid" (validation
                data); or an option such as `Tuning("linear", groups="layers")`.
            loader: batches `(x, y)`: validation data for "auto" and "grid"; the training data for `iterate=True`, and
                for a posterior that has seen no data, such as that of L2M.
            predictive: for "auto" and "grid": as in `predict`.
            calibrate: for "auto": the temperature to keep, for the probabilities ("probs" or "auto") or the network's
                outputs ("outputs"); None keeps no temperature.
            seed: for "auto" and "grid": seed for random draws.
            progress: for `iterate=True`: show a progress bar.
            processes: for `iterate=True`: the processes that share the data.
        """
        with preserved_rng(self.device), torch.autocast(self.device.type, enabled=False):
            return implementation("tune_prior")(self, method, loader, predictive, calibrate, seed, progress, processes)

    def refine(
        self,
        loader: Iterable[Any],
        method: Literal["laplace", "variational"] = "laplace",
        passes: int = 200,
        tolerance: float = 1e-6,
        samples: int = 256,
        seed: int = 0,
        progress: bool = False,
    ) -> LaplacePosterior:
        """Return the posterior of the linearised network around its own optimum, with the same prior and structure. Its
        predictions are those of the linearised network. The mean depends on the prior and noise: to change these,
        change them in the fitted posterior and refine it again.

        Args:
            loader: the training data `(x, y)`; its batches are kept in memory.
            method: "laplace", or "variational" for the Gaussian with the largest evidence lower bound, which needs
                structure="full" or "diag".
            passes: for "laplace": the largest number of passes over the data.
            tolerance: "laplace" stops at a gradient of this size relative to the initial gradient; "variational" stops
                when a round raises the lower bound by less than this many nats per example.
            samples: for "variational": the number of quasi-random outputs per example.
            seed: for "variational": seed of these outputs.
            progress: show a progress bar.
        """
        return implementation("refine")(self, loader, method, passes, tolerance, samples, seed, progress)

    def precision_at(self, δ: Tensor, ρ: Tensor | None = None) -> Structure:
        """`P` at noise `ρσ`, by default `σ`."""
        H = self.curvature_at(ρ)
        if self.damping is None:
            return self.prior.added_to(H, δ, self.subset)
        if δ.ndim:
            raise PosteriorError("damping takes one prior precision for all layers")
        return H.add_damping(δ, split=self.n_data**0.5 if self.damping == "ritter" else 1.0)

    def curvature_at(self, ρ: Tensor | None = None) -> Structure:
        """`H/T` at noise `ρσ`, by default `σ`."""
        H = self.curvature.structure if ρ is None else self._scaled_curvature(ρ)
        return H if self.temperature == 1 else H.scale(1 / self.temperature)

    def _scaled_curvature(self, ρ: Tensor) -> Structure:
        """`H` at noise `ρσ`."""
        return self.curvature.structure.scale(cast_like(ρ**self.noise_power, self.mean))

    def log_likelihood_at(self, ρ: Tensor) -> Tensor:
        """`log p(D | θ*)` at noise `ρσ`, from its value at `σ`: only the squared error is scaled. In float64."""
        fitted = self.curvature.log_likelihood
        if fitted is None:
            raise PosteriorError(
                "this posterior was computed without a pass over the data, so it has no log-likelihood: use "
                "with_log_likelihood(loader), or pass loader= when tuning"
            )
        if self.likelihood.tunable_noise is None:
            return fitted
        ρ = ρ.cpu().double()
        return fitted + 0.5 * self.squared_error * (1 - ρ**-2) - self.curvature.n_outputs * ρ.log()

    @property
    def squared_error(self) -> Tensor:
        """`Σ (y − f)²/σ²` over all outputs. It is at least the squared rounding error of `σ`, which matters for a
        network that interpolates its data."""
        error = self.curvature.squared_error
        if error is None:
            raise PosteriorError(
                f"{type(self.likelihood).__name__} has a noise_std but no squared_error: implement the method, or tune "
                "with noise=False"
            )
        eps = torch.finfo(torch.promote_types(next(self.network.parameters()).dtype, torch.float32)).eps
        return error.clamp(min=self.curvature.n_outputs * eps**2)

    def noise_ratio(self, noise_std: float | Tensor | None) -> Tensor:
        """`ρ = σ_new / σ`, one number: noise per output changes by a common factor."""
        one = torch.ones((), dtype=torch.float64, device=float64_device(self.device))
        if noise_std is None:
            return one
        if self.likelihood.tunable_noise is None:
            raise PosteriorError(
                f"noise_std needs a Gaussian likelihood, but this posterior has {type(self.likelihood).__name__}: "
                "leave it out"
            )
        vector("noise_std", noise_std, LikelihoodError)
        σ, new = (number_like(s, one) for s in (self.likelihood.tunable_noise, noise_std))
        self.likelihood.with_noise(new.detach())  # raises if it is not positive
        comparable = new.shape == σ.shape or not (new.ndim and σ.ndim)
        ratio = new / σ if comparable else new
        first = ratio.flatten()[0]
        if not comparable or not torch.allclose(ratio.detach(), first.detach(), rtol=1e-5):
            raise PosteriorError(
                "after the fit, the noise of several outputs can only be changed by a common factor: pass the fitted "
                "noise_std times one number, or fit again"
            )
        return first
