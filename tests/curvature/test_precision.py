"""float32 and bfloat16 networks: accumulated in at least float32, and close to the float64 result."""

import copy

import pytest
import torch
from networks import CASES, Case
from torch import Tensor, nn

from lightning_bayes.curvature import fit_curvature
from lightning_bayes.likelihoods import Categorical
from lightning_bayes.structures import Kronecker

NETWORKS = [
    "mlp",
    "deep_cnn",
    "transformer",
    "embedding",
    "bare_parameters",
    "norm_batch_2d",
    "transposed_2d_all_options",
]


def cast(case: Case, dtype: torch.dtype) -> Case:
    def move(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    return Case(copy.deepcopy(case.network).to(dtype), move(case.x), case.y, case.likelihood)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("curvature", ["ggn", "fisher_mc", "empirical_fisher"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("name", NETWORKS)
def test_narrow_networks_come_close_to_float64(
    name: str, structure: str, curvature: str, dtype: torch.dtype, error: float
) -> None:
    case = CASES[name]()
    narrow = cast(case, dtype)
    wide = cast(narrow, torch.float64)  # the rounded weights, so that only the computation differs
    found = fit_curvature(narrow.network, narrow.loader(), case.likelihood, structure, curvature=curvature).structure
    exact = fit_curvature(wide.network, wide.loader(), case.likelihood, structure, curvature=curvature).structure
    assert found.dtype == torch.float32
    assert exact.dtype == torch.float64
    if curvature == "fisher_mc" and dtype == torch.bfloat16:
        return  # a label may fall on the other side of a rounded threshold
    difference = found.to_dense().double() - exact.to_dense()
    assert difference.norm() < error * exact.to_dense().norm()


INPUT_FACTORS = {
    "linear": (nn.Linear(5, 2), (400, 5)),
    "convolution": (nn.Conv2d(2, 2, 3, padding=1), (40, 2, 6, 5)),
    "strided convolution": (nn.Conv2d(2, 2, 3, stride=2, padding=1), (40, 2, 6, 5)),
    "transposed convolution": (nn.ConvTranspose1d(2, 2, 3), (40, 2, 6)),
}


@pytest.mark.parametrize("name", INPUT_FACTORS)
def test_bfloat16_inputs_are_accumulated_in_float32(name: str) -> None:
    """The first layer's inputs are the data, exact in bfloat16: their second moment must not be rounded to it."""
    layer, shape = INPUT_FACTORS[name]
    network = nn.Sequential(copy.deepcopy(layer), nn.Tanh(), Mean(), nn.Linear(2, 2)).bfloat16()
    x, y = (torch.randn(shape) + 1).bfloat16(), torch.randint(2, shape[:1])
    factors = []
    for net, data in ((network, x), (copy.deepcopy(network).double(), x.double())):
        case = Case(net, data, y, Categorical())
        block = fit_curvature(net, case.loader(shape[0] // 2, shape[0] // 2)).structure.blocks[0]
        assert isinstance(block, Kronecker)
        Q, λ = block.right.vectors[0].double(), block.right.values[0].double()
        factors.append(Q @ torch.diag(λ) @ Q.mT)
    assert (factors[0] - factors[1]).norm() < 3e-6 * factors[1].norm()


class Mean(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.flatten(2).mean(2) if h.ndim > 2 else h
