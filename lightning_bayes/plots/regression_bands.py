"""A one-dimensional regression with its uncertainty: mean ± 1, 2, 3 σ, for each source of it and for both.

Epistemic uncertainty is what more data would take away, aleatoric the noise that stays; their variances add up to the
total, the predictive of a new observation.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from lightning_bayes.metrics.functional.inputs import check_tensors
from lightning_bayes.plots.figure import BLUE, GREY, VERMILION, canvas, check_each, to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    _check(x, mean, epistemic, aleatoric, x_data, y_data)
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
        handles, labels = axes[-1].get_legend_handles_labels()
        if ax is None:
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        else:  # the rest of a given figure is not ours
            axes[-1].legend(loc="best")
    return figure, axes


def _check(
    x: Tensor, mean: Tensor, epistemic: Tensor, aleatoric: Tensor, x_data: Tensor | None, y_data: Tensor | None
) -> None:
    check_tensors(x=x, mean=mean, epistemic=epistemic, aleatoric=aleatoric)
    if not x.numel() or list(x.shape) not in ([len(x)], [len(x), 1]):
        raise ValueError(f"x must be [N] or [N, 1], got shape {list(x.shape)}.")
    for name, value in (("mean", mean), ("epistemic", epistemic), ("aleatoric", aleatoric)):
        check_each(name, value, "x", len(x))
        if name != "mean" and bool((value < 0).any()):
            raise ValueError(f"{name} is a variance and must not be negative.")
    if (x_data is None) != (y_data is None):
        raise ValueError("x_data and y_data belong together: give both, or neither.")
    if x_data is not None and y_data is not None:
        check_tensors(x_data=x_data, y_data=y_data)
        if x_data.numel() != y_data.numel():
            raise ValueError(
                f"x_data and y_data must have one shape, got {list(x_data.shape)} and {list(y_data.shape)}."
            )


def _draw_bands(ax: "Axes", xs: np.ndarray, mu: np.ndarray, std: np.ndarray, colour: str) -> None:
    from matplotlib.colors import to_rgb

    for k, strength in ((3, 0.18), (2, 0.4), (1, 0.65)):  # opaque tints, from the outside in
        tint = 1 - strength * (1 - np.array(to_rgb(colour)))
        ax.fill_between(xs, mu - k * std, mu + k * std, facecolor=tint, edgecolor="none", label=f"± {k} σ")
    ax.plot(xs, mu, color="black", linewidth=1.4, label="mean")
