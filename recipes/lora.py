"""LoRA: a small transformer is pre-trained, then fine-tuned with an adapter, and only the adapter gets a posterior.

The network learns to answer "Which library is this docstring from?" for four libraries in pre-training, and then for
four others with few examples each. Docstrings of two more libraries are new to it, and should stand out.

    python recipes/lora.py    # two minutes; needs transformers and peft; adapters and posteriors go to outputs/lora/
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from digits import auroc, draw_scores, score
from docstrings import Docstrings, Example, Examples, make_bert, split, together
from lightning.pytorch.callbacks import EarlyStopping
from program import QUIET, Run, averaged, progress, start
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bayes import LaplaceCallback, LaplacePosterior

try:
    from peft import LoraConfig, get_peft_model
except ModuleNotFoundError as error:
    raise SystemExit(f"recipes/lora.py needs {error.name}: pip install transformers peft") from None

FIRST, KNOWN = ("torch", "scipy", "sympy", "torchvision"), ("numpy", "sklearn", "matplotlib", "networkx")
UNKNOWN = ("lightning", "torchmetrics")


@dataclass(frozen=True)
class Settings:
    adapters: int = 3
    epochs: int = 60
    docstrings: tuple[int, ...] = (700, 200, 50, 200)  # per library: pre-training, training, validation and test


class Classifier(L.LightningModule):
    """An ordinary LightningModule around a Hugging Face model, with an adapter or without."""

    def __init__(self, model: Any, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: Example, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Example, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)


def train(module: Classifier, data: Examples, validation: Examples, epochs: int, *callbacks: L.Callback) -> None:
    callbacks += (EarlyStopping("val_loss", patience=5),)
    trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu", **QUIET)
    trainer.fit(module, DataLoader(data, 32, shuffle=True), DataLoader(validation, 100))


def pre_train(run: Run, groups: list[Examples]) -> Any:
    L.seed_everything(run.seed, verbose=False)
    base, (n, _, n_validation, _) = make_bert(len(FIRST)), run.settings.docstrings
    train(Classifier(base, 1e-3), *split(groups, n - n_validation, n_validation), 6)
    return base.bert.state_dict()


def fine_tune(run: Run, base: Any, groups: list[Examples], unknown: Examples, seed: int) -> Any:
    """Train an adapter as usual. Only its weights are trainable, so the posterior covers exactly these."""
    L.seed_everything(seed, verbose=False)
    data, validation, test = split(groups, *run.settings.docstrings[1:])
    model = make_bert(len(KNOWN), base)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value", "dense"]))
    subsets = {"adapter": "all", "last layer": "last_layer"}
    laplaces = {n: LaplaceCallback(name=n, network="model", subset=s, save=False) for n, s in subsets.items()}
    train(Classifier(model, 3e-3), data, validation, run.settings.epochs, *laplaces.values())
    model.save_pretrained(folder := run.output / f"adapter_{seed}")
    laplaces["adapter"].posterior.save(folder / "posterior.pt")
    posteriors = {f"Laplace, {name}": laplace.posterior for name, laplace in laplaces.items()}
    return judge(posteriors, validation, [test, unknown])


def judge(posteriors: dict[str, LaplacePosterior], validation: Examples, sets: list[Examples]) -> Any:
    """Scores of the probabilities on known libraries, and how well entropy detects unknown ones."""
    network = posteriors["Laplace, adapter"]
    tempered = network.calibrate(DataLoader(validation, 100), predictive="map")
    methods = {"MAP": partial(network.predict, predictive="map", calibrated=False)}
    methods |= {"MAP + temperature": partial(tempered.predict, predictive="map")}
    methods |= {name: posterior.predict for name, posterior in posteriors.items()}
    (known, y), (unknown, _) = ((batch, batch.pop("labels")) for batch in map(together, sets))
    answers = {name: (predict(known), predict(unknown)) for name, predict in methods.items()}
    rows = {n: score(f.probs, y) | {"AUROC unknown": auroc(f.entropy, u.entropy)} for n, (f, u) in answers.items()}
    return {"rows": rows, "entropies": {name: [p.entropy for p in pair] for name, pair in answers.items()}}


def main() -> None:
    run = start(__doc__, "lora", {"default": Settings(), "fast": Settings(1, 2, (40, 20, 15, 15))}, threads=1)
    docstrings, (n_first, *parts) = Docstrings(), run.settings.docstrings
    first, known = docstrings.read_all(FIRST, n_first), docstrings.read_all(KNOWN, sum(parts))
    unknown = [one for group in docstrings.read_all(UNKNOWN, 2 * parts[-1]) for one in group]
    base, seeds = run.once("base", pre_train, run, first), progress(run.seeds(run.settings.adapters), "adapters")
    results = [run.once(f"{seed}", fine_tune, run, base, known, unknown, seed) for seed in seeds]
    run.save_table("table", {name: averaged([r["rows"][name] for r in results]) for name in results[0]["rows"]})
    run.save_picture("entropy", draw_scores(results[0]["entropies"]))


if __name__ == "__main__":
    main()
