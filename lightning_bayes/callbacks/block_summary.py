"""Which layers of a posterior are Kronecker products and which are exact blocks, in a few words."""

from __future__ import annotations

from lightning_bayes.network.subset import layer_of
from lightning_bayes.structures import Structure

_NAMED = 3  # exact blocks that are told by name


def block_summary(structure: Structure) -> str:
    """`"Kronecker: 4 layers; dense: 2 (net.1, net.4)"`; nothing for a matrix that is all of one kind."""
    layers: dict[type[Structure], list[str]] = {}
    for name, block in structure.named_blocks:
        layers.setdefault(type(block), []).append(layer_of(name))
    parts = []
    for kind, names in layers.items():
        distinct = list(dict.fromkeys(names))
        if not kind.is_exact:
            parts.append(f"{kind.__name__}: {len(distinct)} layer{'s' if len(distinct) > 1 else ''}")
        else:
            some = ", ".join(distinct[:_NAMED]) + (", …" if len(distinct) > _NAMED else "")
            parts.append(f"{kind.__name__.lower()}: {len(distinct)} ({some})")
    return "; ".join(parts)
