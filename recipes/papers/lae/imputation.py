"""Half a digit is seen: what might the other half be? Table 3 and figure 11 of the paper (Miani et al., "Laplacian
autoencoders for learning stochastic representations").

    python -m recipes.papers.lae.imputation            # minutes: some of MNIST, the approximate Hessian
    python -m recipes.papers.lae.imputation --paper    # 55,000 images, the exact Hessian; wants a GPU

The upper half of a digit is replaced by noise. Five sampled networks reconstruct the image; each of the five, with the
observed half put back, is reconstructed five times more, and these are averaged (appendix A.3): five images that may be
of different digits. A classifier trained on whole digits reads all five, and its probabilities are averaged; are they
calibrated? From noise alone the same procedure draws new digits. Results go to outputs/papers/lae/imputation/.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import metrics
from recipes.papers.lae.autoencoders import BATCH, Method, seed, train_all
from recipes.papers.lae.common import (
    PAPER,
    Claim,
    Data,
    Settings,
    beats,
    begin,
    linear_net,
    parse,
    table,
    verdict,
    write_csv,
)

DEFAULT = Settings(n_train=4000, epochs=10)
STAGE = 5  # reconstructions, and reconstructions of each
COLUMNS = ("MSE", "log p(x)", "accuracy", "ECE", "MCE", "RMSCE", "digits", "whole")
PAPER_TABLE: dict[str, tuple[float | None, ...]] = {  # table 3; "whole" is of the runs that their repository stores
    "classifier": (None, None, 0.53, 0.16, 0.25, 0.18, None, None),
    "VAE": (104.73, -104.75, 0.22, 0.18, 0.34, 0.19, None, 0.58),
    "MC-AE": (106.05, -106.05, 0.45, 0.28, 0.38, 0.29, None, None),
    "AE ensemble": (96.23, -100.94, 0.53, 0.12, 0.20, 0.13, None, None),
    "LAE (post-hoc)": (101.62, -107.25, 0.51, 0.16, 0.27, 0.18, None, None),
    "LAE (online)": (99.59, -106.29, 0.53, 0.12, 0.16, 0.13, None, 0.82),
}
SHOWN = ("VAE", "LAE (post-hoc)", "LAE (online)")
ALIKE = 0.03  # of two calibration errors
SHARP = 1.5  # times the grey of real digits


class Classifier(L.LightningModule):
    """Of whole digits."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(pixels**2, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train_classifier(data: Data, settings: Settings) -> Classifier:
    seed(settings.seed)
    module = Classifier(settings.pixels)
    trainer = L.Trainer(
        max_epochs=min(settings.epochs, 15),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data.loader("train", settings.batch))
    return module.eval()


