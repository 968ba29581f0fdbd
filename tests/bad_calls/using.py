"""A posterior in use: predictions, samples, priors, tuning, evaluation, ensembles, autoencoders."""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError

from bad_calls.callbacks import counts, flags, mappings, positives, words
from bad_calls.cases import KINDS, Of, Table, Things, mlp
from lightning_bayes import (
    GLM,
    Augmented,
    DeepEnsemble,
    GaussianPosterior,
    Kron,
    LaplacePosterior,
    MCDropout,
    Tuning,
    fit_laplace,
    mc_dropout,
)
from lightning_bayes.network import Processes
from lightning_bayes.posterior import PosteriorError, PriorError
from lightning_bayes.predictive import decode
from lightning_bayes.predictive.auto import tune_auto
from lightning_bayes.predictive.evaluate import evaluate
from lightning_bayes.predictive.held_out import grid

GENERATOR = "must be a torch.Generator, such as torch.Generator().manual_seed(0), got"


def _inputs(table: Table, **others: Any) -> None:
    """What a network cannot be run on."""
    run = "Sequential cannot be run on an input of shape"
    rows: list[tuple[Any, ...]] = [
        *((bad, "must contain a tensor with a batch dimension, but it is") for bad in (None, "abc", 3, [1.0, 2.0], [])),
        (Of(lambda t: t.x.numpy(), "numpy"), "must contain a tensor with a batch dimension"),
        (torch.tensor(1.0), "must contain a tensor with a batch dimension"),
        (Of(lambda t: t.x[:0], "no examples"), "a batch has no examples"),
        (Of(lambda t: t.x[0, :2], "short"), run),
        (Of(lambda t: t.x.repeat(1, 2), "[5, 6]"), f"{run} [", "torch.float32"),
        (Of(lambda t: t.x.double(), "double"), "torch.float64", "weights of torch.float32"),
        (Of(lambda t: t.x.long(), "integers"), "torch.int64"),
        (Of(lambda t: (t.x, t.x), "two inputs"), "Sequential cannot be run on inputs of shapes"),
        (Of(lambda t: {"ids": t.x, "mask": t.x}, "keywords"), "on inputs of shapes", "'ids'"),
    ]
    for value, *said in rows:
        table("x", value, *said, named=False, **others)


def _loaders(table: Table, empty: str) -> None:
    """What is no loader of inputs and class labels."""
    table("loader", 3, "must be an iterable of (x, y) batches", "got 3")
    table("loader", Of(lambda t: TensorDataset(t.x, t.y), "dataset"), "is a TensorDataset", "DataLoader(dataset")
    rows: list[tuple[Any, ...]] = [
        ([], empty),
        (Of(lambda t: [t.x], "bare tensors"), "pair (x, y), but the loader gave a Tensor"),
        (Of(lambda t: [(t.x, [0, 1, 2, 0, 1])], "list"), "targets of a batch must be a tensor"),
        (Of(lambda t: [(t.x, t.y.numpy())], "numpy"), "targets of a batch must be a tensor"),
        (Of(lambda t: [(t.x, t.y.float())], "real"), "integer class", "torch.float32"),
        (Of(lambda t: [(t.x, t.y[:3])], "fewer"), "shape [5]", "shape [3]"),
        (Of(lambda t: [(t.x.double(), t.y)], "double"), "torch.float64"),
    ]
    for value, *said in rows:
        table("loader", value, *said, named=False)


def _drawing(table: Table, *samples: str) -> None:
    counts(table, *samples)
    table("generator", 42, f"{GENERATOR} 42", error=TypeError)
    table("generator", "cpu", f"{GENERATOR} 'cpu'", error=TypeError)


def _scoring(table: Table) -> None:
    """How predictions are made that are scored."""
    words(table, "predictive")
    table("predictive", None, "unknown predictive None: use one of 'glm', 'bnn', 'map'")
    mappings(table, "predictive", "glm", "samples")
    table("seed", -1, "must be a whole number of at least 0, got -1")
    table("seed", 1.5, "must be a whole number of at least 0, got 1.5")
    table("seed", None, "must be a whole number of at least 0, got None")


