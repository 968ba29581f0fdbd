"""The estimated cost of a fit, of tuning and of a prediction, in forward passes of the same data.

One forward and one backward pass of a few examples are counted in multiplications. The rest follows from the sizes of
each layer: `O × I` weights that `T` positions share, and `K` columns of the output Fisher (the outputs of an example).
Per example, the multiplications of a prediction with a Kronecker posterior are

    K backward passes
    + T I² + K T O²                                               rotating inputs and output gradients
    + min(T(T+1)/2 · I O + K T² O + K² T O,  K T O I + K² O I)    covariances from position pairs or Jacobians,

and, for an exact block of `p` weights, `K p² + K² p`. With more than `MANY` outputs a prediction instead takes
`DRAWS` forward-mode passes, each with `T O (I + O)` for the random changes of a layer's outputs.

`tune="auto"` makes two passes of predictions: in the first, all priors share the sums over groups of eigenvalues; the
second takes the exact covariances of the `NEAR` priors near the decision. A fit takes the backward passes, one more
backward pass for the loss, and the products of the factors, `T I² + K T O²`. The eigendecomposition of a factor with
`d` columns that sums `r` rows takes about `10 m³ + 2 m² d` multiplications with `m = min(d, r)`.

Operations differ in how well they use a processor. `WEIGHTS` has one factor for each kind of work, measured on six
networks (`benchmarks/cost.py`); `ACTIVATION` is the work of an output of a layer, relative to a multiplication, and
`CALL` that of calling a small operation: `TUNING` times per batch that tunes, `SETUP` times per fit. They matter for
small networks.
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

# Outputs per example above which a prediction samples the linearised network. On an MLP and a ResNet-18, with all
# weights or the last layer, sampling becomes cheaper at 40 to 250 outputs.
MANY = 64
DRAWS = 50  # forward-mode passes of such a prediction
NEAR = 8  # priors that tuning scores exactly
FEW_PRIORS = 4  # priors that tuning compares by draws
BATCH = 64  # examples that share what a batch costs
ACTIVATION = 33.0
CALL = 2.5e5
TUNING, SETUP = 5_000, 6_000  # calls
LARGEST_EXACT = 1024  # maximum number of weights in a densely stored block; larger blocks keep only their diagonal
TRIANGLE = 256  # number of weights from which a fit computes half of a dense block
WEIGHTS = {"backward": 0.7, "rotate": 0.9, "covariance": 2.5, "exact": 25.0, "decompose": 0.4, "draw": 2.0, "call": 1.0}


@dataclass(frozen=True)
class Decomposition:
    """An eigendecomposition that a fit makes."""

    groups: int
    width: int  # d
    rows: float  # of each example

    def work(self, n_data: float) -> float:
        m = min(self.width, self.rows * n_data)
        return self.groups * (10 * m**3 + 2 * m**2 * self.width)


@dataclass(frozen=True)
class Work:
    """Multiplications per example, by kind."""

    forward: float
    predict: dict[str, float]
    tune: dict[str, float]
    fit: dict[str, float]
    decompositions: tuple[Decomposition, ...]


@dataclass(frozen=True)
class Cost:
    """The cost in forward passes of the same examples. A fit also has a cost that does not grow with the data, which
    `epochs` includes."""

    predict: float
    tune: float
    fit: float
    n_outputs: int
    n_weights: int
    work: Work

    def epochs(self, n_data: float) -> float:
        """The cost of fitting `n_data` examples, in training epochs of three forward passes each."""
        decompose = WEIGHTS["decompose"] * sum(one.work(n_data) for one in self.work.decompositions)
        return (self.fit + (decompose + SETUP * CALL) / (self.work.forward * max(n_data, 1))) / 3


def estimate_cost(network: nn.Module, x: Any, subset: Subset, sampled: bool = False) -> Cost:
    """The cost of a Kronecker posterior over `subset`. With `sampled`, the fit uses a Monte-Carlo Fisher with one
    label."""
    with preserved_rng(inputs.device_of(network)), torch.inference_mode(False), borrowed(network, subset.names):
        plan = make_plan(network, x, subset)
        work = count_work(network, x, plan, 1 if sampled else plan.n_outputs)

    def passes(numbers: dict[str, float]) -> float:
        return 1 + sum(WEIGHTS[kind] * number for kind, number in numbers.items()) / work.forward

    return Cost(passes(work.predict), passes(work.tune), passes(work.fit), plan.n_outputs, subset.size, work)


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
    predict = {"backward": K * backward}
    tune = {"backward": 2 * K * backward}
    if activation:
        tune["call"] = TUNING * CALL / BATCH
    fit = {"backward": columns * backward + 2 * forward}
    draw, known, decompositions = backward, 0.0, []
    for layer, calls in zip(plan.layers, matched.calls, strict=True):
        (G, O, I), T = layer.layout.shape, _positions(calls, layer.layout.shape, B)
        known += G * O * I * T
        draw += G * T * O * (I + O if layer.kronecker else I)
        if not layer.kronecker:
            _add_exact(predict, tune, fit, G * O * I, T, K, columns)
            continue
        from_inputs = 0 if layer.kind == "embedding" else T * I**2
        rotate = G * (from_inputs + K * T * O**2)
        by_pairs = G * (T * (T + 1) / 2 * I * O + K * T**2 * O + K**2 * T * O)
        jacobian, product = G * K * T * O * I, G * K**2 * O * I
        unshared = G * (I * O + K**2 * O)
        exact = unshared if T == 1 else min(by_pairs, jacobian + product)
        by_rows = T > 1 and by_pairs > jacobian + product
        _add(predict, rotate=rotate, covariance=exact)
        near = jacobian + NEAR * product if by_rows else NEAR * exact
        grouped = G * K**2 * T**2 * O if K * T**2 <= O * I else jacobian + product
        _add(tune, rotate=2 * rotate, covariance=grouped + near)
        _add(fit, rotate=G * (from_inputs + columns * T * O**2))
        decompositions.append(Decomposition(G, O, columns * T))
        decompositions += [Decomposition(G, I, T)] if from_inputs else []
    for name in plan.unmatched_parameters:
        p = parameters[name].numel()
        _add_exact(predict, tune, fit, p, 1, K, columns)
        draw += p
    if K > MANY and not plan.unmatched_parameters:
        predict = {"draw": DRAWS * draw}
        tune = {"draw": FEW_PRIORS * DRAWS * draw}
    return Work(max(forward, known), predict, tune, fit, tuple(decompositions))


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


def _add(work: dict[str, float], **numbers: float) -> None:
    for kind, number in numbers.items():
        work[kind] = work.get(kind, 0.0) + number


def _add_exact(
    predict: dict[str, float], tune: dict[str, float], fit: dict[str, float], p: int, T: float, K: int, columns: int
) -> None:
    """Add an exact block of `p` weights: dense if it is small, otherwise diagonal."""
    exact = K * T * p + K**2 * p + (K * p**2 if p <= LARGEST_EXACT else 0)
    _add(predict, exact=exact)
    _add(tune, exact=2 * exact, covariance=NEAR * K**2 * p)
    entries = 1.0 if p > LARGEST_EXACT else p / 2 if p >= TRIANGLE else p
    _add(fit, exact=columns * p * (T + entries))
