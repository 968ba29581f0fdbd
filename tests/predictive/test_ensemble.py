"""A mixture of posteriors: its moments against samples of member, weights and target; its files and checkpoints."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers.networks import made
from helpers.options import predictive_of
from helpers.oracles import jacobian
from helpers.tensors import TIGHT, real, seeded
from helpers.untouched import untouched
from lightning.pytorch.callbacks import ModelCheckpoint
from predictive_cases import Shaped, linearised_draws, network_draws
from torch import Tensor, nn
from torch.distributions import Categorical as Classes
from torch.distributions import MixtureSameFamily, Normal, StudentT
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    BNN,
    GLM,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    L2MCallback,
    LaplaceCallback,
    LaplacePosterior,
    Prediction,
    fit_laplace,
)
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.posterior.gaussian import Calibration
from lightning_bayes.predictive.ensemble import DeepEnsemble
from lightning_bayes.predictive.evaluate import evaluate

X, X_TEST = real(9, 3), 2 * real(5, 3, seed=1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])
WEIGHTS = (0.5, 0.2, 0.3)
MANY = 200_000


def net(outputs: int, seed: int) -> nn.Sequential:
    """Members differ in their weights and in their width."""
    return made(lambda: nn.Sequential(nn.Linear(3, 3 + seed), nn.Tanh(), nn.Linear(3 + seed, outputs)), seed)


def member(likelihood: Likelihood, y: Tensor, outputs: int, seed: int, **options: Any) -> LaplacePosterior:
    options = {"structure": ("full", "kron", "diag")[seed % 3], "prior_precision": 0.5 + seed, **options}
    return fit_laplace(net(outputs, seed), [(X[:4], y[:4]), (X[4:], y[4:])], likelihood, **options)


def classifiers(n: int = 3, **options: Any) -> list[LaplacePosterior]:
    return [member(Categorical(), LABELS, 3, seed, **options) for seed in range(n)]


def labellers() -> list[LaplacePosterior]:
    y = torch.stack([LABELS > 0, LABELS == 1], 1).double()
    return [member(Bernoulli(), y, 2, seed) for seed in range(3)]


def regressions() -> list[LaplacePosterior]:
    """Each with a noise of its own, as if tuned."""
    noise = [torch.tensor(σ, dtype=torch.float64) for σ in ([0.3, 1.5], [0.5, 1.0], [1.1, 0.2])]
    return [member(Gaussian(σ), real(9, 2), 2, seed) for seed, σ in enumerate(noise)]


def heavy_tailed() -> list[LaplacePosterior]:
    """The last member is a Gaussian."""
    tails = zip(regressions(), (4.0, 10.0, float("inf")), strict=True)
    return [member.with_calibration(Calibration("glm", "exact", df=df)) for member, df in tails]


def predicted_noise() -> list[LaplacePosterior]:
    return [member(HeteroscedasticGaussian(), real(9, 2), 4, seed) for seed in range(3)]


KINDS: dict[str, Callable[[], list[LaplacePosterior]]] = {
    "classes": classifiers,
    "labels": labellers,
    "regression": regressions,
    "heavy tails": heavy_tailed,
    "predicted noise": predicted_noise,
}


def conditional(posterior: LaplacePosterior, f: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the target given outputs, written out.  # [n, B, C] twice"""
    likelihood = posterior.likelihood
    if isinstance(likelihood, (Categorical, Bernoulli)):
        p = f.softmax(2) if isinstance(likelihood, Categorical) else 1 / (1 + (-f).exp())
        return p, p * (1 - p)
    if isinstance(likelihood, Gaussian):
        return f, (likelihood.noise_std**2).expand_as(f)
    return f[..., :2], f[..., 2:].exp()


def output_samples(posterior: LaplacePosterior, x: Tensor, n: int, seed: int) -> Tensor:
    """Of the linearised network, from `N(f, J P⁻¹ Jᵀ)` by a Cholesky root.  # [n, B, C]"""
    J = jacobian(posterior.network, x)
    Σ = J @ torch.linalg.inv(posterior.precision.to_dense()) @ J.mT
    f = posterior.network.eval()(x).detach()
    root = torch.linalg.cholesky(Σ + 1e-12 * torch.eye(f.shape[1]).double())
    return f + torch.einsum("bij,nbj->nbi", root, real(n, *f.shape, seed=seed))


