"""Options as plain dictionaries and lists, which any checkpoint can hold.

A configuration tool hands over containers of its own (Hydra's `DictConfig` and `ListConfig`), and a checkpoint that
holds one cannot be read with `weights_only=True`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def plain_values(value: Any) -> Any:
    """Mappings as dictionaries and sequences as lists, down to what is neither; tuples stay tuples.

    >>> plain_values({"prior_std": {"*": 1.0}, "deterministic": range(2)})
    {'prior_std': {'*': 1.0}, 'deterministic': [0, 1]}
    """
    if isinstance(value, Mapping):
        return {key: plain_values(v) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain_values, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain_values(v) for v in value]
    return value
