"""CONTRIBUTING's "Adding something", done from outside: one file with a likelihood and a structure, and nothing else.

The likelihood is a Poisson regression, the structure a multiple of the identity. Both go through a fit, a prediction,
tuning and a file without a line of the package knowing of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.networks import made, mlp
from helpers.oracles import jacobian
from helpers.tensors import TIGHT, real, seeded
from torch import Tensor

from lightning_bayes import GLM, Gaussian, GaussianPosterior, LaplacePosterior, fit_laplace
from lightning_bayes.curvature.accumulate import BlockAccumulator, JacobianAccumulator
from lightning_bayes.jacobian.plan import Plan
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import diagonal_root
from lightning_bayes.network import Processes, SubsetError
from lightning_bayes.structures import Structure, StructureError

# -- one file ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts `y` with rate `s e^f`: log p = y (f + log s) − s e^f − log y!,  Λ = diag(s e^f)."""

    exposure: float = 1.0  # s

    name, word = "Counts", "counts"
    has_diagonal_fisher = True

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        log_rate = f + torch.tensor(self.exposure).log()
        return (y * log_rate - log_rate.exp() - torch.lgamma(y + 1)).sum(1)  # [B]

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return diagonal_root((self.exposure * f.exp()).sqrt())  # [C, B, C]

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        rate = self.exposure * f.exp()
        counts = torch.arange(int(rate.max() + 10 * rate.max().sqrt()) + 20, dtype=f.dtype).view(-1, 1, 1)
        return (uniform >= torch.special.gammaincc(counts + 1, rate)).sum(0).to(f.dtype)

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return self.exposure * f.exp(), self.exposure * f.exp()


@dataclass(frozen=True, eq=False)
class ScaledIdentity(Structure):
    """`M = value · I` over `n` parameters."""

    value: Tensor
    n: int

    name = "ScaledIdentity"

    @property
    def size(self) -> int:
        return self.n

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        return self.value.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ScaledIdentity:
        return ScaledIdentity(self.value.to(device=device, dtype=dtype), self.n)

    def to_dense(self) -> Tensor:
        return torch.diag(self.diagonal())

    def diagonal(self) -> Tensor:
        return self.value.expand(self.n)

    def inverse_diagonal(self) -> Tensor:
        return 1 / self.diagonal()

    def __add__(self, other: ScaledIdentity) -> ScaledIdentity:
        return ScaledIdentity(self.value + other.value, self.n)

    def scale(self, factor: float | Tensor) -> ScaledIdentity:
        return ScaledIdentity(self.value * factor, self.n)

    def add_prior(self, precision: float | Tensor) -> ScaledIdentity:
        δ = torch.as_tensor(precision, dtype=self.dtype, device=self.device)
        if δ.ndim:
            raise StructureError("a multiple of the identity takes one prior precision for all parameters")
        return ScaledIdentity(self.value + δ, self.n)

    def matmul(self, vectors: Tensor) -> Tensor:
        return self.value * vectors

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.value

    def root_solve(self, vectors: Tensor) -> Tensor:
        return vectors * self.value.rsqrt()

    def logdet(self) -> Tensor:
        return self.n * self.value.log()


class ScaledIdentitySum(JacobianAccumulator):
    """The multiple that has the trace of the curvature: `Σₙ Σ_k ‖j‖² / P`."""

    word = "identity"

    def __init__(self, plan: Plan, sharing: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, sharing, dtype, device)
        self._trace, self._size = torch.zeros(1, dtype=dtype, device=device), plan.subset.size

    def add_rows(self, J: Tensor) -> None:
        self._trace += J.square().sum()

    @property
    def sums(self) -> list[Tensor]:
        return [self._trace]

    def overflowing(self) -> str | None:
        return None if bool(self._trace.isfinite()) else "the parameters"

    def finish(self, processes: Processes) -> ScaledIdentity:
        return ScaledIdentity(self._trace[0] / self._size, self._size)


class ExactBlocks(BlockAccumulator):
    """A structure of known parts, one dense block for each layer: its word is all that there is to say."""

    word = "blocks"


# -- what it can do ----------------------------------------------------------------------------------------------------

X = real(9, 3)
Y = torch.poisson(torch.rand(9, 2, generator=seeded(), dtype=X.dtype) * 4, seeded(1))
BATCHES = [(X[:4], Y[:4]), (X[4:], Y[4:])]
network = partial(made, partial(mlp, outputs=2))


def fit(structure: str, likelihood: str | Likelihood = "counts", **options: Any) -> LaplacePosterior:
    return fit_laplace(network(), BATCHES, likelihood, structure=structure, **options)


