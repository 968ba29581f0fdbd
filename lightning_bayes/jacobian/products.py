"""Products of a batch's curvature with a block of vectors, `Σₙ JₙᵀΛₙJₙ V`, and never a Jacobian.

`JV` in forward mode, `Λ(JV)` example by example, and `Jᵀ(ΛJV)` by a backward pass, for many vectors at a time. Where
PyTorch has no rule for an operator, `JV` is the derivative of a backward pass, or vectors are taken one at a time. A
rule may be wrong, and forward mode knows nothing of the padding of a functional embedding, which has no gradient. So
the two halves are held against each other: `Vᵀ(JᵀΛJV)` must be `(JV)ᵀ(ΛJV)`.

Products with the Jacobian `J` of a network's outputs at one input, many at a time, and never the Jacobian.

`Jv` in forward mode, or by two backward passes where PyTorch has no rule for an operator; `Jᵀu` by a backward pass. In
batches where the operators allow it. The two are held against each other once: `⟨u, Jv⟩` must be `⟨Jᵀu, v⟩`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.jacobian.checks import TOLERANCE
from lightning_bayes.jacobian.gradients import MEMORY, quiet
from lightning_bayes.jacobian.linearised import Linearised
from lightning_bayes.jacobian.output_columns import output_columns
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Subset, inputs
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.errors import first_line, is_missing_rule, log_slow_path

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


class JacobianProducts:
    """At the input `x`, in the weights of `subset`; the network is borrowed in each call."""

    def __init__(self, network: nn.Module, subset: Subset, x: Any) -> None:
        self._network, self._subset, self._x = network, subset, x
        self._weights = subset.flatten(network).clone()
        with self._outputs() as f:
            self.f = f.detach()  # [B, ...]
        if not self.f.isfinite().all():
            raise CurvatureError("the network's output is not finite at this input: check the input and the weights")
        self._forward, self._batched = self._choose_way()

    @property
    def shape(self) -> torch.Size:
        return self.f.shape

    def push(self, V: Tensor) -> Tensor:
        """`Jv` of each row.  # [k, P] -> [k, B, ...]"""
        return torch.cat([self._push(part, self._forward, self._batched) for part in V.split(self._few)])

    def pull(self, U: Tensor) -> Tensor:
        """`Jᵀu` of each.  # [k, B, ...] -> [k, P]"""
        with self._outputs() as f:
            return torch.cat([self._pull(f, part, self._batched) for part in U.split(self._few)])

    @property
    def _few(self) -> int:
        return max(1, 4 * MEMORY // ((self._subset.full_size + 8 * self.f.numel()) * self.f.element_size()))

    def _choose_way(self) -> tuple[bool, bool]:
        """In forward mode, and batched, where that is right."""
        g, reason = torch.Generator().manual_seed(0), ""
        U = torch.randn(3, *self.f.shape, generator=g, device="cpu").to(self.f)
        V = torch.randn(3, self._subset.size, generator=g, device="cpu").to(self.f)
        for forward, batched in WAYS:
            try:
                pushed = self._push(V, forward, batched)
                with self._outputs() as f:
                    pulled = self._pull(f, U, batched)
            except (RuntimeError, CurvatureError) as error:
                if not is_missing_rule(error) and type(error) is not CurvatureError:
                    raise
                reason = first_line(error.__cause__ or error)
                continue
            pushed, pulled, U64, V64 = map(in_float64, (pushed, pulled, U, V))
            one, other = (U64 * pushed).flatten(1).sum(1), (pulled * V64).sum(1)
            size = U64.flatten(1).norm(dim=1) * pushed.flatten(1).norm(dim=1)
            if ((one - other).abs() <= TOLERANCE.get(self.f.dtype, 0.1) * size).all():
                if reason:
                    log_slow_path(
                        f"PyTorch has no rule for products with this Jacobian ({reason})",
                        f"they are taken {'in forward mode' if forward else 'by two backward passes'}"
                        f"{'' if batched else ' one at a time'}",
                    )
                return forward, batched
            reason = "forward and backward mode disagree"
        raise CurvatureError(f"an operator of the network has no products with its Jacobian ({reason})")

    def _check_weights(self) -> None:
        if not torch.equal(self._subset.flatten(self._network), self._weights):
            raise CurvatureError(
                "the network's weights are not those that it was linearised at: load them again, or fit again"
            )

    @contextmanager
    def _outputs(self) -> Iterator[Tensor]:
        self._check_weights()
        with torch.inference_mode(False), borrowed(self._network, self._subset.names):
            yield inputs.call(self._network, inputs.map_tensors(self._x, Tensor.clone))

    def _push(self, V: Tensor, forward: bool, batched: bool) -> Tensor:
        self._check_weights()
        with torch.inference_mode(False), borrowed(self._network, self._subset.names), quiet():
            linearised = Linearised(self._network, self._subset.parameters(self._network), self._x)
            return linearised.derivatives(self._unflatten(V), forward, batched).detach()

    def _pull(self, f: Tensor, U: Tensor, batched: bool) -> Tensor:
        parameters = list(self._subset.parameters(self._network).values())
        with quiet():
            parts = [U] if batched else list(U)
            options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True, "is_grads_batched": batched}
            pulled = [torch.autograd.grad(f, parameters, part.to(f.dtype), **options) for part in parts]
        rows = [torch.cat([g.reshape(len(U) if batched else 1, -1) for g in gradients], 1) for gradients in pulled]
        return self._subset.narrow(torch.cat(rows))

    def _unflatten(self, V: Tensor) -> dict[str, Tensor]:
        """Zero outside a subnetwork."""
        if self._subset.mask is not None:
            whole = V.new_zeros(len(V), self._subset.full_size)
            whole[:, self._subset.mask.to(V.device)] = V
            V = whole
        parameters = self._subset.parameters(self._network)
        parts = V.split([p.numel() for p in parameters.values()], dim=1)
        named = zip(parameters.items(), parts, strict=True)
        return {name: part.reshape(len(V), *p.shape).to(p.dtype) for (name, p), part in named}
