"""Do autoencoders know what they have not seen? Figures 9 and 10 of the paper (Miani et al., "Laplacian autoencoders
for learning stochastic representations").

    python -m recipes.papers.lae.ood                        # trained on FashionMNIST, tested on MNIST; convolutions
    python -m recipes.papers.lae.ood --pair mnist-kmnist    # trained on MNIST, tested on KMNIST; linear layers
    python -m recipes.papers.lae.ood --scale                # either pair, an hour: more images, wider, longer
    python -m recipes.papers.lae.ood --paper                # either pair, whole network, 55,000 images; needs a GPU

The methods are an autoencoder, a VAE, an autoencoder with dropout, an ensemble of five, and the Laplacian autoencoder,
post-hoc and online. They are compared by the area under the ROC curve (AUROC) of four scores, which should be larger
outside: the squared error of a sampled network, which is the negative log-likelihood ("log-likelihood"), its distance
from the training images' average ("typicality"), and the standard deviation over sampled networks, summed over latent
dimensions ("latent σ") and over pixels ("output σ"). `ablation.py` measures which settings matter.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from lightning_bayes import plots
from recipes.papers.claims import Claim, beats, verdict
from recipes.papers.lae import common
from recipes.papers.lae.autoencoders import METHODS, Method, memory, train_all
from recipes.papers.lae.common import Data, conv_net, describe, linear_net, read_data, read_outside
from recipes.papers.lae.pictures import LOOKS
from recipes.papers.lae.scores import SCORES, Scores, auroc, detection, joined, roc, scores_of
from recipes.program import Row, markdown, read_rows, start


@dataclass(frozen=True)
class Settings(common.Settings):
    pair: str = "fashionmnist-mnist"


@dataclass(frozen=True)
class Pair:
    """The training data, the unknown data, and the network."""

    inside: str
    outside: str
    conv: bool
    scales: dict[str, Settings]


def _tiny(pair: str) -> Settings:
    return Settings(**{**vars(common.FAST), "lr": 0.003}, pair=pair)


def _papers(pair: str, **changes: Any) -> Settings:
    return Settings(**{**vars(common.PAPER), "n_test": 5000, **changes}, pair=pair)


_FASHION, _DIGITS = "fashionmnist-mnist", "mnist-kmnist"
PAIRS = {
    _FASHION: Pair(
        "FashionMNIST",
        "MNIST",
        conv=True,
        scales={
            "default": Settings(2500, 500, 1000, 40, samples=10, pixels=16, width=96, memory_factor=1e-4),
            "fast": _tiny(_FASHION),
            "scale": Settings(10_000, 1000, 2000, 60, samples=10, width=128, memory_factor=1e-4),
            "paper": _papers(_FASHION, batch=100, lr=1e-4, samples=10, hessian="mixed"),
        },
    ),
    _DIGITS: Pair(
        "MNIST",
        "KMNIST",
        conv=False,
        scales={
            "default": Settings(epochs=10, pair=_DIGITS),
            "fast": _tiny(_DIGITS),
            "scale": Settings(20_000, 2000, 5000, 40, samples=100, pair=_DIGITS),
            "paper": _papers(_DIGITS),
        },
    ),
}
COLUMNS = ("error", *SCORES, "FPR95")
STORED_RUNS: dict[str, tuple[Any, ...]] = {  # AUROC of the four scores, MNIST against KMNIST
    "VAE": (None, None, 0.57, 0.92),  # the paper's VAE likelihoods, 0.74 and 0.61, include variances and KL
    "LAE (online)": (0.991, 0.988, 0.999, 0.999),
}
TOLD_APART, AS_STORED = 0.75, 0.02  # smallest AUROC that separates two sets; largest difference from a stored one


def judge(scores: Scores) -> Row:
    row: Row = {"error": float(scores["log-likelihood"][0].mean())}
    row |= {score: auroc(*scores[score]) if score in scores else None for score in SCORES}
    row["FPR95"] = detection(*scores["output σ"])["fpr95"] if "output σ" in scores else None
    return row


def darkness(inside: Tensor, outside: Tensor) -> float:
    """The AUROC of an image's darkness, which needs no network."""
    return auroc(*(-x.flatten(1).mean(1) for x in (inside, outside)))


def claims(rows: dict[str, dict[str, Any]], pair: Pair) -> list[Claim]:
    """The claims of section 5 on figures 9 and 10, and on the run that the authors' repository stores."""
    lae = rows["LAE (online)"]
    statements = []
    for score in SCORES[:2]:
        statements.append(beats("LAE (online)", {name: row[score] for name, row in rows.items()}, score))
    for score in SCORES[2:]:
        text = f"{score} of the online LAE tells the two sets apart, AUROC > {TOLD_APART}"
        statements.append(Claim(text, lae[score] > TOLD_APART, f"{lae[score]:.3f}"))
    better = {name: rows[name]["output σ"] for name in ("LAE (online)", "LAE (post-hoc)", "VAE", "MC-AE")}
    numbers = ", ".join(f"{name} {value:.3f}" for name, value in better.items())
    text = "both LAE do so better than VAE and MC-AE"
    statements.append(Claim(text, _first_two_best(better), f"output σ: {numbers}"))
    dropout, text = rows["MC-AE"]["output σ"], "with dropout output σ is larger inside than outside"
    statements.append(Claim(text, dropout < 0.5, f"AUROC {dropout:.3f}"))
    if not pair.conv:
        stored = STORED_RUNS["LAE (online)"]
        same = all(abs(lae[score] - value) <= AS_STORED for score, value in zip(SCORES, stored, strict=True))
        text = f"the online LAE's four AUROC are the authors', ± {AS_STORED}"
        numbers = ", ".join(f"{lae[score]:.3f} – {value}" for score, value in zip(SCORES, stored, strict=True))
        statements.append(Claim(text, same, numbers))
    return statements


