"""One contract: every operation of every structure is the one that its dense matrix defines."""

from collections.abc import Callable
from io import BytesIO

import pytest
import torch
from structure_cases import F64, STRUCTURES, layer_prior, like, positive, random, spd
from torch import Tensor

from lightning_bayes.network import float64
from lightning_bayes.structures import (
    EKFAC,
    BlockDiagonal,
    CovarianceForm,
    Dense,
    Diagonal,
    Factor,
    Gram,
    Kronecker,
    LowRank,
    LowRankCovariance,
    RowSpace,
    Structure,
    base,
    kronecker,
    output_covariance,
)

V = random(2, 3, 66, seed=31)  # two stacks of three vectors; each structure uses as many entries as it has parameters


def vectors(M: Structure | Tensor) -> Tensor:
    return V[..., : M.shape[0] if isinstance(M, Tensor) else M.size]


def prior_vector(M: Structure) -> Tensor:
    return positive(M.size, seed=32)


# operation: what the structure answers, and what its dense matrix does
OPERATIONS: dict[str, tuple[Callable[[Structure], Tensor], Callable[[Tensor], Tensor]]] = {
    "scale": (lambda M: M.scale(2.5).to_dense(), lambda D: 2.5 * D),
    "scale by a tensor": (lambda M: M.scale(torch.tensor(0.3, dtype=F64)).to_dense(), lambda D: 0.3 * D),
    "add_prior": (lambda M: M.add_prior(0.7).to_dense(), lambda D: D + 0.7 * torch.eye(len(D), dtype=F64)),
    "add_prior twice": (
        lambda M: M.add_prior(0.7).add_prior(torch.tensor([0.4], dtype=F64)).to_dense(),
        lambda D: D + 1.1 * torch.eye(len(D), dtype=F64),
    ),
    "scale after add_prior": (
        lambda M: M.add_prior(0.7).scale(3.0).to_dense(),
        lambda D: 3 * D + 2.1 * torch.eye(len(D), dtype=F64),
    ),
    "matmul": (lambda M: M.matmul(vectors(M)), lambda D: vectors(D) @ D),
    "solve": (lambda M: M.solve(vectors(M)), lambda D: vectors(D) @ torch.linalg.inv(D)),
    "solve one vector": (lambda M: M.solve(vectors(M)[0, 0]), lambda D: torch.linalg.inv(D) @ vectors(D)[0, 0]),
    "logdet": (lambda M: M.logdet(), lambda D: torch.linalg.slogdet(D).logabsdet),
    "diagonal": (lambda M: M.diagonal(), lambda D: D.diagonal()),
    "inverse_diagonal": (lambda M: M.inverse_diagonal(), lambda D: torch.linalg.inv(D).diagonal()),
    "quadratic": (lambda M: M.quadratic(vectors(M)), lambda D: vectors(D) @ D @ vectors(D).mT),
    "inverse_quadratic": (
        lambda M: M.inverse_quadratic(vectors(M)),
        lambda D: vectors(D) @ torch.linalg.inv(D) @ vectors(D).mT,
    ),
}


@pytest.fixture(params=STRUCTURES)
def M(request: pytest.FixtureRequest) -> Structure:
    return STRUCTURES[request.param]()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_is_that_of_the_dense_matrix(M: Structure, operation: str) -> None:
    ours, theirs = OPERATIONS[operation]
    torch.testing.assert_close(ours(M), theirs(M.to_dense()), rtol=1e-9, atol=1e-10)


def test_in_the_eigenbasis_the_matrix_is_diagonal_with_any_prior(M: Structure) -> None:
    v = V.flatten(0, 1)[:, : M.size]
    basis = M.eigenbasis(v)
    if isinstance(M, LowRankCovariance):  # a diagonal with different entries changes the basis of its columns
        assert basis is None
        return
    assert basis is not None
    assert basis.values.dtype == F64
    D = M.to_dense() + 0.7 * torch.eye(M.size, dtype=F64)
    logdet = (basis.counts * (basis.values + 0.7).log()).sum()
    torch.testing.assert_close(logdet, torch.logdet(D), rtol=1e-10, atol=1e-10)
    solved = (basis.vectors / (basis.values + 0.7)) @ basis.vectors.mT
    torch.testing.assert_close(solved, v @ torch.linalg.solve(D, v.mT), rtol=1e-9, atol=1e-10)


