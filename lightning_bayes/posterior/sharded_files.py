"""A sharded posterior's folder: `torch.distributed.checkpoint` writes the shards of all processes, and any number of
processes, each with shards of its own, reads them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network.shards import reshard
from lightning_bayes.posterior.gaussian import PosteriorError

VECTORS = ("curvature", "prior_precision", "mean")


def write(state: dict[str, Any], path: str | PathLike[str]) -> None:
    """The state of a sharded posterior as a folder; on all processes."""
    import torch.distributed.checkpoint as checkpoint

    plain = {"n_data": torch.tensor(state["n_data"]), "likelihood": _packed(state["likelihood"])}
    tensors = {**plain, **{vector: state[vector] for vector in VECTORS}}
    with _quiet():
        checkpoint.save(tensors, storage_writer=checkpoint.FileSystemWriter(str(path), overwrite=True))


def read(path: str | PathLike[str], network: nn.Module) -> dict[str, Any]:
    """The state, in shards like those of the network's parameters; on all processes."""
    import torch.distributed.checkpoint as checkpoint

    reshard(network)
    saved = checkpoint.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    stored = {key: meta for key, meta in saved.items() if isinstance(meta, checkpoint.TensorStorageMetadata)}
    shapes = {key.removeprefix("mean."): meta.size for key, meta in stored.items() if key.startswith("mean.")}
    parameters = {name: p for name, p in network.named_parameters() if shapes.get(name) == p.shape}
    for name in shapes.keys() - parameters.keys():
        raise PosteriorError(
            f"the posterior belongs to another network: it has {name} of shape {tuple(shapes[name])}, this one "
            "has no such parameter"
        )
    state: dict[str, Any] = {"n_data": torch.tensor(0)}
    if "likelihood" in stored:  # older folders have none
        state["likelihood"] = torch.empty(stored["likelihood"].size, dtype=torch.uint8)
    for vector in VECTORS:
        dtypes = {name: stored[f"{vector}.{name}"].properties.dtype for name in parameters}
        state[vector] = {name: torch.empty_like(p, dtype=dtypes[name]) for name, p in parameters.items()}
    with _quiet():
        checkpoint.load(state, checkpoint_id=str(path))
    state["n_data"] = int(state["n_data"])
    if "likelihood" in state:
        state["likelihood"] = _unpacked(state["likelihood"])
    return state


def is_folder_of_shards(path: Any) -> bool:
    return isinstance(path, (str, PathLike)) and Path(path, ".metadata").is_file()


def _packed(state: dict[str, Any]) -> Tensor:
    """A dictionary as bytes, for a checkpoint of tensors.  # uint8 [bytes]"""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notices that a process alone is a process alone, and that an older file is written over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