def brute_force(members: list[LaplacePosterior]) -> tuple[Tensor, Tensor]:
    """`E[y | f]` and `Var[y | f]` for a member drawn by its weight, then outputs drawn from it.  # [n, B, C] twice"""
    chosen = torch.multinomial(torch.tensor(WEIGHTS).double(), MANY, replacement=True, generator=seeded(8))
    counts = chosen.bincount(minlength=len(members)).tolist()
    found = [
        conditional(posterior, output_samples(posterior, X_TEST, n, 20 + number))
        for number, (posterior, n) in enumerate(zip(members, counts, strict=True))
    ]
    return torch.cat([m for m, _ in found]), torch.cat([v for _, v in found])


def centre(prediction: Prediction) -> Tensor:
    return prediction.mean if prediction.probs is None else prediction.probs


@pytest.mark.parametrize("kind", KINDS)
def test_the_mixture_has_the_moments_of_members_and_outputs_drawn_at_random(kind: str) -> None:
    members = KINDS[kind]()
    means, variances = brute_force(members)
    found = DeepEnsemble(members, WEIGHTS).predict(X_TEST, GLM(link="mc", samples=MANY // 2), generator=seeded(5))
    spread = (means - means.mean(0)).square()
    for name, value, draws in (
        ("mean", centre(found), means),
        ("epistemic", found.epistemic, spread),
        ("aleatoric", found.aleatoric, variances),
        ("total", found.epistemic + found.aleatoric, spread + variances),
    ):
        error = 5 * 2**0.5 * draws.std(0) / MANY**0.5 + 1e-9
        assert ((value - draws.mean(0)).abs() < error).all(), name
    between = torch.stack([centre(m) for m in DeepEnsemble(members).predict_each(X_TEST, "map")]).var(0)
    assert (between.flatten() > 25 * (spread.std(0) / MANY**0.5).flatten()).any()  # a lost term would be seen


@pytest.mark.parametrize("kind", KINDS)
def test_targets_drawn_from_the_mixture_have_its_variance(kind: str) -> None:
    """A member, its outputs, then the target itself."""
    members = KINDS[kind]()
    means, variances = brute_force(members)
    noise = real(*means.shape, seed=40)
    y = means + variances.sqrt() * noise
    if kind in ("classes", "labels"):
        y = (torch.special.ndtr(noise) < means).double()
    found = DeepEnsemble(members, WEIGHTS).predict(X_TEST, GLM(link="mc", samples=MANY // 2), generator=seeded(5))
    squares = (y - y.mean(0)).square()
    total = found.epistemic + found.aleatoric
    assert ((total - squares.mean(0)).abs() < 5 * 2**0.5 * squares.std(0) / MANY**0.5).all()
    if kind in ("regression", "predicted noise"):
        torch.testing.assert_close(found.variance, total, **TIGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_weights_of_all_members_count_alike(kind: str) -> None:
    """With equal weights the mixture of M members at S samples is the predictive of their M·S samples."""
    members, generator = KINDS[kind](), seeded(3)
    drawn = [conditional(posterior, network_draws(posterior, X_TEST, 7, generator)) for posterior in members]
    means, variances = (torch.cat(each) for each in zip(*drawn, strict=True))  # [21, B, C]
    found = DeepEnsemble(members).predict(X_TEST, BNN(samples=7), generator=seeded(3))
    torch.testing.assert_close(centre(found), means.mean(0), **TIGHT)
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0), **TIGHT)
    torch.testing.assert_close(found.aleatoric, variances.mean(0), **TIGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_map_it_is_a_plain_deep_ensemble(kind: str) -> None:
    members = KINDS[kind]()
    drawn = [conditional(posterior, posterior.network(X_TEST).detach()[None]) for posterior in members]
    means, variances = (torch.cat(each) for each in zip(*drawn, strict=True))  # [3, B, C]
    found = DeepEnsemble(members).predict(X_TEST, "map")
    torch.testing.assert_close(centre(found), means.mean(0), **TIGHT)
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0), **TIGHT)
    torch.testing.assert_close(found.aleatoric, variances.mean(0), **TIGHT)


@pytest.mark.parametrize(
    ("predictive", "link"), [("glm", "mc"), ("glm", "probit"), ("glm", "bridge"), ("bnn", None), ("map", None)]
)
@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_the_two_parts_add_up_to_the_variance_of_a_label(kind: str, predictive: str, link: str | None) -> None:
    if kind == "labels" and link == "bridge":
        link = "mc"  # the bridge is for classes
    found = DeepEnsemble(KINDS[kind](), WEIGHTS).predict(
        X_TEST, predictive_of(predictive, link=link, samples=20), generator=seeded()
    )
    torch.testing.assert_close(found.epistemic + found.aleatoric, found.probs * (1 - found.probs), **TIGHT)


@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_a_closed_form_is_averaged_over_members(link: str) -> None:
    members = classifiers()
    found = DeepEnsemble(members, WEIGHTS).predict(X_TEST, GLM(link=link))
    expected = sum(
        w * posterior.predict(X_TEST, GLM(link=link)).probs for w, posterior in zip(WEIGHTS, members, strict=True)
    )
    torch.testing.assert_close(found.probs, expected, **TIGHT)


def test_the_entropy_of_classes_is_the_mixtures_own() -> None:
    found = DeepEnsemble(classifiers(), WEIGHTS).predict(X_TEST, GLM(link="bridge"))
    torch.testing.assert_close(found.entropy, Classes(found.probs).entropy(), **TIGHT)
    labels = DeepEnsemble(labellers(), WEIGHTS).predict(X_TEST, "map")
    torch.testing.assert_close(labels.entropy, torch.distributions.Bernoulli(labels.probs).entropy(), **TIGHT)


def test_the_entropy_of_a_regression_is_the_gaussians_and_bounds_the_mixtures() -> None:
    ensemble = DeepEnsemble(regressions(), WEIGHTS)
    found = ensemble.predict(X_TEST)
    torch.testing.assert_close(found.entropy, Normal(found.mean, found.variance.sqrt()).entropy(), **TIGHT)
    mixture = exact_mixture(ensemble)
    y = torch.linspace(-30, 30, 60_001).double().view(-1, 1, 1)
    density = mixture.log_prob(y.expand(-1, 5, 2)).exp()
    own = torch.special.entr(density).sum(0) * 60 / 60_000
    assert (found.entropy > own).all()


def exact_mixture(ensemble: DeepEnsemble) -> MixtureSameFamily:
    """Over the members' Student-ts, by torch's own; a Gaussian is one of many degrees of freedom."""
    parts = [posterior.predict(X_TEST) for posterior in ensemble.posteriors]
    μ, v = torch.stack([p.mean for p in parts], -1), torch.stack([p.variance for p in parts], -1)  # [B, C, M]
    ν = torch.stack([torch.full_like(p.mean, 1e8) if p.df is None else p.df for p in parts], -1)
    weights = Classes(torch.tensor(ensemble.member_weights).double().expand_as(μ))
    return MixtureSameFamily(weights, StudentT(ν, μ, (v * (ν - 2) / ν).sqrt()))


@pytest.mark.parametrize("kind", ["regression", "heavy tails", "predicted noise"])
def test_log_prob_is_the_density_of_the_mixture(kind: str) -> None:
    ensemble = DeepEnsemble(KINDS[kind](), WEIGHTS)
    y = real(5, 2, seed=6)
    torch.testing.assert_close(ensemble.log_prob(X_TEST, y), exact_mixture(ensemble).log_prob(y), rtol=1e-6, atol=1e-6)


def test_a_mixture_has_the_mean_tails_of_its_members() -> None:
    found = DeepEnsemble(heavy_tailed(), WEIGHTS).predict(X_TEST)
    torch.testing.assert_close(1 / found.df, torch.full_like(found.mean, 0.5 / 4 + 0.2 / 10))
    assert DeepEnsemble(regressions(), WEIGHTS).predict(X_TEST).df is None


def test_a_member_without_weight_does_not_count() -> None:
    members = regressions()
    with_it, without = DeepEnsemble(members, (1, 0, 3)), DeepEnsemble(members[::2], (1, 3))
    torch.testing.assert_close(with_it.predict(X_TEST).variance, without.predict(X_TEST).variance, **TIGHT)
    y = real(5, 2, seed=6)
    torch.testing.assert_close(with_it.log_prob(X_TEST, y), without.log_prob(X_TEST, y), **TIGHT)


@pytest.mark.parametrize("generator", [True, False])
@pytest.mark.parametrize("predictive", ["glm", "bnn", "map"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_member_is_the_member_itself(kind: str, predictive: str, generator: bool) -> None:
    posterior = KINDS[kind]()[1]
    torch.manual_seed(4)
    expected = posterior.predict(
        X_TEST, predictive_of(predictive, samples=6), generator=seeded(2) if generator else None
    )
    found = DeepEnsemble([posterior]).predict(
        X_TEST, predictive_of(predictive, samples=6), generator=seeded(2) if generator else None
    )
    for name in ("epistemic", "aleatoric", "entropy", "probs", "mean", "variance"):
        if getattr(expected, name) is not None:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), **TIGHT)
    assert (found.probs is None) == (expected.probs is None)


@pytest.mark.parametrize("generator", [True, False])
def test_members_draw_independently_and_repeatably(generator: bool) -> None:
    """The same posterior twice: with shared draws both members would be one."""
    posterior = classifiers(1)[0]
    ensemble = DeepEnsemble([posterior, posterior])
    torch.manual_seed(4)
    before = torch.get_rng_state()
    first, second = ensemble.predict_each(X_TEST, BNN(samples=5), generator=seeded(1) if generator else None)
    assert (first.probs - second.probs).abs().min() > 1e-6
    assert torch.equal(torch.get_rng_state(), before)
    again = ensemble.predict_each(X_TEST, BNN(samples=5), generator=seeded(1) if generator else None)
    assert torch.equal(again[1].probs, second.probs)


def test_independent_draws_have_uncorrelated_errors() -> None:
    """The average of two members' sample means has half the variance of one."""
    posterior = classifiers(1)[0]
    ensemble, draws = DeepEnsemble([posterior, posterior]), seeded(7)
    pairs = [ensemble.predict_each(X_TEST[:1], BNN(samples=1), generator=draws) for _ in range(300)]
    p = torch.stack([torch.stack((a.probs[0, 0], b.probs[0, 0])) for a, b in pairs])  # [300, 2]
    assert p.mT.corrcoef()[0, 1].abs() < 4 / 300**0.5


def with_norm() -> LaplacePosterior:
    network = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))
    return fit_laplace(network.eval(), [(X, LABELS)], structure="diag", prior_precision=5.0)


