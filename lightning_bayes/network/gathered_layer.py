"""`GatheredLayer`: the last layer of a network whose weights are sharded over processes (FSDP2, tensor parallelism).

    f(x) = tail(W a(x) + b)

The sharded network runs as it is, up to the layer's input `a(x)`, its `Features`. The layer itself is gathered: every
process holds a plain copy of it, and what is done with its weights (curvature, samples, the linearised network) needs
neither the rest of the network nor the other processes. The `tail` may put the outputs into another order or shape.

A network of this kind takes the inputs of the sharded one. All processes must give it one, each its own, at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.containers import Arguments, Container, OwnContainer
from lightning_bayes.network.errors import NetworkError
from lightning_bayes.network.output import unviewed
from lightning_bayes.network.processes import is_sharded, reshard, whole
from lightning_bayes.network.subset import layer_of

_WAY_OUT = "use L2MCallback, structure='diag' with curvature='empirical_fisher', or strategy='ddp'"


class GatheredLayer(OwnContainer):
    """A plain copy of one layer of a sharded network, under the same name; on all processes."""

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        object.__setattr__(self, "_whole", network)  # no submodule, whose weights would be this network's
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

    def container(self, x: Any) -> Features:
        """Run the sharded network on `x`; on all processes."""
        watch = _watched_run(self.whole, x)
        if watch.layer != self._layer:
            raise NetworkError(f"the last layer was {self._layer}, but for this input it is {watch.layer}")
        a = watch.features()
        weights = next(self.parameters())
        return replace(a, inputs=a.inputs.to(weights.device, weights.dtype))


@dataclass(frozen=True, eq=False)
class Features(Container):
    """The inputs of the last layer, and how its outputs become those of the network."""

    inputs: Tensor  # [B, ...]
    dims: tuple[int, int] | None  # a dimension of the layer's outputs that is moved, and where to
    shape: torch.Size  # of the outputs of an example

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.inputs)

    def take(self, examples: list[int]) -> Features:
        return replace(self, inputs=self.inputs[examples])

    def arguments(self, network: nn.Module) -> Arguments:
        return (self.inputs,), {}

    def map(self, change: Any) -> Features:
        return replace(self, inputs=change(self.inputs))

    def rows(self, f: Tensor) -> Tensor:
        f = f if self.dims is None else f.movedim(*self.dims)
        return f.reshape(len(f), *self.shape)


def gathered(network: nn.Module, x: Any) -> GatheredLayer:
    """The last layer of a sharded network, which is found by running it on `x`; on all processes."""
    return GatheredLayer(network, _watched_run(network, x).layer)


def gathered_for(network: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Of a sharded network, the layer that has all these parameters; any other network is whole."""
    layers = {layer_of(name) for name in names}
    if not is_sharded(network) or len(layers) > 1 or "network" in layers:
        return network
    return GatheredLayer(network, layers.pop())


def ungathered(network: nn.Module) -> nn.Module:
    """The network that a gathered layer belongs to; any other network is itself."""
    return network.whole if isinstance(network, GatheredLayer) else network


@dataclass
class LayerWatch:
    """What a run of a network has shown of its last layer."""

    network: nn.Module
    layer: str = ""  # that ran last, of those with a matrix of weights
    calls: Counter[str] = field(default_factory=Counter)
    a: Tensor | None = None
    z: Tensor | None = None
    f: Tensor | None = None

    def features(self) -> Features:
        """Of the run, or one sentence on why the layer cannot be taken apart from the network."""
        a, z, f, layer = self.a, self.z, self.f, self.layer
        if a is None or z is None or f is None:
            raise NetworkError(
                f"found no last layer in {type(self.network).__name__}: no submodule with a matrix of weights has run; "
                f"{_WAY_OUT}"
            )
        if self.calls[layer] > 1:
            raise NetworkError(
                f"the last layer {layer} runs {self.calls[layer]} times for one input, but from a sharded network only "
                f"a layer that runs once is gathered: {_WAY_OUT}"
            )
        if len(a) == len(z) == len(f):
            for dims in (None, (-1, 1), (1, -1)):
                features = Features(a, dims, f.shape[1:])
                if z.numel() == f.numel() and _equal(features.rows(z), f):
                    return features
        raise NetworkError(
            f"the outputs of the network are not those of its last layer {layer} in another order or shape, and only "
            f"such a layer is gathered from a sharded network: name the submodule that ends in it with network=, or "
            f"{_WAY_OUT}"
        )


@contextmanager
def watching(network: nn.Module) -> Iterator[LayerWatch]:
    """Look at the layers of a run, whoever starts it."""
    watch = LayerWatch(network)

    def note(name: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:  # after what tensor parallelism does with an input
            watch.layer, watch.z = name, None
            watch.calls[name] += 1
            watch.a = whole(args[0].detach()) if args and isinstance(args[0], Tensor) else None

        def after(module: nn.Module, args: Any, output: Any) -> None:
            watch.z = whole(output.detach()) if isinstance(output, Tensor) else None

        return before, after

    with ExitStack() as stack:
        for name, module in unviewed(network).named_modules():
            if name and any(p.ndim > 1 for p in module.parameters(recurse=False)):
                before, after = note(name)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
        yield watch


def _watched_run(network: nn.Module, x: Any) -> LayerWatch:
    with torch.inference_mode(False), borrowed(network, ()), torch.no_grad(), watching(network) as watch:
        x = inputs.to_device(inputs.contained(network, x), inputs.device_of(network))
        watch.f = inputs.call(network, x)
    reshard(network)
    watch.features()  # for what it may refuse
    return watch


def plain_copy(layer: nn.Module, zeros: bool = False) -> nn.Module:
    """Of the class that its author gave it, with whole weights, or `zeros` in their place, and without the hooks that
    shard it."""
    kind = next(kind for kind in type(layer).__mro__ if issubclass(kind, nn.Module) and not _is_of_fsdp(kind))
    copy: nn.Module = object.__new__(kind)
    nn.Module.__init__(copy)
    own = {name: value for name, value in layer.__dict__.items() if name not in copy.__dict__}
    copy.__dict__.update(own, training=layer.training)
    for name, p in layer.named_parameters(recurse=False):
        zero = torch.zeros((), dtype=p.dtype, device=p.device)  # of all entries, which takes no memory
        value = zero.expand(p.shape) if zeros else whole(p.detach()).clone()
        copy.register_parameter(name, nn.Parameter(value, p.requires_grad))
    for name in layer._parameters.keys() - copy._parameters.keys():  # a bias that there is not
        copy.register_parameter(name, None)
    for name, buffer in layer.named_buffers(recurse=False):
        copy.register_buffer(name, whole(buffer).clone())
    return copy


def _is_of_fsdp(kind: type) -> bool:
    """`fully_shard` puts a class of its own over the layer's."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.to(b.dtype).nan_to_num(), b.nan_to_num())
