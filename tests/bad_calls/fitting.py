"""Fitting: the arguments of `fit_laplace` and `fit_l2m`, and of the callbacks' own calls."""

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes
from bad_calls.callbacks import counts, flags, other_priors, positives, prior_means, priors, structures, words
from bad_calls.cases import OUTPUT, LitNet, Of, Table, Things, mlp
from bad_calls.networks import LitAutoEncoder, X, Y, fit
from lightning_bayes import GP, Categorical, Gaussian, Kron, LaplaceCallback, Network, Prior, Subnetwork, fit_laplace
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.network import SubsetError
from lightning_bayes.posterior import OptimizerError, fit_l2m

laplace = Table("fit_laplace", fit, fit_laplace)
structures(laplace)
laplace("likelihood", "gauss", "likelihood='gauss' is not known; use one of 'classification'", error=LikelihoodError)
laplace("likelihood", Categorical, "use one of 'classification'", error=LikelihoodError)
laplace("likelihood", 3, "likelihood=3 is not known", error=LikelihoodError)
laplace("structure", "ekfac", "takes several passes over the data, but the loader is an iterator", loader=iter([]))
laplace("structure", "ekfac", "no EKFAC form: use structure='full' or", subset=Subnetwork(3), error=SubsetError)
_damped = Kron(damping="glm")
laplace("structure", _damped, "needs one prior precision for all layers", prior_precision=[1.0, 2.0], named="damping")
laplace("structure", "lowrank", "the loader is an iterator", loader=iter([(X, Y)]), named="loader")
priors(laplace)
laplace("prior_precision", None, "must be a number or a vector of numbers, got None")
laplace("prior_precision", [1.0, 2.0, 3.0], "each of the 2 layers (0, 2)", "each of the 31 parameters")
laplace("prior_precision", Of(lambda t: torch.rand(31) + 1, "[31]"), "0.weight", "one prior precision", named=False)
prior_means(laplace)
other_priors(laplace)
laplace("prior", Prior(mean=torch.ones(30)), "has 30 numbers, but there are 31 weights (0.weight, 0.bias, …)")
laplace("prior", Prior(mean={"0.weight": torch.ones(4, 3)}), "needs 0.bias of shape [4], but the state dict has none")
laplace("prior", Prior(mean={"0.weight": torch.ones(3, 4)}), "needs 0.weight of shape [4, 3], but", "has shape [3, 4]")
laplace("prior", Of(lambda t: t.classifier, "all"), "covers 31 weights", "the same subset=", subset=["0"])
laplace("prior", Prior(mean={"0.weight": torch.ones(4, 3).long()}), "must contain real numbers, but 0.weight is")
flags(laplace, "progress")
laplace("seed", -1, "must be a whole number of at least 0, got -1")
laplace("seed", "zero", "must be a whole number of at least 0, got 'zero'")
laplace("processes", 2, "must be Processes(rank, size), got 2")

counts(laplace, "gp")
laplace("prior", Of(lambda t: t.classifier, "all"), "gp= needs a prior with independent weights", gp=3)
laplace("gp", 10**5, "the kernel between 100000 points with 3 outputs is too large", "or fewer", named="points")
laplace("gp", GP(10**4, outputs="joint"), "GP(points=3861) or fewer, or outputs='independent'", named="points")
for _argument in ("network", "loader", "probe"):
    laplace.anything_goes(_argument, "a table of its own: networks")

SUBSET = {"error": SubsetError, "named": False}
laplace("subset", "last-layer", "unknown subset 'last-layer': use 'all', 'last_layer'", **SUBSET)
laplace("subset", [], "the list of names in subset is empty", **SUBSET)
laplace("subset", None, "unknown subset None", **SUBSET)
laplace("subset", 3, "unknown subset 3", **SUBSET)
laplace("subset", [3], "the names in subset must be strings, got 3", **SUBSET)
laplace("subset", ["2.wight"], "no parameter '2.wight'; did you mean one of 2.weight", **SUBSET)
laplace("subset", torch.ones(5, dtype=torch.bool), "the mask has shape (5,), but there are 31", **SUBSET)
laplace("subset", torch.zeros(31, dtype=torch.bool), "selects no weight: choose at least one", **SUBSET)
laplace("subset", torch.tensor([1, 31]), "position 31, but there are 31 trainable weights", **SUBSET)
laplace("subset", torch.tensor([-1]), "position -1, but there are 31 trainable weights", **SUBSET)
laplace("subset", ["zzz"], "no parameter 'zzz'; did you mean one of ", **SUBSET)
laplace("subset", torch.tensor([1, 2]), "no Kronecker form: use structure='full' or 'diag'", **SUBSET)
laplace("subset", torch.zeros(2, 3, dtype=torch.long), "a boolean mask over the trainable weights", **SUBSET)
laplace("subset", torch.rand(31), "a boolean mask over the trainable weights or a vector of their positions", **SUBSET)

