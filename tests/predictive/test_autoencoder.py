"""Moments in latent and output space against networks whose weights are really replaced, one by one."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import FrozenInstanceError
from typing import Any

import lightning as L
import pytest
import torch
from helpers.networks import made
from helpers.tensors import TIGHT, real, seeded
from helpers.untouched import assert_same, snapshot
from predictive_cases import positions
from torch import Tensor, nn

from lightning_bayes import Gaussian, LaplacePosterior, fit_laplace
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.predictive.draws import Reconstruction, decode

X, X_TEST = real(9, 5), real(4, 5, seed=1)
S = 7


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class LitAutoencoder(L.LightningModule):
    """The two parts on a LightningModule, with convolutions, and a `forward` that does something else besides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten())
        self.decoder = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.decoder(self.encoder(x))


class Tied(nn.Module):
    """The decoder's weights are the encoder's, transposed, and the same parameter under a second name."""

    class Back(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, z: Tensor) -> Tensor:
            return z @ self.weight

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 2)
        self.decoder = self.Back(self.encoder.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())


def fitted(make: Callable[[], nn.Module] = Autoencoder, structure: str = "diag", subset: Any = "all") -> Any:
    network = made(make)
    return fit_laplace(
        network,
        [(X[:4], X[:4]), (X[4:], X[4:])],
        Gaussian(0.5),
        prior_precision=2.0,
        structure=structure,
        subset=subset,
    )


def brute_force(posterior: LaplacePosterior, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Latent and output samples of networks whose weights are written.  # [n, B, K], [n, B, D]"""
    generator, latent, output = seeded(), [], []
    for _ in range(n):
        network: Any = copy.deepcopy(posterior.network).eval()
        flat = torch.cat([p.detach().flatten() for p in network.parameters()])
        flat[positions(posterior)] = posterior.sample(1, generator)[0]
        with torch.no_grad():
            for p, part in zip(
                network.parameters(), flat.split([p.numel() for p in network.parameters()]), strict=True
            ):
                p.copy_(part.reshape(p.shape))
            latent.append(network.encoder(x))
            output.append(network.decoder(latent[-1]))
    return torch.stack(latent), torch.stack(output)


def assert_moments(mean: Tensor, variance: Tensor, draws: Tensor) -> None:
    torch.testing.assert_close(mean, draws.mean(0), **TIGHT)
    torch.testing.assert_close(variance, draws.var(0, correction=0), **TIGHT)


CASES: dict[str, Callable[[], Any]] = {
    "diag": fitted,
    "kron": lambda: fitted(structure="kron"),
    "full": lambda: fitted(structure="full"),
    "decoder alone": lambda: fitted(structure="kron", subset=["decoder"]),
    "encoder alone": lambda: fitted(structure="full", subset=["encoder"]),
    "subnetwork": lambda: fitted(structure="full", subset=torch.tensor([0, 3, 21, 25, 33, 40])),
    "a LightningModule": lambda: fitted(LitAutoencoder),
    "tied weights": lambda: fitted(Tied),
}


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_sampled_networks(case: str) -> None:
    posterior = CASES[case]()
    found = posterior.reconstruct(X_TEST, samples=S, generator=seeded())
    latent, output = brute_force(posterior, X_TEST, S)
    assert output.var(0).min() > 0
    assert_moments(found.latent_mean, found.latent_variance, latent)
    assert_moments(found.mean, found.variance, output)


@pytest.mark.parametrize("case", CASES)
def test_encode_has_the_same_latent_space(case: str) -> None:
    posterior = CASES[case]()
    found = posterior.encode(X_TEST, samples=S, generator=seeded())
    assert_moments(found.latent_mean, found.latent_variance, brute_force(posterior, X_TEST, S)[0])
    assert found.mean is None
    assert found.variance is None


def test_decode_starts_from_given_latent_points() -> None:
    posterior, z = fitted(), real(3, 2, seed=5)
    found = decode(posterior, z, samples=S, generator=seeded(), keep_samples=True)
    generator, draws = seeded(), []
    for _ in range(S):
        network = copy.deepcopy(posterior.network).eval()
        nn.utils.vector_to_parameters(posterior.sample(1, generator)[0], network.parameters())
        draws.append(network.decoder(z).detach())
    assert_moments(found.mean, found.variance, torch.stack(draws))
    torch.testing.assert_close(found.samples, torch.stack(draws), **TIGHT)
    assert found.latent_mean is None


def test_samples_are_kept_on_request() -> None:
    posterior = fitted(structure="kron")
    latent, output = brute_force(posterior, X_TEST, S)
    found = posterior.reconstruct(X_TEST, S, seeded(), keep_samples=True)
    torch.testing.assert_close(found.latent_samples, latent, **TIGHT)
    torch.testing.assert_close(found.samples, output, **TIGHT)
    torch.testing.assert_close(posterior.encode(X_TEST, S, seeded(), True).latent_samples, latent, **TIGHT)
    without = posterior.reconstruct(X_TEST, S, seeded())
    assert without.samples is None
    assert without.latent_samples is None


def test_without_weights_of_the_encoder_the_latent_variance_is_zero() -> None:
    posterior = fitted(subset=["decoder"])
    found = posterior.reconstruct(X_TEST, S)
    torch.testing.assert_close(found.latent_mean, posterior.network.eval().encoder(X_TEST).detach(), **TIGHT)
    assert torch.equal(found.latent_variance, torch.zeros(4, 2).double())
    assert found.variance.min() > 0


def test_the_error_of_a_sample_is_that_of_the_mean_plus_the_variance() -> None:
    """Averaged over the samples: what Laplacian autoencoders report as their log-likelihood."""
    found = fitted().reconstruct(X_TEST, S, seeded(), keep_samples=True)
    each = (X_TEST - found.samples).square().mean(0)
    torch.testing.assert_close((X_TEST - found.mean).square() + found.variance, each, **TIGHT)


def test_the_variance_keeps_its_digits_on_a_large_mean() -> None:
    """Where `E f² − (E f)²` would lose all of them."""
    posterior = fitted(subset=["decoder"])
    shifted = copy.deepcopy(posterior.network)
    with torch.no_grad():
        shifted.decoder[2].bias.add_(1e6)
    again = fit_laplace(shifted, [(X, X)], Gaussian(0.5), prior_precision=2.0, structure="diag", subset=["decoder"])
    found, expected = (p.reconstruct(X_TEST, 50, seeded()).variance for p in (again, posterior))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_batches_share_their_networks() -> None:
    posterior = fitted()
    whole = posterior.reconstruct(X_TEST, S, seeded())
    parts = [posterior.reconstruct(part, S, seeded()) for part in X_TEST.split([1, 3])]
    for name in ("mean", "variance", "latent_mean", "latent_variance"):
        torch.testing.assert_close(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name), **TIGHT)


