"""Processes on a group as strict as NCCL find what one process finds, and what processes on Gloo find."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from device_cases import CPU, LIKELIHOODS, STRUCTURES, X, assert_same, batches, described, network
from device_group import BACKEND, register
from device_training import Lit, SecondAccelerator, loader, on_device
from helpers.processes import Peer, results, started, together
from helpers.tensors import seeded
from helpers.training import trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from second_device import load

from lightning_bayes import (
    L2MCallback,
    LaplaceCallback,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    Subnetwork,
    SWAGCallback,
    fit_laplace,
)
from lightning_bayes.network import Processes


def run(device: torch.device, peer: Peer, processes: Processes) -> dict[str, Any]:
    answers = {}
    for task in ("classification", "regression"):
        x, y = (torch.cat(parts) for parts in zip(*batches(task), strict=True))
        own = slice(processes.rank, None, processes.size)
        data = list(zip(x[own].split(3), y[own].split(3), strict=True))
        for name, options in FITS.items():
            shared: Any = {"prior_precision": 2.0, "processes": processes}
            posterior = fit_laplace(network(task).to(device), data, LIKELIHOODS[task], **shared, **options)
            answers[f"{name} {task}"] = {**described(posterior), "evidence": posterior.log_marginal_likelihood()}
            if "points" in name:
                prediction = posterior.predict(X.to(device), "gp", generator=seeded())
                answers[f"{name} {task}"]["variance"] = prediction.epistemic
    for method, make in METHODS.items():
        answers[method] = trained(make, device, peer)
    return {name: {k: v.cpu() for k, v in values.items()} for name, values in answers.items()}


FITS: dict[str, dict[str, Any]] = {
    **{structure: {"structure": structure} for structure in STRUCTURES},
    "labels that are drawn": {"curvature": "fisher_mc"},
    "points": {"gp": 5},
    "subnetwork": {"subset": Subnetwork(7)},
}
METHODS: dict[str, Any] = {
    "laplace": lambda: LaplaceCallback(progress=False),
    "l2m": lambda: L2MCallback(loss_scale=1.0, n_data=24),
    "swag": lambda: SWAGCallback(start=0, every_n_steps=1),
    "online": lambda: OnlineLaplaceCallback("classification", memory_factor=0.1),
    "marginal likelihood": lambda: MarginalLikelihoodCallback(progress=False),
}


class Distributed(DDPStrategy):
    def determine_ddp_device_ids(self) -> None:  # a number would mean CUDA
        return None


class Still(Lit):
    """Its weights stay where they are, so that they are the same on any number of processes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.0)


def trained(make: Any, device: torch.device, peer: Peer) -> dict[str, Any]:
    """After a Trainer's fit and test, on as many processes as there are; all batches together are the same."""
    torch.manual_seed(0)
    callback, module = make(), Still("classification")
    where, world = on_device(device), peer.size
    if world > 1 and device.type == "cpu":
        where = {"strategy": "ddp", "devices": world, "accelerator": "cpu"}
    elif world > 1:
        group = {"process_group_backend": BACKEND, "cluster_environment": LightningEnvironment()}
        strategy = Distributed(SecondAccelerator(), parallel_devices=[device] * world, **group)
        where = {"strategy": strategy, "devices": world, "accelerator": "auto"}
    # Lightning's own sampler would shuffle the training data of several processes.
    data = [peer.in_order(loader("classification", seed).dataset, 12) for seed in (1, 3, 5)]
    with TemporaryDirectory() as folder:
        fit = trainer(Path(folder), callback, max_epochs=1, use_distributed_sampler=False, **where)
        fit.fit(module, data[0], data[1])
        (logged,) = fit.test(module, data[2], verbose=False)
    logged = {key: torch.tensor(value) for key, value in logged.items() if key != "test_loss"}  # of each process
    return {"mean": callback.posterior.mean, "precision": callback.posterior.precision.to_dense(), **logged}


def run_in_group(peer: Peer, name: str) -> dict[str, Any]:
    """On the group of the device with this name."""
    assert not load()
    register()
    device = torch.device(name)
    with peer.group("gloo" if device.type == "cpu" else BACKEND) as processes:
        return run(device, peer, processes)


@pytest.mark.filterwarnings("ignore:.*the posterior does not improve the predictions")
def test_two_processes_find_what_one_finds(second: torch.device, tmp_path: Path) -> None:
    with started(run_in_group, tmp_path, 2, str(second)) as processes:
        expected = run(CPU, Peer(tmp_path), Processes())
        for answers in results(tmp_path, processes):
            assert_same(answers, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_processes_find_what_two_on_gloo_find(second: torch.device, tmp_path: Path) -> None:
    found = [together(run_in_group, tmp_path, 2, device) for device in ("cpu", str(second))]
    for expected, answers in zip(*found, strict=True):
        assert_same(answers, expected, rtol=1e-5, atol=1e-6)
