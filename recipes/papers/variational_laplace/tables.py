"""Variational Laplace against MAP and variational inference: tables 1 and 2 and figures 1 and 2 of the paper (Unlu and
Aitchison, "Variational Laplace for Bayesian neural networks").

    python -m recipes.papers.variational_laplace.tables            # minutes: a narrow network on some of FashionMNIST
    python -m recipes.papers.variational_laplace.tables --scale    # three seeds on FashionMNIST and CIFAR-10
    python -m recipes.papers.variational_laplace.tables --paper    # PreActResNet-18, 200 epochs; needs a GPU

All methods share one network, one prior (He's scale, tempered by β), one optimizer and one test: MAP; VI, tested at
the mean and with 10 weight samples; and VL, tested at the mean. Batch norm has no prior and no posterior. Images are
not augmented. Each seed has a different split into training and validation images, initial weights, batch order and
noise. A method's β is the one with the best mean NLL on the validation images; the paper's table has the best test
value of each number.

`--scale` is PreActResNet-10, one block per stage instead of two, of width 8 instead of 64 and with a first convolution
of stride 2 (77,634 weights for grey images): 1,000 training, 1,000 validation and 2,000 test images of FashionMNIST and
of CIFAR-10, 20 epochs with batches of 40, Adam with learning rate 0.01 (÷ 10 after 10 and 15 epochs), eight β, three
seeds, and four multipliers at β = 0.1; 40 minutes on one core. There are few images and many epochs, because the paper
compares methods where MAP overfits. We chose the learning rate on validation images of CIFAR-10: MAP's NLL is as good
as with 0.003, and only the larger rate lets log σ come near the prior with a multiplier of 1, as in the paper.

Every training run has a row in `scores.csv` per test method and split; `epochs.csv` has the ELBO per example, the mean
change of log σ, and the processor time of each epoch. `table.md` and the figures come from these two files.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_bayes import BNN, LogSigmaMultiplierMixin, VariationalInferenceMixin, VariationalLaplaceMixin, metrics
from recipes.papers.image_data import Images, read_images
from recipes.papers.variational_laplace.figures import save_pictures
from recipes.papers.variational_laplace.preact_resnet import NORMS, PreActResNet
from recipes.papers.variational_laplace.report import report
from recipes.program import QUIET, Row, Run, progress, start

SAMPLES = 10
SCORES = ("nll", "acc", "ece")


@dataclass(frozen=True)
class Settings:
    """The defaults run in minutes on one core."""

    datasets: tuple[str, ...] = ("FashionMNIST",)
    width: int = 8
    blocks: int = 1
    stride: int = 2
    n_train: int | None = 1000
    n_validation: int = 500
    n_test: int | None = 1000
    epochs: int = 20
    batch: int = 50
    lr: float = 3e-3
    betas: tuple[float, ...] = (0.1, 0.03, 0.01)
    multiplier: float = 10.0  # multiplier of log σ's learning rate
    multipliers: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)  # multipliers of figure 2
    multiplier_betas: tuple[float, ...] = (0.1,)  # values of β in figure 2
    seeds: int = 1

    @property
    def milestones(self) -> tuple[int, int]:
        """The learning rate is divided by 10 after half and three quarters of the epochs."""
        return self.epochs // 2, 3 * self.epochs // 4


PAPER = Settings(
    datasets=("CIFAR10", "CIFAR100", "SVHN", "FashionMNIST"),
    width=64,
    blocks=2,
    stride=1,
    n_train=None,  # all images not used for validation
    n_validation=5000,
    n_test=None,
    epochs=200,
    batch=128,
    lr=1e-4,
    betas=(1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),  # the paper does not list its values
    multiplier_betas=(1.0, 0.1),
)
SCALES = {
    "default": Settings(),
    "fast": Settings(
        width=2,
        n_train=150,
        n_validation=100,
        n_test=100,
        epochs=4,
        batch=25,
        lr=0.02,
        betas=(0.1, 0.01),
        multipliers=(1.0, 10.0),
    ),
    "scale": Settings(
        datasets=("FashionMNIST", "CIFAR10"),
        n_validation=1000,
        n_test=2000,
        batch=40,
        lr=1e-2,
        betas=(1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003),
        seeds=3,
    ),
    "paper": PAPER,
}


@dataclass(frozen=True)
class Training:
    """One training run, for table 1 and figure 1, which sweep β, or for figure 2, which sweeps the multiplier."""

    dataset: str
    method: str
    beta: float
    multiplier: float | None  # MAP has no log σ
    seed: int

    def __str__(self) -> str:
        times = "" if self.multiplier is None else f" x{self.multiplier:g}"
        return f"{self.dataset} {self.method} beta {self.beta:g}{times} seed {self.seed}"


# -- the methods -------------------------------------------------------------------------------------------------------


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
    """MAP maximises the log joint, with the same prior as the two methods below."""

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
    """`Σ w²/2s²` with `s² = 2/fan-in` over convolutions and the linear layer."""
    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    fan_in = {p: layer.weight[0].numel() for layer in layers for p in layer.parameters()}
    return torch.stack([p.square().sum() * n / 4 for p, n in fan_in.items()]).sum()


def make(training: Training, images: Images, settings: Settings, n_data: int) -> LitNet:
    """The same initial weights for every method."""
    L.seed_everything(training.seed, verbose=False)
    network = PreActResNet(images.channels, images.classes, settings.width, settings.stride, settings.blocks)
    shared = (network, settings.lr, settings.milestones)
    if training.method == "MAP":
        return MAP(*shared, beta=training.beta, n_data=n_data)
    variational: dict[str, Any] = {"likelihood": "classification", "beta": training.beta, "prior_std": "he"}
    variational |= {"deterministic": [NORMS], "seed": training.seed}
    variational["predictive"] = BNN(SAMPLES) if training.method == "VI" else "mean"
    kind: Callable[..., LitNet] = {"VI": VI, "VL": VL}[training.method]
    return kind(*shared, log_sigma_multiplier=training.multiplier, variational=variational)


# -- one training ------------------------------------------------------------------------------------------------------


class Watch(L.Callback):
    """Record a row for every epoch."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log_sigma = mean_log_sigma(pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        row: Row = {"epoch": trainer.current_epoch + 1, "elbo": None, "log_sigma_moved": None}
        if isinstance(pl_module, (VI, VL)):
            row["elbo"] = float(trainer.callback_metrics["train_elbo"])
            row["log_sigma_moved"] = mean_log_sigma(pl_module) - self._log_sigma
        self.rows.append(row | {"seconds": time.process_time() - self._start})


