"""Plots of predictions and their two uncertainties: epistemic, which more data would reduce, and aleatoric, the noise.

- `regression_bands`: a one-dimensional regression, as mean ± 1, 2, 3 σ for each of the two uncertainties and for their
  total, which is the predictive of a new observation.
- `decision_map`: a two-dimensional classifier. Class regions fade as the confidence falls, and are labelled with their
  class number. Epistemic uncertainty is high away from the data, aleatoric uncertainty where classes overlap.
- `uncertainty_maps`: a network with an output at every pixel. Each row shows one image with its target, its prediction,
  and the uncertainties summed over the outputs of a pixel: variances of class probabilities, or standard deviations of
  real values.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_bayes.arguments import format_value
from lightning_bayes.metrics.functional.statistics import check_tensors
from lightning_bayes.plots.figure import BLUE, CLASS_COLOURS, CLASS_MARKERS, GREY, VERMILION, canvas, to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[str, Tensor, dict[str, Any]]  # title, values [B, H, W], arguments of imshow


def regression_bands(
    x: Tensor,
    mean: Tensor,
    epistemic: Tensor,
    aleatoric: Tensor,
    x_data: Tensor | None = None,
    y_data: Tensor | None = None,
    ax: "Sequence[Axes] | None" = None,
) -> tuple["Figure", np.ndarray]:
    """Three panels, epistemic, aleatoric and total, from variances at the inputs `x`, all `[N]` or `[N, 1]`."""
    _check_bands(x, mean, epistemic, aleatoric, x_data, y_data)
    order = np.argsort(to_numpy(x).reshape(-1))
    xs, mu, var_e, var_a = (to_numpy(v).reshape(-1)[order] for v in (x, mean, epistemic, aleatoric))  # [N]
    with canvas(ax, panels=3, size=(3.2, 3.2)) as (figure, axes):
        sources = (("epistemic", var_e, BLUE), ("aleatoric", var_a, VERMILION), ("total", var_e + var_a, GREY))
        for panel, (name, variance, colour) in zip(axes, sources, strict=True):
            _draw_bands(panel, xs, mu, np.sqrt(variance), colour)
            if x_data is not None and y_data is not None:
                marker = {"s": 10, "facecolor": "white", "edgecolor": "black", "linewidth": 0.7, "zorder": 3}
                panel.scatter(to_numpy(x_data).reshape(-1), to_numpy(y_data).reshape(-1), label="data", **marker)
            panel.set(title=name, xlabel="x", xlim=(xs[0], xs[-1]))
        axes[0].set_ylabel("y")
        limits = np.array([panel.get_ylim() for panel in axes])  # [3, 2]
        for panel in axes:
            panel.set_ylim(limits[:, 0].min(), limits[:, 1].max())
        if ax is None:
            handles, labels = axes[-1].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        else:  # the user has passed axes: leave the rest of their figure unchanged
            axes[-1].legend(loc="best")
    return figure, axes


def _check_bands(
    x: Tensor, mean: Tensor, epistemic: Tensor, aleatoric: Tensor, x_data: Tensor | None, y_data: Tensor | None
) -> None:
    check_tensors(x=x)
    n = x.numel()
    check_shape("x", x, "be [N] or [N, 1]", *([[n], [n, 1]] if n else []))
    for name, value in (("mean", mean), ("epistemic", epistemic), ("aleatoric", aleatoric)):
        check_one_each(name, value, "x", n)
        if name != "mean" and bool((value < 0).any()):
            raise ValueError(f"{name} is a variance and must not be negative.")
    if (x_data is None) != (y_data is None):
        raise ValueError("x_data and y_data belong together: pass both, or neither.")
    if x_data is not None and y_data is not None:
        check_tensors(x_data=x_data, y_data=y_data)
        if x_data.numel() != y_data.numel():
            raise ValueError(
                f"x_data and y_data must have one shape, got {list(x_data.shape)} and {list(y_data.shape)}."
            )


def _draw_bands(ax: "Axes", xs: np.ndarray, mu: np.ndarray, std: np.ndarray, colour: str) -> None:
    from matplotlib.colors import to_rgb

    for k, strength in ((3, 0.18), (2, 0.4), (1, 0.65)):  # opaque tints, drawn from the widest band to the narrowest
        tint = 1 - strength * (1 - np.array(to_rgb(colour)))
        ax.fill_between(xs, mu - k * std, mu + k * std, facecolor=tint, edgecolor="none", label=f"± {k} σ")
    ax.plot(xs, mu, color="black", linewidth=1.4, label="mean")


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

    `probs` is `[H, W, C]` or `[H·W, C]`, the uncertainties are `[H, W]` or `[H·W]`, with y as the slower axis, as in
    the outputs of a network for the inputs `torch.cartesian_prod(y, x).flip(1)`. `points` `[N, 2]` and `labels` `[N]`
    are data to draw on the map.
    """
    _check_map(x, y, probs, epistemic, aleatoric, points, labels)
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


