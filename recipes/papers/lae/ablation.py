"""Which part of the authors' configuration decides whether an online Laplacian autoencoder of FashionMNIST detects
MNIST (figure 9 of Miani et al., "Laplacian autoencoders for learning stochastic representations")?

    python -m recipes.papers.lae.ablation            # a quarter of an hour: every row of the table, small
    python -m recipes.papers.lae.ablation --n-train 10000    # three quarters: the same, with more images
    python -m recipes.papers.lae.ablation --scale    # 80 minutes: the first row, all channels and images, 8 epochs
    python -m recipes.papers.lae.ablation --paper    # the same until it stops, wide linear layers exact; needs a GPU

The first row follows the authors' code where possible: batch 100, learning rate 1e-4 for 64 channels, curvature at the
sampled weights, `H ← 0.999 H + h` from `H₀ = N`, prior precision 1, one sampled network in training and 10 at test, the
mean squared error as loss while h is that of the sum, a factor ½ in h, and images in the same order in every epoch.
(Two details are not reproduced: their convolutions have the gradient of the mean network, and their validation loss,
which controls the learning rate and early stopping, uses sampled networks.) Each other row changes one setting.

Theory predicts results before any training. To first order, a sampled network's variance is

    σ²(x) = Σ_w J_w(x)² / H_w,     H_w = scale · N/α · E[J_w²] + H₀ (1 − α)ᵗ + δ,

with J_w the derivative of the output (or latent point) in weight w.

- If the data's part of H dominates, then α, the scale, the factor ½, and a sum instead of an average in H multiply
  all σ by the same factor. No AUROC changes, unless the samples are so wide that the first-order approximation fails
  and the network itself changes.
- If H₀ or δ dominates, all weights have the same variance, and σ² is proportional to ‖J(x)‖²: large for bright images
  with high contrast, which are FashionMNIST's. σ is then larger inside than outside. The result depends on which
  weights the data have determined when training ends: on `(1 − α)ᵗ`, the memory's length relative to the training's.
- A factor in the loss cancels in Adam's step, in the plateau's relative threshold and in early stopping, and the loss
  has no prior. The mean over pixels instead of the sum changes nothing except the effect of Adam's ε.
- A convolution's weights are shared by all positions of an image, so the data determine all of them: no weight is used
  only by an unknown image, unlike at the dark border of MNIST's digits, where linear layers detect KMNIST.

A smaller run rescales two numbers. With n of N images the memory lasts as many epochs and is as sharp (α N/n, scale
(N/n)²); with c of 64 channels Adam's rate is 64/c times as large, so that a layer's output moves as far per step
(`--scale` keeps it at 1e-4). AUROC is measured on validation images of FashionMNIST and training images of MNIST, which
no program uses for testing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

from lightning_bayes import LaplacePosterior, Memory, OnlineLaplaceCallback
from recipes.papers.lae import common
from recipes.papers.lae.ablation_report import AUTHORS, CHANNELS, EQUAL, N, picture, report
from recipes.papers.lae.autoencoders import (
    BATCH,
    NOISE,
    PATIENCE,
    Laplacian,
    LitAutoencoder,
    Several,
    conv_decoder,
    seed_everything,
)
from recipes.papers.lae.common import Data, read_data
from recipes.papers.lae.scores import SCORES, auroc, measure, scores_of
from recipes.program import QUIET, Row, Run, progress, start


@dataclass(frozen=True)
class Configuration:
    """The authors' configuration, for N images and 64 channels."""

    batch: int = 100
    lr: float = 1e-4
    lr_by_width: bool = True
    hessian: str = ""  # "" takes that of the settings
    at: str = "sample"
    memory_factor: float = 1e-3
    start: float = N  # H₀
    prior_precision: float = 1.0
    scale: float = 0.5  # their factor ½
    average: bool = False
    mean_loss: bool = True
    shuffle: bool = False
    mirrored: bool = False
    wider: int = 1
    longer: int = 1


ROWS: dict[str, dict[str, Any]] = {
    AUTHORS: {},
    "H₀ = 1 (paper)": {"start": 1.0},
    "memory factor 1e-4 (paper)": {"memory_factor": 1e-4},
    "average, not leaky sum": {"average": True},
    "scale 100": {"scale": 50.0},
    "prior precision 1000": {"prior_precision": 1000.0},
    "Hessian at the mean": {"at": "mean"},
    "without the factor ½": {"scale": 1.0},
    "summed loss": {"mean_loss": False},
    "shuffled images": {"shuffle": True},
    "learning rate × 10": {"lr": 1e-3},
    "learning rate not by width": {"lr_by_width": False},
    "decoder mirrored": {"mirrored": True},
    "mixed Hessian": {"hessian": "mixed"},
    "three times as long": {"longer": 3},
    "twice the channels": {"wider": 2},
}


