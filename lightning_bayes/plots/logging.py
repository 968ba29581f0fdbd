"""Hand a figure to whatever logger is there, or write it as a PNG file.

Loggers are told apart by what they can do, so none of their packages is imported: TensorBoard's experiment has
`add_figure`, the Weights & Biases logger `log_image`, and an MLflow logger a `run_id` and a client with
`log_figure(run_id, figure, file)`.
"""

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_bayes.arguments import count, instance, shown, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        raise TypeError(f"figure must be a matplotlib Figure, got {shown(figure)}")
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
