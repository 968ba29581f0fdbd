"""A posterior's file: written whole or not at all, and read with one clear sentence for all that may be wrong with it.

The file is what `torch.save` writes of a state (see `serialization`), with a checksum of its contents. A local file is
written beside its final place, flushed to the disk and renamed, so that a process killed while writing leaves the older
file as it was. URLs (`s3://…`, `memory://…`) go through `fsspec`, in a transaction where the file system has one.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.arguments import instance
from lightning_bayes.posterior.gaussian import PosteriorError

# What torch.load raises for contents that were changed, beside an UnpicklingError.
_DAMAGE = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, EOFError),
    *(struct.error, zipfile.BadZipFile),
)


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
