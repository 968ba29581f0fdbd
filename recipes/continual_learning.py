"""Continual learning: the posterior of one task is the prior of the next.

One network learns to read digits whose pixels are permuted, in another way for each task, and sees each task's images
only once it is there. Plain fine-tuning forgets the tasks before. A Laplace posterior says which weights they need: its
penalty ½ (θ − m)ᵀP(θ − m) in the loss keeps those in place (Kirkpatrick et al. 2017, with a diagonal P; Ritter et al.
2018, with Kronecker factors, which know how weights work together). Beside them: training on all tasks' images at once,
which is what they would do if they forgot nothing.

    python recipes/continual_learning.py            # two minutes; the picture goes to outputs/continual_learning/
    python recipes/continual_learning.py --mnist    # 5,000 images of MNIST, at 14 × 14 pixels, instead of 1,000 digits
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from mnist import read_mnist
from support import Digits, be_quiet, print_table, read_digits
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import LaplacePosterior, fit_laplace

OUTPUT = Path("outputs/continual_learning")
SEEDS, TASKS, STEPS, BATCH, WIDTH = 5, 5, 500, 100, 100
METHODS = {  # the structure of the posterior, and what its penalty is multiplied by
    "fine-tuning": (None, 0),
    "diagonal": ("diag", 1),
    "diagonal, 10 times": ("diag", 10),
    "Kronecker": ("kron", 1),
    "Kronecker, 10 times": ("kron", 10),
    "all tasks at once": (None, 0),
}


def train(network: nn.Module, x: Tensor, y: Tensor, steps: int, prior: LaplacePosterior | None, times: float) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,))
        loss = F.cross_entropy(network(x[batch]), y[batch])
        if prior is not None:
            loss = loss + times * prior.penalty(network) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def learn(method: str, images: Digits, seed: int) -> Tensor:
    """The accuracy on each task after each; those to come have none.  # [tasks, tasks]"""
    torch.manual_seed(seed)
    (x, y), (x_test, y_test) = images.train.tensors, images.test.tensors
    orders = [torch.randperm(x.shape[1]) for _ in range(TASKS)]
    network = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    accuracies, posterior, (structure, times) = torch.full((TASKS, TASKS), torch.nan), None, METHODS[method]
    for task in range(TASKS):
        seen = orders[: task + 1]
        at_hand = seen if method == "all tasks at once" else seen[-1:]
        x_task, y_task = torch.cat([x[:, order] for order in at_hand]), y.repeat(len(at_hand))
        train(network, x_task, y_task, STEPS * len(at_hand), posterior, times)
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


def save_picture(runs: dict[str, Tensor]) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for name, accuracies in runs.items():
        for axes, of in ((left, accuracies.nanmean(2)), (right, accuracies[:, :, 0])):  # [runs, tasks]
            mean, error = of.mean(0), of.std(0) / len(of) ** 0.5
            axes.errorbar(range(1, TASKS + 1), mean, error, label=name, marker="o", capsize=3)
    left.set(title="on all tasks so far", xlabel="tasks so far", ylabel="accuracy", xticks=range(1, TASKS + 1))
    right.set(title="on the first task", xlabel="tasks so far")
    left.legend()
    figure.savefig(OUTPUT / "continual_learning.png")


def main(mnist: bool = False) -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    images, runs = read_mnist("MNIST", 5000, 0) if mnist else read_digits(1000, 0), {}
    for method in METHODS:
        runs[method] = torch.stack([learn(method, images, seed) for seed in range(SEEDS)])
        print(f"{method}: accuracy {float(runs[method][:, -1].mean()):.3f} after {TASKS} tasks, mean of {SEEDS} runs")
    print_table({method: judge(accuracies) for method, accuracies in runs.items()})
    save_picture(runs)
    print(f"\ncontinual_learning.png is in {OUTPUT}")


if __name__ == "__main__":
    main("--mnist" in sys.argv[1:])
