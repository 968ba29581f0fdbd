"""A two-dimensional classifier seen from above: which class it predicts where, and how unsure it is, and why.

Class regions fade with the confidence in them, are outlined and carry their name; the other two panels are the
uncertainties: epistemic, high away from the data, and aleatoric, high where classes overlap.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from lightning_bayes.metrics.functional.inputs import check_tensors
from lightning_bayes.plots.figure import CLASS_COLOURS, CLASS_MARKERS, canvas, check_each, to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def decision_map(
    x: Tensor,
    y: Tensor,
    probs: Tensor,
    epistemic: Tensor,
    aleatoric: Tensor,
    points: Tensor | None = None,
    labels: Tensor | None = None,
    ax: "Sequence[Axes] | None" = None,
) -> tuple["Figure", np.ndarray]:
    """Three panels, class, epistemic and aleatoric, over the grid of `x` `[W]` and `y` `[H]`.

    `probs` is `[H, W, C]` or `[H·W, C]`, the uncertainties `[H, W]` or `[H·W]`, with y the slower axis:
    what a network returns for `torch.cartesian_prod(y, x).flip(1)`. `points` `[N, 2]` and `labels` `[N]` are
    data to show on the map.
    """
    _check(x, y, probs, epistemic, aleatoric, points, labels)
    xs, ys = to_numpy(x), to_numpy(y)
    p = to_numpy(probs).reshape(len(ys), len(xs), -1)  # [H, W, C]
    data = np.empty((0, 2)) if points is None else to_numpy(points)  # [N, 2]
    with canvas(ax, panels=3, size=(3.7, 3.3)) as (figure, axes):
        _draw_classes(axes[0], xs, ys, p, data)
        for panel, name, uncertainty in zip(axes[1:], ("epistemic", "aleatoric"), (epistemic, aleatoric), strict=True):
            values = to_numpy(uncertainty).reshape(len(ys), len(xs))  # [H, W]
            image = panel.pcolormesh(xs, ys, values, cmap="cividis", shading="nearest", rasterized=True)
            panel.set_title(f"{name} uncertainty")
            figure.colorbar(image, ax=panel)
        for panel in axes:
            if labels is not None:
                _draw_points(panel, data, to_numpy(labels).astype(int))
            panel.set(xlabel="x₁", ylabel="x₂", xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]))
    return figure, axes


def _check(
    x: Tensor,
    y: Tensor,
    probs: Tensor,
    epistemic: Tensor,
    aleatoric: Tensor,
    points: Tensor | None,
    labels: Tensor | None,
) -> None:
    check_tensors(x=x, y=y, probs=probs, epistemic=epistemic, aleatoric=aleatoric)
    for name, axis in (("x", x), ("y", y)):
        if axis.ndim != 1 or len(axis) < 2:
            raise ValueError(f"{name} must be a vector of at least two, got shape {list(axis.shape)}.")
    H, W = len(y), len(x)
    if list(probs.shape[:-1]) not in ([H, W], [H * W]):
        raise ValueError(f"probs must be [H, W, C] or [H·W, C] for {H} × {W} points, got shape {list(probs.shape)}.")
    if probs.shape[-1] < 2:
        raise ValueError(f"probs must have at least two classes, got shape {list(probs.shape)}.")
    for name, value in (("epistemic", epistemic), ("aleatoric", aleatoric)):
        if list(value.shape) not in ([H, W], [H * W]):
            raise ValueError(f"{name} must be [H, W] or [H·W] for {H} × {W} points, got shape {list(value.shape)}.")
    if points is not None:
        check_tensors(points=points)
        if points.ndim != 2 or points.shape[1] != 2:
            raise ValueError(f"points must be [N, 2], got shape {list(points.shape)}.")
    if labels is not None:
        check_tensors(labels=labels)
        if points is None:
            raise ValueError("labels= needs points=, the data that it is of.")
        check_each("labels", labels, "points", len(points))


def _draw_classes(ax: "Axes", xs: np.ndarray, ys: np.ndarray, p: np.ndarray, data: np.ndarray) -> None:
    from matplotlib.colors import to_rgb

    n_classes = p.shape[-1]
    winner, confidence = p.argmax(-1), p.max(-1)  # [H, W]
    colours = np.array([to_rgb(_cycle(CLASS_COLOURS, c)) for c in range(n_classes)])  # [C, 3]
    strength = 0.15 + 0.6 * (confidence - 1 / n_classes)[..., None] / (1 - 1 / n_classes)  # [H, W, 1]
    ax.pcolormesh(xs, ys, 1 - strength * (1 - colours[winner]), shading="nearest", rasterized=True)
    data_cells = np.stack([np.searchsorted(xs, data[:, 0]), np.searchsorted(ys, data[:, 1])], axis=1)  # [N, 2]
    for c in range(n_classes):
        region = winner == c  # [H, W]
        if region.any() and not region.all():
            margin = p[..., c] - np.delete(p, c, axis=-1).max(-1)  # [H, W] zero on the border of the region
            ax.contour(xs, ys, margin, levels=[0.0], colors="black", linewidths=1.0)
        if region.any():
            column, row = _roomiest_cell(region, data_cells)
            box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "0.4", "alpha": 0.85}
            ax.text(xs[column], ys[row], f"class {c}", ha="center", va="center", fontsize=8, bbox=box, zorder=4)
    ax.set_title("predicted class")


def _roomiest_cell(region: np.ndarray, data: np.ndarray) -> np.ndarray:
    """The cell (column, row) of a region `[H, W]` farthest from its border and from data: room for a label."""
    stride = max(1, max(region.shape) // 30)  # a coarse grid will do
    inside = np.pad(region[::stride, ::stride], 1).T  # the frame of the map is a border too
    cells = np.argwhere(inside)  # [M, 2]
    obstacles = np.concatenate([np.argwhere(~inside), data / stride + 1])  # [K, 2]
    room = ((cells[:, None] - obstacles) ** 2).sum(-1).min(1)  # [M]
    return (cells[room.argmax()] - 1) * stride


def _draw_points(ax: "Axes", points: np.ndarray, labels: np.ndarray) -> None:
    for c in np.unique(labels):
        of_class = points[labels == c]  # [n, 2]
        ax.scatter(
            of_class[:, 0],
            of_class[:, 1],
            s=14,
            marker=_cycle(CLASS_MARKERS, c),
            facecolor=_cycle(CLASS_COLOURS, c),
            edgecolor="white",
            linewidth=0.6,
            zorder=3,
        )


def _cycle(options: tuple[str, ...], c: int) -> str:
    return options[c % len(options)]
