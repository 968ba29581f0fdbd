"""What comes after the fit: exceptions, checkpoints and resumed runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from callback_cases import labelled, trainer
from helpers.training import SaveAt
from l2m_cases import Net, adam, fitted, l2m, loader, wide
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, L2MCallback, LaplaceCallback

HELD_OUT = DataLoader(wide(labelled(11, 5)), batch_size=4)


def same(found: Any, expected: Any) -> None:
    assert found.n_data == expected.n_data
    for mine, other in (
        (found.mean, expected.mean),
        (found.prior_precision, expected.prior_precision),
        (found.precision.diagonal(), expected.precision.diagonal()),
    ):
        assert torch.equal(mine, other)


def test_an_exception_in_training_leaves_no_posterior_of_an_earlier_one(tmp_path: Path) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    callback = l2m()
    fitted(tmp_path, callback)
    model = Breaks(torch.optim.Adam, weight_decay=0.1)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fitted(tmp_path, callback, model)
    with pytest.raises(RuntimeError, match="has no posterior yet"):
        _ = callback.posterior
    fitted(tmp_path, callback)
    assert callback.state_dict()["batches"]["global_step"] == 10


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpointed(folder: Path, callback: L2MCallback, model: Any = None, **arguments: Any) -> tuple[Any, Any, str]:
    checkpoint = ModelCheckpoint(folder / "kept", save_last=True)
    both = [callback, checkpoint]
    model, fit = fitted(folder, callback, model, callbacks=both, enable_checkpointing=True, **arguments)
    return model, fit, str(checkpoint.last_model_path)


def new() -> Net:
    """As in a new program; float64, because Lightning loads weights before it converts them."""
    return adam().double()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_resumed_between_epochs_is_one_that_never_stopped(tmp_path: Path, accumulate: int) -> None:
    whole, checkpoint = l2m(), ModelCheckpoint(tmp_path / "kept", save_top_k=-1)
    options = {"accumulate_grad_batches": accumulate, "max_epochs": 3}
    fitted(tmp_path, whole, callbacks=[whole, checkpoint], enable_checkpointing=True, **options)
    paths = sorted((tmp_path / "kept").iterdir(), key=lambda path: path.name)
    assert len(paths) == 3
    for path in paths[:-1]:
        stored = torch.load(path, weights_only=True)["callbacks"]["L2MCallback[l2m]"]
        assert stored["posterior"] is None
        callback = l2m()
        trainer(tmp_path, callback, precision="64-true", **options).fit(new(), loader(), ckpt_path=path)
        same(callback.posterior, whole.posterior)
        assert callback.state_dict()["batches"] == whole.state_dict()["batches"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_counters_of_a_run_resumed_within_an_epoch(tmp_path: Path, before: bool, accumulate: int) -> None:
    """Lightning then sees other batches, but as many; also where the checkpoint is written before this callback's turn
    to count the step."""

    save = SaveAt(tmp_path / "seven.ckpt", 7 if accumulate == 1 else 4)  # after the second batch of the second epoch
    whole, callback = l2m(), l2m()
    both: list[Any] = [save, whole] if before else [whole, save]
    fitted(tmp_path, whole, data=loader(40), callbacks=both, max_epochs=3, accumulate_grad_batches=accumulate)
    resume = trainer(tmp_path, callback, precision="64-true", max_epochs=3, accumulate_grad_batches=accumulate)
    resume.fit(new(), loader(40), ckpt_path=tmp_path / "seven.ckpt")
    assert callback.state_dict()["batches"]["global_step"] == (15 if accumulate == 1 else 9)
    assert callback.state_dict()["batches"] == whole.state_dict()["batches"]


def test_a_tuned_posterior_is_stored_with_its_evidence(tmp_path: Path) -> None:
    callback = l2m(tune="marglik")
    model, _, _ = checkpointed(tmp_path, callback)
    loaded = GaussianPosterior.load(callback.posterior_path, model)
    assert torch.equal(loaded.log_marginal_likelihood(), callback.posterior.log_marginal_likelihood())


def test_the_best_weights_with_the_posterior_of_the_last_are_refused(tmp_path: Path) -> None:
    callback, checkpoint = l2m(), ModelCheckpoint(tmp_path / "kept", monitor="step", mode="min")
    model, fit = fitted(tmp_path, callback, callbacks=[callback, checkpoint], enable_checkpointing=True)
    with pytest.raises(
        RuntimeError, match=r"not those the posterior was fitted to: .* belongs to the last weights only"
    ):
        fit.test(model, HELD_OUT, ckpt_path="best", verbose=False)


# -- kinds of Trainer --------------------------------------------------------------------------------------------------


def test_fsdp_of_the_first_kind_is_refused_in_setup() -> None:
    import types

    callback = l2m()
    stand_in: Any = types.SimpleNamespace(strategy=FSDPStrategy(), callbacks=[callback])
    with pytest.raises(RuntimeError, match=r"cannot read the optimizer's state under FSDPStrategy: use strategy='ddp'"):
        callback.setup(stand_in, adam(), "fit")


def test_a_compiled_module(tmp_path: Path) -> None:
    callback, plain = l2m(), l2m()
    model = adam()
    fitted(tmp_path, callback, torch.compile(model, backend="eager"))
    fitted(tmp_path, plain)
    assert torch.equal(callback.posterior.precision.diagonal(), plain.posterior.precision.diagonal())
    assert callback.posterior.subset.names == plain.posterior.subset.names


def test_the_two_kinds_of_callback_have_keys_of_their_own() -> None:
    assert l2m().state_key == "L2MCallback[l2m]"
    assert LaplaceCallback(name="l2m").state_key != l2m().state_key
