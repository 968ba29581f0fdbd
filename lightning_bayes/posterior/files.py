"""A posterior's file: written whole or not at all, and read with one clear sentence for all that may be wrong with it.

The file is what `torch.save` writes of a state (see `serialization`), with a checksum of its contents. A local file is
written beside its final place, flushed to the disk and renamed, so that a process killed while writing leaves the older
file as it was. URLs (`s3://…`, `memory://…`) go through `fsspec`, in a transaction where the file system has one.

Posteriors as plain dictionaries of tensors, numbers and strings, which `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import uuid
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
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
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.network.checks import check_network
from lightning_bayes.network.gathered_layer import gathered_for, ungathered
from lightning_bayes.network.output import Output, output_of, viewed
from lightning_bayes.posterior.gaussian import Calibration, GaussianPosterior, PosteriorError, check_parameters
from lightning_bayes.posterior.implementation import implements
from lightning_bayes.posterior.laplace import LaplacePosterior
from lightning_bayes.posterior.prior import GaussianPrior
from lightning_bayes.posterior.training_points import TrainingPoints
from lightning_bayes.structures import Structure

# What torch.load raises for contents that were changed, beside an UnpicklingError.
_DAMAGE = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, EOFError),
    *(struct.error, zipfile.BadZipFile),
)


@implements("save")
def write(state: dict[str, Any], path: str | PathLike[str]) -> None:
    instance("path", path, (str, PathLike), "a file's path or URL")
    state = {**state, "checksum": checksum(state)}
    if _is_url(path):
        buffer = io.BytesIO()  # before the file is opened: an error leaves no half of it behind
        torch.save(state, buffer)
        system, place = _file_system(path)
        with system.transaction, system.open(place, "wb") as file:
            file.write(buffer.getvalue())
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"cannot save the posterior as {target}: there is no folder {target.parent}; create it first"
        )
    if target.is_dir():
        raise IsADirectoryError(f"cannot save the posterior as {target}, which is a folder: name a file in it")
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def read(path: str | PathLike[str], name: str | None = None) -> dict[str, Any]:
    """The state in a file that `write` wrote, or in a Trainer's checkpoint, where `name` chooses among several."""
    state = read_any(path, "posterior")
    if isinstance(state, dict) and "state_dict" in state:
        try:
            return posterior_in(state, name)
        except PosteriorError as error:
            raise PosteriorError(f"{path}: {error}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise PosteriorError(f"{path} holds no posterior but {describe(state)}: use a file that posterior.save wrote")
    known = state.pop("checksum", None)  # older files have none
    if known is not None and known != checksum(state):
        raise PosteriorError(_damaged(path))
    return state


def posterior_in(checkpoint: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The state of the posterior in a Trainer's checkpoint, where callbacks keep theirs under "Class[name]"."""
    callbacks = checkpoint.get("callbacks") or {}
    kept = {key: state.get("posterior") for key, state in callbacks.items() if isinstance(state, dict)}
    states = {key: posterior for key, posterior in kept.items() if isinstance(posterior, dict)}
    if not states:
        raise PosteriorError(
            "this checkpoint holds no posterior: it is from the middle of training, or has weights only; use the last "
            "checkpoint, or the posterior's own file with GaussianPosterior.load or DeepEnsemble.load"
        )
    named = [state for key, state in states.items() if name is None or key.endswith(f"[{name}]")]
    if len(named) != 1:
        wanted = "several posteriors, but no name= to choose by" if name is None else f"no posterior named {name!r}"
        names = ", ".join(repr(key.partition("[")[2].removesuffix("]")) for key in states)
        raise PosteriorError(f"this checkpoint holds {wanted}; it has {names}")
    return named[0]


def read_any(path: str | PathLike[str], what: str) -> Any:
    """What `torch.save` wrote: tensors, numbers and strings. `what` names it in messages."""
    instance("path", path, (str, PathLike), "a file's path or URL")
    try:
        if _is_url(path):
            system, place = _file_system(path)
            content: Any = io.BytesIO(system.cat_file(place))
        else:
            content = Path(path)
            content.stat()  # a file that may not be read is an error of its own
            if content.is_dir():
                raise IsADirectoryError(f"{path} is a folder: name the {what}'s file in it")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what}'s file at {path}: check the path, or save one first") from None
    if not _is_whole(content):
        raise PosteriorError(
            f"{path} is no {what}'s file, or was cut short: it lacks the end that torch.save writes; use another "
            "copy, or fit the posterior again"
        )
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise PosteriorError(
            f"{path} was not loaded: it is damaged, or holds Python objects that are no tensors, numbers or strings, "
            "and to load those could run any code; use a file that posterior.save wrote"
        ) from None
    except torch.cuda.OutOfMemoryError:
        raise
    except _DAMAGE as error:
        raise PosteriorError(_damaged(path)) from error


def checksum(value: Any, start: int = 0) -> int:
    """The CRC-32 of all names, numbers and tensors, in their order."""
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(bits.numpy().data, zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode(), start))
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if isinstance(value, (list, tuple)):
        for part in value:
            start = checksum(part, start)
        return zlib.crc32(f"{len(value)} parts".encode(), start)
    return zlib.crc32(repr(value).encode(), start)


