"""Variational Laplace against MAP and variational inference: tables 1 and 2 and figures 1 and 2 of the paper (Unlu and
Aitchison, "Variational Laplace for Bayesian neural networks").

    python -m recipes.papers.variational_laplace.tables            # minutes: a narrow network on some of FashionMNIST
    python -m recipes.papers.variational_laplace.tables --paper    # PreActResNet-18, 200 epochs; wants a GPU
    python -m recipes.papers.variational_laplace.tables --dataset CIFAR10 --width 16 --n-train 10000 --epochs 20

All methods share one network, one prior (He's scale, tempered by β), one optimizer and one test: MAP; VI, tested by
the network at the mean and by 10 weight samples; and VL, tested at the mean. Batch-norm has no prior and no posterior.
Tables are printed; pictures and numbers (`results.csv`, `elbo.csv`) go to
outputs/papers/variational_laplace/<dataset>/.
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_bayes import LogSigmaMultiplierMixin, VariationalInferenceMixin, VariationalLaplaceMixin, metrics
from recipes.papers.image_data import DEFAULT_FOLDER, PLACES, VARIABLE, Images, read_images
from recipes.papers.variational_laplace.figures import PAPER, PAPER_SECONDS, figure_1, figure_2
from recipes.papers.variational_laplace.preact_resnet import NORMS, PreActResNet

SAMPLES = 10
SCORES = ("nll", "acc", "ece")
ROWS = ("VL", "VI (mean)", "VI (10 samples)", "MAP")  # in the order of table 1


@dataclass(frozen=True)
class Settings:
    """What runs in minutes on two cores; `--paper` has the paper's."""

    width: int = 8
    stride: int = 2
    n_train: int | None = 1000
    n_test: int | None = 2000
    epochs: int = 20
    batch: int = 64
    lr: float = 3e-3
    betas: tuple[float, ...] = (0.1, 0.03, 0.01)
    multipliers: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)  # of figure 2
    early_stopping_betas: tuple[float, ...] = (0.1,)  # its rows
    seed: int = 0

    multiplier = 10.0  # of log σ's learning rate everywhere else

    @property
    def milestones(self) -> tuple[int, int]:
        """The learning rate is divided by 10 after half and three quarters of the epochs."""
        return self.epochs // 2, 3 * self.epochs // 4


PAPERS = Settings(
    width=64,
    stride=1,
    n_train=None,
    n_test=None,
    epochs=200,
    batch=128,
    lr=1e-4,
    betas=(1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),  # the paper does not say which
    early_stopping_betas=(1.0, 0.1),
)


class LitNet(L.LightningModule):
    """An ordinary LightningModule: nothing in it is Bayesian."""

    def __init__(self, network: nn.Module, lr: float, milestones: Iterable[int]) -> None:
        super().__init__()
        self.net, self.lr, self.milestones = network, lr, list(milestones)
        self.scores = nn.ModuleDict(
            {"nll": metrics.NegativeLogLikelihood(), "acc": MeanMetric(), "ece": metrics.CalibrationError()}
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        probs = self(x).double().softmax(1)
        self.scores["nll"].update(probs, y)
        self.scores["ece"].update(probs, y)
        self.scores["acc"].update((probs.argmax(1) == y).float())
        self.log_dict({f"test_{name}": metric for name, metric in self.scores.items()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, self.milestones)]


class MAP(LitNet):
    """The log-joint: the prior of the two below, at a single point."""

    def __init__(self, *args: Any, beta: float, n_data: int) -> None:
        super().__init__(*args)
        self.weight = beta / n_data

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.weight * negative_log_prior(self.net)


class VI(LogSigmaMultiplierMixin, VariationalInferenceMixin, LitNet):
    pass


class VL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, LitNet):
    pass


def negative_log_prior(network: nn.Module) -> Tensor:
    """`Σ w²/2s²` with `s² = 2/fan-in`, of convolutions and the linear layer."""
    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    fan_in = {p: layer.weight[0].numel() for layer in layers for p in layer.parameters()}
    return torch.stack([p.square().sum() * n / 4 for p, n in fan_in.items()]).sum()


@dataclass
class Run:
    """One training: what it was, what it scored, and its epochs."""

    method: str
    beta: float
    multiplier: float
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # by row of table 1
    elbo: list[float] = field(default_factory=list)  # per example, of each epoch
    seconds: float = float("nan")  # of the fastest epoch


