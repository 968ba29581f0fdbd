"""One posterior, three predictives: why linearise? (Figure 4 of Immer et al. 2021, "Improving predictions of
Bayesian neural nets via local linearization".)

The data are two classes in the plane. A network with two hidden layers gets a full Laplace posterior. Weight samples
run through the network (BNN) blur the classes; the linearised network (GLM) separates them and is less certain away
from the data. Its variance has two parts: aleatoric at the boundary, epistemic far from any point.

    python recipes/banana.py            # two crescents; half a minute; table and picture go to outputs/banana/
    python recipes/banana.py --paper    # the paper's points, uci_classification/banana.npz in the folder --data
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from program import Run, progress, require, start
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import GLM, Prediction, fit_laplace, metrics

N_TRAIN, PRIOR_PRECISION = 265, 1.0
PREDICTIVES = {"MAP": "map", "BNN": "bnn", "GLM": "glm"}


@dataclass(frozen=True)
class Settings:
    steps: int = 3000
    width: int = 50
    side: int = 100  # size of the picture, in points
    points: str = "crescents"  # or "banana"


def read_data(run: Run) -> tuple[Tensor, Tensor]:
    """Points `[N, 2]`, standardised, and labels `[N, 1]`, in a random order."""
    if run.settings.points == "banana":
        path = require(run.data / "uci_classification" / "banana.npz", "the banana data set")
        points, labels = np.load(path).values()
    else:
        points, labels = make_moons(2000, noise=0.3, random_state=0)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(points)[order].float(), torch.tensor(labels)[order].float()
    return (x - x.mean(0)) / x.std(0), y[:, None]


def train(x: Tensor, y: Tensor, steps: int, width: int) -> nn.Module:
    """Train with plain PyTorch on the joint −log p(y, θ)."""
    network = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in progress(range(steps), "training"):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(network(x), y, reduction="sum")
        prior = sum(p.square().sum() for p in network.parameters())
        (loss + 0.5 * PRIOR_PRECISION * prior).backward()
        optimizer.step()
        schedule.step()
    return network


def judge(prediction: Prediction, y: Tensor) -> dict[str, float]:
    assert prediction.probs is not None
    return {
        "NLL": float(F.binary_cross_entropy(prediction.probs, y)),
        "accuracy": float(((prediction.probs > 0.5) == y.bool()).float().mean()),
        "ECE": float(metrics.functional.calibration_error(prediction.probs[:, 0], y[:, 0].long())),
    }


def believe(run: Run, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Scores on test points; on a grid, the probability of class 1 and the two parts of the GLM's variance."""
    torch.manual_seed(run.seed)
    settings, data, test = run.settings, (x[:N_TRAIN], y[:N_TRAIN]), slice(N_TRAIN, N_TRAIN + 1000)
    network = train(*data, settings.steps, settings.width)
    posterior = fit_laplace(network, [data], "binary", prior_precision=PRIOR_PRECISION, structure="full")
    table = {name: judge(posterior.predict(x[test], word), y[test]) for name, word in PREDICTIVES.items()}
    axis = torch.linspace(-4, 4, settings.side)
    grid = torch.cartesian_prod(axis, axis).flip(1)  # the second coordinate varies slowest
    panels = {name: posterior.predict(grid, predictive).probs for name, predictive in PREDICTIVES.items()}
    glm = posterior.predict(grid, GLM(samples=1000))
    return {"table": table, "panels": {**panels, "GLM: aleatoric": glm.aleatoric, "GLM: epistemic": glm.epistemic}}


def draw(panels: dict[str, Tensor], x: Tensor, y: Tensor, side: int) -> Figure:
    figure = Figure(figsize=(15, 3), layout="constrained", dpi=120)
    for ax, (name, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        limits = {"vmin": 0, "vmax": 1, "cmap": "RdBu_r"} if name in PREDICTIVES else {"cmap": "cividis"}
        image = ax.imshow(values.reshape(side, side).numpy(), origin="lower", extent=(-4, 4, -4, 4), **limits)
        for label, (marker, colour) in enumerate({"o": "white", "^": "black"}.items()):
            points = x[y[:, 0] == label].T.numpy()
            ax.scatter(*points, s=7, marker=marker, color=colour, edgecolor="black", linewidth=0.4)
        ax.set(title=name, xticks=[], yticks=[])
        figure.colorbar(image, ax=ax, shrink=0.8)
    return figure


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(600, 16, 20), "paper": Settings(points="banana")}
    run = start(__doc__, "banana", scales, threads=1)
    x, y = read_data(run)
    beliefs = run.once("predictions", believe, run, x, y)
    run.save_table("table", beliefs["table"])
    run.save_picture("banana", draw(beliefs["panels"], x[:N_TRAIN], y[:N_TRAIN], run.settings.side))


if __name__ == "__main__":
    main()
