"""The likelihoods' own arguments, and outputs and targets that do not fit them."""

import math
from typing import Any

import torch
from torch import Tensor

from bad_calls.cases import Table
from lightning_bayes import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from lightning_bayes.likelihoods import Likelihood, LikelihoodError, resolve

gaussian = Table("Gaussian", lambda t, **given: Gaussian(**given), Gaussian, error=LikelihoodError)
for _bad in (0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, 0.0])):
    gaussian("noise_std", _bad, "Gaussian needs a positive, finite noise_std")
for _given in ("small", None, True, [], {}, torch.ones(2, 2), torch.ones(2, dtype=torch.complex64)):
    gaussian("noise_std", _given, "must be a number or a vector of numbers, got")

categorical = Table("Categorical", lambda t, **given: Categorical(**given), Categorical, error=LikelihoodError)
for _index in (None, 1.5, "pad", True):
    categorical("ignore_index", _index, f"must be a whole number, got {_index!r}")

word = Table("resolve", lambda t, **given: resolve(**given), resolve, error=LikelihoodError)
for _word in ("softmax", None, 3, Gaussian, "Classification", ["binary"]):
    word("likelihood", _word, "is not known; use one of 'classification', 'binary', 'regression'")

F, Y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])


def _check(t: Any, likelihood: Likelihood, f: Any = F, y: Any = Y) -> None:
    likelihood.check(f, y)


check = Table("Likelihood.check", _check, ["f", "y"], named=False, error=(LikelihoodError, TypeError))
R, B = torch.zeros(4, 3), torch.zeros(4, 2)
EACH: list[tuple[Likelihood, Tensor, Tensor]] = [
    (Categorical(), F, Y),
    (Bernoulli(), F, R),
    (Gaussian(), F, R),
    (HeteroscedasticGaussian(), torch.zeros(4, 4), B),
]
for _likelihood, _f, _y in EACH:
    _name = type(_likelihood).__name__
    check("f", _f.long(), f"{_name} needs floating-point network outputs", likelihood=_likelihood, y=_y)
    check("f", _f.to(torch.complex64), f"{_name} needs floating-point network outputs", likelihood=_likelihood, y=_y)
    check("f", torch.tensor(1.0), f"{_name} needs floating-point network outputs", likelihood=_likelihood, y=_y)
    check("f", _f.fill_diagonal_(0) + math.nan, "NaN in the network's output", likelihood=_likelihood, y=_y)
    check("f", None, f"{_name} needs", "outputs", "tensor", "got None", likelihood=_likelihood, y=_y)
    check("f", _f.numpy(), f"{_name} needs", "outputs", "tensor", "ndarray", likelihood=_likelihood, y=_y)
    check("y", _y[:3], f"{_name} needs targets of shape", likelihood=_likelihood, f=_f)
    check("y", _y[0, ...].sum(), f"{_name} needs targets of shape", likelihood=_likelihood, f=_f)
    check("y", None, f"{_name} needs", "targets", "tensor", "got None", likelihood=_likelihood, f=_f)
    check("y", _y.tolist(), f"{_name} needs", "targets", "tensor", "got [", likelihood=_likelihood, f=_f)
    check("y", _y.numpy(), f"{_name} needs", "targets", "tensor", "ndarray", likelihood=_likelihood, f=_f)
    check("y", _y.to(torch.complex64), "complex64", likelihood=_likelihood, f=_f)
check("f", F[:, 0], "at least two classes", "Bernoulli (likelihood='binary')", likelihood=Categorical())
check("f", F[:, :1], "at least two classes", likelihood=Categorical())
check("y", Y + 1, "target 3, but the network has 3 outputs", likelihood=Categorical())
check("y", Y - 1, "target -1, but the network has 3 outputs", likelihood=Categorical())
check("y", Y[:, None], "needs targets of shape [4]", likelihood=Categorical())
check("y", Y.float(), "integer class indices", "y.long()", likelihood=Categorical())
check("y", Y > 0, "integer class indices as targets, got torch.bool", likelihood=Categorical())
check("y", torch.eye(4)[:, :3], "y.argmax(1) for one-hot", likelihood=Categorical())
check("y", torch.ones(4, 3), "likelihood='binary' if an example may have several labels", likelihood=Categorical())
check("y", R - 1, "Bernoulli needs targets that are 0 or 1, got -1", likelihood=Bernoulli())
check("y", Y, "Gaussian needs floating-point targets", likelihood=Gaussian())
check("y", R[:, :1], "Gaussian needs targets of shape [4, 3]", likelihood=Gaussian())
check("y", R + math.inf, "Gaussian got the target inf", likelihood=Gaussian())
check("y", R + math.nan, "Gaussian got the target nan", likelihood=Gaussian())
check("f", F, "even number of channels", likelihood=HeteroscedasticGaussian(), y=R)
check("f", F, "each of 2 outputs", likelihood=Gaussian(torch.ones(2)), y=R)


def _integrate(t: Any, likelihood: Likelihood | None = None, **given: Any) -> Any:
    return (likelihood or Categorical()).integrate(**{"mean": F, "covariance": torch.ones(4, 3), **given})


integrate = Table("Likelihood.integrate", _integrate, Likelihood.integrate, named=False)
integrate("covariance", torch.ones(1, 7), "variances of the same shape", "got shape [1, 7]")
integrate("covariance", None, "variances", "got None")
integrate("mean", None, "outputs", "got None")
integrate("mean", F.long(), "floating-point")
integrate("link", "prbit", "link='prbit'; choose one of 'probit', 'pairwise', 'bridge', 'mc'")
integrate("samples", 0, "samples must be a whole number of at least 1, got 0", link="mc")
integrate("samples", 2.5, "samples must be a whole number", "got 2.5", link="mc")
integrate("samples", "ten", "samples must be a whole number", "got 'ten'")
integrate("generator", 42, "generator must be a torch.Generator", "got 42")
integrate("covariance", -torch.ones(4, 3), "must be positive semi-definite, but has a variance of -1")

LIKELIHOODS = [gaussian, categorical, word, check, integrate]