laplace("subset", Subnetwork(32), "Subnetwork(n=32) asks for more weights than the 31", "31", **SUBSET)
laplace("subset", Subnetwork(3), "the loader is an iterator", loader=iter([(X, Y)]), named="loader")

for _row in OUTPUT:
    laplace(*_row)
laplace("output", "logits", "output='logits' finds no tensor in the network's return value, a Tensor")
laplace("output", 1, "output=1 finds no tensor in the network's return value, a Tensor")
laplace("output", Network(class_dim=5), "class_dim=5 is not a dimension after the first", named="class_dim")

# -- the second moment -----------------------------------------------------------------------------------------------


def _stepped(network: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(network.parameters())
    network(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _l2m(t: Things, **given: Any) -> Any:
    network = given.pop("network", None) or mlp()
    optimizers = given.pop("optimizers", None) or _stepped(network)
    t.watch(network)
    return fit_l2m(network, optimizers, **{"n_data": 40, "batch_size": 4, "prior_precision": 1.0, **given})


l2m = Table("fit_l2m", _l2m, fit_l2m)
words(l2m, "scaling")
counts(l2m, "n_data", "n_outputs")
positives(l2m, "batch_size", "loss_scale")
priors(l2m)
prior_means(l2m)
l2m("likelihood", "gauss", "is not known; use one of 'classification'")
l2m("batch_size", 0.5, "must be at least 1, got 0.5")
l2m("batch_size", 40, "a batch of all 40 examples", "train with smaller batches", named=False)
l2m("loss_scale", None, "noise_std per output: pass loss_scale=", likelihood=Gaussian(torch.ones(3)))
l2m("network", 3, "must be an nn.Module that maps x to f, got 3", optimizers=Of(lambda t: _stepped(mlp()), "Adam"))
l2m("optimizers", "adam", "must be the optimizer that trained the network, or a list of them, got 'adam'")
l2m("optimizers", [3], "must be the optimizer that trained the network, or a list of them, got 3")
_sgd = Of(lambda t: torch.optim.SGD(mlp().parameters(), 0.1), "of another network")
l2m("optimizers", _sgd, "no optimizer holds a parameter of the network", named=False, error=OptimizerError)
_fresh = mlp()
l2m("optimizers", torch.optim.SGD(_fresh.parameters(), 0.1), "SGD keeps no second moment", named=False, network=_fresh)
l2m("optimizers", torch.optim.Adam(_fresh.parameters()), "has made no step", named=False, network=_fresh)

# -- a callback's own calls ------------------------------------------------------------------------------------------


def _now(
    t: Things,
    module: Any = None,
    dataloader: Any = ((X, Y),),
    trainer: Any = None,
    val_dataloader: Any = None,
    **options: Any,
) -> Any:
    module = t.watch(LitNet() if module is None else module)
    callback = LaplaceCallback(**{"structure": "diag", "tune": None, "progress": False, **options})
    return callback.fit_now(trainer, module, dataloader, val_dataloader)


now = Table("LaplaceCallback.fit_now", _now, ["trainer", "module", "dataloader", "val_dataloader"], named=False)
now("val_dataloader", 3, "val_dataloader must be an iterable of batches", "got 3")
now("val_dataloader", TensorDataset(X, Y), "val_dataloader is a TensorDataset", "DataLoader(dataset, batch_size=")
now("val_dataloader", None, "tune='grid' needs validation data", tune="grid")
now("dataloader", L.LightningDataModule(), "LightningDataModule has no train_dataloader", "give it one, or pass a")
now("trainer", "gpu", "trainer must be a Trainer or None, got 'gpu'")
now("module", "net", "module must be a LightningModule, got 'net'")
now("module", Of(lambda t: mlp(), "Sequential"), "module must be a LightningModule", "Sequential")
now("module", Of(lambda t: LitAutoEncoder(), "LitAutoEncoder"), "LitAutoEncoder has no forward", "network=")
now("module", LitNet(), "no submodule 'nett' (network=); its submodules are: net", network="nett")
now("dataloader", None, "dataloader must be an iterable of batches", "got None")
now("dataloader", TensorDataset(X, Y), "dataloader is a TensorDataset", "DataLoader(dataset, batch_size=")
now("dataloader", [], "there are 0 training dataloaders")
now("dataloader", DataLoader(TensorDataset(X[:0], Y[:0])), "the data are empty")
now("dataloader", DataLoader([(X, X, Y)], batch_size=None), "split_batch(self, batch)")  # type: ignore[arg-type]
now("dataloader", DataLoader([3], batch_size=None), "split_batch(self, batch)")  # type: ignore[arg-type]


def _evaluate(t: Things, module: Any = None, dataloader: Any = ((X, Y),), **given: Any) -> Any:
    callback = LaplaceCallback(structure="diag", tune=None, progress=False)
    fitted = t.watch(LitNet())
    callback.fit_now(None, fitted, DataLoader(TensorDataset(X, Y), 4))
    return callback.evaluate(fitted if module is None else module, dataloader, **given)


evaluating = Table(
    "LaplaceCallback.evaluate", _evaluate, ["module", "dataloader", "ood_dataloaders", "trainer"], named=False
)
evaluating("module", "net", "module must be a LightningModule, got 'net'")
evaluating("dataloader", None, "dataloader must be an iterable of batches", "got None")
evaluating("ood_dataloaders", 3, "ood_dataloaders must be an iterable of batches", "got 3")
evaluating("ood_dataloaders", [3], "ood_dataloaders must be an iterable of batches", "got 3")
evaluating("trainer", 3, "trainer must be a Trainer or None, got 3")


class OwnData(LitNet):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X, Y), 4)


