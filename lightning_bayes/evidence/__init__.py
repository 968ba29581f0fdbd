"""Choose the prior and the noise by the evidence, and refine a posterior in the linearised network."""

from lightning_bayes.evidence import evidence, refinement, tuning  # registers them with the posterior

__all__ = ["evidence", "refinement", "tuning"]
