"""`LogSigmaMultiplierMixin` on the variational mixins themselves."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from multiplier_cases import Record, loader, trainer
from torch import Tensor, nn

from lightning_bayes.mixins import (
    LogSigmaMultiplierMixin,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    replace_activations,
)


class LitNet(L.LightningModule):
    """What a user has: an optimizer for the network's own weights, and a schedule."""

    def __init__(self, width: int = 4, weight_decay: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight_decay = weight_decay
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)).double()
        replace_activations(self.net, nn.Softplus)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), 0.01, weight_decay=self.weight_decay)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9, 2e-3), "interval": "step"}
        ]


class VL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, LitNet):
    pass


class VI(LogSigmaMultiplierMixin, VariationalInferenceMixin, LitNet):
    pass


class OtherOrder(VariationalLaplaceMixin, LogSigmaMultiplierMixin, LitNet):
    pass


@pytest.mark.parametrize("kind", [VL, VI, OtherOrder])
def test_adams_first_step_is_the_learning_rate_times_the_multiplier(kind: Any, tmp_path: Path) -> None:
    """`|Δθ| = η` whatever the gradient is, so that `|Δ log σ| = m η`, for log σ that the user's optimizer never saw."""
    record = Record()
    module = kind(log_sigma_multiplier={"net.0": 3.0, "*": 20.0}, variational={"beta": 0.1, "prior_std": "he"})
    trainer(tmp_path, record, max_steps=1).fit(module, loader())
    for name in module.log_sigma.keys():  # noqa: SIM118
        m = 3.0 if name.startswith("net.0.") else 20.0
        key = next(k for k, p in module.named_parameters() if p is module.log_sigma[name])
        moved = record.moves[key][0].abs()
        torch.testing.assert_close(moved, torch.full_like(moved, m * 0.01), rtol=1e-3, atol=0)
        moved = record.moves[name][0].abs()
        torch.testing.assert_close(moved[moved > 0], torch.full_like(moved[moved > 0], 0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", [VL, VI])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(kind: Any, tmp_path: Path) -> None:
    def module() -> Any:
        return kind(log_sigma_multiplier=7.0, variational={"beta": 0.1})

    whole, kept = module(), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(tmp_path, kept, enable_checkpointing=True).fit(whole, loader())
    resumed = module()
    trainer(tmp_path).fit(resumed, loader(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    for (name, found), expected in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("kind", [VL, VI])
def test_a_checkpoint_makes_the_same_module_again(kind: Any, tmp_path: Path) -> None:
    module = kind(5, log_sigma_multiplier={"net.3": 2.0}, variational={"beta": 0.3, "deterministic": ["*.bias"]})
    kept = ModelCheckpoint(tmp_path, filename="kept")
    trainer(tmp_path, kept, max_epochs=1, enable_checkpointing=True).fit(module, loader())
    loaded = kind.load_from_checkpoint(tmp_path / "kept.ckpt", width=5)
    assert loaded.log_sigma_multiplier == {"net.3": 2.0}
    assert set(loaded.log_sigma.keys()) == {"net.0.weight", "net.1.weight", "net.3.weight"}
    assert torch.equal(loaded.posterior.sample(1, seeded()), module.posterior.sample(1, seeded()))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_prior_from_weight_decay(tmp_path: Path) -> None:
    """`s = 1/√(N·wd)`; the multiplier leaves the weights' decay for the prior to find, and log σ starts from that."""
    module = VL(weight_decay=0.05, log_sigma_multiplier=5.0, variational={"prior_std": "weight_decay"})
    started: list[Tensor] = []

    class Look(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            started.append(module.log_sigma["net.0.weight"].detach().clone())

    run = trainer(tmp_path, Look(), max_epochs=1)
    run.fit(module, loader())
    expected = -0.5 * torch.log(torch.tensor(11 * 0.05, dtype=torch.float64)) - 3
    torch.testing.assert_close(started[0], expected.expand(4, 3))
    assert all(group["weight_decay"] == 0 for group in run.optimizers[0].param_groups)


def test_weight_decay_on_weights_is_warned_of_by_name_and_log_sigma_has_none(tmp_path: Path) -> None:
    module = VL(weight_decay=0.05)
    run = trainer(tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match=r"weight decay for net\.0\.weight"):
        run.fit(module, loader())
    held = {p: group["weight_decay"] for group in run.optimizers[0].param_groups for p in group["params"]}
    assert {held[p] for p in module.log_sigma.parameters()} == {0.0}
    assert {held[p] for p in module.net.parameters()} == {0.05}
