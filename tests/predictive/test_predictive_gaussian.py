"""The linearised predictive: closed forms, and integrals over `N(f, Σ)` held against many samples of it."""

import math

import pytest
import torch
from helpers.networks import made
from helpers.options import predictive_of
from helpers.oracles import jacobian
from helpers.tensors import TIGHT, real, seeded
from predictive_cases import Shaped, mlp
from torch import Tensor, nn

from lightning_bayes import (
    BNN,
    GLM,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LaplacePosterior,
    fit_laplace,
)
from lightning_bayes.likelihoods import Likelihood

X, X_TEST = real(9, 3), 2 * real(5, 3, seed=1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])
MANY = 200_000


def fitted(likelihood: Likelihood, y: Tensor, network: nn.Module | None = None, **options: object) -> LaplacePosterior:
    options = {"structure": "full", "prior_precision": 0.5, **options}
    return fit_laplace(network or mlp(), [(X[:4], y[:4]), (X[4:], y[4:])], likelihood, **options)


def output_samples(posterior: LaplacePosterior, x: Tensor, n: int = MANY) -> Tensor:
    """From `N(f, Σ)` of each example, by a Cholesky root.  # [n, B, outputs]"""
    J = jacobian(posterior.network, x)
    Σ = J @ torch.linalg.inv(posterior.precision.to_dense()) @ J.mT
    f = posterior.network.eval()(x).detach().flatten(1)
    root = torch.linalg.cholesky(Σ + 1e-12 * torch.eye(f.shape[1]).double())
    return f + torch.einsum("bij,nbj->nbi", root, real(n, *f.shape, seed=2))


def test_regression_is_closed_form() -> None:
    """Mean f, variance `diag J P⁻¹ Jᵀ + σ²`, entropy ½ log 2πe·variance."""
    σ = torch.tensor([0.3, 1.5], dtype=torch.float64)
    posterior = fitted(Gaussian(σ), real(9, 2), mlp(2))
    found = posterior.predict(X_TEST)
    J = jacobian(posterior.network, X_TEST)
    epistemic = (J @ torch.linalg.inv(posterior.precision.to_dense()) @ J.mT).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found.mean, posterior.network(X_TEST).detach(), **TIGHT)
    torch.testing.assert_close(found.epistemic, epistemic, **TIGHT)
    torch.testing.assert_close(found.aleatoric, (σ**2).expand(5, 2), **TIGHT)
    torch.testing.assert_close(found.variance, epistemic + σ**2, **TIGHT)
    torch.testing.assert_close(found.entropy, 0.5 * torch.log(2 * math.pi * math.e * found.variance), **TIGHT)
    assert found.probs is None


def test_regression_with_one_output_without_a_dimension() -> None:
    network = nn.Sequential(mlp(1), nn.Flatten(0))
    posterior = fitted(Gaussian(0.4), real(9), network)
    found = posterior.predict(X_TEST)
    J = jacobian(network, X_TEST)
    epistemic = (J @ torch.linalg.inv(posterior.precision.to_dense()) @ J.mT).flatten()
    assert found.mean.shape == found.entropy.shape == (5,)
    torch.testing.assert_close(found.variance, epistemic + 0.16, **TIGHT)


def test_predicted_noise_is_closed_form() -> None:
    """`Var[y] = Σ_mm + exp(s + ½ Σ_ss)`, which samples of (m, s) give too."""
    posterior = fitted(HeteroscedasticGaussian(), real(9, 1), mlp(2))
    found = posterior.predict(X_TEST)
    m, s = output_samples(posterior, X_TEST).unbind(2)
    torch.testing.assert_close(found.mean.squeeze(1), m.mean(0), rtol=0, atol=5 * float(m.std(0).max()) / MANY**0.5)
    spread = m.var(0) + s.exp().mean(0)
    error = (m.var(0) * 2**0.5 + s.exp().std(0)) / MANY**0.5
    assert ((found.variance.squeeze(1) - spread).abs() < 5 * error).all()


@pytest.mark.parametrize("link", ["probit", "bridge", "mc"])
def test_regression_takes_any_link_and_draws_nothing(link: str) -> None:
    posterior = fitted(Gaussian(0.4), real(9, 2), mlp(2))
    assert torch.equal(posterior.predict(X_TEST, GLM(link=link)).variance, posterior.predict(X_TEST).variance)


