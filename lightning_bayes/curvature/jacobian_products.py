"""Products with the Jacobian `J` of a network's outputs at one input, many at a time, and never the Jacobian.

`Jv` in forward mode, or by two backward passes where PyTorch has no rule for an operator; `Jᵀu` by a backward pass. In
batches where the operators allow it. The two are held against each other once: `⟨u, Jv⟩` must be `⟨Jᵀu, v⟩`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.ggn_product import WAYS
from lightning_bayes.curvature.gradients import MEMORY, quiet
from lightning_bayes.curvature.linearised import Linearised
from lightning_bayes.curvature.output_checks import TOLERANCE
from lightning_bayes.network import CurvatureError, Subset, inputs
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.slow_path import first_line, is_missing_rule, log_slow_path


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
