"""Products of a batch's curvature with a block of vectors, `Σₙ JₙᵀΛₙJₙ V`, and never a Jacobian.

`JV` in forward mode, `Λ(JV)` example by example, and `Jᵀ(ΛJV)` by a backward pass, for many vectors at a time. Where
PyTorch has no rule for an operator, `JV` is the derivative of a backward pass, or vectors are taken one at a time. A
rule may be wrong, and forward mode knows nothing of the padding of a functional embedding, which has no gradient. So
the two halves are held against each other: `Vᵀ(JᵀΛJV)` must be `(JV)ᵀ(ΛJV)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.gradients import MEMORY, quiet
from lightning_bayes.curvature.linearised import Linearised
from lightning_bayes.curvature.output_checks import TOLERANCE
from lightning_bayes.curvature.output_columns import output_columns
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Subset, inputs
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.network.slow_path import first_line, is_missing_rule, log_slow_path

Fisher = Callable[[Tensor], Tensor]  # U -> ΛU  # [b, B, ...]
WAYS = ((True, True), (False, True), (True, False), (False, False))  # in forward mode, and batched?


class GGNProduct:
    """Of one batch at a time, for a borrowed network (see `network.borrowed`) that tracks the subset's parameters."""

    def __init__(self, network: nn.Module, subset: Subset, n_activations: int) -> None:
        self._network, self._subset, self._n_activations = network, subset, n_activations
        self._parameters = subset.parameters(network)
        self._ways = list(WAYS)  # of which the first is used, as long as it is right
        self._checked: set[tuple[int, torch.Size]] = set()  # vectors and outputs for which it was
        self._largest = 0.0

    def __call__(self, x: Any, f: Tensor, fisher: Fisher, V: Tensor) -> Tensor:
        """`f` is the network's output at `x`, with its graph.  # [b, P] -> [b, P]"""
        size = self._subset.full_size + 2 * len(f) * max(self._n_activations, f[0].numel())
        few = max(1, 4 * MEMORY // (size * f.element_size()))
        return torch.cat([self._few(x, f, fisher, part) for part in V.split(few)])

    def _few(self, x: Any, f: Tensor, fisher: Fisher, V: Tensor) -> Tensor:
        reason = ""
        while self._ways:
            try:
                JV, u, product = self._by(*self._ways[0], x, f, fisher, V)
                if self._is_right(V, product, JV, u):
                    return product
                reason = "forward and backward mode disagree"
            except (RuntimeError, CurvatureError) as error:
                if not is_missing_rule(error) and type(error) is not CurvatureError:
                    raise
                reason = first_line(error.__cause__ or error)
            del self._ways[0]
            self._checked.clear()
            if self._ways:
                forward, batched = self._ways[0]
                how = "in forward mode" if forward else "by two backward passes"
                how = how if batched else f"{how} for one vector at a time"
                log_slow_path(
                    f"PyTorch has no rule for products with this Jacobian ({reason})", f"they are taken {how}"
                )
        raise CurvatureError(
            "an operator of the network has neither forward mode nor a backward that can be differentiated "
            f"({reason}), so that its curvature is known by its Jacobian alone: use structure='kron', 'diag' or 'full'"
        )

    def _by(
        self, forward: bool, batched: bool, x: Any, f: Tensor, fisher: Fisher, V: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`JV`, `ΛJV` and `JᵀΛJV`."""
        x = inputs.map_tensors(x, Tensor.clone)  # the network may write into its input
        linearised = Linearised(self._network, self._parameters, x)
        with quiet():
            JV = linearised.derivatives(self._unflatten(V), forward, batched).detach()
            u = fisher(JV)
            if batched:
                return JV, u, self._flatten(self._pull(f, u, is_grads_batched=True), len(V))
            return JV, u, torch.cat([self._flatten(self._pull(f, row), 1) for row in u])

    def _is_right(self, V: Tensor, product: Tensor, JV: Tensor, u: Tensor) -> bool:
        """Checked once for each number of vectors and shape of outputs, which a rule may confuse."""
        shape = (len(V), u.shape[1:])
        if shape in self._checked:
            return True
        backward = in_float64(V) @ in_float64(product).mT
        forward = in_float64(JV).flatten(1) @ in_float64(u).flatten(1).mT
        size = float(forward.norm())
        self._largest = max(size, self._largest)  # of vectors that `H` makes zero, only the rounding is left
        tolerance = TOLERANCE.get(JV.dtype, 0.1) * size + 100 * torch.finfo(JV.dtype).eps * self._largest + 1e-30
        if (backward - forward).norm() <= tolerance or not forward.isfinite().all():  # which is an error of its own
            self._checked.add(shape)
            return True
        return False

    def _pull(self, f: Tensor, u: Tensor, **options: Any) -> list[Tensor | None]:
        parameters = list(self._parameters.values())
        cotangent = u.to(f.dtype)
        return list(torch.autograd.grad(f, parameters, cotangent, retain_graph=True, allow_unused=True, **options))

    def _flatten(self, gradients: list[Tensor | None], b: int) -> Tensor:
        """# [b, P]"""
        parameters = self._parameters.values()
        parts = [
            p.new_zeros(b, p.numel()) if g is None else g.reshape(b, -1)
            for p, g in zip(parameters, gradients, strict=True)
        ]
        return self._subset.narrow(torch.cat(parts, dim=1))

    def _unflatten(self, V: Tensor) -> dict[str, Tensor]:
        """Zero outside a subnetwork."""
        if self._subset.mask is not None:
            whole = V.new_zeros(len(V), self._subset.full_size)
            whole[:, self._subset.mask.to(V.device)] = V
            V = whole
        parts = V.split([p.numel() for p in self._parameters.values()], dim=1)
        named = zip(self._parameters.items(), parts, strict=True)
        return {name: part.reshape(len(V), *p.shape).to(p.dtype) for (name, p), part in named}


def output_fisher(
    likelihood: Likelihood, curvature: str, f: Tensor, y: Tensor, examples: Tensor, samples: int, seed: int
) -> Fisher:
    """`U ↦ ΛU` for outputs `f`; see `output_columns` for the kinds."""
    B, C = len(f), f.shape[1] if f.ndim > 1 else 1
    if curvature == "ggn" and likelihood.has_diagonal_fisher:
        diagonal = likelihood.fisher_diagonal(f, y)
        return lambda U: U * diagonal
    if curvature == "ggn" and likelihood.couples_outputs:
        A = likelihood.fisher_root(f[:1]).reshape(-1, f[0].numel())  # the same for every example [K, outputs]
        return lambda U: (U.reshape(len(U), B, -1).to(A.dtype) @ A.mT @ A).reshape(U.shape)
    if curvature == "ggn":  # positions are independent of each other given f
        S = likelihood.fisher_root(f, y).reshape(-1, B, C, f[0].numel() // C)
    else:
        columns = output_columns(likelihood, curvature, f, y, samples, examples, samples, seed)
        S = torch.cat(list(columns)).reshape(-1, B, f[0].numel(), 1)

    def product(U: Tensor) -> Tensor:
        rows = U.reshape(len(U), *S.shape[1:]).to(S.dtype)
        return torch.einsum("kbcr,vkbr->vbcr", S, torch.einsum("kbcr,vbcr->vkbr", S, rows)).reshape(U.shape)

    return product
