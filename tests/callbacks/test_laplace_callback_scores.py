"""`trainer.validate` and `trainer.test`: MAP and posterior side by side, equal to numbers computed by hand."""

import math
import re
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from callback_cases import (
    CLASSES,
    FEATURES,
    Classifier,
    Regressor,
    draw,
    fitted,
    held_out,
    labelled,
    laplace,
    measured,
    same_numbers,
    train_loader,
    trainer,
)
from helpers.untouched import refused
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bayes import BNN, GLM, Categorical, fit_laplace
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.predictive.evaluate import evaluate
from lightning_bayes.trainer.module import ModuleError


def classification_scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """NLL, accuracy, 15-bin ECE and Brier score, example by example."""
    n = len(y)
    p = [[float(v) for v in row] for row in probs.detach().double()]
    y = y.tolist()
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(p, y, strict=True):
        top = max(row)
        bins.setdefault(min(math.ceil(top * 15) - 1, 14), []).append((top, row.index(top) == label))
    ece = sum(abs(sum(c for c, _ in b) - sum(r for _, r in b)) for b in bins.values()) / n
    return {
        "nll": -sum(math.log(row[label]) for row, label in zip(p, y, strict=True)) / n,
        "acc": sum(row.index(max(row)) == label for row, label in zip(p, y, strict=True)) / n,
        "ece": ece,
        "brier": sum(sum((v - (c == label)) ** 2 for c, v in enumerate(row)) for row, label in zip(p, y, strict=True))
        / n,
    }


def regression_scores(mean: Tensor, variance: Tensor, y: Tensor) -> dict[str, float]:
    mean, variance, y = (t.detach().double().flatten() for t in (mean, variance, y))
    normal = torch.distributions.Normal(mean, variance.sqrt())
    return {
        "nll": -float(normal.log_prob(y).mean()),
        "rmse": float((mean - y).square().mean().sqrt()),
        "coverage": float(((mean - y).abs() <= 1.959963984540054 * variance.sqrt()).double().mean()),
    }


def named(stage: str, who: str, scores: dict[str, float]) -> dict[str, float]:
    return {f"{stage}_{metric}_{who}": value for metric, value in scores.items()}


@pytest.mark.parametrize("stage", ["val", "test"])
def test_classification_scores_equal_those_by_hand(tmp_path: Path, stage: str) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    (logged,) = (fit.validate if stage == "val" else fit.test)(model, held_out(), verbose=False)
    x, y = labelled(11, 5).tensors
    expected = named(stage, "map", classification_scores(model.eval()(x).softmax(1), y))
    # One call per batch: the decomposition draws, but the probit's probabilities do not.
    expected |= named(stage, "laplace", classification_scores(callback.posterior.predict(x).probs, y))
    del logged[f"{stage}_loss"]
    same_numbers(logged, expected)


def test_regression_scores_equal_those_by_hand(tmp_path: Path) -> None:
    callback = laplace(likelihood="regression", name="mine")
    model, fit = fitted(tmp_path, callback, Regressor())
    (logged,) = fit.test(model, DataLoader(measured(11, 5), batch_size=4), verbose=False)
    x, y = measured(11, 5).tensors
    at = callback.posterior.predict(x)
    noise = torch.full_like(at.mean, float(callback.posterior.likelihood.noise_std) ** 2)
    expected = named("test", "map", regression_scores(model(x), noise, y))
    expected |= named("test", "mine", regression_scores(at.mean, at.variance, y))
    same_numbers(logged, expected)


def test_a_single_logit_is_scored_as_two_classes(tmp_path: Path) -> None:
    class Binary(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float())

        test_step = validation_step = training_step

    x, y = labelled(23).tensors
    data = DataLoader(TensorDataset(x, (y > 0).float()), batch_size=4)
    model, callback = Binary(), laplace(likelihood="binary")
    fit = trainer(tmp_path, callback)
    fit.fit(model, data)
    (logged,) = fit.test(model, data, verbose=False)
    p = callback.posterior.predict(x).probs
    pair = torch.stack((1 - p, p), 1)
    same_numbers(
        {k: v for k, v in logged.items() if k.endswith("laplace")},
        named("test", "laplace", classification_scores(pair, (y > 0).long())),
    )


