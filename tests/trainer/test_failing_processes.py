"""If one process fails in a collective task, all raise an error at once."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from helpers.networks import made, mlp
from helpers.processes import Peer, together
from helpers.tensors import real
from helpers.training import LitNet, dataset, loader, trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lightning_bayes import LaplaceCallback, SWAGCallback, fit_laplace
from lightning_bayes.callbacks.sharded_fit import fit_diagonal
from lightning_bayes.evidence.linear_model import LinearModel
from lightning_bayes.network import Processes
from lightning_bayes.trainer.checkpoints import callback_state, put_calibrations, put_posterior
from lightning_bayes.trainer.data import loaders_of

SENTENCE = "the disk is full"


class Data(L.LightningDataModule):
    def __init__(self, fails_in: str, on: int) -> None:
        super().__init__()
        self.fails_in, self.on = fails_in, on

    def _fail(self, where: str) -> None:
        if where == self.fails_in and dist.get_rank() == self.on:
            raise OSError(SENTENCE)

    def prepare_data(self) -> None:
        self._fail("prepare_data")

    def setup(self, stage: str) -> None:
        self._fail("setup")

    def train_dataloader(self) -> Any:
        return loader()


class Failing:
    """Batches of which the second fails, in pass number `in_pass`, on the second process."""

    def __init__(self, in_pass: int = 1) -> None:
        self._passes, self._in_pass = 0, in_pass

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        yield real(4, 3), torch.arange(4) % 3
        if self._passes == self._in_pass and dist.get_rank() == 1:
            raise OSError(SENTENCE)
        yield real(3, 3, seed=1), torch.arange(3) % 3


def fit(data: Any, structure: str = "kron", network: Any = None, **options: Any) -> Any:
    return fit_laplace(network or made(mlp), data, structure=structure, processes=Processes.current(), **options)


def with_wrong_label() -> list[Any]:
    y = torch.tensor([0, 1, 2, 0 if dist.get_rank() == 0 else 7])
    return [(real(4, 3), torch.arange(4) % 3), (real(4, 3, seed=1), y)]


def hook(folder: Path) -> None:
    network = made(mlp)

    def fail(*args: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(SENTENCE)

    network.register_forward_hook(fail)
    fit(Failing(0), network=network)


def different_shapes(folder: Path) -> None:
    """Points that cannot be kept together, on the second process."""
    lengths = (2, 2) if dist.get_rank() == 0 else (2, 5)
    data = [(real(4, length, 3, seed=length), torch.arange(4) % 3) for length in lengths]
    fit_laplace(Pooled(), data, gp=8, processes=Processes.current())


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = made(mlp)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mean(1))


def linear_model(call: Callable[[LinearModel, Any], Any]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        call(LinearModel(Failing(), Processes.current()), fit(Failing(0)))

    return run


class FailingExamples(Dataset[Any]):
    """The last one cannot be read on the second process."""

    def __len__(self) -> int:
        return len(dataset())

    def __getitem__(self, index: int) -> Any:
        if index == len(self) - 1 and dist.get_rank() == 1:
            raise OSError(SENTENCE)
        return dataset()[index]


class Normed(LitNet):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def swag_statistics(folder: Path) -> None:
    callback = SWAGCallback(start=0, every_n_steps=1, data=DataLoader(FailingExamples(), 4), progress=False)
    fit = trainer(folder, callback, devices=2, strategy="ddp", precision="64-true", max_epochs=1)
    fit.fit(Normed(), DataLoader(dataset(), 4))


def sharded(data: Callable[[], Any]) -> Callable[[Path], None]:
    """A diagonal over weights that the processes share."""

    def run(folder: Path) -> None:
        network = made(mlp)
        fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
        callback = LaplaceCallback(structure="diag", curvature="empirical_fisher", predictive="bnn")
        fit_diagonal(callback, network, data(), (real(2, 3), torch.arange(2)), Processes.current())

    return run


def data_module(fails_in: str, on: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with loaders_of(Data(fails_in, on), LitNet(), None):
            pass

    return run


class Vanished(L.Callback):
    """The folder of the posterior's file is gone when training ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.folder.rmdir()
            self.folder.write_text("")


def file(folder: Path) -> None:
    target = folder / "posteriors"
    target.mkdir(exist_ok=True)
    callback = LaplaceCallback(save=str(target / "laplace.pt"), tune=None, calibrate=None, progress=False)
    fit = trainer(folder, Vanished(target), callback, devices=2, strategy="ddp", precision="64-true", max_epochs=1)
    fit.fit(LitNet(), DataLoader(dataset(), 4))


def checkpoint(call: Callable[..., Any]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        fit = trainer(folder, devices=2, strategy="ddp", precision="64-true", max_epochs=1)
        fit.fit(LitNet(), DataLoader(dataset(), 4))
        call(fit, str(folder / "missing.ckpt"))

    return run


POSTERIOR: Any = None  # never reached: the file is read first
CASES: dict[str, Callable[[Path], Any]] = {
    "a loader": lambda folder: fit(Failing()),
    "the second pass of ekfac": lambda folder: fit(Failing(2), "ekfac"),
    "the second pass of lowrank": lambda folder: fit(Failing(2), "lowrank"),
    "the log-likelihood": lambda folder: fit(Failing(0)).with_log_likelihood(Failing(), Processes.current()),
    "a label": lambda folder: fit(with_wrong_label()),
    "a hook": hook,
    "the shapes of points": different_shapes,
    "a product with the linear model": linear_model(lambda model, p: model.product(p, torch.ones_like(p.mean))),
    "the linear model at other weights": linear_model(lambda model, p: model.at(p, torch.ones_like(p.mean))),
    "a loader of a sharded network": sharded(Failing),
    "a label of a sharded network": sharded(with_wrong_label),
    "prepare_data": data_module("prepare_data", 0),
    "setup": data_module("setup", 1),
    "put_posterior": checkpoint(lambda fit, path: put_posterior(fit, path, "key", "name", {}, POSTERIOR)),
    "put_calibrations": checkpoint(lambda fit, path: put_calibrations(fit, path, "key", POSTERIOR)),
    "callback_state": checkpoint(lambda fit, path: callback_state(fit, path, "key", "posterior")),
    "the statistics of batch norms": swag_statistics,
    "the posterior's file": file,  # the last: a Trainer whose process failed is not used again
}


def run_all(peer: Peer) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=peer.rank, world_size=peer.size, timeout=timedelta(seconds=30))
    said = {}
    for name, run in CASES.items():
        start, message = time.monotonic(), ""
        try:
            run(peer.folder)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        said[name] = {"message": message, "seconds": time.monotonic() - start}
    return said


SAID = {
    **dict.fromkeys(CASES, SENTENCE),
    **dict.fromkeys(("a label", "a label of a sharded network"), "7"),
    "the shapes of points": "different shapes",
    **dict.fromkeys(("put_posterior", "put_calibrations", "callback_state"), "missing.ckpt"),
    "the posterior's file": "posteriors",
}


def test_all_processes_end_with_the_same_sentence(tmp_path: Path) -> None:
    first, second = together(run_all, tmp_path, 2)
    for name, sentence in SAID.items():
        own, other = first[name]["message"], second[name]["message"]
        assert sentence in own, (name, own, other)
        assert sentence in other, (name, own, other)
        assert [m.startswith("ProcessError: process ") for m in (own, other)].count(True) == 1, (name, own, other)
        assert max(first[name]["seconds"], second[name]["seconds"]) < 15, name
