"""What a network with an output at every pixel sees, believes, and does not know.

A row for each image: the input, the truth, the prediction, and its two uncertainties, summed over the outputs of a
pixel. Of classes they are variances of probabilities; of real values standard deviations are shown, beside the error
that was made. Classes have a colour and their number, pixels without a known label are grey.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_bayes.arguments import format_value
from lightning_bayes.metrics.functional.inputs import check_tensors
from lightning_bayes.plots.figure import canvas, to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIELDS = ("epistemic", "aleatoric", "probs", "mean")


def uncertainty_maps(
    image: Tensor, prediction: Any, target: Tensor | None = None, ax: Any = None
) -> tuple["Figure", np.ndarray]:
    """Maps of the `Prediction` for the images `[B, 1, H, W]` or `[B, 3, H, W]`, with the targets where they are known:
    classes `[B, H, W]`, or real values in the shape of the prediction's mean. Returns (fig, axes `[B, panels]`)."""
    _check(image, prediction, target)
    panels = _class_panels(prediction, target) if prediction.probs is not None else _value_panels(prediction, target)
    with canvas(ax, panels=len(panels) + 1, size=(2.1, 2.0), rows=len(image)) as (figure, axes):
        axes = axes.reshape(len(image), -1)
        for row, picture in zip(axes, to_numpy(image), strict=True):
            row[0].imshow(_as_picture(picture), cmap="gray")
        for column, (title, values, look) in enumerate(panels, start=1):
            drawn = [ax.imshow(value, **look) for ax, value in zip(axes[:, column], to_numpy(values), strict=True)]
            axes[0, column].set_title(title)
            if "cmap" in look and look["cmap"] == "cividis":
                figure.colorbar(drawn[0], ax=list(axes[:, column]), shrink=0.9)
            else:
                for ax, value in zip(axes[:, column], to_numpy(values), strict=True):
                    _number_classes(ax, value, look)
        axes[0, 0].set_title("input")
        for ax in axes.flat:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
    return figure, axes


def _check(image: Tensor, prediction: Any, target: Tensor | None) -> None:
    check_tensors(image=image)
    if image.ndim != 4 or image.shape[1] not in (1, 3) or not len(image):
        raise ValueError(f"image must be [B, 1, H, W] or [B, 3, H, W], got shape {list(image.shape)}.")
    if not all(hasattr(prediction, name) for name in _FIELDS):
        raise TypeError(f"prediction must be a Prediction, as posterior.predict gives, got {format_value(prediction)}.")
    shape = list(prediction.epistemic.shape)
    if len(shape) != 4 or shape[0] != len(image):
        raise ValueError(f"prediction must be of the {len(image)} images, [B, C, H, W], got shape {shape}.")
    if target is not None:
        check_tensors(target=target)
        expected = shape[:1] + shape[2:] if prediction.probs is not None else shape
        if list(target.shape) != expected:
            raise ValueError(f"target must have shape {expected} for this prediction, got {list(target.shape)}.")


def _class_panels(prediction: Any, target: Tensor | None) -> list[tuple[str, Tensor, dict[str, Any]]]:
    C = prediction.probs.shape[1]
    classes = {"cmap": _class_colours(C), "vmin": -0.5, "vmax": C - 0.5, "interpolation": "nearest"}
    truth = [] if target is None else [("truth", target.where((target >= 0) & (target < C), -1), classes)]
    return [
        *truth,
        ("prediction", prediction.probs.argmax(1), classes),
        _map("epistemic", prediction.epistemic.sum(1)),
        _map("aleatoric", prediction.aleatoric.sum(1)),
    ]


def _value_panels(prediction: Any, target: Tensor | None) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """The first channel's mean, and sums over channels; the noise only where it is not the same everywhere."""
    values = prediction.mean if target is None else torch.cat([prediction.mean, target])
    grey = {"cmap": "gray", "vmin": float(values.min()), "vmax": float(values.max())}
    noise = prediction.aleatoric.sum(1).sqrt()
    uncertainties = [_map("epistemic σ", prediction.epistemic.sum(1).sqrt())]
    uncertainties += [_map("aleatoric σ", noise)] if noise.max() > 1.001 * noise.min() else []
    mean = ("prediction", prediction.mean[:, 0], grey)
    if target is None:
        return [mean, *uncertainties]
    error = (target - prediction.mean).square().sum(1).sqrt()
    return [("truth", target[:, 0], grey), mean, _map("|error|", error), *uncertainties]


def _map(title: str, values: Tensor) -> tuple[str, Tensor, dict[str, Any]]:
    return title, values, {"cmap": "cividis", "vmin": 0.0, "vmax": float(values.max())}


def _class_colours(n: int) -> Any:
    """The first class, which is often the background, is white; what has no known class is grey."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    cycle = [colormaps["tab20"](k % 20) for k in (*range(0, 14, 2), *range(16, 20, 2), *range(1, 14, 2), 17, 19)]
    return ListedColormap(["white", *(cycle[k % len(cycle)] for k in range(n - 1))]).with_extremes(under="0.75")


def _number_classes(ax: "Axes", value: np.ndarray, look: dict[str, Any]) -> None:
    """The number of each class but the first, in the middle of its pixels."""
    if look["cmap"] == "gray":
        return
    for c in np.unique(value):
        rows, columns = np.nonzero(value == c)
        if c > 0 and len(rows) >= 0.01 * value.size:
            nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
            box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
            ax.text(columns[nearest], rows[nearest], f"{int(c)}", ha="center", va="center", fontsize=7, bbox=box)


def _as_picture(image: np.ndarray) -> np.ndarray:
    """From 0 to 1.  # [1 or 3, H, W] -> [H, W] or [H, W, 3]"""
    low, high = image.min(), image.max()
    scaled = (image - low) / (high - low if high > low else 1.0)
    return scaled[0] if len(scaled) == 1 else np.moveaxis(scaled, 0, -1)
