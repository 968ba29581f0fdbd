"""Bags of words, the inputs of a network with an `EmbeddingBag`: all words in one vector, and where each bag begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network.containers import (
    Arguments,
    Change,
    Container,
    forward_parameters,
    map_tensors,
)
from lightning_bayes.network.output import output_of, unwrap_output


@dataclass(frozen=True, eq=False)
class Bags(Container):
    parts: dict[str, Any]  # by the names of the network's arguments
    words: tuple[str, ...]  # the arguments with one number per word
    has_end: bool = False  # whether the last offset is the end of the last bag

    @classmethod
    def wrap(cls, network: nn.Module, x: Any, n_targets: int | None) -> Container | None:
        """Bags are recognised by an argument `offsets` of the network."""
        if not isinstance(x, (tuple, list, Mapping)) or output_of(network).together:
            return None
        names = [p.name for p in forward_parameters(network)]
        parts = dict(x) if isinstance(x, Mapping) else dict(zip(names, x, strict=False))
        offsets = parts.get("offsets")
        if len(parts) != len(x) or not isinstance(offsets, Tensor) or offsets.ndim != 1:
            return None
        vectors = {name: t for name, t in parts.items() if isinstance(t, Tensor) and t.ndim == 1 and name != "offsets"}
        words = next((name for name, t in vectors.items() if not t.is_floating_point()), None)
        if words is None or len(vectors[words]) < int(offsets.max()):
            return None
        layers = [module for module in unwrap_output(network).modules() if isinstance(module, nn.EmbeddingBag)]
        bags = cls(parts, (words,), any(layer.include_last_offset for layer in layers))
        n_words = len(vectors[words])
        others = [name for name, t in vectors.items() if name != words and len(t) == n_words != bags.size]
        return replace(bags, words=(words, *others)) if n_targets in (None, bags.size) else None

    @property
    def size(self) -> int:
        return len(self.parts["offsets"]) - self.has_end

    def take(self, examples: list[int]) -> Bags:
        starts, n_words = self.parts["offsets"][: self.size], len(self.parts[self.words[0]])
        ends = torch.cat([starts[1:], starts.new_tensor([n_words])])
        lengths = (ends - starts)[examples]
        ranges = [torch.arange(int(starts[n]), int(ends[n]), device="cpu") for n in examples]
        index = torch.cat(ranges).to(starts.device)

        def taken(name: str, part: Any) -> Any:
            if name in self.words:
                return part[index]
            return part[examples] if isinstance(part, Tensor) and part.ndim and len(part) == self.size else part

        borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        parts = {name: taken(name, part) for name, part in self.parts.items()}
        return replace(self, parts={**parts, "offsets": borders if self.has_end else borders[:-1]})

    def arguments(self, network: nn.Module) -> Arguments:
        return (), self.parts

    def map(self, change: Change) -> Bags:
        return replace(self, parts=map_tensors(self.parts, change))
