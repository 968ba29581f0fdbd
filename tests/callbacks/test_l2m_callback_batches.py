"""The effective batch size: uneven batches, accumulation, limits; and the N that batches are drawn from."""

from itertools import permutations
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import labelled, trainer
from l2m_cases import BATCH, BETAS, ByHand, N, Net, Stream, adam, fitted, l2m, loader, same_as_by_hand, wide
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from lightning_bayes.callbacks.l2m import EffectiveBatchSize
from lightning_bayes.network import DataError
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.posterior.moments import fisher_factor

# -- the formula, over all orders of the data --------------------------------------------------------------------------

PLANS = {
    "even": ([[2], [2], [2]], None),
    "uneven last batch": ([[4], [2]], None),
    "accumulated": ([[1, 1], [1, 1], [1, 1]], 2),
    "accumulated, uneven": ([[2, 1], [2, 1]], 2),
    "accumulated, the last short": ([[2, 1], [2]], 2),
    "a short one alone": ([[2]], 3),
    "data left over": ([[3]], None),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_the_mean_over_all_orders_is_the_centred_fisher(plan: str, decay: float) -> None:
    steps, parts = PLANS[plan]
    g = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = g - g.mean()  # at the optimum
    orders = torch.tensor(list(permutations(range(6))))  # [720, 6]
    found, start = [], 0
    for step in steps:
        means = []
        for size in step:
            means.append(g[orders[:, start : start + size]].mean(1))
            start += size
        found.append((torch.stack(means).sum(0) / (parts or len(step))).square().mean())
    v = sum(decay ** (len(steps) - 1 - i) * square for i, square in enumerate(found))
    v_hat = v / sum(decay**i for i in range(len(steps)))

    batches = EffectiveBatchSize(n_data=6)
    for number, step in enumerate(steps, start=1):
        for size in step:
            batches.add(size)
        batches.count_step(number, parts, decay)
    torch.testing.assert_close(fisher_factor(6, batches.size) * v_hat, g.square().sum(), rtol=1e-12, atol=0)


def test_one_batch_a_step_is_the_harmonic_mean() -> None:
    batches = EffectiveBatchSize(n_data=100)
    for step, size in enumerate([8, 8, 8, 8, 5], start=1):
        batches.add(size)
        batches.count_step(step, 1, decay=1.0)
    assert batches.size == pytest.approx(5 / (4 / 8 + 1 / 5))


def test_a_batch_counts_when_the_step_is_made_and_only_once() -> None:
    batches = EffectiveBatchSize(n_data=100)
    batches.add(4)
    batches.count_step(0, 2, 1.0)  # no step yet
    assert batches.steps == 0
    batches.add(4)
    batches.count_step(1, 2, 1.0)
    batches.count_step(1, 2, 1.0)
    assert (batches.steps, batches.size) == (1, 8)


# -- in a Trainer, against the same training by hand -------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])  # of five batches, the last of which is small
@pytest.mark.parametrize("decoupled", [False, True])
def test_accumulated_batches(tmp_path: Path, accumulate: int, decoupled: bool) -> None:
    model = adam(decoupled_weight_decay=decoupled)
    hand = ByHand(adam(), decoupled=decoupled).train(list(loader()), 2, accumulate)
    callback = l2m()
    fitted(tmp_path, callback, model, accumulate_grad_batches=accumulate)
    same_as_by_hand(callback, hand)


def test_a_schedule_of_accumulation(tmp_path: Path) -> None:
    callback = l2m()
    hand = ByHand(adam()).train(list(loader()), 2, 1).train(list(loader()), 2, 4)
    schedule = GradientAccumulationScheduler({0: 1, 2: 4})
    fitted(tmp_path, callback, callbacks=[callback, schedule], max_epochs=4)
    same_as_by_hand(callback, hand)


def test_drop_last(tmp_path: Path) -> None:
    """All examples count, because shuffling makes the dropped ones random."""
    callback = l2m()
    hand = ByHand(adam()).train(list(loader(drop_last=True)))
    assert all(len(w) == BATCH for w in hand.weights)
    fitted(tmp_path, callback, data=loader(drop_last=True))
    same_as_by_hand(callback, hand)


@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (0.6, 3), (1.0, 5), (99, 5)])
def test_a_limit_in_order_leaves_only_the_first_examples(tmp_path: Path, limit: Any, batches: int) -> None:
    callback = l2m()
    fitted(tmp_path, callback, limit_train_batches=limit)
    same_as_by_hand(callback, ByHand(adam()).train(list(loader())[:batches]), min(N, batches * BATCH))


@pytest.mark.parametrize("limit", [3, 0.6])
def test_a_limit_on_shuffled_data_leaves_none_out(tmp_path: Path, limit: Any) -> None:
    callback = l2m()
    fitted(tmp_path, callback, data=loader(shuffle=True), limit_train_batches=limit)
    assert callback.posterior.n_data == N


def test_overfit_batches_are_all_there_is(tmp_path: Path) -> None:
    callback = l2m()
    fitted(tmp_path, callback, data=loader(shuffle=False), overfit_batches=2)
    same_as_by_hand(callback, ByHand(adam()).train(list(loader())[:2]), 2 * BATCH)