def test_one_sample_has_no_variance() -> None:
    found = fitted().reconstruct(X_TEST, samples=1)
    assert torch.equal(found.variance, torch.zeros(4, 5).double())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("breaks", [True, False])
def test_nothing_is_left_behind(breaks: bool, training: bool) -> None:
    posterior = fitted()
    network = posterior.network.train(training)
    network.decoder[0].weight.requires_grad_(False)
    network.encoder[0].weight.grad = torch.ones_like(network.encoder[0].weight)
    x = X_TEST[:, :3] if breaks else X_TEST
    before = snapshot(network)
    for use in (posterior.encode, posterior.reconstruct):
        with pytest.raises(RuntimeError, match="shapes") if breaks else nullcontext():
            use(x, S)
        assert_same(snapshot(network), before)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_every_mode_of_autograd_gives_the_same(mode: Callable[[], Any]) -> None:
    posterior = fitted()
    expected = posterior.reconstruct(X_TEST, S, seeded())
    with mode():
        found = posterior.reconstruct(X_TEST.clone(), S, seeded())
    torch.testing.assert_close(found.variance, expected.variance, **TIGHT)
    assert not found.mean.requires_grad
    assert not found.mean.is_inference()


def test_half_precision_is_summed_in_float32() -> None:
    network, x = made(Autoencoder).bfloat16(), X.bfloat16()
    posterior = fit_laplace(network, [(x, x)], Gaussian(0.5), structure="diag")
    found = posterior.reconstruct(x, S, seeded(), keep_samples=True)
    assert found.samples.dtype == torch.bfloat16
    draws = found.samples.float()
    torch.testing.assert_close(found.mean, draws.mean(0))
    torch.testing.assert_close(found.variance, draws.var(0, correction=0))


def test_an_encoder_with_two_outputs_is_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 2), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    class Variational(Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.encoder: nn.Module = Two()

        def forward(self, x: Tensor) -> Tensor:
            mean, log_variance = self.encoder(x)
            return self.decoder(mean + log_variance)

    with pytest.raises(PosteriorError, match="the encoder must return one tensor, but it returned a tuple"):
        fitted(Variational).encode(X_TEST)


def test_other_weights_are_refused() -> None:
    posterior = fitted()
    with torch.no_grad():
        posterior.network.decoder[0].weight.add_(1)
    with pytest.raises(PosteriorError, match="not those the posterior was fitted to"):
        posterior.reconstruct(X_TEST)


def test_it_is_frozen_and_moves() -> None:
    found = fitted().encode(X_TEST, S)
    with pytest.raises(FrozenInstanceError):
        found.mean = X  # type: ignore[misc]
    moved = found.to("meta")
    assert isinstance(moved, Reconstruction)
    assert moved.latent_mean.device.type == "meta"
    assert moved.mean is None
    assert found.to(torch.float32).latent_variance.dtype == torch.float32
    assert torch.equal(found.cpu().latent_mean, found.latent_mean)
