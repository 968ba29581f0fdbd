"""Half a digit is seen: what might the other half be? Table 3 and figure 11 of the paper (Miani et al., "Laplacian
autoencoders for learning stochastic representations").

    python recipes/lae_imputation.py            # minutes: some of MNIST, the approximate Hessian
    python recipes/lae_imputation.py --paper    # 55,000 images, the exact Hessian; wants a GPU

The upper half of a digit is replaced by noise. Five sampled networks reconstruct the image; each of the five, with the
observed half put back, is reconstructed five times more, and these are averaged (appendix A.3): five images that may be
of different digits. A classifier trained on whole digits reads all five, and its probabilities are averaged; are they
calibrated? From noise alone the same procedure draws new digits. Results go to outputs/lae_imputation/.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from autoencoders import Method, seed, train_all
from lae_common import PAPER, Data, Settings, describe, parse, read_data, table, write_csv
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import metrics

DEFAULT = Settings(n_train=4000, epochs=10)
STAGE = 5  # reconstructions, and reconstructions of each
COLUMNS = ("MSE", "log p(x)", "accuracy", "ECE", "MCE", "RMSCE")
PAPER_TABLE: dict[str, tuple[float | None, ...]] = {  # table 3
    "classifier": (None, None, 0.53, 0.16, 0.25, 0.18),
    "VAE": (104.73, -104.75, 0.22, 0.18, 0.34, 0.19),
    "MC-AE": (106.05, -106.05, 0.45, 0.28, 0.38, 0.29),
    "AE ensemble": (96.23, -100.94, 0.53, 0.12, 0.20, 0.13),
    "LAE (post-hoc)": (101.62, -107.25, 0.51, 0.16, 0.27, 0.18),
    "LAE (online)": (99.59, -106.29, 0.53, 0.12, 0.16, 0.13),
}
SHOWN = ("VAE", "LAE (post-hoc)", "LAE (online)")


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
    """The image with noise from 0 to 1 in place of its upper half (or of everything), and where it was observed."""
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


@torch.no_grad()
def judge(classifier: Classifier, images: Tensor, x: Tensor | None, y: Tensor) -> list[float | None]:
    """Of several imputations `[S, B, 1, H, W]` of the images `x`."""
    probs = classifier(images.flatten(0, 1)).softmax(1).unflatten(0, images.shape[:2]).mean(0)
    norms: tuple[Any, ...] = ("l1", "max", "l2")
    calibration = [float(metrics.functional.calibration_error(probs, y, n_bins=10, norm=norm)) for norm in norms]
    accuracy = float((probs.argmax(1) == y).float().mean())
    if x is None:
        return [None, None, accuracy, *calibration]
    mse = (x - images.mean(0)).square().flatten(1).sum(1).mean()
    log_p = -(x - images).square().flatten(2).sum(2).mean()
    return [float(mse), float(log_p), accuracy, *calibration]


def figure_11(
    methods: dict[str, Method], data: Data, settings: Settings, digits: tuple[int, ...] = (3, 5, 7, 9)
) -> Figure:
    """For each method: digits, what is seen of them, five imputations, and two rows from noise alone."""
    x, y = data.test.tensors
    chosen = x[[int((y == d).nonzero()[0]) if (y == d).any() else 0 for d in digits]]
    hidden, observed = hide(chosen, settings.seed)
    noise, nothing = hide(chosen[:2], settings.seed + 1, everything=True)
    figure = Figure(figsize=(4.6 * len(SHOWN), 4.6), layout="constrained", dpi=110)
    for panel, name in zip(figure.subfigures(1, len(SHOWN), wspace=0.06), SHOWN, strict=True):
        imputed = impute(methods[name], hidden, observed, settings.seed)  # [5, 4, ...]
        generated = impute(methods[name], noise, nothing, settings.seed + 2)  # [5, 2, ...]
        seen = torch.where(observed, chosen, 0.5)
        rows = [[a, b, *each] for a, b, each in zip(chosen, seen, imputed.transpose(0, 1), strict=True)]
        rows += [
            [None, each[0], *drawn] for each, drawn in zip(noise.unsqueeze(1), generated.transpose(0, 1), strict=True)
        ]
        for line, row in zip(panel.subplots(len(rows), 2 + STAGE), rows, strict=True):
            for ax, image in zip(line, row, strict=False):
                ax.set_axis_off()
                if image is not None:
                    ax.imshow(image.squeeze(0).numpy(), cmap="gray_r", vmin=0, vmax=1)
        panel.suptitle(name)
        for ax, title in zip(panel.axes, ("digit", "seen", "", "", "imputed"), strict=False):
            ax.set_title(title, fontsize=9)
        panel.axes[len(digits) * (2 + STAGE) + 1].set_title("noise", fontsize=9)
        panel.axes[len(digits) * (2 + STAGE) + 4].set_title("generated", fontsize=9)
    return figure


def main() -> None:
    settings, arguments = parse(__doc__ or "", "lae_imputation", DEFAULT, PAPER)
    data = read_data("MNIST", arguments.data, arguments.output, settings)
    width, pixels = settings.width, settings.pixels**2
    what = f"MNIST, half of it: {pixels}-{width}-{width // 2}-2-{width // 2}-{width}-{pixels}, tanh"
    print(describe(what, data, settings, PAPER), flush=True)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{text} [{time.perf_counter() - start:.0f} s]", flush=True)

    methods = train_all(data, settings, arguments.output, say=say)
    classifier = train_classifier(data, settings)

    x, y = data.test.tensors
    hidden, observed = hide(x, settings.seed)
    rows = {"classifier": judge(classifier, hidden.unsqueeze(0), None, y)}
    for name, method in methods.items():
        rows[name] = judge(classifier, impute(method, hidden, observed, settings.seed), x, y)
    whole = judge(classifier, x.unsqueeze(0), None, y)[2]
    print(f"\ntable 3, on {len(y):,} test images, of which the lower half is seen (below: the paper's):\n")
    shown: dict[str, Any] = {}
    for name, row in rows.items():
        shown[name] = row
        shown[f"  paper {name[:10]}"] = PAPER_TABLE.get(name, (None,) * len(COLUMNS))
    print(table(COLUMNS, shown))
    print(
        f"The classifier's accuracy on whole digits is {whole:.3f}. MSE is that of the mean of the five images;\n"
        "log p(x) is −‖x − image‖² averaged over the five, as in the paper: without ½ and without a constant."
    )
    write_csv(arguments.output / "results.csv", ["method", *COLUMNS], [[name, *row] for name, row in rows.items()])
    figure_11(methods, data, settings).savefig(arguments.output / "figure_11.png")
    print(f"\nfigure_11.png and results.csv are in {arguments.output}")


if __name__ == "__main__":
    main()