def _check_map(
    x: Tensor,
    y: Tensor,
    probs: Tensor,
    epistemic: Tensor,
    aleatoric: Tensor,
    points: Tensor | None,
    labels: Tensor | None,
) -> None:
    check_tensors(x=x, y=y, probs=probs)
    for name, axis in (("x", x), ("y", y)):
        if axis.ndim != 1 or len(axis) < 2:
            raise ValueError(f"{name} must be a vector of at least two, got shape {list(axis.shape)}.")
    H, W, C = len(y), len(x), probs.shape[-1] if probs.ndim else 0
    check_shape("probs", probs, f"be [H, W, C] or [H·W, C] for {H} × {W} points", [H, W, C], [H * W, C])
    if C < 2:
        raise ValueError(f"probs must have at least two classes, got shape {list(probs.shape)}.")
    for name, value in (("epistemic", epistemic), ("aleatoric", aleatoric)):
        check_shape(name, value, f"be [H, W] or [H·W] for {H} × {W} points", [H, W], [H * W])
    if points is not None:
        check_tensors(points=points)
        check_shape("points", points, "be [N, 2]", [*points.shape[:1], 2])
    if labels is not None:
        if points is None:
            raise ValueError("labels= needs points=, the data that it labels.")
        check_one_each("labels", labels, "points", len(points))


def _draw_classes(ax: "Axes", xs: np.ndarray, ys: np.ndarray, p: np.ndarray, data: np.ndarray) -> None:
    from matplotlib.colors import to_rgb

    n_classes = p.shape[-1]
    winner, confidence = p.argmax(-1), p.max(-1)  # [H, W]
    colours = np.array([to_rgb(_cycle(CLASS_COLOURS, c)) for c in range(n_classes)])  # [C, 3]
    strength = 0.15 + 0.6 * (confidence - 1 / n_classes)[..., None] / (1 - 1 / n_classes)  # [H, W, 1]
    ax.pcolormesh(xs, ys, 1 - strength * (1 - colours[winner]), shading="nearest", rasterized=True)
    data_cells = np.stack([np.searchsorted(xs, data[:, 0]), np.searchsorted(ys, data[:, 1])], axis=1)  # [N, 2]
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 4}
    for c in range(n_classes):
        region = winner == c  # [H, W]
        if region.any() and not region.all():
            margin = p[..., c] - np.delete(p, c, axis=-1).max(-1)  # [H, W] zero on the border of the region
            ax.contour(xs, ys, margin, levels=[0.0], colors="black", linewidths=1.0)
        if region.any():
            column, row = _roomiest_cell(region, data_cells)
            ax.text(xs[column], ys[row], f"class {c}", bbox=label_box(0.2, "0.4", 0.85), **text)
    ax.set_title("predicted class")


