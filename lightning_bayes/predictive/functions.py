"""The network at its mean, and functions drawn from its posterior.

Those of the linearised network (GLM paper, eq. (10)) are `f(x) + J(x) d` with a direction `d` of its weights, without
the Jacobian: in forward mode where PyTorch has it for every operator of the network; otherwise as the derivative of
`u ↦ uᵀJ`, which is linear in `u`, so that one graph serves all directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from lightning_bayes.arguments import count, flag
from lightning_bayes.curvature.graph import describe_functions
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import inputs
from lightning_bayes.network.at_weights import at_weights
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.checks import explained
from lightning_bayes.network.input_graph import check_differentiable
from lightning_bayes.network.shards import is_sharded, local, reshard
from lightning_bayes.network.slow_path import first_line, is_missing_rule, log_slow_path
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.sharded import NEEDS_WHOLE


def outputs(posterior: GaussianPosterior, x: Any, differentiable: bool = False) -> Tensor:
    """`f(x)` at the mean."""
    with at_mean(posterior, x, differentiable) as x:
        return inputs.call(posterior.network, x)


def sample_functions(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None = None,
    linearised: bool = True,
    differentiable: bool = False,
) -> Tensor:
    """`n` functions drawn from the posterior, evaluated at `x`: one weight sample for all inputs, so that the draws are
    smooth in x. Of the linearised network `f(x) + J(x)(θ − θ*)`, or of the network itself.  # [n, B, ...]"""
    count("n", n)
    check_generator(generator)
    flag("linearised", linearised)
    check_differentiable(differentiable, x)
    draws: list[Tensor] = []
    each_function(posterior, x, n, generator, linearised, draws.append, differentiable)
    return torch.stack(draws)


def each_function(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None,
    linearised: bool,
    consume: Callable[[Tensor], None],
    differentiable: bool = False,
) -> None:
    """The same, one after the other.  # [B, ...]"""
    if linearised and posterior.is_sharded:
        raise PosteriorError(f"the linearised network {NEEDS_WHOLE}: use linearised=False")
    with at_mean(posterior, x, differentiable) as x:
        network = Linearised(posterior.network, posterior.subset.parameters(posterior.network), x)
        for _ in range(n):
            moves = draw_moves(posterior, generator)
            consume(network(moves) if linearised else network.at(moves))


def draw_moves(posterior: GaussianPosterior, generator: torch.Generator | None) -> dict[str, Tensor]:
    """From the network's weights to a sample, by parameter."""
    move = posterior.sample(1, generator)[0] - posterior.mean
    return unflatten(posterior, move if posterior.shift is None else move + posterior.shift)


def linearised_outputs(posterior: GaussianPosterior, x: Any, move: Tensor, differentiable: bool = False) -> Tensor:
    """`f(x) + J(x) v` for a move `v` of the weights.  # [P] -> [B, ...]"""
    with at_mean(posterior, x, differentiable) as x:
        network = Linearised(posterior.network, posterior.subset.parameters(posterior.network), x)
        return network(unflatten(posterior, move)).to(posterior.mean)


@contextmanager
def at_mean(posterior: GaussianPosterior, x: Any, differentiable: bool = False) -> Iterator[Any]:
    """The network, borrowed, and `x` on its device; a graph, if it is to be `differentiable`, leads to `x` alone."""
    posterior.check_weights()
    x = inputs.contained(posterior.network, x)
    inputs.batch_size(x)  # an error where x holds no tensor
    with torch.inference_mode(False), borrowed(posterior.network, ()), torch.set_grad_enabled(differentiable):
        yield inputs.to_device(x, posterior.device)


