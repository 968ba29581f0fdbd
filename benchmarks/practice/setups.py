"""The networks of the study and their training data.

A training is a network, an optimizer and a stopping rule, as people choose them; a setup is a training on one split of
one dataset with one seed. CHOOSE is for choosing rules and REPORT for judging them: no rule may be chosen by looking at
REPORT. On the same data, the two share neither a split nor a network with the same optimizer. CONFIRM has REPORT's
networks on new splits and with new seeds, for a rule that was nevertheless changed after looking at REPORT.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

IMAGES = ("MNIST", "FashionMNIST", "CIFAR10")
UCI_CLASSES = ("australian", "cancer", "ionosphere", "glass", "vehicle", "waveform", "satellite", "banana")
UCI_REGRESSION = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
BUNDLED_CLASSES = {"digits": "digits", "sklearn_wine": "wine", "breast_cancer": "breast_cancer"}  # scikit-learn's names
BUNDLED_REGRESSION = ("diabetes", "friedman")


@dataclass(frozen=True)
class Training:
    network: str  # a key of `networks.NETWORKS`
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    steps: int = 2000
    batch_size: int = 64
    early_stopping: bool = False  # stop by the validation loss, and restore the best epoch


@dataclass(frozen=True)
class SetUp:
    group: str  # "choose", "report", "confirm" or "unknown"
    data: str
    training: Training
    seed: int  # seed of the split and the training; for UCI regression, the number of the split
    gap: bool = False
    quick: bool = False  # whether it also runs without FULL
    members: int = 1  # if more than one, an ensemble of these is trained, too
    known: tuple[int, ...] = ()  # classes used in training, if not all

    @property
    def name(self) -> str:
        t = self.training
        words = [self.data + ("-gap" if self.gap else ""), t.network, t.optimizer]
        words += ["wd"] if t.weight_decay else []
        words += ["es"] if t.early_stopping else []
        return f"{self.group}-{'-'.join(words)}-{self.seed}"

    @property
    def key(self) -> str:
        """A key that changes with anything that the trained network depends on."""
        parts = (self.data, self.training, self.seed, self.gap, self.members, *self.known)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]

    @property
    def kind(self) -> str:
        return "regression" if self.data in UCI_REGRESSION + BUNDLED_REGRESSION else "classification"

    @property
    def family(self) -> str:
        """The setup's column in the table."""
        if self.kind == "regression":
            return "gap splits" if self.gap else "standard splits"
        if self.data == "digits" or self.data in IMAGES:
            return self.data
        return "UCI"  # scikit-learn's wine and breast cancer are UCI's


def _several(
    group: str, data: str, training: Training, seeds: range, quick: int = 0, ensembles: int = 0
) -> list[SetUp]:
    """One setup for each seed; the first few run without FULL, and the first few also as an ensemble of 5."""
    return [
        SetUp(group, data, training, seed, quick=n < quick, members=5 if n < ensembles else 1)
        for n, seed in enumerate(seeds)
    ]


def _choose() -> list[SetUp]:
    tables = {
        "australian": Training("mlp50-tanh", "adam", 1e-2, steps=1500),
        "ionosphere": Training("mlp2x50", "adam", 1e-3, steps=1500),
        "vehicle": Training("mlp50-tanh", "sgd", 5e-2, 1e-4, steps=2000),
        "waveform": Training("mlp2x50", "adamw", 1e-3, 1e-2, steps=1500),
        "satellite": Training("mlp2x50-tanh", "adam", 1e-3, steps=3000),
        "banana": Training("mlp2x50", "adam", 1e-2, early_stopping=True),
        "glass": Training("mlp50-tanh", "adam", 1e-2, 1e-3, steps=1500),
        "cancer": Training("mlp2x50", "sgd", 5e-2, steps=1000),
    }
    chosen = [s for data, training in tables.items() for s in _several("choose", data, training, range(100, 102))]
    for training in (
        Training("mlp50-tanh", "adam", 1e-2, steps=1000),
        Training("mlp2x200", "adam", 1e-3, steps=1500, early_stopping=True),
        Training("cnn-tanh", "sgd", 5e-2, 1e-4, steps=1000),
    ):
        chosen += _several("choose", "digits", training, range(100, 102))
    pictures = [
        ("FashionMNIST", Training("cnn", "adam", 1e-3, steps=1400)),
        ("FashionMNIST", Training("mlp2x200", "adam", 1e-3, 1e-4, steps=2000)),
        ("FashionMNIST", Training("cnn-bn", "sgd", 5e-2, 5e-4, steps=1000)),
        ("MNIST", Training("cnn-tanh", "adam", 1e-3, steps=1400)),
        ("MNIST", Training("mlp2x200", "adam", 1e-3, steps=1500, early_stopping=True)),
        ("CIFAR10", Training("cnn3", "adam", 1e-3, steps=1000)),
        ("CIFAR10", Training("resnet-narrow", "sgd", 5e-2, 5e-4, steps=800)),
    ]
    for data, training in pictures:
        chosen += _several("choose", data, training, range(100, 102 if data == "FashionMNIST" else 101))
    even, odd = Training("mlp2x50", "adam", 3e-3, 1e-5, steps=2500), Training("mlp50-tanh", "adam", 1e-2, steps=2500)
    for n, data in enumerate(UCI_REGRESSION):
        training = odd if n % 2 else even
        splits = range(3, 5) if data == "protein" else range(10, 12)
        chosen += _several("choose", data, training, splits)
        chosen += [SetUp("choose", data, training, seed=1, gap=True)]
        stopped = Training("mlp2x50", "adam", 3e-3, steps=2500, early_stopping=True)
        chosen += _several("choose", data, stopped, splits)
        chosen += [SetUp("choose", data, stopped, seed=1, gap=True)]
    return chosen