def test_a_prior_that_differs_within_a_block_has_no_eigenbasis_but_that_of_a_diagonal() -> None:
    for make in STRUCTURES.values():
        M = make()
        groups = torch.arange(M.size)
        basis = M.eigenbasis(None, groups)
        if type(M) is Diagonal:
            assert torch.equal(basis.groups, groups)
        elif not isinstance(M, BlockDiagonal) or not all(isinstance(block, Diagonal) for block in M.blocks):
            assert basis is None


def test_each_column_of_the_eigenbasis_belongs_to_the_layer_of_its_block() -> None:
    M = STRUCTURES["block diagonal"]()
    δ, groups = positive(len(M.blocks), seed=98), torch.empty(M.size, dtype=torch.long)
    for number, layout in enumerate(M.layouts):
        layout.scatter(torch.full((layout.size,), number), groups)
    basis = M.eigenbasis(None, groups)
    logdet = (basis.counts * (basis.values + δ[basis.groups]).log()).sum()
    torch.testing.assert_close(logdet, torch.logdet(M.to_dense() + torch.diag(δ[groups])), rtol=1e-10, atol=1e-10)


def test_sum_is_the_sum_of_the_dense_matrices(M: Structure) -> None:
    other = like(M)
    torch.testing.assert_close((M + other).to_dense(), M.to_dense() + other.to_dense(), rtol=1e-12, atol=1e-12)
    total = M.add_prior(0.2) + other.scale(2.0).add_prior(0.1)
    expected = M.to_dense() + 2 * other.to_dense() + 0.3 * torch.eye(M.size, dtype=F64)
    torch.testing.assert_close(total.to_dense(), expected, rtol=1e-12, atol=1e-12)


