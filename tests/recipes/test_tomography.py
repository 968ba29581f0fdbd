"""The parts of the tomography recipe: its operator, its deep image prior, and its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from helpers.recipes import recipe_imports
from helpers.tensors import real, seeded
from torch import Tensor
from torch.nn import functional as F

F64 = torch.float64


@pytest.fixture(autouse=True)
def recipes_on_path() -> Iterator[None]:
    with recipe_imports():
        yield


@pytest.mark.parametrize("size", [8, 9])
def test_a_view_is_the_turned_image_summed_along_the_beam(size: int) -> None:
    from radon import radon_matrix

    angles, centre = 5, size // 2
    image = torch.rand(size, size, generator=seeded(), dtype=F64)
    seen = (radon_matrix(size, angles).double() @ image.flatten()).reshape(angles, size)
    steps = torch.arange(size, dtype=F64) - centre
    for view in range(angles):
        c, s = math.cos(math.pi * view / angles), math.sin(math.pi * view / angles)
        across, down = c * steps + s * steps[:, None] + centre, c * steps[:, None] - s * steps + centre
        grid = torch.stack([across, down], -1) / (size - 1) * 2 - 1
        turned = F.grid_sample(image[None, None], grid[None], align_corners=True)[0, 0]
        torch.testing.assert_close(seen[view], turned.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_it_is_scikit_images_transform() -> None:
    transform = pytest.importorskip("skimage.transform", reason="scikit-image is installed by `make test-slow`")
    from radon import ellipses, radon_matrix

    image = ellipses(28, seed=1).double()
    place = torch.arange(28) - 14
    image[place.square() + place.square()[:, None] > 14**2] = 0
    expected = transform.radon(image.numpy(), theta=[180 * view / 12 for view in range(12)], circle=True)
    seen = (radon_matrix(28, 12).double() @ image.flatten()).reshape(12, 28).T
    torch.testing.assert_close(seen, torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_scores_are_those_of_a_gaussian() -> None:
    from views import score

    g = seeded()
    image, mean = torch.rand(2, 3, 3, generator=g, dtype=F64)
    root = torch.randn(9, 9, generator=g, dtype=F64)
    covariance, stable = root @ root.T, 0.1
    scores = score(image, mean, covariance, stable)
    S = covariance + stable * torch.eye(9, dtype=F64)
    joint = torch.distributions.MultivariateNormal(mean.flatten(), S).log_prob(image.flatten())
    alone = torch.distributions.Normal(mean.flatten(), S.diagonal().sqrt()).log_prob(image.flatten())
    assert scores["joint NLL"] == pytest.approx(-float(joint) / 9)
    assert scores["NLL"] == pytest.approx(-float(alone.mean()))
    assert scores["PSNR"] == pytest.approx(-10 * math.log10(float((image - mean).square().mean())))


def test_one_sigma_knows_the_other_images_alone() -> None:
    from views import one_sigma

    rows = [{"PSNR": -10 * math.log10(mse), "stabiliser": 0.0} for mse in (0.01, 0.04, 0.09)]
    first = one_sigma(rows)[0]
    variance = (0.04 + 0.09) / 2
    assert first["NLL"] == pytest.approx(0.5 * (0.01 / variance + math.log(2 * math.pi * variance)))


def test_the_stabiliser_is_the_mean_of_the_pseudo_inverse() -> None:
    from views import stabiliser

    A: Tensor = real(6, 9)
    expected = 0.3**2 * float(torch.linalg.pinv(A.T @ A, rtol=1e-10).diagonal().mean())
    assert stabiliser(A.to_sparse_coo(), 0.3) == pytest.approx(expected)


def test_the_networks_image_explains_the_measurements_better_with_training() -> None:
    from deep_image_prior import reconstruct
    from radon import ellipses, radon_matrix

    A, image = radon_matrix(10, 6), ellipses(10, seed=0)
    y = A @ image.flatten()
    errors = []
    for steps in (1, 60):
        network, x = reconstruct(A, y, 0, steps, smoothness=0.0, width=8)
        with torch.no_grad():
            errors.append(float((y - A @ network(x).flatten()).square().mean()))
    assert errors[1] < 0.2 * errors[0]
