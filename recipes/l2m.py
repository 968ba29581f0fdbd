"""L2M: a posterior from the second moments that Adam keeps anyway, without a pass over the data.

One training on the digits 0–7 with AdamW and a falling learning rate. Its diagonal posterior costs nothing but the
training. Beside it stands the one that it estimates: a Laplace posterior with the empirical Fisher, by a pass over the
data. Both choose prior and temperature on the validation images, which for digits is so strong a prior that they
predict alike. Two more trainings make an ensemble.

    python recipes/l2m.py    # half a minute; the posteriors go to outputs/l2m/
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support import KNOWN, QUIET, Digits, be_quiet, judge, print_table, read_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bayes import DeepEnsemble, L2MCallback, LaplacePosterior, fit_laplace

OUTPUT = Path("outputs/l2m")
MEMBERS, EPOCHS, BATCH = 3, 40, 32


class DigitNet(L.LightningModule):
    """An ordinary LightningModule: nothing in it is Bayesian."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, KNOWN))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        # β₂: the second moments are those of the last 100 steps, not of the whole training.
        adamw = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.99))
        return [adamw], [torch.optim.lr_scheduler.CosineAnnealingLR(adamw, EPOCHS)]


def train(digits: Digits, seed: int) -> LaplacePosterior:
    """The callback reads the optimizer's state when training ends, and AdamW's weight decay is the prior."""
    L.seed_everything(seed, verbose=False)
    l2m = L2MCallback(likelihood="classification")
    folder = OUTPUT / f"member_{seed}"
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[l2m], accelerator="cpu", default_root_dir=folder, **QUIET)
    trainer.fit(DigitNet(), DataLoader(digits.train, BATCH, shuffle=True), DataLoader(digits.validation, 100))
    return l2m.posterior


def main() -> None:
    be_quiet()
    digits = read_digits()
    print(f"training {MEMBERS} networks on {len(digits.train)} images of the digits 0–7 …")
    members = [train(digits, seed) for seed in range(MEMBERS)]
    l2m, ensemble = members[0], DeepEnsemble(members)
    loader, validation = DataLoader(digits.train, 100), DataLoader(digits.validation, 100)
    by_pass = fit_laplace(l2m.network, loader, structure="diag", curvature="empirical_fisher")
    ratio = l2m.curvature.structure.diagonal() / by_pass.curvature.structure.diagonal()
    methods = {
        "MAP": partial(l2m.predict, predictive="map", calibrated=False),
        "L2M": l2m.predict,
        "empirical Fisher": by_pass.tune_prior("auto", loader=validation).predict,
        f"ensemble of {MEMBERS}": partial(ensemble.predict, predictive="map"),
        f"L2M ensemble of {MEMBERS}": ensemble.predict,
    }
    print_table({name: judge(predict, digits) for name, predict in methods.items()})
    print(f"\nThe median weight's curvature by L2M is {float(ratio.nanmedian()):.2f} of that by the pass.")


if __name__ == "__main__":
    main()
