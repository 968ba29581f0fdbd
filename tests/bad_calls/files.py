"""Files and states that hold no posterior of this network."""

from pathlib import Path
from typing import Any

import torch

from bad_calls.cases import Of, Table, Things, mlp
from lightning_bayes import DeepEnsemble, GaussianPosterior
from lightning_bayes.posterior import PosteriorError


def _file(content: Any) -> Of:
    """A file with these bytes, or with this object."""

    def make(t: Things) -> Path:
        path = t.folder / "posterior.pt"
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        return path

    return Of(make, repr(content)[:30])


def _cut(t: Things) -> Path:
    path = t.folder / "cut.pt"
    t.classifier.save(path)
    path.write_bytes(path.read_bytes()[:400])
    return path


def _without(key: str) -> Of:
    return Of(lambda t: {k: v for k, v in t.diagonal.state_dict().items() if k != key}, f"without {key}")


_nowhere = Of(lambda t: t.folder / "nowhere.pt", "nowhere")
load = Table(
    "GaussianPosterior.load",
    lambda t, path, network=None, name=None: GaussianPosterior.load(path, network or t.net(), name=name),
    ["path", "network", "likelihood", "name"],
    named=False,
    error=PosteriorError,
)
load("path", _file(b""), "is truncated, or not a posterior's file")
load("path", _file(b"not a posterior"), "is truncated, or not a posterior's file")
load("path", Of(_cut, "cut"), "is truncated, or not a posterior's file", "fit the posterior again")
load("path", _file([1, 2]), "does not contain a posterior, but an object of type list")
load("path", _file({"state_dict": {}}), "contains no posterior")
load("path", _nowhere, "there is no posterior's file at", error=OSError)
load("path", Of(lambda t: t.folder, "a folder"), "is a folder: pass the path of the posterior's file", error=OSError)
load("path", None, "path must be a file's path or URL, got None", error=TypeError)
load.anything_goes("network", "a table of its own: from_state_dict")
load.anything_goes("likelihood", "a table of its own: from_state_dict")

state = Table(
    "from_state_dict",
    lambda t, network=None, **given: GaussianPosterior.from_state_dict(
        t.net() if network is None else network, **{"state": t.diagonal.state_dict(), **given}
    ),
    GaussianPosterior.from_state_dict,
    named=False,
    error=(PosteriorError, TypeError),
)
state("network", Of(lambda t: mlp(3, 4), "other outputs"), "another network: it has 2.weight of shape (3, 4)")
state("network", Of(lambda t: torch.nn.Linear(3, 3), "Linear"), "belongs to another network", "no such parameter")
state("network", "net", "network must be an nn.Module that maps x to f, got 'net'")
state("state", {}, "this version cannot read a posterior")
state("state", None, "cannot read a posterior from the state", "it is an object of type NoneType")
state("state", {"format": 99}, "cannot read a posterior from the state (format 99)")
for _key in ("names", "mean", "curvature", "fingerprint", "likelihood", "prior_precision"):
    state("state", _without(_key), f"is incomplete: it has no {_key!r}; save the posterior again")
state("likelihood", "classification", "must be a Likelihood, or None for the one that was saved, got 'classification'")

ensembles = Table(
    "DeepEnsemble.load",
    lambda t, **given: DeepEnsemble.load(**{"paths": [], "networks": [], **given}),
    ["paths", "networks", "likelihood", "member_weights"],
    error=(PosteriorError, TypeError),
    named=False,
)
ensembles("paths", ["a.pt"], "there are 1 posterior files and 0 networks")
ensembles("paths", "a.pt", "paths must be a list of paths, got 'a.pt'")
ensembles("paths", None, "paths must be a list of paths, got None")
ensembles("paths", [3], "path must be a file's path or URL, got 3", networks=[mlp()])
ensembles("networks", None, "networks must be a list of networks, got None")
ensembles("networks", Of(lambda t: t.net(), "one"), "networks must be a list of networks", "Sequential", paths=["a.pt"])
ensembles("paths", [], "an ensemble needs at least one posterior, got none")
ensembles.anything_goes("likelihood", "a table of its own: from_state_dict")
ensembles.anything_goes("member_weights", "a table of its own: DeepEnsemble")

checkpoints = Table(
    "DeepEnsemble.from_checkpoints",
    lambda t, **given: DeepEnsemble.from_checkpoints(**{"paths": [], "module": mlp, **given}),
    ["paths", "module", "name", "network", "likelihood", "member_weights", "device"],
    error=(PosteriorError, TypeError, ValueError),
    named=False,
)
_checkpoint = Of(lambda t: [_one(t)], "a checkpoint")


def _one(t: Things) -> Path:
    path = t.folder / "one.ckpt"
    held = {"posterior": t.diagonal.state_dict()}
    torch.save({"state_dict": t.diagonal.network.state_dict(), "callbacks": {"LaplaceCallback[laplace]": held}}, path)
    return path


load("name", "l2m", "no posterior named 'l2m'; it has 'laplace'", path=Of(_one, "a checkpoint"))
checkpoints("paths", [], "an ensemble needs at least one posterior, got none")
checkpoints("paths", "a.ckpt", "paths must be a list of paths, got 'a.ckpt'")
checkpoints("paths", Of(lambda t: [t.folder], "a folder"), "this is a folder", "DeepEnsemble.load")
checkpoints("paths", Of(lambda t: [_file({"state_dict": {}}).make(t)], "weights"), "checkpoint contains no posterior")
checkpoints("paths", Of(lambda t: [_file([1]).make(t)], "a list"), "is not a checkpoint: it contains an object of type")
checkpoints("paths", Of(lambda t: [_cut(t)], "cut"), "is truncated, or not a checkpoint's file")
checkpoints("paths", [3], "path must be a file's path or URL, got 3")
checkpoints("paths", Of(lambda t: [t.folder / "no.ckpt"], "nowhere"), "there is no checkpoint's file at", error=OSError)
checkpoints("module", mlp(), "module= is a single Sequential", "pass the class", paths=_checkpoint)
checkpoints("module", "Lit", "module must be a LightningModule's class, or a function", "got 'Lit'", paths=_checkpoint)
checkpoints("name", "l2m", "no posterior named 'l2m'; it has 'laplace'", paths=_checkpoint)
checkpoints("name", 3, "no posterior named 3", paths=_checkpoint)
checkpoints("network", "net", "has no submodule 'net'", "network=", paths=_checkpoint)
checkpoints("network", 3, "network must be the dotted name of a submodule, got 3", paths=_checkpoint)
checkpoints("device", "gpu", "device", "'gpu'", paths=_checkpoint)
checkpoints.anything_goes("likelihood", "a table of its own: from_state_dict")
checkpoints.anything_goes("member_weights", "a table of its own: DeepEnsemble")

save = Table("save", lambda t, **given: t.diagonal.save(**given), GaussianPosterior.save, named=False)
save("path", Of(lambda t: t.folder, "a folder"), "which is a folder: pass the path of a file", error=OSError)
_no_folder = Of(lambda t: t.folder / "no" / "a.pt", "nowhere")
save("path", _no_folder, "does not exist", "create it first", error=OSError)
save("path", None, "path must be a file's path or URL, got None")
save("path", 3, "path must be a file's path or URL, got 3")

FILES = [load, state, ensembles, checkpoints, save]
