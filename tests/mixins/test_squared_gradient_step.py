"""How far the finite difference goes: the change of the loss and the weights' own size are its limits."""

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import Categorical, Gaussian
from lightning_bayes.mixins.variational_laplace import reach, step_size


def problem(size: float, gradient: float, σ: float = 0.1) -> tuple[dict[nn.Parameter, Tensor], Tensor, Tensor]:
    """Weights of the given size, `v = σ²ḡ`, and `ḡᵀv`, in two parameters; in float32."""
    generator = torch.Generator().manual_seed(3)
    p, q = (nn.Parameter(size * torch.randn(n, generator=generator)) for n in (7, 3))
    g = {r: gradient * torch.randn(r.shape, generator=generator) for r in (p, q)}
    v = {r: σ**2 * t for r, t in g.items()}
    change = torch.stack([(v[r] * t).double().sum() for r, t in g.items()]).sum()
    return v, change, torch.cat([r.detach() for r in v]).double().norm()


@pytest.mark.parametrize("gradient", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("reach", [1e-2, 1.0, 50.0])
def test_the_step_is_as_long_as_both_limits_allow(size: float, gradient: float, reach: float) -> None:
    """The root of the rounding error, times the change of the loss that is allowed, or times 0.6 of the weights."""
    v, change, length = problem(size, gradient)
    ε = float(step_size(v, change, torch.tensor(reach).double()))
    root = torch.finfo(torch.float32).eps ** 0.5
    of_loss = ε * float(change) / (root * reach)
    of_weights = ε * float(torch.cat(list(v.values())).double().norm()) / (root * 0.6 * float(length))
    assert max(of_loss, of_weights) == pytest.approx(1, rel=1e-5)


def test_both_limits_are_reached_by_some_problem() -> None:
    """Where the gradient is small the weights' size is the limit, where it is large the change of the loss."""
    reach = torch.tensor(1.0).double()
    small, large = (step_size(v, change, reach) * change for v, change, _ in (problem(1, 1e-6), problem(1, 1e3)))
    root = torch.finfo(torch.float32).eps ** 0.5
    assert float(small) < 1e-3 * root
    assert float(large) == pytest.approx(root)


def test_weights_of_zero_and_a_direction_of_zero_have_a_step() -> None:
    v, change, _ = problem(0.0, 1e-6)
    ε = step_size(v, change, torch.tensor(1.0).double())
    length = float(ε) * float(torch.cat(list(v.values())).norm())
    assert length == pytest.approx(0.6 * torch.finfo(torch.float32).eps ** 0.5, rel=1e-5)  # as for weights of size one
    v, change, _ = problem(1.0, 0.0)
    assert float(step_size(v, change, torch.tensor(1.0).double())) == 1.0
    v, change, _ = problem(1.0, 1.0)
    assert float(step_size(v, change, torch.tensor(0.0).double())) == 1.0  # nothing may change, so that nothing does


def outputs(S: int) -> Tensor:
    return torch.randn(S, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def test_of_class_labels_a_mean_over_more_examples_may_change_less() -> None:
    """As those that move this way and that cancel; a squared error's is the same for any number."""
    f, y = outputs(5), torch.tensor([0, 2, 1, 1, 0])
    torch.testing.assert_close(reach(Categorical(), f.repeat(16, 1), y.repeat(16)), reach(Categorical(), f, y) / 2)
    noise = Gaussian(0.6)
    torch.testing.assert_close(reach(noise, f.repeat(16, 1), 2 * f.repeat(16, 1)), reach(noise, f, 2 * f))


def test_outputs_count_by_their_spread_and_a_single_one_by_its_size() -> None:
    noise, f = Gaussian(0.6), outputs(5)
    torch.testing.assert_close(reach(noise, f + 7, f + 8), reach(noise, f, f + 1))  # residuals and spread are the same
    one = f[:1]
    assert reach(noise, 10 * one, 10 * one + 1) > 1.5 * reach(noise, one, one + 1)


def test_the_loss_may_change_by_a_few_nats_where_outputs_and_residuals_are_of_size_one() -> None:
    f, y = outputs(8), torch.arange(8) % 3
    assert 0.5 < float(reach(Categorical(), f, y)) < 5
    assert 1 < float(reach(Gaussian(1.0), f, f + 1)) < 10