def test_monte_carlo_agrees_with_many_samples_of_the_outputs() -> None:
    posterior = fitted(Categorical(), LABELS)
    p = output_samples(posterior, X_TEST).softmax(2)
    found = posterior.predict(X_TEST, GLM(link="mc", samples=MANY), generator=seeded(5))
    error = 5 * 2**0.5 * p.std(0) / MANY**0.5
    assert ((found.probs - p.mean(0)).abs() < error).all()
    assert ((found.epistemic - p.var(0)).abs() < 5 * 2**0.5 * (p - p.mean(0)).square().std(0) / MANY**0.5).all()
    spread = p * (1 - p)
    assert ((found.aleatoric - spread.mean(0)).abs() < 5 * 2**0.5 * spread.std(0) / MANY**0.5).all()
    torch.testing.assert_close(found.entropy, torch.distributions.Categorical(found.probs).entropy(), **TIGHT)


def test_probit_is_the_formula_and_near_the_integral() -> None:
    """`softmax(f / √(1 + π/8 diag Σ))`; for one logit it is within 0.02 of the integral."""
    posterior = fitted(Categorical(), LABELS)
    f, Σ = posterior.functional(X_TEST)
    expected = (f / (1 + math.pi / 8 * Σ.diagonal(dim1=1, dim2=2)).sqrt()).softmax(1)
    torch.testing.assert_close(posterior.predict(X_TEST, GLM(link="probit")).probs, expected, **TIGHT)
    binary = fitted(Bernoulli(), (LABELS > 0).double()[:, None], mlp(1))
    p = output_samples(binary, X_TEST).sigmoid().mean(0)
    assert (binary.predict(X_TEST).probs - p).abs().max() < 0.02


def test_bridge_is_the_dirichlet_of_the_projected_gaussian() -> None:
    """`α_k = (1 − 2/C + e^{m_k} Σ e^{−m_l} / C²) / Σ_kk` after conditioning on `Σ f = 0` (Hobbhahn et al. 2022)."""
    posterior = fitted(Categorical(), LABELS)
    f, Σ = posterior.functional(X_TEST)
    found = posterior.predict(X_TEST, GLM(link="bridge"))
    for n in range(len(f)):
        row, total = Σ[n].sum(1), Σ[n].sum()
        m = f[n] - row * f[n].sum() / total
        v = (Σ[n] - torch.outer(row, row) / total).diagonal()
        α = (1 - 2 / 3 + m.exp() * (-m).exp().sum() / 9) / v
        dirichlet = torch.distributions.Dirichlet(α)
        torch.testing.assert_close(found.probs[n], dirichlet.mean, **TIGHT)
        torch.testing.assert_close(found.epistemic[n], dirichlet.variance, **TIGHT)


def test_bridge_is_near_the_integral_where_no_class_is_special() -> None:
    """At zero weights all classes are alike: the mean is exact, and the variance too for a narrow posterior."""
    network = nn.Linear(3, 3).double()
    for p in network.parameters():
        nn.init.zeros_(p)
    y = torch.tensor([0, 1, 2] * 3)
    for δ, tolerance in ((300.0, 0.03), (3.0, 0.3)):
        posterior = fitted(Categorical(), y, network, prior_precision=δ)
        p = output_samples(posterior, X_TEST).softmax(2)
        found = posterior.predict(X_TEST, GLM(link="bridge"))
        torch.testing.assert_close(found.probs, torch.full((5, 3), 1 / 3).double())
        torch.testing.assert_close(found.epistemic, p.var(0), rtol=tolerance, atol=0)


@pytest.mark.parametrize("predictive", ["glm", "bnn"])
@pytest.mark.parametrize("link", ["probit", "pairwise", "bridge", "mc"])
def test_epistemic_and_aleatoric_add_up(link: str, predictive: str) -> None:
    """`diag Cov[p] + E[p(1 − p)] = p(1 − p)` (Kwon et al. 2020), to rounding."""
    found = fitted(Categorical(), LABELS).predict(
        X_TEST, predictive_of(predictive, link=link, samples=50), generator=seeded()
    )
    torch.testing.assert_close(found.epistemic + found.aleatoric, found.probs * (1 - found.probs), **TIGHT)
    assert (found.epistemic > 0).all()


