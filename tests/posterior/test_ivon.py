"""`IVON` in a plain loop: algorithm 1, the exact mean-field posterior of a linear model, and what it restores."""

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers.networks import made, mlp
from helpers.tensors import real
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bayes import IVON
from lightning_bayes.posterior import OptimizerError

N, FEATURES, CLASSES = 11, 3, 3
X, Y = real(N, FEATURES, seed=1), real(N, CLASSES, seed=2).argmax(1)


def network() -> nn.Sequential:
    return made(lambda: mlp(FEATURES, 4, CLASSES))


def loss(net: nn.Module, rows: slice = slice(None)) -> Tensor:
    return F.cross_entropy(net(X[rows]), Y[rows])


BATCHES = [slice(0, 4), slice(4, 8), slice(8, 11)] * 3
GROUPS: list[dict[str, Any]] = [
    {"lr": 0.3, "betas": (0.7, 0.8), "weight_decay": 0.02, "hess_init": 0.5, "clip_radius": None},
    {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0, "hess_init": 2.0, "clip_radius": 0.1},
]


@pytest.mark.parametrize("samples", [1, 3])
def test_steps_are_those_of_the_paper(samples: int) -> None:
    """Parameter by parameter, with two groups, one of which gets no gradient in some steps."""
    net = network()
    first, second = list(net[0].parameters()), list(net[2].parameters())
    groups = [{"params": first, **GROUPS[0]}, {"params": second, **GROUPS[1]}]
    optimizer = IVON(groups, n_data=N, temperature=0.5, seed=4)
    option = {p: group for group in groups for p in group["params"]}
    m = {p: p.detach().clone() for p in option}
    g = {p: torch.zeros_like(p) for p in option}
    h = {p: torch.full_like(p, group["hess_init"]) for p, group in option.items()}
    t = dict.fromkeys(option, 0)
    λ = N / 0.5
    for number, rows in enumerate(BATCHES):
        frozen = number % 3 == 1
        g_hat, h_hat = ({p: torch.zeros_like(p) for p in option} for _ in range(2))
        optimizer.zero_grad()
        for _ in range(samples):
            with optimizer.sampled():
                inputs = X[rows].tanh() if frozen else net[0](X[rows]).tanh()
                value = F.cross_entropy(inputs.sum(1, keepdim=True) * net[2].weight.sum(1) if frozen else
                                        net[2](inputs), Y[rows])  # fmt: skip
                value.backward()
                used = {p: p.grad.clone() for p in option if p.grad is not None}
                for p, grad in used.items():
                    g_hat[p] += grad / samples
                    h_hat[p] += grad * (p.detach() - m[p]) * λ * (h[p] + option[p]["weight_decay"]) / samples
            assert all(torch.equal(p, m[p]) for p in option)
        optimizer.step()
        assert len(used) == (1 if frozen else 4)
        for p in used:
            (β1, β2), δ = option[p]["betas"], option[p]["weight_decay"]
            t[p] += 1
            g[p] = β1 * g[p] + (1 - β1) * g_hat[p]
            correction = 0.5 * (1 - β2) ** 2 * (h[p] - h_hat[p]) ** 2 / (h[p] + δ)
            h[p] = β2 * h[p] + (1 - β2) * h_hat[p] + correction
            step = (g[p] / (1 - β1 ** t[p]) + δ * m[p]) / (h[p] + δ)
            ξ = option[p]["clip_radius"] or torch.inf
            m[p] = m[p] - option[p]["lr"] * (option[p]["hess_init"] + δ) * step.clamp(-ξ, ξ)
            torch.testing.assert_close(p.detach(), m[p], rtol=1e-10, atol=1e-12)
            m[p] = p.detach().clone()
    posterior = optimizer.posterior(net)
    precision = torch.cat([(λ * (h[p] + option[p]["weight_decay"])).reshape(-1) for p in net.parameters()])
    torch.testing.assert_close(posterior.precision.diagonal(), precision, rtol=1e-9, atol=1e-11)
    assert torch.equal(posterior.mean, torch.cat([p.detach().reshape(-1) for p in net.parameters()]))


def test_a_linear_model_gets_its_exact_mean_field_posterior() -> None:
    """The best diagonal Gaussian has the exact mean, and the diagonal of the exact precision."""
    n, σ, δ = 30, 0.5, 0.05
    x = real(n, 3, seed=3) @ torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    y = real(n, 2, seed=4)
    inputs = torch.cat([x, x.new_ones(n, 1)], 1)
    P = inputs.T @ inputs / σ**2 + n * δ * torch.eye(4, dtype=torch.float64)
    exact = torch.linalg.solve(P, inputs.T @ y / σ**2)  # [4, 2]
    copies = 64  # trained side by side, each with noise of its own
    net = nn.ParameterList([torch.zeros(copies, 4, 2, dtype=torch.float64)])
    optimizer = IVON(net.parameters(), lr=0.05, n_data=n, betas=(0.9, 0.995), weight_decay=δ, hess_init=4.0)
    averages = torch.zeros(2, 4, 2, dtype=torch.float64)
    steps, burn_in = 2000, 1500
    for step in range(steps):
        optimizer.zero_grad()
        with optimizer.sampled():
            (((inputs @ net[0] - y).square().sum(-1).mean(-1) / (2 * σ**2)).sum()).backward()
        optimizer.step()
        if step >= burn_in:
            posterior = optimizer.posterior(net, "regression")
            moments = torch.stack([posterior.mean, posterior.precision.diagonal()]).view(2, copies, 4, 2)
            averages += moments.mean(1) / (steps - burn_in)
    diagonal = P.diagonal().unsqueeze(1).expand(4, 2)
    assert torch.all((averages[0] - exact).abs() < 0.05 * diagonal.rsqrt())
    torch.testing.assert_close(averages[1], diagonal, rtol=0.04, atol=0)
    marginal = 1 / torch.linalg.inv(P).diagonal()
    assert (marginal / P.diagonal()).min() < 0.5  # the posterior's variances would be another answer


