"""Save and load posteriors, as state dictionaries and as files.

A state is a dictionary of tensors, numbers and strings, so `torch.load(weights_only=True)` reads it. A file is a state
with a digest of its contents, written by `torch.save`. A local file is written under another name, flushed to disk and
renamed, so a process that is killed leaves the previous file intact. URLs (`s3://…`, `memory://…`) go through `fsspec`,
using a transaction if the file system supports one.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import struct
import uuid
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import instance
from lightning_bayes.curvature import Curvature
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import UnknownLikelihoodError
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.borrowed import check_network
from lightning_bayes.network.gathered_layer import gathered_for
from lightning_bayes.network.output import Output, output_of, wrap_output
from lightning_bayes.posterior.gaussian import (
    Calibration,
    GaussianPosterior,
    PosteriorError,
    check_parameters,
    implements,
)
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import GaussianPrior
from lightning_bayes.posterior.training_points import TrainingPoints
from lightning_bayes.structures import Structure

FORMAT = 3
_CURVATURE = (
    *("kind", "n_outputs", "log_likelihood", "gradient", "squared_error"),
    *("normalised", "weight_sharing", "hessian", "samples", "seed"),
)
_COMMON = (
    *("type", "names", "shapes", "mask", "likelihood", "mean", "n_data", "fingerprint"),
    *("calibrations", "shift", "known_novelty", "output"),
)
_LAPLACE = ("curvature", *_CURVATURE, "prior_precision", "prior", "temperature", "damping", "points")
# Exceptions that torch.load raises for damaged contents, besides UnpicklingError.
_DAMAGE = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, EOFError),
    *(struct.error, zipfile.BadZipFile),
)
Part = TypeVar("Part")


@implements("state_dict", sharded=True)
def to_state(posterior: GaussianPosterior) -> dict[str, Any]:
    subset = posterior.subset
    state: dict[str, Any] = {
        "format": FORMAT,
        "type": type(posterior).__name__,
        "names": list(subset.names),
        "shapes": [list(shape) for shape in subset.shapes],
        "mask": subset.mask,
        "likelihood": posterior.likelihood.to_state(),
        "mean": posterior.mean,
        "n_data": int(posterior.n_data),
        "fingerprint": posterior.fingerprint,
        "calibrations": [asdict(calibration) for calibration in posterior.calibrations],
        "shift": posterior.shift,
        "known_novelty": posterior.known_novelty,
        "output": asdict(output_of(inputs.whole_network(posterior.network))),
    }
    if not isinstance(posterior, LaplacePosterior):
        return {**state, "precision": posterior.precision.to_state()}
    curvature, points = posterior.curvature, posterior.points
    return {
        **state,
        "curvature": curvature.structure.to_state(),
        **{name: getattr(curvature, name) for name in _CURVATURE},
        "prior_precision": posterior.prior_precision,
        "prior": posterior.prior.to_state(),
        "temperature": float(posterior.temperature),
        "damping": posterior.damping,
        "points": None if points is None else {f.name: getattr(points, f.name) for f in fields(points)},
    }


@torch.inference_mode(False)  # inference tensors could not be differentiated later
@implements("from_state_dict", sharded=True)
def from_state(network: nn.Module, state: dict[str, Any], likelihood: Likelihood | None = None) -> GaussianPosterior:
    version = state.get("format") if isinstance(state, Mapping) else None
    if version != FORMAT:
        raise PosteriorError(
            f"this version cannot read a posterior from the state (format {version!r}): it is {describe(state)}"
        )
    network = check_network(network)
    if state.get("type") == "ShardedPosterior":
        from lightning_bayes.posterior.sharded import ShardedPosterior

        return ShardedPosterior.from_state_dict(network, state, likelihood)
    is_laplace = state.get("type") == "LaplacePosterior"
    matrix = "curvature" if is_laplace else "precision"
    for key in (*_COMMON, *(_LAPLACE if is_laplace else ("precision",))):
        if key not in state:
            raise PosteriorError(f"the posterior's state is incomplete: it has no {key!r}; save the posterior again")
    if likelihood is not None:
        instance("likelihood", likelihood, Likelihood, "a Likelihood, or None for the one that was saved")
    state = inputs.to_device(dict(state), torch.device("cpu"))
    network = wrap_output(network, Output(**state["output"]))
    subset = Subset(tuple(state["names"]), tuple(torch.Size(s) for s in state["shapes"]), state["mask"])
    check_parameters(network, subset)
    network = gathered_for(network, subset.names)
    structure = _parse(Structure.from_state, state[matrix], "matrix")
    prior = _parse(GaussianPrior.from_state, state["prior"], "prior") if is_laplace else GaussianPrior()
    _check_numbers(state, subset, structure, matrix, prior)
    device = next(iter(subset.parameters(network).values())).device
    mean, structure = state["mean"].to(device), structure.to(device)
    likelihood = likelihood or likelihood_from(state["likelihood"], device)
    calibrations = tuple(Calibration(**calibration) for calibration in state["calibrations"])
    shift, known = (None if (t := state[name]) is None else t.to(device) for name in ("shift", "known_novelty"))
    n_data, fingerprint = state["n_data"], state["fingerprint"]
    if not is_laplace:
        return GaussianPosterior(
            network, subset, likelihood, mean, structure, n_data, fingerprint, calibrations, shift, known_novelty=known
        )
    sums = {name: state[name] for name in _CURVATURE}
    sums["gradient"] = None if sums["gradient"] is None else sums["gradient"].to(device)
    curvature = Curvature(
        structure=structure, subset=subset, likelihood=likelihood, n_data=n_data, output=output_of(network), **sums
    )
    posterior = LaplacePosterior.around(
        network, mean, fingerprint, curvature, state["prior_precision"], state["temperature"], state["damping"], prior
    )
    points = state["points"]
    if points is not None:
        points = _parse(lambda parts: TrainingPoints(**parts), points, "training points")
    return replace(posterior, calibrations=calibrations, shift=shift, points=points, known_novelty=known)


def _parse(from_state: Callable[[Any], Part], state: Any, what: str) -> Part:
    try:
        return from_state(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PosteriorError(
            f"the posterior's state is incomplete: its {what} cannot be read ({error!r}); save the posterior again"
        ) from None


def _check_numbers(
    state: dict[str, Any], subset: Subset, structure: Structure, matrix: str, prior: GaussianPrior
) -> None:
    sizes = {
        "mean": state["mean"].numel(),
        matrix: structure.size,
        "prior's mean": None if prior.mean is None else prior.mean.numel(),
        "prior": None if prior.precision is None else prior.precision.size,
    }
    for what, size in sizes.items():
        if size not in (None, subset.size):
            raise PosteriorError(
                f"the posterior's state is inconsistent: its {what} has {size} weights, but its parameters have "
                f"{subset.size}; save the posterior again"
            )
    for what in ("mean", matrix, "prior_precision", "prior"):
        if inputs.has_nonfinite(state.get(what)):
            raise PosteriorError(
                f"the posterior's {what.replace('_', ' ')} contains NaN or infinity: fit the posterior again with "
                "finite weights and data"
            )


def likelihood_from(state: dict[str, Any], device: torch.device) -> Likelihood:
    try:
        return Likelihood.from_state(inputs.to_device(state, device))
    except UnknownLikelihoodError:
        raise PosteriorError(
            f"the posterior was fitted with the custom likelihood {state['name']}: pass likelihood="
        ) from None


@implements("save", sharded=True)
def write(state: dict[str, Any], path: str | PathLike[str]) -> None:
    """Write a state with its digest."""
    instance("path", path, (str, PathLike), "a file's path or URL")
    if not is_url(path):
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise FileNotFoundError(
                f"cannot save the posterior as {target}: the folder {target.parent} does not exist; create it first"
            )
        if target.is_dir():
            raise IsADirectoryError(
                f"cannot save the posterior as {target}, which is a folder: pass the path of a file"
            )
    write_file({**state, "digest": digest(state)}, path)


def write_file(content: Any, path: str | PathLike[str], keep_times: bool = False) -> None:
    """`torch.save` to a local path or URL, atomically. With `keep_times`, a replaced local file keeps its
    timestamps."""
    if is_url(path):
        buffer = io.BytesIO()  # if torch.save fails, no partial file is left
        torch.save(content, buffer)
        system, place = _file_system(path)
        with system.transaction, system.open(place, "wb") as file:
            file.write(buffer.getvalue())
        return
    target = Path(os.path.realpath(path))  # write to the target of a symbolic link, to keep the link
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_times and target.exists():
            shutil.copystat(target, unfinished)
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # flush the folder too if the system can: the new name must survive a power failure
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: str | PathLike[str], name: str | None = None) -> dict[str, Any]:
    """Read the state from a file written by `write`, or from a Trainer's checkpoint. If the checkpoint contains several
    posteriors, `name` selects one by the name of its callback."""
    state = read_any(path, "posterior")
    if isinstance(state, dict) and "state_dict" in state:
        try:
            return posterior_in(state, name)
        except PosteriorError as error:
            raise PosteriorError(f"{path}: {error}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise PosteriorError(
            f"{path} does not contain a posterior, but {describe(state)}: use a file written by posterior.save"
        )
    saved = state.pop("digest", None)  # None for a state saved by torch.save
    if saved is not None and saved != digest(state):
        raise PosteriorError(_damaged(path))
    return state


def posterior_in(checkpoint: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The state of a posterior in a Trainer's checkpoint, which stores callbacks' states under "Class[name]"."""
    callbacks = checkpoint.get("callbacks") or {}
    posteriors = {key: state.get("posterior") for key, state in callbacks.items() if isinstance(state, dict)}
    states = {key: posterior for key, posterior in posteriors.items() if isinstance(posterior, dict)}
    if not states:
        raise PosteriorError(
            "this checkpoint contains no posterior: it was saved during training, or has weights only. Use the last "
            "checkpoint, or load the posterior's file with GaussianPosterior.load or DeepEnsemble.load"
        )
    named = [state for key, state in states.items() if name is None or key.endswith(f"[{name}]")]
    if len(named) != 1:
        problem = "several posteriors: choose one with name=" if name is None else f"no posterior named {name!r}"
        names = ", ".join(repr(key.partition("[")[2].removesuffix("]")) for key in states)
        raise PosteriorError(f"this checkpoint contains {problem}; it has {names}")
    return named[0]