def test_pixels_with_the_ignored_label_do_not_count(tmp_path: Path) -> None:
    class Segmenter(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Conv2d(2, 3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1], ignore_index=255)

        test_step = training_step

    x = draw(5, 2, 3, 3, seed=0)
    y = draw(5, 3, 3, 3, seed=1).argmax(1)
    y[:, 0] = 255
    data = DataLoader(TensorDataset(x, y), batch_size=2)
    model, callback = Segmenter(), laplace(likelihood=Categorical(ignore_index=255))
    fit = trainer(tmp_path, callback)
    fit.fit(model, data)
    (logged,) = fit.test(model, data, verbose=False)
    p = callback.posterior.predict(x).probs[:, :, 1:].movedim(1, -1).reshape(-1, 3)
    same_numbers(
        {k: v for k, v in logged.items() if k.endswith("laplace")},
        named("test", "laplace", classification_scores(p, y[:, 1:].flatten())),
    )


@pytest.mark.parametrize("stage", ["val", "test"])
def test_the_result_of_each_loader_holds_its_own_scores_under_its_number(tmp_path: Path, stage: str) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    loaders = [held_out(), held_out(7, seed=6), iter_of(9, seed=7)]
    results = (fit.validate if stage == "val" else fit.test)(model, loaders, verbose=False)
    assert len(results) == 3
    for number, (logged, loader) in enumerate(zip(results, loaders, strict=True)):
        del logged[f"{stage}_loss/dataloader_idx_{number}"]
        alone = callback.evaluate(model, loader)
        same_numbers(logged, {f"{stage}_{key}/dataloader_idx_{number}": value for key, value in alone.items()})


def test_the_printed_table_has_the_scores_of_each_loader_in_its_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    capsys.readouterr()
    fit.test(model, [held_out(), held_out(7, seed=6)])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "test_nll_laplace" in line]
    printed = [float(number) for number in re.findall(r"\d\.\d+", row)]
    alone = [callback.evaluate(model, loader)["nll_laplace"] for loader in (held_out(), held_out(7, seed=6))]
    assert printed == pytest.approx(alone, rel=1e-5)


def iter_of(n: int, seed: int) -> DataLoader[Any]:
    """A loader without a length."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(labelled(n, seed))

    return DataLoader(Stream(), batch_size=4)


def test_a_module_without_test_step_is_refused_by_lightning_and_evaluated_here(tmp_path: Path) -> None:
    class NoTest(Classifier):
        test_step = L.LightningModule.test_step

    callback = laplace()
    model, fit = fitted(tmp_path, callback, NoTest())
    with pytest.raises(MisconfigurationException, match="test_step"):
        fit.test(model, held_out(), verbose=False)
    found = callback.evaluate(model, held_out())
    x, y = labelled(11, 5).tensors
    expected = {f"{k}_map": v for k, v in classification_scores(model.eval()(x).softmax(1), y).items()}
    expected |= {f"{k}_laplace": v for k, v in classification_scores(callback.posterior.predict(x).probs, y).items()}
    same_numbers(found, expected)


def test_evaluate_leaves_the_random_state_and_the_mode_alone(tmp_path: Path) -> None:
    callback = laplace(predictive="bnn")
    model, _ = fitted(tmp_path, callback)
    model.train()
    before = torch.get_rng_state()
    callback.evaluate(model, DataLoader(labelled(11, 5), batch_size=4, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())
    assert model.net.training


def test_scores_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    callback = laplace(predictive=BNN(samples=7))
    model, _ = fitted(tmp_path, callback)
    same_numbers(callback.evaluate(model, held_out(batch_size=1)), callback.evaluate(model, held_out(batch_size=11)))


# -- out-of-distribution data ------------------------------------------------------------------------------------------


def far(n: int = 9) -> DataLoader[Any]:
    return DataLoader(4 * draw(n, FEATURES, seed=8), batch_size=4)


def ood_scores(callback: Any, far_x: Tensor) -> dict[str, float]:
    near_x = labelled(11, 5).tensors[0]
    parts = {
        who: [callback.posterior.predict(x, word, calibrated=who != "map") for x in (near_x, far_x)]
        for who, word in (("laplace", GLM(link="bridge")), ("map", "map"))
    }
    kinds = {
        "entropy": lambda p: p.entropy,
        "confidence": lambda p: -p.probs.amax(1),
        "epistemic": lambda p: p.epistemic.sum(1),
        "mutual_information": lambda p: p.mutual_information,
        "novelty": lambda p: p.novelty,
    }
    scores = {
        f"{kind}_{who}": [score(p) for p in of_sets]
        for who, of_sets in parts.items()
        for kind, score in kinds.items()
        if who == "laplace" or kind in ("entropy", "confidence")
    }
    energies = [-callback.posterior.network.eval()(x).detach().exp().sum(1).log() for x in (near_x, far_x)]
    scores |= dict.fromkeys(("energy_laplace", "energy_map"), energies)
    is_ood = np.repeat([0, 1], [11, len(far_x)])
    expected = {}
    for name, (near, out) in scores.items():
        both = torch.cat([near, out]).numpy()
        accepted = np.sort(near.numpy())[10]  # all 11: ten of them are less than 95 %
        expected[f"ood_auroc_{name}"] = roc_auc_score(is_ood, both)
        expected[f"ood_aupr_out_{name}"] = average_precision_score(is_ood, both)
        expected[f"ood_fpr95_{name}"] = float((out.numpy() <= accepted).mean())
    return expected


class Tolerant(Classifier):
    """The out-of-distribution loader has no labels."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


