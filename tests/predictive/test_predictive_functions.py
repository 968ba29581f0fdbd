"""Functions drawn from the posterior: of the network itself (BNN), and of its linearisation, for many outputs."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from helpers.autograd_functions import Cubed, Numpy
from helpers.networks import made
from helpers.oracles import jacobian
from helpers.tensors import TIGHT, real, seeded
from predictive_cases import Shaped, linearised_draws, mlp, network_draws
from torch import Tensor, nn

from lightning_bayes import BNN, GLM, Categorical, Gaussian, GaussianPosterior, LaplacePosterior, fit_laplace
from lightning_bayes.network import CurvatureError
from lightning_bayes.predictive import sample_functions
from lightning_bayes.predictive.predict import output_law

X, X_TEST = real(9, 3), real(5, 3, seed=1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])
SUBSETS: dict[str, Any] = {"all": "all", "last layer": "last_layer", "mask": torch.arange(31) % 3 == 0}


def classifier(subset: str = "all", structure: str = "full") -> LaplacePosterior:
    return fit_laplace(
        mlp(), [(X, LABELS)], Categorical(), prior_precision=2.0, structure=structure, subset=SUBSETS[subset]
    )


@pytest.mark.parametrize("subset", SUBSETS)
def test_bnn_is_the_network_at_weights_that_are_really_set(subset: str) -> None:
    posterior = classifier(subset)
    p = network_draws(posterior, X_TEST, 30, seeded(1)).softmax(2)
    found = posterior.predict(X_TEST, BNN(samples=30), generator=seeded(1))
    torch.testing.assert_close(found.probs, p.mean(0), **TIGHT)
    torch.testing.assert_close(found.epistemic, p.var(0, correction=0), **TIGHT)
    torch.testing.assert_close(found.aleatoric, (p * (1 - p)).mean(0), **TIGHT)


def test_bnn_of_a_regression() -> None:
    posterior = fit_laplace(mlp(2), [(X, real(9, 2))], Gaussian(0.3), prior_precision=2.0)
    f = network_draws(posterior, X_TEST, 30, seeded(1))
    found = posterior.predict(X_TEST, BNN(samples=30), generator=seeded(1))
    torch.testing.assert_close(found.mean, f.mean(0), **TIGHT)
    torch.testing.assert_close(found.variance, f.var(0, correction=0) + 0.09, **TIGHT)


class Net(nn.Module):
    """Parts that forward-mode differentiation must get through."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner: Any = {
            "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
            "gru": lambda: nn.GRU(3, 4, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 5, batch_first=True),
            "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "custom": lambda: nn.Linear(4, 4),
        }[kind]()
        self.lift, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("lstm", "gru"):
            return self.head(self.inner(x)[0][:, -1])
        h = self.lift(x)
        if self.kind == "attention":
            h = self.inner(h, h, h)[0]
        elif self.kind == "custom":
            h = Cubed.apply(self.inner(h))
        else:
            h = self.inner(h)
        return self.head(h.tanh().mean(1))


KINDS = ("lstm", "gru", "attention", "transformer", "weight norm", "custom")


@pytest.mark.parametrize("kind", KINDS)
def test_linearised_draws_are_the_jacobian_times_the_weight_samples(kind: str) -> None:
    network = made(lambda: Net(kind))
    x = real(9, 2, 3)
    posterior = fit_laplace(network, [(x, LABELS)], Categorical(), structure="diag")
    found = sample_functions(posterior, x[:4], 3, seeded(2))
    if kind == "custom":  # which jacrev cannot do either: one output at a time
        expected = []
        generator = seeded(2)
        for _ in range(3):
            shift = posterior.sample(1, generator)[0] - posterior.mean
            expected.append(network(x[:4]).detach() + _by_hand(network, x[:4]) @ shift)
        torch.testing.assert_close(found, torch.stack(expected), **TIGHT)
    else:
        torch.testing.assert_close(found, linearised_draws(posterior, x[:4], 3, seeded(2)), **TIGHT)


def _by_hand(network: nn.Module, x: Tensor) -> Tensor:
    """# [B, C, P]"""
    f = network(x)
    rows = [torch.autograd.grad(f_c, list(network.parameters()), retain_graph=True) for f_c in f.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).reshape(*f.shape, -1)


