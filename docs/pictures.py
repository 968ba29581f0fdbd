"""The pictures of the method pages: one data set with a gap, one network, each method beside the plain network.

    python docs/pictures.py         # a minute or two on one core; writes docs/images/gap_*.png
    python docs/pictures.py swag    # one of them

The sine's points between 2 and 4 (orange) are hidden from training and validation. The plain network's σ is the root of
its mean squared training error. Titles have the mean negative log-likelihood of the hidden points. Of five trainings
that is shown whose plain network is the median in this.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    IVON,
    DeepEnsemble,
    Gaussian,
    IVONCallback,
    L2MCallback,
    LogSigmaMultiplierMixin,
    Prediction,
    Subnetwork,
    SWAGCallback,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    VariationalLastLayerMixin,
    fit,
    metrics,
)

IMAGES = Path(__file__).parent / "images"
NOISE, EPOCHS = 0.2, 200
Panels = dict[str, tuple[Prediction, Prediction]]  # by their titles: along the line, and at the hidden points
LIGHT, DARK, HIDDEN = "#cfe3f5", "#6aaede", "#d55e00"
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = 6 * torch.rand(n, 1, generator=torch.Generator().manual_seed(seed))
    return x, torch.sin(2 * x) + NOISE * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1))


def split(x: Tensor, y: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """The points at the sides, and those in the gap."""
    gap = ((x > 2) & (x < 4)).squeeze(1)
    return TensorDataset(x[~gap], y[~gap]), TensorDataset(x[gap], y[gap])


TRAIN, _ = split(*points(220, 0))
VALIDATION, GAP = split(*points(150, 2))
LINE = torch.linspace(-1.5, 7.5, 400)[:, None]


class Net(L.LightningModule):
    weight_decay = 1e-4

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3, weight_decay=self.weight_decay)


class Undecayed(Net):
    weight_decay = 0.0


class WithIVON(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The squared error is 2σ² times the negative log-likelihood
        return IVON(self.parameters(), lr=0.1, betas=(0.9, 0.999), weight_decay=1e-4, temperature=2 * NOISE**2)


class VL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Undecayed):
    pass


class VI(LogSigmaMultiplierMixin, VariationalInferenceMixin, Undecayed):
    pass


class LastLayer(VariationalLastLayerMixin, Undecayed):
    pass


LOADER, HELD_OUT = DataLoader(TRAIN, 20, shuffle=True), DataLoader(VALIDATION, 100)


def plain_training(seed: int = 0) -> Net:
    """As a Trainer does it, without one."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = model.configure_optimizers()
    for batch in (batch for _ in range(EPOCHS) for batch in LOADER):
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    return model.eval()


def in_trainer(model: Net, *callbacks: Any) -> Any:
    """The callback's posterior, or the module's own."""
    trainer = L.Trainer(
        max_epochs=EPOCHS, check_val_every_n_epoch=EPOCHS, callbacks=list(callbacks), accelerator="cpu", **QUIET
    )
    trainer.fit(model, LOADER, HELD_OUT if callbacks else None)
    return callbacks[0].posterior if callbacks else model.eval().posterior


def laplace_of(model: Net, **words: Any) -> Any:
    """What `LaplaceCallback` does when training ends."""
    return fit(model, LOADER, HELD_OUT, likelihood="regression", progress=False, **words)


def variational(kind: type[Net], seed: int) -> Any:
    options = {"likelihood": Gaussian(noise_std=NOISE), "loss": "likelihood", "beta": 0.1, "prior_std": "he"}
    return in_trainer(seeded(kind, seed, log_sigma_multiplier=10.0, variational=options))


def last_layer(seed: int) -> Any:
    return in_trainer(seeded(LastLayer, seed, variational={"likelihood": "regression"}))


def nll(prediction: Prediction) -> float:
    law = prediction.mean, prediction.variance, GAP.tensors[1], prediction.df
    return float(metrics.functional.gaussian_nll(*law))


def panel(ax: Any, title: str, at_line: Prediction, at_gap: Prediction) -> None:
    """Two standard deviations of the function, and of a new observation."""
    x, mean = LINE.squeeze(1), at_line.mean.squeeze(1).detach()
    for variance, colour in ((at_line.variance, LIGHT), (at_line.epistemic, DARK)):
        σ = variance.squeeze(1).detach().sqrt()
        ax.fill_between(x, mean - 2 * σ, mean + 2 * σ, color=colour, linewidth=0)
    ax.plot(x, mean, color="black", linewidth=1.2)
    ax.scatter(*TRAIN.tensors, s=5, color="black", zorder=3)
    ax.scatter(*GAP.tensors, s=5, color=HIDDEN, zorder=3)
    ax.set(ylim=(-3.2, 3.2), xlim=(-1.5, 7.5), xticks=[], yticks=[])
    ax.set_title(f"{title}\nhidden points: NLL {nll(at_gap):.2f}", size=9)


