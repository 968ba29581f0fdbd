"""Evidence for modern networks, table 1: the test NLL of priors that the evidence chooses at the trained weights, and
at the optimum of the linearised network (Antorán et al. 2022; tutorial, section 6).

    python -m recipes.papers.evidence.table1                 # minutes: 500 digits of MNIST, narrow networks
    python -m recipes.papers.evidence.table1 --paper         # all of MNIST, about 46,000 weights; wants a GPU
    python -m recipes.papers.evidence.table1 --networks CNN RESNET --passes 10

Each network is trained by Adam without weight decay. A Kronecker posterior then gets one prior precision for all
weights, one for each layer before a normalisation and one for the rest, or one per layer, by the evidence at θ̃
(`tune_prior("mackay")`) and at θ⋆ (`tune_prior("linear", iterate=True)`). The table is printed; the numbers of every
seed go to outputs/papers/evidence/table1.csv.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplacePosterior, fit_laplace
from recipes.papers.evidence.networks import NETWORKS
from recipes.papers.image_data import DEFAULT_FOLDER, read_images

GROUPS = {"single λ": None, "normalised λs": "normalised", "λ per layer": "layers"}
PAPER = {  # table 1: single and multiple λs at θ⋆, then at θ̃
    "T-FORMER": (0.162, 0.162, 0.310, 0.162),
    "CNN": (0.025, 0.025, 0.253, 0.205),
    "RESNET": (0.017, 0.016, 0.252, 0.236),
    "PRE-RESNET": (0.017, 0.016, 0.220, 0.239),
    "FIXUP": (0.055, 0.061, 0.153, 0.200),
}


def train(network: nn.Module, data: TensorDataset, epochs: int, seed: int) -> None:
    loader = DataLoader(data, 50, shuffle=True, generator=torch.Generator().manual_seed(seed))
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(adam, epochs)
    for _ in range(epochs):
        for x, y in loader:
            adam.zero_grad()
            F.cross_entropy(network(x), y).backward()
            adam.step()
        rate.step()
    network.eval()


def nll(posterior: LaplacePosterior, data: TensorDataset, predictive: str = "glm") -> float:
    total = 0.0
    for x, y in DataLoader(data, 250):
        probs = posterior.predict(x, predictive, samples=1).probs
        total -= float(probs.gather(1, y[:, None].to(probs.device)).log().sum())
    return total / len(data)


def scores(network: nn.Module, train_set: TensorDataset, test_set: TensorDataset, passes: int) -> dict[str, float]:
    """The NLL of each way to choose the prior."""
    loader = DataLoader(train_set, 250)
    posterior = fit_laplace(network, loader, "classification")
    row = {"MAP": nll(posterior, test_set, "map")}
    for name, groups in GROUPS.items():
        options: dict[str, Any] = {"prior_groups": groups}
        row[f"θ̃, {name}"] = nll(posterior.tune_prior("mackay", **options), test_set)
        options |= {"loader": loader, "iterate": True, "passes": passes}
        row[f"θ⋆, {name}"] = nll(posterior.tune_prior("linear", **options), test_set)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="all images, and networks of about 46,000 weights")
    parser.add_argument("--dataset", default="MNIST", choices=["MNIST", "FashionMNIST", "KMNIST"])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--n-train", type=int, default=500)
    parser.add_argument("--n-test", type=int, default=1000)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--passes", type=int, default=30, help="over the training data, to find θ⋆ and the prior")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--output", type=Path, default=Path("outputs/papers/evidence"))
    arguments = parser.parse_args()
    if arguments.paper:
        arguments.n_train = arguments.n_test = None
        arguments.width = 32
    arguments.output.mkdir(parents=True, exist_ok=True)
    images = read_images(
        arguments.dataset, arguments.data, arguments.output / "data", arguments.n_train, arguments.n_test
    )
    rows: list[dict[str, Any]] = []
    for name in arguments.networks:
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            network, start = NETWORKS[name](arguments.width), time.perf_counter()
            train(network, images.train, arguments.epochs, seed)
            row = scores(network, images.train, images.test, arguments.passes)
            rows.append({"network": name, "seed": seed, "weights": sum(p.numel() for p in network.parameters()), **row})
            values = ", ".join(f"{key} {value:.3f}" for key, value in row.items())
            print(f"{name}, seed {seed}, {time.perf_counter() - start:.0f} s: {values}", flush=True)
            with (arguments.output / "table1.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    print_table(rows, arguments.networks)


def print_table(rows: list[dict[str, Any]], networks: list[str]) -> None:
    """Mean and standard deviation over seeds, and the paper's means."""
    print(f"\n{'test NLL':<22}" + "".join(f"{name:>16}" for name in networks))
    for key in list(rows[0])[3:]:
        cells = []
        for name in networks:
            values = torch.tensor([row[key] for row in rows if row["network"] == name])
            cells.append(f"{values.mean():.3f} ± {values.std(correction=0):.3f}")
        print(f"{key:<22}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"\n{'the paper':<22}" + "".join(f"{name:>16}" for name in networks))
    for n, key in enumerate(("θ⋆, single λ", "θ⋆, multiple λs", "θ̃, single λ", "θ̃, multiple λs")):
        print(f"{key:<22}" + "".join(f"{PAPER[name][n]:>16.3f}" for name in networks))


if __name__ == "__main__":
    main()
