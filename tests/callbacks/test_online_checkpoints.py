"""A checkpoint holds the curvature, the state of the noise, and the posterior of its weights."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, draw, labelled, trainer
from helpers.training import SaveAt
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from online_cases import (
    EXAMPLES,
    Autoencoder,
    ByHand,
    Convolutional,
    Given,
    Run,
    adam,
    agree,
    flat,
    images,
    noted,
    online,
    same,
    vectors,
)
from torch.utils.data import DataLoader

from lightning_bayes import GaussianPosterior, Memory, OnlineLaplaceCallback

KEY = "OnlineLaplaceCallback[online_laplace]"
X = draw(5, 4, seed=9).double()


class Resumable(Given):
    """Batches in order, starting where a checkpoint was written."""

    def __init__(self, batches: Any) -> None:
        super().__init__(batches)
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.next % len(self), len(self)):
            self.next = place + 1
            yield self._batches[place]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def convolutional() -> Convolutional:
    return Convolutional(adam).double()  # a checkpoint is loaded before Lightning converts a module


def autoencoder() -> Autoencoder:
    return Autoencoder().double()


def fit(folder: Path, callback: Any, *others: Any, path: Any = None, model: Any = None, **options: Any) -> Any:
    """A convolutional autoencoder on 18 examples in 5 batches."""
    model = convolutional() if model is None else model
    first = options.pop("first", ())
    run = trainer(folder, *first, callback, *others, **{"precision": "64-true", "max_epochs": 3, **options})
    batches = images(18)
    data = Resumable(batches) if isinstance(model, Convolutional) else Given(vectors())
    run.fit(model, data, ckpt_path=path)
    return model


def identical(one: Any, other: Any, callback: Any, expected: Any) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert torch.equal(callback.state_dict()["memory"]["C"], expected.state_dict()["memory"]["C"])
    assert callback.state_dict()["memory"]["draws"] == expected.state_dict()["memory"]["draws"]
    assert torch.equal(callback.posterior.precision.diagonal(), expected.posterior.precision.diagonal())


WORDS: list[Any] = [
    {},
    {"train_samples": 2, "memory": Memory(curvature_at="sample")},
    {"memory": Memory(average=True), "max_std": 0.1, "seed": 4},
]


@pytest.mark.parametrize("words", WORDS, ids=["plain", "two samples", "others"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
def test_a_run_resumed_after_an_epoch_equals_an_uninterrupted_one(tmp_path: Path, words: Any, options: Any) -> None:
    """Bit for bit."""
    expected, checkpoint = online(n_data=18, **words), ModelCheckpoint(tmp_path / "kept", save_top_k=-1)
    whole = fit(tmp_path, expected, checkpoint, enable_checkpointing=True, **options)
    paths = sorted((tmp_path / "kept").iterdir())
    assert len(paths) == 3
    for path in paths[:2]:
        callback = online(n_data=18, **words)
        resumed = fit(tmp_path, callback, path=path, **options)
        identical(resumed, whole, callback, expected)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("step", [1, 4, 5, 7, 14, 15])
def test_a_run_resumed_in_an_epoch_equals_an_uninterrupted_one(tmp_path: Path, step: int, first: bool) -> None:
    """Also if the checkpoint is written before this callback's hook, or after the last batch of an epoch."""
    path = tmp_path / "own.ckpt"
    save = SaveAt(path, step)
    expected = online(n_data=18)
    order: Any = {"first": [save]} if first else {}
    whole = fit(tmp_path, expected, *([] if first else [save]), **order)
    callback = online(n_data=18)
    resumed = fit(tmp_path, callback, path=path)
    identical(resumed, whole, callback, expected)


@pytest.mark.parametrize("step", [2, 3, 6])
def test_lightnings_own_checkpoints_in_an_epoch(tmp_path: Path, step: int) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=step, save_top_k=-1)
    expected, callback = online(n_data=18), online(n_data=18)
    whole = fit(tmp_path, expected, checkpoint, enable_checkpointing=True)
    paths = sorted((tmp_path / "kept").iterdir(), key=lambda path: int(path.stem.rpartition("=")[2]))
    for path in paths[:-1] if 15 % step == 0 else paths:  # the last holds a finished run
        resumed = fit(tmp_path, callback, path=path)
        identical(resumed, whole, callback, expected)


