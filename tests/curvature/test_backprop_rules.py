"""Every operation's rule is the squared Jacobian: `d_in = (J ∘ J)ᵀ d_out`, by brute force."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Apply, Wired, moved, real
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bayes.curvature.diagonal import RuleError, Walk
from lightning_bayes.curvature.diagonal_rules import squared_backward
from lightning_bayes.curvature.tape import Tape

TIGHT = {"rtol": 1e-11, "atol": 1e-13}
Made = tuple[nn.Module, Tensor]


def found(module: nn.Module, x: Tensor, d: Tensor) -> dict[str, Tensor]:
    """What the rules give for the input (`""`) and every parameter."""
    parts: dict[str, Tensor] = {"": x.clone().requires_grad_(), **dict(module.named_parameters())}
    with Tape(parts.values()) as tape:
        y = module(parts[""].clone())  # some write into it
    walk = Walk(tape.ops_to(y), y, {}, 0.0, parts.values())
    with torch.no_grad():
        walk.from_diagonal(d)
    return {name: walk.diagonals[id(t)] for name, t in parts.items()}


def expected(module: nn.Module, x: Tensor, d: Tensor) -> dict[str, Tensor]:
    """One Jacobian for each, squared, transposed, times `d`."""
    parts: dict[str, Tensor] = {"": x, **{name: p.detach() for name, p in module.named_parameters()}}

    def squared(name: str) -> Tensor:
        def f(t: Tensor) -> Tensor:
            values = {**parts, name: t}
            return functional_call(module, {k: v for k, v in values.items() if k}, (values[""].clone(),))

        J = torch.autograd.functional.jacobian(f, parts[name])  # [*y, *t]
        return (J.square() * d.reshape(*d.shape, *[1] * parts[name].ndim)).sum(list(range(d.ndim)))

    return {name: squared(name) for name in parts}


def check(module: nn.Module, x: Tensor, oracle: nn.Module | None = None) -> None:
    module, oracle = module.double().eval(), (oracle or module).double().eval()
    d = torch.rand_like(oracle(x.clone()))
    got, wanted = found(module, x, d), expected(oracle, x, d)
    assert got.keys() == wanted.keys()
    for name in got:
        torch.testing.assert_close(got[name], wanted[name], msg=lambda m, n=name: f"{n or 'input'}: {m}", **TIGHT)


def layer(module: nn.Module, *shape: int) -> Made:
    return module, real(*shape)


def function(f: Callable[..., Tensor], *shape: int) -> Made:
    return Apply(f), real(*shape)


LINEAR: dict[str, Callable[[], Made]] = {
    "plain": lambda: layer(nn.Linear(3, 4), 2, 3),
    "no bias": lambda: layer(nn.Linear(3, 2, bias=False), 5, 3),
    "one example": lambda: layer(nn.Linear(3, 4), 1, 3),
    "sequence": lambda: layer(nn.Linear(3, 4), 2, 5, 3),
    "grid": lambda: layer(nn.Linear(2, 3), 2, 3, 2, 2),
    "no batch": lambda: layer(nn.Linear(3, 2), 3),
    "frozen weight": lambda: layer(frozen(nn.Linear(3, 2), "weight"), 2, 3),
    "frozen bias": lambda: layer(frozen(nn.Linear(3, 2), "bias"), 2, 3),
    "lazy names": lambda: (
        Wired(lambda s, x: F.linear(input=x, weight=s.w, bias=s.b), w=parameter(4, 3), b=parameter(4)),
        real(2, 3),
    ),
}


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def frozen(module: nn.Module, name: str) -> nn.Module:
    """That parameter as a buffer, which nothing is asked of."""
    value = getattr(module, name).detach()
    delattr(module, name)
    module.register_buffer(name, value)
    return module


CONVOLUTIONS: dict[str, Callable[[], Made]] = {
    "1d": lambda: layer(nn.Conv1d(2, 3, 3), 2, 2, 6),
    "1d one example": lambda: layer(nn.Conv1d(2, 3, 3), 1, 2, 6),
    "1d stride, dilation": lambda: layer(nn.Conv1d(2, 2, 3, stride=2, padding=2, dilation=2), 2, 2, 7),
    "1d same": lambda: layer(nn.Conv1d(2, 2, 3, padding="same", dilation=2), 2, 2, 5),
    "1d same, even kernel": lambda: layer(nn.Conv1d(2, 2, 4, padding="same"), 2, 2, 5),
    "1d valid": lambda: layer(nn.Conv1d(2, 2, 2, padding="valid"), 2, 2, 4),
    "1d no batch": lambda: layer(nn.Conv1d(2, 3, 3), 2, 6),
    "2d": lambda: layer(nn.Conv2d(2, 3, 3, padding=1), 2, 2, 4, 3),
    "2d no bias": lambda: layer(nn.Conv2d(2, 3, 2, bias=False), 2, 2, 3, 3),
    "2d uneven": lambda: layer(nn.Conv2d(2, 2, (2, 3), stride=(1, 2), padding=(0, 1)), 2, 2, 4, 5),
    "2d dilation": lambda: layer(nn.Conv2d(1, 2, (3, 2), dilation=(2, 1), padding=(2, 1)), 2, 1, 5, 3),
    "2d groups": lambda: layer(nn.Conv2d(4, 6, 2, groups=2), 2, 4, 3, 3),
    "2d depthwise": lambda: layer(nn.Conv2d(3, 6, 2, padding=1, groups=3), 2, 3, 3, 2),
    "2d same, uneven kernel": lambda: layer(nn.Conv2d(2, 2, (3, 2), padding="same", dilation=(1, 2)), 2, 2, 4, 3),
    "2d same, one even side": lambda: layer(nn.Conv2d(1, 2, (3, 2), padding="same"), 2, 1, 4, 3),
    "2d frozen weight": lambda: layer(frozen(nn.Conv2d(2, 2, 2), "weight"), 2, 2, 3, 3),
    "2d frozen bias": lambda: layer(frozen(nn.Conv2d(2, 2, 2), "bias"), 2, 2, 3, 3),
    "3d": lambda: layer(
        nn.Conv3d(2, 4, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(1, 1, 2), groups=2), 2, 2, 2, 3, 3
    ),
    "transposed 1d": lambda: layer(nn.ConvTranspose1d(2, 3, 3), 2, 2, 4),
    "transposed 1d, output padding": lambda: layer(
        nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), 2, 2, 3
    ),
    "transposed 2d, all options": lambda: layer(
        nn.ConvTranspose2d(
            4, 2, (2, 3), stride=(2, 3), padding=(0, 2), output_padding=(1, 0), groups=2, dilation=(3, 1)
        ),
        *(2, 4, 2, 2),
    ),
    "transposed 2d no bias": lambda: layer(nn.ConvTranspose2d(2, 3, 2, bias=False), 2, 2, 2, 3),
    "transposed 3d": lambda: layer(
        nn.ConvTranspose3d(1, 2, 2, stride=2, output_padding=(1, 0, 1), dilation=(1, 2, 1)), 1, 1, 2, 1, 2
    ),
}
POOLS: dict[str, Callable[[], Made]] = {
    "max 1d": lambda: layer(nn.MaxPool1d(3, stride=2, padding=1), 2, 2, 7),
    "max 2d": lambda: layer(nn.MaxPool2d(2), 2, 2, 4, 5),
    "max 2d overlapping": lambda: layer(nn.MaxPool2d(3, stride=1, padding=1), 2, 2, 4, 3),
    "max 2d dilated, ceil": lambda: layer(nn.MaxPool2d(2, stride=2, dilation=2, ceil_mode=True), 2, 2, 6, 5),
    "max 2d with indices": lambda: (Apply(lambda x: F.max_pool2d(x, 2, return_indices=True)[0]), real(2, 2, 4, 4)),
    "max 2d, torch's": lambda: function(lambda x: torch.max_pool2d(x, (2, 3)), 2, 2, 4, 6),
    "max 3d": lambda: layer(nn.MaxPool3d((1, 2, 2), stride=1), 2, 1, 2, 3, 3),
    "unpool": lambda: (Apply(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)), real(2, 2, 4, 4)),
    "average 1d": lambda: layer(nn.AvgPool1d(3, stride=2, padding=1), 2, 2, 7),
    "average 1d, without padding": lambda: layer(
        nn.AvgPool1d(3, 2, padding=1, count_include_pad=False, ceil_mode=True), 2, 2, 6
    ),
    "average 2d": lambda: layer(nn.AvgPool2d(2), 2, 2, 4, 5),
    "average 2d overlapping": lambda: layer(nn.AvgPool2d((3, 2), stride=1, padding=1), 2, 2, 4, 4),
    "average 2d, without padding": lambda: layer(
        nn.AvgPool2d((3, 2), stride=(2, 1), padding=1, count_include_pad=False), 2, 2, 4, 4
    ),
    "average 2d ceil": lambda: layer(nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), 2, 1, 6, 5),
    "average 2d ceil, without padding": lambda: layer(
        nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False), 2, 1, 6, 5
    ),
    "average 2d divisor": lambda: layer(nn.AvgPool2d(2, padding=1, divisor_override=3), 2, 2, 4, 3),
    "average 2d no batch": lambda: layer(nn.AvgPool2d(2), 2, 4, 4),
    "average 3d": lambda: layer(nn.AvgPool3d((1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1)), 2, 1, 2, 3, 3),
    "adaptive max 1d": lambda: layer(nn.AdaptiveMaxPool1d(3), 2, 2, 7),
    "adaptive max 2d": lambda: layer(nn.AdaptiveMaxPool2d((3, 2)), 2, 2, 5, 5),
    "adaptive max 2d with indices": lambda: (
        Apply(lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)[0]),
        real(2, 2, 5, 3),
    ),
    "adaptive max 3d": lambda: layer(nn.AdaptiveMaxPool3d((1, 2, 2)), 2, 1, 2, 3, 3),
    "adaptive average 1d": lambda: layer(nn.AdaptiveAvgPool1d(3), 2, 2, 7),
    "adaptive average 2d": lambda: layer(nn.AdaptiveAvgPool2d((3, 2)), 2, 2, 5, 5),
    "adaptive average 2d, up": lambda: layer(nn.AdaptiveAvgPool2d((3, None)), 2, 2, 2, 3),
    "adaptive average 2d, one": lambda: layer(nn.AdaptiveAvgPool2d(1), 2, 2, 3, 4),
    "adaptive average 3d": lambda: layer(nn.AdaptiveAvgPool3d((1, 2, 2)), 2, 1, 2, 3, 3),
}
UPSAMPLING: dict[str, Callable[[], Made]] = {
    **{
        f"{mode} by factor": lambda mode=mode: layer(nn.Upsample(scale_factor=2, mode=mode), 2, 2, 3, 2)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    },
    **{
        f"{mode} to a size": lambda mode=mode: layer(nn.Upsample(size=(5, 3), mode=mode), 2, 2, 3, 4)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    **{
        f"{mode} corners": lambda mode=mode: layer(nn.Upsample(size=(5, 4), mode=mode, align_corners=True), 2, 2, 3, 4)
        for mode in ("bilinear", "bicubic")
    },
    **{
        f"{mode} odd factor": lambda mode=mode: layer(nn.Upsample(scale_factor=(1.7, 0.6), mode=mode), 2, 2, 4, 5)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    },
    "bilinear odd factor, corners": lambda: layer(
        nn.Upsample(scale_factor=1.7, mode="bilinear", align_corners=True), 2, 1, 4, 5
    ),
    "bilinear recomputed factor": lambda: layer(
        nn.Upsample(scale_factor=1.7, mode="bilinear", recompute_scale_factor=True), 2, 1, 4, 5
    ),
    "bilinear antialiased": lambda: function(
        lambda x: F.interpolate(x, size=(3, 2), mode="bilinear", antialias=True), 2, 1, 5, 5
    ),
    "bicubic antialiased": lambda: function(
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True), 2, 1, 6, 5
    ),
    "linear": lambda: layer(nn.Upsample(scale_factor=2, mode="linear"), 2, 2, 3),
    "linear corners": lambda: layer(nn.Upsample(size=7, mode="linear", align_corners=True), 2, 2, 3),
    "trilinear": lambda: layer(nn.Upsample(scale_factor=(1, 2, 1.5), mode="trilinear"), 1, 1, 2, 2, 3),
    "trilinear corners": lambda: layer(
        nn.Upsample(size=(2, 3, 3), mode="trilinear", align_corners=True), 1, 1, 2, 2, 2
    ),
    "nearest 1d": lambda: layer(nn.Upsample(scale_factor=2.0), 2, 2, 3),
    "nearest 3d": lambda: layer(nn.Upsample(size=(2, 3, 3)), 1, 1, 2, 2, 2),
    "old bilinear": lambda: layer(nn.UpsamplingBilinear2d(scale_factor=2), 2, 1, 2, 3),
    "old nearest": lambda: layer(nn.UpsamplingNearest2d(scale_factor=2), 2, 1, 2, 3),
    "positional": lambda: function(lambda x: F.interpolate(x, None, 2.0, "bilinear", False), 2, 1, 2, 3),
}
BATCH_NORMS: tuple[Any, ...] = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
NORMS: dict[str, Callable[[], Made]] = {
    **{
        f"batch {n}d{', plain' * (not affine)}": lambda n=n, affine=affine: layer(
            moved(BATCH_NORMS[n - 1](3, affine=affine, eps=0.1)), 2, 3, *(2, 3, 2)[:n]
        )
        for n in (1, 2, 3)
        for affine in (True, False)
    },
    "batch, vectors": lambda: layer(moved(nn.BatchNorm1d(3)), 4, 3),
    "batch, no bias": lambda: layer(moved(nn.BatchNorm1d(3, bias=False)), 1, 3),
    "layer": lambda: layer(moved(nn.LayerNorm(5, eps=0.1)), 3, 5),
    "layer, sequence": lambda: layer(moved(nn.LayerNorm(4)), 2, 3, 4),
    "layer, two dimensions": lambda: layer(moved(nn.LayerNorm((3, 2))), 2, 4, 3, 2),
    "layer, no bias": lambda: layer(moved(nn.LayerNorm(4, bias=False)), 2, 4),
    "layer, plain": lambda: layer(nn.LayerNorm(4, elementwise_affine=False), 1, 4),
    "layer, frozen": lambda: layer(frozen(moved(nn.LayerNorm(4)), "weight"), 2, 4),
    "group": lambda: layer(moved(nn.GroupNorm(2, 6, eps=0.1)), 2, 6, 3),
    "group, images": lambda: layer(moved(nn.GroupNorm(3, 6)), 2, 6, 2, 3),
    "group, vectors": lambda: layer(moved(nn.GroupNorm(2, 6)), 3, 6),
    "group, plain": lambda: layer(nn.GroupNorm(1, 4, affine=False), 2, 4, 2),
    "instance": lambda: layer(nn.InstanceNorm2d(3), 2, 3, 2, 3),
    "instance, affine": lambda: layer(moved(nn.InstanceNorm1d(3, affine=True, eps=0.1)), 2, 3, 4),
    "instance, statistics": lambda: layer(
        moved(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)), 2, 3, 2, 2
    ),
    "softmax": lambda: layer(nn.Softmax(1), 3, 4),
    "softmax, channels": lambda: layer(nn.Softmax2d(), 2, 3, 2, 2),
    "softmax, method": lambda: function(lambda x: x.softmax(-1), 2, 3, 4),
    "log softmax": lambda: layer(nn.LogSoftmax(dim=2), 2, 3, 4),
    "log softmax, function": lambda: function(lambda x: torch.log_softmax(x, 1), 2, 3, 4),
}
BARE: dict[str, Callable[[], Made]] = {
    "shift": lambda: (Wired(lambda s, x: x + s.p, p=parameter(3)), real(2, 4, 3)),
    "subtracted shift": lambda: (Wired(lambda s, x: s.p - x, p=parameter(4, 1)), real(2, 4, 3)),
    "scale": lambda: (Wired(lambda s, x: x * s.p, p=parameter(3)), real(2, 4, 3)),
    "scalar": lambda: (Wired(lambda s, x: s.p * x, p=parameter()), real(2, 4, 3)),
    "quotient": lambda: (Wired(lambda s, x: x / s.p, p=parameter(4, 1)), real(2, 4, 3)),
    "exponent": lambda: (Wired(lambda s, x: x.abs() ** s.p, p=parameter(3)), real(2, 4, 3)),
    "weight on the right": lambda: (Wired(lambda s, x: x @ s.p, p=parameter(3, 2)), real(2, 4, 3)),
    "weight on the left": lambda: (Wired(lambda s, x: s.p @ x, p=parameter(5, 4)), real(2, 4, 3)),
    "torch.mm": lambda: (Wired(lambda s, x: torch.mm(x, s.p), p=parameter(3, 2)), real(2, 3)),
    "vector": lambda: (Wired(lambda s, x: x @ s.p, p=parameter(3)), real(2, 4, 3)),
    "made larger": lambda: (Wired(lambda s, x: torch.cat([x, s.p.expand(2, 1, 3)], 1), p=parameter(3)), real(2, 4, 3)),
    "gate": lambda: (Wired(lambda s, x: torch.where(x > 0, x, s.p), p=parameter(3)), real(2, 4, 3)),
    "of parameters alone": lambda: (Wired(lambda s, x: x * s.p.exp(), p=parameter(3)), real(2, 4, 3)),
    "sub, alpha": lambda: (Wired(lambda s, x: torch.sub(x, s.p, alpha=3), p=parameter(3)), real(2, 4, 3)),
}
TABLES = {
    "linear": LINEAR,
    "convolution": CONVOLUTIONS,
    "pool": POOLS,
    "up-sampling": UPSAMPLING,
    "norm or softmax": NORMS,
    "bare parameter": BARE,
}
PLAIN_ACTIVATIONS = [
    "Dropout",
    "GELU",
    "GLU",
    "Hardsigmoid",
    "Hardswish",
    "LogSigmoid",
    "Mish",
    "ReLU",
    "SELU",
    "SiLU",
    "Sigmoid",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Dropout2d",
    "AlphaDropout",
    "FeatureAlphaDropout",
    "Identity",
]
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    **{name: getattr(nn, name) for name in PLAIN_ACTIVATIONS},
    "CELU": lambda: nn.CELU(0.8),
    "ELU": lambda: nn.ELU(0.7),
    "GELU by tanh": lambda: nn.GELU("tanh"),
    "GLU over channels": lambda: nn.Sequential(nn.ZeroPad2d((0, 0, 0, 0, 0, 1)), nn.GLU(1)),
    "Hardshrink": lambda: nn.Hardshrink(0.3),
    "Hardtanh": lambda: nn.Hardtanh(-0.4, 0.6),
    "LeakyReLU": lambda: nn.LeakyReLU(0.3),
    "PReLU": lambda: nn.PReLU(init=0.3),
    "PReLU, a slope per channel": lambda: nn.Sequential(Apply(lambda x: x), varied(nn.PReLU(3))),
    "RReLU": lambda: nn.RReLU(0.2, 0.4),
    "ReLU6": lambda: nn.Sequential(Apply(lambda x: 5 * x), nn.ReLU6()),
    "Softplus": lambda: nn.Softplus(2.0, 1.0),
    "Softshrink": lambda: nn.Softshrink(0.3),
    "Threshold": lambda: nn.Threshold(0.1, 20.0),
}
INPLACE = ["ELU", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "ReLU", "ReLU6", "RReLU", "SELU", "CELU", "SiLU"]
INPLACE += ["Mish", "Threshold", "Dropout", "Dropout2d", "AlphaDropout", "FeatureAlphaDropout"]


def varied(module: nn.PReLU) -> nn.PReLU:
    nn.init.uniform_(module.weight, -0.5, 0.5)
    return module


# A function may be written in several ways, and each way has its own name for PyTorch.
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "x.tanh()": lambda x: x.tanh(),
    "torch.tanh": torch.tanh,
    "F.tanh": F.tanh,
    "torch.relu": torch.relu,
    "x.relu()": lambda x: x.relu(),
    "F.relu": F.relu,
    "F.relu, positional inplace": lambda x: F.relu(x, True),
    "torch.sigmoid": torch.sigmoid,
    "F.sigmoid": F.sigmoid,
    "torch.special.expit": torch.special.expit,
    "F.logsigmoid": F.logsigmoid,
    "F.softplus": lambda x: F.softplus(x, 2.0),
    "F.threshold": lambda x: F.threshold(x, 0.1, 1.0),
    "F.hardtanh": F.hardtanh,
    "F.dropout": lambda x: F.dropout(x, 0.5, False),
    "exp": lambda x: x.exp(),
    "log": lambda x: torch.log(x.abs() + 1),
    "sqrt": lambda x: (x.square() + 1).sqrt(),
    "sin, cos": lambda x: torch.sin(x).cos(),
    "erf": torch.erf,
    "power": lambda x: x**3,
    "power of two": lambda x: 2**x,
    "x.pow(2)": lambda x: x.pow(2),
    "abs": lambda x: x.abs(),
    "negative": lambda x: -x,
    "clamp": lambda x: x.clamp(-0.5, 0.4),
    "torch.clamp": lambda x: torch.clamp(x, min=0.1),
    "clamp by tensors": lambda x: torch.clamp(x, torch.zeros_like(x.detach()), torch.ones(3, dtype=x.dtype)),
    "plus": lambda x: x + 1.5,
    "reflected plus": lambda x: 1.5 + x,
    "minus": lambda x: x - 2,
    "reflected minus": lambda x: 2 - x,
    "times": lambda x: x * 3,
    "reflected times": lambda x: 3 * x,
    "divided": lambda x: x / 4,
    "reflected division": lambda x: 4 / (x.square() + 1),
    "reciprocal": lambda x: (x.square() + 1).reciprocal(),
    "by a constant tensor": lambda x: x * torch.arange(3, dtype=x.dtype) - torch.ones(4, 1, dtype=x.dtype),
    "made larger by one": lambda x: x[:, :1] * torch.arange(4, dtype=x.dtype).view(4, 1),
    "x + x": lambda x: x + x,
    "x - x": lambda x: x.sub(x, alpha=3),
    "torch.add by name": lambda x: torch.add(input=x, other=x),
    "x * x": lambda x: x * x,
    "torch.add with alpha": lambda x: torch.add(1.0 + torch.zeros_like(x.detach()), x, alpha=2),
    "torch.where": lambda x: torch.where(x > 0.1, x, torch.zeros_like(x.detach())),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.5),
    "torch.maximum": lambda x: torch.maximum(x, torch.full_like(x.detach(), 0.2)),
    "torch.max of two": lambda x: torch.max(x, torch.full_like(x.detach(), 0.2)),
    "max along a dimension": lambda x: x.max(1).values,
    "min along a dimension": lambda x: torch.min(x, dim=-1)[0],
    "lerp": lambda x: torch.lerp(x, torch.zeros_like(x.detach()), 0.3),
    "flatten": lambda x: x.flatten(1),
    "torch.flatten": lambda x: torch.flatten(x, 1),
    "view": lambda x: x.view(len(x), -1),
    "view of a size": lambda x: x.view(torch.Size([2, 12])),
    "reshape": lambda x: x.reshape(4, 6),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute, contiguous": lambda x: x.permute(2, 0, 1).contiguous(),
    "contiguous": lambda x: x.contiguous() * 1.0,
    "transpose": lambda x: x.transpose(1, 2),
    "movedim": lambda x: x.movedim(1, 0),
    "mT": lambda x: x.mT,
    "squeeze, unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "None index": lambda x: x[:, None],
    "slice": lambda x: x[:, 1:3],
    "step": lambda x: x[..., ::2],
    "integer": lambda x: x[:, 1],
    "repeated index": lambda x: x[:, [0, 2, 2]],
    "mask": lambda x: x[:, torch.tensor([True, False, True, True])],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: x.select(1, 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 1])),
    "gather": lambda x: x.gather(1, torch.tensor([[[0, 1, 2]], [[3, 3, 0]]])),
    "cat": lambda x: torch.cat([x, torch.zeros_like(x.detach())], 1),
    "cat with itself": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, 2 * torch.ones_like(x.detach())]),
    "chunk, one of them": lambda x: x.chunk(2, 1)[0],
    "split, unevenly": lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1),
    "unbind": lambda x: torch.stack(x.unbind(1)[1:]),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 2),
    "sum": lambda x: x.sum(1),
    "sum of all": lambda x: x.sum((1, 2), keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "mean": lambda x: x.mean(1),
    "mean of two": lambda x: torch.mean(x, (1, 2)),
    "mean of all": lambda x: x.mean().view(1),
    "tril": lambda x: x.tril(),
    "dtype": lambda x: x.to(torch.float64).double() * 1.0,
    "F.pad": lambda x: F.pad(x, (1, 0, 2, 1), value=3.0),
    "F.pad, cutting": lambda x: F.pad(x, (-1, 1)),
    "constant matmul": lambda x: x @ (torch.arange(6, dtype=x.dtype).view(3, 2) - 2),
    "matmul by a constant": lambda x: torch.matmul(torch.arange(8, dtype=x.dtype).view(2, 4) - 3, x),
    "bmm": lambda x: torch.bmm(x, torch.ones(2, 3, 2, dtype=x.dtype) / 3),
    "through a detached copy": lambda x: x * x.detach(),
    "without gradients": lambda x: x + no_grad(x),
    "unfold": lambda x: x.unfold(1, 2, 1),
}
FOUR: dict[str, Callable[[Tensor], Tensor]] = {
    "pixel shuffle": nn.PixelShuffle(2),
    "pixel unshuffle": nn.PixelUnshuffle(2),
    "channel shuffle": nn.ChannelShuffle(2),
    "flatten": nn.Flatten(),
    "unflatten": nn.Unflatten(1, (2, 2)),
    "unfold": nn.Unfold(2, padding=1),
    "fold": lambda x: F.fold(x[:, :, 0, :4], (3, 3), 2),
    "zeros": nn.ZeroPad2d((1, 0, 2, 1)),
    "constant": nn.ConstantPad2d(1, 3.0),
    "reflect": nn.ReflectionPad2d((1, 1, 0, 1)),
    "replicate": nn.ReplicationPad2d(2),
    "circular": nn.CircularPad2d((1, 2, 0, 1)),
}


def no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 3


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in TABLES for name in TABLES[table]])
def test_layers_and_parameters(table: str, name: str) -> None:
    check(*TABLES[table][name]())


def test_convolution_is_the_transposed_convolution_with_the_squared_kernel() -> None:
    """The paper's statement (appendix E.4.1), in its words."""
    module, x = layer(nn.Conv2d(2, 3, 3, padding=1, bias=False).double(), 2, 2, 5, 4)
    d = torch.rand_like(module(x))
    by_hand = F.conv_transpose2d(d, module.weight.square(), padding=1)
    torch.testing.assert_close(found(module, x, d)[""], by_hand, **TIGHT)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "zeros"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_padding_mode_is_a_layer_of_its_own(mode: str, n: int) -> None:
    """What is padded is carried back through the kernel first, then through the padding."""
    x = real(2, 2, *(3, 4, 3)[:n])
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
    both = kind(2, 3, 2, padding=1, padding_mode=mode).double()
    plain = kind(2, 3, 2).double()
    plain.load_state_dict(both.state_dict())
    d = torch.rand_like(both(x))
    pad = Apply(lambda t: F.pad(t, (1, 1) * n, mode="constant" if mode == "zeros" else mode))
    inner = expected(plain, pad(x), d)
    by_hand = {**inner, "": expected(pad, x, inner[""])[""]}
    got = found(both, x, d)
    for name in got:
        torch.testing.assert_close(got[name], by_hand[name], **TIGHT)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    check(ACTIVATIONS[name](), real(2, 3, 3, 2))