def test_per_layer_prior_is_added_to_each_block(M: Structure) -> None:
    δ = layer_prior(M)
    P = M.add_prior(δ)
    torch.testing.assert_close(P.to_dense(), M.to_dense() + torch.diag(δ), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        P.solve(vectors(M)), vectors(M) @ torch.linalg.inv(M.to_dense() + torch.diag(δ)), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("name", ["dense", "diagonal", "low rank", "low rank covariance", "row space"])
def test_per_parameter_prior_is_added_to_the_diagonal(name: str) -> None:
    M = STRUCTURES[name]()
    δ = prior_vector(M)
    torch.testing.assert_close(M.add_prior(δ).to_dense(), M.to_dense() + torch.diag(δ))


def test_block_diagonal_takes_a_per_parameter_prior_where_its_blocks_do() -> None:
    M = STRUCTURES["block diagonal"]()
    assert isinstance(M, BlockDiagonal)
    δ = layer_prior(M)
    for name in ("dense", "diagonal"):
        layout = M.layouts[M.names.index(name)]
        layout.scatter(positive(layout.size, seed=33), δ)
    torch.testing.assert_close(M.add_prior(δ).to_dense(), M.to_dense() + torch.diag(δ))


def test_a_state_holds_the_same_matrix(M: Structure) -> None:
    """Also with a prior, and with nothing in it but what a safe file can hold."""
    for matrix in (M, M.add_prior(0.7), M.scale(2.0)):
        file = BytesIO()
        torch.save(matrix.to_state(), file)
        file.seek(0)
        found = Structure.from_state(torch.load(file, weights_only=True))
        torch.testing.assert_close(found.to_dense(), matrix.to_dense(), rtol=0, atol=0)
        assert isinstance(matrix, type(found))


LAYERS = {  # blocks of one layer [g, O, I]
    "dense": ((1, 2, 3), lambda: Dense(spd(6, seed=41))),
    "diagonal": ((2, 2, 3), lambda: Diagonal(positive(12, seed=42))),
    "kronecker": ((1, 3, 4), lambda: STRUCTURES["kronecker"]()),
    "kronecker groups": ((3, 3, 4), lambda: STRUCTURES["kronecker groups"]()),
    "kronecker embedding": ((1, 2, 5), lambda: STRUCTURES["kronecker embedding"]()),
    "kronecker truncated": ((1, 3, 5), lambda: STRUCTURES["kronecker truncated"]()),
    "per output": ((1, 3, 4), lambda: STRUCTURES["per output"]()),
    "kronecker few rows": ((2, 2, 5), lambda: STRUCTURES["kronecker few rows"]()),
}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {  # of all outputs' covariance [B, K, B, K]
    "joint": lambda Σ: Σ.flatten(2).flatten(0, 1),
    "example": lambda Σ: Σ.diagonal(dim1=0, dim2=2).movedim(-1, 0),
    "marginal": lambda Σ: Σ.flatten(2).flatten(0, 1).diagonal().reshape(Σ.shape[:2]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("positions", [1, 3, 6])  # the last has more pairs than its Jacobian has rows
@pytest.mark.parametrize("cache", [output_covariance.PIECE, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_the_covariance_of_outputs_is_that_of_the_layers_jacobian(
    name: str, cache: int, positions: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several priors at once, and in pieces of any size."""
    monkeypatch.setattr(output_covariance, "PIECE", cache)
    monkeypatch.setattr(output_covariance, "PAIRS", cache)
    (G, O, I), make = LAYERS[name]
    B, K = 5, 2
    a, g = random(G, B, positions, I, seed=43), random(K, G, B, positions, O, seed=44)
    blocks = [make().add_prior(δ) for δ in (0.3, 2.0)]
    J = torch.einsum("kgbto,gbti->bkgoi", g, a).flatten(2).flatten(0, 1)  # [B·K, P]
    found = type(blocks[0]).output_covariances(blocks, a, g, CovarianceForm(form))
    for covariance, block in zip(found, blocks, strict=True):
        Σ = J @ torch.linalg.inv(block.to_dense()) @ J.mT
        torch.testing.assert_close(covariance, FORMS[form](Σ.reshape(B, K, B, K)), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", ["example", "marginal"])
@pytest.mark.parametrize("positions", [1, 3, 6])
@pytest.mark.parametrize("name", ["dense", "kronecker", "kronecker truncated"])
def test_many_priors_share_the_groups_of_eigenvalues(name: str, positions: int, form: str) -> None:
    """The error is a few tenths of a per cent on average; one prior alone stays exact."""
    B, K, O, I, priors = 6, 2, 24, 40, torch.logspace(-3, 3, 13, dtype=F64)

    def factor(d: int, seed: int, k: int | None = None) -> Factor:
        Q = torch.linalg.qr(random(1, d, d, seed=seed))[0]
        values = torch.logspace(-6, 3, d, dtype=F64).unsqueeze(0)
        remainder = None if k is None else values[:, : d - k].mean(-1, keepdim=True)
        return Factor(Q[..., d - (k or d) :], values[:, d - (k or d) :], None, remainder)

    left, right = factor(O, 45), factor(I, 46, 30 if name == "kronecker truncated" else None)
    M = Dense(right.matrix[0]) if name == "dense" else Kronecker(left, right)
    O = 1 if name == "dense" else O
    a = random(1, B, positions, I, seed=47)
    g = random(K, 1, B, positions, O, seed=48)
    blocks = [M.add_prior(δ) for δ in priors]
    exact = type(M).output_covariances(blocks, a, g, CovarianceForm(form))
    close = type(M).output_covariances(blocks, a, g, CovarianceForm(form, approximate=True))
    errors = torch.stack([(c - e).norm() / e.norm() for c, e in zip(close, exact, strict=True)])
    assert 0 < errors.mean() < 0.01
    assert errors.max() < 0.03
    (alone,) = type(M).output_covariances(blocks[5:6], a, g, CovarianceForm(form, approximate=True))
    torch.testing.assert_close(alone, exact[5], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reached", [False, True])
@pytest.mark.parametrize("positions", [1, 6])
@pytest.mark.parametrize("kind", ["all vectors", "frame", "truncated", "refitted", "shifts"])
def test_inputs_that_are_always_zero_are_left_out(kind: str, positions: int, reached: bool) -> None:
    """Also if an input is zero in the data and not in this batch."""
    B, K, O, I, dead = 4, 2, 3, 8, [0, 2, 3, 5, 7]
    X = random(1, 20, I, seed=51)
    X[..., dead] = 0
    right = Factor.of(Gram(X.mT @ X), rank=1 if kind == "truncated" else None, all_vectors=kind != "frame")
    left = Factor.from_matrix(spd(O, seed=52).unsqueeze(0))
    shape = left.values.shape[-1], right.spectrum.shape[-1]
    M: Kronecker = Kronecker(left, right)
    if kind == "refitted":
        M = EKFAC(left, right, refitted=random(1, *shape, seed=53).square())
    if kind == "shifts":
        M = Kronecker(left, right, shift=random(1, *shape, seed=54).square())
    block = M.add_prior(0.3)
    a, g = random(1, B, positions, I, seed=55), random(K, 1, B, positions, O, seed=56)
    a[..., dead[int(reached) :]] = 0
    J = torch.einsum("kgbto,gbti->bkgoi", g, a).flatten(2)
    (found,) = type(block).output_covariances([block], a, g, CovarianceForm("example"))
    torch.testing.assert_close(found, J @ torch.linalg.inv(block.to_dense()) @ J.mT, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["kronecker", "refitted", "groups", "truncated", "dead inputs"])
def test_root_solve_leaves_directions_below_the_prior_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is the symmetric one, and the basis of an eigenspace does not matter."""
    monkeypatch.setattr(kronecker, "NARROW", 1)
    g, O, I = 2 if kind == "groups" else 1, 6, 8
    λ, μ = (torch.logspace(-40, 2, n, dtype=F64).expand(g, n).clone() for n in (O, I))
    λ[:, :4], λ[:, 4], μ[:, 5:7] = 0, 1.6e-14, 3  # two eigenspaces, and one that meets only the largest μ
    Q_G, Q_A = (torch.linalg.qr(random(g, n, n, seed=n))[0] for n in (O, I))
    if kind == "dead inputs":  # the last three
        Q_A = torch.block_diag(torch.eye(3, dtype=F64), torch.linalg.qr(random(5, 5, seed=59))[0])
        Q_A = Q_A.roll(-3, 0).unsqueeze(0)
    turned = [Q_G.clone(), Q_A.clone()]
    for Q, space in zip(turned, (slice(0, 4), slice(5, 7)), strict=True):
        n = space.stop - space.start
        Q[..., space] = Q[..., space] @ torch.linalg.qr(random(n, n, seed=58))[0]

    def block(Q_G: Tensor, Q_A: Tensor) -> Kronecker:
        right = Factor(Q_A[..., 4:], μ[:, 4:], None, μ.new_zeros(g, 1)) if kind == "truncated" else Factor(Q_A, μ)
        if kind == "refitted":
            return EKFAC(Factor(Q_G, λ), right, refitted=λ.unsqueeze(-1) * μ.unsqueeze(-2), shift=0.5)
        return Kronecker(Factor(Q_G, λ), right, shift=0.5)

    M = block(Q_G, Q_A)
    assert M._partial_root is not None
    assert len(M._partial_root.steps) > 1
    assert (M._partial_root.inputs is None) == (kind != "dead inputs")
    values, Q = torch.linalg.eigh(M.to_dense())
    noise = random(3, M.size, seed=57)
    torch.testing.assert_close(M.root_solve(noise), noise @ (Q * values.rsqrt()) @ Q.mT, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(block(*turned).root_solve(noise), M.root_solve(noise), rtol=1e-9, atol=1e-10)


def test_what_draws_in_float32_leave_out_changes_a_standard_deviation_by_less_than_a_thousandth() -> None:
    λ, μ = torch.logspace(-8, 2, 30, dtype=F64).unsqueeze(0), torch.logspace(-6, 2, 40, dtype=F64).unsqueeze(0)
    Q_G, Q_A = (torch.linalg.qr(random(1, n, n, seed=n))[0] for n in (30, 40))
    M = Kronecker(Factor(Q_G, λ), Factor(Q_A, μ), shift=0.5)
    draws = M.to(dtype=torch.float32)
    assert draws._partial_root is not None
    exact, noise = M.values.rsqrt(), random(20, M.size, seed=60)
    change = draws.rotate(draws.root_solve(noise.float())).double() - exact * M.rotate(noise)
    deviations = change.abs() / (exact * M.rotate(noise)).abs().clamp(min=1e-2)
    assert 1e-4 < deviations.median(0).values.max() < 1e-3


def test_the_terms_of_an_inverse_add_up_to_it(M: Structure) -> None:
    """For several priors at once, which share what they have in common."""
    matrices = [M.add_prior(0.3), M.add_prior(2.0), M.add_prior(layer_prior(M))]
    terms = type(M).inverse_terms(matrices)
    if terms is None:
        assert not isinstance(M, LowRank)
        return
    for term, matrix in zip(terms, matrices, strict=True):
        V = term.columns @ term.mix
        inverse = term.scale * torch.linalg.inv(term.diagonal.to_dense()) + term.sign * V @ V.mT
        torch.testing.assert_close(inverse, torch.linalg.inv(matrix.to_dense()), rtol=1e-9, atol=1e-10)
    if isinstance(M, LowRankCovariance):  # a prior changes its columns
        return
    assert terms[0].columns is terms[1].columns
    assert terms[0].diagonal is terms[1].diagonal


def test_matrix_is_symmetric(M: Structure) -> None:
    torch.testing.assert_close(M.to_dense(), M.to_dense().mT)


def test_root_solve_is_by_a_root_of_the_inverse_that_the_matrix_determines(M: Structure) -> None:
    R = M.root_solve(torch.eye(M.size, dtype=F64))
    torch.testing.assert_close(R.mT @ R, torch.linalg.inv(M.to_dense()), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(M.root_solve(vectors(M)), vectors(M) @ R, rtol=1e-9, atol=1e-10)
    if isinstance(M, LowRankCovariance):  # other columns of the same matrix, with their order and signs changed
        turned = LowRankCovariance(M.variances, -M.columns.flip(-1))
        torch.testing.assert_close(turned.root_solve(torch.eye(M.size, dtype=F64)), R, rtol=1e-9, atol=1e-10)
        return
    for block in (block for _, block in M.named_blocks or (("", M),)):
        R = block.root_solve(torch.eye(block.size, dtype=F64))
        # Unique are a triangular root with a positive diagonal, and a symmetric one with positive eigenvalues.
        form, signs = (R.tril(), R.diagonal()) if isinstance(block, Dense) else (R.mT, torch.linalg.eigvalsh(R))
        torch.testing.assert_close(R, form, rtol=1e-9, atol=1e-10)
        assert signs.min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_draws_of_a_full_matrix_take_no_eigendecomposition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    used, original = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: used.append(matrix) or original(matrix))
    rows = random(5, 12, seed=47).to(dtype)  # rank 5
    for δ in (torch.tensor(0.1), torch.linspace(0.1, 0.3, 12)):
        M = Dense(rows.mT @ rows).scale(3.0).add_prior(δ.to(dtype))
        R = M.root_solve(torch.eye(12, dtype=dtype)).double()
        tolerance = 1e-4 if dtype == torch.float32 else 1e-10
        torch.testing.assert_close(R.mT @ R, torch.linalg.inv(M.to_dense().double()), rtol=tolerance, atol=tolerance)
    assert not used


def test_samples_have_the_inverse_as_covariance(M: Structure) -> None:
    n = 20_000
    θ = M.sample(n, torch.Generator().manual_seed(0))
    Σ = torch.linalg.inv(M.to_dense())
    σ = Σ.diagonal().sqrt()
    empirical = θ.mT @ θ / n
    # Var(θ_i θ_j) = Σ_ii Σ_jj + Σ_ij² for a Gaussian; six standard errors for all of at most 66² entries.
    error = ((σ.outer(σ).square() + Σ.square()) / n).sqrt()
    assert ((empirical - Σ).abs() <= 6 * error).all()
    assert (θ.mean(0).abs() <= 6 * σ / n**0.5).all()


def test_sample_is_the_root_applied_to_the_generators_noise(M: Structure) -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(5, M.size, generator=generator, dtype=F64)
    expected = M.root_solve(noise)
    if isinstance(M, LowRankCovariance):  # Maddox et al. 2019, eq. (1)
        z = torch.randn(5, M.rank, generator=generator, dtype=F64)
        expected = noise * M.variances.sqrt() + z @ M.columns.mT
    torch.testing.assert_close(M.sample(5, torch.Generator().manual_seed(3)), expected)


def test_much_noise_depends_on_the_seed_alone_and_is_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PART", 1000)
    M, threads = Diagonal(torch.ones(7_300, dtype=F64)), torch.get_num_threads()
    draws = []
    for n in (1, 3):
        torch.set_num_threads(n)
        with torch.inference_mode(n == 3):
            draws.append(M.sample(2, torch.Generator().manual_seed(5)))
    torch.set_num_threads(threads)
    assert torch.equal(*draws)
    assert M.sample(2).shape == draws[0].shape
    numbers = draws[0].flatten().sort().values  # Kolmogorov–Smirnov at a level of 1e-4
    uniform = 0.5 * (1 + torch.erf(numbers / 2**0.5))
    assert (uniform - torch.linspace(0, 1, len(uniform), dtype=F64)).abs().max() < 2.23 / len(uniform) ** 0.5
    assert len(numbers.unique()) == len(numbers)


def test_sample_with_a_generator_leaves_the_global_random_state(M: Structure) -> None:
    before = torch.get_rng_state()
    first = M.sample(3, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, M.sample(3, torch.Generator().manual_seed(1)))
    assert not torch.equal(first, M.sample(3, torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("n", [0, 1, 4])
def test_sample_gives_as_many_rows_as_asked(M: Structure, n: int) -> None:
    assert M.sample(n, torch.Generator().manual_seed(1)).shape == (n, M.size)


def test_to_changes_the_dtype_of_every_part(M: Structure) -> None:
    P = M.add_prior(torch.tensor(0.5, dtype=F64)).to("cpu", torch.float32)
    for result in (P.to_dense(), P.solve(vectors(M).float()), P.logdet(), P.sample(1), P.add_prior(0.1).diagonal()):
        assert result.dtype == torch.float32
    assert P.dtype == torch.float32
    torch.testing.assert_close(P.to_dense().double(), M.add_prior(0.5).to_dense(), rtol=1e-5, atol=1e-5)


def test_operations_leave_the_structure_as_it_was(M: Structure) -> None:
    before = M.to_dense().clone()
    M.add_prior(1.0), M.scale(3.0), M + like(M), M.solve(vectors(M)), M.sample(2), M.logdet()
    assert torch.equal(M.to_dense(), before)


def test_logdet_and_solve_are_differentiable_in_the_prior(M: Structure) -> None:
    v = vectors(M)[0, :1]
    layers = layer_prior(M)
    values = layers.unique()
    index = torch.searchsorted(values, layers)

    def both(δ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        P = M.add_prior(δ)
        return P.logdet(), P.solve(v), P.inverse_quadratic(v)

    scalar = torch.tensor(0.6, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(both, (scalar,))
    assert torch.autograd.gradcheck(lambda δ: both(δ[index]), (values.requires_grad_(),))


def test_logdet_is_differentiable_in_the_scale(M: Structure) -> None:
    factor = torch.tensor(1.3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: M.scale(c).add_prior(0.4).logdet(), (factor,))


def test_gradient_in_the_prior_survives_an_earlier_solve_without_one(M: Structure) -> None:
    """What a structure remembers between calls must not cut the graph."""
    δ = torch.tensor(0.6, dtype=F64, requires_grad=True)
    P = M.add_prior(δ)
    with torch.no_grad():
        P.solve(vectors(M)), P.sample(1, torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(P.solve(vectors(M)).sum(), δ)
    fresh = M.add_prior(δ)
    for _ in range(2):  # nor belong to a graph that the first gradient has used up
        torch.testing.assert_close(gradient, torch.autograd.grad(fresh.solve(vectors(M)).sum(), δ)[0])
    with torch.no_grad():
        fresh.root_solve(vectors(M))
    first, second = (torch.autograd.grad(fresh.root_solve(vectors(M)).sum(), δ)[0] for _ in range(2))
    torch.testing.assert_close(first, second)
    assert first != 0


def test_vectors_are_differentiable_after_use_in_inference_mode(M: Structure) -> None:
    with torch.inference_mode():
        M.solve(vectors(M)), M.sample(1, torch.Generator().manual_seed(0))
    v = vectors(M).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(M.solve(v).sum(), v)
    torch.testing.assert_close(gradient, M.solve(torch.ones_like(v)))
    (gradient,) = torch.autograd.grad(M.root_solve(v).sum(), v)
    R = M.root_solve(torch.eye(M.size, dtype=F64))
    torch.testing.assert_close(gradient, R.sum(-1).expand_as(v))


def test_kronecker_is_the_kronecker_product_of_its_factors_per_group() -> None:
    left, right = random(3, 2, 2, seed=41), random(3, 4, 4, seed=42)
    G, A = left @ left.mT, right @ right.mT
    M = Kronecker(Factor.from_matrix(G), Factor.from_matrix(A)).add_prior(0.3)
    expected = torch.block_diag(*(torch.kron(g, a) for g, a in zip(G, A, strict=True))) + 0.3 * torch.eye(24, dtype=F64)
    torch.testing.assert_close(M.to_dense(), expected)


def test_kronecker_damping_is_the_product_of_damped_factors() -> None:
    left, right = random(1, 2, 2, seed=43), random(1, 3, 3, seed=44)
    G, A = left @ left.mT, right @ right.mT
    M = Kronecker(Factor.from_matrix(G), Factor.from_matrix(A))
    for split in (1.0, 2.5):
        expected = torch.kron(
            G[0] / split + 0.2 * torch.eye(2, dtype=F64), A[0] * split + 0.2 * torch.eye(3, dtype=F64)
        )
        torch.testing.assert_close(M.add_damping(torch.tensor(0.04, dtype=F64), split).to_dense(), expected)


def test_block_diagonal_puts_every_block_to_its_places() -> None:
    M = STRUCTURES["block diagonal"]()
    assert isinstance(M, BlockDiagonal)
    expected = torch.zeros(M.size, M.size, dtype=F64)
    # Row o of a Linear is W[o, :], b[o]; of a transposed convolution W[:, o, :], b[o]; of an embedding E[:, o].
    rows = {
        "linear": [p for o in range(2) for p in [*(40 + 3 * o + i for i in range(3)), o]],
        "transposed": [
            p
            for g in range(2)
            for o in range(2)
            for p in [*(2 + 12 * g + 6 * c + 3 * o + k for c in range(2) for k in range(3)), 62 + 2 * g + o]
        ],
        "embedding": [46 + 2 * token + d for d in range(2) for token in range(5)],
        "dense": [56, 57, 58, 26, 27, 28, 29],
        "diagonal": [*range(30, 40), 59, 60, 61],
    }
    for name, block in zip(M.names, M.blocks, strict=True):
        here = torch.tensor(rows[name])
        expected[here.unsqueeze(-1), here] = block.to_dense()
    torch.testing.assert_close(M.to_dense(), expected)


def graded(d: int, scale: float) -> Tensor:
    """The second moment of inputs of which one, away from zero, is `scale` times the others.  # [1, d, d]"""
    x = random(5 * d, d, seed=46)
    x[:, 7] = scale * (x[:, 7] + 1)
    return (x.mT @ x).unsqueeze(0) / len(x)


def test_factor_of_badly_scaled_inputs_keeps_its_small_eigenvalues_in_float32() -> None:
    A = graded(20, scale=3000).float()
    factor = Factor.from_matrix(A)
    expected = torch.linalg.eigvalsh(A.double())
    assert factor.values.dtype == factor.vectors.dtype == torch.float32
    torch.testing.assert_close(factor.values.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scale", "mean", "wider", "dtype"),
    [(1.0, 0.0, 30, torch.float32), (3000.0, 0.0, 10, F64), (1.0, 50.0, 30, F64), (1.0, 50.0, 10, torch.float32)],
)
def test_wide_factors_are_decomposed_in_float64_where_float32_would_lose_something(
    scale: float, mean: float, wider: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of inputs of very different sizes; of inputs with a large mean unless that would take very long."""
    used, original = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: used.append(matrix.dtype) or original(matrix))
    monkeypatch.setattr(float64, "WIDE", 10)
    monkeypatch.setattr(float64, "VERY_WIDE", wider)
    A = torch.nn.functional.pad((graded(20, scale) + mean).float(), (0, 1, 0, 1))  # and a dead unit
    values = Factor.from_matrix(A).values
    assert used == [dtype]
    torch.testing.assert_close(values.double(), torch.linalg.eigvalsh(A.double()), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("many", [False, True], ids=["one prior", "a prior per parameter"])
def test_rounding_of_a_float32_matrix_does_not_count_in_any_operation(many: bool) -> None:
    rows = 100 * random(3, 12, seed=47)
    H = (rows.mT @ rows).float()  # rank 3, with eigenvalues around −1e-3 and 1e-3 where there should be zeros
    λ, Q = torch.linalg.eigh(H.double())
    assert λ[0] < -1e-4
    assert λ[8] > 1e-4
    δ = torch.linspace(1e-5, 3e-5, 12) if many else torch.tensor(1e-5)
    P = (Q * λ.index_fill(0, torch.arange(9), 0)) @ Q.mT + torch.diag(δ.double().expand(12))
    Σ, M = torch.linalg.inv(P), Dense(H).add_prior(δ)
    close = {"rtol": 1e-4, "atol": 1e-4 * float(Σ.abs().max())}
    torch.testing.assert_close(M.logdet().double(), torch.logdet(P), rtol=1e-5, atol=0)
    torch.testing.assert_close(M.inverse_diagonal().double(), Σ.diagonal(), **close)
    torch.testing.assert_close(M.solve(torch.eye(12)).double(), Σ, **close)
    root = M.root_solve(torch.eye(12)).double()
    torch.testing.assert_close(root.mT @ root, Σ, **close)
    doubled = Dense(H).scale(2.0).add_prior(2 * δ)
    torch.testing.assert_close(doubled.logdet().double(), torch.logdet(2 * P), rtol=1e-5, atol=0)


@pytest.mark.parametrize("many", [False, True], ids=["one prior", "a prior per parameter"])
@pytest.mark.parametrize("largest", [2, 3, 4, 5])
def test_draws_of_a_float32_matrix_have_the_covariance_of_solve_whatever_the_prior(largest: int, many: bool) -> None:
    """From priors beside which rounding is nothing to those that are all but lost in it."""
    x = random(20, 60, seed=48) * torch.logspace(0, largest, 60, dtype=F64)
    for δ in (1e2, 1.0, 1e-3, 1e-6):
        if many and 10 ** (2 * largest) / δ > 1e12:
            continue  # beyond a Cholesky factor in float64
        prior = torch.linspace(δ, 2 * δ, 60) if many else torch.tensor(δ)
        M = Dense((x.mT @ x).float()).add_prior(prior)
        R, Σ = M.root_solve(torch.eye(60)).double(), M.solve(torch.eye(60)).double()
        σ = Σ.diagonal().abs().sqrt()
        torch.testing.assert_close(R.mT @ R / σ.outer(σ), Σ / σ.outer(σ), rtol=0, atol=5e-3)


def test_singular_matrices_have_log_determinant_minus_infinity() -> None:
    rows = random(2, 4, seed=45)
    assert Dense(rows.mT @ rows - 1e-15 * torch.eye(4, dtype=F64)).logdet() == -torch.inf
    assert Dense(torch.zeros(3, 3, dtype=F64)).logdet() == -torch.inf
    assert Diagonal(torch.tensor([1.0, 0.0], dtype=F64)).logdet() == -torch.inf
    assert STRUCTURES["kronecker embedding"]().add_prior(-0.4).logdet() == -torch.inf


@pytest.mark.parametrize("n", [2, 12])
@pytest.mark.parametrize("first", ["rows", "dense"])
def test_data_are_added_to_a_full_matrix_on_either_side(first: str, n: int) -> None:
    """To few rows as to a dense matrix; the sum is dense once the rows are as many as the weights."""
    R, S = random(3, 9, seed=61), random(n, 9, seed=62)
    old = RowSpace.from_rows(R) if first == "rows" else Dense(R.mT @ R)
    total = old.add_data(RowSpace.from_rows(S))
    torch.testing.assert_close(total.to_dense(), R.mT @ R + S.mT @ S, rtol=1e-10, atol=1e-10)
    assert type(total) is (RowSpace if first == "rows" and n == 2 else Dense)


def test_a_row_space_has_the_eigenvalues_that_float32_determines() -> None:
    """Those of a matrix on the larger side would be lost below 1e-7 of the largest; a duplicate row adds none."""
    rows = torch.linalg.qr(random(40, 6, seed=63)).Q.mT * torch.logspace(0, -5, 6, dtype=F64).unsqueeze(1)
    rows = torch.linalg.qr(random(6, 6, seed=64)).Q @ rows
    M = RowSpace.from_rows(torch.cat([rows, rows[:1]]).float())
    exact = torch.linalg.svdvals(torch.cat([rows, rows[:1]])).square()[:6]
    assert M.rank == 6
    torch.testing.assert_close(M.values.double(), exact, rtol=1e-2, atol=0)
