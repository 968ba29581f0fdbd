"""The pictures: shapes and settings that cannot be drawn."""

from typing import Any

import torch

from bad_calls.cases import Of, Table
from lightning_bayes import Prediction, plots

HALF, LABELS = torch.full((2, 2), 0.5), torch.tensor([0, 1])
ZEROS, ONES = torch.zeros(4), torch.ones(4)
FLAGS = torch.tensor([False, True, True, False])
GRID = {"x": torch.arange(3.0), "y": torch.arange(2.0), "probs": torch.full((2, 3, 2), 0.5)}
GRID |= {"epistemic": torch.ones(2, 3), "aleatoric": torch.ones(2, 3)}
DATA: dict[str, dict[str, Any]] = {
    "reliability_diagram": {"probs": HALF, "target": LABELS},
    "regression_calibration_curve": {"mean": ZEROS, "variance": ONES, "target": ZEROS},
    "risk_coverage_curve": {"confidence": ONES, "correct": FLAGS},
    "ood_histogram": {"score": ONES, "is_ood": FLAGS},
    "regression_bands": {"x": ZEROS, "mean": ZEROS, "epistemic": ONES, "aleatoric": ONES},
    "decision_map": GRID,
}
EACH = torch.ones(2, 3, 4, 5)
MAPS = Prediction(EACH, EACH, torch.ones(2, 4, 5), probs=EACH / 3)


def _axes(n: int) -> Any:
    from matplotlib.figure import Figure

    return Figure().subplots(1, n)


def _table(name: str) -> Table:
    function, given = getattr(plots, name), DATA[name]
    table = Table(f"plots.{name}", lambda t, **bad: function(**{**given, **bad}), function)
    for argument in given:
        table(argument, None, "must be a tensor, got None")
        table(argument, Of(lambda t, a=argument: given[a].numpy(), "numpy"), "must be a tensor, got a ndarray")
    table("ax", "left", "must be", "Axes", "got 'left'")
    table("ax", 3, "must be", "Axes", "got 3")
    return table


reliability, calibration, risk, histogram, bands, mapped = map(_table, DATA)
for _curve in (reliability, calibration, histogram):
    for _bad in (0, 2.5, "ten", None):
        _curve("n_bins", _bad, "must be a whole number of at least")
reliability("norm", "l3", "unknown norm 'l3'")
reliability("binning", "log", "unknown binning 'log'")
reliability("probs", torch.full((3, 2), 0.5), "got probs [3, 2] and target [2]")
calibration("norm", "l3", "unknown norm 'l3'")
calibration("variance", -ONES, "must be positive")
calibration("df", 2 * ONES, "more than 2")
calibration("mean", torch.zeros(3), "must have one shape")
risk("confidence", torch.zeros(3), "must have one shape, got [3] and [4]")
histogram("score", torch.zeros(3), "must have one shape, got [3] and [4]")

for _argument in ("mean", "epistemic", "aleatoric"):
    bands(_argument, torch.ones(3), "must have a value for each of the 4 of x, got shape [3]")
    bands(_argument, torch.ones(4, 2), "must have a value for each of the 4 of x, got shape [4, 2]")
bands("x", torch.zeros(4, 2), "must be [N] or [N, 1], got shape [4, 2]")
bands("x", torch.zeros(0), "must be [N] or [N, 1], got shape [0]", mean=torch.zeros(0))
bands("epistemic", -ONES, "must not be negative")
bands("aleatoric", -ONES, "must not be negative")
bands("x_data", ZEROS, "belong together", "y_data")
bands("y_data", ZEROS, "belong together", "x_data")
bands("x_data", torch.zeros(2), "must have one shape, got [2] and [4]", "y_data", y_data=ZEROS)
bands("x_data", [0.0], "must be a tensor, got [0.0]", y_data=ZEROS)
bands("ax", Of(lambda t: _axes(2), "two"), "must hold 3 Axes, one per panel, got 2")
risk("ax", Of(lambda t: _axes(2), "two"), "must hold 1 Axes, one per panel, got 2")
bands("ax", [1, 2, 3], "must be", "Axes", "got [1, 2, 3]")

mapped("probs", torch.full((5, 2), 0.5), "must be [H, W, C] or [H·W, C] for 2 × 3 points, got shape [5, 2]")
mapped("probs", torch.full((6,), 0.5), "must be [H, W, C] or [H·W, C] for 2 × 3 points, got shape [6]")
mapped("probs", torch.ones(2, 3, 1), "two classes", "got shape [2, 3, 1]")
mapped("epistemic", torch.ones(5), "must be [H, W] or [H·W] for 2 × 3 points, got shape [5]")
mapped("aleatoric", torch.ones(3, 3), "must be [H, W] or [H·W] for 2 × 3 points, got shape [3, 3]")
mapped("x", torch.zeros(3, 2), "must be a vector of at least two, got shape [3, 2]")
mapped("y", torch.tensor(1.0), "must be a vector of at least two, got shape []")
mapped("y", torch.zeros(1), "must be a vector of at least two, got shape [1]")
mapped("points", torch.zeros(4, 3), "must be [N, 2], got shape [4, 3]", labels=torch.zeros(4))
mapped("points", [[0.0, 0.0]], "must be a tensor", labels=torch.zeros(1))
mapped("labels", torch.zeros(4), "needs points=", "points")
mapped("labels", torch.zeros(3), "a value for each of the 4 of points, got shape [3]", points=torch.zeros(4, 2))


def _log(t: Any, **bad: Any) -> Any:
    from matplotlib.figure import Figure

    good = {"loggers": None, "name": "figure", "figure": Figure(), "step": 0, "directory": t.folder}
    return plots.log_figure(**{**good, **bad})


log = Table("plots.log_figure", _log, plots.log_figure)
log("figure", None, "must be a matplotlib Figure, got None")
log("figure", "figure.png", "must be a matplotlib Figure, got 'figure.png'")
log("name", "", "must be the figure's name, got ''")
log("name", None, "must be the figure's name, got None")
log("step", "last", "must be a whole number of at least 0, got 'last'")
log("step", 1.5, "must be a whole number of at least 0, got 1.5")
log("directory", None, "must be a path, got None")
log("directory", 3, "must be a path, got 3")
log.anything_goes("loggers", "what takes no figures is passed over, and the figure is written to a file")

maps = Table(
    "plots.uncertainty_maps",
    lambda t, **bad: plots.uncertainty_maps(**{"image": torch.ones(2, 1, 4, 5), "prediction": MAPS, **bad}),
    plots.uncertainty_maps,
)
maps("image", None, "must be a tensor, got None")
maps("image", torch.ones(2, 2, 4, 5), "must be [B, 1, H, W] or [B, 3, H, W], got shape [2, 2, 4, 5]")
maps("image", torch.ones(3, 1, 4, 5), "must be of the 3 images", "got shape [2, 3, 4, 5]")
maps("prediction", None, "must be a Prediction", "got None")
maps("prediction", torch.ones(2, 3, 4, 5), "must be a Prediction")
maps("target", [0], "must be a tensor, got [0]")
maps("target", torch.zeros(2, 3, 4, 5), "must have shape [2, 4, 5] for this prediction, got [2, 3, 4, 5]")
maps("ax", "left", "must be", "Axes", "got 'left'")
maps("ax", Of(lambda t: _axes(2), "two"), "must hold 8 Axes, one per panel, got 2")

PLOTS = [reliability, calibration, risk, histogram, bands, mapped, log, maps]
