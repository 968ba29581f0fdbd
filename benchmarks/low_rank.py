"""What a low rank omits: the largest eigenpairs of the GGN beside KFAC and the exact GGN, on small networks.

    LIGHTNING_BAYES_DATA=… python -m benchmarks.low_rank    # some minutes; the table of docs/structures.md

The networks and data are those of `benchmarks.ekfac`. Prior and noise are tuned by the evidence at the trained weights;
`γ` is the number of weights that the data determine. Seconds are the processor time of the fit. For a regression's NLL
by "auto", every other test example is used for tuning, and the rest are scored. Results are medians over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.ekfac import PROBLEMS, Problem, print_medians, score, train
from lightning_bayes import Gaussian, LaplacePosterior, LowRank, fit_laplace

SEEDS = 3
FITS: dict[str, dict[str, Any]] = {
    "kron": {"structure": "kron"},
    **{f"lowrank, {rank}": {"structure": LowRank(rank=rank)} for rank in (20, 50, 100, 200)},
    "full": {"structure": "full"},
}


def by_auto(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> float:
    held_out = DataLoader(TensorDataset(x[::2], y[::2]), 256)
    return score(posterior.tune_prior("auto", held_out), x[1::2], y[1::2])


def rows(make: Callable[[int], Problem]) -> Iterator[dict[str, dict[str, float]]]:
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        network, x, y, x_test, y_test = make(seed)
        train(network, x, y)
        loader, is_regression = DataLoader(TensorDataset(x, y), 256), y.is_floating_point()
        row = {}
        for name, words in FITS.items():
            start = time.process_time()
            fitted = fit_laplace(network, loader, Gaussian(0.1) if is_regression else "classification", **words)
            seconds = time.process_time() - start
            tuned = fitted.tune_prior("marglik")
            row[name] = {
                "trace": float(fitted.curvature.structure.diagonal().sum()),
                "γ": float(tuned.effective_parameters),
                "σ": float(tuned.likelihood.noise_std) if is_regression else float("nan"),
                "log evidence": float(tuned.log_marginal_likelihood()),
                "test NLL": score(tuned, x_test, y_test),
                "NLL by auto": by_auto(fitted, x_test, y_test) if is_regression else float("nan"),
                "seconds": seconds,
            }
        yield {name: {**of, "trace": of["trace"] / row["full"]["trace"]} for name, of in row.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name, make in PROBLEMS.items():
        print_medians(name, list(rows(make)))


if __name__ == "__main__":
    main()
