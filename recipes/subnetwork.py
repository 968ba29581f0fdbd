"""Subnetwork inference: a full covariance over a few weights, instead of a diagonal one over all.

A regression with a gap in its data. The network trains with a `SWAGCallback`, whose variances say which weights to
choose, as Daxberger et al. (2021) do. Between the data a posterior should be unsure, and near them not: correlations
matter more than the number of weights. How they are chosen matters less here, where no units are dead.

    python recipes/subnetwork.py    # half a minute; the picture goes to outputs/subnetwork/
"""

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from support import QUIET, be_quiet, print_table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Gaussian, LaplacePosterior, Subnetwork, SWAGCallback, fit_laplace, metrics

OUTPUT = Path("outputs/subnetwork")
NOISE, GAP = Gaussian(noise_std=0.2), 1.0  # no data for |x| < GAP
WIDTH, CHOSEN, EPOCHS = 50, 250, 400


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = (nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.net = nn.Sequential(*hidden, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """A learning rate that falls, and stays constant while SWAG takes the weights in."""
        adam = torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=1e-4)
        return [adam], [torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 0.1 ** min(1, epoch / (0.75 * EPOCHS)))]


def draw(n: int, low: float, high: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on both sides of zero.  # [n, 1] each"""
    x = (low + (high - low) * torch.rand(n, 1, generator=generator)) * torch.randn(n, 1, generator=generator).sign()
    return x, torch.sin(2 * x) + NOISE.noise_std * torch.randn(n, 1, generator=generator)


def judge(posterior: LaplacePosterior, points: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    row = {"weights": posterior.subset.size, "prior": float(posterior.prior_precision)}
    for name, (x, y) in points.items():
        prediction = posterior.predict(x)
        row[f"σ of f, {name}"] = float(prediction.epistemic.sqrt().mean())
        row[f"NLL, {name}"] = float(metrics.functional.gaussian_nll(prediction.mean, prediction.variance, y))
    return row


def save_picture(posteriors: dict[str, LaplacePosterior], x: Tensor, y: Tensor) -> None:
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    line = torch.linspace(-4, 4, 400)[:, None]
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for axes, (name, posterior) in zip(panels, posteriors.items(), strict=False):
        prediction = posterior.predict(line)
        mean, two_sigmas = prediction.mean[:, 0], 2 * prediction.variance[:, 0].sqrt()
        axes.fill_between(line[:, 0], mean - two_sigmas, mean + two_sigmas, alpha=0.3)
        axes.plot(line, mean)
        axes.plot(x, y, ".", color="black", markersize=3)
        axes.set(title=name, ylim=(-7, 7))
    figure.savefig(OUTPUT / "gap.png")


def main() -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    L.seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(0)
    x, y = draw(120, GAP, math.pi, generator)
    loader, swag, module = DataLoader(TensorDataset(x, y), 30, shuffle=True), SWAGCallback(NOISE, network="net"), Net()
    L.Trainer(max_epochs=EPOCHS, callbacks=[swag], accelerator="cpu", **QUIET).fit(module, loader)
    full = fit_laplace(module.net, loader, NOISE, "full").tune_prior("marglik", noise=False)
    diagonal = fit_laplace(module.net, loader, NOISE, "diag").tune_prior("marglik", noise=False)
    posteriors = {"all weights": full, "all weights, diagonal": diagonal}
    # So many weights with this prior give the outputs as much prior variance as all weights with theirs.
    prior = float(full.prior_precision) * CHOSEN / full.subset.size
    criteria = {"variance (SWAG)": swag.posterior, "variance (diagonal Laplace)": "laplace_diag"}
    for name, by in (criteria | {"magnitude": "magnitude", "chance": "random"}).items():
        chosen = fit_laplace(module.net, loader, NOISE, subset=Subnetwork(CHOSEN, by), prior_precision=prior)
        posteriors[f"{CHOSEN} by {name}"] = chosen
    points = {"data": draw(1000, GAP, math.pi, generator), "gap": draw(1000, 0, GAP, generator)}
    print_table({name: judge(posterior, points) for name, posterior in posteriors.items()})
    save_picture(posteriors, x, y)
    print(f"\ngap.png is in {OUTPUT}")


if __name__ == "__main__":
    main()
