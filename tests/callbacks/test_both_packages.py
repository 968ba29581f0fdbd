"""`lightning.pytorch` and `pytorch_lightning` define separate classes; all callbacks work in both packages."""

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import torch.nn.functional as F
from callback_cases import CLASSES, FEATURES, held_out, labelled, same_numbers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bayes import L2MCallback, LaplaceCallback, OnlineLaplaceCallback, VariationalLaplaceMixin

pytorch_lightning = pytest.importorskip("pytorch_lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*in eval mode"),
]


def network_of(package: Any, variational: bool) -> Any:
    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.05)

    if not variational:
        return Net()

    class Bayes(VariationalLaplaceMixin, Net):
        pass

    return Bayes(variational={"likelihood": "classification", "prior_std": 1.0})


def run(package: Any, folder: Path, kind: str) -> dict[str, dict[str, float]]:
    """What is logged for the weights in memory, and in a new Trainer for the first and the last checkpoint."""
    make: Any = {
        "laplace": lambda: [LaplaceCallback(progress=False)],
        "l2m": lambda: [L2MCallback(prior_precision=1.0)],
        "online": lambda: [OnlineLaplaceCallback("classification")],
        "variational": list,
    }[kind]

    def trainer(*callbacks: Any) -> Any:
        return package.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks),
        )  # fmt: skip

    package.seed_everything(0, verbose=False)
    checkpoint = package.callbacks.ModelCheckpoint(folder / "kept", monitor="step", mode="min", save_top_k=2)
    model, fit = network_of(package, kind == "variational"), trainer(*make(), checkpoint)
    fit.fit(model, DataLoader(labelled(37), batch_size=8, shuffle=True))
    found = {"memory": fit.test(model, held_out(), verbose=False)[0]}
    paths = {"best": checkpoint.best_model_path, "last": checkpoint._last_checkpoint_saved}
    if kind == "l2m":
        del paths["best"]  # an optimizer's second moment belongs to the last weights
    for which, path in paths.items():
        again = network_of(package, kind == "variational")
        (found[which],) = trainer(*make()).test(again, held_out(), ckpt_path=path, verbose=False)
    return found


@pytest.mark.parametrize("kind", ["laplace", "l2m", "online", "variational"])
def test_every_callback_is_the_same_in_both(tmp_path: Path, kind: str) -> None:
    theirs = run(pytorch_lightning, tmp_path / "pytorch_lightning", kind)
    ours = run(lightning.pytorch, tmp_path / "lightning", kind)
    assert theirs.keys() == ours.keys()
    for which, numbers in theirs.items():
        assert {"test_nll_map"} < numbers.keys(), which
        same_numbers(numbers, ours[which])
    same_numbers(ours["last"], ours["memory"])
