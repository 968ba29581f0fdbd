"""The empirical Fisher by its definition; the Monte-Carlo Fisher by what it converges to, and how fast."""

import oracles
import pytest
import torch
from helpers.options import structure_of
from networks import CASES
from oracles import close
from torch import Tensor

from lightning_bayes import FisherMC
from lightning_bayes.network import processes

LIKELIHOODS = [
    "mlp",
    "bernoulli_one_logit",
    "bernoulli_labels",
    "gaussian_noise_per_output",
    "heteroscedastic",
    "segmentation",
]


@pytest.mark.parametrize("name", CASES)
def test_empirical_fisher_is_the_sum_of_outer_products_of_gradients(name: str) -> None:
    case = CASES[name]()
    expected, log_likelihood = oracles.empirical_fisher(case)
    fitted = oracles.check_exact(case, expected, curvature="empirical_fisher")
    close(fitted.log_likelihood, log_likelihood)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "name", ["mlp", "deep_cnn", "linear_on_sequences", "embedding", "conv_2d_groups", "segmentation", "used_twice"]
)
def test_empirical_kronecker_blocks_are_kfac_of_the_gradients(name: str, sharing: str) -> None:
    case = CASES[name]()
    structure = structure_of("kron", weight_sharing=sharing)
    fitted = case.fit(structure, curvature="empirical_fisher")
    H = fitted.structure.to_dense()
    for places, block in oracles.kfac(case, sharing, "empirical_fisher").values():
        close(H[places.unsqueeze(-1), places], block)


@pytest.mark.parametrize(
    ("name", "structure"), [*((name, "full") for name in LIKELIHOODS), ("deep_cnn", "diag"), ("deep_cnn", "kron")]
)
def test_monte_carlo_fisher_converges_to_the_ggn_like_one_over_root_samples(name: str, structure: str) -> None:
    case = CASES[name]()
    exact = case.fit(structure).structure.to_dense()

    def errors(samples: int, seeds: int) -> Tensor:
        fits = [case.fit(structure, curvature=FisherMC(samples=samples), seed=s) for s in range(seeds)]
        return torch.stack([fitted.structure.to_dense() - exact for fitted in fits]) / exact.norm()

    seeds = 10
    few, many = errors(1, seeds), errors(64, seeds)
    variance_few, variance_many = (e.square().sum((1, 2)).mean() for e in (few, many))
    # S times the mean square error is the same for any S. Even if all of the error lay in one direction, an F-ratio
    # with (10, 10) degrees of freedom would leave a factor of eight once in a thousand times.
    assert 64 / 8 < variance_few / variance_many < 64 * 8
    # No bias: the mean of 10 estimates has a tenth of the variance; twelve times that is 3.5 standard deviations.
    for e, variance in ((few, variance_few), (many, variance_many)):
        assert e.mean(0).square().sum() < 12 * variance / seeds


def test_monte_carlo_labels_belong_to_the_seed_and_not_to_the_global_generator() -> None:
    case = CASES["mlp"]()

    def fit(seed: int) -> Tensor:
        return case.fit("full", curvature="fisher_mc", seed=seed).structure.to_dense()

    first = fit(1)
    torch.manual_seed(1234)
    assert torch.equal(fit(1), first)
    assert not torch.equal(fit(2), first)


def test_monte_carlo_fisher_averages_over_its_samples() -> None:
    """With S labels it is the mean of S outer products: of the same expected size for any S."""
    case = CASES["gaussian_noise_per_output"]()
    one = case.fit("full", curvature=FisherMC(samples=400))
    exact = case.fit("full")
    ratio = one.structure.diagonal().sum() / exact.structure.diagonal().sum()
    assert abs(ratio - 1) < 6 * (2 / (400 * len(case.y))) ** 0.5 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_uniform_and_independent(dtype: torch.dtype) -> None:
    u = processes.uniforms(0, 0, torch.arange(5000), torch.Size([4]), dtype).double()
    assert u.shape == (5000, 4)
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    counts = torch.histc(u, bins=20, min=0, max=1)
    χ2 = ((counts - 1000) ** 2 / 1000).sum()
    assert χ2 < 60  # 19 degrees of freedom: p = 4e-6
    other = [
        processes.uniforms(0, 1, torch.arange(5000), torch.Size([4]), dtype),
        processes.uniforms(1, 0, torch.arange(5000), torch.Size([4]), dtype),
        processes.uniforms(0, 0, torch.arange(1, 5001), torch.Size([4]), dtype),
        u.roll(1, dims=1),
    ]
    for v in other:
        correlation = torch.corrcoef(torch.stack([u.flatten(), v.double().flatten()]))[0, 1]
        assert abs(correlation) < 5 / 20000**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_never_round_to_zero_or_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, -1):  # all zeros, all ones
        monkeypatch.setattr(processes, "_mix", lambda z, bits=bits: torch.full_like(z, bits))
        u = processes.uniforms(0, 0, torch.arange(1), torch.Size([2]), dtype)
        assert ((u > 0) & (u < 1)).all()
