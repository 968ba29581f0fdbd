"""Small networks trained as one computation: each is the network that plain PyTorch trains alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.papers.glm import network_grid
from recipes.papers.glm.network_grid import Examples, Shape, mfvi_step, train_map, train_mfvi

PRECISIONS = torch.tensor([0.3, 7.0], dtype=torch.float64)
in_parts = pytest.mark.parametrize("sizes", [(11,), (4, 4, 3)])  # of the 11 examples


def cut(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four networks of four units see so many examples at a time."""
    monkeypatch.setattr(network_grid, "CACHED", 4 * 4 * sizes[0])


def problem(outputs: int) -> tuple[Shape, list[Tensor], list[Tensor], Tensor]:
    """Two splits of 11 examples."""
    shape, generator = Shape(3, 4, outputs), torch.Generator().manual_seed(0)
    x = [torch.randn(11, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
    y = [torch.randint(0, max(outputs, 2), (11,), generator=generator) for _ in range(2)]
    return shape, x, y, torch.stack([shape.start(seed).double() for seed in (5, 6)])


def loss(f: Tensor, y: Tensor) -> Tensor:
    if f.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(f.squeeze(-1), y.double(), reduction="sum")
    return F.cross_entropy(f, y, reduction="sum")


@in_parts
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_network_of_the_grid_is_the_one_trained_alone(
    outputs: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(sizes, monkeypatch)
    shape, x, y, starts = problem(outputs)
    trained = train_map(shape, Examples.stacked(x, y, outputs), starts, PRECISIONS, steps=40, lr=0.01)
    for s in range(2):
        for k, δ in enumerate(PRECISIONS):
            network = shape.network().double()
            nn.utils.vector_to_parameters(starts[s].clone(), network.parameters())
            adam = torch.optim.Adam(network.parameters(), lr=0.01)
            for _ in range(40):
                adam.zero_grad()
                penalty = 0.5 * δ * sum(p.square().sum() for p in network.parameters())
                (loss(network(x[s]), y[s]) + penalty).backward()
                adam.step()
            alone = nn.utils.parameters_to_vector(network.parameters()).detach()
            torch.testing.assert_close(trained[s, k], alone, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(shape.outputs_of(trained[s], x[s])[k], network(x[s]).detach())


def local_loss(shape: Shape, mean: Tensor, variance: Tensor, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """Of one network, with this noise for each layer's outputs.  # noise [2H + C, N]"""
    pairs = list(zip(shape.parts(mean), shape.parts(variance), strict=True))
    ε, h = noise.mT.split([shape.width, shape.width, shape.outputs], -1), x
    for layer in range(3):
        (W, V), (b, c) = pairs[2 * layer], pairs[2 * layer + 1]
        h = F.linear(h, W, b) + F.linear(h.square(), V, c).sqrt() * ε[layer]
        h = h.tanh() if layer < 2 else h
    return loss(h, y)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_step_of_mfvi_has_the_loss_of_its_draws_and_its_gradients(outputs: int) -> None:
    shape, x, y, _ = problem(outputs)
    generator = torch.Generator().manual_seed(1)
    data, K = Examples.stacked(x, y, outputs), 2
    θ = torch.randn(4, shape.size, dtype=torch.float64, generator=generator)
    v = torch.rand(4, shape.size, dtype=torch.float64, generator=generator) + 0.1
    noise = torch.randn(2, 8 + outputs, 11, dtype=torch.float64, generator=generator)
    squares = Examples(data.x.square(), data.y)
    losses, of_mean, of_variance = mfvi_step(shape.parts(θ), shape.parts(v), data, squares, noise, K)
    for b in range(4):
        mean, variance = θ[b].clone().requires_grad_(), v[b].clone().requires_grad_()
        expected = local_loss(shape, mean, variance, x[b // K], y[b // K], noise[b // K])
        torch.testing.assert_close(losses[b], expected.detach())
        for ours, theirs in zip((of_mean, of_variance), torch.autograd.grad(expected, (mean, variance)), strict=True):
            torch.testing.assert_close(torch.cat([part[b].flatten() for part in ours]), theirs)


@in_parts
def test_mfvi_of_the_grid_is_the_one_trained_alone(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    cut(sizes, monkeypatch)
    shape, x, y, starts = problem(3)
    data, noise = Examples.stacked(x, y, 3), [torch.Generator().manual_seed(seed) for seed in (2, 3)]
    μ, σ = train_mfvi(shape, data, starts, PRECISIONS, 30, noise, rho=-2.0)
    for s, k in ((0, 1), (1, 0)):
        generator = torch.Generator().manual_seed(2 + s)
        prior = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), PRECISIONS[k].rsqrt())
        mean, ρ = starts[s].clone().requires_grad_(), torch.full_like(starts[s], -2.0).requires_grad_()
        adam = torch.optim.Adam([mean, ρ], lr=1e-2)
        for _ in range(30):
            adam.zero_grad()
            std, ε = F.softplus(ρ), torch.randn(11, len(y[s]), generator=generator, dtype=torch.float64)
            divergence = torch.distributions.kl_divergence(torch.distributions.Normal(mean, std), prior).sum()
            (local_loss(shape, mean, std.square(), x[s], y[s], ε) + divergence).backward()
            adam.step()
        torch.testing.assert_close(μ[s, k], mean.detach(), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(σ[s, k], F.softplus(ρ).detach(), rtol=1e-7, atol=1e-9)
