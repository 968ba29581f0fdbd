"""A figure goes to every logger that accepts figures, or to a PNG file if there is none."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from PIL import Image

from lightning_bayes.plots import log_figure


@pytest.fixture
def figure() -> Figure:
    figure = Figure(figsize=(2, 1), dpi=100)
    figure.subplots().plot([0, 1])
    return figure


class Recorder:
    """Records the calls of its one method."""

    def __init__(self, method: str) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        setattr(self, method, lambda *args, **kwargs: self.calls.append((args, kwargs)))


class LoggerWith:
    def __init__(self, experiment: Any, **attributes: Any) -> None:
        self.experiment = experiment
        self.__dict__.update(attributes)


def test_tensorboard_gets_add_figure(figure: Figure, tmp_path: Path) -> None:
    writer = Recorder("add_figure")
    assert log_figure(LoggerWith(writer), "test/reliability", figure, 7, tmp_path) is None
    assert writer.calls == [(("test/reliability", figure), {"global_step": 7, "close": False})]
    assert list(tmp_path.iterdir()) == []


def test_weights_and_biases_gets_log_image(figure: Figure, tmp_path: Path) -> None:
    logger = Recorder("log_image")
    assert log_figure(logger, "reliability", figure, 7, tmp_path) is None
    assert logger.calls == [((), {"key": "reliability", "images": [figure], "step": 7})]


def test_mlflow_gets_log_figure_with_its_run(figure: Figure, tmp_path: Path) -> None:
    client = Recorder("log_figure")
    assert log_figure(LoggerWith(client, run_id="abc"), "test/reliability", figure, 7, tmp_path) is None
    assert client.calls == [(("abc", figure, "test/reliability_000007.png"), {})]


def test_elsewhere_a_png_is_written(figure: Figure, tmp_path: Path) -> None:
    csv, comet = CSVLogger(tmp_path / "csv"), LoggerWith(Recorder("log_figure"))
    for step, loggers in enumerate((None, [], csv, [csv], comet)):
        path = log_figure(loggers, "test/reliability", figure, step, tmp_path / "figures")
        assert path == tmp_path / "figures" / "test" / f"reliability_00000{step}.png"
        with Image.open(path) as image:
            assert (image.format, image.size) == ("PNG", (200, 100))
    assert comet.experiment.calls == []  # Comet's log_figure has another signature than MLflow's


def test_every_logger_gets_the_figure(figure: Figure, tmp_path: Path) -> None:
    writer, wandb = Recorder("add_figure"), Recorder("log_image")
    loggers = [LoggerWith(writer), CSVLogger(tmp_path), wandb]
    assert log_figure(loggers, "reliability", figure, 0, tmp_path / "figures") is None
    assert (len(writer.calls), len(wandb.calls)) == (1, 1)
    assert not (tmp_path / "figures").exists()


def test_a_real_tensorboard_run_holds_the_picture(figure: Figure, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    assert log_figure(logger, "test/reliability", figure, 7, tmp_path / "figures") is None
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir).Reload()
    (image,) = events.Images("test/reliability")
    assert (image.step, image.width, image.height) == (7, 200, 100)
