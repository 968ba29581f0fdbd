"""Parts of a prediction, and conformal sets and intervals."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from bad_calls.callbacks import flags, words
from bad_calls.cases import Of, Table, Things
from lightning_bayes import GLM, Conformal, GaussianPosterior, Prediction


def _sets(t: Things, **given: Any) -> Any:
    return t.classifier.conformalize(**{"loader": t.batches, "level": 0.5, **given})


def _fit(t: Things, **given: Any) -> Any:
    return Conformal.fit(**{"prediction": t.classifier.predict(t.x), "y": t.y, "level": 0.5, **given})


indexing = Table("Prediction.__getitem__", lambda t, examples: t.classifier.predict(t.x)[examples], ["examples"])
indexing.error, indexing.named = IndexError, False
for _bad in (1.5, None, "first", (0, 1), [[0]], torch.zeros(2, 2, dtype=torch.long)):
    indexing("examples", _bad, "index a prediction by its examples, with a number, slice, list or mask, got")
indexing("examples", 5, "there are 5 examples, got the index 5")
indexing("examples", [True, False], "a mask needs the shape of the examples, [5]")
together = Table("Prediction.cat", lambda t, **given: Prediction.cat(**given), Prediction.cat)
together("predictions", [], "is an empty list")
together("predictions", None, "must be a list of predictions, as trainer.predict returns, got None")
together("predictions", [3], "must be a list of predictions, got one with 3")
together("predictions", [{"laplace": 3}], "of several callbacks: choose one of ['laplace']")
together("predictions", [[3]], "one list per dataloader")
_mixed = Of(lambda t: [t.classifier.predict(t.x), t.regressor.predict(t.x)], "mixed")
together("predictions", _mixed, "of different kinds, classification and regression")
bands = Table("Prediction.interval", lambda t, **given: t.regressor.predict(t.x).interval(**given), Prediction.interval)
conforming = Table("conformalize", _sets, GaussianPosterior.conformalize)
from_prediction = Table("Conformal.fit", _fit, Conformal.fit)
for _table in (bands, conforming, from_prediction):
    _table("level", 90, "must be strictly between 0 and 1, got 90")
    _table("level", "high", "must be a number, got 'high'")
for _table in (conforming, from_prediction):
    _table("method", "top_k", "unknown method 'top_k': use one of 'aps', 'raps', 'lac', 'cqr', 'cqr_asymmetric'")
    _table("method", "cqr", "is for real targets: use 'aps', 'raps' or 'lac' for classes")
    flags(_table, "randomised", "allow_empty", "per_class")
    _table("penalty", -0.1, "must be a finite number of at least 0, got -0.1")
    _table("free_classes", 1.5, "must be a whole number of at least 0, got 1.5")
    _table("seed", -1, "must be a whole number of at least 0, got -1")
_inputs_of_loader = "must be an iterable of (x, y) batches"
conforming("loader", None, _inputs_of_loader)
conforming("loader", [], "the held-out data are empty", named=False)
conforming("loader", Of(lambda t: TensorDataset(t.x, t.y), "dataset"), "is a TensorDataset", "DataLoader(dataset")
conforming("loader", Of(lambda t: [(t.x, t.y[:3])], "fewer"), "need class labels of shape [5]", named=False)
conforming("loader", Of(lambda t: [(t.x, t.y + 3)], "unknown"), "must be classes from 0 to 2, got 3", named=False)
conforming("loader", Of(lambda t: [(t.x, 0 * t.y - 100)], "ignored"), "there are no held-out targets", named=False)
words(conforming, "predictive")
conforming("predictive", GLM(link="logit"), "choose one of 'probit', 'pairwise'", named="link")
from_prediction("prediction", Of(lambda t: t.x, "tensor"), "must be a Prediction; Prediction.cat joins batches")
_pair = (torch.zeros(5), torch.ones(5))
from_prediction("prediction", (_pair[0],), "must be a pair (lower, upper) of floating-point tensors")
from_prediction("prediction", (_pair[0], 1.0), "must be a pair (lower, upper) of floating-point tensors")
from_prediction("prediction", (_pair[0], _pair[1][:3]), "must be a pair (lower, upper) of one shape", "[5] and [3]")
_real = Of(lambda t: t.regressor.predict(t.x), "real")
from_prediction("per_class", True, "real targets have none", prediction=_real, y=Of(lambda t: t.r, "reals"))
from_prediction("y", None, "must be a tensor of targets, got None")
from_prediction("y", Of(lambda t: t.y[:3], "fewer"), "need class labels of shape [5]", named=False)
from_prediction("ignore_index", "pad", "must be a whole number, got 'pad'")
_sets_of = Table("Conformal.sets", lambda t, **given: _fit(t).sets(**given), Conformal.sets)
_intervals_of = Table(
    "Conformal.interval",
    lambda t, **given: Conformal.fit(t.regressor.predict(t.x), t.r, 0.5).interval(**given),
    Conformal.interval,
)
for _table in (_sets_of, _intervals_of):
    _table("prediction", None, "must be a Prediction, as posterior.predict returns, got None")
_intervals_of("prediction", (torch.zeros(5), torch.ones(5)), "is for regression, but the prediction is of quantiles")
_sets_of("prediction", Of(lambda t: t.regressor.predict(t.x), "real"), "but the prediction is of regression")
_intervals_of("prediction", Of(lambda t: t.classifier.predict(t.x), "classes"), "the prediction is of classification")
_loaded = Table(
    "Conformal.from_state_dict",
    lambda t, **given: Conformal.from_state_dict(**{"state": _fit(t).state_dict(), **given}),
    Conformal.from_state_dict,
)
for _bad in (None, {}, {"format": 2}):
    _loaded("state", _bad, "this version cannot read a Conformal")
_loaded("predictor", 3, "must be a posterior or a predictor such as a DeepEnsemble, got 3")
CONFORMAL = [indexing, together, bands, conforming, from_prediction, _sets_of, _intervals_of, _loaded]
