"""`UseOptions`: how a callback or mixin uses its posterior, whatever method it comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from lightning_bayes.arguments import flag, format_value, seed, text, word
from lightning_bayes.options.network import Network
from lightning_bayes.options.predictive import PredictiveOption
from lightning_bayes.options.tuning import CALIBRATIONS


@dataclass(frozen=True, kw_only=True)
class UseOptions:
    """The arguments of `PosteriorCallback`, which documents them."""

    name: str  # suffix of logged numbers, key among several callbacks, part of a file's name
    predictive: PredictiveOption
    network: Network = field(default_factory=Network)
    calibrate: str | None = "auto"
    ood: bool = False
    plots: bool = False
    save: bool | str | None = None
    predict_step: str = "replace"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        text("name", self.name, "a word that tells this posterior from others")
        if self.name == "map":
            raise ValueError("name='map' is the name of the plain network's own scores: choose another")
        if "/" in self.name or "\\" in self.name:
            raise ValueError(f"name must not contain a slash, got {self.name!r}")
        word("calibrate", self.calibrate, CALIBRATIONS)
        flag("ood", self.ood)
        flag("plots", self.plots)
        word("predict_step", self.predict_step, ("replace", "keep", "both"))
        seed("seed", self.seed)
        flag("progress", self.progress)
        save = self.save
        if not (save is None or isinstance(save, bool) or (isinstance(save, (str, os.PathLike)) and str(save).strip())):
            raise ValueError(
                f"save must be True, False, None, or the path of a file or folder, got {format_value(save)}"
            )
