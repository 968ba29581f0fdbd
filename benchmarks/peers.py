"""laplace-torch with each of its backends, and two of the backends alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks import Batches

DEFAULT = "CurvlinopsGGN"
BACKENDS = (DEFAULT, "BackPackGGN", "AsdlGGN")
LIBRARIES = ("BackPACK", "curvlinops")  # backends used without laplace-torch


def laplace(network: nn.Module, structure: str, backend: str, stochastic: bool = False) -> Any:
    """laplace-torch's approximation over all weights, before its fit."""
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
        # A backend may skip unknown layers with only a warning, and so do less work.
        covered, wanted = len(approximation.H.eigenvalues), len(list(network.parameters()))
        if covered != wanted:
            raise NotImplementedError(f"the fit covers {covered} of {wanted} parameters")
    return approximation


def backpack_diagonal(network: nn.Module, x: Tensor) -> Tensor:
    """`Σₙ diag(JₙᵀJₙ)` by BackPACK, which extends the modules of the given network."""
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    network, loss = extend(network), extend(nn.MSELoss(reduction="sum"))
    f = network(x)
    with backpack(DiagGGNExact()):
        loss(f, torch.zeros_like(f)).backward()
    diagonal = torch.cat([p.diag_ggn_exact.reshape(-1) for p in network.parameters()])  # type: ignore[operator, union-attr]
    return 0.5 * diagonal  # the Hessian of r² is 2


def curvlinops_diagonal(network: nn.Module, x: Tensor) -> Tensor:
    """The same from products of curvlinops' GGN with unit vectors, because curvlinops has no exact diagonal."""
    from curvlinops import GGNLinearOperator

    parameters = list(network.parameters())
    data = [(x, torch.zeros_like(network(x)).detach())]
    G = GGNLinearOperator(network, nn.MSELoss(reduction="sum"), parameters, data, check_deterministic=False)
    P = sum(p.numel() for p in parameters)
    diagonal = torch.empty(P)
    for i in range(P):
        unit = torch.zeros(P)
        unit[i] = 1
        diagonal[i] = (G @ unit)[i]
    return 0.5 * diagonal
