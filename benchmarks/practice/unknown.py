"""Unknown inputs: which score separates them best from known ones?

The networks are two public ResNets for CIFAR-10 (see `recipes.papers.glm.pretrained`) and those of `setups.UNKNOWN`,
which have seen only some classes. Known inputs are test images. Unknown ones are *far* (other datasets, noise, shuffled
pixels), *near* (classes held out of training) or *changed* (test images at 30 % brightness).

Each score depends only on the last layer's inputs, so posteriors are fitted with the last layer as their network.
The others are the energy (Liu et al. 2020), the distance to the 20th nearest training input (Sun et al. 2022), to the
nearest class (Lee et al. 2018), and the virtual logit of ViM (Wang et al. 2022), whose dimension is not tuned here.
The scores of all inputs are kept in a file for each network; tables and the picture follow from these files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.keep import RESULTS, ROOT
from benchmarks.practice import datasets, training
from benchmarks.practice.report import short
from benchmarks.practice.setups import PUBLIC, UNKNOWN, SetUp
from benchmarks.practice.tasks import HELD_OUT, Part, Task
from benchmarks.readme import section
from benchmarks.report import table
from lightning_bayes import fit_laplace, plots
from lightning_bayes.metrics import functional as metrics
from recipes.program import Row, read_rows, write_rows

CSV, MARKDOWN = RESULTS / "unknown.csv", RESULTS / "unknown.md"
FAR = ("SVHN", "MNIST", "FashionMNIST", "KMNIST", "photographs", "noise", "shuffled pixels")
KNN, MAHALANOBIS, VIM = "20th neighbour, cosine", "Mahalanobis, nearest class", "ViM, half of the directions"
CHANGED, NOVELTY, ENTROPY, LEVEL = "30 % brightness", "novelty", "entropy", 0.05
N_FIT, N_VALIDATION, N_KNOWN, N_UNKNOWN, NEIGHBOURS = 5000, 1000, 2000, 1000, 20
NAMES = {
    "digits": "digits 0–7",
    "MNIST": "MNIST 0–7",
    "FashionMNIST": "Fashion 0–7",
    "CIFAR10": "CIFAR-10 vehicles",
    "docstrings": "docstrings",
}
PAPER = {  # OpenOOD 1.5 (Zhang et al. 2023): ResNet-18 on CIFAR-10, mean AUROC over its far sets
    "maximum probability": 0.907,
    KNN: 0.930,
    MAHALANOBIS: 0.897,
    VIM: 0.935,
}
CASES: tuple[SetUp | str, ...] = (*PUBLIC, *UNKNOWN)
Scores = dict[str, Tensor]  # [N] by name; larger is less known


class LastLayer:
    """Scores of inputs by their features, the inputs of the network's last layer."""

    def __init__(self, network: nn.Module, task: Task) -> None:
        self.network = network
        self.head = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
        train, held_out = (Part(self.features(part.x), part.y) for part in (task.train, task.val))
        self.seen, batches = train.x, training.loader(train)
        self.classes = torch.stack([train.x[train.y == c].mean(0) for c in range(task.n_outputs)]).double()
        self.precision = torch.linalg.pinv(torch.cov((train.x - self.classes[train.y]).T), hermitian=True)
        self.origin = -torch.linalg.pinv(self.head.weight.detach()) @ self.head.bias.detach()
        centred = train.x - self.origin
        half = centred.shape[1] // 2  # directions of least variance
        self.residual = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, :half]
        self.scale = self.head(train.x).amax(1).mean().detach() / (centred @ self.residual).norm(dim=1).mean()
        fitted = fit_laplace(self.head, batches)
        self.posterior = fitted.tune_prior("auto", training.loader(held_out))
        self.evidence = fitted.tune_prior("marglik")
        self.full, self.diagonal = (fit_laplace(self.head, batches, structure=word) for word in ("full", "diag"))

    def features(self, x: Tensor) -> Tensor:
        """# [N, D]"""
        seen: list[Tensor] = []
        with torch.no_grad(), self.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0])):
            for part in x.split(training.EVALUATION_BATCH):
                self.network(part)
        return torch.cat(seen)

    def scores(self, x: Tensor) -> Scores:
        a = self.features(x)
        f = self.head(a).detach()
        tuned, evidence = self.posterior.predict(a), self.evidence.predict(a)
        assert tuned.novelty is not None
        assert tuned.novelty_p is not None
        assert evidence.mutual_information is not None
        return {
            ENTROPY: torch.special.entr(f.softmax(1)).sum(1),
            "maximum probability": -f.softmax(1).amax(1),
            "maximum logit": -f.amax(1),
            "energy": -f.logsumexp(1),
            KNN: -(F.normalize(a) @ F.normalize(self.seen).T).topk(NEIGHBOURS).values[:, -1],
            MAHALANOBIS: self._mahalanobis(a.double()),
            VIM: self.scale * ((a - self.origin) @ self.residual).norm(dim=1) - f.logsumexp(1),
            "entropy of the posterior": tuned.entropy,
            '– `tune="marglik"`': evidence.entropy,
            "– its mutual information": evidence.mutual_information,
            NOVELTY: tuned.novelty,
            "– of a full matrix": self.full.novelty(a),
            "– of a diagonal": self.diagonal.novelty(a),
            "novelty_p": -tuned.novelty_p,
        }

    def _mahalanobis(self, a: Tensor) -> Tensor:
        d = a.unsqueeze(1) - self.classes  # [N, C, D]
        return torch.einsum("nci,ij,ncj->nc", d, self.precision, d).amin(1)


