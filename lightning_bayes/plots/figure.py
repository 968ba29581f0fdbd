"""The style and the checks that all plots share, and the logging of figures.

Colours are from Okabe & Ito (2008) and work with any colour vision. No plot relies on colour alone: lightness,
hatching, line style and markers keep it readable in greyscale print. Figures do not use pyplot, so they need no display
and change neither pyplot's open figures nor the user's settings. To draw into a pyplot figure, pass one of its axes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_bayes.arguments import count, format_value, instance, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, SKY, VERMILION, GREY = "#0072B2", "#56B4E9", "#D55E00", "#404040"
CLASS_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
CLASS_MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")

_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.title_fontsize": 9.5,
    "legend.framealpha": 0.9,
}


def require_matplotlib() -> None:
    """Raise an error that says how to install matplotlib if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            'Plots need matplotlib, which is not installed: pip install "lightning-bayes[recipes]".'
        ) from error


@contextmanager
def canvas(
    ax: Any = None, panels: int = 1, size: tuple[float, float] = (4.2, 4.2), rows: int = 1
) -> Iterator[tuple["Figure", Any]]:
    """A figure and its axes in the package's style: one Axes, or an array of `rows` × `panels`. The user's matplotlib
    settings are restored on exit.

    `size` is the size of one panel in inches. If `ax` is given, the plot goes there and the figure's layout is kept.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    n = rows * panels
    with matplotlib.rc_context(_SETTINGS):
        if ax is None:
            figure = Figure(figsize=(size[0] * panels, size[1] * rows), layout="constrained", dpi=120)
            ax = figure.subplots(rows, panels)
        else:
            axes = np.asarray(ax, dtype=object).reshape(-1)
            if not all(isinstance(axis, Axes) for axis in axes):
                raise TypeError(f"ax must be {'a matplotlib Axes' if panels == 1 else 'Axes'}, got {format_value(ax)}.")
            if len(axes) != n:
                raise ValueError(f"ax must hold {n} Axes, one per panel, got {len(axes)}.")
            ax = axes[0] if n == 1 else axes
        yield (ax if n == 1 else ax.flat[0]).figure, ax


def to_numpy(x: Tensor) -> np.ndarray:
    """A tensor from any device and of any dtype as a float64 array."""
    return x.detach().cpu().double().numpy()


def log_figure(loggers: Any, name: str, figure: "Figure", step: int, directory: str | Path) -> Path | None:
    """Send `figure` to each logger that accepts figures; if none does, write `directory/name_step.png`.

    Args:
        loggers: a logger, several, or None.
        name: name of the figure; slashes make groups in a logger, and folders on disk.
        figure: a matplotlib figure; it stays open.
        step: the trainer's global step.
        directory: folder of the PNG file, created if necessary.

    Returns:
        The path of the PNG, or None if a logger took the figure. Call it on rank zero only.
    """
    text("name", name, "the figure's name")
    count("step", step, 0)
    if not hasattr(figure, "savefig"):
        raise TypeError(f"figure must be a matplotlib Figure, got {format_value(figure)}")
    instance("directory", directory, (str, PathLike), "a path")
    loggers = list(loggers) if isinstance(loggers, Iterable) else [loggers]
    file_name = f"{name}_{step:06d}.png"
    sent = [_send(logger, name, figure, step, file_name) for logger in loggers]
    if any(sent):
        return None
    path = Path(directory) / file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _send(logger: Any, name: str, figure: "Figure", step: int, file_name: str) -> bool:
    """Send the figure to a logger, and return whether the logger accepted it. Loggers are recognised by their methods,
    so their packages are not imported: Weights & Biases by `log_image`, TensorBoard by `add_figure`, MLflow by `run_id`
    and `log_figure`."""
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[figure], step=step)
        return True
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):
        experiment.add_figure(name, figure, global_step=step, close=False)
        return True
    # Comet's experiment also has a `log_figure`, with another signature, but Comet's logger has no `run_id`.
    if hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):
        experiment.log_figure(logger.run_id, figure, file_name)
        return True
    return False
