"""What each mode carries back, against the recursion of the paper written out with full Jacobians, one example at a
time: `M_in = Jᵀ M_out J` with its off-diagonal dropped where the mode drops it, and `diag(J_wᵀ M_out J_w)` for weights
(Laplacian autoencoders, appendix E)."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from networks import Apply
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from lightning_bayes.curvature import choose_subset, diagonal, diagonal_rules
from lightning_bayes.curvature.diagonal import BatchDiagonal
from lightning_bayes.curvature.tape import Op
from lightning_bayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from lightning_bayes.network import CurvatureError

Case = tuple[nn.Sequential, Tensor, Likelihood]


def convolutional() -> Case:
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(3, 4, 2, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers), draw(3, 2, 8, 8), Categorical()


def autoencoder() -> Case:
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)]
    layers += [nn.Linear(2, 12), nn.Tanh(), nn.Unflatten(1, (3, 2, 2)), nn.Upsample(scale_factor=2)]
    return nn.Sequential(*layers, nn.Conv2d(3, 2, 3, padding=1)), draw(4, 1, 4, 4), Gaussian(torch.tensor([0.5, 2.0]))


def perceptron() -> Case:
    layers = [nn.Linear(3, 6), nn.PReLU(6), nn.Linear(6, 4, bias=False), nn.GELU(), nn.Linear(4, 2), nn.ELU()]
    return nn.Sequential(*layers, nn.Linear(2, 4)), draw(5, 3), HeteroscedasticGaussian()


def transposed() -> Case:
    layers = [nn.Linear(2, 8), nn.Tanh(), nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 3, 2, stride=2)]
    layers += [nn.Softplus(), nn.AvgPool2d(2), nn.ConvTranspose2d(3, 2, 3)]
    return nn.Sequential(*layers), draw(3, 2), Bernoulli()


def upsampled() -> Case:
    layers = [
        nn.Linear(3, 4),
        nn.LayerNorm(4),
        nn.Unflatten(1, (1, 2, 2)),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ]
    return nn.Sequential(*layers, nn.Upsample(scale_factor=2), nn.Softmax(2)), draw(3, 3), Gaussian(0.7)


def sums() -> Case:
    """Whose Jacobians have no other entries than zeros and ones, and which mix all the same."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 16), nn.Tanh(), nn.Unflatten(1, (4, 4)), nn.Fold((3, 3), 2), nn.Flatten(2)]
    layers += [Apply(lambda t: t.cumsum(2)), nn.Unflatten(2, (3, 3)), Apply(lambda t: t.sum((1, 3)))]
    return nn.Sequential(*layers), draw(4, 3), Gaussian(0.7)


def sequence() -> Case:
    """A linear layer on the last of several dimensions shares its weight over positions."""
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Conv1d(5, 2, 3), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers), draw(3, 5, 3), Categorical()


CASES = {f.__name__: f for f in (convolutional, autoencoder, perceptron, transposed, upsampled, sums, sequence)}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def make(name: str) -> tuple[nn.Sequential, Tensor, Tensor, Likelihood]:
    torch.manual_seed(0)
    network, x, likelihood = CASES[name]()
    network.double()
    with torch.no_grad():
        network(4 * x)  # batch norm's statistics are not those it starts with
        f = network.eval()(x)
    return network, x, likelihood.sample(f, torch.rand_like(f)), likelihood


def by_hand(network: nn.Sequential, x: Tensor, y: Tensor, likelihood: Likelihood, threshold: float) -> Tensor:
    total: dict[str, Tensor] = {}
    for n in range(len(x)):
        at = [x[n : n + 1]]
        for layer in network:
            at.append(layer(at[-1]).detach())
        S = likelihood.fisher_root(at[-1], y[n : n + 1])  # [K, 1, C, *positions]
        C, positions = at[-1].shape[1], at[-1][0, 0].numel()
        Λ = torch.einsum("kcp,kdp->cdp", S.reshape(-1, C, positions), S.reshape(-1, C, positions))
        M = torch.einsum("cdp,pq->cpdq", Λ, torch.eye(positions).double()).reshape(C * positions, C * positions)
        M = kept(M, threshold)
        for i in reversed(range(len(network))):
            for name, w in network[i].named_parameters():
                J_w = jacobian(lambda w, a, i=i, name=name: functional_call(network[i], {name: w}, (a,)), w, at[i])
                diagonal_of_weight = torch.einsum("op,oq,qp->p", J_w, M, J_w)
                total[f"{i}.{name}"] = total.get(f"{i}.{name}", 0) + diagonal_of_weight
            J_x = jacobian(network[i], at[i])
            M = kept(J_x.mT @ M @ J_x, threshold)
    return torch.cat([total[name] for name, _ in network.named_parameters()])


def jacobian(f: Callable[..., Tensor], first: Tensor, *others: Tensor) -> Tensor:
    """Of all outputs by the entries of the first argument.  # [O, I]"""
    return jacrev(lambda t: f(t, *others).reshape(-1))(first.detach()).detach().reshape(-1, first.numel())


def squares(network: nn.Module, x: Tensor) -> Tensor:
    """`Σₙ diag(JₙᵀJₙ)`. PyTorch's functional calls leave a module that has two names with a wrong weight."""
    J = jacrev(lambda p: functional_call(copy.deepcopy(network), p, (x,)))(dict(network.named_parameters()))
    return torch.cat([j.detach().flatten(2).square().sum((0, 1)) for j in J.values()])


def kept(M: Tensor, threshold: float) -> Tensor:
    return M if len(M) <= threshold else M.diagonal().diag()


