"""The plots show their numbers, are labelled, fit their figure and leave the user's matplotlib settings unchanged."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from figure_checks import assert_nothing_clipped, texts
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor

from lightning_bayes import Prediction, metrics, plots
from lightning_bayes.metrics import functional as F
from lightning_bayes.plots import figure as style

GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


PROBS = (2 * randn(300, 3)).softmax(-1)
TARGET = torch.randint(3, (300,), generator=GENERATOR)
MEAN, VARIANCE = randn(200), randn(200).exp()
OBSERVED = MEAN + 2 * randn(200)
SCORE, IS_OOD = 3 * randn(150), torch.arange(150) % 3 == 0
X, Y = torch.linspace(-2, 2, 31), torch.linspace(-1, 1, 21)
GRID = torch.cartesian_prod(Y, X).flip(1)  # [H·W, 2]
GRID_PROBS = (4 * torch.stack([GRID[:, 0], -GRID[:, 0], GRID[:, 1]], dim=1)).softmax(-1)
POINTS, LABELS = randn(30, 2), torch.arange(30) % 3
CURVE_X = torch.linspace(-1, 1, 40)

COVERAGE = ("coverage (share of predictions kept)", "risk (error rate)")
SHARES = ("score (larger: more out-of-distribution)", "share of inputs")
BANDS = (CURVE_X, CURVE_X**2, 0.1 + CURVE_X**2, 0.2 + 0 * CURVE_X, randn(9), randn(9))
MAP = (X, Y, GRID_PROBS, GRID.norm(dim=1), GRID_PROBS.var(1), POINTS, LABELS)
PICTURES: dict[str, tuple[Callable[..., Any], tuple[str, str]]] = {
    "reliability": (partial(plots.reliability_diagram, PROBS, TARGET), ("confidence", "accuracy")),
    "reliability by mass": (
        partial(plots.reliability_diagram, PROBS, TARGET, binning="mass"),
        ("confidence", "accuracy"),
    ),
    "risk-coverage": (partial(plots.risk_coverage_curve, SCORE, IS_OOD), COVERAGE),
    "ood": (partial(plots.ood_histogram, SCORE, IS_OOD), SHARES),
    "regression calibration": (
        partial(plots.regression_calibration_curve, MEAN, VARIANCE, OBSERVED),
        ("expected level", "observed share of targets below"),
    ),
    "bands": (partial(plots.regression_bands, *BANDS), ("x", "y")),
    "map": (partial(plots.decision_map, *MAP), ("x₁", "x₂")),
}
DENSE_PROBS = (2 * randn(2, 3, 6, 5)).softmax(1)
DENSE = Prediction(DENSE_PROBS.square(), DENSE_PROBS, DENSE_PROBS[:, 0], probs=DENSE_PROBS)
VALUES = Prediction(randn(2, 1, 6, 5).exp(), randn(2, 1, 6, 5).exp(), randn(2, 6, 5), mean=randn(2, 1, 6, 5))
each_picture = pytest.mark.parametrize("name", PICTURES)


@each_picture
def test_a_new_figure_is_labelled_fits_and_changes_no_setting_of_the_user(name: str) -> None:
    draw, labels = PICTURES[name]
    before, open_figures = dict(matplotlib.rcParams), plt.get_fignums()
    figure, ax = draw()
    assert isinstance(figure, Figure)
    assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == open_figures
    first = np.atleast_1d(ax)[0]
    assert (first.get_xlabel(), first.get_ylabel()) == labels
    assert_nothing_clipped(figure)


@each_picture
def test_a_given_axes_is_drawn_into(name: str) -> None:
    own = Figure(layout="constrained")
    ax = own.subplots(1, 3 if name in ("bands", "map") else 1)
    figure, returned = PICTURES[name][0](ax=ax)
    assert figure is own
    assert np.atleast_1d(returned)[0] is np.atleast_1d(ax)[0]
    assert np.atleast_1d(ax)[0].has_data()


@pytest.mark.parametrize(("binning", "n_bins"), [("width", 10), ("mass", 6)])
def test_the_reliability_diagram_shows_bins_gaps_and_the_error(binning: Any, n_bins: int) -> None:
    figure, ax = plots.reliability_diagram(PROBS, TARGET, n_bins=n_bins, binning=binning)
    bins = F.reliability_bins(PROBS, TARGET, n_bins=n_bins, binning=binning)
    filled = bins.count > 0
    accuracy, gap = ax.containers
    np.testing.assert_allclose([bar.get_height() for bar in accuracy], bins.accuracy[filled])
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in gap], bins.confidence[filled])
    (strip,) = ax.child_axes
    area = [bar.get_height() * (bar.get_width() if binning == "mass" else 1) for bar in strip.containers[0]]
    np.testing.assert_allclose(area, bins.count[filled] / 300)
    ece = float(F.calibration_error(PROBS, TARGET, n_bins=n_bins, binning=binning))
    assert f"ECE = {ece:.4f}" in texts(figure)


def test_the_risk_coverage_curve_shows_the_curve_its_limits_and_the_area() -> None:
    figure, ax = plots.risk_coverage_curve(SCORE, IS_OOD)
    coverage, risk = F.risk_coverage_curve(SCORE, IS_OOD)
    curve, random_order, best = ax.lines
    np.testing.assert_allclose(curve.get_xydata(), torch.stack([coverage, risk], dim=1))
    assert random_order.get_ydata()[0] == pytest.approx(float(risk[-1]))
    sure = torch.cat([torch.ones(50), torch.zeros(100)])  # a confidence that ranks every error last
    np.testing.assert_allclose(best.get_ydata(), F.risk_coverage_curve(sure, IS_OOD.sort(descending=True)[0])[1])
    assert f"AURC = {float(risk.mean()):.4f}" in texts(figure)


def test_the_risk_coverage_curve_of_many_points_keeps_its_area_and_ends() -> None:
    confidence, correct = randn(5000), randn(5000) > -1
    figure, ax = plots.risk_coverage_curve(confidence, correct)
    x, y = ax.lines[0].get_data()
    assert len(x) <= 2000
    assert (x[0], x[-1], y[-1]) == pytest.approx((1 / 5000, 1, 1 - float(correct.double().mean())))
    assert f"AURC = {float(F.risk_coverage(confidence, correct)):.4f}" in texts(figure)


def test_the_ood_histograms_are_each_ones_share() -> None:
    figure, ax = plots.ood_histogram(SCORE, IS_OOD, n_bins=12)
    edges = np.histogram_bin_edges(SCORE.double(), 12)
    for patch, scores in zip(ax.patches, (SCORE[~IS_OOD], SCORE[IS_OOD]), strict=True):
        values, drawn_edges, _ = patch.get_data()
        np.testing.assert_allclose(drawn_edges, edges)
        np.testing.assert_allclose(values, np.histogram(scores.double(), edges)[0] / len(scores))
    auroc = float(F.ood_detection(SCORE, IS_OOD)["auroc"])
    assert {f"AUROC = {auroc:.4f}", "in-distribution (100)", "out-of-distribution (50)"} <= set(texts(figure))


def test_the_histogram_mode_draws_its_own_cells_merged_to_bars() -> None:
    metric = metrics.OODDetection(resolution=205, score_range=(-5.0, 5.0))
    metric.update(SCORE, IS_OOD)
    figure, ax = metric.plot()
    for patch, scores in zip(ax.patches, (SCORE[~IS_OOD], SCORE[IS_OOD]), strict=True):
        values, edges, _ = patch.get_data()
        assert (len(values), edges[0], edges[-1]) == (41, -5.0, 5.0)  # 5 cells to a bar
        np.testing.assert_allclose(values, np.histogram(scores.double().clamp(-5, 5), edges)[0] / len(scores))
    assert f"AUROC = {float(metric.compute()['auroc']):.4f}" in texts(figure)


def test_the_bands_are_one_two_and_three_sigma_of_each_source() -> None:
    x = torch.tensor([2.0, 0.0, 1.0])  # unsorted
    mean, epistemic, aleatoric = 10 * x, torch.tensor([4.0, 1.0, 9.0]), torch.tensor([12.0, 3.0, 16.0])
    figure, axes = plots.regression_bands(x, mean, epistemic, aleatoric)
    assert [ax.get_title() for ax in axes] == ["epistemic", "aleatoric", "total"]
    for ax, variance in zip(axes, (epistemic, aleatoric, epistemic + aleatoric), strict=True):
        for band, k in zip(ax.collections, (3, 2, 1), strict=True):
            vertices = band.get_paths()[0].vertices
            at_two = vertices[vertices[:, 0] == 2.0][:, 1]
            std = float(variance[0]) ** 0.5
            np.testing.assert_allclose([at_two.min(), at_two.max()], [20 - k * std, 20 + k * std])
            assert band.get_label() == f"± {k} σ"
        np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0, 0], [1, 10], [2, 20]])
    assert {"± 1 σ", "± 2 σ", "± 3 σ", "mean"} <= set(texts(figure))
    assert len({ax.get_ylim() for ax in axes}) == 1


def test_the_bands_differ_in_grey_print() -> None:
    _, axes = PICTURES["bands"][0]()
    for ax in axes:
        grey = [band.get_facecolor()[0, :3] @ [0.299, 0.587, 0.114] for band in ax.collections[:3]]
        assert (np.diff(grey) < -0.05).all()  # darker towards the mean


def test_the_decision_map_shows_classes_uncertainties_and_data() -> None:
    figure, (classes, epistemic, aleatoric) = PICTURES["map"][0]()
    np.testing.assert_allclose(epistemic.collections[0].get_array().ravel(), GRID.norm(dim=1), rtol=1e-6)
    np.testing.assert_allclose(aleatoric.collections[0].get_array().ravel(), GRID_PROBS.var(1), rtol=1e-6)
    assert (epistemic.get_title(), aleatoric.get_title()) == ("epistemic uncertainty", "aleatoric uncertainty")
    winner = GRID_PROBS.argmax(1)
    for text in classes.texts:  # a name stands inside its region
        place = torch.tensor(text.get_position())
        nearest = (GRID - place).norm(dim=1).argmin()
        assert text.get_text() == f"class {int(winner[nearest])}"
    assert len(classes.texts) == 3
    for panel in (classes, epistemic, aleatoric):
        scatters = panel.collections[-3:]
        assert [len(scatter.get_offsets()) for scatter in scatters] == [10, 10, 10]
        outlines = {scatter.get_paths()[0].vertices.tobytes() for scatter in scatters}
        assert len(outlines) == 3  # one marker per class, for grey print
    assert len(figure.axes) == 5  # three panels, two colour bars


@pytest.mark.parametrize("df", [None, torch.full_like(MEAN, 3.0)], ids=["Gaussian", "Student-t"])
def test_the_regression_calibration_curve_shows_levels_and_the_error(df: Tensor | None) -> None:
    figure, ax = plots.regression_calibration_curve(MEAN, VARIANCE, OBSERVED, df, n_bins=8, norm="max")
    expected, observed = F.regression_calibration_curve(MEAN, VARIANCE, OBSERVED, df, n_bins=8)
    np.testing.assert_allclose(ax.lines[0].get_xydata()[1:-1], torch.stack([expected, observed], dim=1))
    error = float(F.regression_calibration_error(MEAN, VARIANCE, OBSERVED, df, n_bins=8, norm="max"))
    assert f"largest gap = {error:.4f}" in texts(figure)


def test_colours_are_okabe_and_itos() -> None:
    okabe_ito = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"}
    assert {to_hex(colour) for colour in style.CLASS_COLOURS} <= okabe_ito
    assert {style.BLUE.lower(), style.SKY.lower(), style.VERMILION.lower()} <= okabe_ito


@pytest.mark.parametrize(
    ("metric", "inputs", "text"),
    [
        (metrics.CalibrationError(norm="max"), (PROBS, TARGET), "MCE = "),
        (metrics.CalibrationError(kind="class_wise", num_classes=3, binning="mass"), (PROBS, TARGET), "ECE = "),
        (metrics.OODDetection(), (SCORE, IS_OOD), "AUROC = "),
        (metrics.RiskCoverage(), (SCORE, IS_OOD), "AURC = "),
        (metrics.RegressionCalibrationError(norm="l2"), (MEAN, VARIANCE, OBSERVED), "RMS gap = "),
    ],
)
def test_a_metric_draws_its_picture_with_its_value_in_it(metric: Any, inputs: tuple[Tensor, ...], text: str) -> None:
    metric.update(*inputs)
    value = metric.compute()
    value = value["auroc"] if isinstance(value, dict) else value
    figure, ax = metric.plot()
    assert f"{text}{float(value):.4f}" in texts(figure)
    assert ax.figure is figure
    assert_nothing_clipped(figure)


@pytest.mark.parametrize("metric", [metrics.BrierScore(), metrics.CalibrationError()])
def test_given_values_are_drawn_over_time_as_torchmetrics_does(metric: Any) -> None:
    values = [metric(PROBS[i : i + 100], TARGET[i : i + 100]) for i in (0, 100, 200)]
    own = Figure().subplots()
    _, ax = metric.plot(values, ax=own)
    assert ax is own
    np.testing.assert_allclose(ax.lines[0].get_ydata(), torch.stack(values))


def test_an_empty_metric_draws_an_empty_picture() -> None:
    for metric, inputs in (
        (metrics.CalibrationError(), (PROBS, TARGET)),
        (metrics.CalibrationError(binning="mass"), (PROBS, TARGET)),
        (metrics.RiskCoverage(), (SCORE, IS_OOD)),
        (metrics.OODDetection(), (SCORE, IS_OOD)),
    ):
        metric.update(*(x[:0] for x in inputs))
        figure, _ = metric.plot()
        assert any(text.endswith("= nan") for text in texts(figure))
        assert_nothing_clipped(figure)


def test_without_matplotlib_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    metric = metrics.BrierScore()
    metric.update(PROBS, TARGET)
    for draw in (PICTURES["reliability"][0], metric.plot):
        with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-bayes\[recipes\]"'):
            draw()


def pixels(ax: Any) -> Tensor:
    return torch.as_tensor(np.ma.getdata(ax.images[0].get_array()))


@pytest.mark.parametrize("channels", [1, 3])
def test_uncertainty_maps_of_classes(channels: int) -> None:
    target = torch.randint(3, (2, 6, 5), generator=GENERATOR)
    target[0, 0] = 255
    figure, axes = plots.uncertainty_maps(randn(2, channels, 6, 5), DENSE, target)
    assert [ax.get_title() for ax in axes[0]] == ["input", "truth", "prediction", "epistemic", "aleatoric"]
    for n, row in enumerate(axes):
        assert torch.equal(pixels(row[1])[1:], target[n, 1:].double())
        assert torch.equal(pixels(row[2]), DENSE_PROBS[n].argmax(0).double())
        for ax, values in zip(row[3:], (DENSE.epistemic, DENSE.aleatoric), strict=True):
            torch.testing.assert_close(pixels(ax), values[n].sum(0).double())
            assert ax.images[0].get_clim() == (0, pytest.approx(float(values.sum(1).max())))  # one scale for all rows
    assert (pixels(axes[0, 1])[0] == -1).all()  # grey
    assert plots.uncertainty_maps(randn(2, 1, 6, 5), DENSE)[1].shape == (2, 4)
    assert_nothing_clipped(figure)


def test_uncertainty_maps_of_values() -> None:
    target = randn(2, 1, 6, 5)
    figure, axes = plots.uncertainty_maps(randn(2, 1, 6, 5), VALUES, target)
    titles = ["input", "truth", "prediction", "|error|", "epistemic σ", "aleatoric σ"]
    assert [ax.get_title() for ax in axes[0]] == titles
    one_noise = replace(VALUES, aleatoric=torch.full_like(VALUES.mean, 0.04))
    assert [ax.get_title() for ax in plots.uncertainty_maps(randn(2, 1, 6, 5), one_noise, target)[1][0]] == titles[:-1]
    expected = ((target - VALUES.mean).abs(), VALUES.epistemic.sqrt(), VALUES.aleatoric.sqrt())
    for n, row in enumerate(axes):
        for ax, values in zip(row[3:], expected, strict=True):
            torch.testing.assert_close(pixels(ax), values[n, 0].double())
    assert_nothing_clipped(figure)
