"""The step in two passes: how often the network runs, the sign of ε, and the error of the shared pass.

That its gradient is the objective's, that nothing else moves, and that processes and accumulation change nothing, is
tested beside the other methods.
"""

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import real as draw
from torch import Tensor, nn
from variational_cases import VL, gradients, images, options, spread, targets, vl

from lightning_bayes.mixins import VariationalLaplaceMixin, variational_laplace
from lightning_bayes.mixins.variational_laplace import draw_sign


def batch(n: int = 32, task: str = "classification") -> tuple[Tensor, Tensor]:
    return images(n), targets(task, n)


def step(module: Any, x: Tensor, y: Tensor, sign: int | None = None) -> Tensor:
    """The gradient of the weights, of a module that has drawn no labels yet."""
    module._variational.draws = 0
    with pytest.MonkeyPatch.context() as patch:
        if sign is not None:
            patch.setattr(variational_laplace, "draw_sign", lambda q: sign)
        found = gradients(module, module.training_step((x, y), 0))
    return torch.cat([g.double().flatten() for name, g in found.items() if not name.startswith("log_sigma")])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("method", "backward"), [("two_passes", 2), ("auto", 2), ("finite_difference", 3)])
def test_it_takes_two_passes(method: str, backward: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, original, calls = [], torch.autograd.grad, []
    module = vl("conv", method=method)
    module.net.register_forward_pre_hook(lambda *_: forward.append(1))  # type: ignore[union-attr]
    module.training_step(batch(), 0)  # the first looks for kinks as well
    forward.clear()
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    module.training_step(batch(), 0)
    assert (len(forward), len(calls)) == (2, backward)


@pytest.mark.parametrize("σ", [1e-5, 1e-3, 1e-1, 1.0])
@pytest.mark.parametrize(("kind", "task"), [("residual", "classification"), ("deep", "regression")])
def test_the_gradient_in_float32_for_any_sigma(kind: str, task: str, σ: float) -> None:
    """With either sign within a few thousandths of the one in float64 by double backward."""
    module = spread(VL(kind, task, variational=options(task, method="two_passes")), centre=torch.tensor(σ).log().item())
    exact = VL(kind, task, variational=options(task, method="exact"))
    exact.load_state_dict(module.state_dict())
    exact.double()
    x, y = batch(task=task)
    expected = step(exact, x, y)
    narrow = x.float(), y.float() if y.is_floating_point() else y
    for sign in (1, -1):
        assert relative(step(copy.deepcopy(module), *narrow, sign), expected) < 5e-3


def test_a_random_sign_takes_the_error_away_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """To first order in ε, which is large here."""
    module, exact = vl("residual", method="two_passes"), vl("residual", method="exact")
    expected = step(exact, *batch())
    monkeypatch.setattr(variational_laplace, "shared_step_size", lambda *_: torch.tensor(0.3, dtype=torch.float64))
    ahead, back = (step(module, *batch(), sign) for sign in (1, -1))
    one = relative(ahead, expected)
    assert one > 1e-3
    assert relative((ahead + back) / 2, expected) < 0.05 * one


def test_the_sign_belongs_to_the_seed_and_the_number_of_the_draw() -> None:
    """Both come up as often, a resumed run goes on with the same, and the global random state is not used."""
    q = vl(method="two_passes")._variational
    before = torch.get_rng_state()

    def signs(seed: int) -> list[int]:
        object.__setattr__(q.options, "seed", seed)
        drawn = []
        for number in range(1, 201):
            q.draws = number
            drawn.append(draw_sign(q))
        return drawn

    first = signs(0)
    assert set(first) == {1, -1}
    assert abs(sum(first)) < 50
    assert signs(0) == first != signs(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_weight_that_has_a_sigma_the_true_labels_are_left() -> None:
    module = vl("conv", method="two_passes", deterministic=["net.3"], beta=1e-40)
    for name in module.log_sigma:
        module.get_parameter(name).requires_grad_(False)
    x, y = batch(6)
    expected = gradients(module.net, module.nll(module(x), y))
    found = gradients(module.net, module.training_step((x, y), 0))
    assert expected
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_16_bit_weights_are_too_coarse() -> None:
    module = VL("mlp", variational=options(method="two_passes")).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"method='two_passes' .* 16-bit weights are too coarse: use 'exact' or 'aut"):
        module.training_step((images(6).to(torch.bfloat16), targets("classification", 6)), 0)


class TwoPrecisions(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(10, 16), nn.Linear(16, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))).double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class BayesTwoPrecisions(VariationalLaplaceMixin, TwoPrecisions):
    pass


@pytest.mark.parametrize("method", ["two_passes", "finite_difference"])
def test_the_coarsest_weights_say_how_far_to_go(method: str) -> None:
    """A step for float64 would be lost in the rounding of float32."""
    x, y = draw(32, 10, seed=1), targets("classification", 32)
    module, exact = (BayesTwoPrecisions(variational=options(method=m)) for m in (method, "exact"))
    exact.double()
    assert relative(step(module, x, y), step(exact, x, y)) < 5e-3
