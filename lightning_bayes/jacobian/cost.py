"""The estimated cost of a fit and of a prediction, in forward passes of the same data.

One forward and one backward pass of a few examples are counted in multiplications. The rest follows from the sizes of
each layer: `O × I` weights that `T` positions share, and `K` columns of the output Fisher (the outputs of an example).
Per example, the multiplications of a prediction with a Kronecker posterior are

    K backward passes
    + T I² + K T O²                                               rotating inputs and output gradients
    + min(T(T+1)/2 · I O + K T² O + K² T O,  K T O I + K² O I)    covariances from position pairs or Jacobians,

and, for an exact block of `p` weights, `K p² + K² p`. A fit takes the backward passes, one more backward pass for the
loss, and the products of the factors, `T I² + K T O²`. The eigendecomposition of a factor with `d` columns takes about
`10 d³` multiplications, for any number of examples.

Operations differ in how well they use a processor. `WEIGHTS` has one factor for each kind of work, measured on six
networks (`benchmarks/cost.py`); `ACTIVATION` is the work of an output of a layer, relative to a multiplication.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_bayes.jacobian.calls import Call
from lightning_bayes.jacobian.plan import Plan, make_plan
from lightning_bayes.network import Subset, inputs
from lightning_bayes.network.borrowed import borrowed, preserved_rng

ACTIVATION = 33.0
LARGEST_EXACT = 1024  # maximum number of weights in a densely stored block; larger blocks keep only their diagonal
WEIGHTS = {"backward": 0.7, "rotate": 0.9, "covariance": 3.7, "exact": 25.0, "decompose": 0.4}


@dataclass(frozen=True)
class Cost:
    """The cost in forward passes of the same examples. `decompose` is the cost of a fit's eigendecompositions, in
    forward passes of one example."""

    predict: float
    fit: float
    decompose: float
    n_outputs: int
    n_weights: int

    def epochs(self, n_data: int) -> float:
        """The cost of fitting `n_data` examples, in training epochs of three forward passes each."""
        return (self.fit + self.decompose / max(n_data, 1)) / 3


@dataclass(frozen=True)
class Work:
    """Multiplications per example, by kind."""

    forward: float
    predict: dict[str, float]
    fit: dict[str, float]
    decompose: float


def estimate_cost(network: nn.Module, x: Any, subset: Subset, sampled: bool = False) -> Cost:
    """The cost of a Kronecker posterior over `subset`. With `sampled`, the fit uses a Monte-Carlo Fisher with one
    label."""
    with preserved_rng(inputs.device_of(network)), torch.inference_mode(False), borrowed(network, subset.names):
        plan = make_plan(network, x, subset)
        work = count_work(network, x, plan, 1 if sampled else plan.n_outputs)

    def passes(numbers: dict[str, float]) -> float:
        return 1 + sum(WEIGHTS[kind] * number for kind, number in numbers.items()) / work.forward

    decompose = WEIGHTS["decompose"] * work.decompose / work.forward
    return Cost(passes(work.predict), passes(work.fit), decompose, plan.n_outputs, subset.size)


def count_work(network: nn.Module, x: Any, plan: Plan, columns: int, activation: float = ACTIVATION) -> Work:
    """Count the work for a borrowed network. A fit takes this many `columns` of the output Fisher."""
    B, parameters = 2, plan.subset.parameters(network)
    few = inputs.few(network, x, B)
    B = inputs.batch_size(few)
    with _unfused(network), FlopCounterMode(display=False) as counter, plan.recorder(parameters, B) as recorder:
        f = inputs.call(network, few)
    forward = counter.get_total_flops()
    matched = plan.match(f, recorder.calls, parameters)
    with FlopCounterMode(display=False) as counter:
        if matched.used:
            edges = [call.edge for call in matched.used]
            torch.autograd.grad(f, edges, torch.ones_like(f), retain_graph=True, allow_unused=True)
    elementwise, K = activation * plan.n_activations, plan.n_outputs
    forward = forward / (2 * B) + elementwise
    backward = counter.get_total_flops() / (2 * B) + (elementwise if matched.used else 0)
    predict = {"backward": K * backward, "rotate": 0.0, "covariance": 0.0, "exact": 0.0}
    fit = {"backward": columns * backward + 2 * forward, "rotate": 0.0, "exact": 0.0}
    decompose = known = 0.0
    for layer, calls in zip(plan.layers, matched.calls, strict=True):
        (G, O, I), T = layer.layout.shape, _positions(calls, layer.layout.shape, B)
        known += G * O * I * T
        if not layer.kronecker:
            _add_exact(predict, fit, G * O * I, T, K, columns)
            continue
        from_inputs = 0 if layer.kind == "embedding" else T * I**2
        predict["rotate"] += G * (from_inputs + K * T * O**2)
        by_pairs = T * (T + 1) / 2 * I * O + K * T**2 * O + K**2 * T * O
        by_jacobians = K * T * O * I + K**2 * O * I
        unshared = I * O + K**2 * O
        predict["covariance"] += G * (unshared if T == 1 else min(by_pairs, by_jacobians))
        fit["rotate"] += G * (from_inputs + columns * T * O**2)
        decompose += 10 * G * (O**3 + (I**3 if from_inputs else 0))
    for name in plan.unmatched_parameters:
        p = parameters[name].numel()
        _add_exact(predict, fit, p, 1, K, columns)
    return Work(max(forward, known), predict, fit, decompose)


@contextmanager
def _unfused(network: nn.Module) -> Iterator[None]:
    """Turn off the fused kernels of recurrent layers, because their multiplications are not counted."""
    if not any(isinstance(module, nn.RNNBase) for module in network.modules()):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about settings of other devices
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _positions(calls: list[Call], shape: torch.Size | tuple[int, ...], B: int) -> float:
    return sum(call.output_shape.numel() for call in calls) / (B * shape[0] * shape[1])


def _add_exact(predict: dict[str, float], fit: dict[str, float], p: int, T: float, K: int, columns: int) -> None:
    """Add an exact block of `p` weights: dense if it is small, otherwise diagonal."""
    dense = p <= LARGEST_EXACT
    predict["exact"] += K * T * p + K**2 * p + (K * p**2 if dense else 0)
    fit["exact"] += columns * p * (T + (p if dense else 1))
