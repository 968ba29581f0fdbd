"""What refitted eigenvalues change: KFAC, EKFAC, the exact blocks of the layers, and the exact GGN on small networks.

    LIGHTNING_BAYES_DATA=… python -m benchmarks.ekfac    # some minutes; the tables of docs/structures.md

UCI regression (tanh, standard splits) and scikit-learn's digits (an MLP and a CNN, 1,000 of the 1,797 to train on),
trained by Adam without weight decay. Prior and noise are tuned by the evidence at the trained weights; `γ` is the
number of weights that the data determine, also for the prior and noise of the exact GGN. The error is the Frobenius
norm of the difference from the exact blocks, relative to their norm. Seconds are the processor time of the fit. Results
are medians over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.practice.datasets import bundled, uci_regression
from benchmarks.report import table
from lightning_bayes import Gaussian, LaplacePosterior, fit_laplace
from lightning_bayes.posterior.fit import from_curvature
from lightning_bayes.structures import BlockDiagonal, Dense

SEEDS = 5
STRUCTURES = ("kron", "ekfac", "blocks", "full")
Problem = tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]  # a network with its training and test data


def regression(name: str, seed: int, *hidden: int) -> Problem:
    x, y, train, test = uci_regression(name, seed)
    x, y = x.double(), y.double()
    x = (x - x[train].mean(0)) / x[train].std(0).clamp(min=1e-6)
    y = ((y - y[train].mean()) / y[train].std()).unsqueeze(1)
    widths = (x.shape[1], *hidden)
    body = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(widths[-1], 1)), x[train], y[train], x[test], y[test]


def digits(network: Callable[[], nn.Module], seed: int) -> Problem:
    x, y = bundled("digits")
    x, order = (x.double() / 16).unflatten(1, (1, 8, 8)), torch.randperm(len(x))
    train, test = order[:1000], order[1000:]
    return network(), x[train], y[train], x[test], y[test]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))


def cnn() -> nn.Module:
    body = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "yacht, 6-50-50-1": lambda seed: regression("yacht", seed, 50, 50),
    "yacht, 6-50-1": lambda seed: regression("yacht", seed, 50),
    "concrete, 8-50-1": lambda seed: regression("concrete", seed, 50),
    "energy, 8-50-1": lambda seed: regression("energy", seed, 50),
    "digits, 64-30-10": lambda seed: digits(mlp, seed),
    "digits, CNN": lambda seed: digits(cnn, seed),
}


def train(network: nn.Module, x: Tensor, y: Tensor) -> None:
    loss, epochs = (F.mse_loss, 300) if y.is_floating_point() else (F.cross_entropy, 40)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss(network(x[part]), y[part]).backward()
            optimizer.step()


def posteriors(network: nn.Module, x: Tensor, y: Tensor) -> Iterator[tuple[str, LaplacePosterior, float]]:
    """The untuned posterior and the seconds of the fit."""
    loader = DataLoader(TensorDataset(x, y), 256)
    likelihood = Gaussian(0.1) if y.is_floating_point() else "classification"
    fitted = {}
    for word in ("kron", "ekfac", "full"):
        times = []
        for _ in range(3):
            start = time.process_time()
            fitted[word] = fit_laplace(network, loader, likelihood, structure=word)
            times.append(time.process_time() - start)
        yield word, fitted[word], min(times)
    full, layers = fitted["full"].curvature, fitted["kron"].curvature.structure
    assert isinstance(layers, BlockDiagonal)
    blocks = torch.zeros_like(full.structure.to_dense())
    for layout in layers.layouts:
        places = layout.gather(torch.arange(layers.size))
        blocks[places.unsqueeze(1), places] = full.structure.to_dense()[places.unsqueeze(1), places]
    yield "blocks", from_curvature(network, replace(full, structure=Dense(blocks))), float("nan")


def score(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> float:
    """The test NLL."""
    prediction = posterior.predict(x)
    if prediction.probs is not None:
        return float(F.nll_loss(prediction.probs.log(), y))
    assert prediction.mean is not None
    assert prediction.variance is not None
    return float(F.gaussian_nll_loss(prediction.mean, y, prediction.variance, full=True))


def rows(make: Callable[[int], Problem]) -> Iterator[dict[str, dict[str, float]]]:
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        network, x, y, x_test, y_test = make(seed)
        train(network, x, y)
        fits = {word: (fitted, seconds) for word, fitted, seconds in posteriors(network, x, y)}
        exact, H = fits["full"][0].tune_prior("marglik"), fits["blocks"][0].curvature.structure.to_dense()
        row = {}
        for word in STRUCTURES:
            fitted, seconds = fits[word]
            tuned = exact if word == "full" else fitted.tune_prior("marglik")
            same = fitted.with_noise(exact.likelihood.noise_std) if y.is_floating_point() else fitted
            row[word] = {
                "error": float((fitted.curvature.structure.to_dense() - H).norm() / H.norm()),
                "γ at exact δ, σ": float(same.with_prior(exact.prior_precision).effective_parameters),
                "γ": float(tuned.effective_parameters),
                "δ": float(tuned.prior_precision),
                "σ": float(tuned.likelihood.noise_std) if y.is_floating_point() else float("nan"),
                "log evidence": float(tuned.log_marginal_likelihood()),
                "test NLL": score(tuned, x_test, y_test),
                "seconds": seconds,
            }
        yield row


def print_medians(name: str, measured: Sequence[dict[str, dict[str, float]]]) -> None:
    """Print medians over the seeds, with a line for each fit."""
    lines = []
    for fit, numbers in measured[0].items():
        columns = [[row[fit][key] for row in measured] for key in numbers]
        lines.append([fit, *(f"{median(values):.3g}" for values in columns)])
    print(f"\n{name}\n\n{table(['structure', *measured[0]['kron']], lines)}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name, make in PROBLEMS.items():
        measured = list(rows(make))
        print_medians(name, measured)
        lower = sum(row["ekfac"]["test NLL"] < row["kron"]["test NLL"] for row in measured)
        print(f"\nekfac has the lower test NLL than kron for {lower} of {SEEDS} seeds", flush=True)


if __name__ == "__main__":
    main()
