"""Do autoencoders know what they have not seen? Trained on FashionMNIST, asked about MNIST: figures 9 and 10 of the
paper (Miani et al., "Laplacian autoencoders for learning stochastic representations").

    python recipes/lae_ood.py            # minutes: narrow convolutions, some of FashionMNIST, the approximate Hessian
    python recipes/lae_ood.py --paper    # Conv64-Conv64-2048-1024-2 and its mirror on 55,000 images; wants a GPU

An autoencoder, a VAE, an autoencoder with dropout, an ensemble of five, and the Laplacian autoencoder, post-hoc and
online, are scored by the area under the ROC curve (AUROC) of four scores, each of which is to be larger on MNIST: the
squared error of a sampled network, which is the log-likelihood but for its sign ("log-likelihood"), its distance from
the training images' average ("typicality"), and the standard deviation over sampled networks, summed over latent
dimensions ("latent σ") and over pixels ("output σ"). Results go to outputs/lae_ood/.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from autoencoders import BATCH, METHODS, Method, train_all
from lae_common import PAPER, Data, Settings, describe, parse, read_data, table, write_csv
from matplotlib.figure import Figure
from torch import Tensor

from lightning_bayes import metrics, plots

DEFAULT = Settings(n_train=2500, n_valid=500, epochs=10, samples=10, width=96)
PAPERS = replace(PAPER, batch=100, lr=1e-4, n_test=5000, samples=10, hessian="mixed")
SCORES = ("log-likelihood", "typicality", "latent σ", "output σ")
COLUMNS = ("error", *SCORES, "FPR95")
STORED_RUNS = {  # AUROC of the four scores, MNIST against KMNIST with the linear net
    "VAE": (0.74, 0.61, 0.57, 0.92),
    "LAE (online)": (0.991, 0.988, 0.999, 0.999),
}
PAPER_SAYS = """\
The paper on its figures 9 and 10: the online LAE is better than all others by log-likelihood and by typicality, and
tells the two sets apart by its variance in latent and in output space; with dropout the variance is larger on the
images that were trained on. The numbers of its figure 9 (c) are not in the paper's text; "authors" are the runs that
their repository stores, of MNIST against KMNIST with linear layers. "FPR95" is the share of MNIST that output σ takes
for FashionMNIST where it accepts 95 % of that; the authors' code reads it off a wrong place of the curve."""
BRIEFLY = """\
The default trains a few epochs on a part of the images: too little to be held against the paper's figures (--paper)."""
LINES = dict(zip(METHODS, ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), "-"), strict=True))
COLOURS = dict(zip(METHODS, ("#999999", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#D55E00"), strict=True))


def measure(method: Method, x: Tensor, settings: Settings) -> dict[str, Tensor]:
    """Squared error and standard deviations of every image.  # each [N]"""
    found: dict[str, list[Tensor]] = {"error": [], "latent σ": [], "output σ": []}
    for part in x.split(BATCH):
        drawn = method.draw(part, settings.samples, settings.seed)
        assert drawn.samples is not None
        assert drawn.variance is not None
        assert drawn.latent_variance is not None
        found["error"].append((drawn.samples - part).square().flatten(2).sum(2).mean(0))
        found["latent σ"].append((drawn.latent_variance + 1e-5).sqrt().sum(1))
        found["output σ"].append((drawn.variance + 1e-5).sqrt().flatten(1).sum(1))
    return {name: torch.cat(parts) for name, parts in found.items()}


def scores_of(method: Method, data: Data, outside: Tensor, settings: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    """Each score inside and outside of the distribution; an autoencoder without samples has two of the four."""
    some = data.train.tensors[0][: len(data.test)]  # as many as there are test images
    typical = measure(method, some, settings)["error"].mean()
    both = [measure(method, x, settings) for x in (data.test.tensors[0], outside)]
    found = {"log-likelihood": tuple(each["error"] for each in both)}
    found["typicality"] = tuple((each["error"] - typical).abs() for each in both)
    if method.stochastic:
        found |= {name: tuple(each[name] for each in both) for name in SCORES[2:]}
    return found  # type: ignore[return-value]


def auroc(inside: Tensor, outside: Tensor) -> float:
    return detection(inside, outside)["auroc"]


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    return {name: float(v) for name, v in metrics.functional.ood_detection(*joined(inside, outside)).items()}


def joined(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    score = torch.cat([inside, outside])
    return score, torch.arange(len(score)) >= len(inside)


def roc(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """False and true positive rates over all thresholds; outside is positive."""
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    rates = [1 - torch.searchsorted(part.sort().values, thresholds) / len(part) for part in (inside, outside)]
    return tuple(torch.cat([torch.zeros(1), rate]) for rate in rates)  # type: ignore[return-value]


def figure_9(scores: dict[str, dict[str, tuple[Tensor, Tensor]]]) -> Figure:
    figure = Figure(figsize=(9.5, 4.4), layout="constrained", dpi=110)
    for ax, name in zip(figure.subplots(1, 2), SCORES[2:], strict=True):
        for method, found in scores.items():
            if name in found:
                wide = 2.4 if method == "LAE (online)" else 1.4
                label = f"{method}: {auroc(*found[name]):.3f}"
                look = {"linestyle": LINES[method], "color": COLOURS[method], "linewidth": wide}
                ax.plot(*roc(*found[name]), label=label, **look)
        ax.plot([0, 1], [0, 1], color="black", linewidth=0.6)
        ax.set(title=name, xlabel="false positive rate", ylabel="true positive rate", aspect="equal")
        ax.legend(fontsize=8, title="AUROC", loc="lower right")
    return figure


def figure_10(scores: dict[str, dict[str, tuple[Tensor, Tensor]]]) -> Figure:
    shown = {method: found["output σ"] for method, found in scores.items() if "output σ" in found}
    figure = Figure(figsize=(3.9 * len(shown), 3.4), layout="constrained", dpi=110)
    for ax, (method, found) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        score, is_ood = joined(*found)
        plots.ood_histogram(score.log10(), is_ood, n_bins=30, ax=ax)
        ax.set(title=method, xlabel="log₁₀ of the output σ, summed over pixels")
        title = f"AUROC = {auroc(*found):.3f}"
        ax.legend(["FashionMNIST", "MNIST"], loc="upper left", ncols=2, fontsize=7, title=title, title_fontsize=8)
    return figure


def main() -> None:
    settings, arguments = parse(__doc__ or "", "lae_ood", DEFAULT, PAPERS)
    data = read_data("FashionMNIST", arguments.data, arguments.output, settings)
    outside = read_data("MNIST", arguments.data, arguments.output, settings).test.tensors[0]
    channels = settings.width // 8
    what = (
        f"FashionMNIST against MNIST: two convolutions of {channels} channels, {32 * channels}-{16 * channels}-2, tanh"
    )
    print(describe(what, data, settings, PAPERS), flush=True)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{text} [{time.perf_counter() - start:.0f} s]", flush=True)

    methods = train_all(data, settings, arguments.output, conv=True, say=say)
    scores = {name: scores_of(method, data, outside, settings) for name, method in methods.items()}
    rows: dict[str, list[Any]] = {}
    for name, found in scores.items():
        error = found["log-likelihood"][0].mean()
        ours = [auroc(*found[score]) if score in found else None for score in SCORES]
        fpr95 = detection(*found[SCORES[-1]])["fpr95"] if SCORES[-1] in found else None
        rows[name] = [float(error), *ours, fpr95]
    print(
        f"\nfigure 9 (c), AUROC on {len(data.test):,} images of FashionMNIST and {len(outside):,} of MNIST, "
        f"{settings.samples} sampled networks:\n"
    )
    shown = {name: [*row, *(STORED_RUNS.get(name) or [None] * 4)] for name, row in rows.items()}
    print(table([*COLUMNS, *("(authors)",) * 4], shown))
    print(f'"error" is ‖x − f(x)‖² of a sampled network inside.\n\n{PAPER_SAYS}')
    if settings == replace(DEFAULT, seed=settings.seed):
        print(BRIEFLY)
    write_csv(arguments.output / "auroc.csv", ["method", *COLUMNS], [[n, *row] for n, row in rows.items()])
    figure_9(scores).savefig(arguments.output / "figure_9.png")
    figure_10(scores).savefig(arguments.output / "figure_10.png")
    print(f"\nfigure_9.png, figure_10.png and auroc.csv are in {arguments.output}")


if __name__ == "__main__":
    main()
