"""The callbacks' arguments: all are checked when a callback is made, before hours of training."""

import math

import torch
from torch.utils.data import TensorDataset

from bad_calls.cases import OUTPUT, Of, Table
from lightning_bayes import (
    Gaussian,
    HeteroscedasticGaussian,
    L2MCallback,
    LaplaceCallback,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    Subnetwork,
    SWAGCallback,
)
from lightning_bayes.network import SubsetError

POSITIVE = "must be a positive, finite number"
COUNT = "must be a whole number of at least 1"
FLAG = "must be True or False"

laplace = Table("LaplaceCallback", lambda t, **given: LaplaceCallback(**given), LaplaceCallback)
l2m = Table("L2MCallback", lambda t, **given: L2MCallback(**given), L2MCallback)
online = Table("OnlineLaplaceCallback", lambda t, **given: OnlineLaplaceCallback(**given), OnlineLaplaceCallback)
marginal = Table(
    "MarginalLikelihoodCallback", lambda t, **given: MarginalLikelihoodCallback(**given), MarginalLikelihoodCallback
)
swag = Table("SWAGCallback", lambda t, **given: SWAGCallback(**given), SWAGCallback)
subnetwork = Table("Subnetwork", lambda t, **given: Subnetwork(**{"n": 3, **given}), Subnetwork)
CALLBACKS = [laplace, l2m, online, marginal, swag, subnetwork]


def counts(table: Table, *arguments: str) -> None:
    for argument in arguments:
        table(argument, 0, f"{COUNT}, got 0")
        table(argument, -3, f"{COUNT}, got -3")
        table(argument, 2.5, f"{COUNT}, got 2.5")
        table(argument, "ten", f"{COUNT}, got 'ten'")
        table(argument, True, f"{COUNT}, got True")


def positives(table: Table, *arguments: str) -> None:
    for argument in arguments:
        for bad in (0.0, -1.0, math.nan, math.inf, "one", True):
            table(argument, bad, f"{POSITIVE}, got {bad!r}")


def flags(table: Table, *arguments: str) -> None:
    for argument in arguments:
        table(argument, "no", f"{FLAG}, got 'no'")
        table(argument, None, f"{FLAG}, got None")


def words(table: Table, *arguments: str) -> None:
    for argument in arguments:
        table(argument, "kfca", f"unknown {argument} 'kfca': use one of ")
        table(argument, 3, f"unknown {argument} 3: use one of ")


def common(table: Table) -> None:
    """What all callbacks have."""
    table("likelihood", "softmax", "'softmax'", "use one of 'classification', 'binary', 'regression'")
    table("likelihood", None, "None", "use one of 'classification'")
    table("likelihood", Gaussian, "use one of 'classification'")
    words(table, "predictive")
    table("predictive", None, "unknown predictive None: use one of 'glm'")
    table("predictive", "gp", "needs training points: use LaplaceCallback with gp_points=M, or None for all")
    table("link", "logit", "'logit'", "choose one of", "'probit'")
    table("link", 3, "link=3", "choose one of", "'probit'")
    table("link", "bridge", "Bernoulli", "choose one of 'probit', 'pairwise', 'mc'", likelihood="binary")
    flags(table, "ood", "plots")
    table("seed", -1, "must be a whole number of at least 0, got -1")
    table("seed", 1.5, "must be a whole number of at least 0, got 1.5")
    table("seed", None, "must be a whole number of at least 0, got None")
    table("seed", 2**64, "must be less than 2**63")
    table("network", "", "must be the dotted name of a submodule")
    for row in OUTPUT:
        table(*row)
    table("network", torch.nn.Linear(1, 1), "must be the dotted name of a submodule", "got Linear")
    table("name", "", "must be a word", "got ''")
    table("name", "map", "'map' is the name of the plain network's own scores")
    table("name", "a/b", "must not hold a slash, got 'a/b'")
    table("name", "a\\b", "must not hold a slash")
    table("name", None, "must be a word", "got None")
    table("name", 3, "must be a word", "got 3")
    words(table, "predict_step")
    table("predict_step", None, "unknown predict_step None: use one of 'replace', 'keep', 'both'")
    for bad in (3, 0, "", " ", ["a.pt"]):
        table("save", bad, "must be True, False, None, or the path of a file or folder, got")


def subsets(table: Table) -> None:
    table("subset", [], "the list of names in subset is empty: name at least one parameter or module")
    table("subset", "last-layer", "unknown subset 'last-layer': use 'all', 'last_layer'")
    table("subset", 3, "unknown subset 3: use 'all', 'last_layer'")
    table("subset", None, "unknown subset None: use 'all', 'last_layer'")
    table("subset", ["net.0", 3], "the names in subset must be strings, got 3")