def _method(of: str, name: str, error: Any = KINDS, **given: Callable[[Things], Any]) -> Table:
    """A method of one of the shared posteriors, with these arguments."""

    def call(t: Things, **bad: Any) -> Any:
        return getattr(getattr(t, of), name)(**{**{key: make(t) for key, make in given.items()}, **bad})

    return Table(name, call, getattr(LaplacePosterior, name), error=error)


def _x(t: Things) -> Any:
    return t.x


def _batches(t: Things) -> Any:
    return t.batches


predict = _method("classifier", "predict", x=_x)
_inputs(predict)
_drawing(predict)
flags(predict, "calibrated", "differentiable", "split")
predict("differentiable", 3, "must be True or False, got 3")
_gradient = Of(lambda t: t.x.clone().requires_grad_(), "with gradients")
for _predictive in ("glm", "bnn", "map"):
    predict("differentiable", True, "no tensor of x requires one: call x.requires_grad_()", predictive=_predictive)
    predict("differentiable", True, "must contain a tensor", x="abc", predictive=_predictive, named=False)
predict("differentiable", True, "x has only integers", "embeddings", x=torch.ones(5, 3, dtype=torch.long))
predict("differentiable", True, "'gp' has no gradient in x: use predictive='glm'", x=_gradient, predictive="gp")
words(predict, "predictive")
predict("predictive", None, "unknown predictive None: use one of 'glm', 'bnn', 'map'")
predict("predictive", "gp", "needs training points", "fit_laplace(..., gp=M)", error=PosteriorError)
mappings(predict, "predictive", "glm", "samples")
_logit = "link='logit'; choose one of 'probit', 'pairwise', 'bridge', 'mc'"
predict("predictive", GLM(link="logit"), _logit, named="link")
predict("predictive", "dropout", "has no dropout layer with p > 0, so predictive='dropout' would be the plain network")
for _predictive in ("bnn", "map"):
    predict("generator", 42, GENERATOR, predictive=_predictive)
    _inputs(predict, predictive=_predictive)

gradients_off = Table(
    "gradients off", torch.no_grad()(lambda t, **given: t.classifier.predict(**{"x": t.x, **given})), ["differentiable"]
)
gradients_off("differentiable", True, "gradients are off (torch.no_grad(), torch.inference_mode())", x=_gradient)

moved = Table(
    "moved network", lambda t, change, **given: t.moved(change).predict(t.x, **given), ["change"], named=False
)
for _predictive in ("glm", "bnn", "map"):
    _double = Of(lambda t: nn.Module.double, "double")
    moved("change", _double, "weights are torch.float64", "posterior's are torch.float32", predictive=_predictive)
    _other = Of(lambda t: lambda net: nn.init.zeros_(net[0].bias), "other weights")
    moved("change", _other, "weights are not those the posterior was fitted to", predictive=_predictive)
_half = Of(lambda t: nn.Module.half, "half")
moved("change", _half, "not those the posterior was fitted to")
_grown = Of(lambda t: lambda net: net.append(nn.Linear(3, 3)), "another layer")
moved("change", _grown, "not those the posterior was fitted to")

deploy = _method("classifier", "deploy", x=_x, predictive=lambda t: "map")
_inputs(deploy)
flags(deploy, "calibrated")
words(deploy, "predictive")
deploy("predictive", None, "unknown predictive None: use one of 'glm', 'bnn', 'map'")
deploy("predictive", "bnn", "predictive='bnn' cannot be deployed: use 'glm' for a last layer", error=PosteriorError)
_last_layer = "all weights of one linear last layer", "fit subset='last_layer'"
deploy("predictive", "glm", *_last_layer, named=False, error=PosteriorError)

