"""Figures of latent spaces, figures 1 and 8 of the paper on Laplacian autoencoders, and the style of other figures."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from torch import Tensor

from recipes.papers.lae.autoencoders import METHODS, Method
from recipes.papers.lae.common import Data

# Ten digits: Okabe and Ito's colours, each twice, with another marker.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00") * 2
MARKERS = ("o",) * 5 + ("^",) * 5
LOOKS: dict[str, dict[str, Any]] = {
    name: {"color": color, "linestyle": line, "marker": marker}
    for name, color, line, marker in zip(
        METHODS,
        ("#707070", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#D55E00"),
        ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), "-"),
        "osv^Dx",
        strict=True,
    )
}
GRID, POINTS, BARS = 50, 600, 150


def figure_1(methods: dict[str, Method], data: Data, samples: int, seed: int) -> Figure:
    """Plot latent points over the decoder's uncertainty, and one image with the mean and standard deviation of its
    reconstruction."""
    figure = Figure(figsize=(4.9 * len(methods), 4.3), layout="constrained", dpi=110)
    panels = figure.subfigures(1, len(methods))
    x, y = (t[:POINTS] for t in data.test.tensors)
    for panel, (name, method) in zip(panels, methods.items(), strict=True):
        moments = method.moments(x, samples, seed)
        grid = panel.add_gridspec(3, 4)
        ax = panel.add_subplot(grid[:, :3])
        z = moments.latent_mean
        assert z is not None
        _heat_map(panel, ax, method, z, samples, seed)
        _points(ax, z, y, size=7)
        ax.set(title=name, xticks=[], yticks=[])
        ax.legend(handles=_digits(), ncols=10, loc="lower center", fontsize=7, handletextpad=-0.5, columnspacing=0.1)
        shown = (x[0], moments.mean, moments.variance)
        for row, (what, image) in enumerate(zip(("image", "mean", "std"), shown, strict=True)):
            image = image if row == 0 else image[0]  # type: ignore[index]
            _image(panel.add_subplot(grid[row, 3]), image.sqrt() if row == 2 else image, what, ink=row < 2)
    return figure


def figure_8(methods: dict[str, Method], data: Data, samples: int, seed: int) -> Figure:
    """Plot the latent space with its uncertainty, and three images, for every Hessian."""
    x, y = (t[:POINTS] for t in data.test.tensors)
    chosen = [int((y == digit).nonzero()[0]) for digit in (0, 4, 7) if (y == digit).any()]
    columns = 1 + 2 * len(chosen)
    figure = Figure(figsize=(2.3 + 1.35 * (columns - 1), 1.75 * len(methods)), layout="constrained", dpi=110)
    axes = figure.subplots(len(methods), columns, width_ratios=[1.6] + [1] * (columns - 1), squeeze=False)
    for row, (name, method) in zip(axes, methods.items(), strict=True):
        moments = method.moments(x, samples, seed)
        assert moments.latent_mean is not None
        assert moments.latent_variance is not None
        assert moments.mean is not None
        assert moments.variance is not None
        some = slice(BARS)  # more points would cover each other
        _points(row[0], moments.latent_mean[some], y[some], 5, moments.latent_variance[some].sqrt())
        row[0].set(xticks=[], yticks=[], ylabel=name)
        for place, index in enumerate(chosen):
            _image(row[1 + 2 * place], moments.mean[index], f"{int(y[index])}: mean", ink=True)
            _image(row[2 + 2 * place], moments.variance[index].sqrt(), "std", ink=False)
    axes[0, 0].set_title("latent mean ± σ", fontsize=9)
    return figure


def square_around(z: Tensor) -> tuple[Tensor, Tensor]:
    """The centre of latent points `[N, 2]`, and the offsets of a grid around it that is one and a half times as
    wide."""
    low, high = z.min(0).values, z.max(0).values
    reach = 0.75 * float((high - low).max())
    return (low + high) / 2, torch.linspace(-reach, reach, GRID)


def _heat_map(figure: Any, ax: Any, method: Method, z: Tensor, samples: int, seed: int) -> None:
    """Plot the decoder's standard deviation, averaged over pixels, on a square around the latent points."""
    centre, side = square_around(z)
    points = torch.cartesian_prod(side, side) + centre  # [GRID², 2]
    variance = method.decoder_variance(points, samples, seed)
    σ = variance.sqrt().flatten(1).mean(1).reshape(GRID, GRID).T
    xs, ys = ((centre[i] + side).numpy() for i in (0, 1))
    mesh = ax.pcolormesh(xs, ys, σ.numpy(), cmap="viridis_r", norm=LogNorm(), rasterized=True)
    bar = figure.colorbar(mesh, ax=ax, location="bottom", shrink=0.85, aspect=30, pad=0.02)
    ticks = torch.logspace(float(σ.min().log10()), float(σ.max().log10()), 5).tolist()[1:4]
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.set_label("σ of the reconstruction, mean over pixels", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _points(ax: Any, z: Tensor, y: Tensor, size: float, σ: Tensor | None = None) -> None:
    for digit in y.unique().tolist():
        part, look = y == digit, {"color": COLOURS[digit % 10]}
        if σ is not None:
            ax.errorbar(*z[part].T, *σ[part].T.flip(0), fmt="none", elinewidth=0.4, alpha=0.5, ecolor=look["color"])
        ax.scatter(*z[part].T, s=size, marker=MARKERS[digit % 10], linewidths=0.2, edgecolors="white", **look)


def _image(ax: Any, image: Tensor, title: str, ink: bool) -> None:
    ax.imshow(image.squeeze(0).numpy(), cmap="gray_r" if ink else "viridis", **({"vmin": 0, "vmax": 1} if ink else {}))
    highest = "" if ink else f" ≤ {float(image.max()):.2g}"
    ax.set(xticks=[], yticks=[])
    ax.set_title(title + highest, fontsize=8)


def _digits() -> list[Line2D]:
    looks = zip(range(10), COLOURS, MARKERS, strict=True)
    return [Line2D([], [], color=c, marker=m, linestyle="", markersize=4, label=str(d)) for d, c, m in looks]
