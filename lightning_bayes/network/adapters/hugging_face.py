"""Batches of Hugging Face: dicts with `labels`, which causal language models shift inside their loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network.containers import register_splitter
from lightning_bayes.network.errors import DataError
from lightning_bayes.network.output import unwrap_output

LABELS = ("labels", "label")  # keys of the targets in a dict


@register_splitter
def split_labels(network: nn.Module, batch: Any, stage: str) -> tuple[Any, Any] | None:
    if not isinstance(batch, Mapping):
        return None
    key = next((key for key in LABELS if key in batch), None)
    if key is None:
        raise DataError(
            f"a batch must be a pair (x, y), but the loader gave a dict with {', '.join(map(repr, batch))}: its "
            f"targets must have the key {' or '.join(map(repr, LABELS))}"
        )
    x = {name: value for name, value in batch.items() if name != key}
    return x, _next_tokens(x, batch[key]) if _predicts_next_token(network) else batch[key]


def without_targets(batch: Any) -> Any:
    """The input of a batch that may have targets."""
    return {name: v for name, v in batch.items() if name not in LABELS} if isinstance(batch, Mapping) else batch


def _predicts_next_token(network: nn.Module) -> bool:
    """Whether the network contains a causal language model."""
    for module in unwrap_output(network).modules():
        name, config = type(module).__name__, getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) or name.startswith(("XLNet", "XLM", "Flaubert")):
            return False
        if getattr(module, "loss_type", None) == "ForCausalLM" or name.endswith("LMHeadModel"):
            return True
    return False


def _next_tokens(x: Mapping[str, Any], labels: Any) -> Any:
    """Labels aligned with the outputs. Labels that equal the input tokens, Hugging Face's convention, are shifted to
    the next token; other labels, such as tags or shifted tokens, are returned unchanged."""
    ids = x.get("input_ids")
    if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.shape != ids.shape:
        return labels
    if not bool(((labels == ids) | (labels == -100)).all()):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