@pytest.mark.parametrize("kind", ["lstm", "gru", "weight norm", "transformer"])
def test_linearised_draws_in_float32(kind: str) -> None:
    """Other kernels than in float64, with the same answer."""
    x = real(9, 2, 3)
    network = made(lambda: Net(kind))
    wide = fit_laplace(network, [(x, LABELS)], Categorical(), prior_precision=5.0, structure="diag")
    J, f = jacobian(network, x), network.eval()(x).detach()
    network.float()
    narrow = fit_laplace(network, [(x.float(), LABELS)], Categorical(), prior_precision=5.0, structure="diag")
    θ = narrow.sample(1, seeded(2))[0] - narrow.mean
    found = sample_functions(narrow, x.float(), 1, seeded(2))[0]
    torch.testing.assert_close(found.double(), f + J @ θ.double(), rtol=1e-4, atol=1e-4)
    assert wide.subset.names == narrow.subset.names


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Numpy.apply(self.inner(x))


def test_a_network_that_cannot_be_sampled_linearly_says_so() -> None:
    posterior = fit_laplace(made(Opaque), [(X, LABELS)], Categorical(), structure="diag")
    with pytest.raises(CurvatureError, match=r"neither forward mode nor double backward, .* use predictive='bnn'"):
        sample_functions(posterior, X, 2)
    assert posterior.predict(X, "bnn").probs.shape == (9, 3)


@pytest.mark.parametrize("subset", SUBSETS)
def test_linearised_draws_of_a_subset(subset: str) -> None:
    posterior = classifier(subset)
    found = sample_functions(posterior, X_TEST, 4, seeded(3))
    torch.testing.assert_close(found, linearised_draws(posterior, X_TEST, 4, seeded(3)), **TIGHT)


