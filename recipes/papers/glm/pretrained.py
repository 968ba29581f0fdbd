"""CIFAR-10 with well-trained networks: two public ResNets, their posteriors, and unknown images.

The networks are ResNet-20 and ResNet-56 (He et al. 2016, section 4.2, shortcuts of option A), trained by others on all
training images, with an accuracy of 91.8 and 93.6 %. Half of the test images are for validation. The posterior of the
last layer or of all weights is fitted to a part of the training images.

`scores.csv` has the quality of the probabilities; `unknown.csv` how well each score separates the test images from
unknown ones (AUROC): entropy, maximum probability and energy (Liu et al. 2020) of the plain network, the distance to
the 20th nearest training image (Sun et al. 2022) and the Mahalanobis distance (Lee et al. 2018) in the last layer's
inputs, the posterior's entropy, and `posterior.novelty`. Unknown are SVHN, three sets of grey images, noise, test
images with shuffled pixels, and test images at 30 % brightness, which are the nearest.

    python -m recipes.papers.glm.pretrained           # ten minutes on one core
    python -m recipes.papers.glm.pretrained --paper   # all test images
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import GaussianPosterior, fit_laplace
from lightning_bayes.metrics import functional as metrics
from recipes.papers.image_data import read_images, read_unknown
from recipes.program import Row, Run, markdown, read_rows, require, start

BLOCKS = {"ResNet-20": 3, "ResNet-56": 9}
FAR = ("SVHN", "MNIST", "FashionMNIST", "KMNIST", "noise", "shuffled")
NEAR = ("dark",)
BATCH = 250
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the inputs that the networks were trained on
PAPER = {  # OpenOOD 1.5: ResNet-18 on CIFAR-10, mean AUROC over its far sets
    "maximum probability": 0.907,
    "20th neighbour": 0.930,
    "Mahalanobis": 0.897,
}


@dataclass(frozen=True)
class Settings:
    n_fit: int = 5000
    n_test: int = 4000  # and half of them for validation
    n_unknown: int = 1000
    n_all_weights: int = 500  # test images for predictions with all weights


SCALES = {
    "default": Settings(),
    "fast": Settings(n_fit=100, n_test=120, n_unknown=40, n_all_weights=20),
    "paper": Settings(n_fit=30_000, n_test=10_000, n_unknown=5000, n_all_weights=2000),
}


class Block(nn.Module):
    """Two convolutions with batch norm; the shortcut takes every second pixel and pads channels with zeros."""

    def __init__(self, channels: int, deeper: int) -> None:
        super().__init__()
        self.padding = (deeper - channels) // 2
        self.conv1 = nn.Conv2d(channels, deeper, 3, 2 if self.padding else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(deeper)
        self.conv2 = nn.Conv2d(deeper, deeper, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(deeper)

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        around = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding)) if self.padding else x
        return F.relu(z + around)


class ResNet(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(before, width), *(Block(width, width) for _ in range(blocks - 1)))
            for before, width in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def features(self, x: Tensor) -> Tensor:
        """The inputs of the last layer.  # [B, 64]"""
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x))


@dataclass(frozen=True)
class Data:
    fit: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unknown: dict[str, Tensor]


def read(settings: Settings, folder: Path, seed: int) -> Data:
    images = read_images("CIFAR10", folder, settings.n_fit, settings.n_test, seed, standardised=False)
    x, y = images.test.tensors
    half, generator = len(x) // 2, torch.Generator().manual_seed(seed)
    unknown = {"SVHN": read_unknown("SVHN", folder, settings.n_unknown, seed)}
    for name in ("MNIST", "FashionMNIST", "KMNIST"):
        grey = read_unknown(name, folder, settings.n_unknown, seed)
        unknown[name] = F.pad(grey, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    some = x[:half][: settings.n_unknown]  # the images that chose the temperature; not those of the test
    unknown["noise"] = torch.rand(some.shape, generator=generator)
    order = torch.stack([torch.randperm(1024, generator=generator) for _ in some]).unsqueeze(1).expand(-1, 3, -1)
    unknown["shuffled"] = some.flatten(2).gather(2, order).view_as(some)
    unknown["dark"] = 0.3 * some

    def prepared(x: Tensor) -> Tensor:
        return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)

    fit, labels = images.train.tensors
    return Data(
        (prepared(fit), labels),
        (prepared(x[:half]), y[:half]),
        (prepared(x[half:]), y[half:]),
        {name: prepared(x) for name, x in unknown.items()},
    )


def load(name: str, folder: Path) -> ResNet:
    path = require(folder / "cifar10_resnets" / f"{name.lower().replace('-', '')}.pt", f"the public {name}")
    network = ResNet(BLOCKS[name])
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def batches(part: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(t.split(BATCH) for t in part), strict=True))


