"""Options from words, for parametrised tests."""

from typing import Any

from lightning_bayes.options import FisherMC, PredictiveOption, StructureOption
from lightning_bayes.options.fit import STRUCTURES
from lightning_bayes.options.predictive import PREDICTIVES


def predictive_of(word: str, link: str | None = None, samples: int | None = None) -> PredictiveOption:
    """The option with this word; arguments that its class does not have are ignored."""
    given: dict[str, Any] = {"link": link, "samples": samples}
    kind: Any = PREDICTIVES[word]
    return kind(**{name: value for name, value in given.items() if name in kind.__annotations__ and value is not None})


def structure_of(word: str, **fields: Any) -> StructureOption:
    """The same for a structure."""
    kind: Any = STRUCTURES[word]
    return kind(**{name: value for name, value in fields.items() if name in kind.__annotations__})


def estimate_of(curvature: str, samples: int) -> str | FisherMC:
    """`curvature=` with this many labels for each example, where it draws some."""
    return FisherMC(samples) if curvature == "fisher_mc" else curvature
