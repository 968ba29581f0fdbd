"""Random numbers of a device: replayed where a pass is repeated, and given back by every call."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_cases import FEATURES, OUTPUTS, batches, drawn, filled, laplace
from device_training import Lit, loader, on_device, variational
from helpers.programs import run_program
from helpers.training import trainer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_bayes import (
    BNN,
    DeepEnsemble,
    GaussianPosterior,
    LaplaceCallback,
    MarginalLikelihoodCallback,
    VariationalLaplaceMixin,
    evaluate,
    fit_laplace,
)


class Dropped(Lit):
    """With dropout, and the sum of the losses; no hook sees the outputs."""

    def __init__(self, task: str = "classification") -> None:
        super().__init__(task)
        with torch.device("cpu"):
            layers = nn.Linear(FEATURES, 6), nn.Softplus(), nn.Dropout(0.5), nn.Linear(6, OUTPUTS)
            self.net = filled(nn.Sequential(*layers))


class HiddenHead(Dropped):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        head = self.net[3]  # type: ignore[index]
        f = F.linear(self.net[:3](batch[0]), head.weight, head.bias)  # type: ignore[index]
        return F.cross_entropy(f, batch[1], reduction="sum")


class VariationalDropped(VariationalLaplaceMixin, Dropped):
    pass


def test_the_dry_run_finds_the_scale_of_a_loss_with_dropout(second: torch.device, tmp_path: Path) -> None:
    """A sum over the seven examples of a batch; no hook sees the outputs, so that a second pass is compared with it."""
    callback = MarginalLikelihoodCallback(progress=False)
    trainer(tmp_path, callback, max_epochs=1, **on_device(second)).fit(HiddenHead(), loader("classification", 1, 21))
    assert callback.state_dict()["loss_scale"] == pytest.approx(7)


@pytest.mark.parametrize("method", ["finite_difference", "two_passes"])
def test_both_passes_of_a_variational_step_have_the_same_dropout_mask(second: torch.device, method: str) -> None:
    """Or the difference of the two gradients would be noise divided by a small number."""
    gradients = []
    for each in ("exact", method):
        module = variational(VariationalDropped, "classification", method=each, n_data=11).to(second)
        torch.manual_seed(4)
        x, y = (t.to(second) for t in batches()[0])
        module.training_step((x, y), 0).backward()
        gradients.append({name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=0.05, atol=0.02 * float(value.abs().max()))


class Noisy:
    """A loader whose transform draws on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __iter__(self) -> Any:
        for x, y in batches():
            yield x.to(self.device) + torch.randn(x.shape, device=self.device), y


CALLS: dict[str, Any] = {
    "fit": lambda p, data: fit_laplace(p.network, data, "classification", structure="diag"),
    "update": lambda p, data: p.update(data),
    "tune": lambda p, data: p.tune_prior("grid", data),
    "calibrate": lambda p, data: p.calibrate(data),
    "conformalize": lambda p, data: p.conformalize(data),
    "evaluate": lambda p, data: evaluate(p, data),
    "predict": lambda p, data: p.predict(drawn(3, FEATURES, seed=1).to(p.device), "bnn"),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_devices_random_numbers_are_given_back(second: torch.device, call: str) -> None:
    posterior: GaussianPosterior = laplace(second, "classification", "diag")
    before = torch.get_device_module(second).get_rng_state(second)
    CALLS[call](posterior, Noisy(second))
    assert torch.equal(torch.get_device_module(second).get_rng_state(second), before)


CPU_ONLY = """
import torch
from torch import nn
from lightning_bayes import fit_laplace

def refuse(*args):
    raise AssertionError("CUDA was initialised")

torch.cuda.device_count = lambda: 1
torch.cuda.get_rng_state = torch.cuda.set_rng_state = torch.cuda.init = torch.cuda._lazy_init = refuse
posterior = fit_laplace(nn.Linear(2, 3), [(torch.randn(5, 2), torch.randint(3, (5,)))])
posterior.tune_prior("marglik").predict(torch.randn(2, 2), "bnn")
print("done")
"""


def test_a_network_on_the_cpu_leaves_cuda_alone(tmp_path: Path) -> None:
    """Once CUDA is initialised, a notebook cannot fork its processes any more."""
    (tmp_path / "program.py").write_text(CPU_ONLY)
    program = run_program(str(tmp_path / "program.py"))
    assert program.stdout == "done\n", program.stderr


class Draws(TorchFunctionMode):
    """The devices on which normal numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        if func is torch.randn:
            self.devices.append(drawn.device.type)
        return drawn


DRAWING: dict[str, Any] = {
    "predict": lambda p, x: p.predict(x, BNN(samples=3)),
    "functions": lambda p, x: p.sample_function(n=2)(x),
    "evaluate": lambda p, x: evaluate(p, batches(), predictive=BNN(samples=3)),
    "calibrate": lambda p, x: p.calibrate(batches(), BNN(samples=3)),
    "conformalize": lambda p, x: p.conformalize(batches(seed=3), predictive=BNN(samples=3)),
    "ensemble": lambda p, x: DeepEnsemble([p, p]).predict(x, BNN(samples=3)),
}


@pytest.mark.parametrize("call", DRAWING)
def test_weights_are_drawn_on_the_device(second: torch.device, call: str) -> None:
    """Drawn on the host and copied, they would take longer than all else."""
    posterior, x = laplace(second, "classification", "diag"), drawn(5, FEATURES, seed=1).to(second)
    with Draws() as draws:
        DRAWING[call](posterior, x)
    assert set(draws.devices) == {second.type}


def test_a_callback_draws_on_the_device_the_same_for_any_batch(second: torch.device, tmp_path: Path) -> None:
    callback = LaplaceCallback(tune=None, calibrate=None, predictive=BNN(samples=4), progress=False)
    fit, module = trainer(tmp_path, callback, max_epochs=1, **on_device(second)), Lit("classification")
    data = loader("classification", 1)
    fit.fit(module, data)
    with Draws() as draws:
        found = [fit.predict(module, DataLoader(data.dataset, size)) for size in (24, 7)]
    assert set(draws.devices) == {second.type}
    whole, parts = (torch.cat([p.probs for p in predictions]) for predictions in found)
    torch.testing.assert_close(parts, whole)