def _trained(t: Things, module: Any = None, **given: Any) -> Any:
    module = LitNet() if module is None else module
    given = {"progress": False, "datamodule": DataLoader(TensorDataset(X, Y), 4), **given}
    return lightning_bayes.fit(t.watch(module) if isinstance(module, nn.Module) else module, **given)


_unused: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
TRAINER = Of(lambda t: L.Trainer(**_unused), "Trainer")
PLAIN, OWN_DATA = Of(lambda t: t.net(), "Sequential"), Of(lambda t: OwnData(), "OwnData")
trained = Table("fit", _trained, lightning_bayes.fit, named=False)
trained("module", "net", "module must be a LightningModule, an nn.Module or a Trainer, got 'net'")
trained("module", "last_week.ckpt", "got 'last_week.ckpt'", "YourModule.load_from_checkpoint(path)")
trained("module", LitNet, "module must be a LightningModule, an nn.Module or a Trainer, got the class LitNet")
trained("module", L.LightningDataModule(), "pass the module first, as in fit(module, datamodule)", datamodule=LitNet())
trained("module", DataLoader(TensorDataset(X, Y), 4), "pass the module first", datamodule=LitNet())
trained("module", TRAINER, "has not run with a module", "trainer=trainer")
trained("module", Of(lambda t: LitAutoEncoder(), "LitAutoEncoder"), "LitAutoEncoder has no forward", "network=")
trained(
    "datamodule",
    None,
    "no training data: call fit(module, datamodule) with a data module",
    "give LitNet a train_",
)
trained("datamodule", None, "a plain network has no data", "fit(network, loader)", module=PLAIN)
trained("datamodule", 3, "datamodule must be an iterable of training batches", "got 3")
trained("datamodule", LitNet(), "datamodule must be an iterable of training batches", "got LitNet")
trained("datamodule", TensorDataset(X, Y), "datamodule is a TensorDataset", "DataLoader(dataset, batch_size=")
trained("datamodule", L.LightningDataModule(), "LightningDataModule has no train_dataloader", "pass a data module or")
trained("datamodule", TRAINER, "got a Trainer: pass it as trainer=")
trained("datamodule", DataLoader(TensorDataset(X[:0], Y[:0])), "the data are empty")
trained("val_dataloader", 3, "val_dataloader must be an iterable of batches", "got 3")
trained("val_dataloader", None, "tune='grid' needs validation data", tune="grid")
trained("likelihood", "softmax", "'softmax'", "use one of 'classification', 'binary', 'regression'")
trained("trainer", "gpu", "trainer must be a Trainer or None, got 'gpu'")
trained("trainer", L.LightningDataModule(), "trainer must be a Trainer or None")
trained("trainer", TRAINER, "got two Trainers", module=TRAINER)
trained("struktur", "kron", "fit has no argument 'struktur'", "did you mean 'structure'?", error=TypeError)
trained("structure", "kfca", "unknown structure 'kfca': use one of 'auto'")
trained("data", "clean", "data='clean'", "method or attribute of", module=OWN_DATA, datamodule=None)
trained("data", "clean", "data= replaces the loader of training batches: pass only one of them")
trained("save", "posterior.pt", "save= needs a Trainer", "posterior.save(path)")
trained("trainer", TRAINER, "needs a LightningModule, which Sequential is not", module=PLAIN)


FITTING = [laplace, l2m, now, evaluating, trained]
