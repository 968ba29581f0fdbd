"""Marginal likelihood: the strength of regularisation is learned from the training data, layer by layer.

The usual way is a grid: train for each weight decay without the validation images, choose on them, and train again with
all images. `MarginalLikelihoodCallback` trains once, on all images, and needs none for validation.

    python recipes/marginal_likelihood.py              # two minutes; the picture goes to outputs/marginal_likelihood/
    python recipes/marginal_likelihood.py --fashion    # 2,500 images of FashionMNIST instead of 1,000 digits
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from mnist import read_mnist
from support import QUIET, Digits, averaged, be_quiet, print_table, read_digits, score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import MarginalLikelihoodCallback, fit_laplace

OUTPUT = Path("outputs/marginal_likelihood")
SEEDS, EPOCHS, DECAYS = 3, 60, (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
Scores = dict[str, float]


class Net(L.LightningModule):
    """An ordinary LightningModule; it notes what was logged at the end of each epoch."""

    def __init__(self, size: int, out: int, decay: float) -> None:
        super().__init__()
        self.decay, self.history = decay, []
        self.net = nn.Sequential(nn.Linear(size, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.history.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=self.decay)
        return [adam], [torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS)]


def train(data: TensorDataset, seed: int, decay: float = 0.0, *callbacks: L.Callback) -> Net:
    L.seed_everything(seed, verbose=False)
    model = Net(data.tensors[0].shape[1], int(data.tensors[1].max()) + 1, decay)
    where = {"accelerator": "cpu", "default_root_dir": OUTPUT}
    L.Trainer(max_epochs=EPOCHS, callbacks=list(callbacks), **where, **QUIET).fit(model, DataLoader(data, 32, True))
    return model.eval()


def judge(model: Net, data: TensorDataset) -> Scores:
    return score(model(data.tensors[0]).detach().softmax(1), data.tensors[1])


def compare(data: Digits, seed: int) -> tuple[dict[str, Scores], list[Scores], Net]:
    """The scores of each way, all that the grid has tried, and the network whose priors were learned."""
    some, validation, test, grid = data.train, data.validation, data.test, []
    everything = TensorDataset(*map(torch.cat, zip(some.tensors, validation.tensors, strict=True)))
    marglik = MarginalLikelihoodCallback(burn_in_epochs=20, every_n_epochs=5, steps=30, save=False)
    learned = train(everything, seed, 0.0, marglik)
    by_posterior = score(marglik.posterior.predict(test.tensors[0]).probs, test.tensors[1])
    for decay in DECAYS:
        model = train(some, seed, decay)
        posterior = fit_laplace(model, DataLoader(some, 200), prior_precision=len(some) * decay)  # what the decay means
        row = {"decay": decay, "evidence": float(posterior.log_marginal_likelihood()) / len(some)}
        grid.append({**judge(model, test), **row, "validation": judge(model, validation)["NLL"]})
    best = min(grid, key=lambda row: row["validation"])
    rows = {"evidence": judge(learned, test), "its posterior": by_posterior, "grid": best}
    return {**rows, "grid, all images": judge(train(everything, seed, best["decay"]), test)}, grid, learned


def save_picture(rows: dict[str, Scores], grid: list[Scores], learned: Net, n: int) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(DECAYS, [row["NLL"] for row in grid], "o-", label="test NLL, grid (fewer images)")
    left.plot(DECAYS, [-row["evidence"] for row in grid], "s--", label="−evidence per image, grid")
    left.axhline(rows["evidence"]["NLL"], color="C3", label="test NLL, learned priors")
    left.set(xscale="log", yscale="log", xlabel="weight decay", title="one weight decay for all layers")
    history = {e: numbers for e, numbers in enumerate(learned.history, 1) if "log_evidence_marglik" in numbers}
    for layer in ("net.0", "net.2", "net.4"):
        values = [numbers[f"prior_precision/{layer}_marglik"] / n for numbers in history.values()]
        right.step(list(history), values, where="post", label=layer)
    right.set(yscale="log", xlabel="epoch", title="learned: δ/N, the weight decay of each layer")
    _ = left.legend(), right.legend()
    figure.savefig(OUTPUT / "priors.png")


def main(fashion: bool = False) -> None:
    be_quiet()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    data = read_mnist("FashionMNIST") if fashion else read_digits()
    n, n_validation = len(data.train), len(data.validation)
    print(f"{SEEDS} times {len(DECAYS) + 2} trainings on {n} images and {n_validation} for validation …")
    results = [compare(data, seed) for seed in range(SEEDS)]
    print_table({name: averaged([rows[name] for rows, _, _ in results]) for name in results[0][0]})
    save_picture(*results[0], n + n_validation)
    print(f"\npriors.png is in {OUTPUT}")


if __name__ == "__main__":
    main("--fashion" in sys.argv)
