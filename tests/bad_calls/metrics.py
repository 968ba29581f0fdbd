"""The metrics: settings when they are made, and inputs to `update` and to their functional twins."""

import math
from inspect import signature
from typing import Any

import torch

from bad_calls.callbacks import FLAG
from bad_calls.cases import Of, Table
from lightning_bayes import metrics
from lightning_bayes.metrics import MetricInputError, functional

HALF, LABELS = torch.full((2, 2), 0.5), torch.tensor([0, 1])
ZEROS, ONES = torch.zeros(2), torch.ones(2)
SCORES, FLAGS = torch.tensor([0.1, 0.9]), torch.tensor([False, True])
PROBS = {"probs": HALF, "target": LABELS}
REAL = {"mean": ZEROS, "variance": ONES, "target": ZEROS}
OOD = {"score": SCORES, "is_ood": FLAGS}
KEPT = {"confidence": SCORES, "correct": FLAGS}

FUNCTIONS: dict[str, dict[str, torch.Tensor]] = {
    name: given
    for names, given in (
        ("negative_log_likelihood brier_score brier_decomposition calibration_error reliability_bins", PROBS),
        ("gaussian_nll gaussian_crps interval_coverage interval_width", REAL),
        ("regression_calibration_error regression_calibration_curve", REAL),
        ("ood_detection", OOD),
        ("risk_coverage risk_coverage_curve", KEPT),
    )
    for name in names.split()
}
CLASSES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    name: ({"num_classes": 2} if name == "BrierDecomposition" else {}, given)
    for names, given in (
        ("NegativeLogLikelihood BrierScore BrierDecomposition CalibrationError", PROBS),
        ("GaussianNLL GaussianCRPS IntervalCoverage IntervalWidth RegressionCalibrationError", REAL),
        ("OODDetection", OOD),
        ("RiskCoverage", KEPT),
    )
    for name in names.split()
}

BAD: dict[str, list[tuple[Any, str]]] = {
    "probs": [
        (torch.tensor([[-1.0, 2.0], [0.5, 0.5]]), "softmax or sigmoid to logits"),
        (torch.tensor([[0.3, 0.3], [0.5, 0.5]]), "sum to one over the class axis (1), but are off by up to 0.4"),
        (torch.tensor([[math.nan, 1.0], [0.5, 0.5]]), "contain no NaN"),
        (torch.tensor([1.5, 0.5]), "must be in [0, 1]"),
        (torch.ones(2, 1), "class axis of length 1"),
        (torch.full((3, 2), 0.5), "got probs [3, 2] and target [2]"),
        (torch.tensor(0.5), "got probs [] and target [2]"),
        (torch.ones(2, 2, dtype=torch.long), "floating-point probabilities, got torch.int64"),
    ],
    "target": [],
    "mean": [(torch.tensor([0.0, math.nan]), "must be finite"), (torch.zeros(2, 1), "must have one shape, got [2, 1]")],
    "variance": [
        (torch.tensor([1.0, -1.0]), "must be positive, got a minimum of -1"),
        (torch.tensor([1.0, 0.0]), "must be positive, got a minimum of 0"),
        (torch.ones(2, 1), "must have one shape, got [2], [2, 1] and [2]"),
        (torch.tensor([1.0, math.inf]), "must be finite"),
        (torch.ones(2, dtype=torch.complex64), "must be real, got torch.complex64"),
    ],
    "score": [
        (torch.tensor([math.nan, 1.0]), "contains NaN"),
        (torch.zeros(3), "must have one shape, got [3] and [2]"),
    ],
    "confidence": [(torch.tensor([math.nan, 1.0]), "contains NaN"), (torch.zeros(3), "one shape, got [3] and [2]")],
    "is_ood": [(torch.tensor([2, 0]), "must be boolean, or contain only 0 and 1")],
    "correct": [(torch.tensor([2, 0]), "must be boolean, or contain only 0 and 1")],
}
TARGETS = {
    "probs": [
        (torch.tensor([0.0, 1.0]), "integer class labels, got torch.float32"),
        (torch.tensor([0, 2]), "lie in 0..1 for 2 classes, got values from 0 to 2"),
        (torch.tensor([0, -100]), "pass ignore_index"),
        (torch.tensor([0, 1, 1]), "got probs [2, 2] and target [3]"),
    ],
    "mean": [(torch.tensor([0.0, math.inf]), "must be finite"), (torch.zeros(2, 1), "must have one shape")],
}
SETTINGS: dict[str, list[tuple[Any, str]]] = {
    "n_bins": [(bad, "must be a whole number of at least") for bad in (0, -1, 2.5, "ten", True, None)],
    "norm": [("l3", "unknown norm 'l3': use one of 'l1', 'l2', 'max'"), (2, "unknown norm 2: use one of")],
    "binning": [("log", "unknown binning 'log': use one of 'width', 'mass'")],
    "kind": [("all", "unknown kind 'all': use one of 'top_label', 'class_wise'")],
    "level": [(bad, f"strictly between 0 and 1, got {bad}") for bad in (0.0, 95)]
    + [(bad, f"must be a number, got {bad!r}") for bad in ("wide", math.nan)],
    "df": [
        (2.0, "more than 2, or the variance is infinite; got 2"),
        (torch.tensor([3.0, math.nan]), "more than 2"),
        (torch.full((3,), 5.0), "must be a number, or have the mean's shape [2]"),
        ("heavy", "must be a tensor, got 'heavy'"),
    ],
    "ignore_index": [(1.5, "must be a whole number, got 1.5"), ("pad", "must be a whole number, got 'pad'")],
}


