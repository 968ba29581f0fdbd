"""How predictions are made (`predictive=`). A word stands for an option with its defaults: "glm" is `GLM()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from lightning_bayes.arguments import count, format_value, resolve_option, word

PredictiveWord = Literal["glm", "bnn", "gp", "map"]
ConformalScore = Literal["aps", "raps", "lac"]
Outputs = Literal["auto", "joint", "independent"]


class PredictiveOption:
    """Base of the options for `predictive=`."""

    kind: ClassVar[str]
    is_linear: ClassVar[bool] = False  # whether it predicts with the linearised network, which has links

    link: str | None = None
    samples: int = 0

    def _check(self) -> None:
        if self.link is not None and not isinstance(self.link, str):
            raise ValueError(f"link must be a word or None, got {format_value(self.link)}")
        count("samples", self.samples)


@dataclass(frozen=True)
class GLM(PredictiveOption):
    """The linearised network.

    Args:
        link: how to integrate over a classifier's outputs: "probit", "pairwise", "bridge" or "mc". By default the link
            that the posterior was calibrated with, or else the likelihood's first.
        samples: outputs or functions to average over where there is no closed form.
    """

    kind = "glm"
    is_linear = True

    link: str | None = None
    samples: int = 100

    def __post_init__(self) -> None:
        self._check()


@dataclass(frozen=True)
class BNN(PredictiveOption):
    """Weight samples through the network itself.

    Args:
        samples: how many.
    """

    kind = "bnn"

    samples: int = 100

    def __post_init__(self) -> None:
        self._check()


@dataclass(frozen=True)
class GP(PredictiveOption):
    """The linearised network in function space, conditioned on training points that the posterior keeps.

    Args:
        points: random training points to keep when fitting; None keeps all. They become part of the posterior's file.
        outputs: whether a network's outputs are "joint" or "independent" of each other; "auto" is joint while points
            times outputs are few.
        link: as in `GLM`.
        samples: as in `GLM`.
    """

    kind = "gp"
    is_linear = True

    points: int | None = 1000
    outputs: Outputs = "auto"
    link: str | None = None
    samples: int = 100

    def __post_init__(self) -> None:
        if self.points is not None:
            count("points", self.points)
        word("outputs", self.outputs, get_args(Outputs))
        self._check()


@dataclass(frozen=True)
class MAP(PredictiveOption):
    """The network at its trained weights, without a posterior."""

    kind = "map"


PREDICTIVES: dict[str, type[PredictiveOption]] = {kind.kind: kind for kind in (GLM, BNN, MAP, GP)}


def predictive_option(predictive: Any) -> PredictiveOption:
    """The option that `predictive=` means."""
    return resolve_option("predictive", predictive, PREDICTIVES)