@pytest.mark.parametrize("name", ["PReLU", "PReLU, a slope per channel", "Tanh", "ReLU", "Softplus"])
@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (2, 3, 4)], ids=str)
def test_activation_of_vectors_and_sequences(name: str, shape: tuple[int, ...]) -> None:
    check(ACTIVATIONS[name](), real(*shape))


def test_slopes_per_channel_where_channels_and_columns_are_as_many() -> None:
    """Broadcasting by position would take the last dimension for the channels."""
    check(*layer(varied(nn.PReLU(3)), 2, 3, 3, 3))


@pytest.mark.parametrize("name", INPLACE)
def test_activation_in_place(name: str) -> None:
    """Held against the one that makes a new tensor."""
    module = ACTIVATIONS[name]()
    for part in module.modules():
        if hasattr(part, "inplace"):
            part.inplace = True
    check(module, real(2, 3, 3, 2), ACTIVATIONS[name]())


def test_a_list_that_grows_after_it_was_concatenated() -> None:
    """As the features of a DenseNet do."""

    def dense(x: Tensor) -> Tensor:
        features = [x.tanh()]
        for _ in range(2):
            features.append(torch.cat(features, 1).sigmoid())
        return torch.cat(features, 1)

    module, x = function(dense, 2, 3)
    d = torch.rand(2, 12, dtype=torch.float64)
    a, b = x.tanh(), x.tanh().sigmoid()  # what is used several times adds up, without cross terms
    s = lambda t: (t * (1 - t)).square()  # noqa: E731
    third = d[:, 6:] * s(torch.cat([a, b], 1).sigmoid())
    second = d[:, 3:6] + third[:, 3:]
    first = d[:, :3] + third[:, :3] + second * s(b)
    torch.testing.assert_close(found(module, x, d)[""], first * (1 - a.square()).square(), **TIGHT)


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_an_operation(way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        check(*function(WAYS[way], 2, 4, 3))


@pytest.mark.parametrize("name", FOUR)
def test_layout_of_images(name: str) -> None:
    check(Apply(FOUR[name]), real(2, 4, 2, 4))


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding(sparse: bool) -> None:
    table = nn.Embedding(5, 3, padding_idx=1, sparse=sparse).double()
    tokens = torch.tensor([[0, 0, 4], [1, 2, 0]])
    with Tape([table.weight]) as tape:
        y = table(tokens)
    d = torch.rand_like(y)
    walk = Walk(tape.ops_to(y), y, {}, 0.0, [table.weight])
    if sparse:
        with pytest.raises(RuleError, match="embedding"):
            walk.from_diagonal(d)
        return
    walk.from_diagonal(d)
    by_hand = torch.zeros(5, 3, dtype=torch.float64)
    for b, t in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2)):  # but not the padding
        by_hand[tokens[b, t]] += d[b, t]
    torch.testing.assert_close(walk.diagonals[id(table.weight)], by_hand, **TIGHT)


