"""A network, linearised in its weights: `f(x) + J(x) d` for directions `d`, without the Jacobian.

In forward mode where PyTorch has it for every operator of the network; otherwise as the derivative of `u ↦ uᵀJ`, which
is linear in `u`, so that one graph serves all directions. Many directions go through forward mode together, with one
pass of the network for all of them: each costs two more, `W δh` and `δW h` of every layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from lightning_bayes.jacobian.checks import agree, random_numbers
from lightning_bayes.jacobian.gradients import quiet
from lightning_bayes.jacobian.graph import (
    check_norms,
    describe_functions,
    has_missing_derivative,
    once_differentiable_functions,
)
from lightning_bayes.network import CurvatureError, inputs
from lightning_bayes.network.borrowed import at_weights
from lightning_bayes.network.checks import explained
from lightning_bayes.network.errors import PLAIN, first_line, is_missing_rule, log_slow_path
from lightning_bayes.network.processes import is_sharded


class Linearised:
    """A borrowed network (see `network.borrowed`), linearised around `parameters`, at the inputs `x`, in which it may
    be `differentiable`."""

    def __init__(
        self, network: nn.Module, parameters: Mapping[str, Tensor], x: Any, differentiable: bool = False
    ) -> None:
        self._network, self._differentiable = network, differentiable
        self._parameters = {name: p.detach() for name, p in parameters.items()}
        self._x = x
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())
        self._padding = _padding_rows(network)
        self._backward: tuple[Tensor, Tensor, list[str], list[Tensor]] | None = None
        self._batches: bool | None = None  # whether many directions can go together; None: not known yet

    def at(self, moves: dict[str, Tensor]) -> Tensor:
        """The network itself at the weights moved by `moves`; where these are shards, the network gathers them."""
        if is_sharded(self._network):
            parameters = dict(self._network.named_parameters())
            with at_weights(self._network, {parameters[name]: move for name, move in moves.items()}):
                return inputs.call(self._network, self._x)
        moves = self._along(moves)
        return self._call({name: p + moves[name] for name, p in self._parameters.items()})

    def __call__(self, moves: dict[str, Tensor]) -> Tensor:
        """# {name: the parameter's shape} -> [B, ...]"""
        f, df = self.derivative(moves)
        return f + df

    def derivative(self, moves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`f(x)`, and `J(x) d` by itself, which the sum would round."""
        directions = self._along(moves)
        if self._backward is None:
            try:
                with _forward_mode(self._recurrent):
                    f, df = jvp(self._call, (self._parameters,), (directions,))  # type: ignore[misc]
                if self._differentiable:
                    check_norms(f)
                if not self._differentiable or not has_missing_derivative(df):
                    return f, df
                self._backward = self._double_backward("which cannot be differentiated in turn")
            except RuntimeError as error:
                if not is_missing_rule(error):
                    raise
                self._backward = self._double_backward(first_line(error.__cause__ or error))
        f, u, names, pulled = self._backward
        if not names:
            return f, torch.zeros_like(f)
        moves_used = [directions[name] for name in names]
        (df,) = torch.autograd.grad(pulled, u, moves_used, retain_graph=True, create_graph=self._differentiable)
        return f, df

    def many(self, moves: dict[str, Tensor]) -> Tensor:
        """`f(x) + J(x) d` of many directions, together where that is right, and otherwise one after the other.
        # {name: [k, the parameter's shape]} -> [k, B, ...]"""
        k = len(next(iter(moves.values())))
        if self._batches is None and k > 1:
            self._batches = not self._differentiable and self._can_batch(moves, k)
        if not self._batches or k == 1:
            return _looped(self)(moves)
        f, df = self._together(moves)
        return f + df

    def derivatives(self, moves: dict[str, Tensor], forward: bool, batched: bool) -> Tensor:
        """`J(x) d` of many directions, in forward mode or by two backward passes, all at once or one after the other;
        an error where an operator has no rule for that.  # {name: [b, the parameter's shape]} -> [b, B, ...]"""
        directions = self._along(moves)
        if forward:
            with _forward_mode(self._recurrent):
                return (vmap if batched else _looped)(self._pushed)(directions)
        f, u, names, pulled = self._double_backward()
        if not names:
            return f.new_zeros(len(next(iter(directions.values()))), *f.shape)

        def push(d: dict[str, Tensor]) -> Tensor:
            along = [d[name] for name in names]
            (df,) = torch.autograd.grad(pulled, u, along, retain_graph=True, is_grads_batched=batched)
            return df

        return push(directions) if batched else _looped(push)(directions)

    def _can_batch(self, moves: dict[str, Tensor], k: int) -> bool:
        """Whether the derivatives along all directions, weighted by random numbers, add up to that along their sum. Two
        examples show it, unless there may be as many examples as directions, which a wrong rule confuses."""
        alone = isinstance(self._x, inputs.Container) or k == inputs.batch_size(self._x)
        x = self._x if alone else inputs.few(self._network, self._x, 2 if k != 2 else 3)
        few = Linearised(self._network, self._parameters, x)
        r = random_numbers(k, like=next(iter(self._parameters.values())))
        exact = few.derivative({name: torch.tensordot(r.to(d), d, dims=1) for name, d in moves.items()})[1]
        if few._backward is not None:  # there is no forward mode, as the log says
            return False
        try:
            df = few._together(moves)[1]
        except (*PLAIN, AssertionError) as error:
            if not is_missing_rule(error):
                raise
            log_slow_path(
                f"PyTorch cannot push many directions through this network ({first_line(error.__cause__ or error)})",
                "functions are drawn one at a time",
            )
            return False
        return agree({"": torch.tensordot(r.to(df), df, dims=1)}, {"": exact})[""]

    def _together(self, moves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`f(x)`, of which there is one for all, and the derivatives along each direction."""
        with _forward_mode(self._recurrent), quiet():
            f, df = vmap(self._with_value)(self._along(moves))
        return f, df

    def _with_value(self, directions: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        both = jvp(self._call, (self._parameters,), (directions,))
        return both[0], both[1]

    def _along(self, moves: dict[str, Tensor]) -> dict[str, Tensor]:
        """A padding's vector is fixed: backward mode gives it no gradient, and forward mode must not move it."""
        directions = {name: moves[name] for name in self._parameters}
        for name, row in self._padding.items():
            if name in directions:
                directions[name] = directions[name].index_fill(-2, row.to(directions[name].device), 0)
        return directions

    def _pushed(self, directions: dict[str, Tensor]) -> Tensor:
        df: Tensor = jvp(self._call, (self._parameters,), (directions,))[1]
        return df

    def _call(self, parameters: dict[str, Tensor]) -> Tensor:
        with explained(self._network, self._x):
            return inputs.run(self._network, self._x, parameters)

    @torch.enable_grad()
    def _double_backward(self, reason: str | None = None) -> tuple[Tensor, Tensor, list[str], list[Tensor]]:
        """`f`, `u`, and the graph of `uᵀJ` for the parameters that `f` depends on."""
        parameters = {name: p.clone().requires_grad_() for name, p in self._parameters.items()}
        f = self._call(parameters)
        if reason is not None:
            lack = f"PyTorch has no forward mode for this network{describe_functions(f)} ({reason})"
            log_slow_path(lack, "it is linearised by two backward passes")
        if self._differentiable:
            check_norms(f)
        u = torch.zeros_like(f, requires_grad=True)
        neither = CurvatureError(
            "an operator of the network has neither forward mode nor a backward that can be differentiated, so that "
            "its linearisation is known by its Jacobian alone: use predictive='bnn', and another structure than "
            "'lowrank'"
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
        return f if self._differentiable else f.detach(), u, list(used), list(used.values())


def _padding_rows(network: nn.Module) -> dict[str, Tensor]:
    """Of embeddings, by the names of their weights.  # [1] each"""
    tables = [(name, m) for name, m in network.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return {
        f"{name}.weight".lstrip("."): torch.tensor([m.padding_idx], device="cpu")
        for name, m in tables
        if m.padding_idx is not None
    }


def _looped(function: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[dict[str, Tensor]], Tensor]:
    """As `vmap`, one after the other."""

    def all_of(directions: dict[str, Tensor]) -> Tensor:
        count = len(next(iter(directions.values())))
        return torch.stack([function({name: d[i] for name, d in directions.items()}) for i in range(count)])

    return all_of


@contextmanager
def _forward_mode(recurrent: bool) -> Iterator[None]:
    """Forward mode compiles helpers with a function that PyTorch has since deprecated, and says so at first use. The
    recurrent layers of oneDNN have no forward mode; PyTorch's own have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=Warning)
        warnings.filterwarnings("ignore", message=".*TF32.*", category=UserWarning)  # said by any setting of oneDNN
        with torch.backends.mkldnn.flags(enabled=False) if recurrent else nullcontext():
            yield
