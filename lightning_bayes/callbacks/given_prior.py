"""The prior of a callback, `prior=` and `prior_mean=`: objects, or, for a configuration file, paths to them."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import Tensor, nn

from lightning_bayes.network import Subset
from lightning_bayes.network.borrowed import unwrap
from lightning_bayes.posterior import GaussianPosterior
from lightning_bayes.posterior.files import read, read_any
from lightning_bayes.posterior.prior import Prior, check_prior


class GivenPrior:
    """What is wrong for any network is refused when it is made; files are read when they are first needed.

    Args:
        prior: a posterior, or the file of one.
        prior_mean: weights, flat or as the state dict of the module or its network; or a file of one of these, such as
            a checkpoint.
        within: the submodule of the LightningModule that is the network, if it is not the module itself.
        others: of `check_prior`.
    """

    def __init__(self, prior: Any, prior_mean: Any, within: str | None, **others: Any) -> None:
        self._prior, self._within, self._others = prior, within, others
        self._mean = _copied(prior_mean)  # a state dict has the very weights that are about to train
        if prior is not None and prior_mean is not None:
            check_prior(prior, prior_mean)
        self._check()

    @property
    def is_posterior(self) -> bool:
        return self._prior is not None

    @property
    def has_mean(self) -> bool:
        return self._mean is not None

    def words(self, network: nn.Module) -> dict[str, Any]:
        """The arguments of `fit_laplace`, for this network."""
        if isinstance(self._prior, (str, PathLike)):
            # The network may have other weights than the posterior was fitted to.
            self._prior = GaussianPosterior.from_state_dict(network, read(self._prior))
        if isinstance(self._mean, (str, PathLike)):
            saved = read_any(self._mean, "prior mean")
            self._mean = saved.get("state_dict", saved) if isinstance(saved, Mapping) else saved
        self._check()
        mean = self._mean
        if isinstance(mean, Mapping):
            mean = {name: self._weight(name) for name, _ in unwrap(network).named_parameters()}
            mean = {name: weight for name, weight in mean.items() if weight is not None}
        return {"prior": self._prior, "prior_mean": mean}

    def means(self, network: nn.Module, subset: Subset) -> dict[str, Tensor]:
        """`m` of each parameter; none where it is zero."""
        m = Prior.of(None, self.words(network)["prior_mean"], subset).mean
        if m is None:
            return {}
        parts = m.split([shape.numel() for shape in subset.shapes])
        return {name: part.reshape(s) for name, part, s in zip(subset.names, parts, subset.shapes, strict=True)}

    def _weight(self, name: str) -> Tensor | None:
        """By its name in the network, or in the module around it."""
        assert isinstance(self._mean, Mapping)
        return self._mean.get(name, self._mean.get(f"{self._within}.{name}"))

    def _check(self) -> None:
        prior, mean = (None if isinstance(given, (str, PathLike)) else given for given in (self._prior, self._mean))
        check_prior(prior, mean, **self._others)


def _copied(weights: Any) -> Any:
    if isinstance(weights, Mapping):
        return {name: _copied(weight) for name, weight in weights.items()}
    return weights.detach().clone() if isinstance(weights, Tensor) else weights