def test_residual_sum_drops_the_cross_terms() -> None:
    """`y = x + Wx` has the squared Jacobian `(I + W)²`; its two ways are carried apart, as `I + W²`."""
    inner = nn.Linear(3, 3).double()
    x, d = real(2, 3), torch.rand(2, 3, dtype=torch.float64)
    got = found(Wired(lambda s, x: x + s.inner(x), inner=inner), x, d)[""]
    torch.testing.assert_close(got, d + d @ inner.weight.square(), **TIGHT)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x - y,
        lambda x, y: x * y,
        lambda x, y: torch.cat([x, y], 1),
        lambda x, y: torch.bmm(x, y),
        torch.maximum,
    ],
    ids=["difference", "product", "cat", "matmul", "maximum"],
)
def test_two_inputs_that_depend_on_the_same_tensor_are_kept_apart(f: Callable[..., Tensor]) -> None:
    """The second input is made of the first: what goes to it must not be counted for the first as well."""
    x = real(2, 3, 3).requires_grad_()
    with Tape([x]) as tape:
        a = x * 2
        b = a.tanh()
        z = f(a, b)
    d = torch.rand_like(z)
    got = squared_backward(tape.ops_to(z)[-1], [d], [a, b])
    for by_rule, J in zip(got, torch.autograd.functional.jacobian(f, (a.detach(), b.detach())), strict=True):
        by_hand = (J.square() * d.reshape(*d.shape, 1, 1, 1)).sum(list(range(d.ndim)))
        torch.testing.assert_close(by_rule, by_hand, **TIGHT)
