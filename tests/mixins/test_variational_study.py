"""The curvatures that exist for study: the Hessian of eq. (20) with its pathology, and the empirical Fisher."""

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from variational_cases import gradients, images, naive_objective, targets, vl, weighted_kl

from lightning_bayes import Gaussian
from lightning_bayes.mixins import VariationalLaplaceMixin
from lightning_bayes.mixins.variational_laplace import LARGEST_HESSIAN, hessian_term


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
def test_the_hessian_form_is_that_of_the_paper(task: str) -> None:
    """`½ Σ σ² H_λλ` with the whole Hessian of every parameter."""
    module = vl("tied", task, estimator="hessian")
    x, y = images(4), targets(task, 4)
    weights = dict(module.named_parameters())
    μ = {name: weights[name].detach() for name in module.log_sigma}

    def nll(μ: dict[str, Tensor]) -> Tensor:
        return module.nll(torch.func.functional_call(module, μ, (x,)), y)

    expected = torch.zeros((), dtype=torch.float64)
    for name, log_σ in module.log_sigma.items():
        H = torch.autograd.functional.hessian(lambda w, name=name: nll({**μ, name: w}), μ[name])
        square = H.reshape(log_σ.numel(), log_σ.numel())
        expected = expected + 0.5 * (log_σ.exp().square().flatten() * square.diagonal()).sum()
    plain = module.nll(module(x), y) + weighted_kl(module)
    torch.testing.assert_close(module.vl_loss(module(x), y), plain + expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(module.training_step((x, y), 0), plain + expected, rtol=1e-10, atol=0)


class Square(nn.Module):
    """`f = w²`: for a target below −`w²` the log-likelihood falls ever more steeply; above `3w²` it is convex in w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w**2


class OneWeight(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Square()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Bayes(VariationalLaplaceMixin, OneWeight):
    pass


def log_sigma_after(steps: int, y: float, curvature: str) -> float:
    """Where log σ is after that many steps at a fixed mean, with one example `log p = −½ (y − w²)² + const`.

    `H = ∂²log p/∂w² = 2y − 6w²`, and the prior's precision is 4.
    """
    options = {"likelihood": Gaussian(1.0), "prior_std": 0.5, "n_data": 1, "estimator": curvature}
    module = Bayes(variational=options)
    log_σ = module.log_sigma["net.w"]
    x, target = torch.ones(1, dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
    for _ in range(steps):
        (g,) = torch.autograd.grad(module.vl_loss(module(x), target), log_σ)
        with torch.no_grad():
            log_σ -= 0.1 * g.sign() * min(1.0, float(g.abs()))
    return log_σ.item()


def test_the_hessian_form_has_an_optimum_where_the_hessian_is_below_the_priors_precision() -> None:
    """`σ² = 1/(1/s² − H)`, eq. (23), with H = 2·1 − 1.5 = 0.5 < 4."""
    assert log_sigma_after(400, y=1.0, curvature="hessian") == pytest.approx(
        -0.5 * torch.tensor(3.5).log().item(), abs=0.01
    )


def test_the_hessian_form_has_no_optimum_where_the_hessian_is_above_it() -> None:
    """The pathology of section 4.1: H = 2·4 − 1.5 = 6.5 > 4, and σ grows without bound, eq. (24)."""
    early, late = log_sigma_after(60, y=4.0, curvature="hessian"), log_sigma_after(200, y=4.0, curvature="hessian")
    assert early > 0.5
    assert late > early + 10


def test_the_fisher_form_stays_bounded_there() -> None:
    assert log_sigma_after(400, y=4.0, curvature="fisher") < torch.tensor(0.5).log().item() + 0.05


def test_the_hessian_form_refuses_a_large_network() -> None:
    w = torch.zeros(LARGEST_HESSIAN + 1, requires_grad=True)
    with pytest.raises(ValueError, match=r"at most 20000 weights.*use estimator='fisher'"):
        hessian_term(w.square().sum(), [w], [torch.zeros_like(w)])


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_the_empirical_form_squares_the_true_gradient(method: str) -> None:
    module = vl("residual", estimator="empirical", method=method)
    x, y = images(5), targets("classification", 5)
    loss = module.training_step((x, y), 0)
    found = gradients(module, loss)
    expected = naive_objective(module, x, y, y, β=0.7, N=11, s=0.8)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, value in gradients(module, expected).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_weights_that_are_not_used_or_linear_have_no_second_derivative() -> None:
    """Wherever they stand among the others."""
    unused, linear, w = (nn.Parameter(torch.tensor([a, b], dtype=torch.float64)) for a, b in ((1, 2), (3, 4), (0.5, 2)))
    log_σ = [torch.tensor([0.1, -0.2], dtype=torch.float64)] * 3
    found = hessian_term((w**3).sum() + (2 * linear).sum(), [unused, linear, w], log_σ)
    expected = 0.5 * ((2 * log_σ[2]).exp() * 6 * w).sum()
    torch.testing.assert_close(found, expected)
