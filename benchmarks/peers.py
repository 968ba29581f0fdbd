"""laplace-torch with each of its backends."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from benchmarks.networks import Batches

DEFAULT = "CurvlinopsGGN"
BACKENDS = (DEFAULT, "BackPackGGN", "AsdlGGN")
DISTRIBUTIONS = ("laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch", "asdfghjkl")


def installed() -> dict[str, str]:
    """The versions of those peers that are there."""
    versions = {}
    for distribution in DISTRIBUTIONS:
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return versions


def laplace(network: nn.Module, structure: str, backend: str, stochastic: bool = False) -> Any:
    """A peer's Laplace approximation of all weights, before its fit."""
    import laplace.curvature
    from laplace import Laplace

    return Laplace(
        network,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=getattr(laplace.curvature, backend),
        backend_kwargs={"stochastic": stochastic},
    )


def fit(network: nn.Module, data: Batches, structure: str, backend: str, stochastic: bool = False) -> Any:
    approximation = laplace(network, structure, backend, stochastic)
    approximation.fit(data)
    if structure == "kron":
        # A backend may leave out layers it does not know, with no more than a warning: that is not the same work.
        covered, wanted = len(approximation.H.eigenvalues), len(list(network.parameters()))
        if covered != wanted:
            raise NotImplementedError(f"the fit covers {covered} of {wanted} parameters")
    return approximation
