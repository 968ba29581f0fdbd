"""`posterior.novelty`: the share of a weak prior's variance that the data have left, for the last layer's weights."""

import pytest
import torch
from torch import nn

from lightning_bayes import GaussianPosterior, fit_l2m, fit_laplace
from lightning_bayes.metrics.functional import threshold_for_coverage
from lightning_bayes.options import Kron
from lightning_bayes.posterior import PosteriorError
from lightning_bayes.predictive.novelty import novelty_p

STRUCTURES = ["kron", Kron(rank=3), "ekfac", "full", "diag", "lowrank"]


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 7), nn.Tanh())
        self.head = nn.Linear(7, 3, bias=bias)

    def forward(self, x):
        return self.head(self.body(x))


def features(network, x):
    a = network.body(x)
    return a if network.head.bias is None else torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)


@pytest.fixture
def data():
    torch.manual_seed(0)
    x, y = torch.randn(23, 4, dtype=torch.float64), torch.randint(3, (23,))
    return [(x[:10], y[:10]), (x[10:], y[10:])]


def network(bias=True):
    torch.manual_seed(1)
    return Net(bias).double()


def share_left(curvature, a, n_data):
    """`tr(J Σ Jᵀ) / tr(J Σ₀ Jᵀ)` with `Σ = (I ⊗ M + ρ)⁻¹`, example by example; `curvature` is that of the last layer's
    weights and biases.  # [3, I, 3, I], [B, I] -> [B]"""
    M = sum(curvature[o, :, o] for o in range(3))
    rho = M.trace() / (len(M) * n_data)
    left = torch.linalg.inv(M + rho * torch.eye(len(M), dtype=M.dtype))
    return torch.stack([3 * (row @ left @ row) / (3 * (row @ row) / rho) for row in a])


def last_layer_curvature(posterior, bias):
    dense, I = posterior.curvature.structure.to_dense()[-24 if bias else -21 :, -24 if bias else -21 :], 7 + bias
    order = torch.tensor([*(o * 7 + i if i < 7 else 21 + o for o in range(3) for i in range(I))])
    return dense[order][:, order].reshape(3, I, 3, I)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_is_the_share_of_the_priors_variance_that_is_left(data, structure, subset, bias):
    net, x = network(bias), torch.randn(5, 4, dtype=torch.float64)
    posterior = fit_laplace(net, data, structure=structure, subset=subset)
    expected = share_left(last_layer_curvature(posterior, bias), features(net, x).detach(), 23)
    torch.testing.assert_close(posterior.novelty(x), expected, rtol=1e-8, atol=0)
    assert ((expected > 0) & (expected < 1)).all()


def test_a_kronecker_block_and_a_regression_have_the_second_moments_of_the_inputs(data):
    net, x = network(), 3 * torch.randn(5, 4, dtype=torch.float64)
    a = features(net, torch.cat([x for x, _ in data])).detach()
    mu, Q = torch.linalg.eigh(a.T @ a / len(a))
    rho = mu.mean() / len(a)
    rows = features(net, x).detach()
    expected = ((rows @ Q).square() * rho / (mu + rho)).sum(1) / rows.square().sum(1)
    torch.testing.assert_close(fit_laplace(net, data).novelty(x), expected, rtol=1e-8, atol=0)
    targets = [(x, torch.randn(len(x), 3, dtype=torch.float64)) for x, _ in data]
    regression = fit_laplace(net, targets, likelihood="regression", structure="full")
    torch.testing.assert_close(regression.novelty(x), expected, rtol=1e-8, atol=0)


def test_does_not_depend_on_the_prior_the_batch_or_a_file(data, tmp_path):
    net, x = network(), torch.randn(6, 4, dtype=torch.float64)
    posterior = fit_laplace(net, data)
    score = posterior.novelty(x)
    torch.testing.assert_close(posterior.with_prior(1e-3).novelty(x), score, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([posterior.novelty(row[None]) for row in x]), score)
    posterior.save(tmp_path / "posterior.pt")
    torch.testing.assert_close(GaussianPosterior.load(tmp_path / "posterior.pt", net).novelty(x), score)
    with torch.inference_mode():
        torch.testing.assert_close(posterior.novelty(x), score)


def test_float32_agrees_with_float64(data):
    net, x = network(), torch.randn(6, 4, dtype=torch.float64)
    score = fit_laplace(net, data).novelty(x)
    narrow = fit_laplace(net.float(), [(x.float(), y) for x, y in data])
    torch.testing.assert_close(narrow.novelty(x.float()), score.float(), rtol=1e-3, atol=1e-4)


def test_a_direction_that_no_training_example_used_keeps_the_priors_variance():
    torch.manual_seed(0)
    net = nn.Linear(4, 3, bias=False).double()
    x = torch.randn(20, 4, dtype=torch.float64) * torch.tensor([1.0, 2, 3, 0])
    posterior = fit_laplace(net, [(x, torch.randint(3, (20,)))])
    unseen = torch.tensor([[0.0, 0, 0, 5]], dtype=torch.float64)
    assert posterior.novelty(unseen).item() == pytest.approx(1)
    assert posterior.novelty(x).max() < 0.2


