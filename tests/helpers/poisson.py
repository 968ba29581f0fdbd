"""A likelihood that the package does not have."""

import torch
from torch import Tensor

from lightning_bayes.likelihoods import Likelihood


class Poisson(Likelihood):
    """A likelihood of a user's own: counts with rate `e^f`, which has no closed form and takes no positions."""

    def log_likelihood_per_example(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(1)

    def fisher_root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.diag_embed((0.5 * f).exp()).movedim(1, 0)

    def sample(self, f: Tensor, uniform: Tensor, y: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def conditional(self, f: Tensor) -> tuple[Tensor, Tensor]:
        return f.exp(), f.exp()
