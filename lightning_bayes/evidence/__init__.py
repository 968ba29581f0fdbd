"""The evidence of a Laplace posterior, and priors chosen by it; the linearised network as a model of its own."""

from lightning_bayes.evidence import iterated_evidence, refinement, tuning  # what posteriors' methods call

__all__ = ["iterated_evidence", "refinement", "tuning"]