functional = _method("classifier", "functional", x=_x)
_inputs(functional)
flags(functional, "joint", "differentiable")
functional("differentiable", 3, "must be True or False, got 3")
functional("differentiable", True, "no tensor of x requires one: call x.requires_grad_()")
functional("differentiable", True, "must contain a tensor with a batch dimension", x=None, named=False)

sample_function = _method("classifier", "sample_function")
_drawing(sample_function, "n")
words(sample_function, "predictive")
for _predictive in ("map", "gp", None):
    sample_function("predictive", _predictive, f"unknown predictive {_predictive!r}: use one of 'glm', 'bnn'")
drawn = Table(
    "FunctionDraw",
    lambda t, x, **given: t.classifier.sample_function(torch.Generator().manual_seed(0), **given)(x),
    ["x"],
)
_inputs(drawn)
_inputs(drawn, predictive="bnn")

sample = _method("classifier", "sample")
_drawing(sample, "n")

on_device = _method("classifier", "to")
for _device in ("gpu", "cuda:99", None, 3, torch.float64):
    on_device("device", _device, "must exist on this machine, such as 'cpu', got")

density = _method("classifier", "log_prob")
for _bad in (None, "mean", 3.0, torch.tensor(1.0), torch.zeros(30), torch.zeros(2, 30), torch.zeros(31, 1)):
    density("theta", _bad, "must be weight vectors [..., 31], one number for each weight of the posterior, got")

NUMBERS = "must be a number or a vector of numbers, got"
with_prior = _method("classifier", "with_prior", error=PriorError)
evidence = _method("regressor", "log_marginal_likelihood")
for _table in (with_prior, evidence):
    for _bad in (0.0, -1.0, math.nan, math.inf):
        _table("prior_precision", _bad, f"must be positive and finite, got {_bad:g}")
    for _bad in ("weak", True, [], [[1.0]], {}):
        _table("prior_precision", _bad, f"{NUMBERS} {_bad!r}")
    _table("prior_precision", [1.0, 2.0, 3.0], "each of the 2 layers")
with_prior("prior_precision", 1e300, "must be positive and finite, got inf")  # in float32
with_prior("prior_precision", None, f"{NUMBERS} None")
_each = Of(lambda t: torch.rand(31) + 1, "[31]")
with_prior("prior_precision", _each, "0.weight", "whole layer", named=False, error=ValueError)

words(evidence, "at")
evidence("at", None, "unknown at None: use one of 'weights', 'optimum'")

NOISE = "Gaussian needs a positive, finite noise_std"
with_noise = _method("regressor", "with_noise")
for _table in (with_noise, evidence):
    for _bad in (0.0, -1.0, math.nan, math.inf):
        _table("noise_std", _bad, NOISE)
    for _bad in ("small", [], {}, True):
        _table("noise_std", _bad, "must be a number or a vector of numbers, got")
    _table("noise_std", torch.ones(2, 2), "noise_std")
    _table("noise_std", torch.tensor([1.0, 2.0]), "changed by a common factor")
with_noise("noise_std", None, "must be a number or a vector of numbers, got None")

classes = Table("noise of classes", lambda t, **given: t.classifier.with_noise(**given), ["noise_std"])
classes("noise_std", 0.5, "needs a Gaussian likelihood, but this posterior has Categorical")

# -- other data ------------------------------------------------------------------------------------------------------

_growing = fit_laplace(mlp(), [(torch.ones(2, 3), torch.tensor([0, 1]))], structure=Kron(updatable=True))
update = Table("update", lambda t, **given: _growing.update(**{"loader": t.batches, **given}), LaplacePosterior.update)
update("loader", 3, "must be an iterable of (x, y) batches", "got 3")
update("loader", [], "the loader is empty")
update("loader", Of(lambda t: [(t.x, t.r)], "real targets"), "Categorical", named=False)
flags(update, "progress")
update("processes", 2, "must be Processes(rank, size), got 2")
update("probe", 3, "must contain a tensor with a batch dimension", named=False)
not_growing = Table("update of", lambda t, posterior: posterior.update(t.batches), ["posterior"], named=False)
not_growing("posterior", Of(lambda t: t.classifier, "kron"), "updatable=True")
not_growing("posterior", Of(lambda t: t.moved(lambda n: n[0].weight.data.mul_(2)), "moved"), "fitted to")
penalty = _method("classifier", "penalty")
penalty("network", 3, "must be an nn.Module", "got 3")
penalty("network", torch.nn.Linear(3, 3), "belongs to another network", "0.weight", named=False)

