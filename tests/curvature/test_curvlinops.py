"""Cross-checks with curvlinops, an independent implementation: GGN, diagonal, eigenpairs, empirical Fisher, KFAC."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import CASES, OUTPUTS, Case, real
from torch import Tensor, nn

from lightning_bayes import Kron, LowRank
from lightning_bayes.likelihoods import Bernoulli, Categorical, Gaussian

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the peer's own warnings are not ours
eigsh = pytest.importorskip("scipy.sparse.linalg").eigsh
curvlinops = pytest.importorskip("curvlinops", reason="the peers are installed by `make test-slow`")

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def mlp(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, OUTPUTS, bias=bias)).double()


def cnn(bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2, bias=bias),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, bias=bias),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, OUTPUTS, bias=bias),
    ).double()


def sequence(bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Flatten(), nn.Linear(16, OUTPUTS, bias=bias)
    ).double()


NETWORKS: dict[str, tuple[Callable[[bool], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "cnn": (cnn, (2, 5, 5)),
    "sequence": (sequence, (4, 3)),
}
# A squared error Σ (f − y)² is the negative log-likelihood of noise 1/√2.
LOSSES: dict[str, tuple[nn.Module, Any, Callable[[], Tensor]]] = {
    "classes": (nn.CrossEntropyLoss(reduction="sum"), Categorical(), lambda: torch.randint(OUTPUTS, (6,))),
    "labels": (nn.BCEWithLogitsLoss(reduction="sum"), Bernoulli(), lambda: torch.randint(2, (6, OUTPUTS)).double()),
    "squared": (nn.MSELoss(reduction="sum"), Gaussian(0.5**0.5), lambda: real(6, OUTPUTS)),
}


def setting(network: str, loss: str, bias: bool) -> tuple[Case, nn.Module]:
    make, shape = NETWORKS[network]
    criterion, likelihood, targets = LOSSES[loss]
    return Case(make(bias), real(6, *shape), targets(), likelihood), criterion


def dense(kind: Any, case: Case, loss: nn.Module, **options: Any) -> Tensor:
    parameters = list(case.network.parameters())
    operator = kind(
        case.network, loss, parameters, case.loader(2, len(case.y) - 2), check_deterministic=False, **options
    )
    return operator @ torch.eye(sum(p.numel() for p in parameters), dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_low_rank(network: str, loss: str) -> None:
    """The largest eigenvalues of the peer's operator, by SciPy's Lanczos; and all of its matrix."""
    case, criterion = setting(network, loss, bias=True)
    G = dense(curvlinops.GGNLinearOperator, case, criterion)
    few = case.fit(LowRank(rank=4), 1, 5).structure
    largest = eigsh(G.numpy(), k=4, return_eigenvectors=False)[::-1].copy()
    torch.testing.assert_close(few.values, torch.from_numpy(largest), rtol=1e-4, atol=1e-10)
    every = case.fit("lowrank", 1, 5).structure
    torch.testing.assert_close(every.to_dense(), G, **TIGHT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_ggn_and_its_diagonal_are_curvlinops(network: str, loss: str, bias: bool) -> None:
    case, criterion = setting(network, loss, bias)
    H = dense(curvlinops.GGNLinearOperator, case, criterion)
    full = case.fit("full", 1, 5).structure
    torch.testing.assert_close(full.to_dense(), H, **TIGHT)
    diagonal = case.fit("diag", 1, 5).structure
    torch.testing.assert_close(diagonal.diagonal(), H.diagonal(), **TIGHT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_empirical_fisher_is_curvlinops(network: str, bias: bool) -> None:
    case, criterion = setting(network, "classes", bias)
    H = dense(curvlinops.EFLinearOperator, case, criterion)
    found = case.fit("full", curvature="empirical_fisher").structure
    torch.testing.assert_close(found.to_dense(), H, **TIGHT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_kfac_is_curvlinops(network: str, loss: str, sharing: str, bias: bool) -> None:
    case, criterion = setting(network, loss, bias)
    options = {"fisher_type": "type-2", "kfac_approx": sharing, "separate_weight_and_bias": False}
    K = dense(curvlinops.KFACLinearOperator, case, criterion, **options)
    fitted = case.fit(Kron(weight_sharing=sharing), 3, 3).structure
    torch.testing.assert_close(fitted.to_dense(), K, **TIGHT)
    v = real(2, len(K))
    damped = K + 0.3 * torch.eye(len(K), dtype=torch.float64)
    torch.testing.assert_close(fitted.add_prior(0.3).solve(v), torch.linalg.solve(damped, v.mT).mT, **TIGHT)
    torch.testing.assert_close(fitted.add_prior(0.3).logdet(), torch.linalg.slogdet(damped).logabsdet, **TIGHT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_ekfac_is_curvlinops(network: str, loss: str, bias: bool) -> None:
    """By "expand": mean inputs ("reduce") of six examples leave many eigenvectors of a convolution's factor open."""
    case, criterion = setting(network, loss, bias)
    options = {"fisher_type": "type-2", "kfac_approx": "expand", "separate_weight_and_bias": False}
    E = dense(curvlinops.EKFACLinearOperator, case, criterion, **options)
    fitted = case.fit("ekfac", 3, 3).structure
    torch.testing.assert_close(fitted.to_dense(), E, **TIGHT)


def test_zoo_without_kronecker_forms_has_curvlinops_ggn() -> None:
    for name in ("norm_layer", "norm_batch_2d", "bare_parameters", "used_twice", "residual"):
        case = CASES[name]()
        case.network.eval()
        H = dense(curvlinops.GGNLinearOperator, case, nn.CrossEntropyLoss(reduction="sum"))
        found = case.fit("full").structure.to_dense()
        torch.testing.assert_close(found, H, **TIGHT)
