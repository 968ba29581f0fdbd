"""`Jacobian`: the Jacobian `J` of a network's outputs in its weights as an operator, `Jv` and `Jᵀu`, never the matrix.

`push` computes `Jv` in forward mode or, if PyTorch lacks a forward-mode rule for an operator, as the derivative of
`u ↦ Jᵀu`, which is linear in `u`. `pull` computes `Jᵀu` by a backward pass. Both take many vectors at once if every
operator has a batching rule; in forward mode the vectors share one pass of the network, and each costs two more
products per layer, `W δh` and `δW h`.

Rules can be wrong, and forward mode ignores that the padding vector of a functional embedding has no gradient. So the
two modes are checked against each other: `⟨u, Jv⟩ = ⟨Jᵀu, v⟩`. `FixedJacobian` is the operator at one input for
repeated use, and `GGNProduct` the product `Σₙ JₙᵀΛₙJₙ V` with the curvature of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from lightning_bayes.jacobian.checks import TOLERANCE, agree, random_numbers
from lightning_bayes.jacobian.gradients import MEMORY, output_columns, quiet
from lightning_bayes.jacobian.graph import (
    check_norms,
    describe_functions,
    has_missing_derivative,
    once_differentiable_functions,
)
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.network import CurvatureError, Subset, inputs
from lightning_bayes.network.borrowed import at_weights, borrowed
from lightning_bayes.network.errors import PLAIN, first_line, is_missing_rule, log_slow_path
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.inputs import explained
from lightning_bayes.network.processes import is_sharded, reshard

Fisher = Callable[[Tensor], Tensor]  # U -> ΛU  # [b, B, ...]
Directions = dict[str, Tensor]  # one tensor per parameter
Result = TypeVar("Result")
WAYS = ((True, True), (False, True), (True, False), (False, False))  # (forward mode, batched), the fastest first


class Jacobian:
    """The Jacobian at the inputs `x` of a borrowed network (see `network.borrowed`) in the weights of `subset`. Vectors
    are flat; `pull` needs a network that tracks the subset's parameters.

    Args:
        f: The network's output at `x` with its graph; by default it is computed when it is needed.
        differentiable: Whether `linearised`, `value_and_push` and `at` keep a graph to `x`.
    """

    def __init__(
        self, network: nn.Module, subset: Subset, x: Any, f: Tensor | None = None, differentiable: bool = False
    ) -> None:
        self._network, self._subset, self._x, self._f = network, subset, x, f
        self._differentiable = differentiable
        self._parameters = subset.parameters(network)
        self._backward: _LinearPullback | None = None  # used instead of forward mode once that has failed
        self._batches: bool | None = None  # whether `linearised_many` can batch; None: not known yet

    @property
    def f(self) -> Tensor:
        """The outputs with their graph.  # [B, ...]"""
        if self._f is None:
            self._f = inputs.call(self._network, self._x)
        return self._f

    def push(self, V: Tensor, forward: bool = True, batched: bool = True) -> Tensor:
        """`Jv` of each row `v` of `V`, in forward mode or by two backward passes, all rows at once or one after the
        other. Raises an error if an operator has no rule for the chosen way.  # [k, P] -> [k, B, ...]"""
        directions = self._directions(V)
        if forward and batched:
            return self._together(directions)[1].detach()
        if forward:
            with forward_mode(self.is_recurrent):
                return torch.stack([self._jvp(d)[1] for d in _each(directions)]).detach()
        backward = self._linear_pullback()
        with quiet():
            if batched:
                return backward.push(directions, is_grads_batched=True)
            return torch.stack([backward.push(d) for d in _each(directions)])

    def pull(self, U: Tensor, batched: bool = True) -> Tensor:
        """`Jᵀu` of each row `u` of `U`.  # [k, B, ...] -> [k, P]"""
        f, parameters = self.f, list(self._parameters.values())

        def gradients(u: Tensor, lead: torch.Size) -> Tensor:
            options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "is_grads_batched": bool(lead)}
            gradients = torch.autograd.grad(f, parameters, u.to(f.dtype), **options)
            used = zip(gradients, parameters, strict=True)
            return self._subset.join([p.new_zeros(*lead, *p.shape) if g is None else g for g, p in used], len(lead))

        with quiet():
            return gradients(U, U.shape[:1]) if batched else torch.stack([gradients(u, U.shape[:0]) for u in U])

    def value_and_push(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """`f(x)` and `Jv` separately, because their sum would round `Jv`.  # [P] -> [B, ...]"""
        directions = self._directions(v)
        if self._backward is None:
            try:
                with forward_mode(self.is_recurrent):
                    f, Jv = self._jvp(directions)
                if self._differentiable:
                    check_norms(f)
                if not self._differentiable or not has_missing_derivative(Jv):
                    return f, Jv
                self._backward = self._linear_pullback("it cannot be differentiated")
            except RuntimeError as error:
                if not is_missing_rule(error):
                    raise
                self._backward = self._linear_pullback(first_line(error.__cause__ or error))
        return self._backward.f, self._backward.push(directions, create_graph=self._differentiable)

    def linearised(self, v: Tensor) -> Tensor:
        """`f(x) + Jv`.  # [P] -> [B, ...]"""
        f, Jv = self.value_and_push(v)
        return f + Jv

    def linearised_many(self, V: Tensor) -> Tensor:
        """`f(x) + Jv` for each row `v` of `V`, all at once if batching gives the right result.
        # [k, P] -> [k, B, ...]"""
        if self._batches is None and len(V) > 1:
            self._batches = not self._differentiable and self._can_batch(V)
        if not self._batches or len(V) == 1:
            return torch.stack([self.linearised(v) for v in V])
        f, JV = self._together(self._directions(V))
        return f + JV

    def at(self, v: Tensor) -> Tensor:
        """The network itself at its weights plus `v`; a sharded network takes this process's shards of `v`."""
        if is_sharded(self._network):
            reshard(self._network)
            shards = self._subset.parameters(self._network)
            moves = self._subset.unflatten(v, shards)
            with at_weights(self._network, {shards[name]: move for name, move in moves.items()}):
                return inputs.call(self._network, self._x)
        moves = self._directions(v)
        return self._call({name: p + moves[name] for name, p in self._values.items()})

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters.items()}

    @cached_property
    def is_recurrent(self) -> bool:
        return any(isinstance(module, nn.RNNBase) for module in self._network.modules())

    @cached_property
    def _padding(self) -> dict[str, Tensor]:
        """The padding row of embeddings, by the names of their weights.  # [1] each"""
        tables = [(n, m) for n, m in self._network.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        rows = {f"{name}.weight".lstrip("."): m.padding_idx for name, m in tables if m.padding_idx is not None}
        return {name: torch.tensor([row], device="cpu") for name, row in rows.items() if name in self._parameters}

    def _directions(self, vectors: Tensor) -> Directions:
        """One tensor per parameter, zero for padding vectors: backward mode gives them no gradient, so forward mode
        must not move them."""
        directions = self._subset.unflatten(vectors, self._parameters)
        for name, row in self._padding.items():
            directions[name] = directions[name].index_fill(-2, row.to(directions[name].device), 0)
        return directions

    def _call(self, parameters: dict[str, Tensor]) -> Tensor:
        with explained(self._network, self._x):
            return inputs.run(self._network, self._x, parameters)

    def _jvp(self, directions: Directions) -> tuple[Tensor, Tensor]:
        f, Jv = jvp(self._call, (self._values,), (directions,))  # type: ignore[misc]
        return f, Jv

    def _together(self, directions: Directions) -> tuple[Tensor, Tensor]:
        """`f(x)`, which all directions share, and `Jv` of each direction."""
        with forward_mode(self.is_recurrent), quiet():
            f, JV = vmap(self._jvp)(directions)
        return f, JV

    def _can_batch(self, V: Tensor) -> bool:
        """Whether the `Jv`, weighted by random numbers, add up to `J` times the weighted sum of the directions. The
        check needs only a few examples, unless there are as many examples as directions: a wrong rule may then confuse
        examples and directions."""
        k = len(V)
        whole = isinstance(self._x, inputs.Container) or k == inputs.batch_size(self._x)
        x = self._x if whole else inputs.few(self._network, self._x, 2 if k != 2 else 3)
        few = Jacobian(self._network, self._subset, x)
        r = random_numbers(k, like=V)
        exact = few.value_and_push(r @ V)[1]
        if few._backward is not None:  # forward mode has failed, which is logged
            return False
        try:
            JV = few._together(few._directions(V))[1]
        except (*PLAIN, AssertionError) as error:
            if not is_missing_rule(error):
                raise
            log_slow_path(
                f"PyTorch cannot push many directions through this network ({first_line(error.__cause__ or error)})",
                "functions are drawn one at a time",
            )
            return False
        return agree({"": torch.tensordot(r.to(JV), JV, dims=1)}, {"": exact})[""]

    @torch.enable_grad()
    def _linear_pullback(self, reason: str | None = None) -> _LinearPullback:
        """The graph of `u ↦ Jᵀu`; the `reason` why forward mode is not used is logged."""
        parameters = {name: p.clone().requires_grad_() for name, p in self._values.items()}
        f = self._call(parameters)
        if reason is not None:
            lack = f"PyTorch has no forward mode for this network{describe_functions(f)} ({reason})"
            log_slow_path(lack, "it is linearised by two backward passes")
        if self._differentiable:
            check_norms(f)
        u = torch.zeros_like(f, requires_grad=True)
        neither = CurvatureError(
            "an operator of the network supports neither forward mode nor double backward, so there are no products "
            "with its Jacobian: use predictive='bnn', and a structure other than 'lowrank'"
        )
        if once_differentiable_functions(f):
            raise neither
        try:
            gradients = torch.autograd.grad(f, list(parameters.values()), u, create_graph=True, allow_unused=True)
        except RuntimeError as error:
            if not is_missing_rule(error):
                raise
            raise neither from error
        used = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
        return _LinearPullback(f if self._differentiable else f.detach(), u, used)


@dataclass(frozen=True, eq=False)
class _LinearPullback:
    """The graph of `u ↦ Jᵀu`. The map is linear in `u`, so the gradient of `⟨Jᵀu, v⟩` is `Jv`, and one graph serves all
    directions."""

    f: Tensor
    u: Tensor
    gradients: Directions  # for the parameters that f depends on

    def push(self, directions: Directions, **options: Any) -> Tensor:
        along = [directions[name] for name in self.gradients]
        if not along:
            lead = next(iter(directions.values())).shape[: bool(options.get("is_grads_batched"))]
            return self.f.new_zeros(*lead, *self.f.shape)
        (Jv,) = torch.autograd.grad(list(self.gradients.values()), self.u, along, retain_graph=True, **options)
        return Jv


def _each(directions: Directions) -> Iterator[Directions]:
    for i in range(len(next(iter(directions.values())))):
        yield {name: d[i] for name, d in directions.items()}


@contextmanager
def forward_mode(recurrent: bool) -> Iterator[None]:
    """Hide PyTorch's own deprecation warnings, and avoid the recurrent layers of oneDNN, which have no forward mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=Warning)
        warnings.filterwarnings("ignore", message=".*TF32.*", category=UserWarning)  # raised by any oneDNN setting
        with torch.backends.mkldnn.flags(enabled=False) if recurrent else nullcontext():
            yield


class ProductWay:
    """The fastest way to take products that works for a network: found by trial, then kept."""

    def __init__(self, way_out: str) -> None:
        self._ways, self._way_out = list(WAYS), way_out

    @property
    def current(self) -> tuple[bool, bool]:
        return self._ways[0]

    def find(self, compute: Callable[[bool, bool], Result | None]) -> Result:
        """The result of `compute(forward, batched)` for the first way that works. `compute` returns None for a wrong
        result."""
        reason = ""
        while self._ways:
            try:
                result = compute(*self._ways[0])
                if result is not None:
                    return result
                reason = "forward and backward mode disagree"
            except RuntimeError as error:
                if not is_missing_rule(error) and type(error) is not CurvatureError:
                    raise
                reason = first_line(error.__cause__ or error)
            del self._ways[0]
            if self._ways:
                forward, batched = self._ways[0]
                log_slow_path(
                    f"PyTorch has no rule for products with this Jacobian ({reason})",
                    f"they are taken {'in forward mode' if forward else 'by two backward passes'}"
                    f"{'' if batched else ' for one vector at a time'}",
                )
        raise CurvatureError(
            f"an operator of the network supports neither forward mode nor double backward ({reason}), so there are no "
            f"products with its Jacobian{self._way_out}"
        )


class FixedJacobian:
    """The Jacobian at one input for repeated use: every call borrows the network and checks its weights."""

    def __init__(self, network: nn.Module, subset: Subset, x: Any) -> None:
        self._network, self._subset, self._x = network, subset, x
        self._weights = subset.flatten(network).clone()
        self._way = ProductWay("")
        with self._borrowed() as jacobian:
            self.f = jacobian.f.detach()  # [B, ...]
            if not self.f.isfinite().all():
                raise CurvatureError("the network's output is not finite at this input: check the input and weights")
            self._way.find(lambda forward, batched: self._modes_agree(jacobian, forward, batched) or None)

    @property
    def shape(self) -> torch.Size:
        return self.f.shape

    def push(self, V: Tensor) -> Tensor:
        """`Jv` of each row `v` of `V`.  # [k, P] -> [k, B, ...]"""
        with self._borrowed() as jacobian:
            return torch.cat([jacobian.push(part, *self._way.current) for part in V.split(self._chunk)])

    def pull(self, U: Tensor) -> Tensor:
        """`Jᵀu` of each row `u` of `U`.  # [k, B, ...] -> [k, P]"""
        with self._borrowed() as jacobian:
            return torch.cat([jacobian.pull(part, self._way.current[1]) for part in U.split(self._chunk)])

    @property
    def _chunk(self) -> int:
        return max(1, 4 * MEMORY // ((self._subset.full_size + 8 * self.f.numel()) * self.f.element_size()))

    def _modes_agree(self, jacobian: Jacobian, forward: bool, batched: bool) -> bool:
        """Whether `⟨u, Jv⟩ = ⟨Jᵀu, v⟩` for random vectors."""
        g = torch.Generator().manual_seed(0)
        U = torch.randn(3, *self.f.shape, generator=g, device="cpu").to(self.f)
        V = torch.randn(3, self._subset.size, generator=g, device="cpu").to(self.f)
        pushed, pulled = jacobian.push(V, forward, batched), jacobian.pull(U, batched)
        pushed, pulled, U, V = map(in_float64, (pushed, pulled, U, V))
        forwards, backwards = (U * pushed).flatten(1).sum(1), (pulled * V).sum(1)
        size = U.flatten(1).norm(dim=1) * pushed.flatten(1).norm(dim=1)
        return bool(((forwards - backwards).abs() <= TOLERANCE.get(self.f.dtype, 0.1) * size).all())

    @contextmanager
    def _borrowed(self) -> Iterator[Jacobian]:
        if not torch.equal(self._subset.flatten(self._network), self._weights):
            raise CurvatureError(
                "the network's weights have changed since it was linearised: load them again, or fit again"
            )
        with torch.inference_mode(False), borrowed(self._network, self._subset.names):
            yield Jacobian(self._network, self._subset, self._x)


class GGNProduct:
    """`Σₙ JₙᵀΛₙJₙ V` of one batch at a time, for a borrowed network that tracks the subset's parameters: `JV`, then
    `Λ(JV)` for each example, then `Jᵀ(ΛJV)`. The products with `J` and `Jᵀ` must agree: `Vᵀ(JᵀΛJV) = (JV)ᵀ(ΛJV)`."""

    def __init__(self, network: nn.Module, subset: Subset, n_activations: int) -> None:
        self._network, self._subset, self._n_activations = network, subset, n_activations
        self._way = ProductWay(": use structure='kron', 'diag' or 'full'")
        self._checked: set[Any] = set()  # ways, numbers of vectors and shapes of outputs that passed the check
        self._largest = 0.0

    def __call__(self, x: Any, f: Tensor, fisher: Fisher, V: Tensor) -> Tensor:
        """`f` is the network's output at `x`, with its graph.  # [b, P] -> [b, P]"""
        size = self._subset.full_size + 2 * len(f) * max(self._n_activations, f[0].numel())
        chunk = max(1, 4 * MEMORY // (size * f.element_size()))
        jacobian = Jacobian(self._network, self._subset, x, f)
        return torch.cat([self._product(jacobian, fisher, part) for part in V.split(chunk)])

    def _product(self, jacobian: Jacobian, fisher: Fisher, V: Tensor) -> Tensor:
        def compute(forward: bool, batched: bool) -> Tensor | None:
            JV = jacobian.push(V, forward, batched)
            U = fisher(JV)
            product = jacobian.pull(U, batched)
            checked = (forward, batched, len(V), U.shape[1:])  # a rule may confuse vectors and examples
            if checked not in self._checked:
                if not self._is_right(V, product, JV, U):
                    return None
                self._checked.add(checked)
            return product

        return self._way.find(compute)

    def _is_right(self, V: Tensor, product: Tensor, JV: Tensor, U: Tensor) -> bool:
        backward = in_float64(V) @ in_float64(product).mT
        forward = in_float64(JV).flatten(1) @ in_float64(U).flatten(1).mT
        size = float(forward.norm())
        self._largest = max(size, self._largest)  # for vectors that `H` maps to zero, both products are only rounding
        tolerance = TOLERANCE.get(JV.dtype, 0.1) * size + 100 * torch.finfo(JV.dtype).eps * self._largest + 1e-30
        # Values that are not finite raise an error elsewhere.
        return bool((backward - forward).norm() <= tolerance) or not bool(forward.isfinite().all())


def output_fisher(
    likelihood: Likelihood, curvature: str, f: Tensor, y: Tensor, examples: Tensor, samples: int, seed: int
) -> Fisher:
    """`U ↦ ΛU` for outputs `f`; see `output_columns` for the kinds of curvature."""
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