# -- tuning ----------------------------------------------------------------------------------------------------------

tune = _method("regressor", "tune_prior", method=lambda t: "marglik")
for _bad in ("cross-validation", 3):
    _known = "use one of 'auto', 'marglik', 'mackay', 'linear', 'grid'"
    tune("method", _bad, f"unknown method {_bad!r}: {_known}")
tune("method", None, "tune_prior(None) tunes nothing: name a method, such as 'auto'")
tune("method", {"steps": 0}, "steps must be a whole number of at least 1, got 0", named="steps")
tune("method", {"sizes": 3}, "has no argument 'sizes'", error=TypeError)
words(tune, "calibrate")
flags(tune, "progress")
tune("processes", 2, "must be Processes(rank, size), got 2")
_scoring(tune)
tune.anything_goes("loader", "tables of their own")
iterating = Table(
    "tune_prior('linear', iterate=True)",
    lambda t, fisher="weights", **given: t.regressor.tune_prior(
        Tuning("linear", iterate=True, fisher=fisher), **{"loader": t.real_batches, **given}
    ),
    ["loader", "processes", "progress"],
)
iterating("loader", None, "needs passes over the training data: pass them as loader=")
iterating("loader", 3, "must be an iterable of (x, y) batches", "got 3")
iterating("loader", [], "a pass over the loader has 0 examples, but the posterior was fitted to")
iterating("loader", Of(lambda t: [(t.x[:3], t.r[:3])], "some"), "has 3 examples, but the posterior was fitted to")
iterating("loader", Of(lambda t: [t.x], "bare tensors"), "pair (x, y), but the loader gave a Tensor", named=False)
flags(iterating, "progress")
iterating("processes", 2, "must be Processes(rank, size), got 2")
iterating("fisher", "optimum", "supports only one process: use fisher='weights'", processes=Processes(0, 2))
_damped = Table("tune_prior of damping", lambda t, method, **given: t.damped.tune_prior(method, **given), ["method"])
_damped.named = False
_damped("method", "mackay", "without damping")
_damped("method", "linear", "without damping")
_damped("method", Tuning("linear", iterate=True), "without damping", loader=Of(lambda t: t.batches, "data"))
_damped("method", Tuning("marglik", groups="layers"), "takes one prior precision for all layers")
grids = Table(
    "tune_prior('grid')",
    lambda t, metric=None, **given: t.classifier.tune_prior(
        Tuning("grid", metric=metric), **{"loader": t.batches, **given}
    ),
    [name for name in signature(grid).parameters if name not in ("posterior", "tuning")],
)
grids("loader", None, "needs validation data: pass loader=, or use 'marglik'")
_loaders(grids, "the held-out data are empty")
grids("metric", "nll", "must be a torchmetrics metric, or None, got 'nll'")
grids("metric", torch.nn.functional.mse_loss, "must be a torchmetrics metric, or None")
grids("metric", MeanSquaredError, "must be a torchmetrics metric, or None")
_scoring(grids)
words(grids, "calibrate")
autos = Table(
    "tune_prior('auto')",
    lambda t, **given: t.classifier.tune_prior("auto", **{"loader": t.batches, **given}),
    [name for name in signature(tune_auto).parameters if name not in ("posterior", "tuning")],
)
calibration = _method("classifier", "calibrate", loader=_batches)
refinement = _method("classifier", "refine", loader=_batches)
words(refinement, "method")
counts(refinement, "samples")
refinement("passes", 1, "must be a whole number of at least 2, got 1")
refinement("passes", "ten", "must be a whole number of at least 2, got 'ten'")
positives(refinement, "tolerance")
flags(refinement, "progress")
refinement("seed", -1, "got -1")
refinement("loader", [], "the loader is empty", named=False)
refinement("loader", 3, "must be an iterable of (x, y) batches", "got 3")
refinement("loader", Of(lambda t: TensorDataset(t.x, t.y), "dataset"), "is a TensorDataset", "DataLoader(dataset")
for _table in (autos, calibration):
    _scoring(_table)
    _loaders(_table, "the held-out data are empty")
    _table("loader", Of(lambda t: [(t.x, 0 * t.y)], "one class"), "contain only one class", "hold out", named=False)