def priors(table: Table) -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        table("prior_precision", bad, f"must be positive and finite, got {bad:g}")
    table("prior_precision", "weak", "must be a number or a vector of numbers, got 'weak'")
    table("prior_precision", True, "must be a number or a vector of numbers, got True")
    table("prior_precision", [1.0, -1.0], "must be positive and finite, got -1")
    table("prior_precision", [], "must be a number or a vector of numbers, got []")
    table("prior_precision", [[1.0]], "must be a number or a vector of numbers, got [[1.0]]")
    table("prior_precision", ["he"], "must be a number or a vector of numbers, got ['he']")
    table("prior_precision", {"net": 1.0}, "must be a number or a vector of numbers, got {'net': 1.0}")


def prior_means(table: Table) -> None:
    table("prior_mean", 3, "must be a flat tensor of weights or a state dict, got 3")
    table("prior_mean", torch.ones(2, 3), "must be a vector of weights [P], got a Tensor of shape [2, 3]")
    table("prior_mean", torch.tensor([1, 2]), "must be a vector of weights [P]")
    table("prior_mean", torch.tensor([math.nan]), "has NaN or infinite weights in the vector")
    table("prior_mean", {"fingerprint": torch.ones(2)}, "is a posterior's file: pass it as prior=")
    table("prior_mean", {"0.weight": 3.0}, "must hold tensors, got 3.0 for '0.weight'")


def other_priors(table: Table) -> None:
    posterior = Of(lambda t: t.classifier, "posterior")
    table("prior", 3, "must be a posterior, as fit_laplace returns one, got 3")
    table("prior", posterior, "leave prior_mean= out", prior_mean=torch.ones(31))
    table("prior", posterior, "has structure='kron'", "structure='diag'", structure="diag")
    table("prior", posterior, "gp_points= belongs to a prior with independent weights", gp_points=3)
    table("prior", posterior, "damping='glm' is for one prior precision", damping="glm")
    table("prior", posterior, "one factor on its precision: pass one number", prior_precision=[1.0, 2.0])


def loaders(table: Table) -> None:
    table("data", "", "must be a loader, or the name of a method that returns one, got ''")
    table("data", 3, "must be an iterable of batches", "got 3")
    table("data", TensorDataset(torch.ones(2, 1), torch.ones(2)), "is a TensorDataset", "DataLoader(dataset")
    table("data", torch.ones(2), "must be an iterable of batches", "got a Tensor")


common(laplace)
words(laplace, "structure", "curvature", "tune", "calibrate", "weights", "weight_sharing", "damping", "hessian")
laplace("hessian", "approx", "needs structure='diag' and curvature='ggn', got structure='kron'")
words(laplace, "gp_selection", "gp_weighting", "gp_outputs")
for _bad in (-1, 2.5, "all"):
    laplace("gp_points", _bad, f"must be a whole number of at least 0, got {_bad!r}")
subsets(laplace)
priors(laplace)
positives(laplace, "temperature")
prior_means(laplace)
other_priors(laplace)
_kron = Of(lambda t: t.classifier, "posterior")
laplace("updatable", True, "is for structure='full', 'diag', 'kron'", "'ekfac' takes several", structure="ekfac")
laplace("prior", _kron, "one factor on its precision: leave out per_layer=True", per_layer=True, tune="marglik")
for _tune in ("mackay", "linear"):
    laplace("prior", _kron, f"tune='{_tune}'", "structure='kron' adds factors", tune=_tune, named=False)
counts(laplace, "samples", "mc_samples", "max_batches", "rank")
flags(laplace, "per_layer", "iterate", "progress", "updatable")
laplace("rank", 5, "rank=5 belongs to structure='lowrank' or 'kron', got structure='ekfac'", structure="ekfac")
laplace("tune", "linear", "structure='lowrank' leaves some out: use tune='auto'", structure="lowrank")
words(laplace, "prior_groups")
laplace("prior_groups", "normalised", "tune='auto' tunes one prior for all layers: use tune='marglik' with")
laplace("prior_groups", "normalised", "per_layer=True is prior_groups='layers'", per_layer=True, tune="marglik")
laplace("prior_groups", "layers", "takes one prior precision for all layers", damping="glm", tune="marglik")
laplace("iterate", True, "belongs to tune='linear', got tune='auto'")
laplace(
    "iterate",
    True,
    "HeteroscedasticGaussian",
    "use tune='marglik'",
    tune="linear",
    likelihood=HeteroscedasticGaussian(),
)
for _bad in (1, 0, 2.5, "ten", True):
    laplace("passes", _bad, f"must be a whole number of at least 2, got {_bad!r}")
