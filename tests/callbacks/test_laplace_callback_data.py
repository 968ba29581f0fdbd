"""The exact pass: every training example once and in order, for any training loader."""

import logging
import warnings
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, draw, held_out, labelled, laplace, same_posterior, train_loader, trainer
from helpers.untouched import refused
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bayes import FitData, GaussianPosterior, fit_laplace
from lightning_bayes.network import DataError

X = draw(5, 4, seed=9)


def posterior_of(folder: Path, loader: Any, **arguments: Any) -> tuple[GaussianPosterior, L.LightningModule]:
    L.seed_everything(0, verbose=False)
    model, callback = Classifier(), laplace(tune=None, curvature="fisher_mc")
    trainer(folder, callback, max_epochs=1, **arguments).fit(model, loader)
    return callback.posterior, model


def check(folder: Path, loader: Any, examples: Any, **arguments: Any) -> None:
    """The posterior is that of exactly these examples, in this order (which seeds the Monte-Carlo labels)."""
    found, model = posterior_of(folder, loader, **arguments)
    plain = DataLoader(Subset(labelled(37), list(examples)), batch_size=8)
    same_posterior(found, fit_laplace(model, plain, curvature="fisher_mc"), X)


class Even(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 37, 2))


class Pairs:
    """A batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(labelled(37))


class Batches:
    """An iterable that is no DataLoader (a bare list would be several of them to Lightning)."""

    def __iter__(self) -> Iterator[Any]:
        return iter(whole_batches())

    def __len__(self) -> int:
        return 5


def whole_batches() -> Any:
    x, y = labelled(37).tensors
    return list(zip(x.split(8), y.split(8), strict=True))


DATA, ALL, CHOSEN = labelled(37), range(37), [30, 2, 17, 9, 11, 4, 5, 28, 20]
WEIGHTED = WeightedRandomSampler([1.0] * 30 + [9.0] * 7, 40)
IN_BATCHES = BatchSampler(SubsetRandomSampler(range(5, 25)), batch_size=6, drop_last=True)
# A loader, the examples of its posterior, and the limits of the Trainer.
LOADERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "shuffled": (train_loader(), ALL, {}),
    "drop_last": (DataLoader(DATA, 8, shuffle=True, drop_last=True), ALL, {}),
    "subset sampler": (DataLoader(DATA, 3, sampler=SubsetRandomSampler(CHOSEN)), sorted(CHOSEN), {}),
    "part": (DataLoader(DATA, 8, sampler=RandomSampler(DATA, num_samples=20)), ALL, {}),
    "with replacement": (DataLoader(DATA, 8, sampler=RandomSampler(DATA, True, 20)), ALL, {}),
    "batch sampler": (DataLoader(DATA, batch_sampler=IN_BATCHES), range(5, 25), {}),
    "whole batches": (DataLoader(whole_batches(), batch_size=None, shuffle=True), ALL, {}),
    "some whole batches": (DataLoader(whole_batches(), batch_size=None), range(16), {"limit_train_batches": 2}),
    "stream": (DataLoader(Stream(), 8), ALL, {}),
    "part of a stream": (DataLoader(Stream(), 8), range(16), {"limit_train_batches": 2}),
    "no DataLoader": (Batches(), ALL, {}),
    "a worker": (DataLoader(DATA, 8, shuffle=True, num_workers=1), ALL, {}),
    "overfit": (train_loader(shuffle=False), range(16), {"overfit_batches": 2}),
    **{
        f"limit {limit}": (train_loader(shuffle=False), range(n), {"limit_train_batches": limit})
        for limit, n in ((3, 24), (0.5, 16), (1.0, 37), (100, 37), (1, 8))
    },
}
UNKNOWN: dict[str, Any] = {
    "WeightedRandomSampler": DataLoader(DATA, 8, sampler=WEIGHTED),
    "Even": DataLoader(DATA, 8, sampler=Even()),
    "Pairs": DataLoader(DATA, batch_sampler=Pairs()),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore:.*persistent_workers")
@pytest.mark.parametrize(("loader", "examples", "limits"), LOADERS.values(), ids=LOADERS)
def test_the_pass_counts_each_example_once(tmp_path: Path, loader: Any, examples: Any, limits: dict[str, Any]) -> None:
    check(tmp_path, loader, examples, **limits)


@pytest.mark.parametrize("sampler", UNKNOWN)
def test_a_sampler_that_may_leave_examples_out_is_a_warning(tmp_path: Path, sampler: str) -> None:
    says = f"loader uses a {sampler}, but the posterior counts every example of the dataset once: .* give .* a Subset"
    with pytest.warns(UserWarning, match=says):
        check(tmp_path, UNKNOWN[sampler], ALL)


def test_a_collate_function_of_the_users_own_is_used(tmp_path: Path) -> None:
    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows]).flip(1), torch.stack([y for _, y in rows])

    loader = DataLoader(labelled(37), batch_size=8, collate_fn=collate)
    found, model = posterior_of(tmp_path, loader)
    x, y = labelled(37).tensors
    expected = fit_laplace(model, [(x.flip(1), y)], curvature="fisher_mc")
    same_posterior(found, expected, X)


@pytest.mark.parametrize("limit", [3, 0.5, 1.0, 100])
def test_a_limit_on_shuffled_data_leaves_no_example_out_and_says_so(
    tmp_path: Path, limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check(tmp_path, train_loader(), range(37), limit_train_batches=limit)
    said = [record.getMessage() for record in caplog.records if "max_batches=" in record.getMessage()]
    assert len(said) == (1 if limit in (3, 0.5) else 0)
    assert all(f"all training data, although limit_train_batches={limit}" in sentence for sentence in said)


def test_max_batches_limits_the_pass_over_shuffled_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, callback = Classifier(), laplace(tune=None, data=FitData(max_batches=2))
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, callback, limit_train_batches=3).fit(model, train_loader())
    assert callback.posterior.n_data == 16
    assert "limit_train_batches" not in caplog.text


def test_a_run_of_one_batch_passes_over_one_batch(tmp_path: Path) -> None:
    callback = laplace(tune=None)
    trainer(tmp_path, callback, fast_dev_run=1).fit(Classifier(), train_loader())
    assert callback.posterior.n_data == 8


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_several_training_loaders_are_refused_before_training(tmp_path: Path, kind: str) -> None:
    class Both(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0] if kind == "list" else batch["a"], batch_idx)

    loaders = [train_loader(), train_loader(11)]
    model = Both()
    with refused(model, DataError, r"2 training dataloaders, .* fit_now\(trainer, module, dataloader\)"):
        trainer(tmp_path, laplace()).fit(model, loaders if kind == "list" else dict(zip("ab", loaders, strict=True)))


def test_fit_now_takes_one_of_several_training_loaders(tmp_path: Path) -> None:
    class Both(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0], batch_idx)

    model, callback, loaders = Both(), laplace(tune=None), [train_loader(), train_loader(11)]
    trainer(tmp_path).fit(model, loaders)
    callback.fit_now(None, model, loaders[0])
    same_posterior(callback.posterior, fit_laplace(model, train_loader(shuffle=False)), X)


def test_one_loader_in_a_list_is_one_loader(tmp_path: Path) -> None:
    class First(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0], batch_idx)

        def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
            return batch

    model, callback = First(), laplace(tune=None)
    trainer(tmp_path, callback).fit(model, [train_loader()])
    same_posterior(callback.posterior, fit_laplace(model, train_loader(shuffle=False)), X)


class Noisy(Dataset[Any]):
    """A random transform, as in data augmentation."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = labelled(37)[index]
        return x + 0.1 * torch.randn(4), y


