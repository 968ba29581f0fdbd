"""Networks of Hugging Face's transformers, made from small configurations, with dict batches that hold `labels`."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import transformers as hf
from helpers.tensors import seeded
from real_data import BATCH, CLASSES, TOKENS, WORDS, labels, texts
from real_frame import HELD_OUT, Ordinary, Real
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bayes import GLM


class HuggingFaceModule(Ordinary):
    """The form of Lightning's own tutorial on transformers: the model computes its loss."""

    def __init__(self, kind: Any, config: Any) -> None:
        super().__init__()
        self.model = kind.from_config(config)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(**batch).loss


class T5Classifier(Ordinary):
    """The encoder alone, with a head of the author's own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = hf.T5EncoderModel(CONFIGS["t5"])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.encoder(input_ids, attention_mask).last_hidden_state.mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"], batch["attention_mask"]), batch["labels"])


WIDTH = 8
SMALL: dict[str, Any] = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0}
BERT: dict[str, Any] = {
    **SMALL,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
CONFIGS: dict[str, Any] = {
    "bert": hf.BertConfig(**BERT),
    "roberta": hf.RobertaConfig(**BERT),
    "distilbert": hf.DistilBertConfig(**SMALL, dim=WIDTH, n_layers=1, n_heads=2, hidden_dim=12),
    "gpt2": hf.GPT2Config(**SMALL, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2),
    "bert, several labels": hf.BertConfig(**BERT, problem_type="multi_label_classification"),
    "llama": hf.LlamaConfig(**BERT, num_key_value_heads=1, bos_token_id=1, eos_token_id=2),
    "t5": hf.T5Config(**SMALL, d_model=WIDTH, d_kv=4, d_ff=12, num_layers=1, num_heads=2),
    "vit": hf.ViTConfig(
        image_size=16, patch_size=8, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, num_labels=CLASSES,
    ),
}  # fmt: skip


def padded(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Texts of different lengths, and which of their words are there."""
    mask = torch.arange(TOKENS) < torch.randint(3, TOKENS + 1, (n, 1), generator=seeded(seed))
    return texts(n, seed) * mask, mask.long()


def as_loader(**columns: Tensor) -> Any:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return DataLoader(rows, BATCH)  # type: ignore[arg-type]


def classified(n: int, seed: int) -> Any:
    ids, mask = padded(n, seed)
    return as_loader(input_ids=ids, attention_mask=mask, labels=labels(n, seed))


def tagged(n: int, seed: int) -> Any:
    ids, mask = padded(n, seed)
    tags = torch.randint(CLASSES, ids.shape, generator=seeded(seed)).masked_fill(mask == 0, -100)
    return as_loader(input_ids=ids, attention_mask=mask, labels=tags)


def written(n: int, seed: int) -> Any:
    ids, mask = padded(n, seed)
    return as_loader(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


def marked(n: int, seed: int) -> Any:
    """Several labels for a text, each there or not."""
    ids, mask = padded(n, seed)
    several = torch.randint(2, (n, CLASSES), generator=seeded(seed)).float()
    return as_loader(input_ids=ids, attention_mask=mask, labels=several)


def pictures(n: int, seed: int) -> Any:
    return as_loader(pixel_values=torch.randn(n, 3, 16, 16, generator=seeded(seed)), labels=labels(n, seed))


OF_TEXT, OF_TOKENS, OF_WORDS = (HELD_OUT, CLASSES), (HELD_OUT, CLASSES, TOKENS), (HELD_OUT, WORDS, TOKENS)


def case(kind: Any, name: str, data: Any, shape: tuple[int, ...], in_default: bool = False, **words: Any) -> Real:
    return Real(lambda: HuggingFaceModule(kind, CONFIGS[name]), data, shape, words, in_default)


def of_texts(name: str) -> Real:
    return case(hf.AutoModelForSequenceClassification, name, classified, OF_TEXT)


def of_tokens(name: str, in_default: bool = False) -> Real:
    return case(hf.AutoModelForTokenClassification, name, tagged, OF_TOKENS, in_default)


def language_model(name: str, kind: Any = hf.AutoModelForCausalLM) -> Real:
    return case(kind, name, written, OF_WORDS, predictive=GLM(samples=5))


def adapted() -> L.LightningModule:
    """LoRA, as peft's first page has it."""
    from peft import LoraConfig, TaskType, get_peft_model

    module = HuggingFaceModule(hf.AutoModelForSequenceClassification, CONFIGS["bert"])
    module.model = get_peft_model(module.model, LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query"]))
    return module


CASES = {
    "LoRA": Real(adapted, classified, OF_TEXT),
    "BERT": of_texts("bert"),
    "DistilBERT": of_texts("distilbert"),
    "RoBERTa": of_texts("roberta"),
    "GPT-2": of_texts("gpt2"),
    "Llama": of_texts("llama"),
    "T5 encoder": Real(T5Classifier, classified, OF_TEXT),
    "ViT": case(hf.AutoModelForImageClassification, "vit", pictures, OF_TEXT),
    "BERT, tokens": of_tokens("bert", in_default=True),
    "BERT, several labels": case(
        hf.AutoModelForSequenceClassification, "bert, several labels", marked, OF_TEXT, likelihood="binary"
    ),
    "BERT, masked words": language_model("bert", hf.AutoModelForMaskedLM),
    "T5 encoder, tokens": of_tokens("t5"),
    "DistilBERT, tokens": of_tokens("distilbert"),
    "GPT-2, language model": language_model("gpt2"),
    "Llama, language model": language_model("llama"),
}
