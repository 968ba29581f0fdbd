"""What a Laplace posterior costs on common networks: fit, tuning, `trainer.test`, predictions, memory and files.

A fit is measured in plain training epochs of the same images; tuning and predictions are measured in forward passes of
them, and `trainer.test` with the default callback in tests without it. Memory is what a fit and a prediction add to the
process. The networks are untrained, so with 1,000 classes a prediction draws functions; *sure* is a ResNet-18 whose
biases give ten classes almost all of the probability. The estimates of `jacobian.cost` are compared with measured fits,
tuning and predictions of six kinds of networks; 1 is a perfect estimate. Networks of torchvision, timm and transformers
are measured if these are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import networks
from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.report import number, table
from benchmarks.rows import OURS, Row

TITLE = "What it costs"
IMAGES, BATCH = 256, 64  # images in a fit, and in a prediction
STAGES = {"fit": "plain epochs", "tune": "forward passes", "predict": "forward passes", "bnn": "forward passes"}
MOST = {  # targets for a ResNet-18
    "10 classes/last_layer/fit": 5.0,
    "10 classes/all/tune": 80.0,
    "10 classes/all/predict": 40.0,
    "10 classes/all/bnn": 400.0,
    "1000 classes/all/predict": 400.0,
    "1000 classes, sure/all/predict": 100.0,
}


def resnet18(classes: int) -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=classes)


def timm_model(name: str, classes: int, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=classes, **options)


def bert(classes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return BertForSequenceClassification(BertConfig(vocab_size=2000, num_labels=classes, **sizes))


class Recurrent(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.embed, self.head = nn.Linear(48, 128), nn.Linear(128, classes)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


def mobile(classes: int) -> nn.Module:
    layers, width = [nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6()], 16
    for out, stride in ((24, 1), (32, 2), (48, 1), (64, 2)):
        wide = 4 * width
        layers += [nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


Make = Callable[[int], nn.Module]
NETWORKS: dict[str, tuple[str, Make, tuple[int, ...]]] = {  # the package it needs, and the shape of an input
    "ResNet-18": ("torchvision", resnet18, (3, 32, 32)),
    "ResNet-50": ("timm", partial(timm_model, "resnet50"), (3, 64, 64)),
    "ViT-Tiny": ("timm", partial(timm_model, "vit_tiny_patch16_224", img_size=64), (3, 64, 64)),
    "small BERT": ("transformers", bert, (32,)),
}
KINDS: dict[str, tuple[Make, tuple[int, ...]]] = {  # kinds of networks to estimate
    "MLP": (lambda _: networks.mlp(), (1, 28, 28)),
    "CNN": (lambda _: networks.cnn(), (1, 28, 28)),
    "ResNet-18": (lambda _: networks.resnet18(), (3, 32, 32)),
    "transformer": (Attention, (16, 48)),
    "LSTM": (Recurrent, (12, 16)),
    "MobileNet": (mobile, (3, 32, 32)),
}


LAST_LAYER = ("10 classes/last_layer", "1000 classes/last_layer")
CASES = {  # all weights of a ResNet-50 and a ViT-Tiny take minutes; those of the small BERT are its default
    "ResNet-18": (*LAST_LAYER, "10 classes/all", "1000 classes/all", "1000 classes, sure/all"),
    "ResNet-50": LAST_LAYER,
    "ViT-Tiny": LAST_LAYER,
    "small BERT": (*LAST_LAYER, "10 classes/all"),
}
DEFAULT = {"small BERT": "10 classes/all"}  # it has less than a million weights; elsewhere, the last layer
OF_CASE = {"1000 classes/all": ("fit", "predict"), "1000 classes, sure/all": ("predict",)}  # stages
SECONDS = 60.0  # the limit of each


def jobs(quick: bool) -> list[Job]:
    queue = []
    for network in (name for name, (package, _, _) in NETWORKS.items() if find_spec(package)):
        for case in CASES[network]:
            for stage, unit in STAGES.items():
                if stage in OF_CASE.get(case, STAGES):
                    arguments = {"network": network, "case": case, "stage": stage, "quick": quick}
                    most = MOST.get(f"{case}/{stage}") if network == "ResNet-18" else None
                    queue.append(Job(f"cost/{network}/{case}/{stage}/{OURS}", measure, arguments, unit=unit, most=most))
        arguments, unit = {"network": network, "quick": quick}, "tests without the callback"
        queue.append(
            Job(f"cost/{network}/10 classes/trainer.test/{OURS}", measure_test, arguments, unit=unit, most=5.0)
        )
    for network in KINDS:
        for stage in ("fit", "tune", "predict"):
            arguments = {"network": network, "stage": stage, "quick": quick}
            job = Job(f"cost/estimate/{network}/{stage}/{OURS}", measure_estimate, arguments, unit="of the measured")
            queue.append(replace(job, value="estimate", most=2, least=0.5))
    return [replace(job, seconds=SECONDS, default=False) for job in queue]


def table_of_networks(rows: Sequence[Row]) -> str:
    """One row for each network and case, one column for each stage."""
    by_name = {row.name.removesuffix(f"/{OURS}"): row for row in rows}
    lines = []
    for network, cases in CASES.items():
        default = DEFAULT.get(network, LAST_LAYER[0])
        for case in cases:
            found = {stage: by_name.get(f"cost/{network}/{case}/{stage}") for stage in STAGES}
            if case == default:
                found["test"] = by_name.get(f"cost/{network}/10 classes/trainer.test")
            if any(found.values()):
                classes, subset = case.split("/")
                weights = {"all": "all weights", "last_layer": "last layer"}[subset]
                label = f"{network}, {classes.replace('1000', '1,000')}, {weights}{' (default)' * (case == default)}"
                size = by_name.get(f"cost/{network}/{case}/fit/{OURS}/file")
                file = "" if size is None else f"{size.value / 1e6:,.3g} MB"
                stages = [_cell(found.get(stage)) for stage in ("fit", "tune", "test", "predict", "bnn")]
                memory = " / ".join(_added(found[stage]) for stage in ("fit", "predict"))
                lines.append([label, *stages, memory, file])
    headers = ("", "fit", "tune", "test", "predict", '"bnn"', "memory: fit / predict", "file")
    return table(headers, lines) if lines else ""


def _cell(row: Row | None) -> str:
    return "–" if row is None else row.failure or number(row.value)


def _added(row: Row | None) -> str:
    return "–" if row is None or not row.added >= 0 else f"{row.added / 1e6:,.0f} MB"


class Estimate(Result):
    """A measured stage, with the estimate relative to it."""

    @property
    def estimate(self) -> float:
        return self.extra["estimated"] / self.ratio


def measure(network: str, case: str, stage: str, quick: bool) -> Result:
    from lightning_bayes import BNN, GLM, fit_laplace

    _, make, shape = NETWORKS[network]
    named, subset = case.split("/")
    classes = int(named.split()[0])
    torch.manual_seed(0)
    net = make(classes).eval()
    if named.endswith("sure"):
        with torch.no_grad():
            net.fc.bias[:10] += 12
    size = 2 if quick else BATCH
    data = [_batch(shape, classes, size) for _ in range(1 if quick else IMAGES // size)]
    many = classes > 100 and subset == "all"  # an exact GGN would take a backward pass for each class
    options: dict[str, Any] = {"curvature": "fisher_mc" if many else "auto"}
    options["prior_precision"] = 1e4 if named.endswith("sure") else 10.0
    fit = partial(fit_laplace, net, data, subset=subset, **options)
    if stage == "fit":
        epoch = partial(_epoch, make(classes), data)
        result = side_by_side(lambda: lambda: fit().log_marginal_likelihood(), epoch, 1)
        return replace(result, extra={"file": _file_size(fit())})
    posterior, (x, _) = fit(), data[0]
    held_out = [_batch(shape, classes, size)]
    works: dict[str, Callable[[], Any]] = {
        "tune": lambda: posterior.tune_prior("auto", held_out),
        "predict": lambda: posterior.predict(x, GLM()),
        "bnn": lambda: posterior.predict(x, BNN(samples=2 if quick else 100)),
    }
    return side_by_side(lambda: works[stage], partial(_forward, net, x), 3 if stage == "predict" and not quick else 1)


def _file_size(posterior: Any) -> float:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.pt"
        posterior.save(path)
        return float(path.stat().st_size)


def measure_test(network: str, quick: bool) -> Result:
    import lightning.pytorch as pl

    from lightning_bayes import LaplaceCallback

    _, make, shape = NETWORKS[network]

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = make(10)

        def forward(self, x: Tensor) -> Tensor:
            f = self.network(x)
            return f if isinstance(f, Tensor) else f.logits

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            self.log("loss", self.training_step(batch, index))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    size, n = (4, 2) if quick else (BATCH, 8)
    train, test_data = (DataLoader(TensorDataset(*_batch(shape, 10, k * size)), size) for k in (n // 2, n))
    module, callback = Classifier(), LaplaceCallback("classification", progress=False)
    parts = ("logger", "progress_bar", "checkpointing", "model_summary")
    quiet: Any = {part if part == "logger" else f"enable_{part}": False for part in parts}
    ours = pl.Trainer(max_epochs=1, callbacks=[callback], accelerator="cpu", **quiet)
    ours.fit(module, train, train)
    plain = pl.Trainer(accelerator="cpu", **quiet)
    test = partial(ours.test, module, test_data, verbose=False)
    return side_by_side(lambda: test, partial(plain.test, module, test_data, verbose=False), 1 if quick else 5)


def measure_estimate(network: str, stage: str, quick: bool) -> Result:
    from lightning_bayes import fit_laplace
    from lightning_bayes.curvature import choose_subset
    from lightning_bayes.jacobian.cost import estimate_cost

    make, shape = KINDS[network]
    torch.manual_seed(0)
    net, size = make(10).eval(), 2 if quick else BATCH
    data = [_batch(shape, 10, size) for _ in range(1 if quick else IMAGES // size)]
    x = data[0][0]
    cost = estimate_cost(net, x, choose_subset(net, x, "all"))
    fit = partial(fit_laplace, net, data, prior_precision=10.0)
    if stage == "fit":
        estimated, epoch = cost.epochs(len(data) * size), partial(_epoch, make(10), data)
        result = side_by_side(lambda: lambda: fit().log_marginal_likelihood(), epoch, 2)
    else:
        estimated, posterior = getattr(cost, stage), fit()
        held_out = [_batch(shape, 10, size)]
        use = partial(posterior.predict, x) if stage == "predict" else partial(posterior.tune_prior, "auto", held_out)
        result = side_by_side(lambda: use, partial(_forward, net, x), 3)
    return Estimate(**{**vars(result), "extra": {"estimated": estimated}})


def _batch(shape: tuple[int, ...], classes: int, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, *shape) if len(shape) > 1 else torch.randint(2000, (size, *shape))
    return x, torch.arange(size) % classes


def _forward(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def _epoch(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for x, y in data:
        f = net(x)
        loss = nn.functional.cross_entropy(f if isinstance(f, Tensor) else f.logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