def _first_two_best(values: dict[str, float]) -> bool:
    first, second, *others = values.values()
    return min(first, second) > max(others)


def figure_9(scores: dict[str, Scores]) -> Figure:
    figure = Figure(figsize=(9.5, 6.3), layout="constrained", dpi=110)
    for ax, name in zip(figure.subplots(1, 2), SCORES[2:], strict=True):
        for method, of_method in scores.items():
            if name in of_method:
                look = {key: LOOKS[method][key] for key in ("color", "linestyle")}
                label = f"{method}: {auroc(*of_method[name]):.3f}"
                ax.plot(*roc(*of_method[name]), label=label, linewidth=2.4 if method == "LAE (online)" else 1.4, **look)
        ax.plot([0, 1], [0, 1], color="black", linewidth=0.6)
        ax.set(title=name, xlabel="false positive rate", ylabel="true positive rate", aspect="equal")
        # Below the axes, because there is a curve in every corner.
        ax.legend(fontsize=8, title="AUROC", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def figure_10(scores: dict[str, Scores], pair: Pair) -> Figure:
    shown = {method: both["output σ"] for method, both in scores.items() if "output σ" in both}
    figure = Figure(figsize=(3.9 * len(shown), 3.4), layout="constrained", dpi=110)
    for ax, (method, both) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        score, is_ood = joined(*both)
        plots.ood_histogram(score.log10(), is_ood, n_bins=30, ax=ax)
        ax.set(title=method, xlabel="log₁₀ of the output σ, summed over pixels")
        title = f"AUROC = {auroc(*both):.3f}"
        ax.legend([pair.inside, pair.outside], loc="upper left", ncols=2, fontsize=7, title=title, title_fontsize=8)
    return figure


def report(folder: Path) -> str:
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["settings"]
    pair = PAIRS[settings["pair"]]
    rows = {row["method"]: row for row in read_rows(folder / "auroc.csv")}
    dark = read_rows(folder / "darkness.csv")[0]["AUROC"]
    authors = {} if pair.conv else STORED_RUNS
    lines = []
    for name, row in rows.items():
        stored = [authors.get(name, (None,) * 4)] if authors else []
        lines.append([name, *(row[column] for column in COLUMNS), *(value for values in stored for value in values)])
    net = (conv_net if pair.conv else linear_net)(settings)
    numbers = "the authors' come from the runs that their repository stores" if authors else "the paper's text has none"
    return "\n\n".join(
        [
            f"{pair.inside} → {pair.outside}, figure 9 (c), AUROC on {settings['n_test']:,} test images of each: "
            f"{describe(net, settings)}. {remembered(settings)}",
            markdown(["", *COLUMNS, *(f"{score} (authors)" for score in SCORES if authors)], lines, 3),
            f'"error" is ‖x − f(x)‖² of a sampled network inside; "FPR95" is the share of {pair.outside} that output '
            f"σ accepts as {pair.inside} if it accepts 95 % of the latter; reference numbers: {numbers}. Without any "
            f"network, the darkness of an image has AUROC {dark:.3f}. Figures: figure_9.png, figure_10.png.",
            verdict(claims(rows, pair)),
            *([] if pair.conv else ["The paper makes all statements but the last for FashionMNIST against MNIST."]),
        ]
    )


def remembered(settings: dict[str, Any]) -> str:
    n = settings["n_train"]
    kept = memory(n, Settings(**settings))
    left = (1 - kept["memory_factor"]) ** (settings["epochs"] * math.ceil(n / settings["batch"]))
    return (
        f"The online memory matches a factor of {settings['memory_factor']:g} with 55,000 images, in epochs and in "
        f"sharpness: a step forgets one part in {1 / kept['memory_factor']:.0f}, the curvature is scaled by "
        f"{kept['scale']:.0f}, and after all epochs {left:.1%} of the start is left."
    )


def scored(methods: dict[str, Method], data: Data, outside: Tensor, settings: Settings, seed: int) -> dict[str, Scores]:
    train, inside = data.train.tensors[0], data.test.tensors[0]
    return {name: scores_of(method, train, inside, outside, settings.samples, seed) for name, method in methods.items()}


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--pair", choices=PAIRS, default=_FASHION)
    pair = PAIRS[first.parse_known_args()[0].pair]
    run = start(__doc__, "papers/lae/ood", pair.scales)
    settings = run.settings
    data = read_data(pair.inside, run.data, settings)
    outside = read_outside(pair.outside, run.data, settings)
    methods = train_all(run, data, pair.conv)
    scores: dict[str, Scores] = run.once("scores", scored, methods, data, outside, settings, run.seed)
    for name in METHODS:
        run.collect("auroc", name, lambda name=name: [{"method": name, **judge(scores[name])}])
    run.collect("darkness", "darkness", lambda: [{"AUROC": darkness(data.test.tensors[0], outside)}])
    run.save_picture("figure_9", figure_9(scores))
    run.save_picture("figure_10", figure_10(scores, pair))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