def test_the_loaders_after_the_first_are_told_apart_by_every_score(tmp_path: Path) -> None:
    # The bridge's epistemic variance is in closed form, so that batches cannot change it.
    callback = laplace(ood=True, predictive=GLM(link="bridge"))
    model, fit = fitted(tmp_path, callback, Tolerant())
    (near, out) = fit.test(model, [held_out(), far()], verbose=False)
    expected = ood_scores(callback, 4 * draw(9, FEATURES, seed=8))
    assert expected["ood_auroc_entropy_laplace"] not in (0.0, 1.0)  # else any order would do
    same_numbers(out, {f"test_{k}/dataloader_idx_1": v for k, v in expected.items()})
    alone = callback.evaluate(model, held_out())
    same_numbers(near, {f"test_{k}/dataloader_idx_0": v for k, v in alone.items()})


def test_several_out_of_distribution_loaders_are_scored_each_for_itself(tmp_path: Path) -> None:
    callback = laplace(ood=True, predictive=GLM(link="bridge"))
    model, fit = fitted(tmp_path, callback, Tolerant())
    found = callback.evaluate(model, held_out(), ood_dataloaders=[far(9), far(5)])
    results = fit.test(model, [held_out(), far(9), far(5)], verbose=False)
    for index, n in ((1, 9), (2, 5)):
        scores = ood_scores(callback, (4 * draw(n, FEATURES, seed=8)))
        same_numbers(results[index], {f"test_{key}/dataloader_idx_{index}": value for key, value in scores.items()})
        for key, value in scores.items():
            assert found[f"{key}/dataloader_idx_{index}"] == pytest.approx(value, rel=1e-6)


def test_evaluate_takes_one_out_of_distribution_loader_as_it_is(tmp_path: Path) -> None:
    callback = laplace(predictive=GLM(link="bridge"))
    model, _ = fitted(tmp_path, callback)
    found = callback.evaluate(model, held_out(), ood_dataloaders=far())
    expected = ood_scores(callback, 4 * draw(9, FEATURES, seed=8))
    same_numbers({k: found[k] for k in expected}, expected)


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_reliability_diagrams_are_written_as_png_without_a_logger(tmp_path: Path) -> None:
    model, fit = fitted(tmp_path, laplace(plots=True))
    fit.test(model, held_out(), verbose=False)
    files = {path.name: path.read_bytes()[:8] for path in (tmp_path / "figures").iterdir()}
    step = f"{fit.global_step:06d}"
    assert files == dict.fromkeys(
        (f"test_reliability_map_{step}.png", f"test_reliability_laplace_{step}.png"), b"\x89PNG\r\n\x1a\n"
    )


def test_a_regression_draws_its_calibration_curve(tmp_path: Path) -> None:
    model, fit = fitted(tmp_path, laplace(likelihood="regression", plots=True), Regressor())
    (logged,) = fit.test(model, DataLoader(measured(11, 5), 4), verbose=False)
    step = f"{fit.global_step:06d}"
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"test_calibration_map_{step}.png", f"test_calibration_laplace_{step}.png"}
    assert {key.split("_")[1] for key in logged} == {"nll", "rmse", "coverage"}  # a picture, not one more number


@pytest.mark.parametrize("one_hot", [lambda y: F.one_hot(y, CLASSES), lambda y: F.one_hot(y, CLASSES).float()])
def test_one_hot_targets_are_refused_and_not_scored_as_labels(tmp_path: Path, one_hot: Any) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    x, y = labelled(11, 5).tensors
    data = DataLoader(TensorDataset(x, one_hot(y)), 4)
    model.test_step = lambda batch, batch_idx: None
    ways = (
        lambda: fit.test(model, data),
        lambda: callback.evaluate(model, data),
        lambda: evaluate(callback.posterior, data),
    )
    for score in ways:
        with pytest.raises(LikelihoodError, match=r"Categorical needs (integer class indices|targets of shape)"):
            score()


