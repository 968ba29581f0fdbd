"""A Trainer's checkpoint: the posterior that a callback keeps in it, with the network that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import nn

from lightning_bayes.arguments import shown
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.checks import submodule
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.files import describe, read_any


def read_checkpoint(
    path: str | PathLike[str],
    module: Callable[..., nn.Module],
    name: str | None = None,
    network: str | None = None,
    likelihood: Likelihood | None = None,
    device: str | torch.device = "cpu",
) -> GaussianPosterior:
    """The posterior in a checkpoint; the arguments are those of `DeepEnsemble.from_checkpoints`."""
    checkpoint = _read(path)
    state = _stored_posterior(checkpoint, name)
    restored = _placed(_restore(module, path, checkpoint), device)
    own_network = restored if network is None else submodule(restored, network, PosteriorError)
    posterior = GaussianPosterior.from_state_dict(own_network, state, likelihood)
    posterior.check_weights()
    return posterior


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        checkpoint = read_any(path, "checkpoint")
    except IsADirectoryError:
        raise PosteriorError(
            "this is a folder, as sharded training writes it: use DeepEnsemble.load with the posteriors' own files"
        ) from None
    if not isinstance(checkpoint, dict):
        raise PosteriorError(f"{path} holds no checkpoint but {describe(checkpoint)}")
    return checkpoint


def _placed(network: nn.Module, device: str | torch.device) -> nn.Module:
    try:
        return network.to(device)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:150]
        raise PosteriorError(f"the network cannot be put on the device {shown(device)}: {reason}") from error


def _stored_posterior(checkpoint: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Callbacks keep theirs under "Class[name]"."""
    callbacks = checkpoint.get("callbacks") or {}
    kept = {key: state.get("posterior") for key, state in callbacks.items() if isinstance(state, dict)}
    states = {key: posterior for key, posterior in kept.items() if isinstance(posterior, dict)}
    if not states:
        raise PosteriorError(
            "this checkpoint holds no posterior: it is from the middle of training, or has weights only; use the last "
            "checkpoint, or DeepEnsemble.load with the posteriors' own files"
        )
    named = [state for key, state in states.items() if name is None or key.endswith(f"[{name}]")]
    if len(named) != 1:
        wanted = "several posteriors, but no name= to choose by" if name is None else f"no posterior named {name!r}"
        names = ", ".join(repr(key.partition("[")[2].removesuffix("]")) for key in states)
        raise PosteriorError(f"this checkpoint holds {wanted}; it has {names}")
    return named[0]


def _restore(module: Callable[..., nn.Module], path: str | PathLike[str], checkpoint: dict[str, Any]) -> nn.Module:
    if isinstance(module, nn.Module):
        raise PosteriorError(
            f"module= is one {type(module).__name__}, but every member needs one of its own: pass the class, or a "
            "function that makes one"
        )
    if hasattr(module, "load_from_checkpoint"):  # a LightningModule's class, which knows its saved arguments
        return module.load_from_checkpoint(path, map_location="cpu")
    if not callable(module):
        raise TypeError(
            f"module must be a LightningModule's class, or a function that makes a network, got {shown(module)}"
        )
    made = module()
    made.load_state_dict(checkpoint["state_dict"])
    return made