def _of_function(name: str, given: dict[str, torch.Tensor]) -> Table:
    function = getattr(functional, name)
    table = Table(name, lambda t, **bad: function(**{**given, **bad}), function, error=MetricInputError)
    _fill(table, [*signature(function).parameters], given)
    table.anything_goes("validate_args", "it is taken for true or false")
    return table


def _of_update(name: str, made: dict[str, Any], given: dict[str, torch.Tensor]) -> Table:
    kind = getattr(metrics, name)
    table = Table(f"{name}.update", lambda t, **bad: kind(**made).update(**{**given, **bad}), kind.update)
    for argument in given:
        table(argument, Of(lambda t, a=argument: given[a].numpy(), "numpy"), "must be a tensor, got a ndarray")
        table(argument, [0.5, 0.5], "must be a tensor, got [0.5, 0.5]")
    for bad, words in SETTINGS["df"] if "df" in signature(kind.update).parameters else []:
        table("df", bad, words)
    table.error = MetricInputError
    return table


def _of_class(name: str, made: dict[str, Any]) -> Table:
    kind = getattr(metrics, name)
    table = Table(name, lambda t, **bad: kind(**{**made, **bad}), kind, error=MetricInputError)
    _fill(table, [*signature(kind).parameters], {})
    table("validate_args", "no", f"{FLAG}, got 'no'")
    table.anything_goes("settings", "the base class's own, for a subclass")
    table.anything_goes("kwargs", "torchmetrics' own, which it checks")
    return table


def _updated(given: dict[str, torch.Tensor], method: str) -> Any:
    metric = metrics.RiskCoverage()
    metric.update(**given)
    return getattr(metric, method)


def _fill(table: Table, arguments: list[str], given: dict[str, torch.Tensor]) -> None:
    for argument in arguments:
        rows = SETTINGS.get(argument) if argument not in given else [*BAD[argument], *_others(argument, given)]
        for bad, words in rows or []:
            table(argument, bad, words)


def _others(argument: str, given: dict[str, torch.Tensor]) -> list[tuple[Any, str]]:
    """What no tensor argument may be, and what the targets may not be, of classes or of a regression."""
    targets = TARGETS[next(iter(given))] if argument == "target" else []
    return [*targets, (None, "must be a tensor, got None"), (0.5, "must be a tensor, got 0.5")]


