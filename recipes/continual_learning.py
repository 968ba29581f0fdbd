"""Continual learning: the posterior of one task is the prior of the next.

One network learns to read digits whose pixels are permuted differently for each task, and sees only the images of the
current task. Plain fine-tuning forgets earlier tasks. A Laplace posterior measures which weights they need: its
penalty ½ (θ − m)ᵀP(θ − m) in the loss keeps those in place (Kirkpatrick et al. 2017, with a diagonal P; Ritter et al.
2018, with Kronecker factors, which include correlations between weights). The reference trains on the images of all
tasks at once and forgets nothing.

    python recipes/continual_learning.py            # two minutes; results go to outputs/continual_learning/
    python recipes/continual_learning.py --mnist    # 5,000 images of MNIST, at 14 × 14 pixels, instead of 1,000 digits
"""

from dataclasses import dataclass

import torch
from digits import Digits, read_digits
from matplotlib.figure import Figure
from mnist import read_mnist
from program import progress, start
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import LaplacePosterior, fit_laplace

METHODS = {  # the posterior's structure, and the factor on its penalty
    "fine-tuning": (None, 0),
    "diagonal": ("diag", 1),
    "diagonal, 10 times": ("diag", 10),
    "Kronecker": ("kron", 1),
    "Kronecker, 10 times": ("kron", 10),
    "all tasks at once": (None, 0),
}


@dataclass(frozen=True)
class Settings:
    runs: int = 5
    tasks: int = 5
    steps: int = 500
    width: int = 100
    images: str = "digits"  # or "MNIST"


def train(network: nn.Module, x: Tensor, y: Tensor, steps: int, prior: LaplacePosterior | None, times: float) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (100,))
        loss = F.cross_entropy(network(x[batch]), y[batch])
        if prior is not None:
            loss = loss + times * prior.penalty(network) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def learn(settings: Settings, method: str, images: Digits, seed: int) -> Tensor:
    """The accuracy on each task after each task; future tasks have none.  # [tasks, tasks]"""
    torch.manual_seed(seed)
    (x, y), (x_test, y_test), tasks, width = images.train.tensors, images.test.tensors, settings.tasks, settings.width
    orders = [torch.randperm(x.shape[1]) for _ in range(tasks)]
    network = nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, 10))
    accuracies, posterior, (structure, times) = torch.full((tasks, tasks), torch.nan), None, METHODS[method]
    for task in range(tasks):
        seen = orders[: task + 1]
        at_hand = seen if method == "all tasks at once" else seen[-1:]
        x_task, y_task = torch.cat([x[:, order] for order in at_hand]), y.repeat(len(at_hand))
        train(network, x_task, y_task, settings.steps * len(at_hand), posterior, times)
        if structure is not None:
            posterior = fit_laplace(network, [(x_task, y_task)], structure=structure, prior=posterior)
        for number, order in enumerate(seen):
            accuracies[task, number] = (network(x_test[:, order]).argmax(1) == y_test).float().mean()
    return accuracies


def judge(runs: Tensor) -> dict[str, float]:
    """After the last task, means over runs and their standard errors.  # [runs, tasks, tasks]"""
    parts = {"all tasks": runs[:, -1].mean(1), "first task": runs[:, -1, 0], "last task": runs[:, -1, -1]}
    row = {}
    for name, accuracy in parts.items():
        row |= {name: float(accuracy.mean()), f"± {name}": float(accuracy.std() / len(runs) ** 0.5)}
    return row


def draw(runs: dict[str, Tensor], tasks: range) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for name, accuracies in runs.items():
        for axes, of in ((left, accuracies.nanmean(2)), (right, accuracies[:, :, 0])):  # [runs, tasks]
            mean, error = of.mean(0), of.std(0) / len(of) ** 0.5
            axes.errorbar(tasks, mean, error, label=name, marker="o", capsize=3)
    left.set(title="on all tasks so far", xlabel="tasks so far", ylabel="accuracy", xticks=tasks)
    right.set(title="on the first task", xlabel="tasks so far")
    left.legend()
    return figure


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(2, 2, 80, 30), "mnist": Settings(images="MNIST")}
    run = start(__doc__, "continual_learning", scales, threads=1)
    settings, seeds, runs = run.settings, run.seeds(run.settings.runs), {}
    images = read_digits(1000, 0) if settings.images == "digits" else read_mnist(run.data, settings.images, 5000, 0)
    for method in progress(METHODS, "methods"):
        repeated = (run.once(f"{method} {seed}", learn, settings, method, images, seed) for seed in seeds)
        runs[method] = torch.stack(list(repeated))
    run.save_table("table", {method: judge(accuracies) for method, accuracies in runs.items()})
    run.save_picture("continual_learning", draw(runs, range(1, settings.tasks + 1)))


if __name__ == "__main__":
    main()
