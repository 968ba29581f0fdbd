"""Marginal likelihood: learn the strength of regularisation from the training data, layer by layer.

The usual method is a grid: train once per weight decay without the validation images, choose the value that scores best
on them, and train again on all images. `MarginalLikelihoodCallback` trains only once, on all images.

    python recipes/marginal_likelihood.py              # two minutes; results go to outputs/marginal_likelihood/
    python recipes/marginal_likelihood.py --fashion    # 2,500 images of FashionMNIST instead of 1,000 digits
"""

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from digits import Digits, read_digits, score
from matplotlib.figure import Figure
from mnist import read_mnist
from program import QUIET, Run, averaged, progress, start
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Learning, MarginalLikelihoodCallback, fit_laplace

Scores = dict[str, float]


@dataclass(frozen=True)
class Settings:
    trainings: int = 3
    epochs: int = 60
    decays: tuple[float, ...] = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    images: str = "digits"  # or "FashionMNIST"


class Net(L.LightningModule):
    """An ordinary LightningModule that records the logged metrics at the end of each epoch."""

    def __init__(self, size: int, out: int, decay: float, epochs: int) -> None:
        super().__init__()
        self.decay, self.epochs, self.history = decay, epochs, []
        self.net = nn.Sequential(nn.Linear(size, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.history.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=self.decay)
        return [adam], [torch.optim.lr_scheduler.CosineAnnealingLR(adam, self.epochs)]


def train(run: Run, part: TensorDataset, data: Digits, seed: int, decay: float | None = None) -> dict[str, Any]:
    """Train on part of the data. Without a weight decay, learn the priors."""
    L.seed_everything(seed, verbose=False)
    model = Net(part.tensors[0].shape[1], int(part.tensors[1].max()) + 1, decay or 0.0, run.settings.epochs)
    marglik = MarginalLikelihoodCallback(burn_in_epochs=20, every_n_epochs=5, save=False, evidence=Learning(steps=30))
    words = {"max_epochs": run.settings.epochs, "accelerator": "cpu", **QUIET}
    L.Trainer(callbacks=[marglik] if decay is None else [], **words).fit(model, DataLoader(part, 32, shuffle=True))
    model, loader, tests = model.eval(), DataLoader(part, 200), {"test": data.test, "validation": data.validation}
    prior = len(part) * (decay or 0.0)  # the matching prior
    posterior = marglik.posterior if decay is None else fit_laplace(model, loader, prior_precision=prior)
    scores = {name: score(model(t.tensors[0]).detach().softmax(1), t.tensors[1]) for name, t in tests.items()}
    scores["posterior"] = score(posterior.predict(data.test.tensors[0]).probs, data.test.tensors[1])
    return {**scores, "evidence": float(posterior.log_marginal_likelihood()) / len(part), "history": model.history}


def compare(run: Run, data: Digits, seed: int) -> tuple[dict[str, Scores], list[Any], list[Scores]]:
    """Return the scores of each method, all points of the grid, and the metrics logged while learning the priors."""
    everything = TensorDataset(*map(torch.cat, zip(data.train.tensors, data.validation.tensors, strict=True)))
    learned = run.once(f"evidence {seed}", train, run, everything, data, seed)
    grid = [run.once(f"decay {d} {seed}", train, run, data.train, data, seed, d) for d in run.settings.decays]
    best = min(range(len(grid)), key=lambda n: grid[n]["validation"]["NLL"])
    again = run.once(f"again {seed}", train, run, everything, data, seed, run.settings.decays[best])
    rows = {"evidence": learned["test"], "its posterior": learned["posterior"], "grid": grid[best]["test"]}
    return {**rows, "grid, all images": again["test"]}, grid, learned["history"]


def draw(decays: tuple[float, ...], n: int, rows: dict[str, Scores], grid: list[Any], history: list[Scores]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(decays, [row["test"]["NLL"] for row in grid], "o-", label="test NLL, grid (fewer images)")
    left.plot(decays, [-row["evidence"] for row in grid], "s--", label="−evidence per image, grid")
    left.axhline(rows["evidence"]["NLL"], color="C3", label="test NLL, learned priors")
    left.set(xscale="log", yscale="log", xlabel="weight decay", title="one weight decay for all layers")
    learned = {e: numbers for e, numbers in enumerate(history, 1) if "log_evidence_marglik" in numbers}
    for layer in ("net.0", "net.2", "net.4"):
        values = [numbers[f"prior_precision/{layer}_marglik"] / n for numbers in learned.values()]
        right.step(list(learned), values, where="post", label=layer)
    right.set(yscale="log", xlabel="epoch", title="learned: δ/N, the weight decay of each layer")
    _ = left.legend(), right.legend()
    return figure


def main() -> None:
    fast, fashion = Settings(1, 22, (1e-3,)), Settings(images="FashionMNIST")
    run = start(__doc__, "marginal_likelihood", {"default": Settings(), "fast": fast, "fashion": fashion}, threads=1)
    data = read_digits() if run.settings.images == "digits" else read_mnist(run.data, run.settings.images)
    results = [compare(run, data, seed) for seed in progress(run.seeds(run.settings.trainings), "comparisons")]
    run.save_table("table", {name: averaged([rows[name] for rows, _, _ in results]) for name in results[0][0]})
    run.save_picture("priors", draw(run.settings.decays, len(data.train) + len(data.validation), *results[0]))


if __name__ == "__main__":
    main()