def test_labels_add_up_too() -> None:
    y = torch.stack([LABELS > 0, LABELS > 1], 1).double()
    found = fitted(Bernoulli(), y, mlp(2)).predict(X_TEST, GLM(link="mc", samples=50), generator=seeded())
    torch.testing.assert_close(found.epistemic + found.aleatoric, found.probs * (1 - found.probs), **TIGHT)
    torch.testing.assert_close(found.entropy, torch.distributions.Bernoulli(found.probs).entropy(), **TIGHT)


def test_the_decomposition_of_probit_is_that_of_output_samples() -> None:
    posterior = fitted(Categorical(), LABELS)
    probit = posterior.predict(X_TEST, GLM(samples=1000))
    sampled = posterior.predict(X_TEST, GLM(link="mc", samples=100_000), generator=seeded(3))
    variances = [prediction.probs * (1 - prediction.probs) for prediction in (probit, sampled)]
    near = {"rtol": 0.02, "atol": 0}
    torch.testing.assert_close(probit.epistemic / variances[0], sampled.epistemic / variances[1], **near)
    torch.testing.assert_close(probit.aleatoric / variances[0], sampled.aleatoric / variances[1], **near)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_binary_on_a_bare_dimension_equals_that_on_one_output(link: str) -> None:
    body = mlp(1)
    y = (LABELS > 0).double()
    bare = fitted(Bernoulli(), y, nn.Sequential(body, nn.Flatten(0)))
    column = fitted(Bernoulli(), y[:, None], body)
    one, two = (p.predict(X_TEST, GLM(link=link), generator=seeded()) for p in (bare, column))
    assert one.probs.shape == one.entropy.shape == (5,)
    torch.testing.assert_close(one.probs, two.probs.squeeze(1), **TIGHT)
    torch.testing.assert_close(one.epistemic, two.epistemic.squeeze(1), **TIGHT)


class TestDenseOutputs:
    """`[B, 3, 2, 2]`: three classes at every pixel, few enough for their covariances."""

    def posterior(self) -> LaplacePosterior:
        y = torch.randint(3, (9, 2, 2), generator=seeded())
        return fitted(Categorical(), y, Shaped(mlp(12), 3, 2, 2))

    def pixels(self, posterior: LaplacePosterior) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the three logits of each pixel, picked one by one.  # [B, 4, 3], [B, 4, 3, 3]"""
        f, Σ = posterior.functional(X_TEST)
        Σ = Σ.reshape(5, 3, 4, 3, 4)
        mean = torch.stack([f.flatten(2)[:, :, r] for r in range(4)], 1)
        return mean, torch.stack([Σ[:, :, r, :, r] for r in range(4)], 1)

    @pytest.mark.parametrize("link", ["probit", "bridge"])
    def test_each_pixel_is_a_prediction_of_its_own(self, link: str) -> None:
        posterior = self.posterior()
        mean, Σ = self.pixels(posterior)
        found = posterior.predict(X_TEST, GLM(link=link))
        assert found.probs.shape == found.epistemic.shape == (5, 3, 2, 2)
        assert found.entropy.shape == (5, 2, 2)
        for r in range(4):
            alone = Categorical().integrate(mean[:, r], Σ[:, r], link)
            torch.testing.assert_close(found.probs.flatten(2)[:, :, r], alone.probs, **TIGHT)
            if link == "bridge":
                torch.testing.assert_close(found.epistemic.flatten(2)[:, :, r], alone.epistemic, **TIGHT)

    @pytest.mark.parametrize("link", ["probit", "mc"])
    def test_epistemic_variance_knows_the_correlations_of_the_classes(self, link: str) -> None:
        """A common shift of a pixel's logits changes nothing, and must not pass for uncertainty."""
        posterior = self.posterior()
        n = 20_000
        p = output_samples(posterior, X_TEST, n).reshape(n, 5, 3, 2, 2).softmax(2)
        found = posterior.predict(X_TEST, GLM(link=link, samples=n), generator=seeded(4))
        m = p.mean(0)
        whole, share = m * (1 - m), p.var(0) / (m * (1 - m))
        errors = [5 * 2**0.5 * t.std(0) / n**0.5 for t in ((p - m).square(), p)]
        error = (errors[0] + share * (1 - 2 * m).abs() * errors[1]) / whole
        assert ((found.epistemic / (found.probs * (1 - found.probs)) - share).abs() < error).all()

    def test_regression(self) -> None:
        σ = torch.tensor([0.2, 0.9], dtype=torch.float64)
        posterior = fitted(Gaussian(σ), real(9, 2, 3), Shaped(mlp(6), 2, 3))
        found = posterior.predict(X_TEST)
        Σ = posterior.functional(X_TEST)[1]
        torch.testing.assert_close(found.mean, posterior.network(X_TEST).detach(), **TIGHT)
        torch.testing.assert_close(found.epistemic, Σ.diagonal(dim1=1, dim2=2).reshape(5, 2, 3), **TIGHT)
        torch.testing.assert_close(found.aleatoric, (σ**2)[None, :, None].expand(5, 2, 3), **TIGHT)

    def test_predicted_noise(self) -> None:
        posterior = fitted(HeteroscedasticGaussian(), real(9, 1, 3), Shaped(mlp(6), 2, 3))
        found = posterior.predict(X_TEST)
        f, Σ = posterior.functional(X_TEST)
        v = Σ.diagonal(dim1=1, dim2=2).reshape(5, 2, 3)
        torch.testing.assert_close(found.variance, v[:, :1] + (f[:, 1:] + v[:, 1:] / 2).exp(), **TIGHT)


