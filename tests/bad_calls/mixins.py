"""The options of variational modules, the multiplier, and the functions beside them."""

import math
from dataclasses import fields

import lightning as L
import torch
from torch import nn

from bad_calls.callbacks import FLAG, POSITIVE, counts, shared, words
from bad_calls.cases import LitNet as Lit
from bad_calls.cases import Of, Table
from lightning_bayes import (
    LogSigmaMultiplierMixin,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    VariationalLastLayerMixin,
)
from lightning_bayes.mixins import VariationalOptions, replace_activations, warn_piecewise_linear
from lightning_bayes.mixins.variational import CURVATURE, LAST_LAYER, SAMPLING


class VL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Lit):
    pass


class VI(LogSigmaMultiplierMixin, VariationalInferenceMixin, Lit):
    pass


class LastLayer(VariationalLastLayerMixin, Lit):
    pass


def _options(kind: type, unused: tuple[str, ...]) -> Table:
    table = Table(
        f"{kind.__name__}(variational)",
        lambda t, **given: kind(variational=given),
        [f.name for f in fields(VariationalOptions) if f.name not in ("save", "calibrate", "progress", *unused)],
    )
    shared(table)
    table("likelihood", {"name": "Poisson"}, "'Poisson' cannot be loaded from a file")
    for bad in (0.0, -1.0, math.nan, math.inf, "one", True, None):
        table("beta", bad, f"{POSITIVE}, got {bad!r}")
    for bad in (0.0, -1.0, math.nan, "hee", True, None):
        table("prior_std", bad, f"must be a positive number or one of 'he', 'weight_decay', got {bad!r}")
    table("prior_std", {"net.*.bias": 1.0}, "has no entry for", "net.2.weight", "add a pattern")
    table("prior_std", {"head": 1.0, "*": 1.0}, "no parameter matches the pattern 'head'")
    table("prior_std", {"*": -2.0}, "got -2.0")
    counts(table, "n_data")
    table("network", 3, "must be the dotted name of a submodule, got 3")
    table("network", "nett", "has no submodule 'nett'", "its submodules are: net")
    if "deterministic" not in unused:
        table("deterministic", ["nett"], "no parameter matches the pattern 'nett'")
        table("deterministic", ["*"], "every weight is deterministic")
        table("deterministic", 3, "must be a list of name patterns, got 3")
        table("deterministic", [3], "must be a list of name patterns, got [3]")
    words(table, "loss")
    table("predictive", "gp", "keeps no training points for predictive='gp': use LaplaceCallback")
    return table


vl = _options(VL, (*SAMPLING, *LAST_LAYER))
vl("estimator", "ggn", "unknown estimator 'ggn': use one of 'fisher', 'empirical', 'hessian'")
vl("estimator", None, "unknown estimator None: use one of 'fisher'")
vl("estimator", "hessian", "has no finite-difference form: use method='exact'", method="finite_difference")
vl("estimator", "hessian", "has no finite-difference form: use method='exact'", method="two_passes")
vl("method", "fast", "unknown method 'fast': use one of 'auto', 'exact', 'finite_difference', 'two_passes'")
vl("train_samples", 2, "variational has no key 'train_samples': use 'name'")
vl("betta", 1.0, "variational has no key 'betta': use 'name'")

vi = _options(VI, (*CURVATURE, *LAST_LAYER))
counts(vi, "train_samples")
vi("local_reparameterization", "no", f"{FLAG}, got 'no'")
vi("estimator", "fisher", "variational has no key 'estimator'")
vi("curvature", "fisher", "variational has no key 'curvature'")

last_layer = _options(LastLayer, (*CURVATURE, *SAMPLING, "deterministic"))
words(last_layer, "covariance")
last_layer("learn_noise", "no", f"{FLAG}, got 'no'")
last_layer("deterministic", ["net.0"], "variational has no key 'deterministic'")

variational = Table("VariationalLaplaceMixin", lambda t, **given: VL(**given), ["variational"])
variational("variational", "classification", "must be a dictionary of options, got 'classification'")
variational("variational", ["beta"], "must be a dictionary of options, got ['beta']")
variational("variational", 3, "must be a dictionary of options, got 3")
for _bad in (0.0, -1.0, math.nan, math.inf, "ten", True, None, [10.0]):
    variational("log_sigma_multiplier", _bad, f"must be a positive, finite number, got {_bad!r}")
variational("log_sigma_multiplier", {"net.0": -1.0}, "of pattern 'net.0' must be a positive, finite number, got -1.0")
variational("log_sigma_multiplier", {"head": 1.0}, "no parameter matches the pattern 'head'")


class Empty(L.LightningModule):
    pass


class Lazy(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(3))


class Complex(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64))


class Own(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.log_sigma = nn.Parameter(torch.zeros(2))


modules = Table(
    "module", lambda t, module: type("Bayes", (VariationalLaplaceMixin, module), {})(), ["module"], named=False
)
modules("module", Empty, "Bayes has no trainable weights when the mixin looks for them: create the layers in")
modules("module", Lazy, "net.0.weight has no shape before the first batch")
modules("module", Complex, "Bayes has no trainable weights")
modules("module", Own, "already has an attribute log_sigma", "rename it")

vl_loss = Table("vl_loss", lambda t, **given: VL(variational={"n_data": 5}).vl_loss(**given), ["f", "y"], named=False)
_f = Of(lambda t: t.x * t.x.new_ones(3, requires_grad=True), "outputs")
vl_loss("f", 3, "f must be the network's outputs", y=Of(lambda t: t.y, "labels"))
vl_loss("f", Of(lambda t: t.x, "without a graph"), "does not depend on the weights", y=Of(lambda t: t.y, "labels"))
vl_loss("y", torch.zeros(5), "integer class indices", f=_f)
vl_loss("y", [0, 1, 2, 0, 1], "y must be a tensor of targets", f=_f)
vl_loss("y_sampled", [0, 1, 2, 0, 1], "y_sampled must be a tensor of targets", f=_f, y=Of(lambda t: t.y, "labels"))

replacing = Table(
    "replace_activations",
    lambda t, **given: replace_activations(**{"module": nn.Sequential(nn.ReLU()), **given}),
    replace_activations,
)
replacing("module", nn.ReLU, "must be an nn.Module")
replacing("module", "relu", "must be an nn.Module, got 'relu'")
replacing("replacement", nn.Softplus(), "must return a new nn.Module per call", "nn.Softplus")
replacing("replacement", "softplus", "must return a new nn.Module per call")
replacing("replacement", torch.tanh, "must return a new nn.Module per call")

warning = Table(
    "warn_piecewise_linear",
    lambda t, **given: warn_piecewise_linear(**{"module": t.net(), **given}),
    warn_piecewise_linear,
    named=False,
)
warning("module", "net", "module must be an nn.Module, got 'net'")
warning("example", torch.zeros(2, 7), "Sequential cannot be run on an input of shape [2, 7]")
warning("example", "abc", "must contain a tensor with a batch dimension")

MIXINS = [vl, vi, last_layer, variational, modules, vl_loss, replacing, warning]
