"""Option objects: settings that belong together. They check themselves; a word stands for one with its defaults."""

from lightning_bayes.options.memory import Memory
from lightning_bayes.options.network import FitData, Network
from lightning_bayes.options.plain import to_plain
from lightning_bayes.options.predictive import BNN, GLM, GP, MAP, PredictiveOption
from lightning_bayes.options.prior import Prior
from lightning_bayes.options.structure import EKFAC, Diag, FisherMC, Full, Kron, LowRank, StructureOption
from lightning_bayes.options.tuning import Learning, Tuning

__all__ = [
    "BNN",
    "EKFAC",
    "GLM",
    "GP",
    "MAP",
    "Diag",
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
