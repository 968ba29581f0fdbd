"""The same posterior, three predictives: why to linearise (figure 4 of Immer et al. 2021, "Improving predictions of
Bayesian neural nets via local linearization").

Two classes in the plane, a network of two hidden layers, and a full Laplace posterior around its weights. Weight
samples sent through the network (BNN) wash the classes out; the linearised network (GLM) keeps them and grows unsure
away from the data. Its variance has two parts: aleatoric at the boundary, epistemic far from any point.

The data are the paper's, if LIGHTNING_BAYES_DATA names a folder with uci_classification/banana.npz, else two crescents.

    python recipes/banana.py    # half a minute; the picture goes to outputs/banana/
"""

import os
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from support import be_quiet, print_table
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import LaplacePosterior, Prediction, fit_laplace, metrics

OUTPUT = Path("outputs/banana")
N_TRAIN, STEPS, WIDTH, SIDE = 265, 3000, 50, 100
PRIOR_PRECISION = 1.0
PREDICTIVES = {"MAP": "map", "BNN": "bnn", "GLM": "glm"}


def read_data() -> tuple[Tensor, Tensor]:
    """Points `[N, 2]`, standardised, and labels `[N, 1]`, in a random order."""
    path = Path(os.environ.get("LIGHTNING_BAYES_DATA", "")) / "uci_classification" / "banana.npz"
    points, labels = np.load(path).values() if path.is_file() else make_moons(2000, noise=0.3, random_state=0)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(points)[order].float(), torch.tensor(labels)[order].float()
    return (x - x.mean(0)) / x.std(0), y[:, None]


def train(x: Tensor, y: Tensor) -> nn.Module:
    """Plain PyTorch, on the joint −log p(y, θ)."""
    network = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
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


def save_picture(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> None:
    """The probability of class 1 by each predictive, and the two parts of the GLM's variance."""
    axis = torch.linspace(-4, 4, SIDE)
    grid = torch.cartesian_prod(axis, axis).flip(1)  # the second coordinate is the slower one
    panels = {name: posterior.predict(grid, predictive).probs for name, predictive in PREDICTIVES.items()}
    glm = posterior.predict(grid, samples=1000)
    panels |= {"GLM: aleatoric": glm.aleatoric, "GLM: epistemic": glm.epistemic}
    figure = Figure(figsize=(15, 3), layout="constrained", dpi=120)
    for ax, (name, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        limits = {"vmin": 0, "vmax": 1, "cmap": "RdBu_r"} if name in PREDICTIVES else {"cmap": "cividis"}
        image = ax.imshow(values.reshape(SIDE, SIDE).numpy(), origin="lower", extent=(-4, 4, -4, 4), **limits)
        for label, (marker, colour) in enumerate({"o": "white", "^": "black"}.items()):
            points = x[y[:, 0] == label].T.numpy()
            ax.scatter(*points, s=7, marker=marker, color=colour, edgecolor="black", linewidth=0.4)
        ax.set(title=name, xticks=[], yticks=[])
        figure.colorbar(image, ax=ax, shrink=0.8)
    figure.savefig(OUTPUT / "banana.png")


def main() -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    x, y = read_data()
    network = train(x[:N_TRAIN], y[:N_TRAIN])
    loader = [(x[:N_TRAIN], y[:N_TRAIN])]
    posterior = fit_laplace(network, loader, "binary", "full", prior_precision=PRIOR_PRECISION)
    print(f"{N_TRAIN} points of two classes, one posterior over {posterior.subset.size} weights:")
    test = slice(N_TRAIN, N_TRAIN + 1000)
    print_table({name: judge(posterior.predict(x[test], word), y[test]) for name, word in PREDICTIVES.items()})
    save_picture(posterior, x[:N_TRAIN], y[:N_TRAIN])
    print(f"\nbanana.png is in {OUTPUT}")


if __name__ == "__main__":
    main()
