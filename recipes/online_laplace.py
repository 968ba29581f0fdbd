"""Online Laplace: a Laplacian autoencoder, trained at samples of its posterior.

Two autoencoders of the digits 0–7 have two latent features each. One trains as usual and gets its diagonal posterior
afterwards, from one pass with the fast Hessian. The other learns weights and curvature together: its sampled networks
reconstruct better. Unknown images should have a larger error, and a larger variance over sampled networks.

    python recipes/online_laplace.py    # half a minute; table and picture go to outputs/online_laplace/
"""

from dataclasses import dataclass

import lightning as L
import torch
from digits import Digits, auroc, read_digits
from matplotlib.figure import Figure
from program import WITH_BAR, Run, start
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bayes import Diag, Gaussian, LaplacePosterior, Memory, OnlineLaplaceCallback, Tuning, fit_laplace

NOISE = 0.2


@dataclass(frozen=True)
class Settings:
    epochs: int = 60
    samples: int = 50


class Autoencoder(L.LightningModule):
    """An ordinary LightningModule; its loss is the negative log-likelihood of an image, up to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def split_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]  # the target is the input

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return 0.5 * ((batch[0] - self(batch[0])) / NOISE).square().sum() / len(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(run: Run, digits: Digits, *callbacks: L.Callback) -> Autoencoder:
    L.seed_everything(run.seed, verbose=False)
    model, words = Autoencoder(), {"max_epochs": run.settings.epochs, "accelerator": "cpu", **WITH_BAR}
    L.Trainer(callbacks=list(callbacks), **words).fit(model, DataLoader(digits.train, 32, shuffle=True))
    return model.eval()


def post_hoc(run: Run, digits: Digits) -> LaplacePosterior:
    """`Diag(method="approx")` takes one backward pass; "exact" takes one for each of the 64 pixels."""
    x, _ = digits.train.tensors
    posterior = fit_laplace(train(run, digits), [(x, x)], Gaussian(NOISE), structure=Diag(method="approx"))
    return posterior.tune_prior(Tuning("marglik", noise=False))


def online(run: Run, digits: Digits) -> LaplacePosterior:
    """The curvature memory spans about 100 steps, or four epochs. It starts at one unit of curvature per image."""
    words = {"memory_factor": 0.01, "memory": Memory(initial_curvature=800.0)}
    callback = OnlineLaplaceCallback(Gaussian(NOISE), hessian="approx", calibrate=None, **words)
    train(run, digits, callback)
    return callback.posterior


def judge(posterior: LaplacePosterior, digits: Digits, samples: int) -> dict[str, float]:
    """The error per image, of the mean over samples and of one sample, and how well unknown images stand out."""

    def scores(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        reconstruction = posterior.reconstruct(x, samples, torch.Generator().manual_seed(0))
        error, variance = (x - reconstruction.mean).square().sum(1), reconstruction.variance.sum(1)  # [N]
        return error, error + variance, variance

    of_mean, of_sample, variance = scores(digits.test.tensors[0])
    row = {"error of mean": float(of_mean.mean()), "of a sample": float(of_sample.mean())}
    for name, x in digits.unknown.items():
        row |= {f"error, {name}": auroc(of_sample, scores(x)[1]), f"σ, {name}": auroc(variance, scores(x)[2])}
    return row


def draw(posteriors: dict[str, LaplacePosterior], digits: Digits, samples: int) -> Figure:
    """Latent means, and the standard deviation over sampled encoders as the size of a point."""
    x, y = digits.test.tensors
    figure = Figure(figsize=(9, 4), layout="constrained")
    for ax, (name, posterior) in zip(figure.subplots(1, 2), posteriors.items(), strict=True):
        z = posterior.encode(x, samples, torch.Generator().manual_seed(0))
        ax.scatter(*z.latent_mean.T, s=200 * z.latent_variance.mean(1).sqrt(), c=y, cmap="tab10", alpha=0.6)
        ax.set(title=name, xticks=[], yticks=[])
    return figure


def main() -> None:
    run = start(__doc__, "online_laplace", {"default": Settings(), "fast": Settings(5, 10)}, threads=1)
    digits, samples, ways = read_digits(), run.settings.samples, {"post-hoc": post_hoc, "online": online}
    posteriors = {name: run.posterior(name, Autoencoder(), fit, run, digits) for name, fit in ways.items()}
    run.save_table("table", {name: judge(posterior, digits, samples) for name, posterior in posteriors.items()})
    print("\nThe last four columns are AUROC for unknown images, by the error of a sample and by its variance.")
    run.save_picture("latent", draw(posteriors, digits, samples))


if __name__ == "__main__":
    main()