class Watch(L.Callback):
    """The ELBO and the time of every epoch."""

    def __init__(self) -> None:
        self.elbo: list[float] = []
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        if "train_elbo" in trainer.callback_metrics:
            self.elbo.append(float(trainer.callback_metrics["train_elbo"]))


def make(method: str, beta: float, multiplier: float, images: Images, settings: Settings) -> LitNet:
    """The same initial weights for every method."""
    L.seed_everything(settings.seed, verbose=False)
    network = PreActResNet(images.channels, images.classes, settings.width, settings.stride)
    shared = (network, settings.lr, settings.milestones)
    if method == "MAP":
        return MAP(*shared, beta=beta, n_data=len(images.train))
    variational: dict[str, Any] = {"likelihood": "classification", "beta": beta, "prior_std": "he"}
    variational |= {"deterministic": [NORMS], "seed": settings.seed, "samples": SAMPLES}
    variational["predictive"] = "bnn" if method == "VI" else "mean"
    kind: Callable[..., LitNet] = {"VI": VI, "VL": VL}[method]
    return kind(*shared, log_sigma_multiplier=multiplier, variational=variational)


def run(method: str, beta: float, multiplier: float, images: Images, settings: Settings, folder: Path) -> Run:
    """Train and test by the Trainer, whatever the method is."""
    module, watch = make(method, beta, multiplier, images, settings), Watch()
    trainer = L.Trainer(
        max_epochs=settings.epochs,
        callbacks=[watch],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(images.train, settings.batch, shuffle=True))
    (logged,) = trainer.test(module, DataLoader(images.test, 500), verbose=False)
    done = Run(method, beta, multiplier, elbo=watch.elbo, seconds=min(watch.seconds))
    at_mean = {score: logged[f"test_{score}"] for score in SCORES}  # the module's own, at its own weights
    done.scores["VI (mean)" if method == "VI" else method] = at_mean
    if method == "VI":
        done.scores["VI (10 samples)"] = {score: logged[f"test_{score}_vi"] for score in SCORES}
    return done


def plan(settings: Settings) -> list[tuple[str, float, float]]:
    """Every training once: table 1 and figure 1 sweep β, figure 2 the multiplier."""
    wanted = [(method, beta, settings.multiplier) for beta in settings.betas for method in ("MAP", "VI", "VL")]
    wanted += [
        (method, beta, multiplier)
        for beta in settings.early_stopping_betas
        for multiplier in settings.multipliers
        for method in ("VI", "VL")
    ]
    return list(dict.fromkeys(wanted))


def best(runs: list[Run], row: str, score: str, settings: Settings) -> tuple[float, float]:
    """The best value over β and the β that gave it; chosen on the test images, as in the paper."""
    swept = [r for r in runs if row in r.scores and r.multiplier == settings.multiplier and r.beta in settings.betas]
    values = [(r.scores[row][score], r.beta) for r in swept]
    return max(values) if score == "acc" else min(values)


def table_1(runs: list[Run], dataset: str, settings: Settings) -> str:
    lines = [f"{'':<16}" + "".join(f"{name:>10}{'(β)':>8}{'paper':>8}" for name in ("NLL", "accuracy", "ECE"))]
    for row in ROWS:
        line = f"{row:<16}"
        for place, score in enumerate(SCORES):
            value, beta = best(runs, row, score, settings)
            paper = f"{PAPER[dataset][row][place]:.3f}" if dataset in PAPER else "–"
            line += f"{value:>10.4f}{beta:>8g}{paper:>8}"
        lines.append(line)
    return "\n".join(lines)


def table_2(runs: list[Run]) -> str:
    """Seconds per epoch, and how many of MAP's that is."""
    seconds = {method: min(r.seconds for r in runs if r.method == method) for method in ("VL", "VI", "MAP")}
    lines = [f"{'':<6}{'s/epoch':>10}{'× MAP':>8}{'paper: s':>10}{'× MAP':>8}"]
    for method, value in seconds.items():
        paper = PAPER_SECONDS[method]
        lines.append(f"{method:<6}{value:>10.2f}{value / seconds['MAP']:>8.2f}{paper:>10.1f}{paper / 41.8:>8.2f}")
    return "\n".join(lines)


def table_of_runs(runs: list[Run]) -> str:
    lines = [f"{'':<16}{'β':>7}{'multiplier':>12}{'NLL':>9}{'accuracy':>10}{'ECE':>9}{'ELBO':>11}"]
    for r in runs:
        for row, scores in r.scores.items():
            nll, acc, ece = (scores[score] for score in SCORES)
            multiplier, elbo = (f"{r.multiplier:g}", f"{r.elbo[-1]:.4f}") if r.elbo else ("", "")
            lines.append(f"{row:<16}{r.beta:>7g}{multiplier:>12}{nll:>9.4f}{acc:>10.4f}{ece:>9.4f}{elbo:>11}")
    return "\n".join(lines)


