"""`GatheredLayer`: the last layer of a network whose weights are sharded over processes (FSDP2, tensor parallelism).

    f(x) = tail(W a(x) + b)

The sharded network computes the layer's input `a(x)`, its `Features`. Every process has a plain copy of the layer, so
curvature, samples and the linearised network need neither the rest of the network nor the other processes. The `tail`
may only reorder or reshape the outputs.

A `GatheredLayer` takes the inputs of the sharded network. All processes must call it at the same time, each with its
own input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network import inputs, private
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.errors import NetworkError
from lightning_bayes.network.inputs import Arguments, Change, Container, PartialNetwork
from lightning_bayes.network.output import network_name, unwrap_output
from lightning_bayes.network.processes import is_sharded, reshard, whole
from lightning_bayes.network.subset import layer_of

_WAY_OUT = "use L2MCallback, structure='diag' with curvature='empirical_fisher', or strategy='ddp'"


class GatheredLayer(PartialNetwork):
    """A plain copy of one layer of a sharded network, under the same name, on all processes."""

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        object.__setattr__(self, "_whole", network)  # a submodule would add the sharded weights to this module
        self._layer = layer
        reshard(network)
        *parents, last = layer.split(".")
        owner: nn.Module = self
        for name in parents:
            owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, plain_copy(network.get_submodule(layer)))

    def forward(self, a: Tensor) -> Tensor:
        return self.get_submodule(self._layer)(a)

    @property
    def whole(self) -> nn.Module:
        """The sharded network."""
        network: nn.Module = object.__getattribute__(self, "_whole")
        return network

    def features(self, x: Any) -> Features:
        """Run the sharded network on `x`, on all processes."""
        layer, a = _last_layer(self.whole, x)
        if layer != self._layer:
            raise NetworkError(f"the last layer was {self._layer}, but for this input it is {layer}")
        weights = next(self.parameters())
        return a.map(lambda t: t.to(weights.device, weights.dtype))


@dataclass(frozen=True, eq=False)
class Features(Container):
    """The inputs of the last layer, and how to turn the layer's outputs into the network's outputs."""

    inputs: Tensor  # [B, ...]
    dims: tuple[int, int] | None  # source and destination of an output dimension to move; None: no move
    shape: torch.Size  # shape of the network's outputs for one example

    @property
    def size(self) -> int:
        return len(self.inputs)

    def take(self, examples: list[int]) -> Features:
        return replace(self, inputs=self.inputs[examples])

    def arguments(self, network: nn.Module) -> Arguments:
        return (self.inputs,), {}

    def map(self, change: Change) -> Features:
        return replace(self, inputs=change(self.inputs))

    def rows(self, f: Tensor) -> Tensor:
        f = f if self.dims is None else f.movedim(*self.dims)
        return f.reshape(len(f), *self.shape)


def gathered(network: nn.Module, x: Any) -> GatheredLayer:
    """The last layer of a sharded network, found by running the network on `x`, on all processes."""
    return GatheredLayer(network, _last_layer(network, x)[0])


def gathered_for(network: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The layer of a sharded network that owns all parameters `names`. The network is returned unchanged if it is not
    sharded or has no such layer."""
    layers = {layer_of(name) for name in names}
    if not is_sharded(network) or len(layers) > 1 or "network" in layers:
        return network
    return GatheredLayer(network, layers.pop())


@dataclass
class LayerWatch:
    """Observes one run of a network to find its last layer."""

    network: nn.Module
    layer: str = ""  # name of the last layer with a weight matrix that ran
    calls: Counter[str] = field(default_factory=Counter)
    a: Tensor | None = None
    z: Tensor | None = None
    f: Tensor | None = None

    def features(self) -> Features:
        """The layer's inputs; an error explains why the layer cannot be separated from the network."""
        a, z, f, layer = self.a, self.z, self.f, self.layer
        if a is None or z is None or f is None:
            raise NetworkError(
                f"found no last layer in {network_name(self.network)}: no submodule with a weight matrix has run; "
                f"{_WAY_OUT}"
            )
        if self.calls[layer] > 1:
            raise NetworkError(
                f"the last layer {layer} runs {self.calls[layer]} times for one input, but only a layer that runs once "
                f"can be gathered from a sharded network: {_WAY_OUT}"
            )
        if len(a) == len(z) == len(f):
            for dims in (None, (-1, 1), (1, -1)):
                features = Features(a, dims, f.shape[1:])
                if z.numel() == f.numel() and torch.equal(features.rows(z).to(f.dtype).nan_to_num(), f.nan_to_num()):
                    return features
        raise NetworkError(
            f"the network does more than reorder or reshape the outputs of its last layer {layer}, so the layer "
            f"cannot be gathered: use network= to name the submodule that ends with it, or {_WAY_OUT}"
        )


@contextmanager
def watching(network: nn.Module) -> Iterator[LayerWatch]:
    """Observe the layers of the runs inside the context."""
    watch = LayerWatch(network)

    def hooks(name: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:  # runs after tensor parallelism has changed the input
            watch.layer, watch.z = name, None
            watch.calls[name] += 1
            watch.a = whole(args[0].detach()) if args and isinstance(args[0], Tensor) else None

        def after(module: nn.Module, args: Any, output: Any) -> None:
            watch.z = whole(output.detach()) if isinstance(output, Tensor) else None

        return before, after

    with ExitStack() as stack:
        for name, module in unwrap_output(network).named_modules():
            if name and any(p.ndim > 1 for p in module.parameters(recurse=False)):
                before, after = hooks(name)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
        yield watch


def _last_layer(network: nn.Module, x: Any) -> tuple[str, Features]:
    """The name of the last layer and its inputs, from a run on `x`."""
    with torch.inference_mode(False), borrowed(network, ()), torch.no_grad(), watching(network) as watch:
        x = inputs.to_device(inputs.contained(network, x), inputs.device_of(network))
        watch.f = inputs.call(network, x)
    reshard(network)
    return watch.layer, watch.features()


def plain_copy(layer: nn.Module, zeros: bool = False) -> nn.Module:
    """A copy of the layer with its original class and whole weights (or `zeros`), without the hooks that shard it."""
    # `fully_shard` replaces the layer's class by a subclass.
    sharding = {kind for kind in type(layer).__mro__ if any(base.__name__ == "FSDPModule" for base in kind.__mro__)}
    kind = next(kind for kind in type(layer).__mro__ if issubclass(kind, nn.Module) and kind not in sharding)
    copy: nn.Module = object.__new__(kind)
    nn.Module.__init__(copy)
    own = {name: value for name, value in layer.__dict__.items() if name not in copy.__dict__}
    copy.__dict__.update(own, training=layer.training)
    for name, p in private.own_parameters(layer).items():
        if p is None:  # no bias, for example
            copy.register_parameter(name, None)
            continue
        zero = torch.zeros((), dtype=p.dtype, device=p.device)  # expanding a single zero takes no memory
        value = zero.expand(p.shape) if zeros else whole(p.detach()).clone()
        copy.register_parameter(name, nn.Parameter(value, p.requires_grad))
    for name, buffer in private.own_buffers(layer).items():
        copy.register_buffer(name, None if buffer is None else whole(buffer).clone())
    return copy
