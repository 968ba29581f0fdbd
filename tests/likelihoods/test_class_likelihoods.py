"""Categorical and Bernoulli: sure predictions, ignored targets, and labels that do not fit."""

import pytest
import torch
from helpers.tensors import real as logits
from helpers.tensors import seeded
from torch import Tensor
from torch.testing import assert_close

from lightning_bayes.likelihoods import Bernoulli, Categorical, LikelihoodError

F64 = torch.float64
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def fisher(f: Tensor) -> Tensor:
    S = Categorical().fisher_root(f)
    return torch.einsum("kbi,kbj->bij", S, S)


def test_one_logit_is_two_classes() -> None:
    f, y = logits(5), torch.tensor([0, 1, 1, 0, 1])
    two = torch.stack([torch.zeros_like(f), f], 1)
    assert_close(Bernoulli().log_likelihood(f, y), Categorical().log_likelihood(two, y))
    assert_close(Bernoulli().residual(f, y), Categorical().residual(two, y)[:, 1])
    S = Bernoulli().fisher_root(f)
    assert S.shape == (1, 5)
    assert_close(S.square(), Categorical().fisher_root(two)[..., 1].square())


@each_dtype
def test_extreme_logits_of_labels_stay_finite(dtype: torch.dtype) -> None:
    f, y = torch.tensor([[1000.0, -1000.0]], dtype=dtype), torch.tensor([[0, 0]])
    assert_close(Bernoulli().log_likelihood(f, y).item(), -1000.0)
    assert Bernoulli().fisher_root(f).count_nonzero() == 0
    assert_close(Bernoulli().residual(f, y).double(), torch.tensor([[-1.0, 0.0]], dtype=F64))
    assert Bernoulli().integrate(f, torch.ones_like(f)).entropy.isfinite().all()


@each_dtype
def test_extreme_logits_of_classes_stay_finite_and_exact(dtype: torch.dtype) -> None:
    rows = [[1000.0, -1000.0, 0.0], [-1000.0, -1000.0, 1000.0], [1000.0, 1000.0, -1000.0], [0.0, -100.0, -104.0]]
    f, y = torch.tensor(rows, dtype=dtype), torch.tensor([1, 2, 0, 2])
    Λ = fisher(f)
    p = f.to(Λ.dtype).softmax(1)
    # Off the diagonal Λ is −p_i p_j; on it p_i(1 − p_i), with 1 − p_i summed from the other classes.
    off = (1 - torch.eye(3, dtype=p.dtype)) * p.unsqueeze(2) * p.unsqueeze(1)
    assert_close(Λ, torch.diag_embed(off.sum(2)) - off)
    assert Categorical().residual(f, y).isfinite().all()
    assert Categorical().log_likelihood(f, y).isfinite()
    for link in Categorical.links:
        out = Categorical().integrate(f, torch.ones_like(f), link=link, samples=4)
        assert torch.stack([out.mean, out.epistemic, out.aleatoric]).isfinite().all()


