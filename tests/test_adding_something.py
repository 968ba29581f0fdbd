"""CONTRIBUTING's "Adding something", done from outside: one file with a likelihood and a structure, and nothing else.

The likelihood is a Poisson regression, the structure a multiple of the identity. Both go through a fit, a prediction,
tuning and a file without a line of the package knowing of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import GLM, Gaussian, GaussianPosterior, LaplacePosterior, fit_laplace
from lightning_bayes.curvature.accumulate import Accumulator, BlockAccumulator, JacobianAccumulator
from lightning_bayes.jacobian.plan import Plan
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.likelihoods.outputs import diagonal_root
from lightning_bayes.network import Processes, SubsetError
from lightning_bayes.structures import Structure, StructureError

F64 = torch.float64
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


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

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(9, 3, generator=GENERATOR, dtype=F64)
Y = torch.poisson(torch.rand(9, 2, generator=GENERATOR, dtype=F64) * 4)


@pytest.fixture(autouse=True)
def still() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(X[:4], Y[:4]), (X[4:], Y[4:])]  # uneven


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """# [B, C, P]"""
    parameters = dict(net.named_parameters())
    J = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(parameters)
    return torch.cat([part.reshape(*part.shape[:2], -1) for part in J.values()], dim=-1).detach()


def ggn(net: nn.Module, s: float = 1.0) -> Tensor:
    """`Σₙ Jₙᵀ diag(s e^f) Jₙ`, by hand.  # [P, P]"""
    J, f = jacobian(net, X), net(X).detach()
    return torch.einsum("bcp,bc,bcq->pq", J, s * f.exp(), J)


def test_words_are_known_once_their_classes_are() -> None:
    assert resolve("counts") == Poisson()
    assert fit_laplace(network(), batches(), "counts", structure="identity").likelihood == Poisson()


@pytest.mark.parametrize("structure", ["full", "diag", "identity", "blocks"])
def test_an_own_likelihood_has_its_exact_curvature(structure: str) -> None:
    net = network()
    H = ggn(net, 2.0)
    P = len(H)
    layers = torch.block_diag(torch.ones(16, 16), torch.ones(10, 10)).to(H)
    expected = {
        "full": H,
        "diag": torch.diag(H.diagonal()),
        "identity": H.trace() / P * torch.eye(P, dtype=F64),
        "blocks": H * layers,
    }
    found = fit_laplace(net, batches(), Poisson(exposure=2.0), structure=structure).curvature.structure
    torch.testing.assert_close(found.to_dense(), expected[structure], **TIGHT)


@pytest.mark.parametrize("structure", ["identity", "blocks"])
def test_an_own_structure_predicts_through_the_linearised_network(structure: str) -> None:
    net = network()
    posterior = fit_laplace(net, batches(), "counts", prior_precision=0.7, structure=structure)
    f, Σ = posterior.functional(X[:5])
    J, P = jacobian(net, X[:5]), posterior.precision.to_dense()
    torch.testing.assert_close(f, net(X[:5]).detach(), **TIGHT)
    torch.testing.assert_close(Σ, J @ torch.linalg.solve(P, J.mT), **TIGHT)
    (variance,) = posterior.functional_for([posterior.precision], X[:5], "marginal")[1]
    torch.testing.assert_close(variance, Σ.diagonal(dim1=1, dim2=2), **TIGHT)
    together = posterior.functional(X[:5], joint=True)[1]
    flat = J.flatten(0, 1)
    torch.testing.assert_close(together, flat @ torch.linalg.solve(P, flat.mT), **TIGHT)
    # The mean of a log-normal rate.
    found = posterior.predict(X[:5], GLM(samples=200_000), generator=torch.Generator().manual_seed(0))
    assert found.mean is not None
    torch.testing.assert_close(found.mean, (f + 0.5 * variance).exp(), rtol=0.02, atol=0)


def test_single_weights_have_no_block_of_their_own() -> None:
    with pytest.raises(SubsetError, match="single weights of a layer have no block form: use structure='full' or"):
        fit_laplace(network(), batches(), "counts", subset=torch.tensor([0, 3]), structure="blocks")


def test_an_own_structure_has_an_evidence_to_tune() -> None:
    net = network()
    posterior = fit_laplace(net, batches(), "counts", structure="identity")
    θ, P = posterior.mean, posterior.precision.to_dense()
    fit = torch.distributions.Poisson(net(X).detach().exp()).log_prob(Y).sum()
    expected = fit - 0.5 * (torch.logdet(P) + θ @ θ)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected, **TIGHT)
    tuned = posterior.tune_prior("marglik")
    assert tuned.log_marginal_likelihood() > posterior.log_marginal_likelihood()


@pytest.mark.parametrize("structure", ["identity", "blocks"])
def test_a_file_holds_both(tmp_path: Path, structure: str) -> None:
    net = network()
    posterior = fit_laplace(net, batches(), Poisson(exposure=2.0), prior_precision=0.7, structure=structure)
    posterior.save(tmp_path / "posterior.pt")
    torch.load(tmp_path / "posterior.pt", weights_only=True)
    loaded = GaussianPosterior.load(tmp_path / "posterior.pt", net)
    assert isinstance(loaded, LaplacePosterior)
    assert loaded.likelihood == Poisson(exposure=2.0)
    assert type(loaded.precision) is type(posterior.precision)
    torch.testing.assert_close(loaded.precision.to_dense(), posterior.precision.to_dense(), **TIGHT)
    torch.testing.assert_close(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood(), **TIGHT)
    torch.testing.assert_close(loaded.functional(X)[1], posterior.functional(X)[1], **TIGHT)


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match=r"the name 'Gaussian' belongs to Gaussian: give .*Second another one"):

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
    net = network()
    J = jacobian(net, X).sum(1)
    found = fit_laplace(net, batches(), Coupled(), structure="full").curvature.structure
    torch.testing.assert_close(found.to_dense(), J.mT @ J, **TIGHT)


def test_a_structure_without_a_name_cannot_be_saved() -> None:
    class Nameless(ScaledIdentity):
        name = None

    with pytest.raises(StructureError, match="Nameless cannot be saved: give the class a name"):
        Nameless(torch.ones(()), 3).to_state()


def test_accumulators_without_a_word_are_not_offered() -> None:
    with pytest.raises(ValueError, match="unknown structure None"):
        fit_laplace(network(), batches(), "counts", structure=None)  # type: ignore[arg-type]
    assert Accumulator.word is None