def test_a_run_resumed_where_accumulated_batches_make_a_step(tmp_path: Path) -> None:
    path = tmp_path / "own.ckpt"
    expected, callback = online(n_data=18), online(n_data=18)
    whole = fit(tmp_path, expected, SaveAt(path, 4, batch=1), accumulate_grad_batches=2)
    assert path.exists()
    resumed = fit(tmp_path, callback, path=path, accumulate_grad_batches=2)
    identical(resumed, whole, callback, expected)


def test_in_the_middle_of_an_accumulation_curvature_goes_the_way_of_the_gradients(tmp_path: Path) -> None:
    """Lightning's checkpoints hold no gradients, so the step and the curvature lose the batch before."""
    path = tmp_path / "own.ckpt"
    expected, callback = online(n_data=18), online(n_data=18)
    fit(tmp_path, expected, SaveAt(path, 1, batch=2), accumulate_grad_batches=2)  # one batch after the first step
    state = torch.load(path, weights_only=True)
    start = convolutional()
    start.load_state_dict(state["state_dict"])
    resumed = fit(tmp_path, callback, path=path, accumulate_grad_batches=2, max_steps=2)
    memory = state["callbacks"][KEY]["memory"]
    batch = images(18)[3]
    h = ByHand(start, 18).curvature(flat(start), batch)
    same(callback.state_dict()["memory"]["C"], 0.8 * memory["C"] + 18 / len(batch) * h)
    assert not torch.allclose(flat(resumed), flat(start))


