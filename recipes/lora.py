"""LoRA: a small transformer is pre-trained, then fine-tuned with an adapter, and only the adapter gets a posterior.

"Which library is this docstring from?" is asked about four libraries in pre-training, and then about four others with
few examples each. Docstrings of two further libraries are new to the network, and should stand out.

    python recipes/lora.py    # two minutes; needs transformers and peft; adapters and posteriors go to outputs/lora/
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from docstrings import VOCABULARY, WORDS, Docstrings, Example, Examples, split, together
from lightning.pytorch.callbacks import EarlyStopping
from support import QUIET, auroc, averaged, be_quiet, print_table, score
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bayes import LaplaceCallback, LaplacePosterior

try:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification
except ModuleNotFoundError as error:
    raise SystemExit(f"recipes/lora.py needs {error.name}: pip install transformers peft") from None

OUTPUT = Path("outputs/lora")
FIRST, KNOWN = ("torch", "scipy", "sympy", "torchvision"), ("numpy", "sklearn", "matplotlib", "networkx")
UNKNOWN, SEEDS, EPOCHS = ("lightning", "torchmetrics"), 3, 60
PRETRAIN, TRAIN, VALIDATION, TEST = 700, 200, 50, 200  # docstrings of each library


class Classifier(L.LightningModule):
    """An ordinary LightningModule around a Hugging Face model, with an adapter or without."""

    def __init__(self, model: Any, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: Example, batch_idx: int) -> Tensor:
        return self(**batch).loss

    def validation_step(self, batch: Example, batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)


def make_model() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": WORDS, "num_labels": len(KNOWN)}
    return BertForSequenceClassification(BertConfig(**sizes, **text))


def train(module: Classifier, data: Examples, validation: Examples, epochs: int, *callbacks: L.Callback) -> None:
    stop = [*callbacks, EarlyStopping("val_loss", patience=5)]
    trainer = L.Trainer(max_epochs=epochs, callbacks=stop, accelerator="cpu", default_root_dir=OUTPUT, **QUIET)
    trainer.fit(module, DataLoader(data, 32, shuffle=True), DataLoader(validation, 100))


def fine_tune(base: Any, data: Examples, validation: Examples, folder: Path) -> dict[str, LaplacePosterior]:
    """The usual training of an adapter, whose weights are all that trains: so they are the posterior's."""
    model = make_model()
    model.bert.load_state_dict(base.bert.state_dict())
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value", "dense"]))
    subsets = {"adapter": "all", "last layer": "last_layer"}
    laplaces = {n: LaplaceCallback(name=n, network="model", subset=s, save=False) for n, s in subsets.items()}
    train(Classifier(model, 3e-3), data, validation, EPOCHS, *laplaces.values())
    model.save_pretrained(folder)
    laplaces["adapter"].posterior.save(folder / "posterior.pt")
    return {f"Laplace, {name}": laplace.posterior for name, laplace in laplaces.items()}


def judge(posteriors: dict[str, LaplacePosterior], validation: Examples, sets: list[Examples]) -> Any:
    """How good the probabilities are on known libraries, and whether entropy gives unknown ones away."""
    network = posteriors["Laplace, adapter"]
    tempered = network.calibrate(DataLoader(validation, 100), predictive="map")
    methods = {"MAP": partial(network.predict, predictive="map", calibrated=False)}
    methods |= {"MAP + temperature": partial(tempered.predict, predictive="map")}
    methods |= {name: posterior.predict for name, posterior in posteriors.items()}
    (known, y), (unknown, _) = ((batch, batch.pop("labels")) for batch in map(together, sets))
    answers = {name: (predict(known), predict(unknown)) for name, predict in methods.items()}
    return {n: score(f.probs, y) | {"AUROC unknown": auroc(f.entropy, u.entropy)} for n, (f, u) in answers.items()}


def main() -> None:
    be_quiet()
    L.seed_everything(0, verbose=False)
    docstrings, rows = Docstrings(), []
    first = [docstrings.read(name, label, PRETRAIN) for label, name in enumerate(FIRST)]
    known = [docstrings.read(name, label, TRAIN + VALIDATION + TEST) for label, name in enumerate(KNOWN)]
    unknown = [one for name in UNKNOWN for one in docstrings.read(name, 0, 2 * TEST)]
    base = make_model()
    train(Classifier(base, 1e-3), *split(first, PRETRAIN - VALIDATION, VALIDATION), 6)
    for seed in range(SEEDS):
        L.seed_everything(seed, verbose=False)
        data, validation, test = split(known, TRAIN, VALIDATION, TEST)
        rows.append(judge(fine_tune(base, data, validation, OUTPUT / f"adapter_{seed}"), validation, [test, unknown]))
    print_table({name: averaged([row[name] for row in rows]) for name in rows[0]})
    print(f"\nthe adapters, each with its posterior, are in {OUTPUT}")


if __name__ == "__main__":
    main()
