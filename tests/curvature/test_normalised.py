"""The layers whose scale a normalisation takes away, in networks that hide them well."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.networks import Wired, made
from helpers.tensors import real
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_bayes import GaussianPosterior, LaplacePosterior, Tuning, fit_laplace
from lightning_bayes.posterior import PosteriorError


class RMSNorm(nn.Module):
    """One of those that people write themselves."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class ConvBatchNorm(nn.Sequential):
    """A block with the name of a normalisation."""


def image_net(*layers: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    """The network, and the shape of an example."""
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(2)), (1, 4, 4)


def vector_net(*layers: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(*layers, nn.Linear(4, 2)), (3,)


def wired(forward: Any, **parts: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    return Wired(forward, **parts), (3,)


def conv(i: int = 1, o: int = 4) -> nn.Conv2d:
    return nn.Conv2d(i, o, 3, padding=1)


def views_between() -> tuple[nn.Module, tuple[int, ...]]:
    parts = {"a": conv(), "norm": nn.LayerNorm(4), "b": nn.Linear(4, 2)}
    return Wired(lambda net, x: net.b(net.norm(net.a(x).flatten(2).transpose(1, 2)).mean(1)), **parts), (1, 4, 4)


def heads(net: Any, x: Tensor) -> Tensor:
    """Queries and keys are normalised, values are not."""
    q, k, v = net.qkv(x).chunk(3, -1)
    return net.out(F.layer_norm(q, (4,)) * F.layer_norm(k, (4,)) + v)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return Wired(lambda net, x: net.out(net.block(x).mean(1)), block=block, out=nn.Linear(4, 2)), (5, 4)


def a_norm_b(width: int = 3) -> dict[str, nn.Module]:
    return {"a": nn.Linear(3, width), "norm": nn.LayerNorm(width), "b": nn.Linear(width, 2)}


NORMALISED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "batch": (lambda: image_net(conv(), nn.BatchNorm2d(4), nn.ReLU()), ("0",)),
    "group": (lambda: image_net(conv(), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)), ("0",)),
    "instance": (lambda: image_net(conv(), nn.InstanceNorm2d(4), nn.ReLU()), ("0",)),
    "layer": (lambda: vector_net(nn.Linear(3, 4), nn.LayerNorm(4)), ("0",)),
    "rms": (lambda: vector_net(nn.Linear(3, 4), nn.RMSNorm(4)), ("0",)),
    "rms of one's own": (lambda: vector_net(nn.Linear(3, 4), RMSNorm(4)), ("0",)),
    "transposed": (lambda: image_net(nn.ConvTranspose2d(1, 4, 2), nn.BatchNorm2d(4)), ("0",)),
    "two in a row": (
        lambda: image_net(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 3), nn.BatchNorm2d(3), nn.ReLU()),
        ("0", "3"),
    ),
    "dropout between": (lambda: vector_net(nn.Linear(3, 4), nn.Dropout(), nn.BatchNorm1d(4)), ("0",)),
    "views between": (views_between, ("a",)),
    "functional": (
        lambda: wired(
            lambda net, x: net.b(F.layer_norm(input=net.a(x), normalized_shape=(4,))),
            a=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        ("a",),
    ),
    "wrapped": (
        lambda: (nn.DataParallel(vector_net(nn.Linear(3, 4), nn.BatchNorm1d(4))[0]), (3,)),
        ("module.0",),
    ),
    "both uses": (lambda: wired(lambda net, x: net.b(net.norm(net.a(net.norm(net.a(x))))), **a_norm_b()), ("a",)),
}
NOT_NORMALISED: dict[str, Any] = {
    "weights that are computed": lambda: vector_net(weight_norm(nn.Linear(3, 4)), nn.LayerNorm(4)),
    "relu between": lambda: image_net(conv(), nn.ReLU(), nn.BatchNorm2d(4)),
    "in-place relu between": lambda: image_net(conv(), nn.ReLU(inplace=True), nn.BatchNorm2d(4)),
    "one of two uses": lambda: wired(lambda net, x: net.b(net.a(net.norm(net.a(x)))), **a_norm_b()),
    "also read by a shortcut": lambda: wired(
        lambda net, x: net.b((lambda z: net.norm(z) + z)(net.a(x))), **a_norm_b(4)
    ),
    "behind a residual sum": lambda: wired(lambda net, x: net.b(net.norm(x + net.a(x))), **a_norm_b()),
    "a part of the output": lambda: wired(heads, qkv=nn.Linear(3, 12), out=nn.Linear(4, 2)),
    "a block with the name of a norm": lambda: vector_net(nn.Linear(3, 3), ConvBatchNorm(nn.Linear(3, 4), nn.ReLU())),
    "a transformer": transformer,
    "none": lambda: vector_net(nn.Linear(3, 4), nn.Tanh()),
}
CASES = {**NORMALISED, **{name: (make, ()) for name, make in NOT_NORMALISED.items()}}


@pytest.mark.parametrize("name", CASES)
def test_the_layers_directly_before_a_normalisation(name: str) -> None:
    make, expected = CASES[name]
    shape: tuple[int, ...] = ()

    def ready() -> nn.Module:
        nonlocal shape
        network, shape = make()
        with torch.no_grad():
            network.eval()(torch.zeros(1, *shape))  # gives lazy layers their shape
        return network

    network = made(ready)
    posterior = fit_laplace(network, [(real(3, *shape), torch.tensor([0, 1, 0]))], structure="diag")
    assert posterior.curvature.normalised == expected
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_they_are_kept_in_the_state_and_found_from_data_where_they_are_not_known() -> None:
    network = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)))
    loader = [(real(5, 3), torch.tensor([0, 1, 0, 1, 1]))]
    posterior = fit_laplace(network, loader)
    loaded = GaussianPosterior.from_state_dict(network, posterior.state_dict())
    assert isinstance(loaded, LaplacePosterior)
    assert loaded.curvature.normalised == ("0",)
    bare = replace(posterior, curvature=replace(posterior.curvature, normalised=None))  # as without a pass
    tuning = Tuning("mackay", groups="normalised")
    with pytest.raises(PosteriorError, match="has not stored: pass loader="):
        bare.tune_prior(tuning)
    tuned = bare.tune_prior(tuning, loader).prior_precision
    torch.testing.assert_close(tuned, posterior.tune_prior(tuning).prior_precision)
    assert tuned.shape == (3,)
    assert tuned[1] == tuned[2] != tuned[0]


def test_a_subset_knows_its_own_layers_only() -> None:
    network = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4)))
    loader = [(real(5, 3), torch.tensor([0, 1, 0, 1, 1]))]
    assert fit_laplace(network, loader, subset=["2"]).curvature.normalised == ("2",)
    assert fit_laplace(network, loader, subset=["3"]).curvature.normalised == ()
