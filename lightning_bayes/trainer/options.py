"""`UseOptions`: how a posterior predicts, is scored and is kept; the same for every callback and mixin."""

from __future__ import annotations

import os
from dataclasses import InitVar, dataclass

from lightning_bayes.arguments import count, flag, format_value, seed, text, word
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network.output import Output
from lightning_bayes.plots.figure import require_matplotlib
from lightning_bayes.predictive.output_law import PREDICTIVES


@dataclass(frozen=True, kw_only=True)
class UseOptions:
    """It checks itself when it is made; `error` is the type of its exceptions."""

    name: str  # suffix of logged numbers, key among several callbacks, and part of a file's name
    likelihood: Likelihood
    predictive: str
    link: str | None = None
    samples: int = 100  # drawn where a prediction draws
    network: str | None = None  # the submodule that maps x to f
    output: str | int | None = None  # where f is in what it returns
    class_dim: int | None = None  # of f
    ood: bool = False  # whether dataloaders after the first hold out-of-distribution data
    plots: bool = False
    seed: int = 0
    predict_step: str = "replace"
    save: bool | str | None = None  # whether, or where, the posterior's own file is written
    error: InitVar[type[Exception]] = ValueError
    has_points: InitVar[bool] = False  # training points for predictive="gp"

    def __post_init__(self, error: type[Exception], has_points: bool) -> None:
        word("predictive", self.predictive, PREDICTIVES, error)
        if self.predictive == "gp" and not has_points:
            raise error("predictive='gp' needs training points: use LaplaceCallback with gp_points=M, or None for all")
        text("name", self.name, "a word that tells this posterior from others", error)
        if self.name == "map":
            raise error("name='map' is the name of the plain network's own scores: choose another")
        if "/" in self.name or "\\" in self.name:
            raise error(f"name must not hold a slash, got {self.name!r}")
        self.likelihood.choose_link(self.link)
        count("samples", self.samples, error=error)
        if self.network is not None:
            text("network", self.network, "the dotted name of a submodule", error)
        Output(self.output, self.class_dim, error=error)
        flag("ood", self.ood, error)
        if flag("plots", self.plots, error):
            require_matplotlib()
        seed("seed", self.seed, error)
        word("predict_step", self.predict_step, ("replace", "keep", "both"), error)
        save = self.save
        if not (save is None or isinstance(save, bool) or (isinstance(save, (str, os.PathLike)) and str(save).strip())):
            raise error(f"save must be True, False, None, or the path of a file or folder, got {format_value(save)}")