def save_numbers(runs: list[Run], folder: Path) -> None:
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "beta", "multiplier", *SCORES, "elbo", "seconds_per_epoch"])
        for r in runs:
            for row, scores in r.scores.items():
                last = r.elbo[-1] if r.elbo else ""
                writer.writerow([row, r.beta, r.multiplier, *(scores[score] for score in SCORES), last, r.seconds])
    with (folder / "elbo.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "beta", "multiplier", "epoch", "elbo"])
        for r in runs:
            writer.writerows([r.method, r.beta, r.multiplier, n, value] for n, value in enumerate(r.elbo, start=1))


def save_pictures(runs: list[Run], dataset: str, settings: Settings, folder: Path) -> None:
    swept = [r for r in runs if r.multiplier == settings.multiplier and r.beta in settings.betas]
    figure_1(swept, ROWS, dataset).savefig(folder / "figure_1.png")
    figure_2(runs, settings.early_stopping_betas, settings.multipliers, dataset).savefig(folder / "figure_2.png")


def describe(images: Images, settings: Settings, n_runs: int) -> str:
    network = PreActResNet(images.channels, images.classes, settings.width, settings.stride)
    size = sum(p.numel() for p in network.parameters())
    text = (
        f"{images.name}: PreActResNet-18 of width {settings.width} ({size:,} weights), {len(images.train):,} of "
        f"{images.n_all:,} training images, {len(images.test):,} test images, {settings.epochs} epochs; "
        f"{n_runs} trainings"
    )
    the_papers = settings == replace(PAPERS, seed=settings.seed)
    return (
        text
        if the_papers
        else f"{text}.\nNot the paper's experiment (that is --paper): read the order, not the numbers."
    )


def reproduce(images: Images, settings: Settings, folder: Path) -> list[Run]:
    """All trainings, the tables on the screen, everything else in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted, runs = plan(settings), []
    print(describe(images, settings, len(wanted)))
    for count, (method, beta, multiplier) in enumerate(wanted, start=1):
        start = time.perf_counter()
        runs.append(run(method, beta, multiplier, images, settings, folder))
        save_numbers(runs, folder)  # after each, for a run of days
        times = "" if method == "MAP" else f", log σ × {multiplier:g}"
        nll = next(iter(runs[-1].scores.values()))["nll"]
        seconds = time.perf_counter() - start
        print(f"[{count}/{len(wanted)}] {method}, β = {beta:g}{times}: NLL {nll:.4f} [{seconds:.0f} s]", flush=True)
    print(f"\nall trainings, ELBO per example in the last epoch:\n\n{table_of_runs(runs)}")
    print("\ntable 1, the best over β of each number (on the test images, as in the paper):\n")
    print(table_1(runs, images.name, settings))
    print(f"\ntable 2, time per epoch (paper: CIFAR-10):\n\n{table_2(runs)}")
    save_pictures(runs, images.name, settings, folder)
    print(f"\nfigure_1.png, figure_2.png, results.csv and elbo.csv are in {folder}\n")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", nargs="+", choices=list(PLACES), default=["FashionMNIST"])
    parser.add_argument("--paper", action="store_true", help="the paper's network, data and epochs")
    parser.add_argument("--data", type=Path, default=DEFAULT_FOLDER, help=f"torchvision's folder, or set {VARIABLE}")
    parser.add_argument("--output", type=Path, default=Path("outputs/papers/variational_laplace"))
    lists = ("betas", "multipliers", "early_stopping_betas")
    for setting in fields(Settings):
        kind = float if setting.name in ("lr", *lists) else int
        several: dict[str, Any] = {"nargs": "+"} if setting.name in lists else {}
        parser.add_argument(f"--{setting.name.replace('_', '-')}", type=kind, **several)
    arguments = parser.parse_args()
    given = {f.name: v for f in fields(Settings) if (v := getattr(arguments, f.name)) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = replace(PAPERS if arguments.paper else Settings(), **given)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("once", message="log σ can move")  # figure 2 is about just that
    for name in arguments.dataset:
        unpacked = arguments.output / "unpacked"
        images = read_images(name, arguments.data, unpacked, settings.n_train, settings.n_test, settings.seed)
        reproduce(images, settings, arguments.output / name)


if __name__ == "__main__":
    main()