calibration("loader", None, "must be an iterable of (x, y) batches", "got None")
words(calibration, "of")
calibration("of", None, "unknown of None: use one of 'outputs', 'probs'")
words(autos, "calibrate")
autos("calibrate", "variance", "unknown calibrate 'variance': use one of 'auto', 'outputs', 'probs', None")
autos("predictive", GLM(link="logit"), "link='logit'; choose one of 'probit'", loader=None, named="link")
with_data = _method("regressor", "with_log_likelihood")
with_data("loader", None, "must be an iterable of (x, y) batches")
with_data("loader", [], "the loader is empty")
with_data("loader", Of(lambda t: [(t.x[:3], t.r[:3])], "fewer"), "holds 3 examples, but the posterior was fitted to 5")
with_data("loader", Of(lambda t: [(t.x.double(), t.r)], "double"), "torch.float64", named=False)
with_data("loader", Of(lambda t: [(t.x, t.y)], "classes"), "Gaussian needs floating-point targets", named=False)
with_data("processes", 2, "must be Processes(rank, size), got 2", loader=Of(lambda t: t.real_batches, "data"))

variational = Table(
    "GaussianPosterior",
    lambda t, method, **given: getattr(_bare(t), method)(**given),
    ["method"],
    named=False,
    error=PosteriorError,
)


def _bare(t: Things) -> GaussianPosterior:
    p = t.diagonal
    return GaussianPosterior(p.network, p.subset, p.likelihood, p.mean, p.precision, p.n_data, p.fingerprint)


variational("method", "tune_prior", "does not store curvature and prior separately, so it has no prior to tune")
variational("method", "with_prior", "has no prior to change", prior_precision=1.0)
variational("method", "log_marginal_likelihood", "has no evidence", "fit_laplace")

# -- evaluation ------------------------------------------------------------------------------------------------------

scores = Table(
    "evaluate", lambda t, **given: evaluate(**{"predictor": t.classifier, "loader": t.batches, **given}), evaluate
)
scores(
    "predictor",
    Of(lambda t: t.net(), "Sequential"),
    "must be a posterior or a predictor such as a DeepEnsemble",
    "Sequential",
)
scores("predictor", None, "must be a posterior or a predictor such as a DeepEnsemble", "got None")
scores("loader", None, "must be an iterable of (x, y) batches")
_loaders(scores, "the loader is empty")
scores("ood_loaders", 3, "must be a list of loaders, got 3")
scores("ood_loaders", Of(lambda t: t.x, "tensor"), "must be a list of loaders, got a Tensor")
scores("ood_loaders", Of(lambda t: [[t.x], []], "an empty one"), "ood_loaders[1] is empty")
scores("ood_loaders", [3], "must be an iterable of batches", "got 3")
scores("ood_loaders", Of(lambda t: [[t.x.double()]], "double"), "torch.float64", named=False)
_scoring(scores)
for _table in (grids, autos, calibration, scores):
    _table("predictive", GLM(link="logit"), "link='logit'; choose one of ", named="link")

# -- ensembles -------------------------------------------------------------------------------------------------------


def _ensemble(t: Things, **given: Any) -> Any:
    return DeepEnsemble(**{"posteriors": [t.classifier, t.diagonal], **given})


