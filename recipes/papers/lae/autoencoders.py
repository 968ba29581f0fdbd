"""Autoencoders, and the methods that the Laplacian autoencoder is compared with (Miani et al., "Laplacian autoencoders
for learning stochastic representations", section 5 and appendix A).

Every method is a `Method`: it draws networks, and computes the moments of their latent points and reconstructions. All
train with Adam on `½‖x − f(x)‖²`, the negative log-likelihood at noise 1, whose Hessian the posterior uses. If the
authors' code differs from their paper, this follows the paper: the loss matches the Hessian (theirs is a mean over
pixels), the gradient is that of the sampled network, the training images are shuffled, the Hessian has no factor ½, and
the prior does not decay. `ablation.py` uses their configuration and measures what these differences change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Diag, Gaussian, LaplacePosterior, Memory, OnlineLaplaceCallback, Tuning, fit_laplace
from lightning_bayes.predictive import Reconstruction, decode
from recipes.papers.lae.common import PAPER, Data, Settings
from recipes.program import QUIET, Run, progress

METHODS = ("AE", "VAE", "MC-AE", "AE ensemble", "LAE (post-hoc)", "LAE (online)")
DROPOUT, MEMBERS, KL_WEIGHT, LATENT = 0.2, 5, 1e-3, 2
BATCH = 500  # batch size outside training
PATIENCE = 8  # epochs without a better validation loss
NOISE = Gaussian(noise_std=1.0)


# -- networks ----------------------------------------------------------------------------------------------------------


def linear_encoder(pixels: int, width: int, dropout: float = 0.0) -> nn.Sequential:
    h = (pixels**2, width, width // 2, LATENT)
    return nn.Sequential(nn.Flatten(), *_stack([nn.Linear(a, b) for a, b in pairwise(h)], dropout))


def linear_decoder(pixels: int, width: int, dropout: float = 0.0) -> nn.Sequential:
    h = (LATENT, width // 2, width, pixels**2)
    layers = _stack([nn.Linear(a, b) for a, b in pairwise(h)], dropout)
    return nn.Sequential(*_dropout(dropout), *layers, nn.Unflatten(1, (1, pixels, pixels)))


def conv_encoder(pixels: int, width: int, dropout: float = 0.0) -> nn.Sequential:
    """The encoder with convolutions; with 64 channels: Conv64 – pool – Conv64 – pool – 2048 – 1024 – 2."""
    if pixels % 4:
        raise SystemExit(f"two poolings need an image whose side is a multiple of 4, not --pixels {pixels}")
    c, side = width // 8, pixels // 4
    linear = [nn.Linear(c * side**2, 32 * c), nn.Linear(32 * c, 16 * c), nn.Linear(16 * c, LATENT)]
    first = [nn.Conv2d(1, c, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), *_dropout(dropout)]
    second = [nn.Conv2d(c, c, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), *_dropout(dropout)]
    return nn.Sequential(*first, *second, nn.Flatten(), *_stack(linear, dropout))


def conv_decoder(pixels: int, width: int, dropout: float = 0.0, mirrored: bool = False) -> nn.Sequential:
    """The decoder of the authors' code, with one convolution more than the encoder, or as many if `mirrored`."""
    c, side = width // 8, pixels // 4
    linear = [nn.Linear(LATENT, 16 * c), nn.Linear(16 * c, 32 * c), nn.Linear(32 * c, c * side**2)]
    first: list[nn.Module] = [nn.Tanh(), nn.Unflatten(1, (c, side, side))]
    if not mirrored:
        first += [*_dropout(dropout), nn.Conv2d(c, c, 3, padding=1), nn.Tanh()]
    first += [nn.Upsample(scale_factor=2), *_dropout(dropout)]
    second = [nn.Conv2d(c, c, 3, padding=1), nn.Tanh(), nn.Upsample(scale_factor=2), *_dropout(dropout)]
    return nn.Sequential(*_dropout(dropout), *_stack(linear, dropout), *first, *second, nn.Conv2d(c, 1, 3, padding=1))


def _stack(layers: Sequence[nn.Module], dropout: float) -> list[nn.Module]:
    between = [part for layer in layers[:-1] for part in (layer, nn.Tanh(), *_dropout(dropout))]
    return [*between, layers[-1]]


def _dropout(p: float) -> list[nn.Module]:
    return [nn.Dropout(p)] if p else []


