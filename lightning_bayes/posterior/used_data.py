"""Which examples a posterior was fitted, tuned or calibrated on, in a few kilobytes that are saved with it.

An example becomes a 64-bit hash of its input and target. Of all hashes the `K` smallest are kept (Bar-Yossef et al.
2002, "Counting distinct elements in a data stream"). Of other data, the examples whose hash is not above the largest
one kept can be told exactly: they were used if and only if their hash is among those kept. Order, batches and processes
change nothing; random augmentation does, as it makes other examples.

The hash of a row is a function of `Σⱼ keyⱼ·valueⱼ`, to which zeros add nothing: a text has the same hash whatever
length it is padded to with zeros, or with any token where there is an `attention_mask`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.network import Processes, inputs
from lightning_bayes.network.checks import check_loader
from lightning_bayes.network.loaders import ObservedLoader
from lightning_bayes.network.noise import as_bits, hashed
from lightning_bayes.posterior.gaussian import GaussianPosterior

KEPT = 1024
FEW = 2**17  # numbers that are hashed at a time, in the processor's cache: a fit shall not notice it
IGNORED = -100  # the target that torch and Hugging Face pad with
MANY = 2**16  # hashes, of which the smallest are taken
Posterior = TypeVar("Posterior", bound=GaussianPosterior)


class UsedData:
    """The examples of a loader that are used `as_` "fit", "tuning" or "calibration" data: iterate over `watched`, and
    note them on the posterior afterwards."""

    def __init__(self, network: nn.Module, loader: Iterable[Any], as_: str, processes: Processes | None = None) -> None:
        stage = "train" if as_ == "fit" else "val"
        self.watched = ObservedLoader(network, check_loader(loader), self._look, stage)
        self._as, self._processes = as_, processes or Processes()
        self._parts: list[Tensor] = [torch.empty(0, dtype=torch.long, device="cpu")]

    def noted(self, posterior: Posterior) -> Posterior:
        kept = _smallest([*self._parts, posterior.used_data.get(self._as, self._parts[0][:0])])
        if self._processes.size > 1:
            kept = _smallest(self._processes.gather(kept))
        return replace(posterior, used_data={**posterior.used_data, self._as: kept})

    def _look(self, x: Any, y: Tensor) -> None:
        hashes = example_hashes(x, y)
        if len(hashes):  # those of graphs have none, and many empty parts would be many
            self._parts.append(hashes)
        if sum(map(len, self._parts)) > MANY:
            self._parts = [_smallest(self._parts)]


def example_hashes(x: Any, y: Tensor) -> Tensor:
    """A number for each example; none where an example is not a row of the input's tensors.  # [B] or [0]"""
    leaves = [] if isinstance(x, inputs.Container) else inputs.tensors(x)
    rows = [t.detach() for t in leaves if _is_plain(t) and t.ndim and len(t) == len(y)]
    if not rows or not len(y):
        return torch.empty(0, dtype=torch.long, device=y.device)
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    parts = [*(_without_padding(t, mask) for t in rows), _without_ignored(y.detach())]
    return hashed(torch.stack([_row_hashes(t).to(y.device) for t in parts], dim=1))


def share_used(hashes: Tensor, kept: Tensor) -> float:
    """The share of these examples that are among the used ones, as far as those kept can tell."""
    known = hashes if len(kept) < KEPT else hashes[hashes <= kept[-1]]
    return float(torch.isin(known, kept).double().mean()) if len(known) and len(kept) else 0.0


def _smallest(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.cpu() for part in parts]).unique()[:KEPT]  # ascending


def _is_plain(t: Tensor) -> bool:
    return t.layout == torch.strided and not t.is_nested and not t.is_complex()


def _without_padding(t: Tensor, mask: Any) -> Tensor:
    """Whole numbers, such as tokens, with zeros where an attention mask has them."""
    if not isinstance(mask, Tensor) or t.is_floating_point() or t.shape != mask.shape:
        return t
    return t.masked_fill(mask == 0, 0)


def _without_ignored(y: Tensor) -> Tensor:
    """Classes from one on, so that those that are marked as unknown are zeros."""
    return y if y.is_floating_point() else (y.long() + 1).masked_fill(y == IGNORED, 0)


def _row_hashes(t: Tensor) -> Tensor:
    """Of all numbers of each example.  # [B]"""
    flat = t.reshape(len(t), -1)
    return torch.cat([hashed(as_bits(part)) for part in flat.split(max(1, FEW // max(1, flat.shape[1])))])
