"""Each callback and mixin trains, tests and predicts on the second device with the CPU's numbers."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from device_cases import CPU, LIKELIHOODS, values
from device_training import Lit, loader, on_device, variational
from helpers.training import trainer

from lightning_bayes import (
    GP,
    IVON,
    IVONCallback,
    L2MCallback,
    LaplaceCallback,
    LogSigmaMultiplierMixin,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    SWAGCallback,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    VariationalLastLayerMixin,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions"),
    pytest.mark.filterwarnings("ignore:log σ can move"),
]


class VariationalLaplace(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Lit):
    pass


class VariationalInference(VariationalInferenceMixin, Lit):
    pass


class WithIVON(Lit):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return IVON(self.parameters(), betas=(0.8, 0.9), hess_init=3.0)


class VariationalLastLayer(VariationalLastLayerMixin, Lit):
    pass


def with_callback(kind: Any, **options: Any) -> Any:
    return lambda task: (Lit(task), kind(LIKELIHOODS[task], progress=False, **options))


# A module, and the callback on its Trainer; a variational module brings its own.
METHODS: dict[str, Any] = {
    "laplace": with_callback(LaplaceCallback),
    "lowrank": with_callback(LaplaceCallback, structure="lowrank"),
    "marglik, gp": with_callback(LaplaceCallback, tune="marglik", predictive=GP(points=6)),
    "bnn": with_callback(LaplaceCallback, predictive="bnn"),
    "l2m": with_callback(L2MCallback, loss_scale=1.0),
    "online": with_callback(OnlineLaplaceCallback, memory_factor=0.1),
    "marginal likelihood": with_callback(MarginalLikelihoodCallback),
    "swag": with_callback(SWAGCallback, start=0),
    "ivon": lambda task: (WithIVON(task), IVONCallback(LIKELIHOODS[task], progress=False)),
    "variational laplace": lambda task: (variational(VariationalLaplace, task), None),
    "variational laplace by differences": lambda t: (variational(VariationalLaplace, t, method="two_passes"), None),
    "variational inference": lambda task: (variational(VariationalInference, task), None),
    "variational last layer": lambda task: (variational(VariationalLastLayer, task), None),
}


def run(method: str, task: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    module, callback = METHODS[method](task)
    with TemporaryDirectory() as folder:
        fit = trainer(Path(folder), *([] if callback is None else [callback]), max_epochs=2, **on_device(device))
        fit.fit(module, loader(task, 1), loader(task, 3))
        (logged,) = fit.test(module, loader(task, 5), verbose=False)
        predictions = fit.predict(module, loader(task, 5))
    posterior = module.posterior if callback is None else callback.posterior
    assert posterior.device.type == "cpu" or posterior.mean.device == device
    return logged, [values(p) for p in predictions], posterior.mean


@cache
def expected(method: str, task: str) -> Any:
    return run(method, task, CPU)


@pytest.mark.parametrize("float64", [True, False], ids=["float64", "no float64"])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("method", METHODS)
def test_training_testing_and_predicting(
    second: torch.device, request: pytest.FixtureRequest, method: str, task: str, float64: bool
) -> None:
    logged, predictions, mean = expected(method, task)
    if not float64:
        request.getfixturevalue("no_float64")
    logged_there, predictions_there, mean_there = run(method, task, second)
    torch.testing.assert_close(mean_there.cpu(), mean, rtol=1e-3, atol=1e-4)
    assert logged_there == pytest.approx(logged, rel=2e-3, abs=1e-3)
    for one, two in zip(predictions_there, predictions, strict=True):
        for name, value in two.items():
            torch.testing.assert_close(one[name].cpu(), value, rtol=5e-3, atol=1e-3, equal_nan=True)