class FigureLogger(Logger):
    """Like TensorBoard's, as far as it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[tuple[str, str, int]] = []

    name = version = "figures"
    save_dir = None

    @property
    def experiment(self) -> Any:
        return self

    def add_figure(self, tag: str, figure: Any, global_step: int, close: bool) -> None:
        self.figures.append((tag, type(figure).__name__, global_step))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_reliability_diagrams_go_to_a_logger_that_takes_figures(tmp_path: Path) -> None:
    logger = FigureLogger()
    model, fit = fitted(tmp_path, laplace(plots=True), logger=logger, log_every_n_steps=1)
    fit.validate(model, held_out(), verbose=False)
    step = fit.global_step
    assert sorted(logger.figures) == [
        ("val_reliability_laplace", "Figure", step),
        ("val_reliability_map", "Figure", step),
    ]
    assert not list(tmp_path.rglob("*.png"))


def test_tensorboard_holds_the_reliability_diagrams(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    model, fit = fitted(tmp_path, laplace(plots=True), logger=logger, log_every_n_steps=1)
    fit.test(model, held_out(), verbose=False)
    logger.finalize("success")
    tags = EventAccumulator(logger.log_dir).Reload().Tags()["images"]
    assert sorted(tags) == ["test_reliability_laplace", "test_reliability_map"]


# -- precision and inference mode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_test_equals_evaluate_in_any_precision(tmp_path: Path, precision: str, inference_mode: bool) -> None:
    callback = laplace(predictive=GLM(link="mc", samples=9))
    model, fit = fitted(tmp_path, callback, precision=precision, inference_mode=inference_mode)
    (logged,) = fit.test(model, held_out(), verbose=False)
    del logged["test_loss"]
    dtype = torch.float64 if precision == "64-true" else torch.float32
    assert callback.posterior.mean.dtype == dtype
    data = [(x.to(dtype), y) for x, y in held_out()]
    same_numbers({k[5:]: v for k, v in logged.items()}, callback.evaluate(model, data), rtol=1e-6)


def test_a_network_in_half_precision_has_a_posterior_in_single(tmp_path: Path) -> None:
    callback = laplace(likelihood="regression", tune="mackay")
    model, fit = fitted(tmp_path, callback, Regressor(), precision="bf16-true")
    assert model.net[0].weight.dtype == torch.bfloat16
    assert callback.posterior.mean.dtype == torch.float32
    (logged,) = fit.test(model, DataLoader(measured(11, 5), batch_size=4), verbose=False)
    x, y = (t.bfloat16() for t in measured(11, 5).tensors)
    at = callback.posterior.predict(x)
    expected = named("test", "laplace", regression_scores(at.mean, at.variance, y))
    same_numbers({k: v for k, v in logged.items() if k.endswith("laplace")}, expected)


def test_a_network_may_make_tensors_in_the_precision_of_the_trainer(tmp_path: Path) -> None:
    class Shifted(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + torch.ones(FEATURES))  # of the default dtype

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert self(batch[0]).dtype == torch.float64

    class Demanding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.ones(1).dtype == x.dtype
            return x

    model, callback = Shifted(), laplace()
    model.net.insert(0, Demanding())
    model, fit = fitted(tmp_path, callback, model, precision="64-true")
    (logged,) = fit.test(model, held_out(), verbose=False)
    found = callback.evaluate(model, held_out(), trainer=fit)
    assert logged["test_nll_laplace"] == pytest.approx(found["nll_laplace"], rel=1e-6)


# -- what a batch is ---------------------------------------------------------------------------------------------------


class DictModule(Classifier):
    """A batch with named parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


class SplitDict(DictModule):
    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["image"], batch["label"]


def as_dicts(n: int, seed: int = 0) -> DataLoader[Any]:
    return DataLoader([{"image": x, "label": y} for x, y in labelled(n, seed)], batch_size=8)  # type: ignore[arg-type]


