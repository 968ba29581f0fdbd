"""Facts about every metric: its functional twin, splits, order, dtypes, copies, collections and empty data."""

import copy
import pickle
from typing import Any

import pytest
import torch
from metric_cases import CASES, DATA, Case, flat
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_bayes import metrics

each_metric = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
HEAD, TAIL = slice(0, 25), slice(25, None)


def part(inputs: tuple[Tensor, ...], rows: Any) -> tuple[Tensor, ...]:
    return tuple(x[rows] for x in inputs)


def updated(metric: Any, inputs: tuple[Tensor, ...], sizes: list[int] | None = None) -> Any:
    for batch in zip(*(x.split(sizes or [len(x)]) for x in inputs), strict=True):
        metric.update(*batch)
    return metric


def assert_value(metric: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(flat(metric.compute()), flat(expected), **tolerance)


@each_metric
def test_any_split_and_order_give_the_value_of_the_functional_twin(case: Case) -> None:
    whole = case.twin(*case.inputs)
    assert_value(updated(case.make(), case.inputs), whole, rtol=1e-12, atol=1e-14)
    shuffled = part(case.inputs, torch.randperm(61, generator=torch.Generator().manual_seed(1)))
    for sizes in ([1, 40, 0, 20], [61], [1] * 61):
        assert_value(updated(case.make(), shuffled, sizes), whole, rtol=1e-12, atol=1e-12)


@each_metric
def test_forward_gives_the_batch_value_and_accumulates(case: Case) -> None:
    metric = case.make()
    for rows in (HEAD, TAIL):
        batch = part(case.inputs, rows)
        torch.testing.assert_close(flat(metric(*batch)), flat(case.twin(*batch)))
    assert_value(metric, case.twin(*case.inputs))


@each_metric
def test_nothing_counted_is_nan(case: Case) -> None:
    assert flat(updated(case.make(), part(case.inputs, slice(0))).compute()).isnan().all()
    metric = updated(case.make(), case.inputs)
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert flat(metric.compute()).isnan().all()


@each_metric
def test_copies_and_pickles_continue_counting(case: Case) -> None:
    head = part(case.inputs, HEAD)
    metric = updated(case.make(), head)
    for other in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric), metric.clone()):
        assert_value(updated(other, part(case.inputs, TAIL)), case.twin(*case.inputs))
    assert_value(metric, case.twin(*head))


@each_metric
def test_state_dict_restores_the_value(case: Case) -> None:
    metric, other = updated(case.make(), case.inputs, [30, 31]), case.make()
    metric.persistent(True)
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    assert_value(updated(other, part(case.inputs, slice(0))), metric.compute())


@each_metric
def test_casting_the_module_around_it_leaves_the_sums_exact(case: Case) -> None:
    parent = torch.nn.Module()
    parent.metric = updated(case.make(), case.inputs, [30, 31])
    for cast in (parent.half, parent.bfloat16, lambda: parent.to(torch.bfloat16), lambda: parent.to("cpu")):
        cast()
    untouched = updated(case.make(), case.inputs, [30, 31]).compute()
    assert_value(updated(parent.metric, part(case.inputs, slice(0))), untouched, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_metric
def test_narrow_floats_are_upcast_before_anything_is_computed(case: Case, dtype: torch.dtype) -> None:
    narrow = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs)
    wide = tuple(x.double() if x.is_floating_point() else x for x in narrow)
    expected = case.make()
    expected.validate_args = False  # rounded to bfloat16, probabilities sum to one only roughly
    updated(expected, wide)
    assert_value(updated(case.make(), narrow, [30, 31]), expected.compute(), rtol=1e-12, atol=1e-12)


@each_metric
def test_a_gradient_of_the_model_is_not_kept_alive(case: Case) -> None:
    metric = case.make()
    metric(*(x.clone().requires_grad_() if x.is_floating_point() else x for x in case.inputs))
    states = [s for state in metric.metric_state.values() for s in (state if isinstance(state, list) else [state])]
    assert not any(state.requires_grad for state in states)


def test_a_collection_shares_states_only_where_the_updates_agree() -> None:
    """The first batch lies inside both intervals, so the two coverages agree after it, but not after the second."""
    collection = MetricCollection(
        {
            "narrow": metrics.IntervalCoverage(level=0.5),
            "wide": metrics.IntervalCoverage(level=0.99),
            "nll": metrics.GaussianNLL(),
        }
    )
    zeros, ones = torch.zeros(2), torch.ones(2)
    collection.update(zeros, ones, zeros)
    collection.update(zeros, ones, 2 * ones)
    values = collection.compute()
    assert (float(values["narrow"]), float(values["wide"])) == (0.5, 1.0)

    errors = MetricCollection({n: metrics.CalibrationError(norm=n) for n in ("l1", "l2", "max")})
    errors.update(*DATA["classification"])
    assert len(errors.compute_groups) == 1
    for norm, value in errors.compute().items():
        torch.testing.assert_close(value, metrics.functional.calibration_error(*DATA["classification"], norm=norm))


def test_a_cloned_collection_has_its_prefix_and_its_own_state() -> None:
    names = ("NegativeLogLikelihood", "BrierScore", "CalibrationError")
    collection = MetricCollection([getattr(metrics, name)() for name in names])
    validation, test = collection.clone(prefix="val_"), collection.clone(prefix="test_")
    probs, target = DATA["classification"]
    validation.update(probs[:20], target[:20])
    test.update(probs, target)
    assert set(validation.compute()) == {f"val_{name}" for name in names}
    expected = metrics.functional.brier_score(probs, target)
    torch.testing.assert_close(test.compute()["test_BrierScore"], expected)


def test_directions_and_plot_bounds() -> None:
    types = {type(case.make()) for case in CASES}
    bounds = {t.__name__: (t.higher_is_better, t.plot_lower_bound, t.plot_upper_bound) for t in types}
    assert bounds == {
        "NegativeLogLikelihood": (False, 0.0, None),
        "BrierScore": (False, 0.0, 2.0),
        "BrierDecomposition": (None, None, None),
        "CalibrationError": (False, 0.0, 1.0),
        "GaussianNLL": (False, None, None),
        "GaussianCRPS": (False, 0.0, None),
        "IntervalCoverage": (None, 0.0, 1.0),
        "IntervalWidth": (None, 0.0, None),
        "RegressionCalibrationError": (False, 0.0, 1.0),
        "OODDetection": (None, 0.0, 1.0),
        "RiskCoverage": (False, 0.0, 1.0),
    }
    assert set(bounds) == set(metrics.__all__) - {"MetricInputError", "functional"}
