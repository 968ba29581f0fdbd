"""A ResNet-18 on 5,120 CIFAR-10 images: wide factors, most of whose inputs are padding at the last 1×1 feature maps."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_bayes import fit_laplace
from lightning_bayes.structures import BlockDiagonal, Kronecker

pytestmark = pytest.mark.slow
IMAGES, STEPS = 5120, 20


def test_the_default_fit_of_a_trained_resnet_decomposes_every_factor(
    data_folder: Path,
) -> None:
    models = pytest.importorskip("torchvision.models")
    if not (data_folder / "cifar10").exists():
        pytest.skip("there is no cifar10 in the folder that LIGHTNING_BAYES_DATA names")
    from recipes.papers.image_data import read_images

    train = read_images("CIFAR10", data_folder, n_train=IMAGES, n_test=64).train
    network = models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for _, (x, y) in zip(range(STEPS), DataLoader(train, 128), strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    posterior = fit_laplace(network, DataLoader(train, 128), structure="kron")
    assert posterior.n_data == IMAGES
    H = posterior.curvature.structure
    assert isinstance(H, BlockDiagonal)
    factors = [factor for block in H.blocks if isinstance(block, Kronecker) for factor in (block.left, block.right)]
    assert len(factors) == 2 * 21  # 20 convolutions and the last layer
    assert max(factor.size for factor in factors) == 512 * 9
    for factor in factors:
        assert factor.values.isfinite().all()
        assert (factor.values >= 0).all()
    assert 0 < posterior.effective_parameters < posterior.curvature.subset.size
    x, _ = next(iter(DataLoader(train, 8)))
    variances = posterior.functional(x)[1].diagonal(dim1=1, dim2=2)
    assert (variances > 0).all()