def unflatten(posterior: GaussianPosterior, flat: Tensor) -> dict[str, Tensor]:
    """A vector over the subset as one tensor per parameter (or this process's shard of it), zero outside a
    subnetwork."""
    reshard(posterior.network)
    subset = posterior.subset
    if subset.mask is not None:
        whole = flat.new_zeros(subset.full_size)
        whole[subset.mask.to(flat.device)] = flat
        flat = whole
    shards = {name: local(p) for name, p in subset.parameters(posterior.network).items()}
    parts = flat.split([shard.numel() for shard in shards.values()])
    return {name: part.view_as(t).to(t.dtype) for (name, t), part in zip(shards.items(), parts, strict=True)}


class Linearised:
    """A borrowed network (see `network.borrowed`), linearised around `parameters`, at the inputs `x`."""

    def __init__(self, network: nn.Module, parameters: Mapping[str, Tensor], x: Any) -> None:
        self._network, self._differentiable = network, torch.is_grad_enabled()
        self._parameters = {name: p.detach() for name, p in parameters.items()}
        self._x = x
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())
        self._backward: tuple[Tensor, Tensor, list[str], list[Tensor]] | None = None

    def at(self, moves: dict[str, Tensor]) -> Tensor:
        """The network itself at the weights moved by `moves`; where these are shards, the network gathers them."""
        if is_sharded(self._network):
            parameters = dict(self._network.named_parameters())
            with at_weights(self._network, {parameters[name]: move for name, move in moves.items()}):
                return inputs.call(self._network, self._x)
        return self._call({name: p + moves[name] for name, p in self._parameters.items()})

    def __call__(self, moves: dict[str, Tensor]) -> Tensor:
        """# {name: the parameter's shape} -> [B, ...]"""
        f, df = self.derivative(moves)
        return f + df

    def derivative(self, moves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`f(x)`, and `J(x) d` by itself, which the sum would round."""
        directions = {name: moves[name] for name in self._parameters}
        if self._backward is None:
            try:
                with _forward_mode(self._recurrent):
                    f, df = jvp(self._call, (self._parameters,), (directions,))  # type: ignore[misc]
                return f, df
            except RuntimeError as error:
                if not is_missing_rule(error):
                    raise
                self._backward = self._double_backward(first_line(error.__cause__ or error))
        f, u, names, pulled = self._backward
        if not names:
            return f, torch.zeros_like(f)
        moves_used = [directions[name] for name in names]
        (df,) = torch.autograd.grad(pulled, u, moves_used, retain_graph=True, create_graph=f.requires_grad)
        return f, df

    def _call(self, parameters: dict[str, Tensor]) -> Tensor:
        with explained(self._network, self._x):
            return inputs.run(self._network, self._x, parameters)

    @torch.enable_grad()
    def _double_backward(self, reason: str) -> tuple[Tensor, Tensor, list[str], list[Tensor]]:
        """`f`, `u`, and the graph of `uᵀJ` for the parameters that `f` depends on."""
        parameters = {name: p.clone().requires_grad_() for name, p in self._parameters.items()}
        f = self._call(parameters)
        lack = f"PyTorch has no forward mode for this network{describe_functions(f)} ({reason})"
        log_slow_path(lack, "it is linearised by two backward passes")
        u = torch.zeros_like(f, requires_grad=True)
        try:
            gradients = torch.autograd.grad(f, list(parameters.values()), u, create_graph=True, allow_unused=True)
        except RuntimeError as error:
            if not is_missing_rule(error):
                raise
            raise PosteriorError(
                "an operator of the network has neither forward mode nor a backward that can be differentiated, so "
                "that its linearisation cannot be sampled: use predictive='bnn'"
            ) from error
        used = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
        return f if self._differentiable else f.detach(), u, list(used), list(used.values())


@contextmanager
def _forward_mode(recurrent: bool) -> Iterator[None]:
    """Forward mode compiles helpers with a function that PyTorch has since deprecated, and says so at first use. The
    recurrent layers of oneDNN have no forward mode; PyTorch's own have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=Warning)
        warnings.filterwarnings("ignore", message=".*TF32.*", category=UserWarning)  # said by any setting of oneDNN
        with torch.backends.mkldnn.flags(enabled=False) if recurrent else nullcontext():
            yield