def test_each_copy_at_a_weight_sample_has_its_own_statistics() -> None:
    """By hand: averages over batches of 4, 4 and 1, of which the last has no variance and is left out."""
    posterior = with_norm()
    with untouched(posterior.network):
        found = DeepEnsemble.from_samples(posterior, DataLoader(TensorDataset(X, LABELS), 4), 3, generator=seeded(2))
    generator, probs = seeded(2), []
    for _ in range(3):
        A, b, γ, β, W, c = (
            part.reshape(p.shape)
            for part, p in zip(
                posterior.sample(1, generator)[0].split([p.numel() for p in posterior.network.parameters()]),
                posterior.network.parameters(),
                strict=True,
            )
        )
        z = X @ A.mT + b
        mean = (z[:4].mean(0) + z[4:8].mean(0)) / 2
        variance = (z[:4].var(0) + z[4:8].var(0)) / 2
        h = torch.tanh((X_TEST @ A.mT + b - mean) / (variance + 1e-5).sqrt() * γ + β)
        probs.append((h @ W.mT + c).softmax(1))
    predicted = found.predict(X_TEST, "map")
    torch.testing.assert_close(predicted.probs, torch.stack(probs).mean(0), **TIGHT)
    torch.testing.assert_close(predicted.epistemic, torch.stack(probs).var(0, correction=0), **TIGHT)
    torch.testing.assert_close(found.predict(X_TEST).probs, predicted.probs, **TIGHT)  # the copies have no variance
    with pytest.raises(PosteriorError, match="the loader is an iterator: pass a DataLoader"):
        DeepEnsemble.from_samples(posterior, iter([(X, LABELS)]))


