"""One backward pass for several columns through convolutions gives the gradients of one column after another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.jacobian.calls import Recorder
from lightning_bayes.jacobian.column_stack import ColumnStack
from lightning_bayes.jacobian.gradients import LayerGradients


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.body(x)
        return nn.functional.gelu(x) * x.sigmoid()


def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "strided": (lambda: network(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 5, 3, 2)), (2, 12, 12)),
    "one pixel": (lambda: network(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, 2, 1)), (2, 1, 1)),
    "two pixels to one": (lambda: network(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 3, 2, 1)), (2, 2, 2)),
    "a pixel out of reach": (lambda: network(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 2, 3)), (2, 3, 4)),
    "dilated": (lambda: network(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 2, dilation=2)), (2, 3, 3)),
    "grouped": (lambda: network(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1, groups=2)), (2, 1, 1)),
    "transposed": (lambda: network(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3, 2, 1, 1)), (2, 3, 3)),
    "sequence": (lambda: network(nn.Conv1d(2, 4, 3), nn.ELU(), nn.Conv1d(4, 3, 3, padding="same")), (2, 20)),
    "residual": (lambda: network(nn.Conv2d(2, 4, 1), Residual(), nn.MaxPool2d(2), Residual()), (2, 10, 10)),
    "norms": (
        lambda: network(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4)),
        (2, 6, 6),
    ),
}


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_stack_are_those_of_each_column(case: str, B: int) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    net = make().double()
    x = torch.randn(B, *shape, dtype=torch.float64)
    net(x)  # materialises the last layer; its batch norms get statistics
    net.eval()
    with Recorder(dict(net.named_parameters())) as recorder:
        f = net(x)
    calls, columns = recorder.calls, torch.randn(4, *f.shape, dtype=torch.float64)
    assert not all(call.layer.batches for call in calls)
    grads = LayerGradients()._stacked(f, calls, columns)
    for call, g in zip(calls, grads, strict=True):
        expected = torch.stack([torch.autograd.grad(f, call.edge, c, retain_graph=True)[0] for c in columns])
        torch.testing.assert_close(g, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("B", [1, 7])
@pytest.mark.parametrize("case", ["residual", "one pixel"])
def test_covariances_are_those_of_the_dense_jacobian(case: str, B: int) -> None:
    torch.manual_seed(0)
    net, shape = CASES[case][0]().double(), CASES[case][1]
    x, y = torch.randn(7, *shape, dtype=torch.float64), torch.arange(7) % 3
    net(x)
    next(net.eval().parameters()).requires_grad_(False)  # the bias of this layer stays in the posterior
    posterior = fit_laplace(net, [(x[:4], y[:4]), (x[4:], y[4:])], subset=[n for n, _ in net.named_parameters()][1:])
    mean, covariance = posterior.functional(x[:B])
    parameters, f = list(posterior.subset.parameters(net).values()), net(x[:B])
    rows = [torch.autograd.grad(out, parameters, retain_graph=True) for out in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, (B, 3))  # [B, 3, P]
    torch.testing.assert_close(mean, f.detach())
    torch.testing.assert_close(covariance, J @ torch.linalg.solve(posterior.precision.to_dense(), J.mT))


class Overwriting(nn.Module):
    """A hook that writes into the gradient, which a stack does not allow."""

    def forward(self, x: Tensor) -> Tensor:
        z = x * 2
        z.register_hook(lambda g: g.clone().mul_(3))
        return z


def test_a_backward_pass_that_a_stack_cannot_take_is_looped() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), Overwriting(), nn.Flatten(), nn.Linear(16, 3)).double()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    with Recorder(dict(net.named_parameters())) as recorder:
        f = net(x)
    columns: Any = torch.randn(2, 2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="no rule for several columns"):
        LayerGradients()._stacked(f, recorder.calls, columns)
    grads = LayerGradients(stacks=True)(f, recorder.calls, columns)
    expected = [torch.autograd.grad(f, recorder.calls[0].edge, c, retain_graph=True)[0] for c in columns]
    torch.testing.assert_close(grads[0], torch.stack(expected))


def test_a_number_read_from_a_stack_raises() -> None:
    with pytest.raises(RuntimeError, match="no rule for several columns"):
        ColumnStack(torch.ones(2, 1)).item()
    with pytest.raises(RuntimeError, match="no rule for several columns"):
        ColumnStack(torch.ones(2, 3)).as_strided((1,), (1,), 0)
