"""`trainer.predict` returns a `Prediction` per batch, and restores the module's `predict_step`."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, fitted, held_out, labelled, laplace, train_loader, trainer
from helpers.options import predictive_of
from helpers.untouched import refused
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bayes import BNN, GLM, LaplaceCallback, Prediction
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.trainer.module import ModuleError


def batches(n: int = 11) -> tuple[Tensor, ...]:
    return labelled(n, 5).tensors[0].split(4)


def same_predictions(found: list[Any], callback: LaplaceCallback, inputs: tuple[Tensor, ...]) -> None:
    assert len(found) == len(inputs)
    for prediction, x in zip(found, inputs, strict=True):
        expected = callback.predict(x)
        assert isinstance(prediction, Prediction)
        for name in ("probs", "epistemic", "aleatoric", "entropy"):
            torch.testing.assert_close(getattr(prediction, name), getattr(expected, name), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize(
    ("predictive", "link"), [("glm", "probit"), ("glm", "bridge"), ("glm", "mc"), ("bnn", None), ("dropout", None)]
)
def test_each_batch_gives_its_prediction(
    tmp_path: Path, inference_mode: bool, predictive: str, link: str | None
) -> None:
    callback = laplace(predictive=predictive_of(predictive, link, 6))
    model, fit = fitted(tmp_path, callback, inference_mode=inference_mode)
    found = fit.predict(model, held_out())
    same_predictions(found, callback, batches())
    assert not found[0].probs.is_inference()


@pytest.mark.parametrize("batch_size", [4, 11])
def test_a_prediction_is_the_posteriors_own_for_any_batch_size(tmp_path: Path, batch_size: int) -> None:
    callback = laplace(seed=4, predictive=GLM(link="mc", samples=6))
    model, fit = fitted(tmp_path, callback)
    found = Prediction.cat(fit.predict(model, held_out(batch_size=batch_size)))
    generator = torch.Generator().manual_seed(4)
    expected = callback.posterior.predict(torch.cat(batches()), GLM(link="mc", samples=6), generator=generator)
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.epistemic, expected.epistemic, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("wrapped", [False, True])
def test_inputs_without_labels_are_predicted(tmp_path: Path, wrapped: bool) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    x = labelled(11, 5).tensors[0]
    data: Any = [(row,) for row in x] if wrapped else x
    same_predictions(fit.predict(model, DataLoader(data, batch_size=4)), callback, batches())


def test_a_shuffled_drop_last_loader_still_predicts_every_example(tmp_path: Path) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    found = fit.predict(model, DataLoader(labelled(11, 5), batch_size=4, drop_last=True))
    same_predictions(found, callback, batches())


def test_several_loaders_give_a_list_each(tmp_path: Path) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)
    first, second = fit.predict(model, [held_out(), held_out(7)])
    same_predictions(first, callback, batches())
    same_predictions(second, callback, batches(7))


def test_two_callbacks_give_a_dict_by_name(tmp_path: Path) -> None:
    kron, diag = laplace(name="kron"), laplace(name="diag", structure="diag", predictive=BNN(samples=3))
    L.seed_everything(0, verbose=False)
    model = Classifier()
    fit = trainer(tmp_path, kron, diag)
    fit.fit(model, train_loader())
    found = fit.predict(model, held_out())
    assert [set(each) for each in found] == [{"kron", "diag"}] * 3
    same_predictions([each["kron"] for each in found], kron, batches())
    same_predictions([each["diag"] for each in found], diag, batches())


class Own(Classifier):
    """A module that defines `predict_step`."""

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0]).argmax(1)


def own_answer(model: L.LightningModule) -> bool:
    return model.predict_step((batches()[0], None)).shape == (4,)


def test_a_predict_step_of_the_modules_own_is_replaced_and_comes_back(tmp_path: Path) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback, Own())
    same_predictions(fit.predict(model, held_out()), callback, batches())
    assert "predict_step" not in vars(model)
    assert own_answer(model)
    plain = trainer(tmp_path).predict(model, held_out())
    assert [each.shape for each in plain] == [(4,), (4,), (3,)]


def test_replacing_a_predict_step_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for model, times in ((Own(), 1), (Classifier(), 0)):
        caplog.clear()
        model, fit = fitted(tmp_path, laplace(), model)
        for _ in range(2):
            fit.predict(model, held_out())
        said = [m for m in caplog.messages if "predictions instead of Own.predict_step" in m]
        assert len(said) == times


def test_a_predict_step_may_be_kept_or_answer_beside_ours(tmp_path: Path) -> None:
    kept, both = laplace(predict_step="keep"), laplace(name="both", predict_step="both")
    L.seed_everything(0, verbose=False)
    model = Own()
    trainer(tmp_path, kept, both).fit(model, train_loader())
    own = trainer(tmp_path).predict(model, held_out())
    for each, expected in zip(trainer(tmp_path, kept).predict(model, held_out()), own, strict=True):
        assert torch.equal(each, expected)
    answers = trainer(tmp_path, kept, both).predict(model, held_out())
    assert [set(each) for each in answers] == [{"user", "both"}] * 3
    assert all(torch.equal(each["user"], expected) for each, expected in zip(answers, own, strict=True))
    same_predictions([each["both"] for each in answers], both, batches())
    assert own_answer(model)


@pytest.mark.parametrize(
    "step",
    [
        lambda batch: (7, 7),
        lambda batch, batch_idx: (batch_idx, 7),
        lambda batch, batch_idx, dataloader_idx=0: (batch_idx, dataloader_idx),
        lambda batch, *, dataloader_idx, batch_idx: (batch_idx, dataloader_idx),
        lambda *args: args[1:],
    ],
)
def test_a_step_gets_the_arguments_it_takes(tmp_path: Path, step: Any) -> None:
    callback = laplace(predict_step="both")
    model, fit = fitted(tmp_path, callback)
    model.predict_step = step
    (a, b) = fit.predict(model, held_out())[1]["user"]
    assert a in (1, 7)  # the second batch
    assert b in (0, 7)
    assert model.predict_step is step


def test_a_step_gets_the_number_of_the_loader(tmp_path: Path) -> None:
    callback = laplace(predict_step="both")
    model, fit = fitted(tmp_path, callback)
    model.predict_step = lambda batch, batch_idx, dataloader_idx=0: (batch_idx, dataloader_idx)
    answers = fit.predict(model, [held_out(4), held_out(4)])
    assert [each["user"] for loader in answers for each in loader] == [(0, 0), (0, 1)]


def test_wrong_words_for_predict_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown predict_step 'mine': use one of 'replace', 'keep', 'both'"):
        laplace(predict_step="mine")
    model, fit = fitted(tmp_path, laplace(name="user", predict_step="both"), Own())
    with pytest.raises(ValueError, match="under 'user': give the callback another name="):
        fit.predict(model, held_out())


def test_a_predict_step_set_on_the_instance_comes_back(tmp_path: Path) -> None:
    callback = laplace()
    model, fit = fitted(tmp_path, callback)

    def mine(batch: Any, batch_idx: int = 0) -> str:
        return "mine"

    model.predict_step = mine
    same_predictions(fit.predict(model, held_out()), callback, batches())
    assert model.predict_step is mine


class Stop(L.Callback):
    """An exception in the middle of a run."""

    def on_predict_batch_end(self, *args: Any) -> None:
        raise ArithmeticError("stop")

    on_train_batch_end = on_predict_batch_end


def test_the_modules_own_step_comes_back_after_an_exception(tmp_path: Path) -> None:
    kron, diag = laplace(name="kron"), laplace(name="diag", structure="diag")
    model = Own()
    fit = trainer(tmp_path, kron, diag)
    fit.fit(model, train_loader())
    with pytest.raises(ArithmeticError, match="stop"):
        trainer(tmp_path, kron, diag, Stop()).predict(model, held_out())
    assert "predict_step" not in vars(model)
    assert own_answer(model)


def test_an_exception_in_training_leaves_a_step_set_on_the_instance(tmp_path: Path) -> None:
    model = Classifier()
    model.predict_step = mine = lambda batch: "mine"
    with pytest.raises(ArithmeticError, match="stop"):
        trainer(tmp_path, laplace(), Stop()).fit(model, train_loader())
    assert model.predict_step is mine


def test_without_posterior_predict_warns_and_runs_the_modules_own_step(tmp_path: Path) -> None:
    model = Own()
    with pytest.warns(UserWarning, match="no prediction of 'laplace': LaplaceCallback .* has no posterior yet: run"):
        found = trainer(tmp_path, laplace()).predict(model, held_out())
    assert torch.equal(torch.cat(found), torch.cat([model.eval().predict_step(batch) for batch in held_out()]))
    assert own_answer(model)


def test_of_two_callbacks_the_one_with_a_posterior_predicts(tmp_path: Path) -> None:
    callback = laplace(name="fitted")
    model, _ = fitted(tmp_path, callback)
    with pytest.warns(UserWarning, match="'missing' has no posterior yet"):
        found = trainer(tmp_path, callback, laplace(name="missing")).predict(model, held_out())
    same_predictions(found, callback, batches())


def test_a_dict_that_the_network_cannot_take_is_an_error_that_names_split_batch(tmp_path: Path) -> None:
    model, fit = fitted(tmp_path, laplace())
    data: Any = [{"image": x, "id": n} for n, (x, _) in enumerate(labelled(11, 5))]
    with pytest.raises(ModuleError, match=r"'image', 'id': give Classifier a method split_batch\(self, batch\)"):
        fit.predict(model, DataLoader(data, batch_size=4))
    model.split_batch = lambda batch: (batch["image"], None)
    assert len(fit.predict(model, DataLoader(data, batch_size=4))) == 3


def test_saved_predictions_are_readable_without_running_code(tmp_path: Path) -> None:
    model, fit = fitted(tmp_path, laplace())
    saved = fit.predict(model, held_out())
    torch.save(saved, tmp_path / "predictions.pt")
    read = torch.load(tmp_path / "predictions.pt", weights_only=True)
    for found, expected in zip(read, saved, strict=True):
        assert isinstance(found, Prediction)
        assert torch.equal(found.probs, expected.probs)
        assert torch.equal(found.epistemic, expected.epistemic)
        assert found.mean is None


def test_a_writer_receives_the_predictions_that_are_not_returned(tmp_path: Path) -> None:
    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch")
            self.seen: list[Any] = []

        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *args: Any) -> None:
            self.seen.append(prediction)

    callback, writer = laplace(), Writer()
    model, _ = fitted(tmp_path, callback)
    assert trainer(tmp_path, callback, writer).predict(model, held_out(), return_predictions=False) is None
    same_predictions(writer.seen, callback, batches())


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_mixed_precision_does_not_round_the_predictive(tmp_path: Path, link: str) -> None:
    callback = laplace(predictive=GLM(link=link, samples=50))
    model, _ = fitted(tmp_path, callback)
    found = trainer(tmp_path, callback, precision="bf16-mixed").predict(model, held_out())
    same_predictions(found, callback, batches())


def test_a_dict_batch_is_predicted_by_split_batch(tmp_path: Path) -> None:
    class Named(Classifier):
        def split_batch(self, batch: Any) -> tuple[Tensor, Tensor | None]:
            return (batch["x"], batch.get("y")) if isinstance(batch, dict) else batch

    callback = laplace()
    model, fit = fitted(tmp_path, callback, Named())
    rows: Any = [{"x": x} for x in labelled(11, 5).tensors[0]]
    same_predictions(fit.predict(model, DataLoader(rows, batch_size=4)), callback, batches())


def test_dropout_without_a_layer_is_refused_before_training(tmp_path: Path) -> None:
    module = Classifier()
    module.net[3] = nn.Identity()
    with refused(module, PosteriorError, "Classifier has no dropout layer with p > 0"):
        trainer(tmp_path, laplace(predictive="dropout")).fit(module, train_loader())
