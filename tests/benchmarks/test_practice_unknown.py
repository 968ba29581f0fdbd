"""The study of unknown inputs: its scores are those of their definitions, and its tables follow from its rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.image_files import write_idx
from torch import Tensor

from benchmarks.practice import datasets, tasks, training, unknown
from benchmarks.practice.setups import PUBLIC, UNKNOWN, Training
from lightning_bayes import fit_laplace
from lightning_bayes.metrics.functional import ood_detection

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
        assert float(scores[unknown.KNN][n]) == pytest.approx(-float(cosines.sort().values[-20]), rel=1e-5)
        distances = [(row - seen[task.train.y == c].mean(0)) for c in range(8)]
        nearest = min(float(d @ precision @ d) for d in distances)
        assert float(scores[unknown.MAHALANOBIS][n]) == pytest.approx(nearest, rel=1e-3)


@pytest.mark.slow
def test_scores_are_those_of_pytorch_ood(last: tuple[unknown.LastLayer, tasks.Task]) -> None:
    detectors = pytest.importorskip("pytorch_ood.detector", reason="pytorch-ood is not installed: pip install it")
    (layer, task), head = last, last[0].head
    x = torch.cat([task.test.x, task.unknown["held-out classes"]])
    a, scores = layer.features(x), layer.scores(x)
    f, weight, bias = (t.detach() for t in (head(a), head.weight, head.bias))
    by_logits = {
        "entropy": detectors.Entropy,
        "maximum probability": detectors.MaxSoftmax,
        "maximum logit": detectors.MaxLogit,
        "energy": detectors.EnergyBased,
    }
    for name, detector in by_logits.items():
        torch.testing.assert_close(scores[name], detector.score(f), msg=lambda m, name=name: f"{name}: {m}")

    def of(detector: Any) -> Tensor:
        return detector.fit_features(layer.seen, task.train.y).predict_features(a).double()

    distances = of(detectors.KNN(None, k=20, normalize=True))
    torch.testing.assert_close(2 + 2 * scores[unknown.KNN].double(), distances.square(), rtol=1e-4, atol=1e-5)
    virtual = of(detectors.ViM(None, layer.seen.shape[1] // 2, weight, bias))
    torch.testing.assert_close(scores[unknown.VIM].double(), virtual, rtol=1e-3, atol=1e-3)
    is_ood = torch.arange(len(x)) >= len(task.test)  # its covariance is regularised
    ours, theirs = (
        float(ood_detection(s, is_ood)["auroc"]) for s in (scores[unknown.MAHALANOBIS], of(detectors.Mahalanobis(None)))
    )
    assert ours == pytest.approx(theirs, abs=0.02)


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
