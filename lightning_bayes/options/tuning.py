"""How prior precisions are chosen: after a fit (`Tuning`), or while the network trains (`Learning`)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from lightning_bayes.arguments import count, flag, format_value, positive, read_option, word

TuneWord = Literal["auto", "marglik", "mackay", "linear", "grid"]
Groups = Literal["layers", "normalised"]
Fisher = Literal["weights", "optimum"]
CalibrateWord = Literal["auto", "outputs", "probs"]
EvidenceWord = Literal["marglik", "mackay", "linear"]
Keep = Literal["best", "last"]
_EVIDENCE = {"groups", "noise", "steps"}
_USED = {  # the fields that each method uses
    "auto": set(),
    "marglik": _EVIDENCE,
    "mackay": {*_EVIDENCE, "tolerance"},
    "linear": _EVIDENCE,
    "linear, iterate=True": {"iterate", "groups", "noise", "passes", "tolerance", "fisher"},
    "grid": {"metric", "low", "high", "size"},
}


@dataclass(frozen=True)
class Tuning:
    """How to choose the prior precision, and a regression's noise, after a fit.

    Args:
        method: "auto" (the method with the best measured results), "marglik" (gradients of the evidence), "mackay"
            (MacKay's fixed point of the evidence), "linear" (the evidence at the linear model's optimum) or "grid" (the
            best score on validation data).
        groups: None tunes one precision for all layers, "layers" one precision for each layer, and "normalised" one for
            each layer directly before a normalisation and one for all other layers. Only for the three evidence
            methods.
        noise: also tune a regression's noise. Only for the evidence methods.
        steps: the largest number of optimiser steps; by default 100, and 1000 for "mackay".
        tolerance: stop when the logarithms of prior and noise change by less than this, by default 1e-7. Only for
            "mackay" and `iterate`, which also applies it to the gradient and has the default 1e-3.

        iterate: for "linear": find the prior and the optimum of the linearised network together, in several passes over
            the training data.
        passes: for `iterate`: the largest number of passes.
        fisher: for `iterate`: take the output Fisher at the network's "weights" or at the linear model's "optimum".

        metric: for "grid": a torchmetrics metric of `(probs, y)`, `(mean, y)` or `(mean, variance, y)`, whose
            `higher_is_better` says which score is best. By default the negative log-likelihood.
        low: the smallest prior precision of the grid, by default 1e-4.
        high: the largest prior precision, by default 1e4.
        size: the number of prior precisions, by default 33. If none of `low`, `high` and `size` is set,
            `predictive="gp"` tries the posterior's own precision times 13 factors from 0.1 to 1000 (GLM paper, table
            2).
    """

    method: TuneWord = "auto"
    groups: Groups | None = None
    noise: bool = True
    steps: int | None = None
    tolerance: float | None = None
    iterate: bool = False
    passes: int = 10
    fisher: Fisher = "weights"
    metric: Any = field(default=None, compare=False)
    low: float | None = None
    high: float | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        word("method", self.method, get_args(TuneWord))
        word("groups", self.groups, (None, *get_args(Groups)))
        flag("noise", self.noise)
        count("steps", 1 if self.steps is None else self.steps)
        positive("tolerance", 1 if self.tolerance is None else self.tolerance)
        flag("iterate", self.iterate)
        count("passes", self.passes, 2)
        word("fisher", self.fisher, get_args(Fisher))
        low = positive("low", 1e-4 if self.low is None else self.low)
        high = positive("high", 1e4 if self.high is None else self.high)
        if not low < high:
            raise ValueError(f"low must be less than high={high}, got {low}")
        count("size", 33 if self.size is None else self.size, 2)
        if self.iterate and self.method != "linear":
            raise ValueError(f"iterate=True is an option of tune='linear', got tune={self.method!r}")
        if self.groups is not None and not self.by_evidence:
            raise ValueError(
                f"tune={self.method!r} tunes one prior for all layers: use 'marglik' with groups={self.groups!r}"
            )
        how = "linear, iterate=True" if self.iterate else self.method
        for name, default in ((f.name, f.default) for f in fields(self)):
            value = getattr(self, name)
            if name != "method" and name not in _USED[how] and value is not default and value != default:
                others = ", ".join(repr(other) for other in _USED if name in _USED[other])
                raise ValueError(f"{name}={format_value(value)} is not an option of tune={how!r}, but of {others}")

    @property
    def by_evidence(self) -> bool:
        """Whether the method maximises the evidence."""
        return self.method in get_args(EvidenceWord)

    @property
    def needs_exact_sum(self) -> bool:
        """Whether the method requires the exact sum of curvature and prior."""
        return self.method in ("mackay", "linear")


@dataclass(frozen=True)
class Learning:
    """How `MarginalLikelihoodCallback` learns prior precisions and noise while the network trains.

    Args:
        method: maximise the evidence at the current weights with Adam ("marglik") or MacKay's fixed point ("mackay"),
            or the evidence at the optimum of the linearised network with Adam ("linear").
        steps: the largest number of steps after each pass over the data.
        lr: Adam's learning rate for the logarithms of prior and noise.
        noise: also learn a regression's noise.
        keep: which weights and priors to keep at the end of training: those with the "best" evidence (evaluated at the
            weights), or the "last" ones.
        loss_scale: `c`, if the loss is `c` times the mean negative log-likelihood; by default it is measured on the
            first batch.
        n_data: the number of training examples; None counts them.
    """

    method: EvidenceWord = "marglik"
    steps: int = 10
    lr: float = 0.1
    noise: bool = True
    keep: Keep = "best"
    loss_scale: float | None = None
    n_data: int | None = None

    def __post_init__(self) -> None:
        word("method", self.method, get_args(EvidenceWord))
        count("steps", self.steps)
        positive("lr", self.lr)
        flag("noise", self.noise)
        word("keep", self.keep, get_args(Keep))
        positive("loss_scale", 1 if self.loss_scale is None else self.loss_scale)
        count("n_data", 1 if self.n_data is None else self.n_data)


def tuning_option(tune: Any, name: str = "tune") -> Tuning | None:
    """Convert `tune=`, or another argument called `name`, to an option."""

    def by_word(method: Any) -> Tuning:
        return Tuning(word(name, method, get_args(TuneWord)))

    return None if tune is None else read_option(name, tune, Tuning, by_word)


def learning_option(evidence: Any) -> Learning:
    """Convert `evidence=` of `MarginalLikelihoodCallback` to an option."""

    def by_word(method: Any) -> Learning:
        return Learning(word("evidence", method, get_args(EvidenceWord)))

    return read_option("evidence", evidence, Learning, by_word)
