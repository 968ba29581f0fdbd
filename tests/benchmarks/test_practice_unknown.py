"""The study of unknown inputs: its scores are those of their definitions, and its tables follow from its rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.image_files import write_idx
from torch import Tensor

from benchmarks.practice import datasets, tasks, training, unknown
from benchmarks.practice.setups import PUBLIC, UNKNOWN, Training
from lightning_bayes import fit_laplace

SETUP = replace(UNKNOWN[0], training=Training("cnn-bn", steps=60))  # digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("practice")
    unknown.compare(SETUP, again=False, folder=folder)
    return folder


@pytest.fixture(scope="module")
def last(folder: Path) -> tuple[unknown.LastLayer, tasks.Task]:
    subject = training.trained(SETUP, folder)
    return unknown.LastLayer(subject.module.net, subject.task), subject.task


def test_posteriors_of_the_features_are_those_of_the_network(last: tuple[unknown.LastLayer, tasks.Task]) -> None:
    layer, task = last
    of_network = fit_laplace(layer.network, training.loader(task.train), subset="last_layer")
    x = task.unknown["held-out classes"][:20]
    torch.testing.assert_close(layer.scores(x)["novelty"], of_network.novelty(x), rtol=1e-3, atol=1e-5)


def test_neighbours_and_distances_are_those_of_each_input(last: tuple[unknown.LastLayer, tasks.Task]) -> None:
    layer, task = last
    a, seen = layer.features(task.test.x[:5]).double(), layer.seen.double()
    scores = layer.scores(task.test.x[:5])
    within = torch.cat([seen[task.train.y == c] - seen[task.train.y == c].mean(0) for c in range(8)])
    precision = torch.linalg.pinv(torch.cov(within.T), hermitian=True)
    for n, row in enumerate(a):
        cosines = torch.stack([row @ other / (row.norm() * other.norm()) for other in seen])
        assert float(scores["20th neighbour, cosine"][n]) == pytest.approx(-float(cosines.sort().values[-20]), rel=1e-5)
        distances = [(row - seen[task.train.y == c].mean(0)) for c in range(8)]
        nearest = min(float(d @ precision @ d) for d in distances)
        assert float(scores["Mahalanobis, nearest class"][n]) == pytest.approx(nearest, rel=1e-3)


def test_tables_follow_from_the_rows(folder: Path) -> None:
    rows = list(unknown.measure([SETUP], folder))
    assert {row["unknown"] for row in rows} == {"known", "held-out classes"}
    (novelty,) = [row for row in rows if row["score"] == "novelty"]
    cell = f"{novelty['auroc']:.3f}".lstrip("0")
    assert f"| **novelty** | {cell} |" in " ".join(unknown.page(rows).split())
    near, places = [row for row in rows if row["unknown"] != "known"], (*unknown.FAR, unknown.CHANGED)
    known = [row for row in rows if row["unknown"] == "known"]
    public = [*known, *({**row, "unknown": place} for place in places for row in near)]
    both = unknown.page([{**row, "network": name} for name in PUBLIC for row in public])
    assert f"{cell} / {cell}" in both
    assert [part in both for part in ("start:resnets", "start:alarms", "start:near")] == [True, True, False]


def test_held_out_classes_are_unknown_and_labels_count_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(datasets.VARIABLE, str(tmp_path))
    tasks._read_images.cache_clear()
    labels = (torch.arange(60) % 10).to(torch.uint8)
    pixels = labels.view(-1, 1, 1).expand(-1, 28, 28).contiguous()  # an image shows its class
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"FashionMNIST/raw/{part}-images-idx3-ubyte", pixels.numpy())
        write_idx(tmp_path / f"FashionMNIST/raw/{part}-labels-idx1-ubyte", labels.numpy())
    task = tasks.read(replace(SETUP, data="FashionMNIST", known=(1, 3, 4)))
    tasks._read_images.cache_clear()

    def shown(x: Tensor) -> Tensor:
        values = x[:, 0, 0, 0]
        low, high = task.train.x.min(), task.train.x.max()
        return (1 + 3 * (values - low) / (high - low)).round().long()

    for part in (task.train, task.test):
        assert torch.equal(shown(part.x), torch.tensor([1, 3, 4])[part.y])
    assert task.n_outputs == 3
    assert set(shown(task.unknown["held-out classes"]).tolist()) == {0, 2, 5, 6, 7, 8, 9}
