"""Files with every network's Gaussian over outputs for many priors. With these, a rule that chooses a prior, a link and
a temperature can be tried in milliseconds, without a network.

    for s in load_gaussians("build/practice", group="choose"):
        s.val.mean, s.val.cov[d]  # at the prior precision s.deltas[d]

A regression is fitted at `noise_std`, the training RMSE. At another noise `σ = ρ · noise_std`, with `H ∝ 1/σ²`,

    cov(δ, σ) = (H/ρ² + δ)⁻¹ = ρ² (H + δρ²)⁻¹ = ρ² cov(δρ², noise_std),

so the same files work for any noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.practice.setups import SETUPS, SetUp
from benchmarks.practice.training import EVALUATION_BATCH, loader, trained, write
from lightning_bayes import Gaussian, LaplacePosterior, fit_laplace

DELTAS = torch.logspace(-4, 4, 25, dtype=torch.float64)
LARGEST = {"val": 500, "test": 1000, "ood": 500}  # number of examples


@dataclass(frozen=True)
class Outputs:
    """`f(x) ~ N(mean, cov[d])` at the d-th prior."""

    mean: Tensor  # [N, C], the network's own outputs
    cov: Tensor  # [D, N, C, C]
    y: Tensor | None  # classes [N], or standardised targets [N, 1]; None for unknown inputs


@dataclass(frozen=True)
class Gaussians:
    """The Gaussians over outputs of one network with its Kronecker posterior."""

    setup: SetUp
    deltas: Tensor  # [D]
    log_evidence: Tensor  # [D], at the trained weights and at noise_std
    val: Outputs
    test: Outputs
    ood: Outputs | None
    n_train: int
    noise_std: float | None  # the training RMSE of a regression
    y_scale: float  # one unit of a regression's targets
    posterior: dict[str, Any]  # at δ = 1, for `GaussianPosterior.from_state_dict`

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def kind(self) -> str:
        return self.setup.kind

    @property
    def family(self) -> str:
        return self.setup.family

    @property
    def train_rmse(self) -> float | None:
        return self.noise_std


def load_gaussians(folder: str | Path, group: str = "choose", only: str = "") -> Iterator[Gaussians]:
    """The cached Gaussians, in the order of `SETUPS`."""
    for setup in SETUPS:
        wanted = group in (setup.group, "all") and only in setup.name
        if wanted and file_of(Path(folder), setup).exists():
            yield load(setup, Path(folder))


def load(setup: SetUp, folder: Path) -> Gaussians:
    held = torch.load(file_of(folder, setup), weights_only=True)
    parts = {name: None if held[name] is None else Outputs(**held[name]) for name in ("val", "test", "ood")}
    return Gaussians(setup, **{**held, **parts})


def file_of(folder: Path, setup: SetUp) -> Path:
    return folder / "gaussians" / f"{setup.name}.{setup.key}.pt"


def cache(setup: SetUp, folder: Path) -> None:
    path = file_of(folder, setup)
    if path.exists():
        return
    subject = trained(setup, folder)
    task, network = subject.task, subject.module.net
    noise_std, likelihood = None, "classification"
    if setup.kind == "regression":
        noise_std = rmse(network, task.train.x, task.train.y)
        likelihood = Gaussian(noise_std)  # type: ignore[assignment]
    posterior = fit_laplace(network, loader(task.train), likelihood)
    priors = [posterior.with_prior(float(δ)) for δ in DELTAS]

    def outputs(x: Tensor, y: Tensor | None, part: str) -> dict[str, Any]:
        n = LARGEST[part]
        return {**_outputs(posterior, priors, x[:n]), "y": None if y is None else y[:n]}

    write(
        path,
        {
            "deltas": DELTAS,
            "log_evidence": torch.stack([p.log_marginal_likelihood().double() for p in priors]),
            "val": outputs(task.val.x, task.val.y, "val"),
            "test": outputs(task.test.x, task.test.y, "test"),
            "ood": None if task.ood is None else outputs(task.ood, None, "ood"),
            "n_train": posterior.n_data,
            "noise_std": noise_std,
            "y_scale": task.y_scale,
            "posterior": posterior.state_dict(),
        },
    )


def _outputs(posterior: LaplacePosterior, priors: list[LaplacePosterior], x: Tensor) -> dict[str, Tensor]:
    means, covariances = [], []
    for part in x.split(EVALUATION_BATCH):
        mean, of_priors = posterior.functional_for([p.precision for p in priors], part)
        means.append(mean)
        covariances.append(torch.stack(of_priors))
    return {"mean": torch.cat(means), "cov": torch.cat(covariances, dim=1)}


def rmse(network: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((network(x) - y).square().mean().sqrt())