@pytest.mark.parametrize(("weight_decay", "steps", "least"), [(0.0, 100, 1e-20), (0.1, 20, 1e-4)])
def test_no_gradient_makes_the_precision_negative(weight_decay: float, steps: int, least: float) -> None:
    """A step at most halves it, in float32 too. This worst case, `x = −1`, makes `h` itself negative."""
    n = 10
    p = nn.Parameter(torch.zeros(50))
    optimizer = IVON([p], lr=1e-3, n_data=n, betas=(0.9, 0.5), weight_decay=weight_decay)
    before = torch.full((50,), n * (1 + weight_decay))
    for _ in range(steps):
        p.grad = None
        with optimizer.sampled():
            p.grad = (-1 - weight_decay * n / before) / n / p.detach()
        optimizer.step()
        p.detach().zero_()
        after = optimizer.posterior(nn.ParameterList([p])).precision.diagonal()
        assert torch.all(after >= 0.4999 * before)
        before = after
    assert 0 < float(before.min()) < least


def test_samples_have_the_variance_of_the_posterior() -> None:
    net = network()
    optimizer = IVON(net.parameters(), n_data=N, hess_init=3.0, weight_decay=1.0)
    mean, draws = [p.detach().clone() for p in net.parameters()], []
    for _ in range(2000):
        with optimizer.sampled():
            parts = [(p - m).detach().reshape(-1) for p, m in zip(net.parameters(), mean, strict=True)]
            draws.append(torch.cat(parts))
    noise = torch.stack(draws) * (N * 4.0) ** 0.5
    assert float(noise.mean().abs()) < 0.02
    torch.testing.assert_close(noise.T.cov(), torch.eye(noise.shape[1]).double(), rtol=0, atol=0.15)


def test_an_exception_restores_weights_gradients_and_random_state() -> None:
    net = network()
    optimizer = IVON(net.parameters(), n_data=N)
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    loss(net).backward()
    gradients = [p.grad for p in net.parameters()]

    def fail() -> None:
        with optimizer.sampled():
            loss(net).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(net.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def train(net: nn.Module, optimizer: IVON, steps: int, dtype: torch.dtype = torch.float64) -> None:
    for rows in BATCHES[:steps]:
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(net(X[rows].to(dtype)).float(), Y[rows]).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_stored_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    """In 16 bits too, for which PyTorch would round the averages."""
    net, other = network().to(dtype), network().to(dtype)
    optimizer = IVON(net.parameters(), n_data=N, betas=(0.9, 0.999))
    train(net, optimizer, 4, dtype)
    other.load_state_dict(net.state_dict())
    resumed = IVON(other.parameters(), n_data=N)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    train(net, optimizer, 3, dtype)
    train(other, resumed, 3, dtype)
    one, two = optimizer.posterior(net), resumed.posterior(other)
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.precision.diagonal(), two.precision.diagonal())
    assert not torch.equal(one.precision.diagonal(), one.precision.diagonal().bfloat16().to(one.mean))


def test_closures_and_evaluations() -> None:
    """`step(closure)` is the same step, and a context without a backward pass is only an evaluation."""
    net, other = network(), network()
    one, two = IVON(net.parameters(), n_data=N), IVON(other.parameters(), n_data=N)

    def closure() -> Tensor:
        two.zero_grad()
        with two.sampled():
            value = loss(other)
            value.backward()
        return value

    for optimizer, module in ((one, net), (two, other)):
        with optimizer.sampled(), torch.no_grad():
            drawn = loss(module)
    assert two.step(closure) != drawn
    one.zero_grad()
    with one.sampled():
        loss(net).backward()
    one.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_errors_say_what_to_do() -> None:
    net = network()
    with (
        pytest.raises(OptimizerError, match="pass n_data=, or in Lightning add IVONCallback"),
        IVON(net.parameters()).sampled(),
    ):
        pass
    optimizer = IVON(net.parameters(), n_data=N)
    with pytest.raises(OptimizerError, match="has drawn no sample of this network's weights: train it first"):
        optimizer.posterior(net)
    loss(net).backward()
    with pytest.raises(OptimizerError, match=r"run the backward pass inside `with optimizer.sampled\(\):`"):
        optimizer.step()
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = IVON(embedding.parameters(), n_data=N)
    with optimizer.sampled():
        embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="create the embedding with sparse=False"):
        optimizer.step()
