"""What a low rank of Kronecker factors omits, and the time it saves, on trained networks with wide layers.

    LIGHTNING_BAYES_DATA=… python -m benchmarks.factors    # a quarter of an hour; the tables of docs/structures.md

An MLP and a CNN on FashionMNIST, a residual network on CIFAR-10, trained by Adam; their posteriors are fitted to 2,048
of the training images, once, and the factors decomposed again for each rank. Factors of at most 1,000 columns stay
whole. `k/d` is the mean share of eigenpairs that wide factors keep, "log det" and "γ" are the changes of `log det P` in
nats and of `γ` in per cent, for the prior that the exact factors' evidence chooses; "variance" is the mean and maximum
relative error of the outputs' variances at 200 test images. Seconds are the processor time of all decompositions.
Results are medians over seeds. Lines "without remainder" have zeros instead of the flat remainder; "channels ⊗
positions" is a product of two factors for `A` of a 3×3 convolution, instead of its eigenpairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.practice.datasets import images
from benchmarks.report import table
from lightning_bayes import Kron, LaplacePosterior, fit_laplace
from lightning_bayes.posterior.fit import from_curvature
from lightning_bayes.structures import BlockDiagonal, Factor, Kronecker, Structure, factor
from lightning_bayes.structures.factor import Rank

SEEDS = 2
RANKS: dict[str, tuple[Rank, float, str]] = {  # the rank, the share of the trace, and the treatment of the rest
    "exact": (None, 1.0, ""),
    **{f"{share:.0%} of the trace": ("auto", share, "") for share in (0.8, 0.9, 0.95, 0.99)},
    "90% without remainder": ("auto", 0.9, "dropped"),
    "99% without remainder": ("auto", 0.99, "dropped"),
    "rank 50": (50, 1.0, ""),
    "rank 200": (200, 1.0, ""),
    "channels ⊗ positions": (None, 1.0, "split"),
}
KEYS = ("seconds", "k/d", "MB", "log det", "γ, %", "variance, mean", "at most", "test NLL")


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, 2, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.short = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.second(F.relu(self.first(x))))


def mlp() -> nn.Module:
    hidden = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))


def cnn() -> nn.Module:
    body = (nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 2, 1))
    return nn.Sequential(*body, nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10))


def resnet() -> nn.Module:
    body = (nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), Residual(32, 64), Residual(64, 128))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "MLP 784-1024-1024-10, FashionMNIST": (mlp, "FashionMNIST"),
    "CNN, 128 channels, FashionMNIST": (cnn, "FashionMNIST"),
    "residual network, 128 channels, CIFAR-10": (resnet, "CIFAR10"),
}


def pictures(name: str, train: bool, n: int) -> tuple[Tensor, Tensor]:
    x, y = images(name, train)
    assert y is not None
    x = x[:n].float()
    return (x - 80) / 80, y[:n]


def train(network: nn.Module, x: Tensor, y: Tensor, epochs: int = 5) -> None:
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()


@contextmanager
def share_of_trace(share: float) -> Iterator[None]:
    before = factor.SHARE, factor.MOST
    factor.SHARE, factor.MOST = share, 1
    try:
        yield
    finally:
        factor.SHARE, factor.MOST = before


def split(matrix: Tensor, positions: int = 9) -> Factor:
    """`A` of a 3×3 convolution with bias as a product of its partial traces, apart from the bias."""
    A = matrix[0, :-1, :-1].unflatten(0, (-1, positions)).unflatten(2, (-1, positions))  # [C, T, C, T]
    (λ, Q), (μ, R) = (torch.linalg.eigh(part) for part in (torch.einsum("ctdt->cd", A), torch.einsum("ctcs->ts", A)))
    vectors = torch.block_diag(torch.kron(Q, R), torch.ones(1, 1))
    values = torch.cat([torch.outer(λ, μ).flatten() / λ.sum(), matrix[0, -1:, -1]])
    return Factor(vectors.unsqueeze(0), values.clamp(min=0).unsqueeze(0))


def decomposed(structure: Structure, rank: Rank, share: float, rest: str) -> Structure:
    """Decompose the posterior's wide factors again with another rank."""
    assert isinstance(structure, BlockDiagonal)

    def of(whole: Factor) -> Factor:
        if rest == "split" and whole.size > factor.WIDE and whole.size % 9 == 1:
            return split(whole.matrix)
        found = Factor.from_matrix(whole.matrix, rank=rank if whole.size > factor.WIDE else None)
        dropped = found.remainder is not None and rest == "dropped"
        return replace(found, remainder=torch.zeros_like(found.values[:, :1])) if dropped else found

    with share_of_trace(share):
        blocks = (
            replace(block, left=of(block.left), right=of(block.right)) if isinstance(block, Kronecker) else block
            for block in structure.blocks
        )
        return replace(structure, blocks=tuple(blocks))