class TestDenseOutputs:
    def segmentation(self, side: int) -> list[LaplacePosterior]:
        x, y = real(4, 1, side, side), torch.randint(3, (4, side, side), generator=seeded())
        nets = [made(lambda: nn.Conv2d(1, 3, 3, padding=1), seed) for seed in range(2)]
        return [
            fit_laplace(n, [(x, y)], Categorical(), curvature="fisher_mc", prior_precision=3.0, structure="kron")
            for n in nets
        ]

    @pytest.mark.parametrize("side", [3, 8])  # few outputs, and so many that the linearised network is sampled
    def test_segmentation(self, side: int) -> None:
        members, x = self.segmentation(side), real(2, 1, side, side, seed=3)
        found = DeepEnsemble(members, (1, 3)).predict(x, GLM(link="mc", samples=9), generator=seeded(1))
        assert found.probs.shape == found.epistemic.shape == (2, 3, side, side)
        assert found.entropy.shape == (2, side, side)
        torch.testing.assert_close(found.epistemic + found.aleatoric, found.probs * (1 - found.probs), **TIGHT)
        if side == 8:
            draws = seeded(1)
            p = torch.stack([linearised_draws(posterior, x, 9, draws).softmax(2) for posterior in members])  # [M, S, …]
            μ = 0.25 * p[0].mean(0) + 0.75 * p[1].mean(0)
            torch.testing.assert_close(found.probs, μ, **TIGHT)
            spread = (p - μ).square().mean(1)
            torch.testing.assert_close(found.epistemic, 0.25 * spread[0] + 0.75 * spread[1], **TIGHT)

    def test_images(self) -> None:
        x, y = real(4, 1, 3, 3), real(4, 1, 3, 3, seed=1)
        nets = [made(lambda: nn.Conv2d(1, 1, 3, padding=1), seed) for seed in range(2)]
        members = [fit_laplace(n, [(x, y)], Gaussian(0.3), prior_precision=3.0, structure="full") for n in nets]
        found, each = DeepEnsemble(members).predict(x), [posterior.predict(x) for posterior in members]
        between = (each[0].mean - each[1].mean).square() / 4
        torch.testing.assert_close(found.variance, (each[0].variance + each[1].variance) / 2 + between, **TIGHT)
        assert found.entropy.shape == (4, 1, 3, 3)

    def test_one_output_without_a_dimension(self) -> None:
        nets = [Shaped(net(1, seed)) for seed in range(2)]
        members = [fit_laplace(n, [(X, real(9))], Gaussian(0.3), structure="full") for n in nets]
        found = DeepEnsemble(members).predict(X_TEST)
        assert found.mean.shape == found.variance.shape == found.entropy.shape == (5,)
        means = torch.stack([n(X_TEST).detach() for n in nets])
        torch.testing.assert_close(found.mean, means.mean(0), **TIGHT)