def posteriors(network: ResNet, data: Data) -> Iterator[tuple[str, GaussianPosterior]]:
    for name, words in (
        ("last layer", {"subset": "last_layer"}),
        ("last layer, full", {"subset": "last_layer", "structure": "full"}),
        ("all weights", {}),
    ):
        fitted = fit_laplace(network, batches(data.fit), **words)
        yield f"{name}, evidence", fitted.tune_prior("marglik")
        yield f"{name}, auto", fitted.tune_prior("auto", batches(data.validation))


def outputs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([function(part) for part in x.split(BATCH)])


def quality(network: str, method: str, probs: Tensor, y: Tensor) -> Row:
    probs = probs.double().clamp_min(1e-12)
    return {
        "network": network,
        "method": method,
        "n": len(y),
        "nll": float(metrics.negative_log_likelihood(probs, y)),
        "acc": float((probs.argmax(1) == y).double().mean()),
        "ece": float(metrics.calibration_error(probs, y)),
    }


def judge(name: str, data: Data, settings: Settings, folder: Path) -> Iterator[Row]:
    """Probabilities of test images, by method."""
    network = load(name, folder)
    x, y = data.test
    logits, held_out = outputs(network, x), outputs(network, data.validation[0])
    yield quality(name, "MAP", logits.softmax(1), y)
    temperatures = torch.logspace(-1, 1, 201)
    nll = torch.stack([F.cross_entropy(held_out / T, data.validation[1]) for T in temperatures])
    yield quality(name, "MAP + temperature", (logits / temperatures[nll.argmin()]).softmax(1), y)
    for method, posterior in posteriors(network, data):
        n = settings.n_all_weights if method.startswith("all") else len(y)
        probs = outputs(lambda x, posterior=posterior: posterior.predict(x, split=False).probs, x[:n])
        yield quality(name, method, probs, y[:n])


def separate(name: str, data: Data, folder: Path) -> Iterator[Row]:
    """The AUROC of each score on each set of unknown images."""
    network = load(name, folder)
    posterior = fit_laplace(network, batches(data.fit), subset="last_layer").tune_prior(
        "auto", batches(data.validation)
    )
    seen = outputs(network.features, data.fit[0])
    classes = torch.stack([seen[data.fit[1] == c].mean(0) for c in range(10)])
    precision = torch.linalg.inv(torch.cov((seen - classes[data.fit[1]]).double().T))

    def nearest(x: Tensor) -> Tensor:
        return -(F.normalize(network.features(x)) @ F.normalize(seen).T).topk(20).values[:, -1]

    def mahalanobis(x: Tensor) -> Tensor:
        d = (network.features(x).unsqueeze(1) - classes).double()  # [B, 10, 64]
        return torch.einsum("bci,ij,bcj->bc", d, precision, d).amin(1)

    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "entropy": lambda x: torch.special.entr(network(x).softmax(1)).sum(1),
        "maximum probability": lambda x: -network(x).softmax(1).amax(1),
        "energy": lambda x: -network(x).logsumexp(1),
        "20th neighbour": nearest,
        "Mahalanobis": mahalanobis,
        "posterior's entropy": lambda x: posterior.predict(x).entropy,
        "novelty": posterior.novelty,
    }
    for score, function in scores.items():
        known = outputs(function, data.test[0])
        for unknown, x in data.unknown.items():
            values = torch.cat([known, outputs(function, x)])
            is_unknown = torch.arange(len(values)) >= len(known)
            auroc = float(metrics.ood_detection(values, is_unknown)["auroc"])
            yield {"network": name, "score": score, "unknown": unknown, "auroc": auroc}


def report(folder: Path) -> str:
    scores = [[r[k] for k in ("network", "method", "n", "nll", "acc", "ece")] for r in read_rows(folder / "scores.csv")]
    tables = [markdown(["network", "method", "test images", "NLL", "accuracy", "ECE"], scores, 3)]
    rows = read_rows(folder / "unknown.csv")
    for network in dict.fromkeys(row["network"] for row in rows):
        lines = []
        for score in dict.fromkeys(row["score"] for row in rows):
            auroc = {r["unknown"]: r["auroc"] for r in rows if (r["network"], r["score"]) == (network, score)}
            far = sum(auroc[name] for name in FAR) / len(FAR)
            lines.append([score, *(auroc[name] for name in (*FAR, *NEAR)), far, PAPER.get(score)])
        columns = [f"AUROC, {network}", *FAR, *NEAR, "mean of the far sets", "OpenOOD, ResNet-18, its far sets"]
        tables.append(markdown(columns, lines, 3))
    return "\n\n".join(tables)


def main() -> None:
    run: Run = start(__doc__, "papers/glm/pretrained", SCALES)
    for name in BLOCKS:  # report missing data before any work
        load(name, run.data)
    data = read(run.settings, run.data, run.seed)
    for name in BLOCKS:
        run.collect("unknown", name, separate, name, data, run.data)
    for name in BLOCKS:
        run.collect("scores", name, judge, name, data, run.settings, run.data)
    run.save_report(report(run.output))


if __name__ == "__main__":
    main()
