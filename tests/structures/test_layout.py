"""A layout is a bijection between the flat parameter vector and the blocks' own orders."""

import pytest
import torch
from structure_cases import F64, LAYOUTS, random
from torch import nn

from lightning_bayes.structures import Layout, Piece


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_scatter_inverts_gather(name: str, lead: tuple[int, ...]) -> None:
    layout = LAYOUTS[name]
    flat = random(*lead, 66, seed=1)
    back = torch.full_like(flat, torch.nan)
    layout.scatter(layout.gather(flat), back)
    mine = layout.gather(torch.arange(66))
    assert torch.equal(back[..., mine], flat[..., mine])
    assert back.isnan().sum() == flat.numel() // 66 * (66 - layout.size)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gather_inverts_scatter(name: str) -> None:
    layout = LAYOUTS[name]
    block = random(2, layout.size, seed=2)
    flat = torch.zeros(2, 66, dtype=F64)
    layout.scatter(block, flat)
    assert torch.equal(layout.gather(flat), block)


def test_layouts_of_a_block_diagonal_cover_every_place_once() -> None:
    places = torch.cat([layout.gather(torch.arange(66)) for layout in LAYOUTS.values()])
    assert torch.equal(places.sort().values, torch.arange(66))


def test_transposed_convolution_becomes_rows_of_output_channels() -> None:
    conv = nn.ConvTranspose1d(4, 6, 3, groups=2, dtype=F64)
    layout = Layout((Piece(0, (2, 2, 3, 3), (0, 2, 1, 3)), Piece(36, (2, 3, 1))))
    flat = torch.cat([conv.weight.detach().flatten(), conv.bias.detach()])
    rows = layout.gather(flat).reshape(2, 3, 7)
    for g in range(2):
        for o in range(3):
            expected = torch.cat([conv.weight[2 * g : 2 * g + 2, o].flatten(), conv.bias[3 * g + o : 3 * g + o + 1]])
            assert torch.equal(rows[g, o], expected.detach())
