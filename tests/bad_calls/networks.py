"""Networks, loaders and batches that no posterior can be fitted to."""

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from helpers.networks import Wired
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bad_calls.cases import Of, Table, Things, mlp
from lightning_bayes import fit_laplace
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.network import DataError, SubsetError

X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0, 1, 2, 0])


def fit(t: Things, **given: Any) -> Any:
    network = given.pop("network") if "network" in given else mlp()
    return fit_laplace(t.watch(network), **{"loader": [(X, Y)], **given})


laplace = Table("fit_laplace of", fit, ["network", "loader", "probe", "likelihood"], named=False)
NETWORKS = [laplace]

# -- networks --------------------------------------------------------------------------------------------------------


class LitAutoEncoder(L.LightningModule):
    """Lightning's own demonstration: all is in `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(3, 2), mlp(2, 3)


class WithMask(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) * mask


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)


def wired(forward: Any, what: str, **parts: Any) -> Of:
    return Of(lambda t: Wired(forward, **{"head": nn.Linear(3, 3)} | parts), what)


def _overwrites(s: Any, x: Tensor) -> Tensor:
    h = s.body(x).tanh() * 1
    z: Tensor = s.head(h)
    h.mul_(2)
    return z


def _broken(bias: float) -> nn.Module:
    network = mlp()
    nn.init.constant_(network[2].bias, bias)
    return network


laplace("network", None, "network must be an nn.Module", "got None", error=TypeError)
laplace("network", "net", "network must be an nn.Module", "got 'net'", error=TypeError)
laplace("network", nn.Linear, "network must be an nn.Module", "got", error=TypeError)
laplace("network", torch.tanh, "network must be an nn.Module", error=TypeError)
laplace("network", Of(lambda t: nn.Sequential(nn.LazyLinear(3)), "lazy"), "0.weight has no shape before the first")
laplace("network", Of(lambda t: nn.Linear(3, 3, dtype=torch.complex64), "complex"), "weight is complex", "real")
laplace("network", wired(lambda s, x: torch.complex(s.head(x), x), "complex"), "complex64", "floating-point")
laplace("network", Of(lambda t: Nothing(), "no forward"), "Nothing has no forward", "network=")
laplace("network", Of(lambda t: LitAutoEncoder(), "LitAutoEncoder"), "LitAutoEncoder has no forward", "network=")
laplace("network", Of(lambda t: WithMask(3, 3), "more"), "WithMask cannot be run", "'mask'", "((x1, x2), y)")
laplace("network", Of(lambda t: nn.Tanh(), "Tanh"), "Tanh has no trainable parameter", error=SubsetError)
laplace("network", Of(lambda t: mlp().requires_grad_(False), "frozen"), "Sequential has no trainable parameter")
laplace("network", Of(lambda t: mlp(5), "of 5 inputs"), "Sequential cannot be run on an input of shape [", "float32")
laplace("network", Of(lambda t: mlp().double(), "double"), "torch.float32", "weights of torch.float64", "x.double()")
laplace("network", Of(lambda t: mlp().half(), "half"), "torch.float32", "weights of torch.float16", "x.half()")
laplace("network", Of(lambda t: mlp().to("meta"), "meta"), "0.weight is on the meta device", "to_empty")
laplace("network", wired(lambda s, x: (s.head(x), x), "tuple"), "must return one tensor, but it returned tuple")
laplace("network", wired(lambda s, x: {"f": s.head(x)}, "dict"), "must return one tensor, but it returned dict")
laplace("network", wired(lambda s, x: None, "None"), "must return one tensor, but it returned NoneType")
laplace("network", wired(lambda s, x: s.head(x).mean(), "scalar"), "one row per example", "shape ()")
laplace("network", wired(lambda s, x: s.head(x).mean(0), "no batch"), "one row per example", "shape (3,)")
laplace("network", wired(lambda s, x: s.head(x).mT, "time first"), "one row per example", "shape (3, ")
laplace("network", wired(lambda s, x: s.head(x).detach(), "detached"), "does not depend on any chosen parameter")
_no_grad = wired(torch.no_grad()(lambda s, x: s.head(x)), "no_grad")
laplace("network", _no_grad, "is it computed under torch.no_grad")
_pair = wired(lambda s, x: (s.head(x), x), "tuple")
laplace("network", _pair, "must return one tensor, but it returned tuple", subset="last_layer")
laplace("network", wired(lambda s, x: s.head(x).mT, "time first"), "one row per example", subset="last_layer")
laplace("network", wired(lambda s, x: s.head(x).detach(), "detached"), "any chosen parameter", subset=["head.bias"])
laplace("network", wired(lambda s, x: s.head(x).argmax(1), "classes"), "does not depend on any chosen parameter")
laplace("network", wired(lambda s, x: s.head(x)[0, 7], "index"), "Wired cannot be run", "index 7 is out of bounds")
laplace("network", wired(lambda s, x: s.tail(x), "attribute"), "Wired cannot be run", "no attribute 'tail'")
laplace("network", wired(lambda s, x: s.head(x["ids"]), "dict"), "Wired cannot be run on an input of shape [")
laplace("network", wired(_overwrites, "overwrites", body=nn.Linear(3, 3)), "head.weight: the layer's input was over")
laplace("network", wired(lambda s, x: s.head(x - x.mean(0)), "centred"), "depends on another example of the batch")
laplace("network", wired(lambda s, x: s.head(x) + torch.rand(()), "random"), "depends on another example")
_norm = Of(lambda t: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)), "batch norm")
laplace("network", _norm, "depends on another example", "(1: batch norm without running statistics)")
laplace("network", Of(lambda t: _broken(math.nan), "NaN weights"), "output is not finite; its weights or activations")
_path = wired(lambda s, x: s.head(x) if len(x) < 4 else s.head(s.head(x)), "path")
laplace("network", _path, "depends on another example of the batch")
_no_layer = wired(lambda s, x: x * s.scale, "no layer", scale=nn.Parameter(torch.ones(3)))
laplace("network", _no_layer, "found no last layer", subset="last_layer")

# -- loaders and batches ---------------------------------------------------------------------------------------------


class Data(L.LightningDataModule):
    pass


def _breaks() -> Iterator[Any]:
    yield X, Y
    yield X


class OfExamples(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]

    def __len__(self) -> int:
        return len(X)


DATA = {"error": (DataError, TypeError)}
laplace("loader", None, "loader must be an iterable of (x, y) batches", "DataLoader", "got None", **DATA)
laplace("loader", 3, "loader must be an iterable of (x, y) batches", "got 3", **DATA)
laplace("loader", "data", "loader must be an iterable of (x, y) batches", "got 'data'", **DATA)
laplace("loader", X, "loader must be an iterable of (x, y) batches", "Tensor of shape [4, 3]", **DATA)
laplace("loader", Data(), "loader must be an iterable of (x, y) batches", "Data", **DATA)
laplace("loader", TensorDataset(X, Y), "loader is a TensorDataset", "DataLoader(dataset, batch_size=", **DATA)
laplace("loader", OfExamples(), "loader is a OfExamples", "DataLoader(dataset, batch_size=", **DATA)
_examples = DataLoader(TensorDataset(X, Y), batch_size=None)
laplace("loader", _examples, "Sequential cannot be run on an input of shape [2]")
laplace("loader", {"train": ((X, Y),)}, "pair (x, y), but the loader gave a str", **DATA)
laplace("loader", (X, Y), "pair (x, y), but the loader gave a Tensor", **DATA)
laplace("loader", [], "the loader is empty: pass at least one batch", **DATA)
laplace("loader", Of(lambda t: _breaks(), "breaks"), "pair (x, y), but the loader gave a Tensor", **DATA)

BATCHES: dict[str, tuple[Any, str]] = {
    "dict": ({"x": X, "y": Y}, "pair (x, y), but the loader gave a dict"),
    "None": (None, "pair (x, y), but the loader gave a NoneType"),
    "one part": ((X,), "pair (x, y), but the loader gave 1 parts"),
    "three parts": ((X, X, Y), "3 parts; group several inputs as ((x1, x2), y)"),
    "no examples": ((X[:0], Y[:0]), "a batch has no examples"),
    "list targets": ((X, [0, 1, 2, 0]), "targets of a batch must be a tensor, but they are list"),
    "numpy targets": ((X, Y.numpy()), "targets of a batch must be a tensor, but they are ndarray"),
    "no targets": ((X, None), "targets of a batch must be a tensor, but they are NoneType"),
    "text": (("abc", Y), "must contain a tensor with a batch dimension, but it is str"),
    "numpy input": ((X.numpy(), Y), "must contain a tensor with a batch dimension, but it is ndarray"),
    "scalar input": ((torch.tensor(1.0), Y), "must contain a tensor with a batch dimension"),
    "one example": ((X[0], Y[0]), "Sequential cannot be run on an input of shape ["),
    "images": ((X.reshape(4, 1, 3, 1), Y), "Sequential cannot be run on an input of shape ["),
    "four columns": ((torch.zeros(4, 4), Y), "Sequential cannot be run on an input of shape ["),
    "double": ((X.double(), Y), "torch.float64"),
    "integers": ((X.long(), Y), "torch.int64"),
    "complex": ((X.to(torch.complex64), Y), "torch.complex64"),
    "two inputs": (((X, X), Y), "Sequential cannot be run on inputs of shapes ["),
    "keywords": (({"ids": X, "mask": X}, Y), "Sequential cannot be run on inputs of shapes ["),
    "NaN": ((X.masked_fill(X > 0, math.nan), Y), "batch 0: the network's output is not finite; its input has NaN"),
    "infinite": ((X.masked_fill(X > 0, math.inf), Y), "is not finite"),
    "fewer targets": ((X, Y[:3]), "needs targets of shape [4]"),
}
for _what, (_batch, _words) in BATCHES.items():
    laplace("loader", Of(lambda t, batch=_batch: [batch], _what), _words)

laplace("network", Of(lambda t: mlp(3, 1), "one logit"), "at least two classes", "Bernoulli", error=LikelihoodError)
laplace("likelihood", "binary", "Bernoulli needs targets of shape [4, 3]", named=False)
laplace("probe", "abc", "must contain a tensor with a batch dimension")
laplace("probe", torch.zeros(3, 7), "Sequential cannot be run on an input of shape [3, 7]")
