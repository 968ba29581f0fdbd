"""The largest eigenpairs of the curvature: all of it where the rank allows, never more, and never a Jacobian."""

from collections.abc import Iterator
from typing import Any

import oracles
import pytest
import torch
from helpers.options import estimate_of
from networks import CASES, Case, real
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LowRank
from lightning_bayes.curvature import Curvature, fit_curvature
from lightning_bayes.jacobian import products as ggn_product
from lightning_bayes.likelihoods import Categorical, Gaussian
from lightning_bayes.network import CurvatureError, DataError, Processes
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.structures import LowRank as LowRankMatrix

OPAQUE = ("custom_function",)  # without products
QUICK = (
    "mlp", "conv2d_grouped", "embedding", "transformer", "lstm", "batch_norm", "tied_linears", "in_place_relu",
    "frozen", "two_inputs", "named_inputs", "dead_layer", "checkpointed", "bernoulli_one_logit_bare",
    "gaussian_noise_per_output", "heteroscedastic", "segmentation", "image_to_image", "deep_cnn",
)  # fmt: skip
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in OPAQUE]


def lowrank(case: Case, *sizes: int, structure: Any = "lowrank", **arguments: Any) -> Curvature:
    return case.fit(structure, *sizes, **arguments)


def dense(fitted: Curvature) -> Tensor:
    return fitted.structure.to_dense()


def close(actual: Tensor, H: Tensor) -> None:
    torch.testing.assert_close(actual, H, rtol=1e-8, atol=1e-10 * float(H.abs().max()))


@pytest.mark.parametrize("name", ALL)
def test_a_rank_that_is_high_enough_is_the_exact_curvature(name: str) -> None:
    case = CASES[name]()
    H = oracles.ggn(case)
    close(dense(lowrank(case, structure=LowRank(rank=len(H)))), H)


def regression(n: int = 40, C: int = 3, width: int = 8) -> Case:
    """Outputs that share all features have eigenvalues that are repeated for each of them."""
    network = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, C)).double()
    return Case(network, real(n, 4).double(), real(n, C).double(), Gaussian(0.5))


@pytest.mark.parametrize("curvature", ["ggn", "fisher_mc", "empirical_fisher"])
@pytest.mark.parametrize("name", ["mlp", "tagging"])
def test_every_kind_of_curvature_and_what_the_pass_learns(name: str, curvature: str) -> None:
    """That of the full matrix, in batches of other sizes, one of them of one example."""
    case = CASES[name]()
    words: dict[str, Any] = {"curvature": estimate_of(curvature, 3), "seed": 5}
    full = case.fit("full", **words)
    fitted = lowrank(case, 1, len(case.y) - 1, structure=LowRank(rank=200), **words)
    close(dense(fitted), dense(full))
    assert (fitted.n_data, fitted.n_outputs, fitted.kind) == (full.n_data, full.n_outputs, curvature)
    torch.testing.assert_close(fitted.log_likelihood, full.log_likelihood)
    torch.testing.assert_close(fitted.gradient, full.gradient)


def test_the_squared_error_of_a_regression() -> None:
    case = regression()
    full = case.fit("full")
    torch.testing.assert_close(lowrank(case, 13, 27).squared_error, full.squared_error)


@pytest.mark.parametrize("rank", [1, 5, 12, 30])
def test_a_low_rank_is_the_largest_part_and_no_more_than_the_whole(rank: int) -> None:
    case = regression(C=3)
    last = case.fit("full", subset=["2"])
    values = torch.linalg.eigvalsh(dense(last)).flip(0)
    torch.testing.assert_close(values[0::3], values[1::3])  # three times each
    fitted = lowrank(case, 11, 29, subset=["2"], structure=LowRank(rank=rank))
    assert isinstance(fitted.structure, LowRankMatrix)
    torch.testing.assert_close(fitted.structure.values, values[: min(rank, 27)], rtol=1e-3, atol=1e-9)
    assert torch.linalg.eigvalsh(dense(last) - dense(fitted)).min() > -1e-10 * values[0]


@pytest.mark.parametrize(("outputs", "rank"), [(100, 100), (100, 70), (70, 140), (130, 100)])
def test_eigenvalues_that_many_outputs_repeat_are_all_there(outputs: int, rank: int) -> None:
    x = real(50, 3).double() * torch.tensor([3.0, 1.0, 0.3]).double()
    A = torch.cat([x, torch.ones(50, 1).double()], 1)
    values = torch.linalg.eigvalsh(A.mT @ A).flip(0).repeat_interleave(outputs)
    network = nn.Linear(3, outputs).double()
    fitted = fit_curvature(network, [(x, real(50, outputs).double())], Gaussian(1.0), LowRank(rank=rank))
    assert isinstance(fitted.structure, LowRankMatrix)
    torch.testing.assert_close(fitted.structure.values, values[:rank], rtol=1e-2, atol=0)


@pytest.mark.parametrize("subset", ["last_layer", ["0.bias", "2.weight"], "mask"])
def test_a_subset_has_its_own_curvature(subset: Any) -> None:
    case = CASES["mlp"]()
    P = sum(p.numel() for p in case.network.parameters())
    subset = torch.arange(0, P, 3) if subset == "mask" else subset
    full = case.fit("full", subset=subset)
    close(dense(lowrank(case, subset=subset)), dense(full))


def test_vectors_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["deep_cnn"]()
    whole = dense(lowrank(case))
    monkeypatch.setattr(ggn_product, "MEMORY", 1)
    close(dense(lowrank(case)), whole)