def test_it_is_a_value() -> None:
    members = classifiers(2)
    ensemble = DeepEnsemble(members, torch.tensor([1.0, 3.0]))
    members.clear()
    assert len(ensemble) == 2
    assert ensemble.member_weights == (0.25, 0.75)
    assert DeepEnsemble(ensemble.posteriors).member_weights == (0.5, 0.5)
    with pytest.raises(FrozenInstanceError):
        ensemble.member_weights = None  # type: ignore[misc]


def test_nothing_of_the_members_networks_is_changed() -> None:
    members = classifiers(2)
    members[0].network.train()
    weights = [p.clone() for posterior in members for p in posterior.network.parameters()]
    DeepEnsemble(members).predict(X_TEST, BNN(samples=3))
    assert members[0].network.training
    for p, before in zip([p for m in members for p in m.network.parameters()], weights, strict=True):
        assert torch.equal(p, before)
        assert p.requires_grad
        assert p.grad is None


class TestErrors:
    def test_different_ignored_labels(self) -> None:
        with pytest.raises(PosteriorError, match="one kind of likelihood"):
            DeepEnsemble([classifiers(1)[0], member(Categorical(ignore_index=7), LABELS, 3, 1)])

    @pytest.mark.parametrize("predictive", ["glm", "bnn", "map"])
    def test_different_output_sizes(self, predictive: str) -> None:
        ensemble = DeepEnsemble([classifiers(1)[0], member(Categorical(), LABELS, 4, 1)])
        with pytest.raises(PosteriorError, match=r"member 0 has shape \[5, 3\] and member 1 has shape \[5, 4\]"):
            ensemble.predict(X_TEST, predictive)

    def test_one_network_for_two_members(self) -> None:
        network = net(3, 0)
        first = fit_laplace(network, [(X, LABELS)])
        with torch.no_grad():
            network[0].bias += 1
        second = fit_laplace(network, [(X, LABELS)])
        with pytest.raises(PosteriorError, match=r"members 0 and 1 share one network, .* its own copy of the network"):
            DeepEnsemble([first, second])

    def test_two_posteriors_of_the_same_weights_are_welcome(self) -> None:
        network = net(3, 0)
        DeepEnsemble([fit_laplace(network, [(X, LABELS)], structure=s) for s in ("full", "diag")]).predict(X_TEST)

    def test_weights_that_have_changed_since(self) -> None:
        members = classifiers()
        with torch.no_grad():
            members[2].network[0].bias += 1
        with pytest.raises(PosteriorError, match="member 2: the network's weights are not those"):
            DeepEnsemble(members).predict(X_TEST)


