"""The memory of a fit over a LoRA adapter, against width, rank and depth.

A Llama made from a config, with adapters of `peft` on queries and values, fitted with Kronecker blocks on two batches
of 4 × 64 tokens. "Factors" is the value of the formula in `docs/lora.md`: for a layer from I to O, the adapter's A has
factors with I² and r² entries, and its B has factors with r² and O² entries. The unit of time is a plain forward and
backward pass over the same data. Without `transformers` and `peft`, nothing is measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.isolate import Job
from benchmarks.measure import Result, side_by_side

TITLE = "LoRA"
CLASSES, BATCH, TOKENS, VOCABULARY, HEAD = 4, 4, 64, 1000, 64
SIZES = [  # width, rank, layers
    *((width, 8, 2) for width in (256, 512, 1024)),
    *((512, rank, 2) for rank in (16, 64)),
    *((512, 8, layers) for layers in (4, 8)),
    *((2048, rank, layers) for rank, layers in ((8, 1), (8, 2), (8, 4), (16, 1))),  # the sizes of Llama 3.2 1B
]


class Classifier(nn.Module):
    def __init__(self, width: int, rank: int, layers: int) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForSequenceClassification

        heads = width // HEAD
        config = LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
            intermediate_size=4 * width, vocab_size=VOCABULARY, num_labels=CLASSES, pad_token_id=0,
        )  # fmt: skip
        lora = LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(LlamaForSequenceClassification(config), lora)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def jobs(quick: bool) -> list[Job]:
    if find_spec("transformers") is None or find_spec("peft") is None:
        return []
    sizes = SIZES[:2] if quick else SIZES
    options: dict[str, Any] = {"unit": "passes", "seconds": 120, "default": False}
    return [Job(f"lora/width {w}, rank {r}, {n} layers", measure, {"size": (w, r, n)}, **options) for w, r, n in sizes]


def measure(size: tuple[int, int, int]) -> Result:
    from lightning_bayes import fit_laplace

    torch.manual_seed(0)
    tokens, labels = torch.randint(1, VOCABULARY, (2 * BATCH, TOKENS)), torch.arange(2 * BATCH) % CLASSES
    data = list(zip(tokens.split(BATCH), labels.split(BATCH), strict=True))
    fit_laplace(Classifier(HEAD * 4, 2, 1), data)  # triggers imports at first use
    network = Classifier(*size)
    work = partial(fit_laplace, network, data)
    result = side_by_side(lambda: work, partial(passes, network, data), 1)
    return replace(result, extra={"added memory over that of the factors": result.added / factor_bytes(*size)})


def passes(network: nn.Module, data: list[tuple[Any, Tensor]]) -> None:
    parameters = [p for p in network.parameters() if p.requires_grad]
    for x, y in data:
        torch.autograd.grad(F.cross_entropy(network(x), y), parameters)


def factor_bytes(width: int, rank: int, layers: int) -> int:
    """Bytes of all Kronecker factors in float32, including the classifier's."""
    queries, values = (width, width), (width, width // 4)
    pairs = sum(I**2 + O**2 + 2 * rank**2 for I, O in (queries, values))
    return 4 * (layers * pairs + width**2 + CLASSES**2)