def describe(state: Any) -> str:
    """What an object is, for a message."""
    if not isinstance(state, Mapping):
        return f"an object of type {type(state).__name__}"
    if not state:
        return "an empty dictionary"
    keys = [repr(key) for key in state]
    return f"a dictionary of {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}"


def _is_whole(content: Any) -> bool:
    """Whether the end of a zip archive is there, which `torch.save` writes last."""
    try:
        return zipfile.is_zipfile(content)
    except zipfile.BadZipFile:
        return False
    finally:
        if not isinstance(content, Path):
            content.seek(0)


def _damaged(path: str | PathLike[str]) -> str:
    return f"{path} is damaged: its contents are not what was saved; use another copy, or fit the posterior again"


def _is_url(path: str | PathLike[str]) -> bool:
    return "://" in str(path) and not isinstance(path, PathLike)


def _file_system(path: str | PathLike[str]) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # torch and Lightning need it too

    return url_to_fs(str(path))


def _flush_folder(folder: Path) -> None:
    """The new name, too, survives a loss of power, where a system can promise it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


Part = TypeVar("Part")
FORMAT = 2
READABLE = (1, 2)  # 1 has another fingerprint (see `same_weights`), and no squared error
_COMMON = ("names", "shapes", "mask", "likelihood", "mean", "n_data", "fingerprint", "type")
_OF_LAPLACE = ("curvature", "kind", "n_outputs", "log_likelihood", "prior_precision", "temperature", "damping")


@implements("state_dict")
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
        "used_data": dict(posterior.used_data),
        "shift": posterior.shift,
        "output": asdict(output_of(ungathered(posterior.network))),
    }
    if not isinstance(posterior, LaplacePosterior):
        return {**state, "precision": posterior.precision.to_state()}
    curvature = posterior.curvature
    return {
        **state,
        "curvature": curvature.structure.to_state(),
        "kind": curvature.kind,
        "n_outputs": curvature.n_outputs,
        "log_likelihood": curvature.log_likelihood,
        "gradient": curvature.gradient,
        "squared_error": curvature.squared_error,
        "normalised": None if curvature.normalised is None else list(curvature.normalised),
        "weight_sharing": curvature.weight_sharing,
        "hessian": curvature.hessian,
        "samples": curvature.samples,
        "seed": curvature.seed,
        "prior_precision": posterior.prior_precision,
        "prior": posterior.prior.to_state(),
        "temperature": float(posterior.temperature),
        "damping": posterior.damping,
        "points": None if posterior.points is None else posterior.points.to_state(),
    }


@torch.inference_mode(False)  # inference tensors could not be differentiated later
@implements("from_state_dict")
def from_state(network: nn.Module, state: dict[str, Any], likelihood: Likelihood | None = None) -> GaussianPosterior:
    kind = state.get("format") if isinstance(state, Mapping) else None
    if kind not in READABLE:
        raise PosteriorError(
            f"the state holds no posterior that this version reads (format {kind!r}): it is {describe(state)}"
        )
    if state.get("type") == "ShardedPosterior":
        from lightning_bayes.posterior.sharded import ShardedPosterior

        return ShardedPosterior.from_state_dict(check_network(unwrap(network)), state, likelihood)
    network, state = check_network(unwrap(network)), inputs.to_device(dict(state), torch.device("cpu"))
    newer: dict[str, Any] = {
        "squared_error": None,
        "gradient": None,
        "calibrations": [],
        "shift": None,
        "normalised": None,
        "weight_sharing": "expand",
        "hessian": "exact",
        "samples": 1,
        "seed": 0,
        "prior": {},
        "points": None,
        "used_data": {},
        "output": {},
    }  # than some files
    state = {**newer, **state}
    network = viewed(network, Output(**state["output"]))
    matrix = "curvature" if state.get("type") == "LaplacePosterior" else "precision"
    for key in (*_COMMON, *(_OF_LAPLACE if matrix == "curvature" else ("precision",))):
        if key not in state:
            raise PosteriorError(f"the state of the posterior is not complete: it has no {key!r}; save it again")
    if likelihood is not None:
        instance("likelihood", likelihood, Likelihood, "a Likelihood, or None for the one that was saved")
    subset = Subset(tuple(state["names"]), tuple(torch.Size(s) for s in state["shapes"]), state["mask"])
    check_parameters(network, subset)
    network = gathered_for(network, subset.names)
    structure = _read(Structure.from_state, state[matrix], "matrix")
    prior = _read(GaussianPrior.from_state, state["prior"], "prior")
    _check_numbers(state, subset, structure, matrix, prior)
    device = next(iter(subset.parameters(network).values())).device
    mean, structure = state["mean"].to(device), structure.to(device)
    likelihood = likelihood or likelihood_from(state["likelihood"], device)
    n_data, fingerprint = state["n_data"], state["fingerprint"].cpu()
    calibrations = tuple(Calibration(**calibration) for calibration in state["calibrations"])
    if matrix == "precision":
        posterior = GaussianPosterior(network, subset, likelihood, mean, structure, n_data, fingerprint, calibrations)
        return replace(posterior, used_data=state["used_data"])
    log_likelihood = state["log_likelihood"]
    if log_likelihood is not None and log_likelihood.isnan():  # older files, where it is not known
        log_likelihood = None
    curvature = Curvature(
        structure=structure,
        subset=subset,
        likelihood=likelihood,
        kind=state["kind"],
        n_data=n_data,
        n_outputs=state["n_outputs"],
        log_likelihood=log_likelihood,
        squared_error=state["squared_error"],
        gradient=None if state["gradient"] is None else state["gradient"].to(device),
        normalised=None if state["normalised"] is None else tuple(state["normalised"]),
        weight_sharing=state["weight_sharing"],
        hessian=state["hessian"],
        samples=state["samples"],
        seed=state["seed"],
        output=output_of(network),
    )
    prior_precision, temperature, damping = state["prior_precision"].to(device), state["temperature"], state["damping"]
    posterior = LaplacePosterior.around(
        network, mean, fingerprint, curvature, prior_precision, temperature, damping, prior
    )
    shift = None if state["shift"] is None else state["shift"].to(device)
    points = TrainingPoints.from_state(state["points"])
    used_data = state["used_data"]
    return replace(posterior, calibrations=calibrations, shift=shift, points=points, used_data=used_data)


def _read(from_state: Callable[[Any], Part], state: Any, what: str) -> Part:
    try:
        return from_state(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PosteriorError(
            f"the state of the posterior is not complete: its {what} cannot be read ({error!r}); save it again"
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
                f"the state of the posterior does not fit itself: its {what} is of {size} weights, but the parameters "
                f"it names have {subset.size}; save it again"
            )
    for what in ("mean", matrix, "prior_precision", "prior"):
        if inputs.has_nonfinite(state.get(what)):
            raise PosteriorError(
                f"the {what.replace('_', ' ')} of the posterior holds NaN or infinity: fit the posterior again, to "
                "weights and data that are finite"
            )


def likelihood_from(state: dict[str, Any], device: torch.device) -> Likelihood:
    try:
        return Likelihood.from_state(inputs.to_device(state, device))
    except UnknownLikelihoodError:
        raise PosteriorError(
            f"the posterior was fitted with {state['name']}, a likelihood of your own: pass likelihood="
        ) from None