def _report() -> list[SetUp]:
    chosen = []
    for training, quick in (
        (Training("mlp100-gelu", "adamw", 3e-3, 1e-2, steps=1500), 2),
        (Training("cnn", "adam", 1e-3, steps=1000), 2),
        (Training("mlp2x100-dropout", "adam", 1e-3, steps=1500, early_stopping=True), 1),
        (Training("mlp2x50-bn", "sgd", 5e-2, 5e-4, steps=1000), 1),
    ):
        chosen += _several("report", "digits", training, range(2), quick, ensembles=1)
    tables = {
        "sklearn_wine": Training("mlp50", "adam", 1e-2, steps=500),
        "breast_cancer": Training("mlp2x50-tanh", "adamw", 1e-3, 1e-2, steps=1000),
        "australian": Training("mlp2x100-dropout", "adam", 1e-3, steps=1500),
        "cancer": Training("mlp100-gelu", "adam", 1e-3, 1e-4, steps=1000),
        "ionosphere": Training("mlp50", "sgd", 5e-2, 1e-3, steps=1500),
        "glass": Training("mlp2x50-bn", "adam", 3e-3, steps=1500),
        "vehicle": Training("mlp2x50", "adam", 3e-3, steps=2000, early_stopping=True),
        "waveform": Training("mlp100-gelu", "adam", 3e-3, steps=1500),
        "satellite": Training("mlp2x100-dropout", "adamw", 1e-3, 1e-2, steps=3000, early_stopping=True),
        "banana": Training("mlp50", "adam", 1e-2, 1e-4, steps=2000),
    }
    for data, training in tables.items():
        chosen += _several("report", data, training, range(3 if data == "waveform" else 2), quick=2, ensembles=1)
    pictures = [
        ("FashionMNIST", Training("cnn-dropout", "adamw", 1e-3, 1e-2, steps=1400), 2, 1),
        ("FashionMNIST", Training("mlp3x100", "adam", 1e-3, steps=2000), 0, 0),
        ("FashionMNIST", Training("cnn-bn", "adam", 1e-3, steps=1000, early_stopping=True), 0, 0),
        ("MNIST", Training("cnn", "sgd", 2e-2, 5e-4, steps=1000), 1, 0),
        ("MNIST", Training("mlp3x100", "adamw", 1e-3, 1e-2, steps=2000), 1, 0),
        ("CIFAR10", Training("cnn3-bn", "adamw", 1e-3, 1e-2, steps=800), 0, 0),
        ("CIFAR10", Training("resnet", "adam", 1e-3, 1e-4, steps=700, early_stopping=True), 1, 0),
    ]
    for data, training, quick, ensembles in pictures:
        chosen += _several("report", data, training, range(2), quick, ensembles)
    chosen += _several("report", "diabetes", Training("mlp50", "adam", 1e-3, early_stopping=True), range(3), 3, 1)
    chosen += _several("report", "friedman", Training("mlp50", "adam", 1e-2, steps=1500), range(3), 3, 1)
    trainings = (
        Training("mlp50", "adam", 1e-2, steps=2500),
        Training("mlp2x50-tanh", "adamw", 3e-3, 1e-2, steps=2500),
        Training("mlp100-gelu", "adam", 3e-3, steps=2500, early_stopping=True),
    )
    for n, data in enumerate(UCI_REGRESSION):
        training = trainings[n % 3]
        chosen += _several(
            "report", data, training, range(3), quick=1 if n % 2 else 0, ensembles=1 if n % 3 == 0 else 0
        )
        chosen += [SetUp("report", data, training, split, gap=True, quick=n % 3 == split) for split in (0, 2)]
    return chosen


def _confirm() -> list[SetUp]:
    """REPORT's networks, each trained again on a split and with a seed that no other setup uses."""
    chosen = [replace(setup, group="confirm", members=1, quick=False) for setup in _report() if setup.seed == 0]
    seeds = {True: 3, False: 15}  # split numbers for UCI regressions; protein has no more
    return [
        replace(setup, seed=seeds[setup.gap] if setup.data in UCI_REGRESSION else 50)
        for setup in chosen
        if setup.gap or setup.data != "protein"
    ]


SETUPS = (*_choose(), *_report(), *_confirm())
UNKNOWN = tuple(  # classes held out of training are unknown; digits and docstrings have no others
    SetUp("unknown", data, training, seed, known=known)
    for data, training, known in (
        ("digits", Training("cnn", "adam", 1e-3, steps=1000), ()),
        ("MNIST", Training("cnn", "adam", 1e-3, steps=1400), tuple(range(8))),
        ("FashionMNIST", Training("cnn-bn", "adam", 1e-3, steps=1400), tuple(range(8))),
        ("CIFAR10", Training("resnet", "adamw", 1e-3, 1e-2, steps=1400), (0, 1, 8, 9)),  # vehicles
        ("docstrings", Training("words", "adam", 3e-3, steps=1000, early_stopping=True), ()),
    )
    for seed in range(200, 202)
)
PUBLIC = ("ResNet-20", "ResNet-56")  # public networks, trained on all of CIFAR-10
FAST = SetUp("report", "sklearn_wine", Training("mlp50", "adam", 1e-2, steps=60), seed=0, quick=True, members=2)


def select(group: str = "report", full: bool = False, only: str = "") -> list[SetUp]:
    """The setups of "choose", "report", "confirm" or "all"; `only` is a part of their names."""
    groups = ("choose", "report", "confirm") if group == "all" else (group,)
    return [s for s in SETUPS if s.group in groups and (full or s.quick) and only in s.name]
