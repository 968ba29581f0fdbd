"""The error of predictions with 10, 30 and 100 samples relative to 1,000, with a thousand classes.

`python -m benchmarks.many_class_errors`, with MNIST in the folder that `LIGHTNING_BAYES_DATA` names. A class is three
digits side by side, at half their size. An MLP and a CNN are trained on 30,000 such images, with two seeds. The
Kronecker posterior is fitted to 8,192 of them with the Monte-Carlo Fisher; the evidence chooses its prior. Errors are
means over 256 test images and five seeds of the samples: total variation distance of the probabilities, error of the
likeliest class's probability, of the mean negative log-likelihood, and (median, relative) of the likeliest class's
variance.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes import GLM, LaplacePosterior, fit_laplace
from lightning_bayes.predictive import Prediction

EXAMPLES, FITTED, TESTED, EPOCHS, BATCH = 30_000, 8_192, 256, 4, 128
SAMPLES, REFERENCE, SEEDS = (10, 30, 100), 1_000, 5


def mlp() -> nn.Module:
    hidden = (nn.Linear(14 * 42, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 1000))


def cnn() -> nn.Module:
    convolutions = (nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*convolutions, nn.Linear(32 * 4 * 11, 128), nn.ReLU(), nn.Linear(128, 1000))


def main() -> None:
    x, y = triples("train", EXAMPLES, 0)
    x_test, y_test = triples("t10k", TESTED, 1)
    for name, make in {"MLP": mlp, "CNN": cnn}.items():
        for seed in (0, 1):
            network = trained(make, x, y, seed)
            loader = list(zip(x[:FITTED].split(256), y[:FITTED].split(256), strict=True))
            posterior = fit_laplace(network, loader, "classification", curvature="fisher_mc").tune_prior("marglik")
            report(f"{name}, seed {seed}", posterior, x_test, y_test)


def triples(part: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    folder = Path(os.environ["LIGHTNING_BAYES_DATA"]) / "MNIST" / "raw"
    digits, labels = (_read(folder / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    index = torch.randint(len(digits), (n, 3), generator=torch.Generator().manual_seed(seed))
    rows = digits[index].permute(0, 2, 1, 3).reshape(n, 1, 28, 84).float() / 255
    return F.avg_pool2d(rows, 2), (labels[index].long() * torch.tensor([100, 10, 1])).sum(1)


def _read(path: Path) -> Tensor:
    content = gzip.decompress(path.read_bytes())
    shape = struct.unpack(f">{content[3]}I", content[4 : 4 + 4 * content[3]])
    return torch.frombuffer(bytearray(content[4 + 4 * content[3] :]), dtype=torch.uint8).reshape(shape)


def trained(make: Callable[[], nn.Module], x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = make()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
    return network.eval()


def report(name: str, posterior: LaplacePosterior, x: Tensor, y: Tensor) -> None:
    plain = posterior.predict(x, "map", calibrated=False)
    true = posterior.predict(x, GLM(samples=REFERENCE), generator=torch.Generator().manual_seed(99))
    accuracy = (plain.label == y).float().mean()
    print(f"{name}: accuracy {accuracy:.3f}, NLL {_nll(plain, y):.3f}, of {REFERENCE:,} samples {_nll(true, y):.3f}")
    for samples in SAMPLES:
        errors = torch.stack([_errors(posterior, x, y, samples, seed, true) for seed in range(SEEDS)]).mean(0)
        print(f"| {samples} | " + " | ".join(f"{error:.3f}" for error in errors) + " |", flush=True)


def _errors(posterior: LaplacePosterior, x: Tensor, y: Tensor, samples: int, seed: int, true: Prediction) -> Tensor:
    drawn = posterior.predict(x, GLM(samples=samples), generator=torch.Generator().manual_seed(seed))
    assert drawn.probs is not None
    assert true.probs is not None
    top = true.probs.argmax(1, keepdim=True)
    variance = true.epistemic.gather(1, top)
    relative = (drawn.epistemic.gather(1, top) - variance).abs() / variance.clamp(min=1e-4)
    distance = 0.5 * (drawn.probs - true.probs).abs().sum(1).mean()
    confidence = (drawn.confidence - true.confidence).abs().mean()
    return torch.stack([distance, confidence, _nll(drawn, y) - _nll(true, y), relative.median()])


def _nll(prediction: Prediction, y: Tensor) -> Tensor:
    assert prediction.probs is not None
    return -prediction.probs.gather(1, y.unsqueeze(1)).log().mean()


if __name__ == "__main__":
    main()
