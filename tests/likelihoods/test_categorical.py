"""Categorical: the stick-breaking root, ignored targets, and the three integrals."""

import pytest
import torch
from helpers.tensors import real as logits

from lightning_bayes.likelihoods import Categorical, LikelihoodError
from lightning_bayes.likelihoods.outputs import draw_gaussian


def covariance(B: int, C: int, rank: int | None = None, seed: int = 1) -> torch.Tensor:
    root = logits(B, C, rank or C, seed=seed)
    return root @ root.mT


def test_log_likelihood_matches_torch() -> None:
    f, y = logits(5, 4), torch.tensor([0, 3, 1, 1, 2])
    expected = torch.distributions.Categorical(logits=f).log_prob(y)
    torch.testing.assert_close(Categorical().log_likelihood_per_example(f, y), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_any_integer_target_is_an_index(dtype: torch.dtype) -> None:
    f, y = logits(3, 4), torch.tensor([0, 3, 1])
    Categorical().check(f, y.to(dtype))
    assert torch.equal(Categorical().residual(f, y.to(dtype)), Categorical().residual(f, y))


def test_fisher_is_the_expected_outer_product_of_residuals() -> None:
    f = logits(5, 4)
    S = Categorical().fisher_root(f)  # [C−1, B, C]
    assert S.shape == (3, 5, 4)
    r = torch.stack([Categorical().residual(f, torch.full((5,), c)) for c in range(4)])  # every label [C, B, C]
    expected = torch.einsum("cbi,cbj,bc->bij", r, r, f.softmax(1))
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", S, S), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite_and_exact(dtype: torch.dtype) -> None:
    f = torch.tensor(
        [[1000.0, -1000.0, 0.0], [-1000.0, -1000.0, 1000.0], [1000.0, 1000.0, -1000.0], [0.0, -100.0, -104.0]],
        dtype=dtype,
    )
    S = Categorical().fisher_root(f)
    p = f.to(S.dtype).softmax(1)
    Λ = torch.einsum("kbi,kbj->bij", S, S)
    # Off the diagonal Λ is −p_i p_j; on it p_i(1 − p_i), with 1 − p_i summed from the other classes.
    off = (1 - torch.eye(3, dtype=p.dtype)) * p.unsqueeze(2) * p.unsqueeze(1)
    expected = torch.diag_embed(off.sum(2)) - off
    torch.testing.assert_close(Λ, expected)
    y = torch.tensor([1, 2, 0, 2])
    assert Categorical().residual(f, y).isfinite().all()
    assert Categorical().log_likelihood(f, y).isfinite()
    for link in Categorical.links:
        out = Categorical().integrate(f, torch.ones_like(f), link=link, samples=4)
        assert torch.stack([out.mean, out.epistemic, out.aleatoric]).isfinite().all()


def test_a_tiny_tail_keeps_its_relative_precision() -> None:
    f = torch.tensor([[0.0, -60.0, -61.0]], dtype=torch.float64)
    Λ = torch.einsum("kbi,kbj->bij", *[Categorical().fisher_root(f)] * 2)[0]
    p = f.softmax(1)[0]
    torch.testing.assert_close(Λ[0, 0], p[0] * (p[1] + p[2]), rtol=1e-12, atol=0)
    torch.testing.assert_close(Λ[0, 1], -p[0] * p[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(Λ[1, 1], p[1] * (p[0] + p[2]), rtol=1e-12, atol=0)


def test_masked_classes_have_no_curvature() -> None:
    f = logits(5, 4)
    f[:, 2] = -torch.inf
    kept = [0, 1, 3]
    Λ, smaller = (torch.einsum("kbi,kbj->bij", S, S) for S in map(Categorical().fisher_root, (f, f[:, kept])))
    torch.testing.assert_close(Λ[:, kept][:, :, kept], smaller)
    assert Λ[:, 2].count_nonzero() == 0


@pytest.mark.parametrize("ignore_index", [-100, 255, 0])
def test_ignoring_is_dropping(ignore_index: int) -> None:
    likelihood = Categorical(ignore_index=ignore_index)
    f, y = logits(3, 4, 5), torch.randint(1, 4, (3, 5), generator=torch.Generator().manual_seed(2))
    drop = torch.rand(3, 5, generator=torch.Generator().manual_seed(3)) < 0.4
    y = y.masked_fill(drop, ignore_index)
    likelihood.check(f, y)
    kept_f, kept_y = f.movedim(1, 2)[~drop], y[~drop]  # [kept, C], [kept]
    torch.testing.assert_close(likelihood.log_likelihood(f, y), Categorical().log_likelihood(kept_f, kept_y))

    r = likelihood.residual(f, y).movedim(1, 2)
    torch.testing.assert_close(r[~drop], Categorical().residual(kept_f, kept_y))
    assert r[drop].count_nonzero() == 0

    S = likelihood.fisher_root(f, y).movedim(2, 3)  # [K, B, positions, C]
    torch.testing.assert_close(S[:, ~drop], Categorical().fisher_root(kept_f))
    assert S[:, drop].count_nonzero() == 0

    labels = likelihood.sample(f, torch.rand_like(f), y)
    assert (labels[drop] == ignore_index).all()


def test_ignored_positions_may_hold_anything() -> None:
    f, y = logits(2, 3, 2), torch.tensor([[0, -100], [2, 1]])
    poisoned = f.clone()
    poisoned[0, :, 1] = torch.nan
    for method in (Categorical().log_likelihood, Categorical().residual, Categorical().fisher_root):
        torch.testing.assert_close(method(poisoned, y), method(f, y))


def test_labels_come_with_their_probabilities() -> None:
    f = torch.tensor([[0.3, -1.0, 2.0], [1.0, 1.0, -2.0]], dtype=torch.float64)
    N = 20_000
    u = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    for row in f:
        labels = Categorical().sample(row.expand(N, 3), u.unsqueeze(1).expand(N, 3))
        torch.testing.assert_close(labels.bincount(minlength=3) / N, row.softmax(0).float(), atol=2 / N, rtol=0)


def test_only_the_first_uniform_number_counts() -> None:
    f, u = logits(5, 3, 2), torch.rand(5, 3, 2, generator=torch.Generator().manual_seed(0))
    other = torch.cat([u[:, :1], 1 - u[:, 1:]], 1)
    assert torch.equal(Categorical().sample(f, u), Categorical().sample(f, other))


def test_monte_carlo_matches_quadrature() -> None:
    # Two classes: only the difference d = f₁ − f₀ counts, so E[p₁] = E[σ(d)] is a one-dimensional integral.
    m, Σ = logits(2, 2), covariance(2, 2)
    d = m[:, 1] - m[:, 0]
    v = Σ[:, 0, 0] + Σ[:, 1, 1] - 2 * Σ[:, 0, 1]
    z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    w = torch.exp(-0.5 * z.square())
    w = w / w.sum()
    σ = torch.sigmoid(d.unsqueeze(1) + v.sqrt().unsqueeze(1) * z)
    E, E2 = (w * σ).sum(1), (w * σ.square()).sum(1)
    out = Categorical().integrate(m, Σ, link="mc", samples=100_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(out.mean[:, 1], E, atol=5e-3, rtol=0)
    torch.testing.assert_close(out.epistemic[:, 1], E2 - E.square(), atol=5e-3, rtol=0)
    torch.testing.assert_close(out.aleatoric[:, 1], E - E2, atol=5e-3, rtol=0)


def test_monte_carlo_draws_have_the_covariance_given() -> None:
    m, Σ = logits(2, 3), covariance(2, 3, rank=1)  # singular
    draws = draw_gaussian(m, Σ, 200_000, torch.Generator().manual_seed(0))  # [S, B, C]
    centred = draws - m
    torch.testing.assert_close(torch.einsum("sbi,sbj->bij", centred, centred) / len(draws), Σ, atol=0.05, rtol=0.02)
    torch.testing.assert_close(draws.mean(0), m, atol=0.02, rtol=0)


@pytest.mark.parametrize("link", ["bridge", "mc"])
def test_kwon_parts_add_up(link: str) -> None:
    out = Categorical().integrate(logits(5, 4), covariance(5, 4), link=link, samples=50)
    p = out.mean
    torch.testing.assert_close(out.epistemic + out.aleatoric, p * (1 - p))
    torch.testing.assert_close(p.sum(1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_probit_scales_the_logits_and_takes_its_shares_from_fixed_points(spread: float) -> None:
    """A hundred points have the shares of a hundred thousand draws within 4 % in the median."""
    m, Σ = logits(20, 4), spread * covariance(20, 4)
    probit = Categorical().integrate(m, Σ, link="probit")
    mc = Categorical().integrate(m, Σ, link="mc", samples=100_000, generator=torch.Generator().manual_seed(0))
    v = Σ.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(probit.mean, (m / (1 + torch.pi / 8 * v).sqrt()).softmax(1))
    torch.testing.assert_close(probit.variance, probit.mean * (1 - probit.mean))
    for part, whole in (("epistemic", "variance"), ("mutual_information", "entropy")):
        share, exact = (getattr(p, part) / getattr(p, whole) for p in (probit, mc))
        assert (share / exact - 1).abs().median() < 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("link", ["probit", "pairwise", "mc"])
def test_parts_of_the_variance_depend_on_an_example_alone(link: str, dtype: torch.dtype) -> None:
    """Also beside covariances that are zero, singular, tiny, huge, not quite semi-definite, or NaN."""
    m, Σ = logits(7, 4).to(dtype), covariance(7, 4).to(dtype)
    Σ[0], Σ[1], Σ[2] = 0, 3, covariance(1, 4, rank=1)[0]
    Σ[3], Σ[4] = 1e-8 * Σ[3], 1e8 * Σ[4]
    m[6], Σ[6] = torch.nan, torch.nan
    Σ[5] = Σ[5] - (1e-4 + torch.linalg.eigvalsh(Σ[5])[0]) * torch.eye(4, dtype=dtype)
    whole = Categorical().integrate(m, Σ, link, 20, torch.Generator().manual_seed(0))
    for n in range(7):
        alone = Categorical().integrate(m[[n]], Σ[[n]], link, 20, torch.Generator().manual_seed(0))
        for name in ("mean", "epistemic", "aleatoric", "mutual_information"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(whole, name)[n], equal_nan=True)
            assert getattr(whole, name)[n].isfinite().all() == (n < 6)
    assert (whole.epistemic[0] <= torch.finfo(dtype).eps ** 2).all()
    assert (whole.epistemic[1] <= max(1e-11, 30 * torch.finfo(dtype).eps)).all()  # a common shift of all logits


def test_probit_without_samples_leaves_the_parts_unknown() -> None:
    m, Σ = logits(5, 4), covariance(5, 4)
    state = torch.get_rng_state()
    out = Categorical().integrate(m, Σ, link="probit", samples=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(out.mean, Categorical().integrate(m, Σ, link="probit").mean)
    assert out.epistemic.isnan().all()
    assert out.aleatoric.isnan().all()


def test_bridge_is_the_dirichlet_of_the_formula() -> None:
    m, Σ = logits(5, 4), covariance(5, 4)
    r, t = Σ.sum(-1), Σ.sum((-2, -1))
    m0 = m - r * (m.sum(1) / t).unsqueeze(1)
    Σ0 = Σ - r.unsqueeze(2) * r.unsqueeze(1) / t.view(-1, 1, 1)
    torch.testing.assert_close(m0.sum(1), torch.zeros(5, dtype=torch.float64))
    C = 4
    α = (1 - 2 / C + m0.exp() / C**2 * (-m0).exp().sum(1, keepdim=True)) / Σ0.diagonal(dim1=1, dim2=2)
    dirichlet = torch.distributions.Dirichlet(α)
    out = Categorical().integrate(m, Σ, link="bridge")
    torch.testing.assert_close(out.mean, dirichlet.mean)
    torch.testing.assert_close(out.epistemic, dirichlet.variance)
    torch.testing.assert_close(out.aleatoric, dirichlet.mean - dirichlet.variance - dirichlet.mean.square())


def test_bridge_inverts_the_laplace_approximation_of_a_dirichlet() -> None:
    # The softmax-basis Laplace approximation of Dirichlet(α) has mean log α − mean(log α) and, with C classes,
    # Σ_kl = δ_kl/α_k − (1/α_k + 1/α_l)/C + Σ_i 1/α_i / C²; the bridge is its inverse.
    α = torch.tensor([[3.0, 0.7, 5.0], [1.0, 2.0, 9.0]], dtype=torch.float64)
    C = α.shape[1]
    m = α.log() - α.log().mean(1, keepdim=True)
    i = 1 / α
    Σ = torch.diag_embed(i) - (i.unsqueeze(1) + i.unsqueeze(2)) / C + i.sum(1).view(-1, 1, 1) / C**2
    out = Categorical().integrate(m, Σ, link="bridge")
    torch.testing.assert_close(out.mean, α / α.sum(1, keepdim=True))
    torch.testing.assert_close(out.epistemic, torch.distributions.Dirichlet(α).variance)


def test_bridge_on_a_sum_zero_covariance_does_not_feel_a_shift_of_the_logits() -> None:
    # 1ᵀΣ1 is rounding noise here, and dividing by it would move the mean anywhere.
    m = logits(50, 4)
    centre = torch.eye(4, dtype=torch.float64) - 0.25
    Σ = centre @ covariance(50, 4) @ centre
    out, shifted = (Categorical().integrate(mean, Σ, link="bridge") for mean in (m, m + 5))
    torch.testing.assert_close(out.mean, shifted.mean)
    torch.testing.assert_close(out.epistemic, shifted.epistemic)


def test_bridge_ignores_variance_common_to_all_logits() -> None:
    m = logits(5, 4)
    out = Categorical().integrate(m, torch.full((5, 4, 4), 2.0, dtype=torch.float64), link="bridge")
    torch.testing.assert_close(out.mean, m.softmax(1))
    assert out.epistemic.count_nonzero() == 0


def test_entropy_of_known_and_of_uniform_labels() -> None:
    f = torch.tensor([[[1000.0, 0.0], [0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)  # [1, 3, 2]
    expected = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    expected[0, 1] = expected[0, 1].log()
    torch.testing.assert_close(Categorical().point(f).entropy, expected)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 1, 3)])
def test_a_single_logit_is_sent_to_bernoulli(shape: tuple[int, ...]) -> None:
    f = logits(*shape)
    with pytest.raises(LikelihoodError, match=r"at least two classes .*Bernoulli"):
        Categorical().check(f, torch.zeros(5, dtype=torch.long))
    with pytest.raises(LikelihoodError, match=r"at least two classes .*Bernoulli"):
        Categorical().fisher_root(f)


@pytest.mark.parametrize("target", [4, 7, -1])
def test_check_names_a_target_out_of_range(target: int) -> None:
    with pytest.raises(LikelihoodError, match=rf"got the target {target}, .*classes 0 to 3"):
        Categorical().check(logits(3, 4), torch.tensor([0, target, 1]))


@pytest.mark.parametrize("gap", [5.0, 20.0, 60.0])
def test_the_likeliest_class_keeps_its_variance_in_float32(gap: float) -> None:
    """`1 − p` of the top class is a rounding error from a gap of 17 on; the sum of the other classes is not."""
    f = torch.tensor([[0.0, gap, 0.7, -1.0], [gap, gap, 0.3, 0.0]], dtype=torch.float64)
    p = f.softmax(1)
    others = torch.stack([p[:, [c for c in range(4) if c != k]].sum(1) for k in range(4)], dim=1)
    for found in (Categorical().fisher_diagonal(f.float()), Categorical().conditional(f.float())[1]):
        torch.testing.assert_close(found.double(), p * others, rtol=1e-5, atol=0)
