"""`LaplacePosterior`: its precision is curvature plus prior, `P = H/T + Λ`, kept apart.

Because `H = Σₙ JₙᵀΛₙJₙ` does not depend on the prior, and depends on a Gaussian's noise only by a factor, the posterior
knows its `evidence` for any prior and noise (`P` is that of the GLM paper, eq. (12)). The prior is `N(m, Λ⁻¹)`, with
`Λ = diag(δ)` around zero unless another one is given (see `prior`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Curvature
from lightning_bayes.curvature.fit import log_likelihood
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.likelihoods.outputs import vector
from lightning_bayes.network import Processes
from lightning_bayes.network.accumulation import cast_like, float64_device, in_float64, number_like
from lightning_bayes.network.borrowed import preserved_rng
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.options.tuning import Tuning
from lightning_bayes.posterior.evidence import Evidence
from lightning_bayes.posterior.function_space import GaussianProcess
from lightning_bayes.posterior.gaussian import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.implementation import implementation
from lightning_bayes.posterior.prior import GaussianPrior, as_precision, per_layer_sums, per_parameter
from lightning_bayes.posterior.training_points import TrainingPoints
from lightning_bayes.structures import BlockDiagonal, Eigenbasis, Structure

_FORMED = ("prior_precision", "precision")  # by `around` with a function, when one of them is asked for
Laplace = TypeVar("Laplace", bound="LaplacePosterior")


@dataclass(frozen=True, eq=False, repr=False)
class LaplacePosterior(GaussianPosterior):
    """`N(θ*, (H/T + Λ)⁻¹)`."""

    curvature: Curvature = field(repr=False, kw_only=True)
    prior_precision: Tensor = field(kw_only=True)  # δ
    prior: GaussianPrior = field(default_factory=GaussianPrior, repr=False, kw_only=True)
    temperature: float = 1.0
    damping: str | None = None
    points: TrainingPoints | None = field(default=None, repr=False)  # of its Gaussian process

    @classmethod
    def around(
        cls: type[Laplace],
        network: nn.Module,
        mean: Tensor,
        fingerprint: Tensor,
        curvature: Curvature,
        prior_precision: float | Tensor | Sequence[float] | Callable[[], Tensor | float],
        temperature: float = 1.0,
        damping: str | None = None,
        prior: GaussianPrior | None = None,
    ) -> Laplace:
        """The posterior around these weights, which have this fingerprint. A prior precision that is a function, of
        nothing that changes, is called when it is asked for."""
        posterior = cls(
            network=network,
            subset=curvature.subset,
            likelihood=curvature.likelihood,
            mean=mean,
            precision=curvature.structure,
            n_data=curvature.n_data,
            fingerprint=fingerprint,
            curvature=curvature,
            prior_precision=mean.new_ones(()),
            prior=(prior or GaussianPrior()).to(mean),
            temperature=temperature,
            damping=damping,
        )
        if not callable(prior_precision):
            return posterior.with_prior(prior_precision)
        for name in _FORMED:
            del posterior.__dict__[name]
        posterior.__dict__["_form_prior"] = prior_precision
        return posterior

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What is formed on demand; as with a `cached_property`, it is then an ordinary attribute."""
            form = self.__dict__.get("_form_prior")
            if name not in _FORMED or form is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                δ = as_precision(form(), self.subset, self.mean)
                self.__dict__.update(prior_precision=δ, precision=self.precision_at(δ))
            return self.__dict__[name]

    def _on(self, device: torch.device) -> dict[str, Any]:
        known = super()._on(device)
        g = self.curvature.gradient
        curvature = replace(
            self.curvature,
            structure=self.curvature.structure.to(device),
            likelihood=known["likelihood"],
            gradient=None if g is None else g.to(device),
        )
        prior = {"prior": self.prior.to(known["mean"]), "prior_precision": self.prior_precision.to(device)}
        return {**known, "curvature": curvature, **prior}

    @property
    def noise_power(self) -> int:
        """`H ∝ σ^power`: Fisher and GGN have `1/σ²`, the outer product of gradients has `1/σ⁴`."""
        return -4 if self.curvature.kind in ("empirical_fisher", "second_moment") else -2

    @cached_property
    def process(self) -> GaussianProcess:
        """The posterior in function space, of one with training points."""
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
        """`λ/(λ + δ)`, as often as a column counts; nothing is subtracted from one.  # [n]"""
        δ, λ = in_float64(self.prior_precision), basis.values / self.temperature
        return basis.counts * (λ / (λ + (δ if δ.ndim == 0 else δ[basis.groups])))

    def eigenbasis(self, prior_shape: torch.Size, vectors: Tensor | None = None) -> Eigenbasis | None:
        """That of `H`, for priors of this shape, `[]`, `[layers]` or `[P]`; None where `P` is not diagonal in it."""
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
        """How much of each weight is the prior's, `δᵢ [P⁻¹]ᵢᵢ`; of a prior that is another posterior, terms of
        `tr(ΛP⁻¹)` whose sums over the layers are right.  # [P]"""
        if self.prior.precision is None:
            return per_parameter(self.prior_precision, self.subset) * self.precision.inverse_diagonal()
        return self.precision.trace_terms(self.prior_matrix())

    @property
    def has_exact_sum(self) -> bool:
        """Whether `P` is `H/T + Λ` itself."""
        adds_factors = self.prior.precision is not None and isinstance(self.curvature.structure, BlockDiagonal)
        return self.damping is None and not adds_factors

    def check_exact_sum(self, what: str) -> None:
        if not self.has_exact_sum:
            raise PosteriorError(
                f"{what} belongs to the exact sum of curvature and prior: fit without damping, and with prior= of "
                "structure='full' or 'diag'"
            )

    @property
    def knows_optimum(self) -> bool:
        """Whether it has the linear model's optimum."""
        is_whole = self.has_exact_sum and not self.curvature.structure.is_truncated
        return is_whole and self.curvature.gradient is not None

    def check_optimum(self, what: str) -> None:
        """Of the linear model: in a direction that the curvature leaves out, the gradient would lead to infinity."""
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
        """The evidence, a pure and differentiable function of prior and noise; `None` is what the posterior has.

        It is taken `at="weights"`, as if these were a mode of the loss, or `at="optimum"` of the linearised model (see
        `evidence`), which they need not be.
        """
        prior = self.prior_precision if prior_precision is None else prior_precision
        δ = as_precision(prior, self.subset, in_float64(self.mean[:1]))
        with torch.autocast(self.device.type, enabled=False):
            return Evidence(self, at, δ.shape)(δ, self._noise_ratio(noise_std))

    def loss_gradient(self) -> Tensor:
        """`g = −∂ log p(D | θ) / ∂θ` at the weights, for the linear model's optimum.  # [P]"""
        if self.curvature.gradient is None:
            raise PosteriorError(
                "the evidence at the linear model's optimum needs the gradient of the training loss, which this "
                "posterior was made without: fit it with fit_laplace"
            )
        self.check_optimum("the linear model's optimum")
        return self.curvature.gradient

    def least_loss(self, ρ: Tensor) -> Tensor:
        """What `−log p(D | θ)` at noise `ρσ` cannot fall below."""
        n = self.curvature.n_outputs
        least = torch.as_tensor(self.likelihood.least_nll(n), dtype=torch.float64, device=ρ.device)
        return least if self.likelihood.tunable_noise is None else least + n * ρ.log()

    def in_float64(self: Laplace) -> Laplace:
        """The same posterior with a curvature, prior and mean in float64."""
        mean = in_float64(self.mean)
        structure = self.curvature.structure.to(mean.device).to(dtype=mean.dtype)  # first where there is float64
        prior = self.prior.to(self.mean.to(mean.device)).to(mean)
        curvature, δ = replace(self.curvature, structure=structure), in_float64(self.prior_precision)
        return replace(self, mean=mean, curvature=curvature, prior=prior, prior_precision=δ)

    def with_prior(self: Laplace, prior_precision: float | Tensor | Sequence[float]) -> Laplace:
        """The same curvature with another prior."""
        # Inference tensors could not be differentiated later, and sums are not for 16 bits.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            δ = as_precision(prior_precision, self.subset, self.mean).detach().clone()
            return replace(self, prior_precision=δ, precision=self.precision_at(δ), calibrations=())

    def update(
        self, loader: Iterable[Any], progress: bool = False, processes: Processes | None = None, probe: Any = None
    ) -> LaplacePosterior:
        """The posterior of more data at the same weights, with the same prior: as one fit to the old and the new data
        together, exactly for structure="full" and "diag"; "kron" must have been fitted with `updatable=True`.

        Args:
            loader: the new data `(x, y)`.
            progress: show a progress bar.
            processes: those that share the new data.
            probe: an input, for a process whose own share of them may be empty.
        """
        return implementation("update")(self, loader, progress, processes, probe)

    def with_noise(self, noise_std: float | Tensor) -> LaplacePosterior:
        """The same fit with another noise of its Gaussian likelihood."""
        with torch.inference_mode(False), torch.no_grad():
            ρ = self._noise_ratio(vector("noise_std", noise_std, LikelihoodError))
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
        """The same posterior with the log-likelihood of the training data, for one that was made without them: one
        forward pass over `loader`."""
        self.check_weights()
        numbers = log_likelihood(self.network, loader, self.likelihood, processes)
        if numbers["n_data"] != self.n_data:
            raise PosteriorError(
                f"the loader holds {numbers['n_data']} examples, but the posterior is that of {self.n_data}: pass the "
                "training data, each example once"
            )
        return replace(self, curvature=replace(self.curvature, **numbers))

    def tune_prior(
        self,
        method: str | Tuning = "auto",
        loader: Iterable[Any] | None = None,
        *,
        predictive: str | PredictiveOption = "glm",
        calibrate: str | None = "auto",
        seed: int = 0,
        progress: bool = False,
        processes: Processes | None = None,
    ) -> LaplacePosterior:
        """A new posterior with the prior (and, for regression by evidence, the noise) tuned.

        Args:
            method: "auto" (what measures best), "marglik" (gradients of the evidence), "mackay" (its fixed point),
                "linear" (the evidence at the linear model's optimum) or "grid" (validation data); or an option such as
                `Tuning("linear", groups="layers")`.
            loader: batches `(x, y)`: validation data for "auto" and "grid"; the training data for `iterate=True`, and
                for a posterior that has seen no data, as that of L2M.
            predictive: for "auto" and "grid": as in `predict`.
            calibrate: for "auto": "probs" or "auto" keeps a temperature of the probabilities, "outputs" one of the
                network's outputs, and None none.
            seed: for "auto" and "grid": of what is drawn.
            progress: for `iterate=True`: show a progress bar.
            processes: for `iterate=True`: those that share the data.
        """
        with preserved_rng(self.device), torch.autocast(self.device.type, enabled=False):
            return implementation("tune_prior")(self, method, loader, predictive, calibrate, seed, progress, processes)

    def refine(
        self,
        loader: Iterable[Any],
        method: str = "laplace",
        passes: int = 200,
        tolerance: float = 1e-6,
        samples: int = 256,
        seed: int = 0,
        progress: bool = False,
    ) -> LaplacePosterior:
        """The posterior of the linearised network itself, around its own optimum, with the same prior and structure;
        predictions are then those of the linearised network. Its mean belongs to this prior and noise: with others,
        refine the fitted posterior again.

        Args:
            loader: the training data `(x, y)`; its batches are kept in memory.
            method: "laplace", or "variational" for the Gaussian with the largest evidence lower bound, which is for
                structure="full" and "diag".
            passes: over the data, at most, in a search of the mean; "variational" has one in each of its rounds.
            tolerance: where it ends: the gradient relative to that at the start; for "variational", a round's gain
                relative to the lower bound.
            samples: quasi-random outputs that stand for their distribution, for "variational".
            seed: of those.
            progress: show a progress bar.
        """
        return implementation("refine")(self, loader, method, passes, tolerance, samples, seed, progress)

    def precision_at(self, δ: Tensor, ρ: Tensor | None = None) -> Structure:
        """`P` at noise `ρσ`, or at `σ`."""
        H = self.curvature_at(ρ)
        if self.damping is None:
            return self.prior.added_to(H, δ, self.subset)
        if δ.ndim:
            raise PosteriorError("damping takes one prior precision for all layers")
        return H.add_damping(δ, split=self.n_data**0.5 if self.damping == "ritter" else 1.0)

    def curvature_at(self, ρ: Tensor | None = None) -> Structure:
        """`H/T` at noise `ρσ`, or at `σ`."""
        H = self.curvature.structure if ρ is None else self._scaled_curvature(ρ)
        return H if self.temperature == 1 else H.scale(1 / self.temperature)

    def _scaled_curvature(self, ρ: Tensor) -> Structure:
        """`H` at noise `ρσ`."""
        return self.curvature.structure.scale(cast_like(ρ**self.noise_power, self.mean))

    def _known_log_likelihood(self) -> Tensor:
        """`log p(D | θ*)`, in float64."""
        if self.curvature.log_likelihood is None:
            raise PosteriorError(
                "this posterior was made without a pass over the data and does not know their likelihood: use "
                "with_log_likelihood(loader), or pass loader= when tuning"
            )
        return self.curvature.log_likelihood

    def log_likelihood_at(self, ρ: Tensor) -> Tensor:
        """`log p(D | θ*)` at noise `ρσ`, from its value at `σ`: only the squared error is scaled. In float64."""
        fitted = self._known_log_likelihood()
        if self.likelihood.tunable_noise is None:
            return fitted
        ρ = ρ.cpu().double()
        return fitted + 0.5 * self.squared_error * (1 - ρ**-2) - self.curvature.n_outputs * ρ.log()

    @property
    def squared_error(self) -> Tensor:
        """`Σ (y − f)²/σ²` over all outputs; at least the square of the rounding of `σ`, for a network that interpolates
        its data. Files of older versions do not hold it: it is recovered from the log-likelihood, up to rounding."""
        n, error = self.curvature.n_outputs, self.curvature.squared_error
        eps = torch.finfo(torch.promote_types(next(self.network.parameters()).dtype, torch.float32)).eps
        if error is not None:
            return error.clamp(min=n * eps**2)
        log_σ = vector("noise_std", self.likelihood.tunable_noise, LikelihoodError).cpu().double().log().mean()
        error = -2 * (self._known_log_likelihood() + n * (log_σ + 0.5 * math.log(2 * math.pi)))
        return error.clamp(min=n * eps)

    def _noise_ratio(self, noise_std: float | Tensor | None) -> Tensor:
        """`ρ = σ_new / σ`, one number: per-output noise moves by a common scale."""
        if noise_std is None:
            return torch.ones((), dtype=torch.float64, device=float64_device(self.device))
        if self.likelihood.tunable_noise is None:
            raise PosteriorError(
                f"noise_std belongs to a Gaussian likelihood, but this posterior has {type(self.likelihood).__name__}"
            )
        vector("noise_std", noise_std, LikelihoodError)
        like = torch.ones((), dtype=torch.float64, device=float64_device(self.device))
        σ, new = (number_like(s, like) for s in (self.likelihood.tunable_noise, noise_std))
        self.likelihood.with_noise(new.detach())  # which refuses what is not positive
        comparable = new.shape == σ.shape or not (new.ndim and σ.ndim)
        ratio = new / σ if comparable else new
        first = ratio.flatten()[0]
        if not comparable or not torch.allclose(ratio.detach(), first.detach(), rtol=1e-5):
            raise PosteriorError(
                "the noise of several outputs can only be changed by a common scale after the fit: pass the fitted "
                "noise_std times one number, or fit again"
            )
        return first
