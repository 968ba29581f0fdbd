"""A user's own likelihood is one small class; here a Poisson regression of counts with a log link."""

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.likelihoods import Gaussian, Likelihood, LikelihoodError, Predictive, resolve


class Poisson(Likelihood):
    """Counts `y` with rate `e^f`, outputs and targets `[B, C]`: log p = y f − e^f − log y!,  Λ = diag(e^f)."""

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(1)  # [B]

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.diag_embed((0.5 * f).exp()).movedim(1, 0)  # [K = C, B, C]

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        rate = f.exp()
        counts = torch.arange(int(rate.max() + 10 * rate.max().sqrt()) + 20, dtype=f.dtype).view(-1, 1, 1)
        cdf = torch.special.gammaincc(counts + 1, rate)  # p(y ≤ count) [counts, B, C]
        return (uniform >= cdf).sum(0).to(f.dtype)

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return f.exp(), f.exp()  # mean and variance of y given f


F = torch.tensor([[0.3, -1.0], [2.0, 1.0], [-0.5, 0.0]], dtype=torch.float64)
Y = torch.tensor([[1.0, 0.0], [9.0, 2.0], [0.0, 4.0]], dtype=torch.float64)


def test_it_is_a_likelihood() -> None:
    own = Poisson()
    assert resolve(own) is own
    own.check(F, Y)


def test_log_likelihood_is_summed_over_the_batch() -> None:
    expected = torch.distributions.Poisson(F.exp()).log_prob(Y).sum()
    torch.testing.assert_close(Poisson().log_likelihood(F, Y), expected)


def test_the_residual_comes_by_differentiation() -> None:
    torch.testing.assert_close(Poisson().residual(F, Y), Y - F.exp())
    with torch.no_grad():
        torch.testing.assert_close(Poisson().residual(F, Y), Y - F.exp())
    with torch.inference_mode():
        torch.testing.assert_close(Poisson().residual(F.clone(), Y.clone()), Y - F.exp())


def test_the_residual_of_half_precision_outputs_is_float32() -> None:
    half = F.bfloat16()
    torch.testing.assert_close(Poisson().residual(half, Y.float()), Y.float() - half.float().exp())


def test_its_fisher_is_its_negative_hessian() -> None:
    S = Poisson().fisher_root(F)
    Λ = torch.einsum("kbi,kbj->bij", S, S)
    for n in range(len(F)):
        hessian = torch.func.jacrev(torch.func.jacrev(Poisson().log_likelihood))(F[n : n + 1], Y[n : n + 1]).view(2, 2)
        torch.testing.assert_close(Λ[n], -hessian)


def test_its_samples_have_its_moments() -> None:
    N = 20_000
    u = ((torch.arange(N, dtype=torch.float64) + 0.5) / N).unsqueeze(1).expand(N, 2)
    y = Poisson().sample(F[1].expand(N, 2), u)
    mean, variance = Poisson().conditional(F[1])
    torch.testing.assert_close(y.mean(0), mean, rtol=1e-3, atol=0)
    torch.testing.assert_close(y.var(0), variance, rtol=1e-2, atol=0)


def test_its_integral_comes_by_monte_carlo() -> None:
    v = torch.full_like(F, 0.2)
    out = Poisson().integrate(F, v, samples=200_000, generator=torch.Generator().manual_seed(0))
    mean = (F + 0.1).exp()  # the mean of a log-normal rate
    assert type(out) is Predictive
    torch.testing.assert_close(out.mean, mean, rtol=0.01, atol=0)
    torch.testing.assert_close(out.aleatoric, mean, rtol=0.01, atol=0)
    epistemic = mean.square() * (torch.tensor(0.2, dtype=torch.float64).exp() - 1)
    torch.testing.assert_close(out.epistemic, epistemic, rtol=0.03, atol=0)


def test_the_default_check_wants_one_target_per_example() -> None:
    for wrong in (Y[:2], Y[0, 0]):
        with pytest.raises(LikelihoodError, match="Poisson needs one target per example"):
            Poisson().check(F, wrong)


class CorrelatedRoot:
    """A mixin that overrides the root of a likelihood."""

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        root = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=f.dtype)  # [K, C]
        return root.unsqueeze(1).expand(-1, len(f), -1)


class Correlated(CorrelatedRoot, Gaussian):
    pass


def test_a_root_from_a_mixin_is_not_taken_for_a_diagonal_one() -> None:
    assert Gaussian.has_diagonal_fisher
    assert not Correlated.has_diagonal_fisher
    network, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    H = fit_curvature(network, [(x, torch.zeros(5, 2).double())], Correlated(), structure="full").structure.to_dense()
    J = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (x,)))(dict(network.named_parameters()))
    J = torch.cat([j.flatten(2) for j in J.values()], dim=-1)  # [B, C, P]
    Λ = torch.tensor([[1.0, 0.5], [0.5, 1.25]], dtype=torch.float64)
    torch.testing.assert_close(H, torch.einsum("bcp,cd,bdq->pq", J, Λ, J).detach())


def test_a_noise_that_cannot_be_changed_is_not_tuned() -> None:
    class Noisy(Poisson):
        noise_std = 0.5

    torch.manual_seed(0)
    network, x = nn.Linear(3, 2).double(), torch.randn(9, 3, dtype=torch.float64)
    data = [(x, torch.randint(0, 4, (9, 2)).double())]
    tuned = [fit_laplace(network, data, likelihood).tune_prior("marglik") for likelihood in (Poisson(), Noisy())]
    torch.testing.assert_close(tuned[0].prior_precision, tuned[1].prior_precision)