class LitAutoencoder(L.LightningModule):
    """An ordinary LightningModule that names its encoder and decoder; nothing in it is Bayesian."""

    def __init__(self, settings: Settings, conv: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        encoder, decoder = (conv_encoder, conv_decoder) if conv else (linear_encoder, linear_decoder)
        self.encoder = encoder(settings.pixels, settings.width, dropout)
        self.decoder = decoder(settings.pixels, settings.width, dropout)
        self.lr = settings.lr

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]

    def loss(self, x: Tensor) -> Tensor:
        return 0.5 * (x - self(x)).square().sum() / len(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class LitVAE(LitAutoencoder):
    """A VAE with separate encoders and decoders for means and for logarithms of variances."""

    def __init__(self, settings: Settings, conv: bool = False) -> None:
        super().__init__(settings, conv)
        other = LitAutoencoder(settings, conv)
        self.encoder_log_variance, self.decoder_log_variance = other.encoder, other.decoder

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(x), self.encoder_log_variance(x).clamp(-16, 4)

    def decode(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the standard deviation below by 0.05, because a pixel that is always black would have no variance."""
        return self.decoder(z), F.softplus(self.decoder_log_variance(z) + 6) - 6

    def loss(self, x: Tensor) -> Tensor:
        μ, log_σ2 = self.encode(x)
        f, log_s2 = self.decode(μ + (0.5 * log_σ2).exp() * torch.randn_like(μ))
        fit = 0.5 * ((x - f).square() * (-log_s2).exp() + log_s2).sum()
        kl = 0.5 * (log_σ2.exp() + μ.square() - 1 - log_σ2).sum()
        # The paper's weight belongs to the mean squared error over pixels; this is half of the sum.
        return (fit + 0.5 * x[0].numel() * KL_WEIGHT * kl) / len(x)


# -- training ----------------------------------------------------------------------------------------------------------


def fit(module: L.LightningModule, data: Data, settings: Settings, folder: Path, *callbacks: L.Callback) -> Any:
    """Train for `settings.epochs`, or until the validation loss has not fallen for `PATIENCE` epochs."""
    trainer = L.Trainer(
        max_epochs=settings.epochs,
        callbacks=[EarlyStopping("val_loss", patience=PATIENCE), *callbacks],
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, data.loader("train", settings.batch), data.loader("valid", BATCH))
    return module


def trained(run: Run, name: str, make: Callable[[], Any], data: Data, seed: int) -> Any:
    """Train the module, or load the weights that an earlier run saved."""

    def weights() -> dict[str, Tensor]:
        seed_everything(seed)
        return fit(make(), data, run.settings, run.output).state_dict()

    module = make()
    module.load_state_dict(run.once(name, weights))
    return module.eval()


def online(run: Run, name: str, data: Data, settings: Settings, conv: bool = False) -> LaplacePosterior:
    """Train at samples of the posterior, whose curvature is learned during training."""

    def state() -> dict[str, Any]:
        seed_everything(run.seed)
        kept = memory(len(data.train), settings)
        callback = OnlineLaplaceCallback(
            NOISE,
            calibrate=None,  # the paper's predictions, unchanged
            memory_factor=kept.pop("memory_factor"),
            memory=Memory(average=settings.average, **kept),
            hessian=settings.hessian,
            save=False,
            seed=run.seed,
        )
        module = fit(LitAutoencoder(settings, conv), data, settings, run.output, callback)
        return {"module": module.state_dict(), "posterior": callback.posterior.state_dict()}

    saved = run.once(name, state)
    module = LitAutoencoder(settings, conv)
    module.load_state_dict(saved["module"])
    return LaplacePosterior.from_state_dict(module, saved["posterior"])  # type: ignore[return-value]


def memory(n: int, settings: Settings) -> dict[str, float]:
    """The paper's memory, adapted to fewer images. It forgets a fraction α at every step, so it spans some epochs and
    has the Hessian of N/α images. With n = N/s images, an epoch is s times shorter, and the factor sα spans the same
    number of epochs. The Hessian is then that of n/(sα) images; the scale s² corrects for this. The precision starts at
    the number of images, as in the authors' code. With the paper's factor, a short training run would never forget that
    start, and nearly every weight would have the same variance."""
    s = PAPER.n_train / n
    scale = s if settings.average else s**2
    factor = min(1.0, s * settings.memory_factor)
    return {"memory_factor": factor, "scale": scale, "initial_curvature": n / scale}


def post_hoc(run: Run, name: str, module: LitAutoencoder, data: Data, hessian: str) -> LaplacePosterior:
    """The Hessian of a trained autoencoder, and the prior precision with the largest evidence."""

    def state() -> dict[str, Any]:
        x, _ = data.train.tensors
        posterior = fit_laplace(module, DataLoader(TensorDataset(x, x), BATCH), NOISE, structure=Diag(method=hessian))
        return posterior.tune_prior(Tuning("marglik", noise=False)).state_dict()

    return LaplacePosterior.from_state_dict(module, run.once(name, state))  # type: ignore[return-value]


def seed_everything(number: int) -> None:
    L.seed_everything(number, verbose=False)


# -- methods -----------------------------------------------------------------------------------------------------------


class Method:
    """A trained autoencoder and its uncertainty."""

    stochastic = True

    def draw(self, x: Tensor, n: int, seed: int) -> Reconstruction:
        """The outputs of `n` networks on a batch, with samples. If networks are drawn, the same seed draws the same
        ones."""
        raise NotImplementedError

    def decoder_variance(self, z: Tensor, n: int, seed: int) -> Tensor:
        """The variance of the reconstructions of latent points.  # [B, 1, H, W]"""
        raise NotImplementedError

    def moments(self, x: Tensor, n: int, seed: int) -> Reconstruction:
        """The moments for any number of images, without samples."""
        parts = [replace(self.draw(part, n, seed), samples=None, latent_samples=None) for part in x.split(BATCH)]
        names = ("mean", "variance", "latent_mean", "latent_variance")
        return Reconstruction(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Several(Method):
    """One network, with or without dropout, or all members of an ensemble."""

    modules: Sequence[LitAutoencoder]
    dropout: bool = False

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        return self.dropout or len(self.modules) > 1

    @torch.no_grad()
    def draw(self, x: Tensor, n: int, seed: int) -> Reconstruction:
        chosen = [self.modules[0].train()] * n if self.dropout else [module.eval() for module in self.modules]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            z = torch.stack([module.encoder(x) for module in chosen])  # [n, B, 2]
            f = torch.stack(
                [module.decoder(latent) for module, latent in zip(chosen, z, strict=True)]
            )  # [n, B, 1, H, W]
        return _with_moments(z, f)


@dataclass(frozen=True)
class Variational(Method):
    """A VAE: latent points are drawn, and a pixel's variance is the decoder's mean variance plus the variance of its
    means."""

    module: LitVAE

    @torch.no_grad()
    def draw(self, x: Tensor, n: int, seed: int) -> Reconstruction:
        μ, log_σ2 = self.module.encode(x)
        noise = torch.randn(n, *μ.shape, generator=torch.Generator().manual_seed(seed))
        z = μ + (0.5 * log_σ2).exp() * noise  # [n, B, 2]
        f, log_s2 = (t.unflatten(0, (n, len(x))) for t in self.module.decode(z.flatten(0, 1)))
        moments = _with_moments(z, f)
        return replace(moments, variance=moments.variance + log_s2.exp().mean(0), latent_variance=log_σ2.exp())

    @torch.no_grad()
    def decoder_variance(self, z: Tensor, n: int, seed: int) -> Tensor:
        return self.module.decode(z)[1].exp()


@dataclass(frozen=True)
class Laplacian(Method):
    posterior: LaplacePosterior

    def draw(self, x: Tensor, n: int, seed: int) -> Reconstruction:
        return self.posterior.reconstruct(x, n, torch.Generator().manual_seed(seed), keep_samples=True)

    def decoder_variance(self, z: Tensor, n: int, seed: int) -> Tensor:
        variance = decode(self.posterior, z, n, torch.Generator().manual_seed(seed)).variance
        assert variance is not None
        return variance


def _with_moments(z: Tensor, f: Tensor) -> Reconstruction:
    return Reconstruction(f.mean(0), f.var(0, correction=0), z.mean(0), z.var(0, correction=0), f, z)


def train_all(run: Run, data: Data, conv: bool = False) -> dict[str, Method]:
    """Train all methods of the paper's comparisons; the autoencoder is the ensemble's first member."""
    settings = run.settings
    members = [
        trained(run, f"autoencoder {i}", lambda: LitAutoencoder(settings, conv), data, seed)
        for i, seed in enumerate(progress(run.seeds(MEMBERS), "autoencoders"))
    ]
    print("trained the autoencoders", flush=True)
    vae = trained(run, "VAE", lambda: LitVAE(settings, conv), data, run.seed)
    dropout = trained(run, "MC-AE", lambda: LitAutoencoder(settings, conv, DROPOUT), data, run.seed)
    print("trained the VAE and the MC-AE", flush=True)
    others = (Several(members[:1]), Variational(vae), Several([dropout], dropout=True), Several(members))
    posterior = post_hoc(run, "post-hoc", members[0], data, settings.hessian)
    lae = online(run, "online", data, settings, conv)
    print("fitted the post-hoc LAE, trained the online one", flush=True)
    return dict(zip(METHODS, (*others, Laplacian(posterior), Laplacian(lae)), strict=True))