def mean_log_sigma(module: L.LightningModule) -> float:
    if not isinstance(module, (VI, VL)):
        return 0.0
    return float(torch.cat([log_σ.detach().flatten() for log_σ in module.log_sigma.values()]).mean())


def split(images: Images, n_validation: int, seed: int) -> dict[str, TensorDataset]:
    """Training and validation images depend on the seed; the test images are the same for all."""
    x, y = images.train.tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = {"validation": order[:n_validation], "train": order[n_validation:]}
    return {part: TensorDataset(x[chosen], y[chosen]) for part, chosen in parts.items()} | {"test": images.test}


def train(training: Training, images: Images, settings: Settings) -> dict[str, list[Row]]:
    """Train and test a method with the Trainer, and return rows of the two CSVs."""
    parts, watch = split(images, settings.n_validation, training.seed), Watch()
    module = make(training, images, settings, len(parts["train"]))
    trainer = L.Trainer(max_epochs=settings.epochs, callbacks=[watch], **QUIET)
    trainer.fit(module, DataLoader(parts["train"], settings.batch, shuffle=True))
    scores = []
    for part in ("validation", "test"):
        (logged,) = trainer.test(module, DataLoader(parts[part], 500), verbose=False)
        tested = {"VI (mean)": "", "VI (10 samples)": "_vi"} if training.method == "VI" else {training.method: ""}
        for method, suffix in tested.items():
            scores.append({"method": method, "split": part} | {s: logged[f"test_{s}{suffix}"] for s in SCORES})
    return {"scores": scores, "epochs": watch.rows}


def rows_of(run: Run, table: str, training: Training, images: Images) -> list[Row]:
    """The rows of a training run, which is trained once for both tables."""
    which: Row = {"dataset": training.dataset, "method": training.method, "beta": training.beta}
    which |= {"multiplier": training.multiplier, "seed": training.seed}
    return [which | row for row in run.once(str(training), train, training, images, run.settings)[table]]


def plan(settings: Settings, seeds: Iterable[int]) -> list[Training]:
    """List every training run once, seed by seed."""
    swept = [(method, β, settings.multiplier) for β in settings.betas for method in ("MAP", "VI", "VL")]
    figure_2 = [
        (method, β, m) for β in settings.multiplier_betas for m in settings.multipliers for method in ("VI", "VL")
    ]
    return [
        Training(dataset, method, β, None if method == "MAP" else m, seed)
        for seed in seeds
        for dataset in settings.datasets
        for method, β, m in dict.fromkeys(swept + figure_2)
    ]


def main() -> None:
    run = start(__doc__, "papers/variational_laplace/tables", SCALES)
    warnings.filterwarnings("ignore", message="log σ can move")  # this is what figure 2 shows
    settings: Settings = run.settings
    n = None if settings.n_train is None else settings.n_train + settings.n_validation
    images = {name: read_images(name, run.data, n, settings.n_test, run.seed) for name in settings.datasets}
    for training in progress(plan(settings, run.seeds(settings.seeds)), "trainings"):
        for table in ("scores", "epochs"):
            run.collect(table, str(training), partial(rows_of, run, table, training, images[training.dataset]))
    save_pictures(run.output)
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
