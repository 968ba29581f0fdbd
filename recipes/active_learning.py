"""Active learning: which images should someone label next?

A small network learns digits from 20 labels, asks for ten more, trains again, and so on. BALD (Houlsby et al. 2011)
asks for the images with the highest mutual information of label and weights: their labels say most about the weights.
An image that is merely hard to read has high entropy but little mutual information. The baselines are images with high
entropy and random images. Results are means over eight runs, each with different images to label and to test on.

    python recipes/active_learning.py    # two minutes; table and picture go to outputs/active_learning/
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from program import progress, start
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import GLM, Prediction, fit_laplace

TEST, PRIOR = 600, 1.0


def varied(score: Tensor, power: float = 8.0) -> Tensor:
    """Random keys; the largest are drawn with probability proportional to a power of the score. Images with the largest
    scores are similar, so ten of them add little to one (Kirsch et al. 2023, "Stochastic batch acquisition: a simple
    baseline for deep active learning")."""
    return power * score.log() - torch.empty_like(score).exponential_().log()


METHODS: dict[str, Callable[[Prediction], Tensor]] = {
    "BALD": lambda prediction: varied(prediction.mutual_information),
    "entropy": lambda prediction: varied(prediction.entropy),
    "chance": lambda prediction: torch.rand(len(prediction)),
}


@dataclass(frozen=True)
class Settings:
    runs: int = 8
    steps: int = 150
    samples: int = 200
    labels: tuple[int, ...] = tuple(range(20, 201, 10))  # number of labels in each round


def train(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=PRIOR / len(x))
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network


def learn(settings: Settings, name: str, seed: int) -> list[float]:
    """The accuracy on test images after each round."""
    torch.manual_seed(seed)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x, order = x.float() / 16, torch.randperm(len(x))
    test, pool, labelled, accuracies = order[:TEST], order[TEST:], order[:0], []
    score = torch.rand(len(pool))  # the first images are the same for all methods
    for n in settings.labels:
        chosen = score.topk(n - len(labelled)).indices
        labelled = torch.cat([labelled, pool[chosen]])
        pool = pool[~torch.isin(torch.arange(len(pool)), chosen)]
        data = (x[labelled], y[labelled])
        posterior = fit_laplace(train(*data, settings.steps), [data], prior_precision=PRIOR)
        accuracies.append(float((posterior.predict(x[test], "map").label == y[test]).float().mean()))
        score = METHODS[name](posterior.predict(x[pool], GLM(link="mc", samples=settings.samples)))
    return accuracies


def judge(accuracies: Tensor, labels: tuple[int, ...]) -> dict[str, float]:
    """Means over runs, and their standard errors.  # [runs, rounds]"""
    mean, error = accuracies.mean(0), accuracies.std(0) / len(accuracies) ** 0.5
    shown = [n for n in range(len(labels)) if labels[n] % 50 == 0 or n == 0]
    return {key: float(t[n]) for n in shown for key, t in ((f"{labels[n]} labels", mean), (f"± {labels[n]}", error))}


def draw(runs: dict[str, Tensor], labels: tuple[int, ...]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, accuracies in runs.items():
        mean, error = accuracies.mean(0), accuracies.std(0) / len(accuracies) ** 0.5
        axes.plot(labels, mean, label=name)
        axes.fill_between(labels, mean - error, mean + error, alpha=0.3)
    axes.set(xlabel="labels", ylabel=f"accuracy, mean ± standard error of {len(accuracies)} runs")
    axes.legend()
    return figure


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(runs=2, steps=60, samples=50, labels=(20, 60, 100))}
    run = start(__doc__, "active_learning", scales, threads=1)
    settings, accuracies = run.settings, {name: [] for name in METHODS}
    for seed in progress(run.seeds(settings.runs), "runs"):
        for name in METHODS:
            accuracies[name].append(run.once(f"{name} {seed}", learn, settings, name, seed))
    runs = {name: torch.tensor(rows) for name, rows in accuracies.items()}
    table = {name: judge(rows, settings.labels) for name, rows in runs.items()}
    table["BALD − chance"] = judge(runs["BALD"] - runs["chance"], settings.labels)  # difference within each run
    run.save_table("table", table)
    run.save_picture("active_learning", draw(runs, settings.labels))


if __name__ == "__main__":
    main()