def same_prediction(found: Prediction, expected: Prediction) -> None:
    for name in ("epistemic", "aleatoric", "entropy", "probs", "mean", "variance"):
        if getattr(expected, name) is not None:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=1e-8)


class TestFiles:
    def stored(self, members: list[LaplacePosterior], folder: Path) -> list[Path]:
        paths = [folder / f"{number}.pt" for number in range(len(members))]
        for posterior, path in zip(members, paths, strict=True):
            posterior.save(path)
        return paths

    @pytest.mark.parametrize("kind", KINDS)
    def test_load(self, tmp_path: Path, kind: str) -> None:
        members = KINDS[kind]()
        paths = self.stored(members, tmp_path)
        found = DeepEnsemble.load(paths, [posterior.network for posterior in members], member_weights=WEIGHTS)
        same_prediction(found.predict(X_TEST), DeepEnsemble(members, WEIGHTS).predict(X_TEST))

    def test_a_network_with_other_weights_is_named_at_once(self, tmp_path: Path) -> None:
        paths = self.stored(classifiers(), tmp_path)
        with pytest.raises(PosteriorError, match=r"2\.pt: the network's weights are not those"):
            DeepEnsemble.load(paths, [net(3, 0), net(3, 1), moved(net(3, 2))])

    def test_fewer_networks_than_files(self, tmp_path: Path) -> None:
        paths = self.stored(classifiers(), tmp_path)
        with pytest.raises(PosteriorError, match="there are 3 posterior files and 1 networks"):
            DeepEnsemble.load(paths, [net(3, 0)])


def moved(network: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        network[2].bias += 1
    return network


class Lit(L.LightningModule):
    """A user's classifier or regression."""

    def __init__(self, width: int = 5, regression: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.regression = regression
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss if self.regression else F.cross_entropy
        return loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.02)


class Unsaved(Lit):
    """A module that does not save its arguments."""

    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        pass


@dataclass(frozen=True)
class Own(Categorical):
    """A likelihood that no file can hold."""


def loader(n: int = 31, regression: bool = False, seed: int = 0) -> DataLoader[Any]:
    x = real(n, 3, seed=seed).float()
    y = x.sin() + 0.3 * real(n, 3, seed=seed + 100).float()
    return DataLoader(TensorDataset(x, y if regression else y.argmax(1)), batch_size=8)


def train(folder: Path, seed: int, module: L.LightningModule, *callbacks: L.Callback, **arguments: Any) -> Path:
    """The last checkpoint of a short training."""
    torch.manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    checkpoint = ModelCheckpoint(folder / str(seed), **arguments)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / str(seed),
        callbacks=[*callbacks, checkpoint],
    )
    trainer.fit(module, loader(regression=module.regression))  # type: ignore[arg-type]
    return Path(checkpoint.best_model_path)


def laplace(**arguments: Any) -> LaplaceCallback:
    return LaplaceCallback(**{"progress": False, **arguments})


X32 = X_TEST.float()


