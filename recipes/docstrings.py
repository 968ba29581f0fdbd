"""Real text that every machine has: the docstrings of installed packages, labelled by their library.

Words become numbers by hashing, so no tokenizer is downloaded. Names of libraries are removed, because they would give
the answer away. Docstrings with the same beginning count once across all libraries, so no docstring is in two sets.
"""

import ast
import random
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

WORDS, VOCABULARY, PADDING, START = 30, 2048, 0, 1
NAMES = {
    *("torch", "pytorch", "torchvision", "torchmetrics", "lightning", "pl", "scipy", "sp", "sympy", "numpy", "np"),
    *("sklearn", "scikit", "learn", "matplotlib", "mpl", "plt", "pyplot", "networkx", "nx"),
}
Example = dict[str, Tensor]  # the format of Hugging Face's models
Examples = list[Example]


class Docstrings:
    """`read(library, label, n)`: up to `n` new docstrings of a library."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def read(self, library: str, label: int, n: int) -> Examples:
        examples: Examples = []
        spec = find_spec(library)
        assert spec is not None, f"{library} is not installed"
        files = sorted(path for path in Path(spec.origin or "").parent.rglob("*.py") if "tests" not in path.parts)
        for path in random.Random(0).sample(files, len(files)):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
                tokens = tokenize(text or "")
                if len(tokens) > 5 and tokens not in self.seen and len(examples) < n:
                    self.seen.add(tokens)
                    examples.append(example(tokens, label))
            if len(examples) == n:
                break
        return examples

    def read_all(self, libraries: Sequence[str], n: int) -> list[Examples]:
        """Up to `n` docstrings of each library, labelled by its index."""
        return [self.read(library, label, n) for label, library in enumerate(libraries)]


def make_bert(labels: int, weights: Any = None) -> Any:
    """A small transformer for these words, and the weights of its layers below the head."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": WORDS, "num_labels": labels}
    model = BertForSequenceClassification(BertConfig(**sizes, **text))
    if weights is not None:
        model.bert.load_state_dict(weights)
    return model


def tokenize(text: str) -> tuple[int, ...]:
    """The tokens of the first words."""
    words = [word for word in re.findall("[a-z]+", text.lower()) if word not in NAMES]
    return (START, *(2 + crc32(word.encode()) % (VOCABULARY - 2) for word in words[: WORDS - 1]))


def example(tokens: tuple[int, ...], label: int) -> Example:
    ids = torch.tensor([*tokens, *[PADDING] * (WORDS - len(tokens))])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": torch.tensor(label)}


def together(examples: Examples) -> Example:
    """Stack the examples into one batch."""
    return {key: torch.stack([one[key] for one in examples]) for key in examples[0]}


def split(groups: list[Examples], *sizes: int) -> list[Examples]:
    """Split at random into parts with `sizes` examples per group; if a group is too small, its last parts are
    smaller."""
    parts: list[Examples] = [[] for _ in sizes]
    for group in groups:
        order = torch.randperm(len(group)).tolist()
        for part, size in zip(parts, sizes, strict=True):
            part += [group[i] for i in order[:size]]
            order = order[size:]
    return parts