def test_own_likelihood_on_dense_outputs_gets_draws_of_whole_examples() -> None:
    """It may read an example's outputs as it likes: the mean of the sum over positions is the sum of the means."""
    posterior = fitted(Gaussian(0.3), real(9, 2, 3), Shaped(mlp(6), 2, 3))

    class Total(Gaussian):
        links = ("mc",)

        def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
            return f.flatten(1).sum(1), torch.zeros(len(f)).double()

    from dataclasses import replace

    n = 50_000
    found = replace(posterior, likelihood=Total(0.3)).predict(X_TEST, GLM(samples=n), generator=seeded())
    f, Σ = posterior.functional(X_TEST)
    variance = Σ.sum((1, 2))
    assert ((found.mean - f.flatten(1).sum(1)).abs() < 5 * (variance / n).sqrt()).all()
    assert ((found.epistemic - variance).abs() < 5 * variance * (2 / n) ** 0.5).all()


def test_map_has_no_epistemic_part() -> None:
    posterior = fitted(Categorical(), LABELS)
    found = posterior.predict(X_TEST, "map")
    p = posterior.network(X_TEST).detach().softmax(1)
    torch.testing.assert_close(found.probs, p, **TIGHT)
    torch.testing.assert_close(found.aleatoric, p * (1 - p), **TIGHT)
    assert not found.epistemic.any()
    regression = fitted(Gaussian(0.4), real(9, 2), mlp(2)).predict(X_TEST, "map")
    assert not regression.epistemic.any()
    torch.testing.assert_close(regression.variance, torch.full((5, 2), 0.16).double(), rtol=1e-7, atol=0)


def test_a_sharp_posterior_predicts_as_map_does() -> None:
    """The limit δ → ∞."""
    posterior = fitted(Categorical(), LABELS).with_prior(1e12)
    expected = posterior.predict(X_TEST, "map").probs
    for predictive, link in (("glm", "probit"), ("glm", "mc"), ("bnn", None)):
        torch.testing.assert_close(
            posterior.predict(X_TEST, predictive_of(predictive, link=link)).probs, expected, rtol=0, atol=1e-4
        )


def test_linear_networks_have_one_predictive() -> None:
    """Without a nonlinearity the network is its own linearisation: GLM and BNN agree draw by draw."""
    posterior = fitted(Categorical(), LABELS, made(lambda: nn.Linear(3, 3)))
    one = posterior.predict(X_TEST, BNN(samples=400), generator=seeded())
    many = posterior.predict(X_TEST, GLM(link="mc", samples=MANY), generator=seeded())
    assert (one.probs - many.probs).abs().max() < 5 * 0.5 / 400**0.5