def read_any(path: str | PathLike[str], what: str) -> Any:
    """Read a file of tensors, numbers and strings that `torch.save` wrote. Messages call it a `what`'s file."""
    instance("path", path, (str, PathLike), "a file's path or URL")
    try:
        if is_url(path):
            system, place = _file_system(path)
            content: Any = io.BytesIO(system.cat_file(place))
        else:
            content = Path(path)
            content.stat()  # raises if the file may not be read
            if content.is_dir():
                raise IsADirectoryError(f"{path} is a folder: pass the path of the {what}'s file")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what}'s file at {path}: check the path, or save one first") from None
    if not _is_whole(content):
        raise PosteriorError(
            f"{path} is truncated, or not a {what}'s file: use another copy, or fit the posterior again"
        )
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise PosteriorError(
            f"cannot load {path}: it is damaged, or contains Python objects that could run arbitrary code. Use a file "
            "written by posterior.save"
        ) from None
    except torch.cuda.OutOfMemoryError:
        raise
    except _DAMAGE as error:
        raise PosteriorError(_damaged(path)) from error


def digest(value: Any) -> str:
    """A hash of all names, numbers and tensors, in their order. Equal digests mean equal contents."""
    total = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            total.update(f"{value.dtype} {tuple(value.shape)}".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, (Mapping, list, tuple)):
            parts = [part for item in value.items() for part in item] if isinstance(value, Mapping) else value
            for part in parts:
                add(part)
            total.update(f"{len(parts)} parts".encode())
        else:  # the repr of an arbitrary object may contain its address
            is_plain = value is None or isinstance(value, (str, int, float))
            total.update((repr(value) if is_plain else type(value).__qualname__).encode())

    add(value)
    return total.hexdigest()


def describe(state: Any) -> str:
    """Describe an object for a message."""
    if not isinstance(state, Mapping):
        return f"an object of type {type(state).__name__}"
    if not state:
        return "an empty dictionary"
    keys = [repr(key) for key in state]
    return f"a dictionary of {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}"


def is_url(path: str | PathLike[str]) -> bool:
    return "://" in str(path) and not isinstance(path, PathLike)


def _is_whole(content: Any) -> bool:
    """Whether the file has the end of a zip archive, which `torch.save` writes last."""
    try:
        return zipfile.is_zipfile(content)
    except zipfile.BadZipFile:
        return False
    finally:
        if not isinstance(content, Path):
            content.seek(0)


def _damaged(path: str | PathLike[str]) -> str:
    return f"{path} is damaged: its contents do not match its digest; use another copy, or fit the posterior again"


def _file_system(path: str | PathLike[str]) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # a dependency of torch and Lightning

    return url_to_fs(str(path))
