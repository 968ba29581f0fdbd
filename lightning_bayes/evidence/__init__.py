"""Prior and noise chosen by the evidence, and refinement in the linearised network."""

from lightning_bayes.evidence import evidence, refinement, tuning  # registers them with the posterior

__all__ = ["evidence", "refinement", "tuning"]
