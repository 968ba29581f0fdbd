"""Bernoulli: agreement with torch, with a two-class Categorical, and the probit integral."""

import pytest
import torch
from helpers.tensors import real as logits
from torch import Tensor

from lightning_bayes.likelihoods import Bernoulli, Categorical, LikelihoodError


def quadrature(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """E[σ(f)] and E[σ(f)²] under N(m, v)."""
    z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    w = torch.exp(-0.5 * z.square())
    w = w / w.sum()
    σ = torch.sigmoid(m.unsqueeze(-1) + v.sqrt().unsqueeze(-1) * z)
    return (w * σ).sum(-1), (w * σ.square()).sum(-1)


def test_log_likelihood_matches_torch() -> None:
    f, y = logits(5, 3) * 30, (logits(5, 3, seed=1) > 0).double()
    expected = torch.distributions.Bernoulli(logits=f).log_prob(y).sum(1)
    torch.testing.assert_close(Bernoulli().log_likelihood_per_example(f, y), expected)


def test_fisher_is_the_expected_outer_product_of_residuals() -> None:
    f = logits(5, 2)
    S = Bernoulli().fisher_root(f)  # [L, B, L]
    assert S.shape == (2, 5, 2)
    p = f.sigmoid()
    expected = torch.zeros(5, 2, 2, dtype=torch.float64)
    for a in (0.0, 1.0):
        for b in (0.0, 1.0):
            y = torch.tensor([a, b], dtype=torch.float64).expand(5, 2)
            r = Bernoulli().residual(f, y)
            weight = (p * y + (1 - p) * (1 - y)).prod(1)
            expected += weight.view(-1, 1, 1) * r.unsqueeze(2) * r.unsqueeze(1)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", S, S), expected)


def test_one_logit_is_two_classes() -> None:
    f = logits(5)
    y = torch.tensor([0, 1, 1, 0, 1])
    two = torch.stack([torch.zeros_like(f), f], 1)
    torch.testing.assert_close(Bernoulli().log_likelihood(f, y), Categorical().log_likelihood(two, y))
    torch.testing.assert_close(Bernoulli().residual(f, y), Categorical().residual(two, y)[:, 1])
    S = Bernoulli().fisher_root(f)
    assert S.shape == (1, 5)
    torch.testing.assert_close(S.square(), Categorical().fisher_root(two)[..., 1].square())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(dtype: torch.dtype) -> None:
    f = torch.tensor([[1000.0, -1000.0]], dtype=dtype)
    y = torch.tensor([[0, 0]])
    torch.testing.assert_close(Bernoulli().log_likelihood(f, y).item(), -1000.0)
    assert Bernoulli().fisher_root(f).count_nonzero() == 0
    torch.testing.assert_close(Bernoulli().residual(f, y).double(), torch.tensor([[-1.0, 0.0]], dtype=torch.float64))
    assert Bernoulli().integrate(f, torch.ones_like(f)).entropy.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_any_real_dtype_of_zeros_and_ones_is_a_label(dtype: torch.dtype) -> None:
    f, y = logits(3, 2), torch.tensor([[0, 1], [1, 1], [0, 0]])
    Bernoulli().check(f, y.to(dtype))
    assert torch.equal(Bernoulli().residual(f, y.to(dtype)), Bernoulli().residual(f, y.double()))


def test_labels_come_with_their_probabilities() -> None:
    f = torch.tensor([0.3, -2.0], dtype=torch.float64)
    N = 20_000
    u = ((torch.arange(N, dtype=torch.float64) + 0.5) / N).unsqueeze(1).expand(N, 2)
    labels = Bernoulli().sample(f.expand(N, 2), u)
    torch.testing.assert_close(labels.mean(0), f.sigmoid(), atol=1 / N, rtol=0)


def test_probit_is_close_to_quadrature() -> None:
    m, v = torch.meshgrid(
        torch.linspace(-4, 4, 9, dtype=torch.float64), torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64), indexing="ij"
    )
    E, _ = quadrature(m, v)
    torch.testing.assert_close(Bernoulli().integrate(m, v, samples=0).mean, E, atol=0.02, rtol=0)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_parts_match_quadrature(link: str) -> None:
    m, v = logits(4, 2), logits(4, 2, seed=1).square()
    E, E2 = quadrature(m, v)
    out = Bernoulli().integrate(m, v, link=link, samples=100_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(out.epistemic, E2 - E.square(), atol=5e-3, rtol=0)
    torch.testing.assert_close(out.aleatoric, E - E2, atol=5e-3, rtol=0)
    torch.testing.assert_close(out.epistemic + out.aleatoric, E * (1 - E), atol=5e-3, rtol=0)


def test_entropy_is_per_label() -> None:
    f = torch.tensor([[0.0, 1000.0, -1000.0]], dtype=torch.float64)
    half = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64).log()
    torch.testing.assert_close(Bernoulli().point(f).entropy, half)


@pytest.mark.parametrize("target", [2.0, -1.0, 0.5])
def test_check_names_a_target_that_is_no_label(target: float) -> None:
    with pytest.raises(LikelihoodError, match=rf"0 or 1, got {target:g}; .*Categorical"):
        Bernoulli().check(logits(3), torch.tensor([0.0, target, 1.0]))


@pytest.mark.parametrize(("f_shape", "y_shape"), [((5,), (5, 1)), ((5, 1), (5,)), ((5, 3), (5, 1)), ((5, 3), (3,))])
def test_shapes_that_torch_would_broadcast_are_refused(f_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> None:
    with pytest.raises(LikelihoodError, match="needs targets of shape"):
        Bernoulli().log_likelihood(logits(*f_shape), torch.zeros(y_shape))


@pytest.mark.parametrize("wrong", [5, -1, 0.3])
def test_targets_that_are_neither_0_nor_1_give_no_number(wrong: float) -> None:
    """Where `check` is not asked, as under vmap: not the number of another target."""
    f, y = torch.tensor([[0.4, -1.0], [0.2, 0.3]]), torch.tensor([[1, wrong], [0, 1]])
    found = Bernoulli().log_likelihood_per_example(f, y)
    assert found.isnan().tolist() == [True, False]
    assert Bernoulli().residual(f, y).isnan().tolist() == [[False, True], [False, False]]
    per_example = torch.func.vmap(lambda f, y: Bernoulli().log_likelihood(f[None], y[None]))(f, y)
    assert per_example.isnan().tolist() == [True, False]
    with pytest.raises(LikelihoodError, match="needs targets that are 0 or 1"):
        Bernoulli().check(f, y)
