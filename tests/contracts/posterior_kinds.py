"""All posteriors on the same tiny network and data: the rows of the contract."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from helpers.training import TASKS, LitNet, loader, trainer

from lightning_bayes import (
    IVON,
    DeepEnsemble,
    GaussianPosterior,
    LaplacePosterior,
    OnlineLaplaceCallback,
    Subnetwork,
    SWAGCallback,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    VariationalLastLayerMixin,
    fit_l2m,
    fit_laplace,
)
from lightning_bayes.posterior import ShardedPosterior

N = 11
STRUCTURES, SUBSETS = ("full", "diag", "kron", "ekfac", "lowrank"), ("all", "last_layer")


class VariationalLaplaceNet(VariationalLaplaceMixin, LitNet):
    decay = 0.0


class VariationalInferenceNet(VariationalInferenceMixin, LitNet):
    decay = 0.0


class VariationalLastLayerNet(VariationalLastLayerMixin, LitNet):
    decay = 0.0


def laplace(task: str, structure: str = "kron", subset: str = "all", seed: int = 0) -> GaussianPosterior:
    net = LitNet(task, seed).net
    return fit_laplace(net, loader(task), TASKS[task], prior_precision=2.0, structure=structure, subset=subset)


def process(task: str) -> GaussianPosterior:
    """With training points, for predictions in function space."""
    return fit_laplace(LitNet(task).net, loader(task), TASKS[task], structure="kron", prior_precision=2.0, gp=5)


def after(task: str, structure: str) -> GaussianPosterior:
    """With the posterior of other data, at other weights, for its prior."""
    before = laplace(task, structure, seed=1)
    return fit_laplace(
        LitNet(task).net, loader(task), TASKS[task], prior=before, prior_precision=1.5, structure=structure
    )


def l2m(task: str) -> LaplacePosterior:
    module = LitNet(task)
    optimizer: Any = module.configure_optimizers()
    for batch in loader(task):
        optimizer.zero_grad()
        module.nll(*batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    return fit_l2m(module.net, optimizer, TASKS[task], n_data=N, batch_size=N / 3, loss_scale=1.0)


def sharded(task: str) -> ShardedPosterior:
    """The sharded posterior of one process, which has all shards."""
    whole = l2m(task)
    return ShardedPosterior.from_curvature(whole.network, whole.curvature, whole.prior_precision)


def online(task: str) -> GaussianPosterior:
    callback = OnlineLaplaceCallback(TASKS[task], network="net", prior_precision=2.0)
    _train(LitNet(task), callback)
    return callback.posterior


def swag(task: str, rank: int = 20) -> GaussianPosterior:
    callback = SWAGCallback(TASKS[task], network="net", start=0, every_n_steps=1, rank=rank)
    _train(LitNet(task), callback)
    return callback.posterior


def ivon(task: str) -> GaussianPosterior:
    module = LitNet(task)
    optimizer = IVON(module.net.parameters(), n_data=N, betas=(0.8, 0.9), weight_decay=0.1)
    for batch in loader(task):
        optimizer.zero_grad()
        with optimizer.sampled():
            module.nll(*batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer.posterior(module.net, TASKS[task])


def subnetwork(task: str) -> GaussianPosterior:
    return fit_laplace(LitNet(task).net, loader(task), TASKS[task], subset=Subnetwork(7), prior_precision=2.0)


def variational(kind: Any, task: str, **options: Any) -> GaussianPosterior:
    module = kind(task, variational={"likelihood": TASKS[task], "network": "net", **options})
    _train(module)
    posterior: GaussianPosterior = module.posterior
    return posterior


def _train(module: Any, *callbacks: Any) -> None:
    with TemporaryDirectory() as folder:
        trainer(Path(folder), *callbacks, max_epochs=1, precision="64-true").fit(module, loader(module.task))
    module.zero_grad()


def ensemble(task: str) -> DeepEnsemble:
    return DeepEnsemble([laplace(task), laplace(task, "diag", seed=1)], member_weights=[1.0, 3.0])


MAKERS: dict[str, Callable[[str], Any]] = {
    **{
        f"laplace, {structure}, {subset}": lambda task, a=structure, b=subset: laplace(task, a, b)
        for structure, subset in product(STRUCTURES, SUBSETS)
    },
    "with training points": process,
    "after another posterior, kron": lambda task: after(task, "kron"),
    "after another posterior, full": lambda task: after(task, "full"),
    "l2m": l2m,
    "sharded": sharded,
    "online": online,
    "laplace, subnetwork": subnetwork,
    "swag": swag,
    "ivon": ivon,
    "swag, rank 0": lambda task: swag(task, rank=0),
    "variational laplace": lambda task: variational(VariationalLaplaceNet, task),
    "variational inference": lambda task: variational(VariationalInferenceNet, task),
    "variational, last_layer": lambda task: variational(VariationalLastLayerNet, task, learn_noise=False),
    "ensemble": ensemble,
}
GAUSSIANS = [kind for kind in MAKERS if kind != "ensemble"]
LINEARISED = [kind for kind in GAUSSIANS if kind != "sharded"]  # which needs the whole network for that
OF_LAPLACE = [kind for kind in GAUSSIANS if not kind.startswith(("variational", "swag", "ivon"))]


@cache
def made(kind: str, task: str) -> Any:
    """Shared by all tests, which must not change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MAKERS[kind](task)


def members(posterior: Any) -> tuple[GaussianPosterior, ...]:
    return tuple(posterior.posteriors) if isinstance(posterior, DeepEnsemble) else (posterior,)
