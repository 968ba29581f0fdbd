"""The pictures of the method pages: one data set with a gap, one network, each method beside the plain network.

    python docs/pictures.py         # two minutes on one core; writes docs/images/gap_*.png
    python docs/pictures.py swag    # one of them

The sine's points between 2 and 4 (orange) are hidden from training and validation. The plain network's σ is the root of
its mean squared training error. Titles have the mean negative log-likelihood of the hidden points.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import (
    DeepEnsemble,
    Gaussian,
    L2MCallback,
    LaplaceCallback,
    LogSigmaMultiplierMixin,
    Prediction,
    Subnetwork,
    SWAGCallback,
    VariationalInferenceMixin,
    VariationalLaplaceMixin,
    metrics,
)

IMAGES = Path(__file__).parent / "images"
NOISE, EPOCHS = 0.2, 300
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
        return torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=self.weight_decay)


class Undecayed(Net):
    weight_decay = 0.0


class VL(LogSigmaMultiplierMixin, VariationalLaplaceMixin, Undecayed):
    pass


class VI(LogSigmaMultiplierMixin, VariationalInferenceMixin, Undecayed):
    pass


def train(model: L.LightningModule, *callbacks: L.Callback, seed: int = 0, held_out: bool = True) -> Any:
    trainer = L.Trainer(
        max_epochs=EPOCHS, check_val_every_n_epoch=EPOCHS, callbacks=list(callbacks), accelerator="cpu", **QUIET
    )
    validation = DataLoader(VALIDATION, 100) if held_out else None
    generator = torch.Generator().manual_seed(seed)
    trainer.fit(model, DataLoader(TRAIN, 20, shuffle=True, generator=generator), validation)
    return model.eval()


def posterior_by(callback: Any) -> Any:
    torch.manual_seed(0)
    train(Net(), callback)
    return callback.posterior


def variational(kind: type[Net]) -> Any:
    torch.manual_seed(0)
    options = {"likelihood": Gaussian(noise_std=NOISE), "loss": "likelihood", "beta": 1.0, "prior_std": 0.5}
    return train(kind(log_sigma_multiplier=10.0, variational=options), held_out=False).posterior


def ensemble() -> DeepEnsemble:
    members = []
    for seed in range(5):
        torch.manual_seed(seed)
        train(Net(), callback := LaplaceCallback("regression"), seed=seed)
        members.append(callback.posterior)
    return DeepEnsemble(members)


def nll(prediction: Prediction) -> float:
    return float(metrics.functional.gaussian_nll(prediction.mean, prediction.variance, GAP.tensors[1]))


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


def draw(names: list[str]) -> None:
    """The pictures with these names, or all."""
    laplace = posterior_by(LaplaceCallback("regression"))
    left = {"plain network": predictions(laplace, "map", calibrated=False)}
    drawn: dict[str, Callable[[], Panels]] = {
        "laplace": lambda: left | {"post-hoc Laplace, Kronecker": predictions(laplace)},
        "structures": lambda: {
            "full": predictions(posterior_by(LaplaceCallback("regression", structure="full"))),
            "Kronecker": predictions(laplace),
            "diagonal": predictions(posterior_by(LaplaceCallback("regression", structure="diag"))),
        },
        "subnetworks": lambda: (
            left
            | {
                "last layer (51 weights)": predictions(subset("last_layer")),
                "250 of 2,701 weights": predictions(subset(Subnetwork(250, by="random"))),
            }
        ),
        "l2m": lambda: left | {"L2M": predictions(posterior_by(L2MCallback("regression")))},
        "swag": lambda: left | {"SWAG": predictions(posterior_by(SWAGCallback(laplace.likelihood, start=0.75)))},
        "variational_laplace": lambda: left | {"Variational Laplace": predictions(variational(VL))},
        "variational_inference": lambda: left | {"variational inference": predictions(variational(VI))},
        "ensembles": lambda: left | of_ensemble(ensemble()),
    }
    for name in names or drawn:
        save(name, drawn[name]())


def subset(of: str | Subnetwork) -> Any:
    return posterior_by(LaplaceCallback("regression", subset=of, structure="full"))


def of_ensemble(members: DeepEnsemble) -> Panels:
    return {
        "ensemble of 5": predictions(members, "map"),
        "ensemble of 5 Laplace posteriors": predictions(members),
    }


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    draw(sys.argv[1:])


if __name__ == "__main__":
    main()