class TestCheckpoints:
    @pytest.mark.parametrize("regression", [False, True])
    def test_the_class_is_restored_with_its_arguments(self, tmp_path: Path, regression: bool) -> None:
        """And with what was tuned: the prior, and a regression's noise."""
        word = "regression" if regression else "classification"
        callbacks, paths = [laplace(likelihood=word), laplace(likelihood=word)], []
        for seed, callback in enumerate(callbacks):
            paths.append(train(tmp_path, seed, Lit(4 + seed, regression), callback))
        found = DeepEnsemble.from_checkpoints(paths, Lit, member_weights=(1, 2))
        expected = DeepEnsemble([callback.posterior for callback in callbacks], (1, 2))
        same_prediction(found.predict(X32, generator=seeded()), expected.predict(X32, generator=seeded()))
        assert all(a.network is not b.network for a, b in zip(found.posteriors, expected.posteriors, strict=True))
        if regression:
            noise = [float(posterior.likelihood.noise_std) for posterior in found.posteriors]  # type: ignore[attr-defined]
            assert noise[0] != noise[1]

    def test_posteriors_of_different_methods(self, tmp_path: Path) -> None:
        """From the optimizer's second moment, and from a pass over the data."""
        callbacks: list[Any] = [L2MCallback(prior_precision=1.0, name="mine"), laplace(name="mine")]
        paths = [train(tmp_path, seed, Lit(), callback) for seed, callback in enumerate(callbacks)]
        found = DeepEnsemble.from_checkpoints(paths, Lit, name="mine")
        expected = DeepEnsemble([callback.posterior for callback in callbacks])
        for predictive in ("glm", "bnn"):
            same_prediction(
                found.predict(X32, predictive, generator=seeded()),
                expected.predict(X32, predictive, generator=seeded()),
            )
        assert [posterior.curvature.kind for posterior in found.posteriors] == ["second_moment", "ggn"]  # type: ignore[attr-defined]

    def test_a_function_makes_modules_that_saved_no_arguments(self, tmp_path: Path) -> None:
        callbacks = [laplace(structure="diag"), laplace(structure="diag")]
        paths = [train(tmp_path, seed, Unsaved(6), callback) for seed, callback in enumerate(callbacks)]
        found = DeepEnsemble.from_checkpoints(paths, lambda: Unsaved(6))
        expected = DeepEnsemble([callback.posterior for callback in callbacks])
        same_prediction(found.predict(X32, generator=seeded()), expected.predict(X32, generator=seeded()))

    def test_a_submodule_is_the_network(self, tmp_path: Path) -> None:
        callback = laplace(network="net")
        path = train(tmp_path, 0, Lit(), callback)
        found = DeepEnsemble.from_checkpoints([path], Lit, network="net")
        assert isinstance(found.posteriors[0].network, nn.Sequential)
        same_prediction(
            found.predict(X32, "bnn", generator=seeded()), callback.posterior.predict(X32, "bnn", generator=seeded())
        )

    def test_a_name_chooses_among_several_callbacks(self, tmp_path: Path) -> None:
        pair = laplace(name="kron"), laplace(name="diag", structure="diag")
        path = train(tmp_path, 0, Lit(), *pair)
        found = DeepEnsemble.from_checkpoints([path], Lit, name="diag")
        same_prediction(found.predict(X32, generator=seeded()), pair[1].posterior.predict(X32, generator=seeded()))
        with pytest.raises(PosteriorError, match=r"several posteriors: choose one with name=.*'kron', 'diag'"):
            DeepEnsemble.from_checkpoints([path], Lit)
        with pytest.raises(PosteriorError, match=r"ckpt: .* no posterior named 'l2m'; it has 'kron', 'diag'"):
            DeepEnsemble.from_checkpoints([path], Lit, name="l2m")

    def test_the_callbacks_own_files(self, tmp_path: Path) -> None:
        callbacks, modules = [laplace(), laplace()], [Lit(), Lit()]
        for seed, (module, callback) in enumerate(zip(modules, callbacks, strict=True)):
            train(tmp_path, seed, module, callback)
        found = DeepEnsemble.load([callback.posterior_path for callback in callbacks], modules)
        expected = DeepEnsemble([callback.posterior for callback in callbacks])
        same_prediction(found.predict(X32, generator=seeded()), expected.predict(X32, generator=seeded()))

    def test_a_likelihood_of_the_users_own_is_passed_again(self, tmp_path: Path) -> None:
        callback = laplace(likelihood=Own())
        path = train(tmp_path, 0, Lit(), callback)
        with pytest.raises(PosteriorError, match=r"ckpt: .* the custom likelihood .*: pass likelihood="):
            DeepEnsemble.from_checkpoints([path], Lit)
        found = DeepEnsemble.from_checkpoints([path], Lit, likelihood=Own())
        assert isinstance(found.likelihood, Own)

    @pytest.mark.parametrize("arguments", [{"save_weights_only": True}, {"monitor": "step", "mode": "min"}])
    def test_a_checkpoint_without_a_posterior(self, tmp_path: Path, arguments: dict[str, Any]) -> None:
        path = train(tmp_path, 0, Lit(), laplace(weights="last"), **arguments)
        with pytest.raises(PosteriorError, match=r"ckpt: this checkpoint contains no posterior: .* DeepEnsemble\.load"):
            DeepEnsemble.from_checkpoints([path], Lit)

    def test_one_module_for_all(self, tmp_path: Path) -> None:
        path = train(tmp_path, 0, Lit(), laplace())
        with pytest.raises(PosteriorError, match="module= is a single Lit, but each member needs a separate one"):
            DeepEnsemble.from_checkpoints([path], Lit())  # type: ignore[arg-type]

    def test_a_function_that_gives_the_same_module_again(self, tmp_path: Path) -> None:
        paths = [train(tmp_path, seed, Unsaved(), laplace()) for seed in range(2)]
        module = Unsaved()
        with pytest.raises(PosteriorError, match="members 0 and 1 share one network"):
            DeepEnsemble.from_checkpoints(paths, lambda: module)

    def test_a_sharded_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(PosteriorError, match=r"this is a folder .* DeepEnsemble\.load"):
            DeepEnsemble.from_checkpoints([tmp_path], Lit)

    def test_no_checkpoints(self) -> None:
        with pytest.raises(PosteriorError, match="at least one posterior"):
            DeepEnsemble.from_checkpoints([], Lit)