def found(network: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, mode: str, threshold: float = 8) -> Tensor:
    return BatchDiagonal(network, choose_subset(network, x, "all"), likelihood, mode, threshold)(x, y)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_approx_carries_the_diagonal_alone(name: str) -> None:
    network, x, y, likelihood = make(name)
    expected = by_hand(network, x, y, likelihood, 0)
    close(found(network, x, y, likelihood, "approx"), expected)
    assert not torch.allclose(expected, by_hand(network, x, y, likelihood, math.inf), rtol=1e-3)


@pytest.mark.parametrize("threshold", [1, 2, 3, 5, 8, 12, 20, 40, 1000])
@pytest.mark.parametrize("name", CASES)
def test_mixed_keeps_the_whole_matrix_up_to_the_threshold(name: str, threshold: int) -> None:
    network, x, y, likelihood = make(name)
    close(found(network, x, y, likelihood, "mixed", threshold), by_hand(network, x, y, likelihood, threshold))


@pytest.mark.parametrize("mode", ["exact", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_columns_in_small_parts_are_the_same(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y, likelihood = make(name)
    expected = by_hand(network, x, y, likelihood, math.inf)
    for memory in (1, 8 * len(x) * 40):  # a column at a time, and a few
        monkeypatch.setattr(diagonal, "MEMORY", memory)
        monkeypatch.setattr(diagonal_rules, "MEMORY", memory)
        close(found(network, x, y, likelihood, mode, math.inf), expected)


@pytest.mark.parametrize("mode", ["exact", "approx", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_a_part_of_the_weights_has_its_part_of_the_diagonal(name: str, mode: str) -> None:
    network, x, y, likelihood = make(name)
    whole = dict(
        zip((n for n, _ in network.named_parameters()), parts(found, network, x, y, likelihood, mode), strict=True)
    )
    names = [name for name in whole if name.endswith("weight")][::2]
    subset = choose_subset(network, x, names)
    chosen = BatchDiagonal(network, subset, likelihood, mode, 8)(x, y)
    close(chosen, torch.cat([whole[name] for name in subset.names]))
    network[0].requires_grad_(False)  # frozen: not among all, and nothing needs to be carried to it
    rest = choose_subset(network, x, "all")
    expected = torch.cat([d for name, d in whole.items() if not name.startswith("0.")])
    close(BatchDiagonal(network, rest, likelihood, mode, 8)(x, y), expected)


def parts(f: Callable[..., Tensor], network: nn.Module, *arguments: object) -> list[Tensor]:
    return list(f(network, *arguments).split([p.numel() for p in network.parameters()]))


@pytest.mark.parametrize("mode", ["exact", "approx", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_single_precision(name: str, mode: str) -> None:
    network, x, y, likelihood = make(name)
    expected = found(network, x, y, likelihood, mode)
    y = y.float() if y.is_floating_point() else y
    single = found(network.float(), x.float(), y, likelihood, mode)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=2e-4, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["exact", "approx", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_summed_in_single(name: str, mode: str, dtype: torch.dtype) -> None:
    """As near to the network of the same rounded weights as the rounding of its activations allows."""
    network, x, y, likelihood = make(name)
    network.to(dtype)
    x = x.to(dtype)
    half = found(network, x, y.to(dtype) if y.is_floating_point() else y, likelihood, mode)
    expected = found(network.double(), x.double(), y, likelihood, mode)
    assert half.dtype == torch.float32
    error = (half.double() - expected).norm() / expected.norm()
    assert error < {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]


class Residual(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.inner(x).tanh())


@pytest.mark.parametrize("last", [nn.Linear(4, 2), nn.Identity()], ids=["inside", "at the output"])
def test_a_residual_sum_keeps_its_cross_terms_where_the_matrix_is_whole(last: nn.Module) -> None:
    torch.manual_seed(0)
    network, x = Residual(last).double(), draw(5, 3)
    y = torch.zeros_like(network(x)).detach()
    expected = squares(network, x)
    close(found(network, x, y, Gaussian(), "mixed", 4), expected)
    close(found(network, x, y, Gaussian(), "exact"), expected)
    assert not torch.allclose(found(network, x, y, Gaussian(), "mixed", 3), expected, rtol=1e-3)


def test_a_layer_that_is_used_twice_keeps_its_cross_terms_in_front_of_a_bottleneck() -> None:
    """Columns that are merged at the bottleneck know nothing of the layer's other use: another way must be taken."""
    torch.manual_seed(0)
    twice = nn.Linear(4, 4)
    network = nn.Sequential(twice, nn.Tanh(), twice, nn.Tanh(), nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 30)).double()
    x, y = draw(5, 4), draw(5, 30)
    expected = squares(network, x)
    close(found(network, x, y, Gaussian(), "exact"), expected)


def test_a_curvature_that_is_not_finite_is_an_error_that_says_so() -> None:
    network, x, y, likelihood = make("autoencoder")
    with torch.no_grad():
        network[-1].weight.mul_(1e200)  # whose square is infinite
    with pytest.raises(CurvatureError, match="curvature at the output of linear is not finite"):
        found(network, x, y, likelihood, "mixed", 2)


def test_columns_are_merged_at_a_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty outputs are forty columns; behind a bottleneck of two features two are enough."""
    counts: dict[int, list[int]] = {}
    original = diagonal.weights_diagonal

    def noted(op: Op, S: Tensor, weights: list[Tensor]) -> list[Tensor]:
        for weight in weights:
            counts.setdefault(id(weight), []).append(len(S))
        return original(op, S, weights)

    monkeypatch.setattr(diagonal, "weights_diagonal", noted)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2), nn.Tanh(), nn.Linear(2, 40)).double()
    x, y = draw(5, 9), draw(5, 40)
    expected = squares(network, x)
    close(found(network, x, y, Gaussian(), "exact"), expected)
    assert set(counts[id(network[0].weight)]) == set(counts[id(network[2].weight)]) == {2}