ensemble = Table("DeepEnsemble", _ensemble, DeepEnsemble, error=(PosteriorError, TypeError))
ensemble("posteriors", [], "an ensemble needs at least one posterior, got none", named=False)
ensemble("posteriors", None, "must be a list of posteriors, got None")
ensemble("posteriors", 3, "must be a list of posteriors, got 3")
ensemble("posteriors", Of(lambda t: t.classifier, "one"), "must be a list of posteriors, got LaplacePosterior")
ensemble("posteriors", Of(lambda t: [t.classifier, t.net()], "network"), "member 1 is a Sequential", named=False)
ensemble("posteriors", Of(lambda t: [t.classifier, t.regressor], "mixed"), "one kind of likelihood", named=False)
ensemble("member_weights", [1.0], "there are 2 members, but member_weights of shape [1]")
ensemble("member_weights", 1.0, "there are 2 members, but member_weights of shape []")
ensemble("member_weights", [1.0, -1.0], "must be finite, not negative, and not all zero")
ensemble("member_weights", [0.0, 0.0], "must be finite, not negative, and not all zero")
ensemble("member_weights", [1.0, math.nan], "must be finite, not negative, and not all zero")
ensemble("member_weights", "equal", "must be a number for each member, got 'equal'")
ensemble("member_weights", ["a", "b"], "must be a number for each member, got ['a', 'b']")

mixture = Table(
    "DeepEnsemble.predict", lambda t, **given: _ensemble(t).predict(**{"x": t.x, **given}), DeepEnsemble.predict
)
_drawing(mixture)
words(mixture, "predictive")
mappings(mixture, "predictive", "glm", "samples")
mixture("predictive", GLM(link="logit"), "choose one of 'probit', 'pairwise'", named="link")
_inputs(mixture)
mixture_density = Table(
    "DeepEnsemble.log_prob",
    lambda t, **given: DeepEnsemble([t.regressor]).log_prob(**{"x": t.x, "y": t.r, **given}),
    DeepEnsemble.log_prob,
)
_of_classes = Table("density of classes", lambda t, y: _ensemble(t).log_prob(t.x, y), ["y"], named=False)
_of_classes("y", Of(lambda t: t.y, "classes"), "density of real targets; for classes take the log of predict(x).probs")
mixture_density("y", None, "must be a tensor of targets, got None")
mixture_density("y", Of(lambda t: t.r[:, :1], "[5, 1]"), "need real targets of shape [5, 2]", named=False)
mixture_density("x", Of(lambda t: t.x.double(), "double"), "torch.float64", named=False)
_drawing(mixture_density)
words(mixture_density, "predictive")
mappings(mixture_density, "predictive", "glm", "samples")
mixture_density("predictive", GLM(link="logit"), "choose one of", named="link")

copies = Table(
    "DeepEnsemble.from_samples",
    lambda t, **given: DeepEnsemble.from_samples(**{"posterior": t.classifier, "loader": t.batches, **given}),
    DeepEnsemble.from_samples,
)
copies("posterior", Of(lambda t: t.net(), "network"), "must be a posterior, got Sequential")
copies("loader", None, "must be an iterable of (x, y) batches")
copies("loader", Of(lambda t: iter(t.batches), "iterator"), "the loader is an iterator: pass a DataLoader")
_drawing(copies, "samples")

# -- views and dropout -----------------------------------------------------------------------------------------------


def _same(x: Any) -> Any:
    return x


def _views(t: Things, **given: Any) -> Any:
    return Augmented(**{"predictor": t.classifier, "views": [_same], **given})


augmented = Table("Augmented", _views, Augmented)
augmented("predictor", Of(lambda t: t.net(), "network"), "must be a posterior or a predictor such as", "Sequential")
augmented("views", [], "is an empty list: give at least one function")
augmented("views", _same, "must be a list of functions x → x, got")
augmented("views", [_same, 3], "must be functions x → x, but views[1] is 3")
viewed = Table("Augmented.predict", lambda t, **given: _views(t).predict(**{"x": t.x, **given}), Augmented.predict)
_drawing(viewed)
words(viewed, "predictive")
mappings(viewed, "predictive", "glm", "samples")
_inputs(viewed)