def numbers(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    structure = posterior.curvature.structure
    assert isinstance(structure, BlockDiagonal)
    sides = [side for block in structure.blocks if isinstance(block, Kronecker) for side in (block.left, block.right)]
    wide = [side.values.shape[-1] / side.size for side in sides if side.size > factor.WIDE]
    stored = sum(t.numel() for side in sides for t in (side.vectors, side.values) if t is not None)
    probs = posterior.predict(x).probs
    assert probs is not None
    return {
        "k/d": torch.tensor(wide).mean(),
        "MB": torch.tensor(4e-6 * stored),
        "log det": posterior.precision.logdet() - len(posterior.mean) * posterior.prior_precision.log().mean(),
        "γ, %": posterior.effective_parameters,
        "variance": posterior.functional(x[:200])[1].diagonal(dim1=1, dim2=2),
        "test NLL": F.nll_loss(probs.log(), y),
    }


def rows(make: Callable[[], nn.Module], data: str, seed: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(seed)
    network, (x, y), (x_test, y_test) = make(), pictures(data, True, 10_000), pictures(data, False, 1000)
    train(network, x, y)
    batches = list(zip(x[:2048].split(128), y[:2048].split(128), strict=True))
    fitted = fit_laplace(network, batches, curvature="fisher_mc", structure=Kron(updatable=True))
    δ = fitted.tune_prior("marglik").prior_precision
    found: dict[str, dict[str, float]] = {}
    exact: dict[str, Tensor] = {}
    for name, options in RANKS.items():
        start = time.process_time()
        structure = decomposed(fitted.curvature.structure, *options)
        seconds = time.process_time() - start
        posterior = from_curvature(network, replace(fitted.curvature, structure=structure), δ)
        of = numbers(posterior, x_test, y_test)
        exact = exact or of
        error = (of["variance"] / exact["variance"] - 1).abs()
        found[name] = {
            "seconds": seconds,
            **{key: float(of[key]) for key in ("k/d", "MB", "test NLL")},
            "log det": float(of["log det"] - exact["log det"]),
            "γ, %": 100 * float(of["γ, %"] / exact["γ, %"] - 1),
            "variance, mean": float(error.mean()),
            "at most": float(error.max()),
        }
    print(f"{data}, seed {seed}: log det {float(exact['log det']):.0f}, γ {float(exact['γ, %']):.0f}", flush=True)
    return found


def print_medians(name: str, measured: Sequence[dict[str, dict[str, float]]]) -> None:
    lines = [[fit, *(f"{median(row[fit][key] for row in measured):.3g}" for key in KEYS)] for fit in measured[0]]
    print(f"\n{name}\n\n{table(['factors', *KEYS], lines)}\n", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    for name, (make, data) in PROBLEMS.items():
        print_medians(name, [rows(make, data, seed) for seed in range(SEEDS)])


if __name__ == "__main__":
    main()