@pytest.mark.parametrize("structure", ["full", "diag", "identity", "blocks"])
def test_an_own_likelihood_has_its_exact_curvature(structure: str) -> None:
    """`Σₙ Jₙᵀ diag(s e^f) Jₙ`, by hand."""
    J, f = jacobian(network(), X), network()(X).detach()
    H = torch.einsum("bcp,bc,bcq->pq", J, 2 * f.exp(), J)
    expected = {
        "full": H,
        "diag": torch.diag(H.diagonal()),
        "identity": H.trace() / len(H) * torch.eye(len(H), dtype=H.dtype),
        "blocks": H * torch.block_diag(torch.ones(16, 16), torch.ones(10, 10)),
    }
    found = fit(structure, Poisson(exposure=2.0)).curvature.structure
    torch.testing.assert_close(found.to_dense(), expected[structure], **TIGHT)


@pytest.mark.parametrize("structure", ["identity", "blocks"])
def test_an_own_structure_predicts_through_the_linearised_network(structure: str) -> None:
    posterior, x = fit(structure, prior_precision=0.7), X[:5]
    assert posterior.likelihood == Poisson()
    f, Σ = posterior.functional(x)
    J, P = jacobian(network(), x), posterior.precision.to_dense()
    torch.testing.assert_close(f, network()(x).detach(), **TIGHT)
    torch.testing.assert_close(Σ, J @ torch.linalg.solve(P, J.mT), **TIGHT)
    joint, flat = posterior.functional(x, joint=True)[1], J.flatten(0, 1)
    torch.testing.assert_close(joint, flat @ torch.linalg.solve(P, flat.mT), **TIGHT)
    prediction = posterior.predict(x, GLM(samples=200_000), generator=seeded())
    of_log_normal = (f + 0.5 * Σ.diagonal(dim1=1, dim2=2)).exp()
    torch.testing.assert_close(prediction.mean, of_log_normal, rtol=0.02, atol=0)


def test_single_weights_have_no_block_of_their_own() -> None:
    with pytest.raises(SubsetError, match="no block form"):
        fit("blocks", subset=torch.tensor([0, 3]))


def test_an_own_structure_has_an_evidence_to_tune() -> None:
    posterior = fit("identity")
    θ, P = posterior.mean, posterior.precision.to_dense()
    log_likelihood = torch.distributions.Poisson(network()(X).detach().exp()).log_prob(Y).sum()
    expected = log_likelihood - 0.5 * (torch.logdet(P) + θ @ θ)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected, **TIGHT)
    tuned = posterior.tune_prior("marglik")
    assert tuned.log_marginal_likelihood() > posterior.log_marginal_likelihood()


@pytest.mark.parametrize("structure", ["identity", "blocks"])
def test_a_file_holds_both(tmp_path: Path, structure: str) -> None:
    posterior = fit(structure, Poisson(exposure=2.0), prior_precision=0.7)
    posterior.save(tmp_path / "posterior.pt")
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", network())
    assert isinstance(loaded, LaplacePosterior)
    assert loaded.likelihood == Poisson(exposure=2.0)
    torch.testing.assert_close(loaded.precision.to_dense(), posterior.precision.to_dense(), **TIGHT)
    torch.testing.assert_close(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood(), **TIGHT)


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match="the name 'Gaussian' belongs to Gaussian"):

        class Second(Gaussian):
            name = "Gaussian"

    with pytest.raises(ValueError, match="the name 'kron' belongs to KroneckerAccumulator"):

        class Third(BlockAccumulator):
            word = "kron"


def test_a_root_of_ones_own_says_again_whether_it_is_diagonal() -> None:
    """A subclass of a likelihood with a diagonal Fisher may have any other."""

    class Coupled(Gaussian):
        def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
            return torch.ones_like(f).unsqueeze(0)

    assert Gaussian().has_diagonal_fisher
    assert not Coupled().has_diagonal_fisher
    J = jacobian(network(), X).sum(1)
    found = fit("full", Coupled()).curvature.structure
    torch.testing.assert_close(found.to_dense(), J.mT @ J, **TIGHT)


def test_a_structure_without_a_name_cannot_be_saved() -> None:
    class Nameless(ScaledIdentity):
        name = None

    with pytest.raises(StructureError, match="Nameless cannot be saved"):
        Nameless(torch.ones(()), 3).to_state()


def test_accumulators_without_a_word_are_not_offered() -> None:
    with pytest.raises(ValueError, match="unknown structure None"):
        fit(None)  # type: ignore[arg-type]
