"""Norms made of elementary operators: PyTorch's own values, and derivatives of derivatives that are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import real
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import jvp

from lightning_bayes.network.input_graph import CompositeNorms

X = real(3, 2, 4)
WEIGHT, BIAS = real(4, seed=1), real(4, seed=2)
CHANNELS = {"weight": real(2, seed=1), "bias": real(2, seed=2)}

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda x: F.layer_norm(x, (4,), WEIGHT.to(x.dtype), BIAS.to(x.dtype), 1e-3),
    "layer of two dimensions": lambda x: F.layer_norm(x, (2, 4)),
    "layer of torch itself": lambda x: torch.layer_norm(x, (4,), None, BIAS.to(x.dtype), 1e-3, False),
    "instance": lambda x: F.instance_norm(x, **{name: p.to(x.dtype) for name, p in CHANNELS.items()}, eps=1e-3),
    "batch": lambda x: F.batch_norm(x, None, None, training=True, **{n: p.to(x.dtype) for n, p in CHANNELS.items()}),
    "batch with statistics": lambda x: F.batch_norm(x, real(2).to(x.dtype), real(2).square().to(x.dtype)),
}


@pytest.mark.parametrize("norm", NORMS)
def test_values(norm: str) -> None:
    for dtype, close in ((torch.float64, 1e-12), (torch.bfloat16, 0.02)):
        x = X.to(dtype)
        expected = NORMS[norm](x)
        with CompositeNorms():
            torch.testing.assert_close(NORMS[norm](x), expected, rtol=close, atol=close)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # of PyTorch's own helpers for forward mode
@pytest.mark.parametrize("norm", NORMS)
def test_the_gradient_of_a_jacobian_product(norm: str) -> None:
    def product(x: Tensor) -> Tensor:
        with CompositeNorms():
            derivative: Tensor = jvp(NORMS[norm], (x,), (real(*X.shape, seed=3),))[1]
        return derivative + x  # linear norms have no other gradient

    assert gradcheck(product, X.clone().requires_grad_(), fast_mode=True)


def test_statistics_that_are_tracked_are_left_to_pytorch() -> None:
    def step(norm: Any) -> tuple[Tensor, Tensor]:
        return norm(X), norm.running_mean

    for make in (nn.BatchNorm1d, nn.InstanceNorm1d):
        expected = step(make(2, track_running_stats=True).double())
        with CompositeNorms():
            torch.testing.assert_close(step(make(2, track_running_stats=True).double()), expected)


def test_errors_are_those_of_pytorch() -> None:
    with CompositeNorms():
        with pytest.raises(ValueError, match="more than 1"):
            F.batch_norm(X[:1, :, 0], None, None, training=True)
        with pytest.raises(ValueError, match="more than 1"):
            F.instance_norm(X[:, :, :1])
        with pytest.raises(RuntimeError, match="normalized_shape"):
            F.layer_norm(X, (3,))
