"""Patches of a convolution in strips are those of the whole image, and so is all that is made of them."""

from typing import Any

import pytest
import torch
from helpers.networks import Wired, made
from helpers.tensors import TIGHT, real, seeded
from torch import Tensor, nn

from lightning_bayes import Kron
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.jacobian import layers
from lightning_bayes.jacobian.patches import Patches, transposed_patches

PATCHES: dict[str, tuple[Patches, tuple[int, ...]]] = {
    "plain": (Patches((3, 2), (1, 1), ((1, 1), (0, 1)), (1, 1)), (2, 3, 7, 5)),
    "strided": (Patches((3, 3), (2, 3), ((1, 1), (1, 1)), (1, 1)), (2, 3, 8, 5)),
    "dilated": (Patches((2, 2), (1, 1), ((2, 0), (1, 1)), (3, 2)), (1, 2, 7, 5)),
    "padded beyond its kernel": (Patches((2, 2), (1, 1), ((4, 5), (0, 0)), (1, 1)), (1, 2, 3, 4)),
    "one dimension": (Patches((3,), (2,), ((2, 1),), (1,)), (2, 3, 9)),
    "three dimensions": (Patches((2, 1, 2), (1, 2, 1), ((1, 0), (0, 0), (0, 1)), (1, 1, 1)), (1, 2, 4, 3, 3)),
    "transposed": (transposed_patches((2, 2), (2, 2), (0, 0), (0, 0), (1, 1)), (2, 3, 4, 3)),
    "transposed, cropped": (transposed_patches((3, 2), (2, 1), (2, 1), (1, 0), (1, 1)), (2, 3, 4, 4)),
    "transposed, dilated": (transposed_patches((2, 3), (3, 2), (1, 0), (2, 1), (2, 1)), (1, 2, 4, 3)),
}


@pytest.mark.parametrize("size", [1, 500, 10**6])
@pytest.mark.parametrize("name", PATCHES)
def test_strips_are_the_whole_in_order(name: str, size: int) -> None:
    patches, shape = PATCHES[name]
    x = real(*shape)
    strips = list(patches.strips(x, size))
    torch.testing.assert_close(torch.cat(strips, dim=-1), patches.of(x))
    assert (len(strips) == 1) == (size == 10**6)


def _network() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        z = net.second(net.first(x).tanh()).tanh()
        return net.head(net.norm(net.up(z)).tanh()).tanh() + net.shared(net.shared(x))

    return Wired(
        forward,
        first=nn.Conv2d(2, 4, 3, padding=1),
        second=nn.Conv2d(4, 4, 2, stride=2, groups=2),
        up=nn.ConvTranspose2d(4, 3, 2, stride=2),
        norm=nn.BatchNorm2d(3),
        head=nn.Conv2d(3, 2, 1),
        shared=nn.Conv2d(2, 2, 3, padding=1),
    ).eval()


@pytest.mark.parametrize("structure", ["kron", Kron(weight_sharing="reduce"), "diag", "full"])
def test_a_fit_in_strips_is_the_fit(structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = real(5, 2, 4, 6), torch.randint(2, (5, 4, 6), generator=seeded(1))
    batches = list(zip(x.split([3, 1, 1]), y.split([3, 1, 1]), strict=True))
    network = made(_network)
    whole = fit_curvature(network, batches, structure=structure, curvature="fisher_mc").structure.to_dense()
    monkeypatch.setattr(layers, "STRIP", 1)
    strips = fit_curvature(network, batches, structure=structure, curvature="fisher_mc").structure.to_dense()
    torch.testing.assert_close(strips, whole, **TIGHT)
