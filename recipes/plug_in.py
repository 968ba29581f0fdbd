"""Every method on unmodified modules: nothing in `lit_digits.py` knows about this package.

In Python: callbacks that do not change training share one Trainer; the others, and the mixins (see `bayes_digits.py`),
have their own. The table compares each method with MAP, the plain network after that training.

    python recipes/plug_in.py                  # half a minute; results go to outputs/plug_in/
    python recipes/plug_in.py --devices 2      # the same on two `ddp` processes

With `LightningCLI`: one YAML file for each method, and any of Lightning's options. After the fit it runs a test.

    python recipes/plug_in.py fit --config recipes/configs/laplace.yaml --trainer.devices 2 --trainer.strategy ddp
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import bayes_digits as own
import lightning as L
from lightning.pytorch.cli import LightningCLI
from lit_digits import NOISE, DigitsData, LitDigits
from matplotlib.figure import Figure
from program import QUIET, Run, is_first_process, progress, start

import lightning_bayes as bayes


@dataclass(frozen=True)
class Settings:
    epochs: int = 30
    n_train: int = 300
    batch_size: int = 32
    devices: int = 1


def trainings() -> dict[str, tuple[type[L.LightningModule], dict[str, Any], list[L.Callback]]]:
    """For each training run, a module, its arguments and its callbacks."""
    options = {"likelihood": "classification", "beta": 0.01, "prior_std": "he"}
    variational = {"log_sigma_multiplier": 10.0, "variational": options}
    quiet, memory = {"progress": False}, {"memory_factor": 0.01, "memory": bayes.Memory(initial_curvature=300.0)}
    last_layer = bayes.LaplaceCallback(subset="last_layer", structure="full", name="last_layer", **quiet)
    subnetwork = bayes.LaplaceCallback(subset=bayes.Subnetwork(200, by="magnitude"), name="subnetwork", **quiet)
    pixels = bayes.OnlineLaplaceCallback(bayes.Gaussian(noise_std=NOISE), name="autoencoder", **memory)
    return {
        "as it was": (LitDigits, {}, [bayes.LaplaceCallback(**quiet), last_layer, subnetwork, bayes.L2MCallback()]),
        "averaged weights": (LitDigits, {}, [bayes.SWAGCallback(start=0.5, **quiet)]),
        "learned prior": (LitDigits, {}, [bayes.MarginalLikelihoodCallback(**quiet)]),
        "at samples": (LitDigits, {}, [bayes.OnlineLaplaceCallback("classification", **memory)]),
        "improved variational online Newton": (own.IVONDigits, {}, [bayes.IVONCallback()]),
        "variational Laplace": (own.VariationalLaplaceDigits, variational, []),
        "variational inference": (own.VariationalInferenceDigits, variational, []),
        "variational last layer": (own.VariationalLastLayerDigits, variational, []),
        "autoencoder at samples": (own.Autoencoder, {}, [pixels]),
    }


def train(run: Run, name: str) -> Iterable[dict[str, Any]]:
    """Fit and test as usual; return the metrics that callbacks and mixins log, one row per name."""
    kind, arguments, callbacks = trainings()[name]
    L.seed_everything(run.seed, verbose=False)
    where = {"accelerator": "cpu", "devices": run.settings.devices, "default_root_dir": run.output}
    trainer = L.Trainer(max_epochs=run.settings.epochs, callbacks=callbacks, **where, **QUIET)
    model, data = kind(**arguments), DigitsData(run.settings.n_train, run.settings.batch_size)
    trainer.fit(model, data)
    (logged,) = trainer.test(model, data, verbose=False)
    for method in [key[9:] for key in logged if key.startswith("test_nll_") and key != "test_nll_map"]:
        row = {"method": method, "NLL of MAP": logged["test_nll_map"], "NLL": logged[f"test_nll_{method}"]}
        row |= {"ECE of MAP": logged.get("test_ece_map"), "ECE": logged.get(f"test_ece_{method}")}
        yield row | {"accuracy": logged.get(f"test_acc_{method}")}


def draw(table: dict[str, dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, score in zip(figure.subplots(1, 2, sharey=True), ("NLL", "ECE"), strict=True):
        for column, mark in ((f"{score} of MAP", "k|"), (score, "o")):
            axes.plot([row[column] for row in table.values()], list(table), mark, label=column)
        axes.set_xlabel(score)
        axes.legend()
    axes.invert_yaxis()
    return figure


class Command(LightningCLI):
    def after_fit(self) -> None:
        self.trainer.test(self.model, self.datamodule)


def command_line(arguments: list[str] | None = None, **options: Any) -> LightningCLI:
    """`fit`, `validate`, `test` or `predict`, with the module that the YAML file names."""
    return Command(L.LightningModule, DigitsData, subclass_mode_model=True, args=arguments, **options)


def main() -> None:
    scales = {"default": Settings(), "fast": Settings(epochs=4, n_train=100, batch_size=10)}
    run = start(__doc__, "plug_in", scales, threads=1)
    for name in progress(trainings(), "trainings"):
        run.collect("scores", name, train, run, name)
    columns = ("NLL of MAP", "NLL", "ECE of MAP", "ECE", "accuracy")
    table = {row["method"]: {column: row[column] for column in columns} for row in run.rows("scores")}
    if is_first_process():
        run.save_table("table", table)
        run.save_picture("scores", draw(table))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("fit", "validate", "test", "predict"):
        command_line()
    else:
        main()
