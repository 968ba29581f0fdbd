"""Conformal sets of a callback's posterior, and what its Trainer has used before."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, Prediction

pytestmark = pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.1)


def test_sets_of_a_trainers_predictions_on_fresh_data(tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 4, generator=generator)
    y = (2 * x[:, :3] + torch.randn(900, 3, generator=generator)).argmax(1)
    train, validation, fresh, new = (
        DataLoader(TensorDataset(x[part], y[part]), 50) for part in torch.arange(900).tensor_split([200, 400, 700])
    )
    laplace, module = LaplaceCallback(progress=False), Net()
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options: Any = {**dict.fromkeys(quiet, False), "accelerator": "cpu", "default_root_dir": tmp_path}
    trainer = L.Trainer(max_epochs=3, callbacks=[laplace], **options)
    trainer.fit(module, train, validation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conformal = laplace.posterior.conformalize(fresh, 0.9)
    inputs = DataLoader(TensorDataset(new.dataset.tensors[0]), 50)  # type: ignore[attr-defined]
    sets = conformal.sets(Prediction.cat(trainer.predict(module, inputs)))
    y_new = new.dataset.tensors[1]  # type: ignore[attr-defined]
    assert float(sets.gather(1, y_new[:, None]).double().mean()) > 0.85
    assert sets.shape == (200, 3)
