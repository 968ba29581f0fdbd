"""The callbacks' arguments: all are checked when a callback is made, before hours of training."""

import math
from inspect import signature
from typing import Any

import torch
from torch.utils.data import TensorDataset

from bad_calls.cases import Of, Table
from lightning_bayes import (
    GLM,
    GP,
    IVON,
    Diag,
    Gaussian,
    HeteroscedasticGaussian,
    IVONCallback,
    Kron,
    L2MCallback,
    LaplaceCallback,
    MarginalLikelihoodCallback,
    OnlineLaplaceCallback,
    Prior,
    Subnetwork,
    SWAGCallback,
    Tuning,
)
from lightning_bayes.network import SubsetError
from lightning_bayes.trainer import PosteriorCallback

POSITIVE = "must be a positive, finite number"
COUNT = "must be a whole number of at least 1"
FLAG = "must be True or False"


def _of(kind: Any) -> Table:
    names = [*signature(kind).parameters, *signature(PosteriorCallback).parameters]
    return Table(kind.__name__, lambda t, **given: kind(**given), [name for name in names if name != "use"])


laplace, l2m, online = _of(LaplaceCallback), _of(L2MCallback), _of(OnlineLaplaceCallback)
marginal, swag, ivon = _of(MarginalLikelihoodCallback), _of(SWAGCallback), _of(IVONCallback)
optimizer = Table("IVON", lambda t, **given: IVON(**{"params": torch.nn.Linear(1, 1).parameters(), **given}), IVON)
subnetwork = Table("Subnetwork", lambda t, **given: Subnetwork(**{"n": 3, **given}), Subnetwork)
CALLBACKS = [laplace, l2m, online, marginal, swag, ivon, optimizer, subnetwork]


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
    shared(table)
    table("likelihood", None, "None", "use one of 'classification'")
    table("likelihood", Gaussian, "use one of 'classification'")
    bridge = GLM(link="bridge")
    table("predictive", bridge, "choose one of 'probit', 'pairwise', 'mc'", likelihood="binary", named="link")
    words(table, "calibrate")
    table("calibrate", True, "unknown calibrate True: use one of 'auto', 'outputs', 'probs', None")
    flags(table, "progress")
    table("seed", 2**64, "must be less than 2**63")
    table("network", torch.nn.Linear(1, 1), "must be the dotted name of a submodule", "got Linear")
    for bad in (3, 0, "", " ", ["a.pt"]):
        table("save", bad, "must be True, False, None, or the path of a file or folder, got")


def shared(table: Table) -> None:
    """What variational modules also have."""
    table("likelihood", "softmax", "'softmax'", "use one of 'classification', 'binary', 'regression'")
    words(table, "predictive", "predict_step")
    mappings(table, "predictive", "glm", "samples")
    table("predictive", GLM(link="logit"), "'logit'", "choose one of", "'probit'", named="link")
    table("predict_step", None, "unknown predict_step None: use one of 'replace', 'keep', 'both'")
    flags(table, "ood", "plots")
    for seed in (-1, 1.5, None):
        table("seed", seed, f"must be a whole number of at least 0, got {seed}")
    table("network", "", "must be the dotted name of a submodule")
    table("network", {"output": 2.5}, "must be a key, an attribute's name or an index, got 2.5", named="output")
    table("network", {"class_dim": 0}, "class_dim=0 is the batch dimension", named="class_dim")
    table("network", {"ouput": 1}, "network has no argument 'ouput'")
    for name in ("", None, 3):
        table("name", name, "must be a word", f"got {name!r}")
    table("name", "map", "'map' is reserved for the scores of the plain network")
    for name in ("a/b", "a\\b"):
        table("name", name, "must not contain a slash")


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
    vector = "the prior's mean must be a vector of weights [P]"
    for bad, message in (
        (3, "must be a flat tensor of weights or a state dict, got 3"),
        (torch.ones(2, 3), f"{vector}, got a Tensor of shape [2, 3]"),
        (torch.tensor([1, 2]), vector),
        (torch.tensor([math.nan]), "has NaN or infinite weights in the vector"),
        ({"fingerprint": torch.ones(2)}, "is a posterior's file: pass prior=file"),
        ({"0.weight": 3.0}, "must contain tensors, got 3.0 for '0.weight'"),
    ):
        table("prior", Prior(mean=bad), message)
        table("prior", {"mean": bad}, message)
    table("prior", {"temperature": 0.0}, f"temperature {POSITIVE}, got 0.0", named="temperature")
    table("prior", {"men": 3}, "prior has no argument 'men'", error=TypeError)


