"""What an optimizer's buffer means: with the weights of its average divided out, every one is a mean of squares."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_bayes.posterior.moments import OptimizerError, check_optimizers, second_moments

EXPONENTIAL = {
    "Adam": (Adam, {"betas": (0.9, 0.97)}, 0.97),
    "Adam amsgrad": (Adam, {"betas": (0.9, 0.97), "amsgrad": True}, 0.97),
    "Adam fused": (Adam, {"betas": (0.9, 0.97), "fused": True}, 0.97),
    "Adam foreach": (Adam, {"betas": (0.9, 0.97), "foreach": True}, 0.97),
    "Adam tensor lr": (Adam, {"lr": torch.tensor(1e-3), "betas": (0.9, 0.97)}, 0.97),
    "AdamW": (AdamW, {"betas": (0.9, 0.97), "weight_decay": 0.3}, 0.97),
    "AdamW fused": (AdamW, {"betas": (0.9, 0.97), "fused": True}, 0.97),
    "NAdam": (NAdam, {"betas": (0.9, 0.97)}, 0.97),
    "RAdam": (RAdam, {"betas": (0.9, 0.97)}, 0.97),
    "RMSprop": (RMSprop, {"alpha": 0.9}, 0.9),
    "RMSprop centered": (RMSprop, {"alpha": 0.9, "centered": True, "momentum": 0.5}, 0.9),
    "Adadelta": (Adadelta, {"rho": 0.8}, 0.8),
    "Adadelta foreach": (Adadelta, {"rho": 0.8, "foreach": True}, 0.8),
}
PLAIN = {
    "Adagrad": (Adagrad, {}),
    "Adagrad initial": (Adagrad, {"initial_accumulator_value": 0.7}),
    "Adagrad fused": (Adagrad, {"fused": True}),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def walk(net: nn.Module, optimizer: Optimizer, steps: int, seed: int = 0) -> dict[str, list[Tensor]]:
    """Random gradients, of shrinking size so that a maximum is no average; the gradients that were given."""
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, list[Tensor]] = {name: [] for name, _ in net.named_parameters()}
    for step in range(steps):
        for name, p in net.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.8**step
            given[name].append(p.grad.clone())
        optimizer.step()
    return given


@pytest.mark.parametrize("case", EXPONENTIAL)
@pytest.mark.parametrize("steps", [1, 13])
def test_an_exponential_average_has_weights_that_sum_to_one(case: str, steps: int) -> None:
    kind, arguments, decay = EXPONENTIAL[case]
    net = network()
    optimizer = kind(net.parameters(), **arguments)
    given = walk(net, optimizer, steps)
    weights = torch.tensor([decay ** (steps - 1 - i) for i in range(steps)], dtype=torch.float64)
    moments = second_moments([optimizer], dict(net.named_parameters()))
    assert list(moments) == list(given)
    for name, gradients in given.items():
        squares = torch.stack(gradients).square()
        mean = torch.einsum("t,t...->...", weights / weights.sum(), squares)
        torch.testing.assert_close(moments[name].scaled(), mean, rtol=1e-9, atol=0)
        torch.testing.assert_close(moments[name].scaled(3.5), 3.5 * mean, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", PLAIN)
def test_adagrad_is_the_plain_mean(case: str) -> None:
    kind, arguments = PLAIN[case]
    net = network()
    optimizer = kind(net.parameters(), **arguments)
    given = walk(net, optimizer, 9)
    for name, moment in second_moments([optimizer], dict(net.named_parameters())).items():
        torch.testing.assert_close(moment.scaled(), torch.stack(given[name]).square().mean(0), rtol=1e-9, atol=1e-14)


def test_weight_decay_within_the_gradient_is_part_of_what_is_squared() -> None:
    net = network()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = Adam(net.parameters(), lr=0.0, weight_decay=0.25)
    given = walk(net, optimizer, 1)
    for name, moment in second_moments([optimizer], dict(net.named_parameters())).items():
        expected = (given[name][0] + 0.25 * before[name]).square()
        torch.testing.assert_close(moment.scaled(), expected, rtol=1e-9, atol=0)
        assert (moment.weight_decay, moment.decoupled) == (0.25, False)


@pytest.mark.parametrize("kind", [AdamW, lambda p, **a: Adam(p, decoupled_weight_decay=True, **a)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_denominator_is_what_the_optimizer_divides_by(kind: type[AdamW], amsgrad: bool) -> None:
    """A step with a gradient so small that it does not move v̂ shows the denominator: Δθ = −lr·m̂/denominator."""
    net = network()
    optimizer = kind(net.parameters(), lr=1e-3, betas=(0.0, 0.99), eps=0.03, weight_decay=0.0, amsgrad=amsgrad)
    walk(net, optimizer, 12)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.full_like(p, 1e-9)
    optimizer.step()
    for name, moment in second_moments([optimizer], dict(net.named_parameters())).items():
        step = before[name] - net.get_parameter(name)
        torch.testing.assert_close(1e-3 * 1e-9 / step, moment.denominator(), rtol=1e-3, atol=0)
        assert moment.decoupled


def test_groups_of_several_optimizers_and_parameters_outside_them() -> None:
    net = network()
    first = AdamW([{"params": [net[0].weight], "weight_decay": 0.5}, {"params": [net[0].bias], "weight_decay": 0.0}])
    second = RMSprop([net[2].weight], weight_decay=0.1)
    walk(net, first, 3)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    second.step()
    moments = second_moments([first, second], dict(net.named_parameters()))
    assert list(moments) == ["0.weight", "0.bias", "2.weight"]  # 2.bias is outside
    assert [m.weight_decay for m in moments.values()] == [0.5, 0.0, 0.1]
    assert [m.decoupled for m in moments.values()] == [True, True, False]


def test_they_come_in_the_networks_order_and_not_in_the_optimizers() -> None:
    net = network()
    optimizer = Adam(reversed(list(net.parameters())))
    walk(net, optimizer, 2)
    moments = second_moments([optimizer], dict(net.named_parameters()))
    assert list(moments) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [m.buffer.shape for m in moments.values()] == [p.shape for p in net.parameters()]


def test_half_precision_buffers_are_widened() -> None:
    net = network().bfloat16()
    optimizer = Adam(net.parameters())
    walk(net, optimizer, 2)
    assert {m.scaled().dtype for m in second_moments([optimizer], dict(net.named_parameters())).values()} == {
        torch.float32
    }


class Wrapped:
    """As a library wraps an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optim = optimizer