def hide(x: Tensor, seed: int, everything: bool = False) -> tuple[Tensor, Tensor]:
    """The image with noise from 0 to 1 instead of its upper half (or of everything), and where it was observed."""
    observed = torch.zeros_like(x, dtype=torch.bool)
    if not everything:
        observed[..., x.shape[-2] // 2 :, :] = True
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(observed, x, noise), observed


def impute(method: Method, x: Tensor, observed: Tensor, seed: int) -> Tensor:
    """Up to five reconstructions, each an average of five.  # [5, B, 1, H, W]"""
    first = method.draw(x, STAGE, seed).samples
    assert first is not None
    filled = torch.where(observed, x, first).flatten(0, 1)  # [5 B, 1, H, W]
    second = method.draw(filled, STAGE, seed + 1).mean
    assert second is not None
    return second.unflatten(0, first.shape[:2])


def generate(method: Method, settings: Settings, n: int = BATCH) -> Tensor:
    """From noise alone.  # [5, n, 1, H, W]"""
    noise, nothing = hide(torch.zeros(n, 1, settings.pixels, settings.pixels), settings.seed + 1, everything=True)
    return impute(method, noise, nothing, settings.seed + 2)


@torch.no_grad()
def judge(classifier: Classifier, images: Tensor, x: Tensor | None, y: Tensor) -> list[float | None]:
    """Of several imputations `[S, B, 1, H, W]` of the images `x`."""
    probs_of_each = classifier(images.flatten(0, 1)).softmax(1).unflatten(0, images.shape[:2])  # [S, B, 10]
    probs = probs_of_each.mean(0)
    norms: tuple[Any, ...] = ("l1", "max", "l2")
    calibration = [float(metrics.functional.calibration_error(probs, y, n_bins=10, norm=norm)) for norm in norms]
    accuracy = float((probs.argmax(1) == y).float().mean())
    if x is None:
        return [None, None, accuracy, *calibration, None]
    mse = (x - images.mean(0)).square().flatten(1).sum(1).mean()
    log_p = -(x - images).square().flatten(2).sum(2).mean()
    return [float(mse), float(log_p), accuracy, *calibration, float(digits(probs_of_each).float().mean())]


def digits(probs: Tensor) -> Tensor:
    """How many classes a classifier sees in the imputations of an image.  # [S, B, classes] -> [B]"""
    return F.one_hot(probs.argmax(2), probs.shape[2]).amax(0).sum(1)


@torch.no_grad()
def variety(classifier: Classifier, images: Tensor) -> float:
    """How many digits there are among many images: the exponential of the entropy of their shares."""
    counts = classifier(images.flatten(0, 1)).argmax(1).bincount(minlength=10)
    return float(torch.distributions.Categorical(counts.float()).entropy().exp())


def grey(images: Tensor) -> float:
    """The share of ink that is neither white nor black: large where an image is not crisp."""
    ink = images > 0.25
    return float((ink & (images < 0.75)).sum() / ink.sum())


def claims(rows: dict[str, list[Any]], drawn: dict[str, tuple[float, float]], truth: float) -> list[Claim]:
    """Of section 5 and table 3. `drawn` has the variety and the grey of what each method generates."""
    lae, ensemble, alone = (rows[name] for name in ("LAE (online)", "AE ensemble", "classifier"))
    ece = {name: row[3] for name, row in rows.items() if name in PAPER_TABLE and name not in ("AE ensemble",)}
    several = {name: rows[name][6] for name in SHOWN}
    (n_online, grey_online), (_, grey_vae) = drawn["LAE (online)"], drawn["VAE"]
    errors = zip(COLUMNS[3:6], lae[3:6], alone[3:6], strict=True)
    calibrated = ", ".join(f"{name} {a:.3f} and {b:.3f}" for name, a, b in errors)
    better = lae[0] < rows["LAE (post-hoc)"][0] and lae[1] > rows["LAE (post-hoc)"][1]
    sizes = ", ".join(f"{rows[name][0]:.1f} and {rows[name][1]:.1f}" for name in SHOWN[1:])
    return [
        Claim(
            "imputed by the online LAE, digits are classified with less calibration error than half digits",
            all(a < b for a, b in zip(lae[3:6], alone[3:6], strict=True)),
            calibrated,
        ),
        beats("LAE (online)", ece, "ECE but for the ensemble", larger=False),
        Claim(
            f"the ensemble is as well calibrated, ± {ALIKE}",
            abs(lae[3] - ensemble[3]) <= ALIKE,
            f"ECE {lae[3]:.3f} and {ensemble[3]:.3f}",
        ),
        Claim(
            "the online LAE imputes with a smaller error than the post-hoc one", better, f"MSE and log p(x): {sizes}"
        ),
        beats("LAE (online)", several, "number of different digits for one half"),
        Claim(
            "from noise the online LAE draws several digits", n_online > 2, f"as many as {n_online:.1f} equally often"
        ),
        Claim(
            f"which are sharp: at most {SHARP} times as grey as real ones",
            grey_online <= SHARP * truth,
            f"{grey_online:.2f} of the ink is grey, VAE {grey_vae:.2f}, real digits {truth:.2f}",
        ),
    ]


def figure_11(methods: dict[str, Method], data: Data, settings: Settings) -> Figure:
    """For each method: digits, what is seen of them, five imputations, and two rows from noise alone."""
    x, y = data.test.tensors
    chosen = x[[int((y == d).nonzero()[0]) if (y == d).any() else 0 for d in (3, 5, 7, 9)]]
    hidden, observed = hide(chosen, settings.seed)
    noise, nothing = hide(chosen[:2], settings.seed + 1, everything=True)
    figure = Figure(figsize=(4.6 * len(SHOWN), 4.6), layout="constrained", dpi=110)
    for panel, name in zip(figure.subfigures(1, len(SHOWN), wspace=0.06), SHOWN, strict=True):
        imputed = impute(methods[name], hidden, observed, settings.seed)  # [5, 4, ...]
        rows_of_noise = zip(noise.split(1), nothing.split(1), (2, 4), strict=True)  # each with its own networks
        generated = torch.cat([impute(methods[name], x, o, settings.seed + i) for x, o, i in rows_of_noise], 1)
        seen = torch.where(observed, chosen, 0.5)
        rows = [[a, b, *images] for a, b, images in zip(chosen, seen, imputed.transpose(0, 1), strict=True)]
        rows += [[None, a, *images] for a, images in zip(noise, generated.transpose(0, 1), strict=True)]
        axes = panel.subplots(len(rows), 2 + STAGE)
        for line, row in zip(axes, rows, strict=True):
            for ax, image in zip(line, row, strict=False):
                ax.set_axis_off()
                if image is not None:
                    ax.imshow(image.squeeze(0).numpy(), cmap="gray_r", vmin=0, vmax=1)
        panel.suptitle(name)
        for row, column, title in (
            (0, 0, "digit"),
            (0, 1, "seen"),
            (0, 4, "imputed"),
            (4, 1, "noise"),
            (4, 4, "drawn"),
        ):
            axes[row, column].set_title(title, fontsize=9)
    return figure


def main() -> None:
    settings, arguments = parse(__doc__ or "", "imputation", DEFAULT, PAPER)
    data, say = begin("MNIST", f"MNIST, half of it: {linear_net(settings)}", settings, PAPER, arguments)
    methods = train_all(data, settings, arguments.output, say=say)
    classifier = train_classifier(data, settings)

    x, y = data.test.tensors
    hidden, observed = hide(x, settings.seed)
    rows = {"classifier": [*judge(classifier, hidden.unsqueeze(0), None, y), judge(classifier, x[None], None, y)[2]]}
    for name, method in methods.items():
        half = judge(classifier, impute(method, hidden, observed, settings.seed), x, y)
        whole = judge(classifier, impute(method, x, torch.ones_like(observed), settings.seed), x, y)[2]
        rows[name] = [*half, whole]
    drawn = {}
    for name in SHOWN:
        images = generate(methods[name], settings)
        drawn[name] = (variety(classifier, images), grey(images))
    say("imputed and classified")

    print(f"\ntable 3, on {len(y):,} test images, of which the lower half is seen:\n")
    shown: dict[str, Any] = {}
    for name, row in rows.items():
        shown[name] = row
        shown[f"  paper: {name}"] = PAPER_TABLE.get(name, (None,) * len(COLUMNS))
    print(table(COLUMNS, shown))
    print(
        "MSE is that of the mean of the five images; log p(x) is −‖x − image‖² averaged over the five, as in the\n"
        'paper: without ½ and constant. "digits": how many different ones the classifier sees in the five. "whole":\n'
        "accuracy where nothing is hidden; the authors' is of the runs that their repository stores.\n"
    )
    write_csv(arguments.output / "results.csv", ["method", *COLUMNS], [[name, *row] for name, row in rows.items()])
    figure_11(methods, data, settings).savefig(arguments.output / "figure_11.png")
    print(f"figure_11.png and results.csv are in {arguments.output}\n")
    print(verdict(claims(rows, drawn, grey(x))))


if __name__ == "__main__":
    main()