def _with_dropout(t: Things) -> Any:
    return t.watch(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 3)))


def _dropout(t: Things, **given: Any) -> Any:
    return mc_dropout(**{"network": _with_dropout(t), **given})


masked = Table("mc_dropout", _dropout, mc_dropout)
masked("network", 3, "must be an nn.Module that maps x to f, got 3")
masked("network", Of(lambda t: t.net(), "without"), "has no dropout layer with p > 0", named=False)
masked("likelihood", "poisson", "likelihood='poisson' is not known")
counts(masked, "samples")
masked("output", 2.5, "output must be a key, an attribute's name or an index, got 2.5")
_calibrating = Table(
    "MCDropout.calibrate",
    lambda t, **given: _dropout(t).calibrate(**{"loader": t.batches, **given}),
    MCDropout.calibrate,
)
_calibrating("loader", None, "must be an iterable of (x, y) batches")
_calibrating("of", "logits", "unknown of 'logits': use one of 'outputs', 'probs'")
_calibrating("seed", -1, "must be a whole number of at least 0, got -1")
_masked_sets = Table(
    "MCDropout.conformalize",
    lambda t, **given: _dropout(t).conformalize(**{"loader": t.batches, "level": 0.5, **given}),
    MCDropout.conformalize,
)
_masked_sets("loader", None, "must be an iterable of (x, y) batches")
_masked_sets("level", 90, "must be strictly between 0 and 1, got 90")
_masked_sets("method", "top_k", "unknown method 'top_k': use one of 'aps', 'raps', 'lac'")
by_masks = Table("MCDropout.predict", lambda t, **given: _dropout(t).predict(**{"x": t.x, **given}), MCDropout.predict)
_drawing(by_masks)
words(by_masks, "predictive")
by_masks("predictive", "glm", "has no covariance of the weights for predictive='glm': use 'dropout' or 'map'")
_inputs(by_masks)
_of_network = Table(
    "MCDropout", lambda t, **given: MCDropout(**{"posterior": _dropout(t).posterior, **given}), MCDropout
)
_of_network("posterior", 3, "must be a posterior, got 3")
_of_network("option", "glm", "must be a Dropout, got 'glm'")

# -- autoencoders ----------------------------------------------------------------------------------------------------

AUTOENCODING = []
for _name in ("encode", "reconstruct"):
    _table = Table(
        _name,
        lambda t, name=_name, **given: getattr(t.autoencoder, name)(**{"x": t.x, **given}),
        getattr(GaussianPosterior, _name),
    )
    _drawing(_table, "samples")
    flags(_table, "keep_samples")
    _inputs(_table)
    AUTOENCODING.append(_table)
decoding = Table(
    "decode",
    lambda t, **given: decode(t.autoencoder, **{"z": t.x[:, :2], **given}),
    [name for name in signature(decode).parameters if name != "posterior"],
)
_drawing(decoding, "samples")
flags(decoding, "keep_samples")
decoding("z", "abc", "must contain a tensor with a batch dimension", named=False)
decoding("z", Of(lambda t: t.x, "[5, 3]"), "Sequential cannot be run on an input of shape [5, 3]", named=False)
parts = Table("parts of an autoencoder", lambda t, posterior: posterior.encode(t.x), ["posterior"], named=False)
parts("posterior", Of(lambda t: t.classifier, "Sequential"), "has no submodule 'encoder'", "`decoder`")

USING = [
    *(predict, gradients_off, moved, functional, sample, sample_function, drawn),
    *(on_device, density, with_prior, evidence, with_noise, classes),
    *(update, not_growing, penalty, refinement),
    *(tune, iterating, _damped, grids, autos, calibration, with_data, variational),
    *(scores, ensemble, mixture, mixture_density, _of_classes, copies),
    *(augmented, viewed, masked, _calibrating, _masked_sets, by_masks, _of_network),
    *(*AUTOENCODING, decoding, parts),
]
