"""The evidence of a Laplace posterior, and priors chosen by it; the linearised network as a model of its own."""