@dataclass(frozen=True)
class Settings:
    rows: tuple[str, ...] = tuple(ROWS)
    seeds: int = 2
    n_train: int = 2500
    n_valid: int = 1000  # plus as many images outside
    epochs: int = 20
    pixels: int = 16
    channels: int = 8
    samples: int = 10
    hessian: str = "approx"  # takes a third of the time of "mixed"; "auto" is "mixed", but "exact" up to 256 features
    lr_by_width: bool = True


# If 1,024 and 2,048 features are also exact, a step takes two minutes on one core, otherwise one second.
SCALE = Settings((AUTHORS,), 1, N, 1000, 8, 28, 64, hessian="auto")
PAPER = Settings((AUTHORS,), 1, N, 5000, 1000, 28, 64, hessian="mixed")
FAST = Settings((AUTHORS, "H₀ = 1 (paper)"), 2, 300, 100, 3, 8, 2, 4)


# -- one row -----------------------------------------------------------------------------------------------------------


class LitMeanLoss(LitAutoencoder):
    """The authors' loss, which averages over pixels as well."""

    def loss(self, x: Tensor) -> Tensor:
        return 0.5 * F.mse_loss(self(x), x)


class Curve(L.Callback):
    """Write a row of curve.csv after epochs 1, 2, 4, …"""

    def __init__(self, run: Run, step: str, callback: OnlineLaplaceCallback, data: Data, outside: Tensor) -> None:
        self.run, self.step, self.callback, self.data, self.outside = run, step, callback, data, outside

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if epoch & (epoch - 1) == 0:
            self.run.collect("curve", f"{self.step} epoch {epoch}", self.rows, pl_module, epoch)

    def rows(self, module: L.LightningModule, epoch: int) -> list[Row]:
        posterior = self.callback.fit_now(None, module)
        return [{"epoch": epoch, **judge(posterior, self.data, self.outside, self.run.settings.samples)}]


def configuration(name: str, settings: Settings) -> Configuration:
    chosen = replace(Configuration(hessian=settings.hessian, lr_by_width=settings.lr_by_width), **ROWS[name])
    channels = settings.channels * chosen.wider
    return replace(chosen, lr=chosen.lr * CHANNELS / channels) if chosen.lr_by_width else chosen


def memory(n: int, of: Configuration) -> dict[str, Any]:
    """The memory for n images that matches the configuration's for N."""
    s = N / n
    scale = of.scale * (s if of.average else s**2)
    return {
        "memory_factor": min(1.0, s * of.memory_factor),
        "scale": scale,
        "initial_curvature": of.start / scale,
        "prior_precision": of.prior_precision,
        "average": of.average,
    }


def start_left(n: int, epochs: int, of: Configuration) -> float:
    """The part of H₀ that training has not forgotten."""
    return (1 - memory(n, of)["memory_factor"]) ** (epochs * math.ceil(n / of.batch))


def train(run: Run, name: str, seed: int, data: Data, outside: Tensor) -> Iterable[Row]:
    settings, of = run.settings, configuration(name, run.settings)
    sizes = common.Settings(pixels=settings.pixels, width=8 * settings.channels * of.wider, lr=of.lr)
    seed_everything(seed)
    module = (LitMeanLoss if of.mean_loss else LitAutoencoder)(sizes, conv=True)
    if of.mirrored:
        module.decoder = conv_decoder(sizes.pixels, sizes.width, mirrored=True)
    widest = sizes.width // 8 * max(32, (settings.pixels // 4) ** 2)
    exact = {"threshold": widest} if of.hessian == "mixed" else {}  # all linear layers exact, as in the authors' code
    kept = memory(len(data.train), of)
    callback = OnlineLaplaceCallback(
        NOISE,
        calibrate=None,
        hessian=of.hessian,
        save=False,
        seed=seed,
        memory_factor=kept.pop("memory_factor"),
        prior_precision=kept.pop("prior_precision"),
        memory=Memory(curvature_at=of.at, **exact, **kept),
    )
    step = f"{name} seed {seed}"
    folder = run.output / "steps" / step
    trainer = L.Trainer(
        max_epochs=settings.epochs * of.longer,
        callbacks=[
            callback,
            EarlyStopping("val_loss", patience=PATIENCE),
            ModelCheckpoint(folder, "last", every_n_epochs=1, enable_version_counter=False),
            *([Curve(run, step, callback, data, outside)] if name == AUTHORS else []),
        ],
        num_sanity_val_steps=0,
        **{**QUIET, "enable_checkpointing": True},
    )
    last = folder / "last.ckpt"
    goes_on = last.exists() and not of.shuffle  # a checkpoint does not store the state of the shuffling
    trainer.fit(
        module,
        data.loader("train", of.batch, shuffle=of.shuffle),
        data.loader("valid", BATCH),
        ckpt_path=last if goes_on else None,
        weights_only=True if goes_on else None,
    )
    posterior = callback.posterior
    assert isinstance(posterior, LaplacePosterior)
    left = start_left(len(data.train), trainer.current_epoch, of)
    unknown = of.start * left + of.prior_precision
    determined = posterior.curvature.structure.diagonal() + of.prior_precision > 2 * unknown
    row = {"row": name, "seed": seed, "epochs": trainer.current_epoch, "start left": left}
    row |= judge(posterior, data, outside, settings.samples)
    yield row | {"determined": float(determined.float().mean())}


