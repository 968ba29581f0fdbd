"""A function with three minima for `bayesian_optimisation.py`, a search for the best point by its gradient, and the
figure."""

from collections.abc import Callable
from math import pi

import torch
from matplotlib.figure import Figure
from torch import Tensor


def branin(x: Tensor) -> Tensor:
    """Branin's function on the unit square, minus its smallest value, 0.397887.  # [n, 2] -> [n]"""
    a, b = 15 * x[:, 0] - 5, 15 * x[:, 1]
    return (b - 5.1 / (4 * pi**2) * a**2 + 5 / pi * a - 6) ** 2 + 10 * (1 - 1 / (8 * pi)) * a.cos() + 10 - 0.397887


def maximise(score: Callable[[Tensor], Tensor], generator: torch.Generator) -> Tensor:
    """The best point of the unit square, by gradient steps from the best 8 of 500 points.  # [1, 2]"""
    points = torch.rand(500, 2, generator=generator)
    x = points[score(points).topk(8).indices].requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.02, maximize=True)
    for _ in range(20):
        optimizer.zero_grad()
        score(x).sum().backward()
        optimizer.step()
        x.data.clamp_(0, 1)
    return x.detach()[score(x.detach()).argmax()][None]


def summarise(regret: Tensor) -> dict[str, float]:
    """Means over seeds, halfway and at the end; at the end also the standard error and the worst seed.  # [S, n]"""
    half, last = regret[:, regret.shape[1] // 2], regret[:, -1]
    numbers = {"half way": half.mean(), "regret": last.mean(), "standard error": last.std() / len(last) ** 0.5}
    return {name: float(value) for name, value in numbers.items()} | {"worst": float(last.max())}


def draw_searches(points: dict[str, Tensor], regrets: dict[str, Tensor]) -> Figure:
    """The points of each method, the last ones in yellow, and its mean regret with the standard error.
    # points [n, 2], regrets [S, n] of S seeds"""
    figure, line = Figure(figsize=(14, 3.4), layout="constrained"), torch.linspace(0, 1, 80)
    surface = (branin(torch.cartesian_prod(line, line)).reshape(80, 80).T + 1).log()
    *maps, curves = figure.subplots(1, len(points) + 1)
    for ax, (name, x) in zip(maps, points.items(), strict=True):
        ax.contourf(line, line, surface, 20, cmap="Blues_r")
        ax.scatter(*x.T, c=range(len(x)), cmap="autumn", s=18)
        ax.set(title=name, xticks=[], yticks=[])
    for name, regret in regrets.items():
        mean, error = regret.mean(0), regret.std(0) / len(regret) ** 0.5
        looks = range(1, len(mean) + 1)
        curves.plot(looks, mean, label=name)
        curves.fill_between(looks, (mean - error).clamp_min(1e-3), mean + error, alpha=0.2)
    curves.set(yscale="log", xlabel="looks", title="regret")
    curves.legend()
    return figure
