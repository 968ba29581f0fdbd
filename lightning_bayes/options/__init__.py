"""Option objects: groups of related settings, checked on construction. A word stands for an option with its
defaults."""

from lightning_bayes.arguments import to_plain
from lightning_bayes.options.callback import Memory
from lightning_bayes.options.fit import (
    EKFAC,
    AutoStructure,
    Diag,
    FisherMC,
    FitData,
    Full,
    Kron,
    LowRank,
    Network,
    Prior,
    StructureOption,
)
from lightning_bayes.options.predictive import BNN, GLM, GP, MAP, Dropout, PredictiveOption
from lightning_bayes.options.tuning import Learning, Tuning

__all__ = [
    "BNN",
    "EKFAC",
    "GLM",
    "GP",
    "MAP",
    "AutoStructure",
    "Diag",
    "Dropout",
    "FisherMC",
    "FitData",
    "Full",
    "Kron",
    "Learning",
    "LowRank",
    "Memory",
    "Network",
    "PredictiveOption",
    "Prior",
    "StructureOption",
    "Tuning",
    "to_plain",
]