def test_a_wrapped_optimizer_is_read_like_the_one_inside() -> None:
    net = network()
    optimizer = Adam(net.parameters())
    walk(net, optimizer, 2)
    plain = second_moments([optimizer], dict(net.named_parameters()))
    wrapped = second_moments([Wrapped(optimizer)], dict(net.named_parameters()))  # type: ignore[list-item]
    assert all(torch.equal(plain[name].scaled(), wrapped[name].scaled()) for name in plain)


@pytest.mark.parametrize("kind", [SGD, Adamax])
def test_an_optimizer_without_a_second_moment_is_refused_with_those_that_work(kind: type[Optimizer]) -> None:
    net = network()
    with pytest.raises(OptimizerError, match=rf"{kind.__name__} keeps no second moment.*Adam, AdamW, NAdam, RAdam"):
        check_optimizers([kind(net.parameters(), lr=0.1)], dict(net.named_parameters()))


def test_another_optimizer_of_other_parameters_does_not_matter() -> None:
    net, other = network(), network()
    check_optimizers([Adam(net.parameters()), SGD(other.parameters(), lr=0.1)], dict(net.named_parameters()))
    with pytest.raises(OptimizerError, match="no optimizer holds a parameter"):
        check_optimizers([Adam(other.parameters())], dict(net.named_parameters()))


def test_before_the_first_step_there_is_nothing_to_read() -> None:
    net = network()
    with pytest.raises(OptimizerError, match="made no step"):
        second_moments([Adam(net.parameters())], dict(net.named_parameters()))