def _roomiest_cell(region: np.ndarray, data: np.ndarray) -> np.ndarray:
    """The cell (column, row) of a region `[H, W]` farthest from its border and from the data, for the class label."""
    stride = max(1, max(region.shape) // 30)  # a coarse grid is enough
    inside = np.pad(region[::stride, ::stride], 1).T  # padded, because the frame of the map also counts as a border
    cells = np.argwhere(inside)  # [M, 2]
    obstacles = np.concatenate([np.argwhere(~inside), data / stride + 1])  # [K, 2]
    room = ((cells[:, None] - obstacles) ** 2).sum(-1).min(1)  # [M]
    return (cells[room.argmax()] - 1) * stride


def _draw_points(ax: "Axes", points: np.ndarray, labels: np.ndarray) -> None:
    for c in np.unique(labels):
        x, y = points[labels == c].T  # [n] each
        style: dict[str, Any] = {"marker": _cycle(CLASS_MARKERS, c), "facecolor": _cycle(CLASS_COLOURS, c)}
        ax.scatter(x, y, s=14, edgecolor="white", linewidth=0.6, zorder=3, **style)


def _cycle(options: tuple[str, ...], c: int) -> str:
    return options[c % len(options)]


def uncertainty_maps(
    image: Tensor, prediction: Any, target: Tensor | None = None, ax: Any = None
) -> tuple["Figure", np.ndarray]:
    """Maps of a `Prediction` for the images `[B, 1, H, W]` or `[B, 3, H, W]`. Returns (fig, axes `[B, panels]`).

    `target` contains classes `[B, H, W]`, or real values in the shape of the prediction's mean. Pixels without a known
    class are grey.
    """
    _check_maps(image, prediction, target)
    panels = _class_panels(prediction, target) if prediction.probs is not None else _value_panels(prediction, target)
    with canvas(ax, panels=len(panels) + 1, size=(2.1, 2.0), rows=len(image)) as (figure, axes):
        axes = axes.reshape(len(image), -1)
        axes[0, 0].set_title("input")
        for row, picture in zip(axes, to_numpy(image), strict=True):
            row[0].imshow(_as_picture(picture), cmap="gray")
        for column, (title, values, style) in zip(axes.T[1:], panels, strict=True):
            column[0].set_title(title)
            for ax, value in zip(column, to_numpy(values), strict=True):
                picture = ax.imshow(value, **style)
                if prediction.probs is not None and style["cmap"] != "cividis":
                    _number_classes(ax, value)
            if style["cmap"] == "cividis":
                figure.colorbar(picture, ax=list(column), shrink=0.9)
        for ax in axes.flat:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
    return figure, axes


def _check_maps(image: Tensor, prediction: Any, target: Tensor | None) -> None:
    check_tensors(image=image)
    if image.ndim != 4 or image.shape[1] not in (1, 3) or not len(image):
        raise ValueError(f"image must be [B, 1, H, W] or [B, 3, H, W], got shape {list(image.shape)}.")
    if not all(hasattr(prediction, name) for name in ("epistemic", "aleatoric", "probs", "mean")):
        raise TypeError(
            f"prediction must be a Prediction, as posterior.predict returns, got {format_value(prediction)}."
        )
    shape = list(prediction.epistemic.shape)
    if len(shape) != 4 or shape[0] != len(image):
        raise ValueError(f"prediction must be of the {len(image)} images, [B, C, H, W], got shape {shape}.")
    if target is not None:
        check_tensors(target=target)
        expected = shape[:1] + shape[2:] if prediction.probs is not None else shape
        if list(target.shape) != expected:
            raise ValueError(f"target must have shape {expected} for this prediction, got {list(target.shape)}.")


def _class_panels(prediction: Any, target: Tensor | None) -> list[Panel]:
    C = prediction.probs.shape[1]
    classes = {"cmap": _class_colours(C), "vmin": -0.5, "vmax": C - 0.5, "interpolation": "nearest"}
    truth = [] if target is None else [("truth", target.where((target >= 0) & (target < C), -1), classes)]
    return [
        *truth,
        ("prediction", prediction.probs.argmax(1), classes),
        _uncertainty_panel("epistemic", prediction.epistemic.sum(1)),
        _uncertainty_panel("aleatoric", prediction.aleatoric.sum(1)),
    ]


def _value_panels(prediction: Any, target: Tensor | None) -> list[Panel]:
    """The mean of the first channel, and sums over channels. An aleatoric uncertainty that is the same everywhere is
    not drawn."""
    values = prediction.mean if target is None else torch.cat([prediction.mean, target])
    grey = {"cmap": "gray", "vmin": float(values.min()), "vmax": float(values.max())}
    noise = prediction.aleatoric.sum(1).sqrt()
    uncertainties = [_uncertainty_panel("epistemic σ", prediction.epistemic.sum(1).sqrt())]
    uncertainties += [_uncertainty_panel("aleatoric σ", noise)] if noise.max() > 1.001 * noise.min() else []
    mean = ("prediction", prediction.mean[:, 0], grey)
    if target is None:
        return [mean, *uncertainties]
    error = (target - prediction.mean).square().sum(1).sqrt()
    return [("truth", target[:, 0], grey), mean, _uncertainty_panel("|error|", error), *uncertainties]


def _uncertainty_panel(title: str, values: Tensor) -> Panel:
    return title, values, {"cmap": "cividis", "vmin": 0.0, "vmax": float(values.max())}


def _class_colours(n: int) -> Any:
    """A colour map for `n` classes: white for the first, often the background, and grey for pixels without a class."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    cycle = [colormaps["tab20"](k % 20) for k in (*range(0, 14, 2), *range(16, 20, 2), *range(1, 14, 2), 17, 19)]
    return ListedColormap(["white", *(cycle[k % len(cycle)] for k in range(n - 1))]).with_extremes(under="0.75")


def _number_classes(ax: "Axes", value: np.ndarray) -> None:
    """Write the number of each class but the first near the centre of its pixels."""
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "bbox": label_box(0.1, "none", 0.7)}
    for c in np.unique(value):
        rows, columns = np.nonzero(value == c)
        if c > 0 and len(rows) >= 0.01 * value.size:
            nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
            ax.text(columns[nearest], rows[nearest], f"{int(c)}", **text)


def _as_picture(image: np.ndarray) -> np.ndarray:
    """Scale an image to [0, 1].  # [1 or 3, H, W] -> [H, W] or [H, W, 3]"""
    low, high = image.min(), image.max()
    scaled = (image - low) / (high - low if high > low else 1.0)
    return scaled[0] if len(scaled) == 1 else np.moveaxis(scaled, 0, -1)


def check_shape(name: str, value: Tensor, expected: str, *shapes: list[int]) -> None:
    """Raise an error unless `value` is a tensor of one of the `shapes`, which the message calls `expected`."""
    check_tensors(**{name: value})
    if list(value.shape) not in shapes:
        raise ValueError(f"{name} must {expected}, got shape {list(value.shape)}.")


def check_one_each(name: str, value: Tensor, owner: str, n: int) -> None:
    """Raise an error unless `value` is `[n]` or `[n, 1]`, with one value for each element of `owner`."""
    check_shape(name, value, f"have a value for each of the {n} of {owner}", [n], [n, 1])


def label_box(pad: float, edge: str, alpha: float) -> dict[str, Any]:
    """A white box that keeps text readable on top of a picture."""
    return {"boxstyle": f"round,pad={pad}", "facecolor": "white", "edgecolor": edge, "alpha": alpha}
