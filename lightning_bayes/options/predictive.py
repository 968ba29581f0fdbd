"""How predictions are made (`predictive=`). A word stands for an option with its defaults: "glm" is `GLM()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from lightning_bayes.arguments import count, format_value, resolve_option, word

PredictiveWord = Literal["glm", "bnn", "gp", "map", "dropout"]
ConformalScore = Literal["aps", "raps", "lac", "cqr", "cqr_asymmetric"]
Outputs = Literal["auto", "joint", "independent"]


class PredictiveOption:
    """Base of the options for `predictive=`."""

    kind: ClassVar[str]
    is_linear: ClassVar[bool] = False  # whether predictions use the linearised network, for which `link` has a meaning
    uses_prior: ClassVar[bool] = True  # whether predictions depend on the covariance of the weights

    link: str | None = None
    samples: int = 0

    def __post_init__(self) -> None:
        if self.link is not None and not isinstance(self.link, str):
            raise ValueError(f"link must be a word or None, got {format_value(self.link)}")
        count("samples", self.samples)


@dataclass(frozen=True)
class GLM(PredictiveOption):
    """Predict with the linearised network.

    Args:
        link: how to integrate over a classifier's outputs: "probit", "pairwise", "bridge" or "mc". By default the link
            that the posterior was calibrated with, or else the first link of the likelihood; with more than 16 classes
            "mc".
        samples: the number of sampled outputs or functions to average over where there is no closed form.
    """

    kind = "glm"
    is_linear = True

    link: str | None = None
    samples: int = 100


@dataclass(frozen=True)
class BNN(PredictiveOption):
    """Predict with the network itself at sampled weights.

    Args:
        samples: the number of weight samples.
    """

    kind = "bnn"

    samples: int = 100


@dataclass(frozen=True)
class GP(PredictiveOption):
    """Predict with the linearised network in function space, conditioned on training points that the posterior stores.

    Args:
        points: the number of random training points to keep when fitting; None keeps all. They are saved with the
            posterior.
        outputs: whether to treat the network's outputs as "joint" or "independent"; "auto" is joint if points times
            outputs is small.
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
        super().__post_init__()


@dataclass(frozen=True)
class MAP(PredictiveOption):
    """Predict with the network at its trained weights, without a posterior."""

    kind = "map"
    uses_prior = False

    def __post_init__(self) -> None:
        """No check is needed: this option has no link and no samples."""


@dataclass(frozen=True)
class Dropout(PredictiveOption):
    """Predict with the network at its trained weights and with random masks of its dropout layers (MC dropout).

    Args:
        samples: the number of masks of each layer.
    """

    kind = "dropout"
    uses_prior = False

    samples: int = 100


PREDICTIVES: dict[str, type[PredictiveOption]] = {kind.kind: kind for kind in (GLM, BNN, MAP, GP, Dropout)}


def predictive_option(predictive: Any) -> PredictiveOption:
    """Convert `predictive=` to an option."""
    return resolve_option("predictive", predictive, PREDICTIVES)
