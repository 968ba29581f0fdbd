"""The autograd graph behind an output: which layers it depends on, and how often it uses each parameter."""

from __future__ import annotations

from collections import Counter

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def uses(f: Tensor) -> Counter[Node]:
    """How many edges of the graph of `f` lead to each of its nodes; a parameter's node has one edge per use.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> uses(w * 3 + w)[get_gradient_edge(w).node]
    2
    """
    root = get_gradient_edge(f).node
    counts, open_nodes = Counter([root]), [root]
    while open_nodes:
        for node, _ in open_nodes.pop().next_functions:
            if node is not None:
                if node not in counts:
                    open_nodes.append(node)
                counts[node] += 1
    return counts