def compare(case: SetUp | str, again: bool, folder: Path) -> None:
    """Write the scores of a network's known and unknown inputs, unless they exist or the data are missing."""
    path = file_of(folder, case)
    if path.exists() and not again:
        return
    try:
        network, task = public(case) if isinstance(case, str) else _trained(case, folder)
    except datasets.MissingDataError as error:
        print(f"without {path.stem}: {error}", file=sys.stderr)
        return
    last = LastLayer(network, task)
    label = last.head(last.features(task.test.x)).argmax(1)
    sets = {"known": task.test.x, **task.unknown}
    scores = {name: last.scores(x) for name, x in sets.items()}
    training.write(path, {"accuracy": float((label == task.test.y).double().mean()), "scores": scores})


def file_of(folder: Path, case: SetUp | str) -> Path:
    return folder / "unknown" / f"{case if isinstance(case, str) else f'{case.name}.{case.key}'}.pt"


def public(name: str) -> tuple[nn.Module, Task]:
    """Load a public ResNet, parts of CIFAR-10, and unknown images in the same format."""
    from recipes.papers.glm import pretrained

    folder, generator = datasets.default_folder(), torch.Generator().manual_seed(0)
    if not (folder / "cifar10_resnets").is_dir():
        raise datasets.MissingDataError(f"there is no {folder / 'cifar10_resnets'}")

    def some(name: str, train: bool, n: int) -> tuple[Tensor, Tensor | None]:
        x, y = datasets.images(name, train)
        rows = torch.randperm(len(x), generator=generator)[:n]
        return x[rows].float() / 255, None if y is None else y[rows]

    (x, y), (held, labels) = some("CIFAR10", True, N_FIT), some("CIFAR10", False, N_VALIDATION + N_KNOWN)
    assert y is not None
    assert labels is not None
    unknown = {}
    for other in FAR[:4]:
        pixels, _ = some(other, False, N_UNKNOWN)
        unknown[other] = pixels if other == "SVHN" else F.pad(pixels, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    validation, test = held[:N_VALIDATION], held[N_VALIDATION:]
    order = torch.stack([torch.randperm(1024, generator=generator) for _ in validation])[:, None].expand(-1, 3, -1)
    unknown["photographs"] = _photographs()[:N_UNKNOWN]
    unknown["noise"] = torch.rand(validation.shape, generator=generator)
    unknown["shuffled pixels"] = validation.flatten(2).gather(2, order).view_as(validation)
    unknown[CHANGED] = 0.3 * validation
    part = pretrained.prepared
    return pretrained.load(name, folder), Task(
        Part(part(x), y),
        Part(part(validation), labels[:N_VALIDATION]),
        Part(part(test), labels[N_VALIDATION:]),
        {name: part(x) for name, x in unknown.items()},
        n_outputs=10,
        y_scale=1.0,
        rows={},
    )


def _photographs() -> Tensor:
    """Tiles of the two photographs that scikit-learn ships, a temple and a flower.  # [520, 3, 32, 32]"""
    from sklearn.datasets import load_sample_images

    pictures = torch.stack([torch.tensor(picture) for picture in load_sample_images().images]).float() / 255
    return pictures.unfold(1, 32, 32).unfold(2, 32, 32).flatten(0, 2)  # [2, 427, 640, 3] -> [520, 3, 32, 32]


def _trained(setup: SetUp, folder: Path) -> tuple[nn.Module, Task]:
    subject = training.trained(setup, folder)
    return subject.module.net, subject.task


def measure(cases: Sequence[SetUp | str], folder: Path) -> Iterator[Row]:
    """A row for each network, set of unknown inputs and score."""
    for case in cases:
        if not (path := file_of(folder, case)).exists():
            continue
        held = torch.load(path, weights_only=True)
        known: Scores = held["scores"].pop("known")
        named = (
            {"network": case, "seed": 0} if isinstance(case, str) else {"network": NAMES[case.data], "seed": case.seed}
        )
        named["accuracy"] = round(held["accuracy"], 4)
        alarms = {"known": known.pop("novelty_p")}
        for unknown, scores in held["scores"].items():
            alarms[unknown] = scores.pop("novelty_p")
            for score, values in scores.items():
                both = torch.cat([known[score], values])
                numbers = metrics.ood_detection(both, torch.arange(len(both)) >= len(known[score]))
                measured = {name: round(float(numbers[name]), 4) for name in ("auroc", "aupr_out", "fpr95")}
                yield {**named, "unknown": unknown, "score": score, **measured}
        for where, p in alarms.items():
            yield {
                **named,
                "unknown": where,
                "score": "novelty_p",
                "alarms": round(float((-p <= LEVEL).double().mean()), 4),
            }


def keep(rows: Sequence[Row], folder: Path) -> None:
    """Replace the kept rows of these networks, and all files generated from the rows."""
    networks = {row["network"] for row in rows}
    kept = [row for row in read_rows(ROOT / CSV) if row["network"] not in networks]
    write_rows(ROOT / CSV, [*kept, *rows])
    (ROOT / MARKDOWN).write_text(page(read_rows(ROOT / CSV)), encoding="utf-8")
    if (path := file_of(folder, PUBLIC[-1])).exists():
        draw(torch.load(path, weights_only=True)["scores"]).savefig(ROOT / "docs" / "images" / "unknown.png", dpi=110)


def page(rows: Sequence[Row]) -> str:
    """One section for each table that has rows."""
    public_rows = [row for row in rows if row["network"] in PUBLIC]
    small = [row for row in rows if row["network"] not in PUBLIC]
    near, far = ([row for row in small if (row["unknown"] == HELD_OUT) is is_near] for is_near in (True, False))
    tables = {
        "resnets": _of_public(public_rows),
        "near": _of_small(near, lambda row: row["network"]),
        "small": _of_small(far, lambda row: f"{row['network']}: {row['unknown']}"),
        "alarms": _alarms(public_rows),
    }
    return "\n\n".join(section(name, text) for name, text in tables.items() if text) + "\n"


def _of_public(rows: Sequence[Row]) -> str:
    """The AUROC of each score on each set, and means over the far sets, of all networks in one cell."""
    found = _by(rows, "auroc", lambda row: (row["network"], row["unknown"]))
    fpr95 = _by(rows, "fpr95", lambda row: (row["network"], row["unknown"]))
    networks = list(dict.fromkeys(row["network"] for row in rows))

    def both(values: Mapping[Any, float], sets: Sequence[str]) -> str:
        return " / ".join(short(mean(values[network, name] for name in sets)) for network in networks)

    lines = [
        [
            _label(score),
            *(both(values, [name]) for name in (*FAR, CHANGED)),
            both(values, FAR),
            both(fpr95[score], FAR),
            short(PAPER[score]) if score in PAPER else "",
        ]
        for score, values in found.items()
    ]
    means = ("mean of the far sets", "their mean FPR95", "OpenOOD, its far sets")
    return table([f"AUROC, {' / '.join(networks)}", *FAR, CHANGED, *means], lines) if lines else ""


def _of_small(rows: Sequence[Row], column: Callable[[Row], str]) -> str:
    """The AUROC of each score, mean over seeds."""
    found = _by(rows, "auroc", column)
    columns = list(found.get(NOVELTY, {}))
    lines = [[_label(score), *(short(of[name]) for name in columns)] for score, of in found.items()]
    return table(["AUROC", *columns], lines) if found else ""


def _alarms(rows: Sequence[Row]) -> str:
    """The share of inputs of each set whose p-value is below the level."""
    found = _by(rows, "alarms", lambda row: (row["network"], row["unknown"])).get("novelty_p", {})
    networks, sets = list(dict.fromkeys(network for network, _ in found)), ("known", *FAR, CHANGED)
    lines = [[network, *(short(found[network, name]) for name in sets)] for network in networks]
    return table([f"share with `novelty_p` ≤ {short(LEVEL)}", *sets], lines) if lines else ""


def _by(rows: Sequence[Row], number: str, column: Callable[[Row], Any]) -> dict[str, dict[Any, float]]:
    """The means over seeds by score and column."""
    values: dict[str, dict[Any, list[float]]] = {}
    for row in rows:
        if row.get(number) is not None:
            values.setdefault(row["score"], {}).setdefault(column(row), []).append(row[number])
    return {score: {name: mean(seeds) for name, seeds in of.items()} for score, of in values.items()}


def _label(score: str) -> str:
    return f"**{score}**" if score == NOVELTY else score


def draw(scores: Mapping[str, Scores], unknown: str = "SVHN") -> Figure:
    """Histograms of entropy and novelty for known and unknown images."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    for ax, score in zip(figure.subplots(1, 2), (ENTROPY, NOVELTY), strict=True):
        both = torch.cat([scores["known"][score], scores[unknown][score]])
        plots.ood_histogram(both, torch.arange(len(both)) >= len(scores["known"][score]), ax=ax)
        ax.set(xlabel=score)
    return figure
