"""The metrics and data for the tests that apply to all metrics, with ties and uneven sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes import metrics
from lightning_bayes.metrics import functional as F

N = 61


def _data() -> dict[str, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    probs = (2 * randn(N, 4)).softmax(-1)
    probs[::3] = probs[0]  # ties, some across the borders of equal-mass bins
    target = torch.randint(4, (N,), generator=generator)
    mean, variance = randn(N, 2), randn(N, 2).exp()
    score = (10 * randn(N)).round() / 4  # far outside [0, 1], with ties
    label = torch.rand(N, generator=generator) < 0.4
    pixels = (2 * randn(N, 4, 2, 3)).softmax(1)
    return {
        "classification": (probs, target),
        "dense": (pixels, torch.randint(4, (N, 2, 3), generator=generator)),
        "regression": (mean, variance, mean + 1.5 * variance.sqrt() * randn(N, 2)),
        "heavy tails": (mean, variance, mean + 1.5 * variance.sqrt() * randn(N, 2), 2 + 3 * randn(N, 2).exp()),
        "score": (score, label),
    }


DATA = _data()


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Any]
    twin: Callable[..., Any]
    data: str

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return DATA[self.data]


def _case(
    metric: type, twin: Callable[..., Any], data: str, only_metric: dict[str, Any] | None = None, **shared: Any
) -> Case:
    options = {**shared, **(only_metric or {})}
    name = metric.__name__ + "".join(
        f"-{value}" for value in (*options.values(), *[data] * (data in ("dense", "heavy tails")))
    )
    return Case(name, lambda: metric(**options), lambda *inputs: twin(*inputs, **shared), data)


CASES = [
    _case(metrics.NegativeLogLikelihood, F.negative_log_likelihood, "classification"),
    _case(metrics.NegativeLogLikelihood, F.negative_log_likelihood, "classification", ignore_index=2),
    _case(metrics.BrierScore, F.brier_score, "classification"),
    _case(metrics.BrierDecomposition, F.brier_decomposition, "classification", {"num_classes": 4}, n_bins=5),
    *(
        _case(metrics.CalibrationError, F.calibration_error, "classification", norm=norm, binning=binning)
        for norm in ("l1", "l2", "max")
        for binning in ("width", "mass")
    ),
    *(
        _case(
            metrics.CalibrationError,
            F.calibration_error,
            "classification",
            {"num_classes": 4},
            n_bins=7,
            binning=binning,
            kind="class_wise",
        )
        for binning in ("width", "mass")
    ),
    *(
        _case(metric, twin, "dense", ignore_index=2)
        for metric, twin in (
            (metrics.NegativeLogLikelihood, F.negative_log_likelihood),
            (metrics.BrierScore, F.brier_score),
            (metrics.CalibrationError, F.calibration_error),
        )
    ),
    *(
        _case(metric, twin, data, **settings)
        for data in ("regression", "heavy tails")
        for metric, twin, settings in (
            (metrics.GaussianNLL, F.gaussian_nll, {}),
            (metrics.GaussianCRPS, F.gaussian_crps, {}),
            (metrics.IntervalCoverage, F.interval_coverage, {"level": 0.8}),
            (metrics.IntervalWidth, F.interval_width, {"level": 0.8}),
            (metrics.RegressionCalibrationError, F.regression_calibration_error, {"n_bins": 10, "norm": "l2"}),
        )
    ),
    _case(metrics.OODDetection, F.ood_detection, "score"),
    _case(metrics.OODDetection, F.ood_detection, "score", resolution=16, score_range=(-4.0, 4.0)),
    _case(metrics.RiskCoverage, F.risk_coverage, "score"),
]


def flat(value: Tensor | dict[str, Tensor]) -> Tensor:
    """A metric's value, dictionary or not, as one vector."""
    return torch.stack(list(value.values())) if isinstance(value, dict) else value.reshape(1)
