"""One training, six posteriors: what each believes between the data, where there are none.

Snelson's data without the points in the middle, and a sine with a gap. The network is the same in a row of the picture;
the posteriors differ in what they keep of the curvature: all of it, Kronecker factors, its diagonal, all of it for the
last layer or for a subnetwork of a few weights, or, in function space, all of it for a few of the training points. The
evidence of each chooses its prior; the noise is that of the full posterior.

Snelson's data are read if LIGHTNING_BAYES_DATA names a folder with snelson/.

    python recipes/regression_1d.py    # half a minute; the picture goes to outputs/regression_1d/
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from support import be_quiet, print_table
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import Gaussian, LaplacePosterior, Prediction, Subnetwork, fit_laplace, metrics

OUTPUT = Path("outputs/regression_1d")
STEPS = 4000
POSTERIORS: dict[str, dict[str, Any]] = {
    **{"full": {"structure": "full"}, "Kronecker": {"structure": "kron"}, "diagonal": {"structure": "diag"}},
    "last layer": {"structure": "full", "subset": "last_layer"},
    "60 weights": {"structure": "full", "subset": Subnetwork(60)},
    "GP, 40 points": {"structure": "full", "gp_points": 40},
}
Pairs = tuple[Tensor, Tensor]  # x and y [N, 1]


def read_data() -> dict[str, tuple[Pairs, Pairs]]:
    """Of each data set the points to train on, and those in the gap."""
    sets, folder = {}, Path(os.environ.get("LIGHTNING_BAYES_DATA", "data")) / "snelson"
    if folder.is_dir():
        x, y = (torch.tensor(np.loadtxt(folder / name)).float()[:, None] for name in ("train_inputs", "train_outputs"))
        sets["Snelson"] = (x, y, (x > 1.5) & (x < 3))
    x = 6 * torch.rand(220, 1, generator=torch.Generator().manual_seed(0))
    y = torch.sin(2 * x) + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    sets["sine"] = (x, y, (x > 2) & (x < 4))
    return {name: ((x[~gap, None], y[~gap, None]), (x[gap, None], y[gap, None])) for name, (x, y, gap) in sets.items()}


def train(x: Tensor, y: Tensor) -> nn.Module:
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(network(x), y).backward()
        optimizer.step()
    return network


def fit_all(network: nn.Module, data: Pairs) -> dict[str, LaplacePosterior]:
    noise = fit_laplace(network, [data], "regression", structure="full").tune_prior("marglik").likelihood.noise_std
    likelihood = Gaussian(noise_std=float(noise))
    fits = {name: fit_laplace(network, [data], likelihood, **words) for name, words in POSTERIORS.items()}
    return {name: posterior.tune_prior("marglik", noise=False) for name, posterior in fits.items()}


def judge(prediction: Prediction, y: Tensor, place: str) -> dict[str, float]:
    nll = metrics.functional.gaussian_nll(prediction.mean, prediction.variance, y)
    return {f"σ of f, {place}": float(prediction.epistemic.sqrt().mean()), f"NLL, {place}": float(nll)}


def draw(ax: Any, line: Tensor, prediction: Prediction, data: Pairs, gap: Pairs) -> None:
    """Two standard deviations of the function, and of a new observation."""
    x, mean = line.squeeze(1), prediction.mean.squeeze(1)
    for variance, colour in ((prediction.variance, "#cfe3f5"), (prediction.epistemic, "#6aaede")):
        σ = variance.squeeze(1).sqrt()
        ax.fill_between(x, mean - 2 * σ, mean + 2 * σ, color=colour, linewidth=0)
    ax.plot(x, mean, color="black", linewidth=1)
    for points, colour in ((data, "black"), (gap, "#d55e00")):
        ax.scatter(*points, s=4, color=colour)
    ax.set(ylim=(float(2 * data[1].min()), float(2 * data[1].max())), xticks=[], yticks=[])


def main() -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    table, sets = {}, read_data()
    figure = Figure(figsize=(2.2 * len(POSTERIORS), 2.2 * len(sets)), layout="constrained")
    panels = iter(figure.subplots(len(sets), len(POSTERIORS)).flat)
    for name, (data, gap) in sets.items():
        torch.manual_seed(0)
        line = torch.linspace(float(data[0].min()) - 1.5, float(data[0].max()) + 1.5, 300)[:, None]
        for method, posterior in fit_all(train(*data), data).items():
            ax, predictive = next(panels), "gp" if method.startswith("GP") else "glm"
            at_line, at_data, at_gap = (posterior.predict(x, predictive) for x in (line, data[0], gap[0]))
            draw(ax, line, at_line, data, gap)
            ax.set_title(f"{name}, {method}", size=9)
            table[f"{name}, {method}"] = judge(at_data, data[1], "data") | judge(at_gap, gap[1], "gap")
    print_table(table)
    figure.savefig(OUTPUT / "posteriors.png", dpi=120)
    print(f"\nposteriors.png is in {OUTPUT}")


if __name__ == "__main__":
    main()
