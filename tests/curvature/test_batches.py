"""How the data are split into batches changes nothing: not the curvature, not the counts, not the likelihood."""

from collections.abc import Iterator
from typing import Any

import oracles
import pytest
import torch
from helpers.options import estimate_of
from networks import CASES, Case, N
from oracles import close
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import FisherMC, Kron, fit_laplace
from lightning_bayes.curvature import blocks, fit_curvature
from lightning_bayes.jacobian import gradients
from lightning_bayes.likelihoods import Categorical, Gaussian
from lightning_bayes.network import DataError

NETWORKS = [
    *("mlp", "deep_cnn", "conv_2d_groups", "transformer", "embedding", "bare_parameters", "lstm", "segmentation"),
    *("norm_batch_2d", "merged_time_batch", "heteroscedastic", "image_to_image", "named_inputs", "tied_embedding"),
]


@pytest.mark.parametrize("curvature", ["ggn", "fisher_mc", "empirical_fisher"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("name", NETWORKS)
def test_any_split_equals_one_batch(name: str, structure: str, curvature: str) -> None:
    case = CASES[name]()
    options: dict[str, Any] = {"structure": structure, "curvature": estimate_of(curvature, 2)}
    whole = fit_curvature(case.network, case.loader(), case.likelihood, **options)
    for sizes in ((1,) * N, (3, 1), (1, 2, 1)):
        split = fit_curvature(case.network, case.loader(*sizes), case.likelihood, **options)
        close(split.structure.to_dense(), whole.structure.to_dense())
        close(split.log_likelihood, whole.log_likelihood)
        assert (split.n_data, split.n_outputs) == (whole.n_data, whole.n_outputs) == (N, whole.n_outputs)


def test_reduce_is_the_same_for_any_split() -> None:
    case = CASES["deep_cnn"]()
    whole, split = (case.fit(Kron(weight_sharing="reduce"), *sizes).structure.to_dense() for sizes in ((), (1, 3)))
    close(split, whole)


def test_wide_layers_and_many_rows_are_added_up_in_parts_that_change_nothing() -> None:
    """More than the thousand rows after which inputs are added, and more columns than a panel."""
    network = nn.Sequential(nn.Linear(600, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x, y = torch.randn(1500, 600, dtype=torch.float64), torch.randint(2, (1500,))
    case = Case(network, x, y, Categorical())
    whole = fit_curvature(network, case.loader())
    split = fit_curvature(network, case.loader(700, 1, 799))
    a = torch.cat([x, torch.ones(1500, 1, dtype=x.dtype)], dim=1)
    for fitted in (whole, split):
        block = fitted.structure.blocks[0]
        Q, λ = block.right.vectors[0], block.right.values[0]
        close(Q @ torch.diag(λ) @ Q.mT, a.mT @ a / 1500)


def test_full_matrix_wider_than_a_panel_is_symmetric_and_exact() -> None:
    network = nn.Sequential(nn.Linear(260, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    case = Case(network, torch.randn(3, 260, dtype=torch.float64), torch.tensor([0, 1, 1]), Categorical())
    H = fit_curvature(network, case.loader(2, 1), structure="full").structure.to_dense()
    assert len(H) > 512
    close(H, oracles.ggn(case))


@pytest.mark.parametrize("width", [255, 256, 300, 513])
def test_products_of_wide_rows_are_exact_for_uneven_batches(width: int) -> None:
    rows = torch.randn(1, 7, width, dtype=torch.float64)
    total = torch.zeros(1, width, width, dtype=torch.float64)
    for part in rows.split([4, 2, 1], dim=1):
        blocks.add_gram_(total, part)
    close(blocks.symmetric(total), rows.mT @ rows)


@pytest.mark.parametrize("curvature", ["ggn", FisherMC(samples=3)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_convolutions_with_kronecker_blocks_take_columns_one_by_one(
    curvature: Any, has_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has no batched backward pass of a convolution. The exact block of a norm needs all columns together."""
    torch.manual_seed(0)
    norm = nn.GroupNorm(1, 2) if has_norm else nn.Tanh()
    layers = (nn.Conv2d(1, 2, 3, padding=1), norm, nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 4))
    network = nn.Sequential(*layers).double()
    x, y = torch.randn(5, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    loader = DataLoader(TensorDataset(x, y), batch_size=2)  # the last batch has one example
    columns_of_calls = set()

    def noted(self: object, f: torch.Tensor, calls: Any, columns: torch.Tensor, plain: bool) -> Any:
        columns_of_calls.add(len(columns))
        return original(self, f, calls, columns, plain)

    original = gradients.LayerGradients.__call__
    monkeypatch.setattr(gradients.LayerGradients, "__call__", noted)
    found = fit_curvature(network, loader, structure="kron", curvature=curvature).structure.to_dense()
    assert columns_of_calls == {3 if has_norm else 1}
    columns_of_calls.clear()
    monkeypatch.setattr(blocks, "WIDE", 0)  # wide layers take all columns together
    together = fit_curvature(network, loader, structure="kron", curvature=curvature).structure.to_dense()
    assert columns_of_calls == {3}
    close(found, together)


def test_examples_are_counted_from_a_generator_that_can_be_read_once() -> None:
    case = CASES["mlp"]()

    def stream() -> Iterator[Any]:
        yield from case.loader(3, 1)

    fitted = fit_curvature(case.network, stream(), structure="diag")
    assert fitted.n_data == N
    assert fitted.n_outputs == N * 3


def test_examples_that_a_loader_drops_are_not_counted() -> None:
    case = CASES["mlp"]()
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=3, drop_last=True)
    fitted = fit_curvature(case.network, loader, structure="full")
    first = Case(case.network, case.x[:3], case.y[:3], case.likelihood)
    assert fitted.n_data == 3
    close(fitted.structure.to_dense(), oracles.ggn(first))


@pytest.mark.parametrize("name", CASES)
def test_log_likelihood_is_the_sum_over_examples_in_float64(name: str) -> None:
    case = CASES[name]()
    fitted = case.fit("diag", 1, 3)
    assert fitted.log_likelihood.dtype == torch.float64
    close(fitted.log_likelihood, oracles.empirical_fisher(case)[1])


def test_many_columns_are_back_propagated_in_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("segmentation", "bare_parameters", "linear_on_sequences", "image_to_image", "heteroscedastic"):
        case = CASES[name]()
        for structure in ("full", "diag", "kron"):
            expected = case.fit(structure).structure.to_dense()
            with monkeypatch.context() as patch:
                patch.setattr(gradients, "MEMORY", 1)
                patch.setattr(blocks, "CACHE", 1)
                found = case.fit(structure).structure.to_dense()
            close(found, expected)


def test_columns_of_independent_outputs_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together would have the square of the outputs' size."""
    torch.manual_seed(0)
    network, x = nn.Linear(2, 500), torch.randn(3, 2)
    chunks = []

    def noted(self: object, f: torch.Tensor, calls: Any, columns: torch.Tensor, plain: bool) -> Any:
        chunks.append(columns.shape)
        return original(self, f, calls, columns, plain)

    original = gradients.LayerGradients.__call__
    monkeypatch.setattr(gradients.LayerGradients, "__call__", noted)
    monkeypatch.setattr(gradients, "MEMORY", 4 * 3 * 500 * 200)  # bytes of 200 columns
    monkeypatch.setattr(Gaussian, "fisher_root", None)
    loader = DataLoader(TensorDataset(x, torch.zeros(3, 500)), batch_size=3)
    found = fit_curvature(network, loader, Gaussian(0.5), structure="diag").structure.diagonal()
    expected = torch.cat([x.square().sum(0).repeat(500), torch.full((500,), 3.0)]) / 0.25
    torch.testing.assert_close(found, expected)
    assert chunks == [(200, 3, 500), (200, 3, 500), (100, 3, 500)]


def test_progress_bar_counts_batches_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["mlp"]()
    quiet = case.fit("diag", 1, 3)
    assert capsys.readouterr().err == ""
    shown = case.fit("diag", 1, 3, progress=True)
    assert "2/2" in capsys.readouterr().err
    assert torch.equal(shown.structure.diagonal(), quiet.structure.diagonal())


def test_progress_bar_counts_decompositions(capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["mlp"]()
    case.fit("kron", 1, 3, progress=True)
    shown = capsys.readouterr().err
    order = ("Laplace: curvature: ", "2/2", "Laplace: decomposing factors: ", "0/4", "4/4")
    assert sorted(order, key=shown.index) == list(order)
    case.fit("diag", 1, 3, progress=True)
    assert "decomposing" not in capsys.readouterr().err


# -- several passes ----------------------------------------------------------------------------------------------------


class Fading:
    """One batch less each time it is read."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self.reads = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        yield from self._batches[self.reads - 1 :]


@pytest.mark.parametrize("fitted", [fit_curvature, fit_laplace])
@pytest.mark.parametrize("structure", ["ekfac", "lowrank"])
def test_an_iterator_is_refused_before_it_is_read(structure: str, fitted: Any) -> None:
    case = CASES["mlp"]()
    for wrap in (iter, lambda batches: (batch for batch in batches)):
        batches = wrap(case.loader(1, 3))
        with pytest.raises(DataError, match=f"structure='{structure}' takes several passes .* loader is an iterator"):
            fitted(case.network, batches, structure=structure)
        assert len(list(batches)) == 2


@pytest.mark.parametrize("fitted", [fit_curvature, fit_laplace])
@pytest.mark.parametrize("structure", ["ekfac", "lowrank"])
def test_other_data_in_a_later_pass_are_an_error(structure: str, fitted: Any) -> None:
    case = CASES["mlp"]()
    for sizes, n in (((1, 3), 3), ((), 0)):
        with pytest.raises(
            DataError, match=f"pass 2 over the data gave {n} examples, but the first gave 4: use a list"
        ):
            fitted(case.network, Fading(case.loader(*sizes)), structure=structure)
