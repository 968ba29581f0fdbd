"""Weights without a gradient, such as those of a dead ReLU unit: weight decay holds them, whichever kind it is."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_bayes import BNN, Gaussian
from lightning_bayes.posterior import LaplacePosterior, fit_l2m

N, C, B = 100_000, 3, 5  # as many examples as make every weight with a gradient sure
WD = 0.01
DEAD = 2  # the unit


def data(n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, C, generator=generator, dtype=torch.float64)
    return x, (x[:, :C] + noise).argmax(1)


def network() -> nn.Sequential:
    """One of six units is never switched on."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, C)).double()
    with torch.no_grad():
        net[0].weight[DEAD] = 0.0
        net[0].bias[DEAD] = -0.5
    return net


def trained(kind: type[Optimizer] = AdamW, **options: float) -> tuple[nn.Sequential, Optimizer]:
    net, (x, y) = network(), data()
    optimizer = kind(net.parameters(), lr=0.01, weight_decay=WD, **options)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        for rows in torch.randperm(len(x), generator=generator).split(B):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net, optimizer


def of_dead_unit(net: nn.Sequential) -> Tensor:
    """Its incoming weights, its bias and its outgoing weights.  # [P]"""
    marks = [torch.zeros_like(p, dtype=torch.bool) for p in net.parameters()]
    marks[0][DEAD] = marks[1][DEAD] = True
    marks[2][:, DEAD] = True
    return torch.cat([mark.flatten() for mark in marks])


def second_moment(net: nn.Module, optimizer: Optimizer, key: str = "exp_avg_sq") -> Tensor:
    """`v̂`, bias-corrected by hand.  # [P]"""
    states = [optimizer.state[p] for p in net.parameters()]
    return torch.cat([(state[key] / (1 - 0.999 ** float(state["step"]))).flatten() for state in states])