def test_is_averaged_over_positions(data):
    """A convolution of 1 × 1 is the same layer at every pixel."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 3, 1)).double()
    batches = [(torch.randn(4, 2, 3, 3, dtype=torch.float64), torch.randint(3, (4, 3, 3)))]
    posterior = fit_laplace(net, batches, curvature="ggn")
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    pixels = net[:2](x).flatten(2).mT  # [B, T, 5]
    rows = torch.cat([pixels, torch.ones(2, 9, 1, dtype=torch.float64)], -1).detach()
    seen = net[:2](batches[0][0]).flatten(2).mT.reshape(-1, 5)
    seen = torch.cat([seen, torch.ones(36, 1)], 1).detach()
    M = seen.T @ seen
    rho = M.trace() / (6 * 4)
    inverse = torch.linalg.inv(M + rho * torch.eye(6))
    left = rho * torch.einsum("bti,ij,btj->bt", rows, inverse, rows)
    expected = (left / rows.square().sum(-1)).mean(1)
    torch.testing.assert_close(posterior.novelty(x), expected, rtol=1e-8, atol=0)


def test_works_for_a_diagonal_from_an_optimizer(data):
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in data * 5:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    posterior = fit_l2m(net, optimizer, n_data=23, batch_size=10, prior_precision=1.0)
    H = posterior.curvature.structure.diagonal()[-24:]
    M = torch.cat([H[:21].reshape(3, 7).sum(0), H[21:].sum().reshape(1)])
    a, rho = features(net, data[0][0]).detach(), M.sum() / (8 * 23)
    expected = (a.square() * rho / (M + rho)).sum(1) / a.square().sum(1)
    torch.testing.assert_close(posterior.novelty(data[0][0]), expected)


def test_leaves_the_network_as_it_was(data):
    net = network().train()
    posterior = fit_laplace(net, data)
    net.head.bias.requires_grad_(False)
    before = {name: p.clone() for name, p in net.state_dict().items()}
    posterior.novelty(data[0][0])
    assert net.training
    assert [p.requires_grad for p in net.parameters()] == [True, True, True, False]
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_says_what_it_needs(data):
    net = network()
    with pytest.raises(PosteriorError, match=r"head.*last_layer"):
        fit_laplace(net, data, subset=["body"]).novelty(data[0][0])


def test_predictions_hold_it_and_its_p_value_among_held_out_inputs(data, tmp_path):
    net, x = network(), 2 * torch.randn(6, 4, dtype=torch.float64)
    posterior = fit_laplace(net, data)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.novelty, posterior.novelty(x))
    assert prediction.novelty_p is None
    assert posterior.predict(x, "bnn").novelty is None
    held_out = [(torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3) for n in (30, 25)]
    known = torch.cat([posterior.novelty(x) for x, _ in held_out])
    expected = torch.stack([(1 + (known >= s).sum()) / 56 for s in posterior.novelty(x)])
    for fitted in (posterior.calibrate(held_out), posterior.tune_prior("auto", held_out)):
        torch.testing.assert_close(fitted.predict(x).novelty_p, expected.double())
        fitted.save(tmp_path / "posterior.pt")
        loaded = GaussianPosterior.load(tmp_path / "posterior.pt", net)
        torch.testing.assert_close(loaded.predict(x)[2].novelty_p, expected[2:3].double())


def test_the_p_value_of_known_inputs_is_at_most_alpha_as_often_as_promised():
    """For exchangeable scores `P(p ≤ α) ≤ α`, and more than `α − 1/(n + 1)` if no two are equal."""
    torch.manual_seed(0)
    n, draws = 19, 4000
    p = torch.cat([novelty_p(torch.rand(n).sort().values, torch.rand(1)) for _ in range(draws)])
    for alpha in (0.05, 0.2, 0.5):
        error = 3 * (alpha * (1 - alpha) / draws) ** 0.5
        assert alpha - 1 / (n + 1) - error < (p <= alpha).double().mean() < alpha + error


def test_a_threshold_on_the_p_value_keeps_the_promised_share_of_known_inputs():
    torch.manual_seed(0)
    less = 0
    for _ in range(500):  # p of a new input has the distribution function of its score among the known ones
        known = torch.rand(100).sort().values
        threshold = threshold_for_coverage(novelty_p(known, torch.rand(80)), 0.8, delta=0.1)
        kept_ranks = (1 + torch.arange(101)) / 101 > threshold  # by the number of known scores that are as large
        gaps = torch.diff(known.flip(0), prepend=torch.ones(1), append=torch.zeros(1)).neg()
        less += float(gaps[kept_ranks].sum()) < 0.8
    assert 0.01 < less / 500 <= 0.1


def test_more_data_forget_the_held_out_scores(data):
    posterior = fit_laplace(network(), data, structure=Kron(updatable=True)).calibrate(
        [(torch.randn(60, 4, dtype=torch.float64), torch.arange(60) % 3)]
    )
    assert posterior.update(data).predict(data[0][0]).novelty_p is None
