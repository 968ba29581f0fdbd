"""The diagonal of whole networks: exact against the naive GGN, mixed between its two ends, refusals by name."""

import math

import oracles
import pytest
import torch
from networks import CASES
from torch import Tensor, nn

from lightning_bayes.curvature.diagonal import BatchDiagonal, RuleError, choose_mode
from lightning_bayes.likelihoods import Gaussian, Likelihood
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.subset import resolve_subset

ADDITIVE = ("exact", "approx", "mixed")


def diagonal(
    network: nn.Module, x: Tensor, y: Tensor, mode: str, threshold: float = 8, likelihood: Likelihood | None = None
) -> Tensor:
    subset = resolve_subset(network, "all", ())
    return BatchDiagonal(network, subset, likelihood or Gaussian(0.7), mode, threshold)(x, y)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_exact_is_the_diagonal_of_the_naive_ggn(name: str) -> None:
    case = CASES[name]()
    subset = resolve_subset(case.network, "all", ())
    close(BatchDiagonal(case.network, subset, case.likelihood, "exact")(case.x, case.y), oracles.ggn(case).diagonal())


def autoencoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 2))
    mirrored = (nn.Linear(2, 48), nn.Tanh(), nn.Unflatten(1, (3, 4, 4)), nn.Upsample(scale_factor=2))
    network = nn.Sequential(*layers, *mirrored, nn.Conv2d(3, 1, 3, padding=1)).double()
    return network, torch.randn(5, 1, 8, 8, dtype=torch.float64)


def test_mixed_is_exact_without_a_limit_and_approx_at_zero() -> None:
    network, x = autoencoder()
    exact, approx = (diagonal(network, x, x, mode) for mode in ("exact", "approx"))
    close(diagonal(network, x, x, "mixed", math.inf), exact)
    close(diagonal(network, x, x, "mixed", 0), approx)
    between = diagonal(network, x, x, "mixed", 48)
    assert not torch.allclose(approx, exact, rtol=1e-3)
    assert (between - exact).abs().sum() < (approx - exact).abs().sum()


def test_approx_is_exact_below_one_mixing_layer_and_no_more() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 6)).double()
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    exact, approx = (diagonal(network, x, y, mode) for mode in ("exact", "approx"))
    first = network[0].weight.numel() + network[0].bias.numel()  # two mixing layers above
    close(approx[first:], exact[first:])
    assert not torch.allclose(approx[:first], exact[:first], rtol=1e-2)


def test_approx_is_exact_for_a_convolution_with_nothing_above_it() -> None:
    """Each pixel is an output, so there are no products between them to drop."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()).double()
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64)
    y = torch.randn(4, 12, dtype=torch.float64)
    approx, exact = (diagonal(network, x, y, mode) for mode in ("approx", "exact"))
    squares = torch.nn.functional.unfold(x.square(), 2).sum((0, 2)).repeat(3) / 0.7**2  # Λ = 1/σ² per output pixel
    close(approx[:24], squares)
    close(exact[:24], squares)
    above = network.append(nn.Linear(12, 3)).double()
    approx, exact = (diagonal(above, x, y[:, :3], mode) for mode in ("approx", "exact"))
    assert not torch.allclose(approx[:24], exact[:24], rtol=1e-2)


@pytest.mark.parametrize("mode", ADDITIVE)
def test_batches_add_up_and_a_batch_of_one_is_one(mode: str) -> None:
    network, x = autoencoder()
    parts = [diagonal(network, part, part, mode) for part in x.split([1, 3, 1])]
    close(torch.stack(parts).sum(0), diagonal(network, x, x, mode))


@pytest.mark.parametrize("mode", ADDITIVE)
def test_nothing_of_the_network_changes(mode: str) -> None:
    network, x = autoencoder()
    network.append(nn.Dropout(0.5)).append(nn.BatchNorm2d(1).double())
    network.train()
    before = {name: t.clone() for name, t in network.state_dict().items()}
    state = torch.get_rng_state()
    diagonal(network, x, x, mode)
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in network.modules())
    assert all(p.grad is None and p.requires_grad for p in network.parameters())


class Unruly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).logcumsumexp(1))


@pytest.mark.parametrize("mode", ["approx", "mixed"])
def test_an_operation_without_a_rule_is_refused_by_name(mode: str) -> None:
    torch.manual_seed(0)
    network = Unruly().double()
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    with pytest.raises(RuleError, match="logcumsumexp"):
        diagonal(network, x, y, mode, threshold=0)
    subset = resolve_subset(network, "all", ())
    with pytest.raises(RuleError, match="logcumsumexp"):
        choose_mode(network, subset, x, 0)


def test_an_error_names_the_innermost_module_and_leaves_no_hook() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Unruly()), nn.Tanh(), nn.Linear(3, 3)).double()
    hooks = (torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks)
    before = [dict(registry) for registry in hooks]
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    with pytest.raises(RuleError, match=r"through logcumsumexp in 1\.1 \(Unruly\), of shape"):
        diagonal(network, x, y, "approx")
    network[1][1].forward = lambda x: x.foo
    with pytest.raises(CurvatureError, match="foo"):
        diagonal(network, x, y, "approx")
    assert [dict(registry) for registry in hooks] == before


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("mode", ["exact", "approx", "mixed"])
def test_examples_that_see_each_other_are_refused(mode: str) -> None:
    network = Centred(4, 3).double()
    with pytest.raises(CurvatureError, match="depends on another example"):
        diagonal(network, torch.randn(3, 4, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64), mode)


def test_a_small_network_is_exact_and_a_large_one_mixed() -> None:
    network, x = autoencoder()
    subset = resolve_subset(network, "all", ())
    assert choose_mode(network, subset, x, 1000) == "exact"
    assert choose_mode(network, subset, x, 10) == "mixed"