def test_a_finished_epoch_that_is_resumed_without_a_batch_has_a_posterior(tmp_path: Path) -> None:
    """The checkpoint of the last batch: only the end of training is left."""
    path = tmp_path / "own.ckpt"
    expected, callback = online(n_data=18), online(n_data=18)
    whole = fit(tmp_path, expected, SaveAt(path, 15))
    resumed = fit(tmp_path, callback, path=path)
    identical(resumed, whole, callback, expected)


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint available")
def test_a_run_stopped_by_an_exception_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Raises in an earlier callback, before the curvature of the step is added."""

    class Break(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 7:
                raise ValueError("broken")

    path = tmp_path / "broken"
    with pytest.raises(ValueError, match="broken"):
        fit(tmp_path, online(n_data=18), OnExceptionCheckpoint(path), first=[Break()], enable_checkpointing=True)
    expected, callback = online(n_data=18), online(n_data=18)
    whole = fit(tmp_path, expected)
    resumed = fit(tmp_path, callback, path=path / "on_exception.ckpt")
    identical(resumed, whole, callback, expected)


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept")
    fit(tmp_path, online(n_data=EXAMPLES), checkpoint, model=autoencoder(), enable_checkpointing=True)
    path = checkpoint.best_model_path
    other = online(n_data=EXAMPLES, subset=["decoder"])
    with pytest.raises(RuntimeError, match=r"curvature of encoder.0.weight.*the weights to sample are decoder.0.w"):
        fit(tmp_path, other, path=path, model=autoencoder(), max_epochs=4)

    state = torch.load(path, weights_only=True)
    state["callbacks"][KEY]["memory"]["C"] = torch.ones(3)
    torch.save(state, tmp_path / "short.ckpt")
    with pytest.raises(
        RuntimeError, match=r"curvature of 3 weights, but encoder.0.weight.* have 48: it belongs to another"
    ):
        fit(tmp_path, online(n_data=EXAMPLES), path=tmp_path / "short.ckpt", model=autoencoder(), max_epochs=4)


# -- test and predict from a checkpoint --------------------------------------------------------------------------------


def classifier(folder: Path, *others: Any, **options: Any) -> Any:
    L.seed_everything(0, verbose=False)
    callback, model = online(likelihood="classification"), Classifier()
    run = trainer(folder, callback, *others, enable_checkpointing=True, max_epochs=3, **options)
    run.fit(model, DataLoader(labelled(37), 8), DataLoader(labelled(9, 4), 4))
    return model, callback, run


def test_the_best_weights_come_with_a_posterior_of_their_own(tmp_path: Path) -> None:
    """In the middle of training there is a posterior for every checkpoint: that of its weights and its curvature."""
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="step", mode="min")
    model, callback, run = classifier(tmp_path, checkpoint)
    last = callback.posterior.precision.diagonal()
    data = DataLoader(labelled(11, 5), 4)
    (logged,) = run.test(model, data, ckpt_path="best", verbose=False)
    assert torch.equal(callback.posterior.mean, flat(model).float())
    state = torch.load(checkpoint.best_model_path, weights_only=True)
    assert state["global_step"] == 5
    precision = callback.posterior.precision.diagonal()
    same(precision, state["callbacks"][KEY]["memory"]["C"] + 3.0)
    assert bool((precision < last).any())
    (again,) = trainer(tmp_path, online(likelihood="classification")).test(
        Classifier(), data, ckpt_path=checkpoint.best_model_path, verbose=False
    )
    assert again == pytest.approx(logged, rel=1e-6)


def test_weights_without_callbacks_and_the_file_of_its_own(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", save_weights_only=True)
    _, callback, _ = classifier(tmp_path, checkpoint)
    assert "callbacks" not in torch.load(checkpoint.best_model_path, weights_only=True)
    assert callback.posterior_path == tmp_path / "online_laplace_posterior.pt"
    model = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    found = GaussianPosterior.load(callback.posterior_path, model)
    x = labelled(5, 9).tensors[0]
    assert torch.equal(found.predict(x).probs, callback.posterior.predict(x).probs)
    fresh = online(likelihood="classification")
    with pytest.warns(UserWarning, match="nothing is scored: OnlineLaplaceCallback 'online_laplace' has no posterior"):
        trainer(tmp_path, fresh).test(model, DataLoader(labelled(11, 5), 4), verbose=False)


def test_checkpoints_hold_plain_tensors_and_the_curvature_once(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept")
    _, callback, _ = classifier(tmp_path, checkpoint)
    state = torch.load(checkpoint.best_model_path, weights_only=True)["callbacks"][KEY]
    assert state.keys() == {"posterior", "memory"}
    assert state["memory"]["C"].data_ptr() == state["posterior"]["curvature"]["values"].data_ptr()
    assert torch.equal(state["memory"]["C"], callback.state_dict()["memory"]["C"])
    assert state["memory"]["draws"] == 15


def test_fit_now_around_the_best_weights_has_the_curvature_of_the_last(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="step", mode="min")
    _, callback, _ = classifier(tmp_path, checkpoint)
    C = callback.state_dict()["memory"]["C"]
    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    posterior = callback.fit_now(None, best)
    assert posterior.network is best
    assert torch.equal(posterior.mean, flat(best).float())
    assert torch.equal(posterior.precision.diagonal(), C + 3.0)
    posterior.check_weights()


def test_a_copy_of_the_callback_has_the_state_of_the_first() -> None:
    """As for Lightning's callbacks."""
    callback = online(n_data=EXAMPLES)
    assert callback.state_key == KEY
    other: OnlineLaplaceCallback = copy.deepcopy(callback)
    state: dict[str, Any] = callback.state_dict()
    assert state == {"posterior": None, "memory": None}
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_nothing_of_a_run_by_hand_is_missing_after_a_resumed_one(tmp_path: Path) -> None:
    """The oracle for both parts, with the noise of each."""
    path = tmp_path / "own.ckpt"
    first, model = convolutional(), convolutional()
    with noted() as before:
        fit(tmp_path, online(n_data=18), SaveAt(path, 3), model=first, max_steps=3)
    callback = online(n_data=18)
    with noted() as after:
        fit(tmp_path, callback, path=path, model=model, max_epochs=2)
    expected = ByHand(convolutional(), 18).run(images(18), [*before, *after], epochs=2)
    agree(Run(model, callback), expected)