def other_priors(table: Table) -> None:
    posterior = Of(lambda t: t.classifier, "posterior")
    table("prior", 3, "must be a posterior, such as one from fit_laplace, got 3")
    table("prior", posterior, "has structure='kron'", "structure='diag'", structure="diag")
    table("prior", posterior, "damping='glm' needs a plain prior precision", structure=Kron(damping="glm"))
    table("prior", posterior, "a factor on that posterior's precision: pass one number", prior_precision=[1.0, 2.0])


def structures(table: Table) -> None:
    words(table, "structure", "curvature")
    table("structure", None, "unknown structure None: use one of")
    mappings(table, "structure", "kron", "rank")
    table("structure", Kron, "unknown structure the class Kron: use one of")
    for method in ("approx", "mixed", "auto"):
        option, needs = Diag(method), "is a diagonal of the GGN and needs curvature='ggn', got curvature="
        table("curvature", "fisher_mc", f"method='{method}'", f"{needs}'fisher_mc'", structure=option)
        table("curvature", "empirical_fisher", f"{needs}'empirical_fisher'", structure=option)


def mappings(table: Table, argument: str, kind: str, field: str) -> None:
    """An option as a dictionary of plain values."""
    table(argument, {"kind": "kfca"}, f"unknown kind of {argument} 'kfca': use one of ")
    table(argument, {field: 3}, f"unknown kind of {argument} None: use one of ")
    table(argument, {"kind": kind, "sizes": 3}, f"{argument} has no argument 'sizes': use any of ", error=TypeError)
    table(argument, {"kind": kind, field: 0}, f"{field} {COUNT}, got 0", named=field)


def loaders(table: Table) -> None:
    table("data", "", "must be a loader, or the name of a method that returns one, got ''")
    table("data", 3, "must be an iterable of batches", "got 3")
    table("data", TensorDataset(torch.ones(2, 1), torch.ones(2)), "is a TensorDataset", "DataLoader(dataset")
    table("data", torch.ones(2), "must be an iterable of batches", "got a Tensor")
    table("data", {"loader": 3}, "must be an iterable of batches", "got 3")
    table("data", {"max_batches": 0}, f"max_batches {COUNT}, got 0", named="max_batches")


common(laplace)
structures(laplace)
words(laplace, "tune", "weights")
subsets(laplace)
priors(laplace)
prior_means(laplace)
other_priors(laplace)
_kron = Of(lambda t: t.classifier, "posterior")
laplace("prior", _kron, "gp= needs a prior with independent weights", predictive="gp")
laplace("prior", _kron, "has one factor on its precision", "leave out groups=", tune=Tuning("marglik", groups="layers"))
for _tune in ("mackay", "linear"):
    laplace("prior", _kron, f"tune='{_tune}'", "structure='kron' adds factors", tune=_tune)
laplace("tune", "linear", "structure='lowrank' leaves some out: use tune='auto'", structure="lowrank")
laplace("tune", {"methode": "grid"}, "tune has no argument 'methode'", error=TypeError)
laplace("tune", {"method": "grid", "size": 1}, "must be a whole number of at least 2, got 1", named="size")
for _groups in ("layers", "normalised"):
    _tuning = Tuning("marglik", groups=_groups)
    _damped = Kron(damping="glm")
    laplace("tune", _tuning, "needs one prior precision for all layers", structure=_damped, named="damping")
_linear, _heteroscedastic = Tuning("linear", iterate=True), HeteroscedasticGaussian()
laplace("tune", _linear, "HeteroscedasticGaussian", "use tune='marglik'", likelihood=_heteroscedastic)
laplace("prior_precision", None, "must be a number or a vector of numbers, got None")
laplace("weights", None, "unknown weights None: use one of 'both', 'last', 'best'")
loaders(laplace)
laplace("data", iter([1]), "structure='ekfac' takes several passes", "iterator", structure="ekfac", named=False)
laplace("structure", "ekfac", "no EKFAC form", subset=Subnetwork(3), error=SubsetError, named=False)
for _tune in ("mackay", "linear"):
    for _damping in ("glm", "ritter"):
        _option = Kron(damping=_damping)
        laplace("structure", _option, f"tune='{_tune}'", f"damping='{_damping}' changes it", tune=_tune)
        laplace("structure", _option, "needs one prior precision", prior_precision=[1.0, 2.0], named="damping")