@pytest.mark.parametrize("linearised", [True, False])
def test_a_function_does_not_depend_on_what_else_is_in_the_batch(linearised: bool) -> None:
    posterior = classifier(structure="kron")
    whole = sample_functions(posterior, X_TEST, 5, seeded(4), linearised)
    parts = [sample_functions(posterior, x, 5, seeded(4), linearised) for x in (X_TEST[:1], X_TEST[1:4], X_TEST[4:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TIGHT)
    assert (whole.std(0) > 1e-3).all()  # one weight sample per function, not one in all


def test_functions_are_smooth_in_x() -> None:
    """The same weights for every x: neighbours on a line differ by no more than the slope allows."""
    posterior = classifier(structure="kron")
    line = torch.linspace(-1, 1, 201).double()[:, None] * torch.ones(1, 3).double()
    f = sample_functions(posterior, line, 5, seeded(4))
    assert (f[:, 1:] - f[:, :-1]).abs().max() < 0.05 * (f.amax(1) - f.amin(1)).max()


def test_draws_have_the_moments_of_the_closed_form() -> None:
    posterior = classifier(structure="kron")
    n = 1000
    draws = sample_functions(posterior, X_TEST, n, seeded(5))
    mean, Σ = posterior.functional(X_TEST)
    σ = Σ.diagonal(dim1=1, dim2=2).sqrt()
    assert ((draws.mean(0) - mean).abs() < 5 * σ / n**0.5).all()
    found = torch.stack([draws[:, b].mT.cov() for b in range(5)])
    scale = σ.unsqueeze(1) * σ.unsqueeze(2)
    assert ((found - Σ).abs() < 5 * 2**0.5 * scale / n**0.5).all()


def no_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the covariance of many outputs was formed")

    monkeypatch.setattr(GaussianPosterior, "functional", refuse)
    monkeypatch.setattr(GaussianPosterior, "functional_for", refuse)
    monkeypatch.setattr("lightning_bayes.posterior.gaussian.output_gaussian", refuse)


class TestManyOutputs:
    """1,000 classes, image to image, segmentation: sampled, without a matrix of outputs by outputs."""

    def thousand(self) -> LaplacePosterior:
        network = made(lambda: nn.Linear(3, 1000))
        y = torch.tensor([0, 999, 5, 17, 400, 1, 2, 3, 4])
        return fit_laplace(
            network, [(X, y)], Categorical(), curvature="fisher_mc", prior_precision=3.0, structure="diag"
        )

    def image(self) -> LaplacePosterior:
        network = made(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1)))
        x, y = real(4, 1, 16, 16), real(4, 1, 16, 16, seed=1)
        return fit_laplace(
            network, [(x, y)], Gaussian(0.3), curvature="fisher_mc", prior_precision=3.0, structure="kron"
        )

    def segmentation(self) -> LaplacePosterior:
        network = made(lambda: nn.Conv2d(1, 3, 3, padding=1))
        x, y = real(4, 1, 8, 8), torch.randint(3, (4, 8, 8), generator=seeded())
        return fit_laplace(
            network, [(x, y)], Categorical(), curvature="fisher_mc", prior_precision=3.0, structure="kron"
        )

    def test_thousand_classes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        posterior = self.thousand()
        no_covariance(monkeypatch)
        draws = output_law(posterior, X_TEST, GLM(samples=8), seeded(6)).draws
        assert isinstance(draws, Tensor)
        p = draws.softmax(2)
        torch.testing.assert_close(draws[:4] + draws[4:], 2 * posterior.network(X_TEST).detach().expand(4, 5, 1000))
        found = posterior.predict(X_TEST, GLM(samples=8), generator=seeded(6))
        assert found.probs.shape == found.epistemic.shape == found.aleatoric.shape == (5, 1000)
        assert found.entropy.shape == found.epistemic_score.shape == (5,)
        torch.testing.assert_close(found.probs, p.mean(0), **TIGHT)
        torch.testing.assert_close(found.epistemic, p.var(0, correction=0), **TIGHT)
        torch.testing.assert_close(found.epistemic + found.aleatoric, found.probs * (1 - found.probs), **TIGHT)

    @pytest.mark.parametrize("link", ["probit", "bridge"])
    def test_a_link_that_is_asked_for_is_used(self, monkeypatch: pytest.MonkeyPatch, link: str) -> None:
        """With the exact mean and the draws' variances of the outputs."""
        posterior = self.thousand()
        draws = linearised_draws(posterior, X_TEST, 8, seeded(6))
        f = posterior.network(X_TEST).detach()
        expected = Categorical().integrate(f, (draws - f).square().mean(0), link, samples=0)
        no_covariance(monkeypatch)
        found = posterior.predict(X_TEST, GLM(link=link, samples=8), generator=seeded(6))
        torch.testing.assert_close(found.probs, expected.probs, **TIGHT)
        assert found.epistemic.isfinite().all()

    def test_image_to_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mean is exactly the network's, and only the variance is sampled."""
        posterior = self.image()
        x = real(2, 1, 16, 16, seed=2)
        draws = linearised_draws(posterior, x, 8, seeded(6))
        no_covariance(monkeypatch)
        found = posterior.predict(x, GLM(samples=8), generator=seeded(6))
        f = posterior.network(x).detach()
        torch.testing.assert_close(found.mean, f, **TIGHT)
        torch.testing.assert_close(found.epistemic, (draws - f).square().mean(0), **TIGHT)
        torch.testing.assert_close(found.variance, found.epistemic + 0.09, **TIGHT)
        assert found.entropy.shape == (2, 1, 16, 16)
        assert found.entropy_score.shape == (2,)

    def test_segmentation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        posterior = self.segmentation()
        x = real(2, 1, 8, 8, seed=2)
        p = linearised_draws(posterior, x, 8, seeded(6)).softmax(2)
        no_covariance(monkeypatch)
        found = posterior.predict(x, GLM(samples=8), generator=seeded(6))
        torch.testing.assert_close(found.probs, p.mean(0), **TIGHT)
        torch.testing.assert_close(found.epistemic, p.var(0, correction=0), **TIGHT)
        assert found.entropy.shape == (2, 8, 8)

    def test_sampled_variances_agree_with_the_closed_form(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A case that fits both, sent down each way."""
        posterior = fit_laplace(
            Shaped(mlp(12), 3, 4), [(X, real(9, 3, 4))], Gaussian(0.3), prior_precision=2.0, structure="kron"
        )
        exact = posterior.predict(X_TEST)
        monkeypatch.setattr(import_module("lightning_bayes.predictive.predict"), "MANY", 3)
        n = 1000
        sampled = posterior.predict(X_TEST, GLM(samples=n), generator=seeded(7))
        torch.testing.assert_close(sampled.mean, exact.mean, **TIGHT)
        error = 5 * (2 / n) ** 0.5 * exact.epistemic
        assert ((sampled.epistemic - exact.epistemic).abs() < error).all()


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.jit.script], ids=["data parallel", "scripted"])
def test_a_wrapped_network_has_the_functions_of_the_plain_one(wrap: Any) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 2, (7,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        wrapped = wrap(network)
    draws = [
        sample_functions(fit_laplace(f, [(x, y)], structure="diag"), x, 3, torch.Generator().manual_seed(1), False)
        for f in (network, wrapped)
    ]
    torch.testing.assert_close(draws[0], draws[1])
