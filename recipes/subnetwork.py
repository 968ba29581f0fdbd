"""Subnetwork inference: a full covariance over a few weights, instead of a diagonal one over all.

A regression with a gap in its data. The network trains with a `SWAGCallback`, whose variances choose the weights, as in
Daxberger et al. (2021). A posterior should be uncertain in the gap and certain near the data: for this, correlations
matter more than the number of weights. The choice of weights matters less here, where no units are dead.

    python recipes/subnetwork.py    # half a minute; table and picture go to outputs/subnetwork/
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from program import WITH_BAR, Run, start
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Gaussian, LaplacePosterior, Subnetwork, SWAGCallback, Tuning, fit_laplace, metrics

NOISE, GAP = Gaussian(noise_std=0.2), 1.0  # no data for |x| < GAP


@dataclass(frozen=True)
class Settings:
    width: int = 50
    chosen: int = 250  # weights
    epochs: int = 400


class Net(L.LightningModule):
    def __init__(self, width: int, epochs: int) -> None:
        super().__init__()
        hidden, self.epochs = (nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()), epochs
        self.net = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """The learning rate falls, then stays constant while SWAG collects weights."""
        adam = torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=1e-4)
        falling = torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 0.1 ** min(1, epoch / (0.75 * self.epochs)))
        return [adam], [falling]


def draw(n: int, low: float, high: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on both sides of zero.  # [n, 1] each"""
    x = (low + (high - low) * torch.rand(n, 1, generator=generator)) * torch.randn(n, 1, generator=generator).sign()
    return x, torch.sin(2 * x) + NOISE.noise_std * torch.randn(n, 1, generator=generator)


def train(run: Run, x: Tensor, y: Tensor) -> Any:
    """The posterior of SWAG, whose network has the trained weights."""
    L.seed_everything(run.seed, verbose=False)
    loader, swag = DataLoader(TensorDataset(x, y), 30, shuffle=True), SWAGCallback(NOISE, network="net")
    trainer = L.Trainer(max_epochs=run.settings.epochs, callbacks=[swag], accelerator="cpu", **WITH_BAR)
    trainer.fit(Net(run.settings.width, run.settings.epochs), loader)
    return swag.posterior


def judge(posterior: LaplacePosterior, points: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    row = {"weights": posterior.subset.size, "prior": float(posterior.prior_precision)}
    for name, (x, y) in points.items():
        prediction = posterior.predict(x)
        row[f"σ of f, {name}"] = float(prediction.epistemic.sqrt().mean())
        row[f"NLL, {name}"] = float(metrics.functional.gaussian_nll(prediction.mean, prediction.variance, y))
    return row


def draw_gap(posteriors: dict[str, LaplacePosterior], x: Tensor, y: Tensor) -> Figure:
    figure, line = Figure(figsize=(12, 5.5), layout="constrained"), torch.linspace(-4, 4, 400)[:, None]
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for axes, (name, posterior) in zip(panels, posteriors.items(), strict=False):
        prediction = posterior.predict(line)
        mean, two_sigmas = prediction.mean[:, 0], 2 * prediction.variance[:, 0].sqrt()
        axes.fill_between(line[:, 0], mean - two_sigmas, mean + two_sigmas, alpha=0.3)
        axes.plot(line, mean)
        axes.plot(x, y, ".", color="black", markersize=3)
        axes.set(title=name, ylim=(-7, 7))
    return figure


def main() -> None:
    run = start(__doc__, "subnetwork", {"default": Settings(), "fast": Settings(16, 60, 100)}, threads=1)
    generator, chosen = torch.Generator().manual_seed(run.seed), run.settings.chosen
    x, y = draw(120, GAP, math.pi, generator)
    swag = run.posterior("training", Net(run.settings.width, run.settings.epochs).net, train, run, x, y)
    fit = partial(fit_laplace, swag.network, list(zip(x.split(30), y.split(30), strict=True)), NOISE)
    full, diagonal = (fit(structure=word).tune_prior(Tuning("marglik", noise=False)) for word in ("full", "diag"))
    posteriors = {"all weights": full, "all weights, diagonal": diagonal}
    # With this prior, the chosen weights give the outputs as much prior variance as all weights do.
    prior = float(full.prior_precision) * chosen / full.subset.size
    criteria = {"variance (SWAG)": swag, "variance (diagonal Laplace)": "laplace_diag"}
    for name, by in (criteria | {"magnitude": "magnitude", "chance": "random"}).items():
        posteriors[f"{chosen} by {name}"] = fit(subset=Subnetwork(chosen, by), prior_precision=prior)
    points = {"data": draw(1000, GAP, math.pi, generator), "gap": draw(1000, 0, GAP, generator)}
    run.save_table("table", {name: judge(posterior, points) for name, posterior in posteriors.items()})
    run.save_picture("gap", draw_gap(posteriors, x, y))


if __name__ == "__main__":
    main()