made = {name: _of_class(name, options) for name, (options, _) in CLASSES.items()}
for _bad in (0, 1.5, "two", None):
    made["BrierDecomposition"]("num_classes", _bad, "must be a whole number of at least 2")
    made["CalibrationError"]("num_classes", _bad, "must be a whole number of at least 2", kind="class_wise")
made["CalibrationError"]("resolution", 100, 'is for binning="mass"')
functions = {name: _of_function(name, given) for name, given in FUNCTIONS.items()}
for _table in (made["OODDetection"], functions["ood_detection"]):
    for _bad in (0, 2.5, "fine"):
        _table("resolution", _bad, "must be a whole number of at least 1", score_range=(0.0, 1.0))
    _table("resolution", 10, "resolution and score_range belong together")
    _table("score_range", (0.0, 1.0), "resolution and score_range belong together")
    _table("score_range", (1.0, 1.0), "(low, high) with low < high, got (1.0, 1.0)", resolution=10)
    _table("score_range", 1.0, "(low, high) with low < high, got 1.0", resolution=10)
    _table("score_range", ("a", "b"), "(low, high) with low < high, got ('a', 'b')", resolution=10)
    _table("score_range", (0.0, math.inf), "(low, high) with low < high, got (0.0, inf)", resolution=10)
for _bad in (0, "fine"):
    made["CalibrationError"]("resolution", _bad, "must be a whole number of at least 1", binning="mass")
SHARES: dict[str, list[tuple[Any, str]]] = {
    "risk": [
        (0.0, "strictly between 0 and 1, got 0.0"),
        (2, "strictly between"),
        ("low", "must be a number, got 'low'"),
    ],
    "delta": [(1.0, "strictly between 0 and 1, got 1.0"), (True, "must be a number"), (-0.1, "strictly between")],
    "coverage": [(0.0, "must be positive"), (1.1, "between 0 and 1, got 1.1"), (math.nan, "must be a number, got nan")],
}
for _name, _share, _given in (
    ("threshold_for_risk", "risk", KEPT),
    ("threshold_for_coverage", "coverage", {"confidence": SCORES}),
):
    functions[_name] = Table(
        _name,
        lambda t, name=_name, share=_share, given=_given, **bad: getattr(functional, name)(
            **{**given, share: 0.5, **bad}
        ),
        getattr(functional, _name),
        error=MetricInputError,
    )
    functions[_name].anything_goes("validate_args", "it is taken for true or false")
    functions[f"RiskCoverage.{_name}"] = Table(
        f"RiskCoverage.{_name}",
        lambda t, name=_name, share=_share, **bad: _updated(KEPT, name)(**{share: 0.5, **bad}),
        getattr(metrics.RiskCoverage, _name),
        error=MetricInputError,
    )
    for _argument in (_share, "delta"):
        for _bad, _words in SHARES[_argument]:
            functions[_name](_argument, _bad, _words)
            functions[f"RiskCoverage.{_name}"](_argument, _bad, _words)
    for _bad in (None, 0.5, [0.5]):
        functions[_name]("confidence", _bad, "must be a tensor, got")
    functions[_name]("confidence", torch.tensor([math.nan, 1.0]), "contains NaN")
functions["threshold_for_risk"]("correct", torch.tensor([2, 0]), "must be boolean, or contain only 0 and 1")
functions["threshold_for_risk"]("correct", torch.zeros(3), "one shape, got [2] and [3]")
updates = [_of_update(name, *given) for name, given in CLASSES.items()]
classes = Table("number of classes", lambda t, metric: metric.update(HALF, LABELS), ["metric"], named=False)
classes("metric", metrics.BrierDecomposition(num_classes=3), "probs has 2 classes, but num_classes is 3")
classes(
    "metric", metrics.CalibrationError(kind="class_wise", num_classes=3), "probs has 2 classes, but num_classes is 3"
)
METRICS = [*made.values(), *functions.values(), *updates, classes]