def test_a_dict_batch_is_split_by_the_modules_split_batch(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, callback = SplitDict(), laplace()
    fit = trainer(tmp_path, callback)
    fit.fit(model, as_dicts(37))
    (logged,) = fit.test(model, as_dicts(11, 5), verbose=False)
    same_numbers({k[5:]: v for k, v in logged.items()}, callback.evaluate(model, as_dicts(11, 5)), rtol=1e-6)
    x, y = labelled(11, 5).tensors
    expected = classification_scores(callback.posterior.predict(x).probs, y)["nll"]
    assert logged["test_nll_laplace"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_three_parts_is_split_by_the_modules_split_batch(tmp_path: Path) -> None:
    class Weighted(Classifier):
        def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
            return batch[0], batch[1]

    x, y = labelled(37).tensors
    model, callback = Weighted(), laplace()
    trainer(tmp_path, callback).fit(model, DataLoader(TensorDataset(x, y, torch.ones(37)), batch_size=8))
    assert callback.posterior.n_data == 37


def test_a_dict_of_one_input_and_its_label_needs_no_split_batch(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    model, callback = DictModule(), laplace()
    trainer(tmp_path, callback).fit(model, as_dicts(37))
    reference = fit_laplace(model, DataLoader(labelled(37), batch_size=8))
    torch.testing.assert_close(
        callback.posterior.curvature.structure.diagonal(), reference.curvature.structure.diagonal()
    )


@pytest.mark.parametrize("kind", ["dict", "three parts"])
def test_without_split_batch_the_error_names_it_before_training(tmp_path: Path, kind: str) -> None:
    x, y = labelled(37).tensors
    model = DictModule() if kind == "dict" else Classifier()
    dicts = [{"image": image, "target": target} for image, target in zip(x, y, strict=True)]
    data: Any = DataLoader(dicts, batch_size=8) if kind == "dict" else DataLoader(TensorDataset(x, y, y), batch_size=8)
    what = "a dict of 2 parts" if kind == "dict" else "a list of 3 parts"
    with refused(model, ModuleError, rf"{what}: give {type(model).__name__} a method split_batch\(self, batch\)"):
        trainer(tmp_path, laplace()).fit(model, data)


def test_network_names_the_submodule_that_maps_x_to_f(tmp_path: Path) -> None:
    class Probabilities(Classifier):
        """`forward` is not the logits."""

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).softmax(1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    callback = laplace(network="net")
    model, fit = fitted(tmp_path, callback, Probabilities())
    assert callback.posterior.network is model.net
    (logged,) = fit.test(model, held_out(), verbose=False)
    x, y = labelled(11, 5).tensors
    expected = classification_scores(model.eval().net(x).softmax(1), y)["nll"]
    assert logged["test_nll_map"] == pytest.approx(expected, rel=1e-5)


def test_a_wrong_network_is_refused_before_training_with_the_names_there_are(tmp_path: Path) -> None:
    model = Classifier()
    with refused(model, ModuleError, r"Classifier has no submodule 'nett' \(network=\); its submodules are: net"):
        trainer(tmp_path, laplace(network="nett")).fit(model, train_loader())


def test_an_autoencoders_target_is_its_input(tmp_path: Path) -> None:
    class Autoencoder(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 2), nn.Tanh(), nn.Linear(2, FEATURES))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return F.mse_loss(self(batch), batch)

    x = draw(23, FEATURES, seed=0)
    model, callback = Autoencoder(), laplace(likelihood="regression")
    fit = trainer(tmp_path, callback)
    fit.fit(model, DataLoader(x, batch_size=4))  # type: ignore[arg-type]
    (logged,) = fit.test(model, DataLoader(x, batch_size=4), verbose=False)  # type: ignore[arg-type]
    at = callback.posterior.predict(x)
    expected = named("test", "laplace", regression_scores(at.mean, at.variance, x))
    same_numbers({k: v for k, v in logged.items() if k.endswith("laplace")}, expected)


def test_a_test_without_posterior_says_that_nothing_is_scored(tmp_path: Path) -> None:
    fit = trainer(tmp_path, laplace())
    with pytest.warns(UserWarning, match="nothing is scored: LaplaceCallback 'laplace' has no posterior yet"):
        (logged,) = fit.test(Classifier(), held_out(), verbose=False)
    assert logged.keys() == {"test_loss"}


def test_weights_changed_since_the_fit_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model, fit = fitted(tmp_path, laplace())
    with torch.no_grad():
        model.net[0].weight[0, 0] += 1e-3
    with pytest.raises(RuntimeError, match="not those the posterior was fitted to: load the matching weights, or fit"):
        fit.test(model, held_out(), verbose=False)


def test_another_module_with_the_same_weights_is_tested_itself(tmp_path: Path) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    (expected,) = fit.test(model, held_out(), verbose=False)
    twin = Classifier()
    twin.load_state_dict(model.state_dict())
    (logged,) = fit.test(twin, held_out(), verbose=False)
    same_numbers(logged, expected, rtol=1e-6)
    assert callback.posterior.network is twin


def test_another_module_with_other_weights_is_refused(tmp_path: Path) -> None:
    _, fit = fitted(tmp_path, laplace())
    with pytest.raises(RuntimeError, match="not those the posterior was fitted to"):
        fit.test(Classifier(), held_out(), verbose=False)
