"""EKFAC: in the eigenvectors of the Kronecker block, the diagonal of the exact GGN's block."""

from typing import Any

import oracles
import pytest
import torch
from helpers.options import estimate_of
from networks import CASES, CONVOLUTIONS, OUTPUTS, TRANSPOSED, Case, Wired, real
from oracles import close
from torch import Tensor, nn

from lightning_bayes import EKFAC as EKFACOption
from lightning_bayes import Kron, fit_laplace
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.jacobian.gradients import LayerGradients, ParameterGradients
from lightning_bayes.likelihoods import Categorical, Gaussian
from lightning_bayes.network.errors import DataError, SubsetError
from lightning_bayes.structures import EKFAC, EKFACBlockDiagonal, Kronecker

NAMES = [
    *("mlp", "mlp_without_bias", "frozen", "residual", "used_twice", "used_twice_on_different_shapes", "two_inputs"),
    *(f"conv_{name}" for name in CONVOLUTIONS if name.startswith("2d")),
    *(f"transposed_{name}" for name in TRANSPOSED),
    *("deep_cnn", "linear_on_sequences", "linear_on_grids", "time_first", "merged_time_batch", "merged_convolution"),
    *("embedding", "embedding_of_one_token", "positional_embedding", "tied_embedding", "sparse_embedding"),
    *("transformer", "matrix_products", "frozen_in_a_convolution", "dead_layer", "bernoulli_one_logit"),
    *("gaussian_noise_per_output", "heteroscedastic", "segmentation", "tagging", "image_to_image", "bare_parameters"),
]


def fit(case: Case, *sizes: int, structure: str = "ekfac", **options: Any) -> Any:
    return case.fit(structure, *sizes, **options).structure


def check_blocks(found: EKFACBlockDiagonal, H: Tensor) -> int:
    """Against the dense matrix that it approximates: eigenvalues, trace, and the error; how many blocks were refitted.
    What has no Kronecker form has an exact block."""
    n = 0
    for block, layout in zip(found.blocks, found.layouts, strict=True):
        places = layout.gather(torch.arange(found.size))
        exact = oracles.block(H, places)
        if not isinstance(block, Kronecker):
            close(block.diagonal(), exact.diagonal())
            continue
        assert isinstance(block, EKFAC)
        Q = block.rotate_back(torch.eye(block.size, dtype=H.dtype).unflatten(1, block.shape)).mT  # columns
        close(block.values.flatten(), (Q.mT @ exact @ Q).diagonal())
        close(block.diagonal().sum(), exact.diagonal().sum())
        kfac = Kronecker(block.left, block.right)
        assert (block.to_dense() - exact).norm() <= (kfac.to_dense() - exact).norm() + 1e-12
        n += 1
    return n


@pytest.mark.parametrize("name", NAMES)
def test_eigenvalues_are_those_of_the_exact_block_in_its_basis(name: str) -> None:
    case = CASES[name]()
    found = fit(case, 1, 3)
    assert check_blocks(found, oracles.ggn(case)) == sum(isinstance(block, Kronecker) for block in found.blocks)
    kron = fit(case, 1, 3, structure="kron")
    for block, basis in zip(found.blocks, kron.blocks, strict=True):
        if isinstance(block, EKFAC):
            close(Kronecker(block.left, block.right).to_dense(), basis.to_dense())
        else:
            torch.testing.assert_close(block.to_dense(), basis.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["conv_2d_groups", "linear_on_sequences", "embedding", "used_twice", "deep_cnn"])
def test_the_block_is_exact_whatever_sharing_the_basis_is_from(name: str) -> None:
    case = CASES[name]()
    found = fit(case, 3, 1, structure=EKFACOption(weight_sharing="reduce"))
    assert check_blocks(found, oracles.ggn(case))
    same_basis = fit(case, 3, 1, structure=Kron(weight_sharing="reduce"))
    assert torch.equal(found.blocks[0].left.vectors, same_basis.blocks[0].left.vectors)


@pytest.mark.parametrize("kind", ["empirical_fisher", "fisher_mc"])
@pytest.mark.parametrize("name", ["mlp", "deep_cnn", "embedding", "tagging"])
def test_both_passes_see_the_same_labels(name: str, kind: str) -> None:
    case, options = CASES[name](), {"curvature": estimate_of(kind, 2), "seed": 5}
    assert check_blocks(fit(case, 1, 2, 1, **options), fit(case, structure="full", **options).to_dense())


@pytest.mark.parametrize("name", ["mlp", "residual", "two_inputs", "embedding_of_one_token", "heteroscedastic"])
def test_one_datum_at_one_position_gives_the_exact_blocks(name: str) -> None:
    """As KFAC does: all columns of one example have its one input."""
    case = CASES[name]()
    one = Case(case.network, oracles.example(case.x, 0), case.y[:1], case.likelihood)
    H = oracles.ggn(one)
    found = fit(one)
    for block, layout in zip(found.blocks, found.layouts, strict=True):
        places = layout.gather(torch.arange(found.size))
        close(block.to_dense(), oracles.block(H, places))


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (2, 3)], ids=str)
def test_inputs_and_gradients_are_rotated_or_their_product(shape: tuple[int, int]) -> None:
    """More positions than features and outputs, and fewer of them."""
    T, I = shape
    parts = {"inner": nn.Linear(I, 2), "head": nn.Linear(2, OUTPUTS)}
    network = Wired(lambda s, x: s.head(s.inner(x).tanh().mean(1)), **parts).double()
    case = Case(network, real(5, T, I), torch.tensor([0, 1, 2, 2, 1]), Categorical())
    assert check_blocks(fit(case, 2, 3), oracles.ggn(case)) == 2


