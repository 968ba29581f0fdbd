"""What a Laplace posterior costs on common networks: fit, tuning, prediction, and prediction with weight samples.

A fit is measured in plain training epochs of the same images; tuning and prediction are measured in forward passes of
them, and `trainer.test` with the default callback in tests without it. The estimate of `subset="auto"` is compared with
measured predictions of six kinds of networks; 1 is a perfect estimate. Networks of torchvision, timm and transformers
are measured if these are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import networks
from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side
from benchmarks.rows import OURS

TITLE = "What it costs"
IMAGES, BATCH = 256, 64  # images in a fit, and in a prediction
CASES = ("10 classes/last_layer", "1000 classes/last_layer", "10 classes/all")
STAGES = {"fit": "plain epochs", "tune": "forward passes", "predict": "forward passes", "bnn": "forward passes"}
MOST = {  # targets for a ResNet-18
    "10 classes/last_layer/fit": 5.0,
    "10 classes/all/tune": 80.0,
    "10 classes/all/predict": 40.0,
    "10 classes/all/bnn": 400.0,
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


def jobs(quick: bool) -> list[Job]:
    queue = []
    for name, (package, _, _) in NETWORKS.items():
        is_shown = name == "ResNet-18"  # in the documentation
        for case in CASES if find_spec(package) else ():
            classes, subset = case.split(" classes/")
            seconds = (60 if subset == "all" else 30) if is_shown else 300
            for stage, unit in STAGES.items():
                arguments = {"network": name, "classes": int(classes), "subset": subset, "stage": stage, "quick": quick}
                job = Job(f"cost/{name}/{case}/{stage}/{OURS}", measure, arguments, unit=unit, seconds=seconds)
                queue.append(replace(job, most=MOST.get(f"{case}/{stage}") if is_shown else None, default=False))
    if find_spec("torchvision"):
        name, unit = f"cost/ResNet-18/10 classes/trainer.test/{OURS}", "tests without the callback"
        queue.append(Job(name, measure_test, {"quick": quick}, unit=unit, most=5.0, seconds=40, default=False))
    for name in KINDS:
        arguments = {"network": name, "quick": quick}
        job = Job(f"cost/estimate/{name}/{OURS}", measure_estimate, arguments, unit="of the measured", value="estimate")
        queue.append(replace(job, most=2, least=0.5, seconds=120, default=False))
    return queue


class Estimate(Result):
    """A measured prediction, with the estimate relative to it."""

    @property
    def estimate(self) -> float:
        return self.extra["estimated forward passes"] / self.ratio


def measure(network: str, classes: int, subset: str, stage: str, quick: bool) -> Result:
    from lightning_bayes import BNN, GLM, fit_laplace

    _, make, shape = NETWORKS[network]
    torch.manual_seed(0)
    net = make(classes).eval()
    size = 2 if quick else BATCH
    data = [_batch(shape, classes, size) for _ in range(1 if quick else IMAGES // size)]
    fit = partial(fit_laplace, net, data, subset=subset, prior_precision=10.0)
    if stage == "fit":
        epoch = partial(_epoch, make(classes), data)
        return side_by_side(lambda: lambda: fit().log_marginal_likelihood(), epoch, 1)
    posterior, (x, _) = fit(), data[0]
    held_out = [_batch(shape, classes, size)]
    works: dict[str, Callable[[], Any]] = {
        "tune": lambda: posterior.tune_prior("auto", held_out),
        "predict": lambda: posterior.predict(x, GLM()),
        "bnn": lambda: posterior.predict(x, BNN(samples=2 if quick else 100)),
    }
    return side_by_side(lambda: works[stage], partial(_forward, net, x), 1 if quick else 3)


def measure_test(quick: bool) -> Result:
    import lightning.pytorch as pl

    from lightning_bayes import LaplaceCallback

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = resnet18(10)

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            self.log("loss", self.training_step(batch, index))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    size, n = (4, 2) if quick else (BATCH, 8)
    train, test_data = (DataLoader(TensorDataset(*_batch((3, 32, 32), 10, k * size)), size) for k in (n // 2, n))
    module, callback = Classifier(), LaplaceCallback("classification", progress=False)
    parts = ("logger", "progress_bar", "checkpointing", "model_summary")
    quiet: Any = {part if part == "logger" else f"enable_{part}": False for part in parts}
    ours = pl.Trainer(max_epochs=1, callbacks=[callback], accelerator="cpu", **quiet)
    ours.fit(module, train, train)
    plain = pl.Trainer(accelerator="cpu", **quiet)
    test = partial(ours.test, module, test_data, verbose=False)
    return side_by_side(lambda: test, partial(plain.test, module, test_data, verbose=False), 1 if quick else 5)


def measure_estimate(network: str, quick: bool) -> Result:
    from lightning_bayes import fit_laplace
    from lightning_bayes.curvature import choose_subset
    from lightning_bayes.jacobian.cost import estimate_cost

    make, shape = KINDS[network]
    torch.manual_seed(0)
    net, size = make(10).eval(), 2 if quick else BATCH
    data = [_batch(shape, 10, size) for _ in range(1 if quick else 4)]
    x = data[0][0]
    estimate = estimate_cost(net, x, choose_subset(net, x, "all")).predict
    posterior = fit_laplace(net, data, prior_precision=10.0)
    result = side_by_side(lambda: partial(posterior.predict, x), partial(_forward, net, x), 3)
    return Estimate(**{**vars(result), "extra": {"estimated forward passes": estimate}})


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
