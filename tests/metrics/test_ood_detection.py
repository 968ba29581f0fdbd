"""OOD detection against scikit-learn, with ties and scores of any range."""

from pathlib import Path

import numpy
import pytest
import torch
from metric_cases import DATA
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from lightning_bayes.metrics import OODDetection
from lightning_bayes.metrics import functional as F

SCORE, IS_OOD = DATA["score"]


def reference(score: Tensor, is_ood: Tensor) -> dict[str, float]:
    fpr, tpr, _ = roc_curve(~is_ood, -score, drop_intermediate=False)  # in-distribution is the positive class
    return {
        "auroc": roc_auc_score(is_ood, score),
        "aupr_in": average_precision_score(~is_ood, -score),
        "aupr_out": average_precision_score(is_ood, score),
        "fpr95": fpr[tpr >= 0.95][0],
    }


def as_floats(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6, -1.0])
def test_exact_mode_is_scikit_learn(scale: float) -> None:
    score = scale * SCORE + (1 if scale < 0 else 0)
    assert as_floats(F.ood_detection(score, IS_OOD)) == pytest.approx(reference(score, IS_OOD), rel=1e-12)


def test_a_batch_outside_the_unit_interval_changes_nothing_about_the_others() -> None:
    """A sigmoid on only the batches outside [0, 1] would rank 0.9 of one batch above 3.0 of another."""
    metric = OODDetection()
    metric.update(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([False, False, False]))
    metric.update(torch.tensor([1.5, 3.0, -7.0]), torch.tensor([True, True, False]))
    assert as_floats(metric.compute()) == {"auroc": 1.0, "aupr_in": 1.0, "aupr_out": 1.0, "fpr95": 0.0}


@pytest.mark.parametrize(("out_score", "expected"), [(18.5, 1.0), (19.0, 1.0), (19.5, 0.0)])
def test_fpr95_accepts_nineteen_of_twenty(out_score: float, expected: float) -> None:
    """τ is the 19th smallest of 20 in-distribution scores; an OOD score at τ itself is accepted with it."""
    score = torch.cat([torch.arange(1.0, 21.0), torch.tensor([out_score])])
    is_ood = torch.arange(21) == 20
    assert float(F.ood_detection(score, is_ood)["fpr95"]) == expected


def test_a_constant_score_knows_nothing() -> None:
    values = as_floats(F.ood_detection(torch.zeros(10), torch.arange(10) < 3))
    assert values == pytest.approx({"auroc": 0.5, "aupr_in": 0.7, "aupr_out": 0.3, "fpr95": 1.0})


def test_infinite_scores_are_the_most_extreme() -> None:
    score, is_ood = torch.tensor([-torch.inf, 0.0, 1.0, torch.inf]), torch.tensor([False, True, False, True])
    finite = torch.tensor([-9.0, 0.0, 1.0, 9.0])
    assert as_floats(F.ood_detection(score, is_ood)) == as_floats(F.ood_detection(finite, is_ood))
    in_cells = F.ood_detection(score, is_ood, resolution=100, score_range=(-9.0, 9.0))
    assert as_floats(in_cells) == as_floats(F.ood_detection(finite, is_ood))


def test_the_histogram_is_exact_for_scores_rounded_to_its_cells() -> None:
    low, high, n = -4.0, 4.0, 16
    cell = ((SCORE.clamp(low, high - 1e-9) - low) / (high - low) * n).floor()
    values = F.ood_detection(SCORE, IS_OOD, resolution=n, score_range=(low, high))
    assert as_floats(values) == pytest.approx(reference(cell, IS_OOD), rel=1e-12)


def test_one_kind_alone_is_nan() -> None:
    assert all(value.isnan() for value in F.ood_detection(SCORE, torch.ones_like(IS_OOD)).values())


@pytest.mark.parametrize(
    ("score", "auroc"),
    [("latent", 0.998886), ("output", 0.999290), ("likelihood", 0.991048), ("typicality", 0.987978)],
)
def test_auroc_of_the_laplacian_autoencoders_own_scores(score: str, auroc: float, data_folder: Path) -> None:
    """10,000 scores of the authors' stored run, in batches of uneven sizes, give the AUROC that the authors report."""
    path = data_folder / "outside" / "lae_ood_scores.npz"
    if not path.exists():
        pytest.skip(f"LIGHTNING_BAYES_DATA has no outside/{path.name}")
    with numpy.load(path) as file:
        values, is_ood = torch.as_tensor(file[score]), torch.as_tensor(file[f"{score}_is_ood"]).bool()
    metric = OODDetection()
    for part in torch.arange(len(values)).split(3001):
        metric.update(values[part], is_ood[part])
    assert float(metric.compute()["auroc"]) == pytest.approx(auroc, abs=6e-7)