def test_a_random_transform_leaves_the_random_state_as_training_left_it(tmp_path: Path) -> None:
    states = []
    for callbacks in ([], [laplace(curvature="fisher_mc", data=train_loader())]):
        L.seed_everything(0, verbose=False)
        trainer(tmp_path, *callbacks).fit(Classifier(), DataLoader(Noisy(), batch_size=8, shuffle=True))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_augmented_data_are_noticed_once_and_change_no_random_state(tmp_path: Path) -> None:
    states = []
    for callbacks in ([], [laplace(), laplace(name="data", data=train_loader())]):
        L.seed_everything(0, verbose=False)
        checkpoint = ModelCheckpoint(tmp_path / str(len(callbacks)), monitor="step", mode="min")  # two passes
        fit = trainer(tmp_path, *callbacks, checkpoint, enable_checkpointing=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit.fit(Classifier(), DataLoader(Noisy(), batch_size=8, shuffle=True))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    sentences = [str(each.message) for each in caught if "random seed" in str(each.message)]
    assert len(sentences) == 1
    assert "differ each time they are read" in sentences[0]
    assert "pass data= the same examples without augmentation" in sentences[0]


class Plain(L.LightningDataModule):
    """Augmented examples for training, and the same without augmentation."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=8, shuffle=True)

    def clean(self) -> DataLoader[Any]:
        return train_loader()


@pytest.mark.parametrize("data", ["clean", train_loader()], ids=["name", "loader"])
def test_the_pass_goes_over_other_data_if_asked(tmp_path: Path, data: Any) -> None:
    model, callback = Classifier(), laplace(tune=None, data=data)
    trainer(tmp_path, callback, limit_train_batches=2).fit(model, Plain())
    same_posterior(callback.posterior, fit_laplace(model, train_loader(shuffle=False)), X)


def test_a_name_that_nobody_has_is_refused_before_training(tmp_path: Path) -> None:
    model = Classifier()
    with refused(model, DataError, "data='cleen' is neither a DataLoader nor a .* attribute of Plain or Classifier"):
        trainer(tmp_path, laplace(data="cleen")).fit(model, Plain())


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return cycle(labelled(37))


def test_of_endless_data_the_pass_takes_what_training_took_and_says_so(tmp_path: Path) -> None:
    model, callback = Classifier(), laplace(tune=None)
    fit = trainer(tmp_path, callback, max_steps=3, max_epochs=-1)
    with pytest.warns(UserWarning, match="no length, .* the posterior uses 3 batches, .*max_batches=…. sets"):
        fit.fit(model, DataLoader(Endless(), batch_size=8))
    plain = DataLoader(Subset(labelled(37), range(24)), batch_size=8)
    same_posterior(callback.posterior, fit_laplace(model, plain), X)


@pytest.mark.parametrize("data", [Endless(), labelled(37)], ids=["endless", "indexed"])
def test_max_batches_ends_the_pass(tmp_path: Path, data: Any) -> None:
    model, callback = Classifier(), laplace(tune=None, data=FitData(max_batches=2))
    trainer(tmp_path, callback, max_steps=3, max_epochs=-1).fit(model, DataLoader(data, batch_size=8))
    plain = DataLoader(Subset(labelled(37), range(16)), batch_size=8)
    same_posterior(callback.posterior, fit_laplace(model, plain), X)


def test_a_finite_stream_is_passed_over_to_its_end(tmp_path: Path) -> None:
    model, callback = Classifier(), laplace(tune=None)  # training stops in its second epoch
    trainer(tmp_path, callback, max_steps=7, max_epochs=-1).fit(model, DataLoader(Stream(), batch_size=8))
    same_posterior(callback.posterior, fit_laplace(model, train_loader(shuffle=False)), X)


class Scaled(L.LightningDataModule):
    """The data module can define transfer hooks as well."""

    def train_dataloader(self) -> DataLoader[Any]:
        return train_loader()

    def test_dataloader(self) -> DataLoader[Any]:
        return held_out()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]


def test_the_transfer_hooks_of_a_data_module_are_applied(tmp_path: Path) -> None:
    found, model = posterior_of(tmp_path, Scaled())
    x, y = labelled(37).tensors
    same_posterior(found, fit_laplace(model, [(2 * x + 1, y)], curvature="fisher_mc"), X)


@pytest.mark.parametrize("with_trainer", [True, False])
def test_the_transfer_hooks_of_a_module_are_applied_by_fit_now(tmp_path: Path, with_trainer: bool) -> None:
    class Hooked(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 1, batch[1]]

    model, callback = Hooked(), laplace(tune=None)
    callback.fit_now(trainer(tmp_path) if with_trainer else None, model, train_loader())
    x, y = labelled(37).tensors
    same_posterior(callback.posterior, fit_laplace(model, [(2 * x + 1, y)]), X)


def test_empty_training_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data are empty: at least one example is needed"):
        laplace().fit_now(None, Classifier(), DataLoader(Subset(labelled(3), [])))
