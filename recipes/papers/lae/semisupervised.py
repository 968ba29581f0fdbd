"""A few labels in latent space: figure 12 of the paper (Miani et al., "Laplacian autoencoders for learning stochastic
representations").

    python -m recipes.papers.lae.semisupervised            # minutes: some of MNIST, the approximate Hessian
    python -m recipes.papers.lae.semisupervised --paper    # 55,000 images, the exact Hessian; needs a GPU

Autoencoders learn from images without labels. Then 1 to 100 images of each class get labels, all from the validation
set, and K-nearest neighbours in latent space classify the rest of it (appendix A.4). A stochastic encoder encodes every
labelled image 100 times, which shows how far its label extends. K is chosen by two-fold cross-validation on the
labelled images. All copies of an image are in the same fold, because they would give each other away. (With one label
per class there is nothing to hold out, and K is 1.) Five repeats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.neighbors import KDTree
from torch import Tensor

from recipes.papers.claims import Claim, verdict
from recipes.papers.lae.autoencoders import METHODS, Method, train_all
from recipes.papers.lae.common import FAST, PAPER, Settings, describe, linear_net, read_data
from recipes.papers.lae.pictures import LOOKS
from recipes.program import Row, markdown, read_rows, start

DEFAULT = Settings(n_train=4000, n_valid=2000, n_test=100, samples=100, epochs=10)
TINY = replace(FAST, n_valid=300)
PAPERS = replace(PAPER, n_test=100)  # test images are not used
LABELS = (1, 2, 5, 10, 20, 50, 100)  # labels per class
NEIGHBOURS = (1, 3, 5, 10, 25, 50, 100, 250, 500, 1000)  # numbers of copies, a hundred of which may be one image
REPEATS = 5
ALIKE = 0.02  # difference of two similar accuracies


def embed(method: Method, x: Tensor, samples: int, seed: int) -> Tensor:
    """Encode all images with every sampled encoder.  # [S, N, 2]"""
    n = samples if method.stochastic else 1
    parts = []
    for part in x.split(max(1, 20_000 // n)):
        drawn = method.draw(part, n, seed).latent_samples
        assert drawn is not None
        parts.append(drawn)
    return torch.cat(parts, 1)


def accuracy(z: Tensor, y: Tensor, per_class: int, generator: torch.Generator) -> float:
    """The accuracy on all other images, for one draw of labelled images.  # z [S, N, 2]"""
    order = torch.randperm(len(y), generator=generator)
    labelled = torch.cat([order[y[order] == c][:per_class] for c in y.unique()])
    rest = torch.ones(len(y), dtype=torch.bool)
    rest[labelled] = False
    K = choose_neighbours(z, y, labelled, per_class)
    return hits(z, y, labelled, rest.nonzero().squeeze(1), (K,))[K]


def choose_neighbours(z: Tensor, y: Tensor, labelled: Tensor, per_class: int) -> int:
    """The K with the most hits in two-fold cross-validation; ties go to the smallest."""
    if per_class == 1:
        return 1
    first = torch.arange(len(labelled)) % per_class < per_class // 2  # half of each class
    one, other = labelled[first], labelled[~first]
    forth, back = hits(z, y, one, other, NEIGHBOURS), hits(z, y, other, one, NEIGHBOURS)
    shares = {K: len(other) * forth[K] + len(one) * back[K] for K in forth if K in back}
    return max(shares, key=lambda K: shares[K])


def hits(z: Tensor, y: Tensor, known: Tensor, asked: Tensor, neighbours: tuple[int, ...]) -> dict[int, float]:
    """The share of `asked` images, each at the mean of its copies, that the K nearest copies of `known` images classify
    correctly, for each K."""
    points, labels = z[:, known].flatten(0, 1), y[known].repeat(len(z))  # [S · n, 2], [S · n]
    possible = [K for K in neighbours if len(points) >= K]
    _, nearest = KDTree(points.numpy()).query(z[:, asked].mean(0).numpy(), k=max(possible))
    classes = labels[torch.from_numpy(nearest)]  # [N, K]
    shares = {}
    for K in possible:
        votes = torch.zeros(len(asked), int(y.max()) + 1).scatter_add_(1, classes[:, :K], torch.ones(len(asked), K))
        shares[K] = float((votes.argmax(1) == y[asked]).float().mean())
    return shares


def claims(results: dict[str, Tensor], labels: list[int]) -> list[Claim]:
    """The claims of section 5 on figure 12, except that the AE wins in the end, which takes more than a hundred
    labels."""
    lae, ae = (results[name].mean(1) for name in ("LAE (online)", "AE"))  # [labels]
    others = {name: r.mean(1) for name, r in results.items() if not name.startswith("LAE")}
    statements = []
    for i, n in enumerate(labels):
        if n <= 20:
            best = max(others, key=lambda name: float(others[name][i]))
            text = f"with {n} label{'s' if n > 1 else ''} per class the LAE is better than all others"
            numbers = f"{lae[i]:.3f}; {best}: {others[best][i]:.3f}"
            statements.append(Claim(text, bool(lae[i] > others[best][i]), numbers))
    holds = bool((lae[-1] - ae[-1]).abs() <= ALIKE)
    text = f"with {labels[-1]} labels per class AE and LAE are alike, ± {ALIKE}"
    return [*statements, Claim(text, holds, f"LAE {lae[-1]:.3f}, AE {ae[-1]:.3f}")]


def figure_12(results: dict[str, Tensor], labels: list[int]) -> Figure:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained", dpi=110)
    ax = figure.subplots()
    for name, accuracies in results.items():
        mean, std = accuracies.mean(1), accuracies.std(1, correction=0)
        ax.plot(labels, mean, markersize=5, linewidth=2.2 if "LAE" in name else 1.3, label=name, **LOOKS[name])
        ax.fill_between(labels, mean - std, mean + std, color=LOOKS[name]["color"], alpha=0.12, linewidth=0)
    ax.set(xscale="log", xlabel="labels per class", ylabel="accuracy of K-nearest neighbours in latent space")
    ax.set_xticks(labels, [str(n) for n in labels])
    ax.minorticks_off()
    ax.grid(color="0.9", linewidth=0.6)
    ax.legend(fontsize=8)
    return figure


def judge(name: str, method: Method, x: Tensor, y: Tensor, labels: list[int], samples: int, seed: int) -> Iterable[Row]:
    z = embed(method, x, samples, seed)
    for n in labels:
        generator = torch.Generator().manual_seed(seed)  # the same labelled images for every method
        for repeat in range(REPEATS):
            share = accuracy(z, y, n, generator)
            yield {"method": name, "labels per class": n, "repeat": repeat, "accuracy": share}


def read_results(folder: Path) -> tuple[dict[str, Tensor], list[int]]:
    """The accuracies of every method  # [labels, repeats], and the numbers of labels."""
    results: dict[str, dict[int, list[float]]] = {}
    for row in read_rows(folder / "accuracy.csv"):
        results.setdefault(row["method"], {}).setdefault(row["labels per class"], []).append(row["accuracy"])
    labels = list(next(iter(results.values())))
    return {name: torch.tensor([by_labels[n] for n in labels]) for name, by_labels in results.items()}, labels


def report(folder: Path) -> str:
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["settings"]
    results, labels = read_results(folder)
    lines = [
        [name, *(f"{mean:.3f} ± {std:.3f}" for mean, std in zip(r.mean(1), r.std(1, correction=0), strict=True))]
        for name, r in results.items()
    ]
    return "\n\n".join(
        [
            f"MNIST, figure 12, accuracy on the rest of {settings['n_valid']:,} validation images by labels per class; "
            f"mean and standard deviation of {REPEATS} repeats: {describe(linear_net(settings), settings)}. The "
            "paper's text has no numbers.",
            markdown(["", *map(str, labels)], lines),
            verdict(claims(results, labels)),
            "Picture: figure_12.png.",
        ]
    )


def main() -> None:
    run = start(__doc__, "papers/lae/semisupervised", {"default": DEFAULT, "fast": TINY, "paper": PAPERS})
    settings = run.settings
    data = read_data("MNIST", run.data, settings)
    methods = train_all(run, data)
    x, y = data.valid.tensors
    labels = [n for n in LABELS if n < int(y.bincount().min())]
    for name in METHODS:
        if name != "AE ensemble":  # five unrelated latent spaces
            run.collect("accuracy", name, judge, name, methods[name], x, y, labels, settings.samples, run.seed)
    run.save_picture("figure_12", figure_12(*read_results(run.output)))
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