common(l2m)
words(l2m, "scaling", "tune")
l2m("predictive", GP(), "keeps no training points for predictive='gp': use LaplaceCallback")
l2m("tune", "linear", "needs the gradient of the training loss, which L2M does not have: use 'marglik'")
priors(l2m)
prior_means(l2m)
positives(l2m, "loss_scale")
counts(l2m, "n_data")

common(online)
online("predictive", "gp", "keeps no training points for predictive='gp': use LaplaceCallback")
words(online, "hessian")
subsets(online)
positives(online, "prior_precision", "max_std")
counts(online, "train_samples", "n_data")
flags(online, "same_sample")
for _bad in (-0.1, 1.1, math.inf):
    online("memory_factor", _bad, f"must be between 0 and 1, got {_bad}")
online("memory_factor", "half", "must be a number, got 'half'")
online("memory_factor", math.nan, "must be a number, got nan")
online("memory_factor", True, "must be a number, got True")
online("memory", 0.5, "must be a Memory(…) or None, got 0.5", error=TypeError)
online("memory", {"scal": 0.5}, "memory has no argument 'scal'", error=TypeError)
online("memory", {"scale": 0.0}, f"scale {POSITIVE}, got 0.0", named="scale")

common(marginal)
structures(marginal)
marginal("structure", "lowrank", "omits curvature", "use 'kron', 'ekfac', 'diag' or 'full'")
words(marginal, "evidence")
marginal("evidence", {"method": "kfca"}, "unknown method 'kfca': use one of ", named="method")
marginal("evidence", {"lrr": 0.1}, "evidence has no argument 'lrr'", error=TypeError)
subsets(marginal)
priors(marginal)
counts(marginal, "every_n_epochs")
for _bad in (-1, 0.5, "two", True, None):
    marginal("burn_in_epochs", _bad, f"must be a whole number of at least 0, got {_bad!r}")
loaders(marginal)
prior_means(marginal)
marginal("prior", _kron, "is a posterior, and its strength cannot be learned per layer: use Prior(mean=…)")
marginal("subset", Subnetwork(3), "must name whole layers or parameters, to get a prior in training")
common(swag)
swag("predictive", "gp", "keeps no training points for predictive='gp': use LaplaceCallback")
loaders(swag)
counts(swag, "every_n_epochs", "every_n_steps")
for _bad in (-1, 0.5, "all", True, None):
    swag("rank", _bad, f"must be a whole number of at least 0, got {_bad!r}")
swag("rank", 1, "rank=1 is too small: one deviation has no covariance; use 0, or 2 or more")
for _bad in (0.0, -1.0, math.inf, "wide", None, True):
    swag("scale", _bad, f"{POSITIVE}, got {_bad!r}")
for _bad in (-1, -0.5, 1.0, 2.5, math.nan, math.inf, "late", None, True):
    swag("start", _bad, f"must be an epoch, or a fraction of the training below 1, got {_bad!r}")

common(ivon)
ivon("predictive", "gp", "keeps no training points for predictive='gp': use LaplaceCallback")
counts(ivon, "train_samples")

counts(optimizer, "n_data")
positives(optimizer, "hess_init", "clip_radius", "temperature")
for _argument in ("lr", "weight_decay"):
    for _bad in (-0.1, math.nan, math.inf, "small", True):
        optimizer(_argument, _bad, f"must be a finite number of at least 0, got {_bad!r}")
for _betas in ((0.9, 1.1), (-0.1, 0.9)):
    optimizer("betas", _betas, "must be between 0 and 1, got ")
optimizer("betas", (1.0, 0.9), "betas[0] must be less than 1")
optimizer("betas", 0.9, "must be two numbers (β₁, β₂), got 0.9")
for _bad in (-1, 0.5, "one", None, 2**63):
    optimizer("seed", _bad, "seed must be ")
optimizer.anything_goes("params", "torch.optim.Optimizer checks them")

counts(subnetwork, "n")
for _bad in ("variance", "laplace", "swag", "l2m", None, 3, True, ["swag"], torch.nn.Linear(1, 1)):
    subnetwork("by", _bad, "unknown by ", "'laplace_diag'", "'magnitude'", "or a fitted posterior")
for _bad in (-1, 1.5, None):
    subnetwork("seed", _bad, f"must be a whole number of at least 0, got {_bad}")
subnetwork("seed", 2**64, "must be less than 2**63")
