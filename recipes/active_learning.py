"""Active learning: which images should someone label next?

A small network learns digits from 20 labels, asks for ten more, learns anew, and so on. BALD (Houlsby et al. 2011) asks
for the images whose labels would tell most about the weights: those with the largest mutual information of label and
weights. An image that is merely hard to read has much entropy and little of that. Beside it: the images with the
largest entropy, and images by chance. Means over eight runs, each with other images to label and to test on.

    python recipes/active_learning.py    # two minutes; the picture goes to outputs/active_learning/
"""

from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from support import be_quiet, print_table
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import Prediction, fit_laplace

OUTPUT = Path("outputs/active_learning")
SEEDS, STEPS, SAMPLES, TEST = 8, 150, 200, 600
LABELS = range(20, 201, 10)  # how many there are in each round
PRIOR = 1.0
METHODS: dict[str, Callable[[Prediction], Tensor]] = {
    "BALD": lambda prediction: prediction.mutual_information,
    "entropy": lambda prediction: prediction.entropy,
    "chance": lambda prediction: torch.rand(len(prediction)),
}


def train(x: Tensor, y: Tensor) -> nn.Module:
    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=PRIOR / len(x))
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network


def learn(name: str, seed: int) -> list[float]:
    """The accuracy on other images after each round."""
    torch.manual_seed(seed)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x, order = x.float() / 16, torch.randperm(len(x))
    test, pool, labelled, accuracies = order[:TEST], order[TEST:], order[:0], []
    score = torch.rand(len(pool))  # the first images are the same for all methods
    for n in LABELS:
        chosen = score.topk(n - len(labelled)).indices
        labelled = torch.cat([labelled, pool[chosen]])
        pool = pool[~torch.isin(torch.arange(len(pool)), chosen)]
        posterior = fit_laplace(train(x[labelled], y[labelled]), [(x[labelled], y[labelled])], prior_precision=PRIOR)
        accuracies.append(float((posterior.predict(x[test], "map").label == y[test]).float().mean()))
        score = METHODS[name](posterior.predict(x[pool], link="mc", samples=SAMPLES))
    return accuracies


def judge(accuracies: Tensor) -> dict[str, float]:
    """Means over runs, and their standard errors.  # [runs, rounds]"""
    mean, error = accuracies.mean(0), accuracies.std(0) / len(accuracies) ** 0.5
    shown = [n for n in range(len(LABELS)) if LABELS[n] % 50 == 0 or n == 0]
    return {key: float(t[n]) for n in shown for key, t in ((f"{LABELS[n]} labels", mean), (f"± {LABELS[n]}", error))}


def save_picture(runs: dict[str, Tensor]) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, accuracies in runs.items():
        mean, error = accuracies.mean(0), accuracies.std(0) / len(accuracies) ** 0.5
        axes.plot(LABELS, mean, label=name)
        axes.fill_between(LABELS, mean - error, mean + error, alpha=0.3)
    axes.set(xlabel="labels", ylabel=f"accuracy, mean ± standard error of {SEEDS} runs")
    axes.legend()
    figure.savefig(OUTPUT / "active_learning.png")


def main() -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    runs = {name: torch.zeros(SEEDS, len(LABELS)) for name in METHODS}
    for seed in range(SEEDS):
        for name in METHODS:
            runs[name][seed] = torch.tensor(learn(name, seed))
        last = ", ".join(f"{name} {float(runs[name][seed, -1]):.3f}" for name in METHODS)
        print(f"run {seed + 1} of {SEEDS}, accuracy with {LABELS[-1]} labels: {last}")
    table = {name: judge(accuracies) for name, accuracies in runs.items()}
    table["BALD − chance"] = judge(runs["BALD"] - runs["chance"])  # run by run
    print_table(table)
    save_picture(runs)
    print(f"\nactive_learning.png is in {OUTPUT}")


if __name__ == "__main__":
    main()