def test_a_tiny_tail_keeps_its_relative_precision() -> None:
    f = torch.tensor([[0.0, -60.0, -61.0]], dtype=F64)
    p = f.softmax(1)[0]
    expected = torch.stack([p[0] * (p[1] + p[2]), -p[0] * p[1], p[1] * (p[0] + p[2])])
    assert_close(fisher(f)[0][[0, 0, 1], [0, 1, 1]], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("gap", [5.0, 20.0, 60.0])
def test_the_likeliest_class_keeps_its_variance_in_float32(gap: float) -> None:
    """`1 − p` of the top class is a rounding error from a gap of 17 on; the sum of the other classes is not."""
    f = torch.tensor([[0.0, gap, 0.7, -1.0], [gap, gap, 0.3, 0.0]], dtype=F64)
    p = f.softmax(1)
    others = torch.stack([p[:, [c for c in range(4) if c != k]].sum(1) for k in range(4)], dim=1)
    for variance in (Categorical().fisher_diagonal(f.float()), Categorical().conditional(f.float())[1]):
        assert_close(variance.double(), p * others, rtol=1e-5, atol=0)


def test_masked_classes_have_no_curvature() -> None:
    f, kept = logits(5, 4), [0, 1, 3]
    f[:, 2] = -torch.inf
    Λ = fisher(f)
    assert_close(Λ[:, kept][:, :, kept], fisher(f[:, kept]))
    assert Λ[:, 2].count_nonzero() == 0


@pytest.mark.parametrize("ignore_index", [-100, 255, 0])
def test_ignoring_is_dropping(ignore_index: int) -> None:
    likelihood = Categorical(ignore_index=ignore_index)
    f, y = logits(3, 4, 5), torch.randint(1, 4, (3, 5), generator=seeded(2))
    drop = torch.rand(3, 5, generator=seeded(3)) < 0.4
    y = y.masked_fill(drop, ignore_index)
    likelihood.check(f, y)
    kept_f, kept_y = f.movedim(1, 2)[~drop], y[~drop]  # [kept, C], [kept]
    assert_close(likelihood.log_likelihood(f, y), Categorical().log_likelihood(kept_f, kept_y))

    r = likelihood.residual(f, y).movedim(1, 2)
    assert_close(r[~drop], Categorical().residual(kept_f, kept_y))
    assert r[drop].count_nonzero() == 0

    S = likelihood.fisher_root(f, y).movedim(2, 3)  # [K, B, positions, C]
    assert_close(S[:, ~drop], Categorical().fisher_root(kept_f))
    assert S[:, drop].count_nonzero() == 0

    labels = likelihood.sample(f, torch.rand_like(f), y)
    assert (labels[drop] == ignore_index).all()


def test_ignored_positions_may_hold_anything() -> None:
    f, y = logits(2, 3, 2), torch.tensor([[0, -100], [2, 1]])
    poisoned = f.clone()
    poisoned[0, :, 1] = torch.nan
    for method in (Categorical().log_likelihood, Categorical().residual, Categorical().fisher_root):
        assert_close(method(poisoned, y), method(f, y))


def test_only_the_first_uniform_number_counts() -> None:
    f, u = logits(5, 3, 2), torch.rand(5, 3, 2, generator=seeded())
    other = torch.cat([u[:, :1], 1 - u[:, 1:]], 1)
    assert torch.equal(Categorical().sample(f, u), Categorical().sample(f, other))


def test_entropy_of_known_and_of_uniform_labels() -> None:
    sure, uniform = torch.tensor([1000.0, 0.0, 0.0], dtype=F64), torch.zeros(3, dtype=F64)
    of_classes = Categorical().point(torch.stack([sure, uniform], 1).unsqueeze(0)).entropy  # [1, 3, 2] -> [1, 2]
    assert_close(of_classes, torch.tensor([[1.0, 3.0]], dtype=F64).log())
    of_labels = Bernoulli().point(torch.tensor([[0.0, 1000.0, -1000.0]], dtype=F64)).entropy
    assert_close(of_labels, torch.tensor([[2.0, 1.0, 1.0]], dtype=F64).log())


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 1, 3)])
def test_a_single_logit_is_sent_to_bernoulli(shape: tuple[int, ...]) -> None:
    f, y = logits(*shape), torch.zeros(5, dtype=torch.long)
    for call in (lambda: Categorical().check(f, y), lambda: Categorical().fisher_root(f)):
        with pytest.raises(LikelihoodError, match=r"at least two classes .*Bernoulli"):
            call()


@pytest.mark.parametrize("wrong", [5, -1, 0.3])
def test_targets_that_are_neither_0_nor_1_give_no_number(wrong: float) -> None:
    """Without `check`, as under vmap, they must not give the number of another target."""
    f, y = torch.tensor([[0.4, -1.0], [0.2, 0.3]]), torch.tensor([[1, wrong], [0, 1]])
    assert Bernoulli().log_likelihood_per_example(f, y).isnan().tolist() == [True, False]
    assert Bernoulli().residual(f, y).isnan().tolist() == [[False, True], [False, False]]
    per_example = torch.func.vmap(lambda f, y: Bernoulli().log_likelihood(f[None], y[None]))(f, y)
    assert per_example.isnan().tolist() == [True, False]
    with pytest.raises(LikelihoodError, match="needs targets that are 0 or 1"):
        Bernoulli().check(f, y)
