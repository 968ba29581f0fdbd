"""One network, six posteriors: what each predicts in a gap of the data.

The data are a sine with a gap, and with `--snelson` also Snelson's data without the points in the middle. Each row of
the figure shows one network. The posteriors keep different parts of the curvature: all of it, Kronecker factors, the
diagonal, all of it for the last layer or a few weights, or, in function space, all of it for a few training points. The
evidence chooses priors and noise. Nothing is held out: validation data would also choose the predictives' tails.

    python recipes/regression_1d.py              # half a minute; table and picture go to outputs/regression_1d/
    python recipes/regression_1d.py --snelson    # reads snelson/train_inputs and train_outputs in the folder --data
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from program import Run, progress, require, start
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import Gaussian, Prediction, Subnetwork, Tuning, fit_laplace, metrics

POSTERIORS: dict[str, dict[str, Any]] = {
    **{"full": {"structure": "full"}, "Kronecker": {"structure": "kron"}, "diagonal": {"structure": "diag"}},
    "last layer": {"structure": "full", "subset": "last_layer"},
    "60 weights": {"structure": "full", "subset": Subnetwork(60)},
    "GP, 40 points": {"structure": "full", "gp": 40},
}
GAPS = {"sine": (2, 4), "Snelson": (1.5, 3)}
Pairs = tuple[Tensor, Tensor]  # x and y [N, 1]


@dataclass(frozen=True)
class Settings:
    steps: int = 4000
    sets: tuple[str, ...] = ("sine",)


def read_data(run: Run, name: str) -> tuple[Pairs, Pairs]:
    """The points to train on, and those in the gap."""
    if name == "Snelson":
        paths = (run.data / "snelson" / file for file in ("train_inputs", "train_outputs"))
        x, y = (torch.tensor(np.loadtxt(require(path, "Snelson's data"))).float()[:, None] for path in paths)
    else:
        x = 6 * torch.rand(220, 1, generator=torch.Generator().manual_seed(0))
        y = torch.sin(2 * x) + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    gap = ((x > GAPS[name][0]) & (x < GAPS[name][1])).squeeze(1)
    return (x[~gap], y[~gap]), (x[gap], y[gap])


def train(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in progress(range(steps), "training"):
        optimizer.zero_grad()
        F.mse_loss(network(x), y).backward()
        optimizer.step()
    return network


def judge(prediction: Prediction, y: Tensor, place: str) -> dict[str, float]:
    nll = metrics.functional.gaussian_nll(prediction.mean, prediction.variance, y)
    return {f"σ of f, {place}": float(prediction.epistemic.sqrt().mean()), f"NLL, {place}": float(nll)}


def believe(run: Run, line: Tensor, data: Pairs, gap: Pairs) -> dict[str, Any]:
    """The scores of each posterior, and its mean and variances along a line."""
    torch.manual_seed(run.seed)
    network, beliefs = train(*data, run.settings.steps), {}
    noise = fit_laplace(network, [data], "regression", structure="full").tune_prior("marglik").likelihood.noise_std
    for method, words in POSTERIORS.items():
        posterior = fit_laplace(network, [data], Gaussian(float(noise)), **words)
        posterior = posterior.tune_prior(Tuning("marglik", noise=False))
        predictive = "gp" if method.startswith("GP") else "glm"
        at_line, at_data, at_gap = (posterior.predict(x, predictive) for x in (line, data[0], gap[0]))
        curves = torch.cat([at_line.mean, at_line.variance.sqrt(), at_line.epistemic.sqrt()], 1)  # [line, 3]
        beliefs[method] = {"row": judge(at_data, data[1], "data") | judge(at_gap, gap[1], "gap"), "curves": curves}
    return beliefs


def draw(ax: Any, x: Tensor, curves: Tensor, data: Pairs, gap: Pairs) -> None:
    """Plot two standard deviations of a new observation, and of the function."""
    mean, *deviations = curves.T
    for σ, colour in zip(deviations, ("#cfe3f5", "#6aaede"), strict=True):
        ax.fill_between(x, mean - 2 * σ, mean + 2 * σ, color=colour, linewidth=0)
    ax.plot(x, mean, color="black", linewidth=1)
    for points, colour in ((data, "black"), (gap, "#d55e00")):
        ax.scatter(*points, s=4, color=colour)
    ax.set(ylim=(float(2 * data[1].min()), float(2 * data[1].max())), xticks=[], yticks=[])


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(800), "snelson": Settings(sets=("Snelson", "sine"))}
    run = start(__doc__, "regression_1d", scales, threads=1)
    sets, table = {name: read_data(run, name) for name in run.settings.sets}, {}
    figure = Figure(figsize=(13.2, 2.2 * len(sets)), layout="constrained", dpi=120)
    panels = iter(figure.subplots(len(sets), len(POSTERIORS)).flat)
    for name, (data, gap) in sets.items():
        line = torch.linspace(float(data[0].min()) - 1.5, float(data[0].max()) + 1.5, 300)[:, None]
        for method, belief in run.once(name, believe, run, line, data, gap).items():
            draw(ax := next(panels), line.squeeze(1), belief["curves"], data, gap)
            ax.set_title(f"{name}, {method}", size=9)
            table[f"{name}, {method}"] = belief["row"]
    run.save_table("table", table)
    run.save_picture("posteriors", figure)


if __name__ == "__main__":
    main()