def judge(posterior: LaplacePosterior, data: Data, outside: Tensor, samples: int) -> Row:
    """Errors, AUROC, and the correlation of σ with brightness."""
    inside = data.valid.tensors[0][: len(outside)]
    method = Laplacian(posterior)
    scores = scores_of(method, data.train.tensors[0], inside, outside, samples, 0)
    row: Row = {"error": float(scores["log-likelihood"][0].mean())}
    row["error of the mean network"] = float(measure(Several([posterior.network]), inside, 1, 0)["error"].mean())  # type: ignore[list-item]
    row |= {name: auroc(*both) for name, both in scores.items()}
    both_sets = torch.cat([inside, outside]).flatten(1).mean(1)
    for name in SCORES[2:]:
        row[f"{name} and brightness"] = rank_correlation(torch.cat(scores[name]), both_sets)
    equal = Several([perturbed(posterior.network, i) for i in range(samples)])
    both = [measure(equal, x, samples, 0) for x in (inside, outside)]
    return row | {f"{name}, equal variances": auroc(*(m[name] for m in both)) for name in SCORES[2:]}


@torch.no_grad()
def perturbed(network: Any, seed: int) -> Any:
    """A posterior as if no curvature had been learned: every weight has the same variance."""
    copy, generator = deepcopy(network), torch.Generator().manual_seed(seed)
    for weight in copy.parameters():
        weight += torch.randn(weight.shape, generator=generator) / EQUAL**0.5
    return copy


def rank_correlation(a: Tensor, b: Tensor) -> float:
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


# -- without any network -----------------------------------------------------------------------------------------------


def baselines(train: Tensor, inside: Tensor, outside: Tensor) -> Iterable[Row]:
    """AUROC of scores that need no network."""
    train = train.flatten(1)
    inside, outside = inside.flatten(1), outside.flatten(1)
    average = train.mean(0)
    _, _, V = torch.linalg.svd(train[:5000] - average, full_matrices=False)
    plane = V[:2]  # as many dimensions as the latent space

    def outside_of_plane(x: Tensor) -> Tensor:
        return (x - average - (x - average) @ plane.T @ plane).square().sum(1)

    scores = {
        "darkness": lambda x: -x.mean(1),
        "black pixels": lambda x: (x < 0.1).float().mean(1),
        "contrast": lambda x: x.std(1),
        "distance from the average image": lambda x: (x - average).square().sum(1),
        "distance from the plane of two principal components": outside_of_plane,
        "distance from the nearest training image": lambda x: torch.cdist(x, train[:5000]).amin(1),
    }
    for name, score in scores.items():
        yield {"score": name, "AUROC": auroc(score(inside), score(outside))}


def main() -> None:
    scales = {"default": Settings(), "fast": FAST, "scale": SCALE, "paper": PAPER}
    run = start(__doc__, "papers/lae/ablation", scales)
    settings = run.settings
    if unknown := [name for name in settings.rows if name not in ROWS]:
        raise SystemExit(f"there is no row {unknown[0]!r}: choose among {', '.join(map(repr, ROWS))}")
    sizes = common.Settings(settings.n_train, settings.n_valid, 1, pixels=settings.pixels)
    data = read_data("FashionMNIST", run.data, sizes)
    outside = read_data("MNIST", run.data, replace(sizes, n_train=1)).valid.tensors[0]
    run.collect("baselines", "baselines", baselines, data.train.tensors[0], data.valid.tensors[0], outside)
    jobs = [(name, seed) for seed in run.seeds(settings.seeds) for name in settings.rows]
    for name, seed in progress(jobs, "rows"):
        run.collect("rows", f"{name} seed {seed}", train, run, name, seed, data, outside)
    run.save_picture("curve", picture(run.output))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
