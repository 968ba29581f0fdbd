"""The look that all pictures share, and the one place that knows matplotlib is optional.

Colours are Okabe & Ito's (2008), told apart with any colour vision; no picture relies on colour alone, so each reads in
grey print too, by lightness, hatching, line style or marker. Figures are made without pyplot: nothing is registered,
leaked or left behind in the user's settings, and no display is needed. For a pyplot figure, pass one of its axes.

Hand a figure to whatever logger is there, or write it as a PNG file.

Loggers are told apart by what they can do, so none of their packages is imported: TensorBoard's experiment has
`add_figure`, the Weights & Biases logger `log_image`, and an MLflow logger a `run_id` and a client with
`log_figure(run_id, figure, file)`.
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
    from matplotlib.axes import Axes
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
    """Say how to install matplotlib where it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            'Pictures need matplotlib, which is not installed: pip install "lightning-bayes[recipes]".'
        ) from error


@contextmanager
def canvas(
    ax: Any = None, panels: int = 1, size: tuple[float, float] = (4.2, 4.2), rows: int = 1
) -> Iterator[tuple["Figure", Any]]:
    """A figure and its axes in the house style: one Axes, or an array of `panels`, and of `rows` of them where there
    are several. The user's settings are put back.

    `size` is that of one panel, in inches. A given `ax` is drawn into, its figure and layout left alone.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        if ax is None:
            figure = Figure(figsize=(size[0] * panels, size[1] * rows), layout="constrained", dpi=120)
            ax = figure.subplots(rows, panels)
        else:
            given = np.asarray(ax, dtype=object).reshape(-1)
            if not all(isinstance(axis, Axes) for axis in given):
                raise TypeError(f"ax must be {'a matplotlib Axes' if panels == 1 else 'Axes'}, got {format_value(ax)}.")
            if len(given) != rows * panels:
                raise ValueError(f"ax must hold {rows * panels} Axes, one per panel, got {len(given)}.")
            ax = given[0] if rows * panels == 1 else given
        yield (ax if rows * panels == 1 else ax.flat[0]).figure, ax


def to_numpy(x: Tensor) -> np.ndarray:
    """A tensor from any device, of any float type, as float64."""
    return x.detach().cpu().double().numpy()


def check_each(name: str, value: Any, of: str, n: int) -> None:
    """Refuse what does not have one value for each of `n`: `[n]` or `[n, 1]`."""
    if list(value.shape) not in ([n], [n, 1]):
        raise ValueError(f"{name} must have a value for each of the {n} of {of}, got shape {list(value.shape)}.")


def draw_diagonal(ax: "Axes", label: str) -> None:
    """The line of perfect calibration."""
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1.2, label=label)


def unit_square(ax: "Axes", xlabel: str, ylabel: str) -> None:
    """Both axes from 0 to 1, labelled, equally scaled, with a light grid."""
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel=xlabel, ylabel=ylabel, aspect="equal")
    ax.grid(color="0.9", linewidth=0.6)


def log_figure(loggers: Any, name: str, figure: "Figure", step: int, directory: str | Path) -> Path | None:
    """Send `figure` to every logger that takes figures; if none does, write `directory/name_step.png`.

    Args:
        loggers: a logger, several, or None.
        name: of the figure; slashes make groups in a logger, and folders on disk.
        figure: a matplotlib figure; it stays open.
        step: the trainer's global step.
        directory: where the PNG goes, made if need be.

    Returns:
        The path of the PNG, or None if a logger took the figure. Call it on rank zero only.
    """
    text("name", name, "the figure's name")
    count("step", step, 0)
    if not hasattr(figure, "savefig"):
        raise TypeError(f"figure must be a matplotlib Figure, got {format_value(figure)}")
    instance("directory", directory, (str, PathLike), "a path")
    loggers = list(loggers) if isinstance(loggers, Iterable) else [loggers]
    taken = [_send(logger, name, figure, step) for logger in loggers]
    if any(taken):
        return None
    path = Path(directory) / _file_name(name, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _send(logger: Any, name: str, figure: "Figure", step: int) -> bool:
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[figure], step=step)
        return True
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):
        experiment.add_figure(name, figure, global_step=step, close=False)
        return True
    # Comet's experiment has a log_figure of another signature, and no run_id.
    if hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):
        experiment.log_figure(logger.run_id, figure, _file_name(name, step))
        return True
    return False


def _file_name(name: str, step: int) -> str:
    return f"{name}_{step:06d}.png"