@pytest.mark.parametrize(
    ("sampler", "n"),
    [(SubsetRandomSampler(range(3, 30)), 27), (RandomSampler(range(N), num_samples=20), N)],  # type: ignore[arg-type]
)
def test_the_sampler_decides_what_there_is_to_draw_from(tmp_path: Path, sampler: Any, n: int) -> None:
    callback = l2m()
    fitted(tmp_path, callback, data=DataLoader(wide(labelled(N)), batch_size=BATCH, sampler=sampler))
    assert callback.posterior.n_data == n


def test_a_batch_sampler_is_seen_through(tmp_path: Path) -> None:
    data = wide(labelled(N))
    batches = BatchSampler(SequentialSampler(data), batch_size=BATCH, drop_last=False)  # type: ignore[arg-type]
    callback = l2m()
    fitted(tmp_path, callback, data=DataLoader(data, batch_sampler=batches), limit_train_batches=2)
    same_as_by_hand(callback, ByHand(adam()).train(list(loader())[:2]), 2 * BATCH)


@pytest.mark.parametrize("data", [loader(), DataLoader(Stream(), batch_size=BATCH)], ids=["loader", "stream"])
def test_a_given_number_of_examples_is_believed(tmp_path: Path, data: Any) -> None:
    callback = l2m(n_data=500)
    fitted(tmp_path, callback, data=data)
    same_as_by_hand(callback, ByHand(adam()).train(list(loader())), 500)


def whole_batches() -> DataLoader[Any]:
    return DataLoader(list(loader()), batch_size=None)  # type: ignore[arg-type]


def test_whole_batches_of_a_dataset_are_counted_as_they_come(tmp_path: Path) -> None:
    callback = l2m(n_data=N)
    fitted(tmp_path, callback, data=whole_batches())
    same_as_by_hand(callback, ByHand(adam()).train(list(loader())))


class NoStep(Net):
    """Fails in the first step, so an expected error must come before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training has started")


def refused(folder: Path, data: Any, arguments: dict[str, Any] | None = None, **options: Any) -> None:
    model = NoStep(torch.optim.Adam, weight_decay=0.1)
    fitted(folder, l2m(**(arguments or {})), model, data, **options)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (DataLoader(Stream(), batch_size=BATCH), "they have no length: pass n_data="),
        (whole_batches(), "the dataset gives whole batches: pass n_data="),
    ],
)
def test_data_that_cannot_be_counted_are_an_error_before_training(tmp_path: Path, data: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"the training data cannot be counted, because {why}"):
        refused(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (loader(batch_size=N), {}),
        (loader(batch_size=100), {}),
        (loader(), {"accumulate_grad_batches": 5}),
        (loader(), {"limit_train_batches": 1}),
        (loader(), {"overfit_batches": 1}),
        (loader(batch_size=20), {"accumulate_grad_batches": 2}),
    ],
)
def test_a_batch_of_all_data_is_an_error_before_training(tmp_path: Path, data: Any, options: Any) -> None:
    with pytest.raises(PosteriorError, match=r"a batch of all \d+ examples .* says nothing about the curvature: "):
        refused(tmp_path, data, **options)


def test_batches_that_turn_out_to_be_all_data_are_an_error_at_the_end(tmp_path: Path) -> None:
    x, y = wide(labelled(N)).tensors  # type: ignore[attr-defined]
    with pytest.raises(PosteriorError, match="a batch of all 37 examples"):
        fitted(tmp_path, l2m(n_data=N), data=DataLoader([(x, y)], batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [loader(batch_size=N), DataLoader(Stream(), batch_size=BATCH)], ids=["all", "stream"])
def test_the_papers_form_does_not_ask_for_sizes(tmp_path: Path, data: Any) -> None:
    callback = l2m(scaling="paper")
    fitted(tmp_path, callback, data=data)
    hand = ByHand(adam()).train(list(data))
    torch.testing.assert_close(callback.posterior.precision.diagonal(), hand.v_hat + 0.1 + 1e-8, rtol=1e-9, atol=0)


def test_several_loaders_are_refused_before_training_but_not_by_the_papers_form(tmp_path: Path) -> None:
    class Pair(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"], batch_idx)

    both = {"a": loader(), "b": loader()}
    with pytest.raises(DataError, match="there are 2 training dataloaders"):
        refused(tmp_path, both)
    callback = l2m(scaling="paper")
    fitted(tmp_path, callback, Pair(torch.optim.Adam, lr=0.02, betas=BETAS, weight_decay=0.1), both)
    expected = ByHand(adam()).train(list(loader())).v_hat + 0.1 + 1e-8
    torch.testing.assert_close(callback.posterior.precision.diagonal(), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("tune", [None, "marglik", "grid"])
def test_a_fast_dev_run_goes_through(tmp_path: Path, shuffle: bool, tune: str | None) -> None:
    callback = l2m(tune=tune, prior_precision=3.0)
    L.seed_everything(0, verbose=False)
    fit = trainer(tmp_path, callback, fast_dev_run=True, precision="64-true")
    fit.fit(adam(), loader(shuffle=shuffle), loader(9))
    assert callback.posterior.n_data == N
    assert callback.posterior_path is None
    assert list(tmp_path.iterdir()) == []