class TestEvaluate:
    @pytest.mark.parametrize("regression", [False, True])
    def test_one_member_gets_the_numbers_of_its_callback(self, tmp_path: Path, regression: bool) -> None:
        callback = laplace(likelihood="regression" if regression else "classification", seed=3)
        module = Lit(regression=regression)
        train(tmp_path, 0, module, callback)
        data, far = loader(13, regression, seed=5), DataLoader(3 * real(7, 3, seed=9).float(), batch_size=4)
        expected = callback.evaluate(module, data, [far])
        expected = {key.removesuffix("_laplace"): v for key, v in expected.items() if key.endswith("_laplace")}
        for predictor in (callback.posterior, DeepEnsemble([callback.posterior])):
            assert evaluate(predictor, data, [far], seed=3) == pytest.approx(expected, rel=1e-6)
        assert set(expected) > {"nll", "coverage" if regression else "ece", "ood_auroc_entropy"}

    def test_the_mixtures_probabilities_are_scored(self) -> None:
        ensemble = DeepEnsemble(classifiers(), WEIGHTS)
        found = evaluate(ensemble, [(X[:4], LABELS[:4]), (X[4:], LABELS[4:])], predictive="map")
        p = ensemble.predict(X, "map").probs
        assert found["nll"] == pytest.approx(float(-p.log().gather(1, LABELS[:, None]).mean()))
        assert found["acc"] == pytest.approx(float((p.argmax(1) == LABELS).double().mean()))

    def test_a_regressions_mixture_is_scored_as_the_gaussian_with_its_moments(self) -> None:
        ensemble, y = DeepEnsemble(regressions(), WEIGHTS), real(9, 2, seed=3)
        found, prediction = evaluate(ensemble, [(X, y)]), ensemble.predict(X)
        normal = Normal(prediction.mean, prediction.variance.sqrt())
        assert found["nll"] == pytest.approx(float(-normal.log_prob(y).mean()))
        assert found["nll"] != pytest.approx(float(-ensemble.log_prob(X, y).mean()), rel=1e-4)

    def test_several_other_data_sets(self) -> None:
        ensemble = DeepEnsemble(classifiers())
        near, far = [X + 0.01], [(30 * X, LABELS)]
        found = evaluate(ensemble, [(X, LABELS)], [near, far], predictive=BNN(samples=10))
        alone = evaluate(ensemble, [(X, LABELS)], [far], predictive=BNN(samples=10))
        assert found["ood_auroc_epistemic/dataloader_idx_2"] == alone["ood_auroc_epistemic"]
        assert found["ood_auroc_epistemic/dataloader_idx_1"] == pytest.approx(0.5, abs=0.15)

    def test_a_shuffling_loader_leaves_the_global_generator_alone(self) -> None:
        data = DataLoader(TensorDataset(X, LABELS), batch_size=4, shuffle=True)
        before = torch.get_rng_state()
        evaluate(DeepEnsemble(classifiers(1)), data)
        assert torch.equal(torch.get_rng_state(), before)


def test_replacing_the_weights_of_an_ensemble() -> None:
    ensemble = DeepEnsemble(regressions())
    same_prediction(
        replace(ensemble, member_weights=WEIGHTS).predict(X_TEST),
        DeepEnsemble(ensemble.posteriors, WEIGHTS).predict(X_TEST),
    )