def test_a_large_batch_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["deep_cnn"]()
    whole = fit(case).to_dense()
    monkeypatch.setattr("lightning_bayes.curvature.blocks.CACHE", 1)
    monkeypatch.setattr("lightning_bayes.jacobian.layers.STRIP", 1)
    close(fit(case).to_dense(), whole)


def test_the_rest_of_the_fit_is_that_of_one_pass() -> None:
    case = CASES["bare_parameters"]()
    once, twice = (case.fit(word, 1, 3) for word in ("kron", "ekfac"))
    assert (once.n_data, once.n_outputs, once.kind) == (twice.n_data, twice.n_outputs, twice.kind)
    torch.testing.assert_close(twice.log_likelihood, once.log_likelihood, rtol=0, atol=0)
    torch.testing.assert_close(twice.gradient, once.gradient, rtol=0, atol=0)


def test_blocks_that_are_exact_are_not_added_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, parameters = [], []

    def noted(calls: list[Any], of: Any, what: int) -> Any:
        def call(self: Any, *args: Any) -> Any:
            calls.append(args[what])
            return of(self, *args)

        return call

    monkeypatch.setattr(LayerGradients, "__call__", noted(layers, LayerGradients.__call__, 1))
    monkeypatch.setattr(ParameterGradients, "__call__", noted(parameters, ParameterGradients.__call__, 2))
    fit(CASES["bare_parameters"](), 2, 2)
    assert len(parameters) == 2  # one for each batch of the first pass
    layers.clear()
    fit(CASES["norm_layer"](), 2, 2)
    assert [len(calls) for calls in layers] == [3, 3, 2, 2]


def test_a_network_without_a_kronecker_layer_takes_one_pass() -> None:
    network = nn.LayerNorm(3).double()
    batches = iter([(real(4, 3), torch.tensor([0, 1, 2, 1]))])
    with pytest.raises(DataError, match="takes several passes"):  # which is not known before the first
        fit_curvature(network, batches, structure="ekfac")
    x, y = next(batches)
    found = fit_curvature(network, [(x, y)], structure="ekfac").structure
    assert found.word == "ekfac"
    torch.testing.assert_close(
        found.to_dense(), fit_curvature(network, [(x, y)], structure="kron").structure.to_dense()
    )


def test_training_points_are_kept_once() -> None:
    case = CASES["mlp"]()
    once, twice = (case.laplace(1, 3, structure=word, gp=3) for word in ("kron", "ekfac"))
    assert once.points is not None
    assert twice.points is not None
    assert torch.equal(once.points.index, twice.points.index)
    assert torch.equal(once.points.x, twice.points.x)


def test_single_weights_have_no_such_form() -> None:
    case = CASES["mlp"]()
    with pytest.raises(SubsetError, match="structure='full' or 'diag'"):
        fit(case, subset=torch.tensor([1, 5]))


# -- in a posterior ----------------------------------------------------------------------------------------------------


def test_refinement_fits_it_again() -> None:
    """For squared loss the linearised network's curvature is the network's own."""
    case = CASES["gaussian_noise_per_output"]()
    posterior = case.laplace(1, 3, prior_precision=2.0, structure="ekfac")
    refined = posterior.refine(case.loader(1, 3))
    assert isinstance(refined.curvature.structure, EKFACBlockDiagonal)
    close(refined.precision.to_dense(), posterior.precision.to_dense())


def test_the_covariance_of_outputs_is_that_of_its_dense_matrix() -> None:
    for name in ("mlp", "conv_2d_groups", "transposed_2d_all_options", "linear_on_sequences", "embedding"):
        case = CASES[name]()
        posterior = case.laplace(1, 3, prior_precision=2.0, structure="ekfac")
        P = posterior.curvature.structure.to_dense() + 2 * torch.eye(len(posterior.mean))
        close(posterior.functional(case.x)[1], oracles.covariances(case.network, case.x, 4, P))


@pytest.mark.parametrize("name", ["mlp", "deep_cnn", "linear_on_sequences", "transformer", "heteroscedastic"])
def test_its_evidence_is_a_lower_bound_of_the_exact_one(name: str) -> None:
    """A matrix without what is off its diagonal, in any basis, has the larger determinant (Hadamard) and the larger
    number of weights that the data determine (Schur)."""
    case = CASES[name]()
    ekfac, full = (case.laplace(structure=word) for word in ("ekfac", "full"))
    for δ in (1e-3, 1.0, 50.0):
        one, exact = ekfac.with_prior(δ), full.with_prior(δ)
        assert one.log_marginal_likelihood() <= exact.log_marginal_likelihood() + 1e-9
        assert one.effective_parameters >= exact.effective_parameters - 1e-9


@pytest.mark.parametrize("name", ["deep_cnn", "transformer"])
def test_new_noise_is_a_new_fit(name: str) -> None:
    case = CASES[name]()
    y = real(4, OUTPUTS)
    data = [(case.x[:3], y[:3]), (case.x[3:], y[3:])]
    one, other = (
        fit_laplace(case.network, data, Gaussian(σ), prior_precision=2.0, structure="ekfac") for σ in (0.5, 1.5)
    )
    moved = one.with_noise(1.5)
    close(moved.precision.logdet(), other.precision.logdet())
    close(moved.log_marginal_likelihood(), other.log_marginal_likelihood())
