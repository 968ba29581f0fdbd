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
from lightning_bayes.posterior.files import describe, posterior_in, read_any


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
    state = posterior_in(checkpoint, name)
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
