"""Two real processes give the value of one, with data split unevenly, all on one of them, or without data."""

from typing import Any

import pytest
import torch
from helpers.processes import Peer, together
from metric_cases import CASES, DATA, N, flat

from lightning_bayes import metrics, plots

SPLITS = {
    "uneven": (0, 38, N),
    "empty rank": (0, N, N),
    "empty ranks": (0, 0, 0),
}  # rank r gets [split[r], split[r + 1])


def computed(peer: Peer) -> dict[Any, torch.Tensor]:
    with peer.group():
        return computed_by(peer.rank)


def computed_by(rank: int) -> dict[Any, torch.Tensor]:
    results: dict[Any, torch.Tensor] = {}
    for name, split in SPLITS.items():
        part = slice(split[rank], split[rank + 1])
        for case in CASES:
            results[name, case.name] = flat(filled(case.make(), case.data, part).compute())
        bins = filled(metrics.CalibrationError(n_bins=4, binning="mass"), "classification", part).bins()
        results[name, "bins"] = torch.stack([bins.count, bins.accuracy])
        risk_coverage = filled(metrics.RiskCoverage(), "score", part)
        results[name, "curve"] = risk_coverage.curve()[1]
        thresholds = (risk_coverage.threshold_for_risk(0.9), risk_coverage.threshold_for_coverage(0.4))
        results[name, "thresholds"] = torch.stack(thresholds)
    # After `compute` a metric continues with its own part, not with the gathered data.
    metric = filled(metrics.OODDetection(), "score", slice(0, 30) if rank == 0 else slice(30, N))
    metric.compute()
    results["local", ""] = torch.tensor(len(metric.rows))
    if rank == 0:  # plots of tensors wait for no other process
        _, ax = plots.reliability_diagram(*DATA["classification"])
        plots.ood_histogram(*DATA["score"])
        results["plot", ""] = torch.tensor([bar.get_height() for bar in ax.containers[0]])
    return results


def filled(metric: Any, data: str, part: slice) -> Any:
    """A metric updated three times, or never if its part is empty."""
    inputs = tuple(x[part] for x in DATA[data])
    if len(inputs[0]):
        for batch in zip(*(x.tensor_split([2, 9]) for x in inputs), strict=True):
            metric.update(*batch)
    return metric


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, torch.Tensor]]:
    return together(computed, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("split", ["uneven", "empty rank"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_processes_equal_one(ranks: list[dict[Any, torch.Tensor]], case: Any, split: str) -> None:
    whole = flat(case.twin(*case.inputs))
    for results in ranks:
        torch.testing.assert_close(results[split, case.name], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", ["uneven", "empty rank"])
def test_bins_curves_and_thresholds_are_gathered_too(ranks: list[dict[Any, torch.Tensor]], split: str) -> None:
    bins = metrics.functional.reliability_bins(*DATA["classification"], n_bins=4, binning="mass")
    curve = metrics.functional.risk_coverage_curve(*DATA["score"])[1]
    score, label = DATA["score"]
    F = metrics.functional
    thresholds = torch.stack([F.threshold_for_risk(score, label, 0.9), F.threshold_for_coverage(score, 0.4)])
    for results in ranks:
        torch.testing.assert_close(results[split, "thresholds"], thresholds)
        torch.testing.assert_close(results[split, "bins"], torch.stack([bins.count, bins.accuracy]))
        torch.testing.assert_close(results[split, "curve"], curve)


def test_no_data_anywhere_is_nan(ranks: list[dict[Any, torch.Tensor]]) -> None:
    assert all(results["empty ranks", case.name].isnan().all() for results in ranks for case in CASES)


def test_a_process_keeps_only_its_own_part(ranks: list[dict[Any, torch.Tensor]]) -> None:
    assert [int(results["local", ""]) for results in ranks] == [30, N - 30]


def test_plots_of_tensors_show_the_data_of_one_process(ranks: list[dict[Any, torch.Tensor]]) -> None:
    bins = metrics.functional.reliability_bins(*DATA["classification"])
    torch.testing.assert_close(ranks[0]["plot", ""], bins.accuracy[bins.count > 0], check_dtype=False)
