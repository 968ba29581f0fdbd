"""A callback that predicts with the Gaussian process of its training points."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callback_cases import Classifier, held_out, labelled, laplace, train_loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bayes import GP, GaussianPosterior, LaplaceCallback, Prediction
from lightning_bayes.posterior import PosteriorError

X = labelled(11, 5).tensors[0]


def fitted(folder: Path, *callbacks: Any, **arguments: Any) -> tuple[Classifier, L.Trainer]:
    """With validation data to choose on."""
    L.seed_everything(0, verbose=False)
    model, fit = Classifier(), trainer(folder, *callbacks, **arguments)
    fit.fit(model, train_loader(), held_out(60, 20, seed=8))
    return model, fit


@pytest.mark.parametrize("words", [{"tune": "grid"}, {}, {"predictive": GP(None, outputs="independent")}], ids=str)
def test_scores_and_predictions_are_those_of_the_process(tmp_path: Path, words: dict[str, Any]) -> None:
    callback = laplace(**{"predictive": GP(points=9), "tune": "auto", **words})
    model, fit = fitted(tmp_path, callback)
    predictions = fit.predict(model, held_out())
    assert all(isinstance(prediction, Prediction) for prediction in predictions)
    expected = callback.posterior.predict(X, "gp")
    torch.testing.assert_close(torch.cat([p.probs for p in predictions]), expected.probs, rtol=1e-5, atol=1e-7)
    y = labelled(11, 5).tensors[1]
    (scores,) = fit.test(model, held_out(), verbose=False)
    nll = -expected.probs[range(11), y].log().mean()
    assert scores["test_nll_laplace"] == pytest.approx(float(nll), rel=1e-5)
    assert not torch.allclose(expected.probs, callback.posterior.predict(X, "glm").probs, rtol=1e-3)


def test_a_checkpoint_holds_the_points(tmp_path: Path) -> None:
    callback, checkpoint = laplace(predictive=GP(points=9)), ModelCheckpoint(tmp_path / "kept")
    fitted(tmp_path, callback, checkpoint, enable_checkpointing=True)
    again, model = LaplaceCallback(predictive=GP(points=9), progress=False), Classifier()
    other = trainer(tmp_path, again, ModelCheckpoint(tmp_path / "kept"), enable_checkpointing=True)
    loaded = other.predict(model, held_out(), ckpt_path=checkpoint.best_model_path)
    probs = torch.cat([prediction.probs for prediction in loaded])
    torch.testing.assert_close(probs, callback.predict(X).probs, rtol=1e-5, atol=1e-7)
    assert callback.posterior_path is not None
    from_file = GaussianPosterior.load(callback.posterior_path, model)
    assert torch.equal(from_file.points.x, callback.posterior.points.x)  # type: ignore[attr-defined]


def test_what_cannot_be_conditioned_on_is_an_error_before_training(tmp_path: Path) -> None:
    callback = laplace(predictive=GP(points=10_000))
    with pytest.raises(
        PosteriorError, match=r"between 10000 points with 3 outputs is too large.*use GP\(points=6688\)"
    ):
        fitted(tmp_path, callback)
