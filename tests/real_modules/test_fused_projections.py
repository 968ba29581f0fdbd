"""Fused projections in their authors' own layers: GPT-2's `c_attn` (a `Conv1D`), timm's `qkv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tensors import TIGHT
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.structures import BlockDiagonal, Kronecker

REASON = "real models are the extra `real`"


class FirstToken(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.block(x)
        return self.head((z[0] if isinstance(z, tuple) else z)[:, -1])


def gpt2_block() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason=REASON)
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2", reason=REASON)
    return gpt2.GPT2Block(transformers.GPT2Config(n_embd=4, n_head=2, n_inner=5, attn_implementation="sdpa"), 0)


def timm_block() -> nn.Module:
    vision_transformer = pytest.importorskip("timm.models.vision_transformer", reason=REASON)
    return vision_transformer.Block(4, 2, qkv_bias=True)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gpt2": (gpt2_block, ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
    "timm": (timm_block, ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_fused_projection_has_one_kronecker_block_of_weight_and_bias(name: str) -> None:
    make, layers = BLOCKS[name]
    network = FirstToken(make()).double().eval()
    for p in network.parameters():
        nn.init.normal_(p, std=0.5)
    x, y = torch.randn(4, 3, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    posterior = fit_laplace(network, [(x[:3], y[:3]), (x[3:], y[3:])])
    structure = posterior.curvature.structure
    assert isinstance(structure, BlockDiagonal)
    by_name = dict(zip(structure.names, structure.blocks, strict=True))
    for path in layers:
        block, layer = by_name[f"block.{path}.weight"], network.get_submodule(f"block.{path}")
        assert isinstance(block, Kronecker)
        assert block.size == layer.weight.numel() + layer.bias.numel()
        torch.testing.assert_close(block.to_dense(), kronecker(network, layer, x), **TIGHT)


def kronecker(network: nn.Module, layer: Any, x: Tensor) -> Tensor:
    """`G ⊗ A` over `[W b]`, row by row of outputs, with `A = Σ aaᵀ/(N·T)` and `G = Σ ggᵀ`, as hooks see the layer."""
    calls: list[tuple[Tensor, Tensor]] = []
    with layer.register_forward_hook(lambda _, args, z: calls.append((args[0].detach().flatten(0, -2), z))):
        f = network(x)
    ((a, z),) = calls
    a = torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
    p = f.detach().softmax(1)
    roots = [p[:, c].sqrt()[:, None] * (torch.eye(3, dtype=p.dtype)[c] - p) for c in range(3)]
    g = torch.cat([torch.autograd.grad(f, z, root, retain_graph=True)[0].flatten(0, -2) for root in roots])
    return torch.kron(g.mT @ g, a.mT @ a / len(a))
