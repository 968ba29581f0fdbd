"""Tiny networks with data in float64, and the slow, readable answers that the posterior is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers.networks import Wired, mlp
from helpers.tensors import real
from torch import Tensor, nn

from lightning_bayes import Categorical, Gaussian
from lightning_bayes.likelihoods import Likelihood

STRUCTURES = ("full", "diag", "kron")
FITTED = (*STRUCTURES, "ekfac")  # where the fit itself matters, and not only the form
N = 7


@dataclass
class Case:
    network: nn.Module
    x: Any
    y: Tensor
    likelihood: Likelihood

    def loader(self, *sizes: int) -> list[tuple[Any, Tensor]]:
        """Batches of uneven sizes."""
        batches, start = [], 0
        for size in sizes or (3, 2, len(self.y) - 5):
            part = slice(start, start + size)
            batches.append((pick(self.x, part), self.y[part]))
            start += size
        assert start == len(self.y)
        return batches


def pick(x: Any, part: Any) -> Any:
    if isinstance(x, dict):
        return {key: value[part] for key, value in x.items()}
    return tuple(value[part] for value in x) if isinstance(x, tuple) else x[part]


def _moved(norm: Any) -> Any:
    """Running statistics and affine weights away from where they start."""
    for p in norm.parameters():
        nn.init.normal_(p, mean=1.0)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm


def _cnn() -> nn.Module:
    layers = nn.Conv2d(1, 2, 2), _moved(nn.BatchNorm2d(2)), nn.ReLU(), nn.Conv2d(2, 2, 2, stride=2), nn.Flatten()
    return nn.Sequential(*layers, nn.LayerNorm(8), nn.Linear(8, 3))


def _attention() -> nn.Module:
    parts = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 3)}
    return Wired(lambda s, x: s.head(s.attention(x, x, x)[0].mean(1)), **parts)


def _embedding() -> nn.Module:
    parts = {"table": nn.Embedding(5, 3, padding_idx=0), "head": nn.Linear(3, 3)}
    return Wired(lambda s, t: s.head(s.table(t).tanh().sum(1)), **parts)


def _lstm() -> nn.Module:
    return Wired(lambda s, x: s.head(s.inner(x)[0][:, -1]), inner=nn.LSTM(2, 3, batch_first=True), head=nn.Linear(3, 2))


def _merged() -> nn.Module:
    """Positions merged with the batch."""
    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, 3)}
    return Wired(lambda s, x: s.head(s.inner(x.reshape(-1, 3)).relu().reshape(len(x), -1, 4).sum(1)), **parts)


def _two_inputs() -> nn.Module:
    return Wired(
        lambda s, a, b: s.head(torch.cat([s.inner(a).tanh(), b], 1)), inner=nn.Linear(2, 3), head=nn.Linear(5, 3)
    )


_LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])
_MAKERS: dict[str, Callable[[], tuple[nn.Module, Any, Tensor, Likelihood]]] = {
    "mlp": lambda: (mlp(), real(N, 3), _LABELS, Categorical()),
    "regression": lambda: (mlp(outputs=2), real(N, 3), real(N, 2, seed=1), Gaussian(noise_std=0.5)),
    "noise_per_output": lambda: (
        mlp(outputs=2),
        real(N, 3),
        real(N, 2, seed=1),
        Gaussian(noise_std=torch.tensor([0.5, 2.0], dtype=torch.float64)),
    ),
    "one_output": lambda: (
        Wired(lambda s, x: s.body(x).squeeze(1), body=mlp(outputs=1)),
        real(N, 3),
        real(N, seed=1),
        Gaussian(noise_std=0.7),
    ),
    "cnn": lambda: (_cnn(), real(N, 1, 5, 5), _LABELS, Categorical()),
    "attention": lambda: (_attention(), real(N, 3, 4), _LABELS, Categorical()),
    "embedding": lambda: (_embedding(), torch.randint(5, (N, 4)), _LABELS, Categorical()),
    "lstm": lambda: (_lstm(), real(N, 4, 2), real(N, 2, seed=1), Gaussian(noise_std=0.5)),
    "merged": lambda: (_merged(), real(N, 5, 3), _LABELS, Categorical()),
    "two_inputs": lambda: (_two_inputs(), (real(N, 2), real(N, 2, seed=1)), _LABELS, Categorical()),
    "named_inputs": lambda: (_two_inputs(), {"a": real(N, 2), "b": real(N, 2, seed=1)}, _LABELS, Categorical()),
    "segmentation": lambda: (nn.Conv2d(1, 3, 2), real(N, 1, 3, 3), torch.randint(3, (N, 2, 2)), Categorical()),
}
CASES = tuple(_MAKERS)


def case(name: str) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        network, x, y, likelihood = _MAKERS[name]()
        return Case(network.double(), x, y, likelihood)


def flat_weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def set_weights(network: nn.Module, flat: Tensor) -> None:
    with torch.no_grad():
        for p, part in zip(network.parameters(), flat.split([p.numel() for p in network.parameters()]), strict=True):
            p.copy_(part.reshape(p.shape))


def fit_map(network: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = 200) -> None:
    """The minimum of a convex loss, to float64 precision."""
    optimizer = torch.optim.LBFGS(
        network.parameters(),
        max_iter=steps,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(network)
        value.backward()
        return value

    optimizer.step(closure)
    network.zero_grad()