def save(name: str, panels: Panels) -> None:
    figure = Figure(figsize=(7 if len(panels) == 2 else 9.6, 2.5), layout="constrained")
    for ax, (title, (at_line, at_gap)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        panel(ax, title, at_line, at_gap)
    figure.savefig(IMAGES / f"gap_{name}.png", dpi=200, pil_kwargs={"optimize": True})
    print(name, {title: round(nll(at_gap), 2) for title, (_, at_gap) in panels.items()}, flush=True)


def predictions(posterior: Any, predictive: str | None = None, **words: Any) -> tuple[Prediction, Prediction]:
    given = {"predictive": predictive} if predictive else {}
    at = (posterior.predict(x, **given, **words) for x in (LINE, GAP.tensors[0]))
    return tuple(at)  # type: ignore[return-value]


def plain(posterior: Any) -> tuple[Prediction, Prediction]:
    """The network without its posterior, with the training error as σ."""
    x, y = TRAIN.tensors
    σ = float((posterior.predict(x, "map").mean - y).square().mean().sqrt())
    return predictions(replace(posterior, likelihood=Gaussian(noise_std=σ)), "map", calibrated=False)


def draw(names: list[str]) -> None:
    """The pictures with these names, or all."""
    members = DeepEnsemble([laplace_of(plain_training(seed)) for seed in range(5)])
    seed = median_of(members)
    laplace: Any = members.posteriors[seed]
    model = laplace.network
    left = {"plain network": plain(laplace)}
    drawn: dict[str, Callable[[], Panels]] = {
        "laplace": lambda: left | {"post-hoc Laplace": predictions(laplace)},
        "structures": lambda: {
            "full": predictions(laplace_of(model, structure="full")),
            "Kronecker": predictions(laplace_of(model, structure="kron")),
            "diagonal": predictions(laplace_of(model, structure="diag")),
        },
        "subnetworks": lambda: (
            left
            | {
                "last layer (51 weights)": predictions(laplace_of(model, subset="last_layer", structure="full")),
                "250 of 2,701 weights": predictions(laplace_of(model, subset=Subnetwork(250, by="random"))),
            }
        ),
        "l2m": lambda: left | {"L2M": predictions(in_trainer(seeded(Net, seed), L2MCallback("regression")))},
        "swag": lambda: left | {"SWAG": predictions(in_trainer(seeded(Net, seed), SWAGCallback(laplace.likelihood)))},
        "ivon": lambda: (
            left | {"IVON": predictions(in_trainer(seeded(WithIVON, seed), IVONCallback(Gaussian(noise_std=NOISE))))}
        ),
        "variational_laplace": lambda: left | {"Variational Laplace": predictions(variational(VL, seed))},
        "variational_inference": lambda: left | {"variational inference": predictions(variational(VI, seed))},
        "variational_last_layer": lambda: left | {"variational last layer": predictions(last_layer(seed))},
        "ensembles": lambda: left | of_ensemble(members),
    }
    for name in names or drawn:
        save(name, drawn[name]())


def seeded(kind: type[Net], seed: int, **options: Any) -> Net:
    torch.manual_seed(seed)
    return kind(**options)


def median_of(members: DeepEnsemble) -> int:
    """Whose hidden points the plain network predicts neither best nor worst; what all of them do is printed."""
    scores = {}
    for word, predicted in (("map", plain), ("glm", predictions)):
        each = [nll(predicted(member)[1]) for member in members.posteriors]
        print(f"each of five networks, {word}: {[round(value, 2) for value in each]}, mean {sum(each) / 5:.2f}")
        scores[word] = each
    return sorted(range(5), key=lambda seed: scores["map"][seed])[2]


def of_ensemble(members: DeepEnsemble) -> Panels:
    return {
        "ensemble of 5": predictions(members, "map"),
        "ensemble of 5 Laplace posteriors": predictions(members),
    }


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    draw(sys.argv[1:])


if __name__ == "__main__":
    main()
