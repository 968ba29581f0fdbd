"""Activations with a kink: find and replace them.

The Variational Laplace objective contains a gradient, so its gradient contains second derivatives of the network. For
`φ(x) = max(x, 0)` the second derivative is a spike, `φ''(x) = δ(x)` (Variational Laplace paper, eq. (31)), which
automatic differentiation replaces by zero. Any activation with a continuous first derivative works; the paper uses
softplus.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_bayes.arguments import format_names, format_value, instance
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import borrowed
from lightning_bayes.network.messages import warn

# Activations with a kink. GELU, SiLU, Mish, Softplus, Tanh, CELU, ELU(alpha=1) and others have none.
_ACTIVATIONS = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.Hardtanh,  # also ReLU6
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Threshold,
    nn.SELU,
)
_POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
_NAMES = (
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "hardtanh", "hardsigmoid", "hardswish", "hardshrink"),
    *("softshrink", "threshold", "selu", "max_pool1d", "max_pool2d", "max_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
)
_MOST_NAMES = 4  # number of layers that a message names for each kind


def replace_activations(module: nn.Module, replacement: Callable[[], nn.Module] = nn.Softplus) -> nn.Module:
    """Replace every activation module that has a kink by a smooth one, and return the module.

    This replaces ReLU, LeakyReLU, PReLU, RReLU, ReLU6, Hardtanh, Hardsigmoid, Hardswish, Hardshrink, Softshrink,
    Threshold, SELU, and ELU with an alpha other than 1. An activation module that is used in several places gets the
    same replacement in all of them. A PReLU's parameter and the hooks of a replaced layer are lost, so call this before
    training and before a variational module creates log σ: in the `__init__` of your own module.

    It does not replace max-pooling (use average pooling or a stride), the activation functions that `nn.RNN` and
    `nn.TransformerEncoderLayer` take by name, or functions called in a `forward`, such as `F.relu(x)`.

    Args:
        module: changed in place; if the module itself is an activation with a kink, its replacement is returned.
        replacement: a module class or a function that returns a new module.
    """
    instance("module", module, nn.Module, "an nn.Module")
    made: dict[nn.Module, nn.Module] = {}

    def instead_of(old: nn.Module) -> nn.Module:
        if old not in made:
            made[old] = _new_module(replacement).train(old.training)
        return made[old]

    if _has_kink(module):
        return instead_of(module)
    paths = [(*path.rpartition("."), child) for path, child in module.named_modules(remove_duplicate=False)]
    places = [(module.get_submodule(parent), name, child) for parent, _, name, child in paths if _has_kink(child)]
    for parent, name, child in places:
        setattr(parent, name, instead_of(child))
    return module


def warn_piecewise_linear(module: nn.Module, example: Any = None) -> dict[str, str]:
    """Warn once about all layers whose first derivative jumps, and return their names and kinds.

    This finds activation and max-pooling modules, and functions that a layer stores (`nn.RNN(nonlinearity="relu")`,
    `nn.TransformerEncoderLayer`, `self.act = F.relu`). With an `example` input, it also finds functions that are called
    in a `forward`, which then runs once in eval mode.
    """
    instance("module", module, nn.Module, "an nn.Module")
    kinks = {name or "the module itself": kind for name, m in module.named_modules() if (kind := _kink(m))}
    if example is not None:
        kinks = {**_kinks_in_forward(module, example), **kinks}
    if kinks:
        warn(_message(kinks))
    return kinks


def _new_module(replacement: Callable[[], nn.Module]) -> nn.Module:
    try:
        new: Any = None if isinstance(replacement, nn.Module) else replacement()
    except TypeError:  # a function of x, or not callable
        new = None
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"replacement must return a new nn.Module per call, such as nn.Softplus, got {format_value(replacement)}"
        )
    return new


def _has_kink(module: nn.Module) -> bool:
    return isinstance(module, _ACTIVATIONS) or (isinstance(module, nn.ELU) and module.alpha != 1.0)


def _kink(module: nn.Module) -> str | None:
    """The kind of kink that a layer has, or None."""
    if _has_kink(module) or isinstance(module, _POOLING):
        return type(module).__name__
    if isinstance(module, nn.RNN) and module.nonlinearity == "relu":
        return "RNN with relu"
    functions = [value for value in vars(module).values() if inspect.isroutine(value)]
    held = [_NAMES_OF[value] for value in functions if value in _NAMES_OF]
    return f"{type(module).__name__} with {held[0]}" if held else None


_NAMES_OF: dict[Any, str] = {
    getattr(place, variant): name
    for name in _NAMES
    for place in (F, torch, torch.Tensor)
    for variant in (name, f"{name}_", f"{name}_with_indices")
    if hasattr(place, variant)
}


class _KinkRecorder(TorchFunctionMode):
    """Records which layers call a function with a kink."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []  # names of the modules whose forward is running
        self.kinks: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NAMES_OF:
            layer = self.running[-1] if self.running else ""
            self.kinks.setdefault(layer or "the module itself", f"{_NAMES_OF[func]} in forward")
        return func(*args, **(kwargs or {}))


def _kinks_in_forward(module: nn.Module, example: Any) -> dict[str, str]:
    inputs.batch_size(example)  # raises an error if the example has no tensor
    recorder = _KinkRecorder()

    def leave(*_: Any) -> None:  # returns nothing, because the result of a hook replaces the output
        recorder.running.pop()

    with borrowed(module, ()), torch.no_grad(), ExitStack() as stack:
        for name, layer in module.named_modules():
            enter = layer.register_forward_pre_hook(lambda *_, name=name: recorder.running.append(name))
            stack.enter_context(enter)
            stack.enter_context(layer.register_forward_hook(leave, always_call=True))
        stack.enter_context(recorder)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        inputs.call(module, inputs.to_device(example, device))
    return recorder.kinks


def _message(kinks: dict[str, str]) -> str:
    names_of: dict[str, list[str]] = {}
    for name, kind in kinks.items():
        names_of.setdefault(kind, []).append(name)
    parts = [f"{format_names(names, _MOST_NAMES)} ({kind})" for kind, names in names_of.items()]
    return (
        f"the first derivative of some layers jumps, which the gradient of the squared-gradient term misses: "
        f"{'; '.join(parts)}. Use a smooth activation, for instance with replace_activations(module, nn.Softplus), and "
        "average pooling or strides instead of max-pooling"
    )
