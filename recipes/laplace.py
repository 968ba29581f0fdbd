"""A Laplace posterior without a Trainer: any `nn.Module`, any iterable of `(x, y)`.

A regression on a sine with a gap in the data. One network gets four posteriors that keep different parts of the
curvature. The evidence chooses the prior precision; the noise is known. In the gap, a posterior should be less certain.

    python recipes/laplace.py    # seconds; table, picture and posterior go to outputs/laplace/
"""

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from program import progress, start
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import Gaussian, LaplacePosterior, Tuning, fit_laplace, metrics, plots

NOISE, GAP = 0.2, 1.0  # no data for |x| < GAP
POSTERIORS = {
    "full": {"structure": "full"},
    "Kronecker": {"structure": "kron"},
    "diagonal": {"structure": "diag"},
    "last layer": {"structure": "full", "subset": "last_layer"},
}


@dataclass(frozen=True)
class Settings:
    steps: int = 2000


def draw(n: int, low: float, high: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on both sides of zero.  # [n, 1] each"""
    x = low + (high - low) * torch.rand(n, 1, generator=generator)
    x = x * torch.randn(n, 1, generator=generator).sign()
    return x, torch.sin(2 * x) + NOISE * torch.randn(n, 1, generator=generator)


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def train(x: Tensor, y: Tensor, steps: int, seed: int) -> dict[str, Tensor]:
    """Plain PyTorch."""
    torch.manual_seed(seed)
    network = make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in progress(range(steps), "training"):
        optimizer.zero_grad()
        F.mse_loss(network(x), y).backward()
        optimizer.step()
        schedule.step()
    return network.state_dict()


def judge(posterior: LaplacePosterior, test: tuple[Tensor, Tensor], gap: tuple[Tensor, Tensor]) -> dict[str, float]:
    row = {"evidence": float(posterior.log_marginal_likelihood()), "prior": float(posterior.prior_precision)}
    for name, (x, y) in {"data": test, "gap": gap}.items():
        prediction = posterior.predict(x)
        row[f"σ of f, {name}"] = float(prediction.epistemic.sqrt().mean())
        row[f"NLL, {name}"] = float(metrics.functional.gaussian_nll(prediction.mean, prediction.variance, y))
    return row


def draw_bands(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> Figure:
    """The variance that more data would remove (epistemic), the noise (aleatoric), and their sum."""
    line = torch.linspace(-4, 4, 400)[:, None]
    prediction = posterior.predict(line)
    figure, _ = plots.regression_bands(line, prediction.mean, prediction.epistemic, prediction.aleatoric, x, y)
    return figure


def main() -> None:
    run = start(__doc__, "laplace", {"default": Settings(), "fast": Settings(steps=600)}, threads=1)
    generator = torch.Generator().manual_seed(run.seed)
    x, y = draw(120, GAP, math.pi, generator)
    network = make_network()
    network.load_state_dict(run.once("training", train, x, y, run.settings.steps, run.seed))
    loader = list(zip(x.split(32), y.split(32), strict=True))  # any iterable works
    fits = {
        name: fit_laplace(network, loader, Gaussian(noise_std=NOISE), **words) for name, words in POSTERIORS.items()
    }
    tuned = {name: posterior.tune_prior(Tuning("marglik", noise=False)) for name, posterior in fits.items()}
    test, gap = draw(1000, GAP, math.pi, generator), draw(1000, 0, GAP, generator)
    print(f"{len(x)} points on sin(2x) with noise {NOISE}, none for |x| < {GAP:g}:")
    run.save_table("table", {name: judge(posterior, test, gap) for name, posterior in tuned.items()})
    run.save_picture("bands", draw_bands(tuned["full"], x, y))
    tuned["full"].save(run.output / "posterior.pt")  # GaussianPosterior.load(path, network) reads it


if __name__ == "__main__":
    main()