laplace("prior_precision", None, "must be a number or a vector of numbers, got None")
for _tune in ("auto", "grid"):
    laplace("per_layer", True, f"tune='{_tune}' tunes one prior for all layers: use tune='marglik' with", tune=_tune)
laplace("weights", None, "unknown weights None: use one of 'both', 'last', 'best'")
laplace("calibrate", True, "unknown calibrate True: use one of 'auto', 'outputs', 'probs', None")
loaders(laplace)
laplace("damping", "glm", "needs structure='kron', got structure='full'", subset=Subnetwork(3))
laplace("hessian", "approx", "needs structure='diag'", "got structure='full'", subset=Subnetwork(3))
laplace("damping", "glm", "needs structure='kron', got structure='diag'", structure="diag")
laplace(
    "data",
    iter([1]),
    "structure='ekfac' takes several passes over the data",
    "iterator",
    structure="ekfac",
    named=False,
)
laplace("structure", "ekfac", "no EKFAC form", subset=Subnetwork(3), error=SubsetError)
for _tune in ("mackay", "linear"):
    laplace("damping", "glm", f"tune='{_tune}'", "leave damping= out, or use tune='marglik'", tune=_tune)
laplace("damping", "ritter", "takes one prior precision for all layers", "per_layer", per_layer=True, tune="marglik")
laplace("damping", "ritter", "takes one prior precision for all layers", prior_precision=[1.0, 2.0])

common(l2m)
words(l2m, "scaling", "tune", "calibrate")
l2m("tune", "linear", "unknown tune 'linear': use one of None, 'auto', 'marglik', 'mackay', 'grid'")
priors(l2m)
prior_means(l2m)
positives(l2m, "loss_scale")
counts(l2m, "samples", "n_data")
flags(l2m, "per_layer")
for _tune in ("auto", "grid"):
    l2m("per_layer", True, f"tune='{_tune}' tunes one prior for all layers", tune=_tune)

common(online)
words(online, "hessian", "at", "scaling", "calibrate")
subsets(online)
positives(online, "prior_precision", "scale", "max_std")
counts(online, "samples", "predictive_samples", "n_data")
flags(online, "average", "same_sample")
for _bad in (-0.1, 1.1, math.inf):
    online("memory_factor", _bad, f"must be between 0 and 1, got {_bad}")
for _argument in ("memory_factor", "threshold"):
    online(_argument, "half", "must be a number, got 'half'")
    online(_argument, math.nan, "must be a number, got nan")
    online(_argument, True, "must be a number, got True")
for _bad in (-1.0, math.inf, "half"):
    online("initial_curvature", _bad, f"must be a finite number of at least 0, got {_bad!r}")
online("threshold", -1, "must be between 0 and inf, got -1")

common(marginal)
marginal("structure", "lowrank", "leaves curvature out", "use 'kron', 'ekfac', 'diag' or 'full'")
words(marginal, "structure", "curvature", "calibrate", "weight_sharing", "hessian", "mode", "evidence", "keep")
marginal("hessian", "approx", "needs structure='diag' and curvature='ggn', got structure='kron'")
subsets(marginal)
priors(marginal)
positives(marginal, "lr", "loss_scale")
counts(marginal, "samples", "mc_samples", "every_n_epochs", "steps", "n_data")
flags(marginal, "noise", "progress")
for _bad in (-1, 0.5, "two", True, None):
    marginal("burn_in_epochs", _bad, f"must be a whole number of at least 0, got {_bad!r}")
marginal("data", "", "must be a loader, or the name of a method that returns one, got ''")
marginal("data", 3, "must be an iterable of batches", "got 3")
prior_means(marginal)
marginal("subset", Subnetwork(3), "must name whole layers or parameters, to have a prior in training")
marginal("mode", "mackay", "is the fixed point of evidence='marglik': use mode='gradient'", evidence="linear")
common(swag)
words(swag, "calibrate")
loaders(swag)
counts(swag, "samples", "every_n_epochs", "every_n_steps", "max_batches")
flags(swag, "progress")
for _bad in (-1, -0.5, 1.0, 2.5, math.nan, math.inf, "late", None, True):
    swag("start", _bad, f"must be an epoch, or a share of the training below 1, got {_bad!r}")

counts(subnetwork, "n")
for _bad in ("variance", "laplace", None, 3, True, ["swag"], torch.nn.Linear(1, 1)):
    subnetwork("by", _bad, "unknown by ", "'laplace_diag'", "'swag'", "or a fitted posterior")
for _bad in (-1, 1.5, None):
    subnetwork("seed", _bad, f"must be a whole number of at least 0, got {_bad}")
subnetwork("seed", 2**64, "must be less than 2**63")