def fitted(net: nn.Module, optimizer: Optimizer, **arguments: float) -> LaplacePosterior:
    return fit_l2m(net, optimizer, n_data=N, batch_size=B, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("c", [1.0, 4.0])
def test_a_dead_weight_has_the_prior_of_coupled_decay_and_a_live_one_that_of_adamw(c: float) -> None:
    net, optimizer = trained()
    dead, v = of_dead_unit(net), second_moment(net, optimizer)
    assert not v[dead].any()
    assert v[~dead].all()
    δ = fitted(net, optimizer, loss_scale=c).prior_precision
    torch.testing.assert_close(δ[~dead], N * WD * (v[~dead].sqrt() + 1e-8) / c, rtol=1e-12, atol=0)
    torch.testing.assert_close(δ[dead], torch.full_like(δ[dead], N * WD / c), rtol=1e-12, atol=0)


def test_it_is_the_same_prior_with_weight_decay_of_either_kind() -> None:
    net, optimizer = trained(Adam)
    coupled = fitted(net, optimizer).prior_precision
    net, optimizer = trained(AdamW)
    decoupled = fitted(net, optimizer).prior_precision
    torch.testing.assert_close(decoupled[of_dead_unit(net)], coupled.expand(int(of_dead_unit(net).sum())))


def test_sampled_predictions_stay_near_those_at_the_mean() -> None:
    """By AdamW's formula alone they do not: the unit is switched on by weights of any size."""
    net, optimizer = trained()
    x, _ = data()
    posterior = fitted(net, optimizer)
    unheld = posterior.with_prior(N * WD * (second_moment(net, optimizer).sqrt() + 1e-8))
    at_mean = posterior.predict(x, "map").probs
    assert at_mean is not None
    held, without = (
        p.predict(x, BNN(samples=200), generator=torch.Generator().manual_seed(0)).probs for p in (posterior, unheld)
    )
    assert held is not None
    assert without is not None
    assert held.isfinite().all()
    assert (held - at_mean).abs().max() < 0.03
    assert (without - at_mean).abs().max() > 0.2


def test_the_linearised_network_does_not_notice_the_data_points() -> None:
    """No example switches the unit on, so that its weights do not move f."""
    net, optimizer = trained()
    x, _ = data()
    posterior = fitted(net, optimizer)
    unheld = posterior.with_prior(N * WD * (second_moment(net, optimizer).sqrt() + 1e-8))
    torch.testing.assert_close(posterior.functional(x)[1], unheld.functional(x)[1], rtol=1e-9, atol=1e-15)


def test_a_weight_that_fades_counts_as_dead_below_a_thousandth_of_its_parameters_root_mean() -> None:
    """And by its own parameter's mean: another layer may have gradients of any size."""
    net, optimizer = trained()
    shares = torch.tensor([2.25e-6, 0.25e-6, 0.0], dtype=torch.float64)
    for size, p in zip((1.0, 1e-5, 1e-3, 1e6), net.parameters(), strict=True):
        v = optimizer.state[p]["exp_avg_sq"].view(-1).fill_(1.0)
        v[:3] = shares * (v.numel() - 3) / v.numel()  # of the mean, as good as exactly
        v *= size
    δ, v = fitted(net, optimizer).prior_precision, second_moment(net, optimizer)
    expected = N * WD * (v.sqrt() + 1e-8)
    starts = [0, 24, 30, 48]
    for start in starts:
        expected[start + 1 : start + 3] = N * WD
    torch.testing.assert_close(δ[: starts[3]], expected[: starts[3]], rtol=1e-12, atol=0)


def test_amsgrad_divides_by_the_largest_and_so_is_a_weight_dead_if_that_is_small() -> None:
    net, optimizer = trained(amsgrad=True)
    for p in net.parameters():
        optimizer.state[p]["exp_avg_sq"].zero_()  # all have faded; the largest has not
    dead, v = of_dead_unit(net), second_moment(net, optimizer, "max_exp_avg_sq")
    δ = fitted(net, optimizer).prior_precision
    torch.testing.assert_close(δ[~dead], N * WD * (v[~dead].sqrt() + 1e-8), rtol=1e-12, atol=0)
    torch.testing.assert_close(δ[dead], torch.full_like(δ[dead], N * WD), rtol=1e-12, atol=0)


@pytest.mark.parametrize("place", range(4))
def test_a_parameter_without_any_gradient_is_all_dead(place: int) -> None:
    """And the others are as they are."""
    net, optimizer = trained()
    before = fitted(net, optimizer).prior_precision
    sizes = [p.numel() for p in net.parameters()]
    optimizer.state[list(net.parameters())[place]]["exp_avg_sq"].zero_()
    expected = list(before.split(sizes))
    expected[place] = torch.full_like(expected[place], N * WD)
    torch.testing.assert_close(fitted(net, optimizer).prior_precision, torch.cat(expected), rtol=1e-12, atol=0)


def test_a_large_eps_holds_every_weight_by_itself() -> None:
    """There AdamW's own formula is a prior for all of them."""
    net, optimizer = trained(eps=0.5)
    v = second_moment(net, optimizer)
    assert not v[of_dead_unit(net)].any()
    δ = fitted(net, optimizer).prior_precision
    torch.testing.assert_close(δ, N * WD * (v.sqrt() + 0.5), rtol=1e-12, atol=0)


def test_the_papers_form_and_a_given_prior_are_as_they_are() -> None:
    net, optimizer = trained()
    posterior = fit_l2m(net, optimizer, n_data=N, batch_size=B, scaling="paper")
    expected = second_moment(net, optimizer) + WD + 1e-8
    torch.testing.assert_close(posterior.precision.diagonal(), expected, rtol=1e-12, atol=0)
    given = fit_l2m(net, optimizer, Gaussian(1.0), n_data=N, batch_size=B, prior_precision=0.5, loss_scale=1.0)
    assert given.prior_precision == 0.5
