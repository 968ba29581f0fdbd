"""Damping in place of the exact sum: `(A + √δ) ⊗ (G + √δ)` with the factors written out from inputs and gradients."""

import torch
from helpers.networks import mlp
from helpers.tensors import TIGHT, real
from posterior_cases import case
from torch import Tensor, nn

from lightning_bayes import Kron, Prior, fit_laplace

DELTA = 0.7
X, Y = real(8, 3), torch.tensor([0, 1, 2, 2, 1, 0, 0, 2])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp().double()


def factors(net: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """`A`, the mean of `[a 1][a 1]ᵀ`, and `G`, the sum of `gΛgᵀ`, of both layers, one example at a time."""
    found = []
    h = net[1](net[0](X)).detach()
    for inputs, top in ((X, False), (h, True)):
        A, G = torch.zeros(()).double(), torch.zeros(()).double()
        for n in range(len(X)):
            a = torch.cat([inputs[n], torch.ones(1).double()])
            A = A + torch.outer(a, a) / len(X)
            z = (net[2](h[n]) if top else net[0](X[n])).detach()
            J = torch.autograd.functional.jacobian(lambda z: z if top else net[2](net[1](z)), z)  # noqa: B023
            p = torch.softmax(net(X[n]), 0).detach()
            G = G + J.mT @ (torch.diag(p) - torch.outer(p, p)) @ J
        found.append((A, G))
    return found


def places(net: nn.Sequential) -> list[Tensor]:
    """Where `[W b]` of each layer lies in the flat vector, row by row."""
    found, start = [], 0
    for layer in (net[0], net[2]):
        O, I = layer.weight.shape
        W = torch.arange(start, start + O * I).reshape(O, I)
        b = torch.arange(start + O * I, start + O * I + O).unsqueeze(1)
        found.append(torch.cat([W, b], 1).flatten())
        start += O * I + O
    return found


def dense(net: nn.Sequential, blocks: list[Tensor]) -> Tensor:
    P = torch.zeros(31, 31).double()
    for here, block in zip(places(net), blocks, strict=True):
        P[here[:, None], here] = block
    return P


def fitted(net: nn.Sequential, damping: str | None, **options: object) -> Tensor:
    posterior = fit_laplace(
        net, [(X[:3], Y[:3]), (X[3:], Y[3:])], prior_precision=DELTA, structure=Kron(damping=damping), **options
    )
    return posterior.precision.to_dense()


def damped(A: Tensor, G: Tensor) -> Tensor:
    root = DELTA**0.5
    return torch.kron(G + root * torch.eye(len(G)).double(), A + root * torch.eye(len(A)).double())


def test_without_damping_the_prior_is_added() -> None:
    net = network()
    expected = dense(net, [torch.kron(G, A) for A, G in factors(net)]) + DELTA * torch.eye(31).double()
    torch.testing.assert_close(fitted(net, None), expected, **TIGHT)


def test_glm_damping_has_a_mean_and_a_sum() -> None:
    net = network()
    torch.testing.assert_close(fitted(net, "glm"), dense(net, [damped(A, G) for A, G in factors(net)]), **TIGHT)


def test_ritters_damping_has_the_root_of_n_in_each_factor() -> None:
    """`(√N E[aaᵀ] + √δ) ⊗ (√N E[ggᵀ] + √δ)`."""
    net = network()
    N = len(X)
    expected = dense(net, [damped(N**0.5 * A, N**0.5 * (G / N)) for A, G in factors(net)])
    torch.testing.assert_close(fitted(net, "ritter"), expected, **TIGHT)


def test_temperature_divides_the_sum_before_damping() -> None:
    net = network()
    expected = dense(net, [damped(A, G / 0.5) for A, G in factors(net)])
    torch.testing.assert_close(fitted(net, "glm", prior=Prior(temperature=0.5)), expected, **TIGHT)


def test_damping_adds_to_the_precision() -> None:
    """Its cross terms are positive: the posterior is narrower than the exact one (GLM paper, section 5)."""
    net = network()
    for damping in ("glm", "ritter"):
        more = fitted(net, damping) - fitted(net, None)
        assert torch.linalg.eigvalsh(more).min() > -1e-12
        assert more.diagonal().min() > 1e-3


def test_what_is_no_kronecker_product_keeps_the_exact_sum() -> None:
    """Norm layers and the like have dense blocks, which damping does not concern."""
    problem = case("cnn")
    plain, other = (
        fit_laplace(problem.network, problem.loader(), prior_precision=DELTA, structure=Kron(damping=damping)).precision
        for damping in (None, "glm")
    )
    same = [name for name, a, b in zip(plain.names, plain.blocks, other.blocks, strict=True) if _equal(a, b)]
    assert same == ["1.weight", "5.weight"]


def _equal(a: object, b: object) -> bool:
    return torch.allclose(a.to_dense(), b.to_dense())


def test_damped_posterior_can_change_its_prior() -> None:
    net = network()
    posterior = fit_laplace(net, [(X, Y)], prior_precision=9.0, structure=Kron(damping="glm")).with_prior(DELTA)
    torch.testing.assert_close(posterior.precision.to_dense(), fitted(net, "glm"), **TIGHT)
