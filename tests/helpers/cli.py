"""A LightningCLI program whose callbacks come from YAML."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
from lightning.pytorch.cli import LightningCLI

_YAML = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: {epochs}
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  default_root_dir: {folder}
  callbacks: [{callbacks}]
"""


def run_cli(
    folder: Path,
    model: type[L.LightningModule],
    loader: Callable[[], Any],
    callbacks: dict[str, str],
    epochs: int = 1,
    run: bool = True,
) -> LightningCLI:
    """`fit`, or without `run` only what is built; `callbacks` has the words of each class in `lightning_bayes`."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

    entries = [f"{{class_path: lightning_bayes.{kind}, init_args: {words}}}" for kind, words in callbacks.items()]
    path = folder / "config.yaml"
    path.write_text(_YAML.format(epochs=epochs, folder=folder, callbacks=", ".join(entries)))
    arguments: Any = {"run": run, "save_config_callback": None, "seed_everything_default": 0}
    with patch.object(sys, "argv", ["program"]):  # LightningCLI compares it with the given args
        return LightningCLI(model, Data, args=[*(["fit"] if run else []), "--config", str(path)], **arguments)