@pytest.mark.parametrize("way", ggn_product.WAYS)
def test_every_way_to_a_product(way: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["residual"]()
    H = oracles.ggn(case)
    monkeypatch.setattr(ggn_product, "WAYS", (way,))
    close(dense(lowrank(case)), H)


@pytest.mark.parametrize("name", OPAQUE)
def test_operators_without_products_are_a_clear_error(name: str) -> None:
    case = CASES[name]()
    with pytest.raises(CurvatureError, match=r"neither forward mode nor .* use structure='kron', 'diag' or 'full'"):
        lowrank(case)


def test_float32() -> None:
    case = regression()
    H = dense(case.fit("full"))
    case.network.float()
    fitted = fit_curvature(case.network, [(case.x.float(), case.y.float())], case.likelihood, "lowrank").structure
    assert isinstance(fitted, LowRankMatrix)
    assert fitted.dtype == torch.float32
    U = fitted.vectors
    torch.testing.assert_close(U.mT @ U, torch.eye(fitted.rank), rtol=0, atol=1e-5)
    torch.testing.assert_close(fitted.to_dense().double(), H, rtol=0, atol=1e-5 * float(H.abs().max()))


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else (made,):
            self.numbers = max(self.numbers, t.numel() if isinstance(t, Tensor) else 0)
        return made


def test_a_fit_never_makes_a_jacobian() -> None:
    case = regression(n=200, C=10, width=30)
    P, vectors = 30 * 5 + 31 * 10, 16
    with Largest() as largest:
        lowrank(case, structure=LowRank(rank=8))
    jacobian = 200 * 10 * P
    assert largest.numbers <= 200 * 30 * vectors < jacobian / 9  # the tangents of a block at the widest layer


# -- passes ------------------------------------------------------------------------------------------------------------


def test_shuffled_data_have_the_same_curvature_but_not_the_same_draws() -> None:
    case = regression()
    shuffled = DataLoader(TensorDataset(case.x, case.y), 8, shuffle=True)
    full = case.fit("full")
    close(dense(fit_curvature(case.network, shuffled, case.likelihood, "lowrank")), dense(full))
    with pytest.raises(DataError, match=r"'fisher_mc' needs the same examples in the same order .* shuffle=False"):
        fit_curvature(case.network, shuffled, case.likelihood, "lowrank", curvature="fisher_mc")


class Moved:
    """Two examples change places in later passes."""

    def __init__(self, case: Case, one: int, other: int) -> None:
        self.case, self.order, self.swap, self.passes = case, torch.arange(len(case.y)), (one, other), 0

    def __iter__(self) -> Iterator[Any]:
        if self.passes == 1:
            self.order[[*self.swap]] = self.order[[*reversed(self.swap)]]
        self.passes += 1
        return zip(self.case.x[self.order].split(8), self.case.y[self.order].split(8), strict=True)


@pytest.mark.parametrize("swap", [(38, 39), (0, 20), (9, 30)])
def test_two_examples_that_change_places_anywhere_have_other_labels(
    swap: tuple[int, int],
) -> None:
    """Products of other matrices have no eigenpairs; eigenvalues of EKFAC that belong to other labels have a word."""
    case = regression()
    for dtype in (torch.float64, torch.float32):
        moved = Case(case.network.to(dtype), case.x.to(dtype), case.y.to(dtype), case.likelihood)

        def fit(structure: str, *places: int, kind: str = "fisher_mc", case: Case = moved) -> None:
            fit_curvature(case.network, Moved(case, *places), case.likelihood, structure, curvature=kind)

        for structure in ("lowrank", "ekfac"):
            fit(structure, 5, 5)
            fit(structure, *swap, kind="empirical_fisher")
        with pytest.raises(DataError, match=r"'fisher_mc' needs the same examples in the same order .*: pass a loader"):
            fit("lowrank", *swap)
        with pytest.warns(BayesWarning, match="the same examples in the same order in each pass .* the second"):
            fit("ekfac", *swap)


def test_an_empty_loader() -> None:
    with pytest.raises(DataError, match="the loader is empty"):
        fit_curvature(nn.Linear(2, 2), [], structure="lowrank")


class Mirrored(Processes):
    """Another process has the same vectors with the other sign."""

    def sum_(self, tensors: list[Tensor]) -> None:
        for t in tensors:
            if t.shape[1:] == (8,):  # the entries that processes compare
                t.zero_()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


def test_processes_with_other_vectors_are_an_error() -> None:
    with pytest.raises(CurvatureError, match=r"different vectors on another process.*: fit it on one process"):
        lowrank(regression(), processes=Mirrored(0, 2))


def test_what_overflows_has_a_name() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        network[1].weight.fill_(1e30)
        network[0].weight.fill_(1e-5)
    with pytest.raises(CurvatureError, match=r"0\.weight: the curvature is not finite"):
        fit_curvature(network, [(torch.ones(3, 2), torch.zeros(3, 2))], Gaussian(1e-6), "lowrank")


def test_the_bar_counts_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    lowrank(regression(), 20, 20, progress=True, structure=LowRank(rank=20))
    shown = capsys.readouterr().err
    assert "Laplace: curvature: " in shown
    assert "Laplace: curvature, pass 2 of at most 5: " in shown


def test_a_network_that_writes_into_its_input() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.mul_(2))

    x, y, network = real(5, 3).double(), torch.tensor([0, 1, 2, 0, 1]), Doubling()
    full = fit_curvature(network, [(x.clone(), y)], Categorical(), "full")
    close(dense(fit_curvature(network, [(x, y)], Categorical(), "lowrank")), dense(full))
