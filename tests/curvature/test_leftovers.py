"""Parameters without a layer rule: exact also where PyTorch's vmap is silently wrong, and without a graph that grows
with the data."""

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
from networks import CASES, Case, Wired, real
from oracles import close
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.curvature import blocks as input_sum
from lightning_bayes.curvature import choose_subset, fit_curvature
from lightning_bayes.curvature.diagonal import BatchDiagonal
from lightning_bayes.likelihoods import Categorical, Gaussian


def prelu(slopes: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.PReLU(slopes), nn.Linear(4, 4), nn.PReLU(slopes), nn.Linear(4, 3))


def prelu_image() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv1d(1, 2, 2),
        nn.PReLU(2),
        nn.Flatten(),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    )


def prototypes() -> nn.Module:
    parts = {"inner": nn.Linear(3, 4), "centres": nn.Parameter(torch.randn(3, 4))}
    return Wired(lambda s, x: -torch.cdist(s.inner(x), s.centres), **parts)


WRONG_UNDER_VMAP: dict[str, Callable[[], nn.Module]] = {
    "prelu": prelu,
    "prelu_by_channel": lambda: prelu(4),
    "prelu_image": prelu_image,
    "cdist": prototypes,
}


@pytest.mark.parametrize("curvature", ["ggn", "empirical_fisher"])  # three columns, and one
@pytest.mark.parametrize("name", WRONG_UNDER_VMAP)
def test_curvature_is_exact_where_vmap_is_wrong(name: str, curvature: str) -> None:
    network = WRONG_UNDER_VMAP[name]().double()
    for B in (2, 3, 4, 5):  # the number of columns among them
        case = Case(network, real(B, 3), torch.randint(3, (B,)), Categorical())
        H = oracles.ggn(case) if curvature == "ggn" else oracles.empirical_fisher(case)[0]
        oracles.check_exact(case, H, curvature=curvature)
        if curvature == "ggn":
            covariance = case.laplace(structure="full").functional(case.x)[1]
            close(covariance, oracles.covariances(network, case.x, B, H + torch.eye(len(H), dtype=H.dtype)))


@pytest.mark.parametrize("mode", ["exact", "auto"])
@pytest.mark.parametrize("name", WRONG_UNDER_VMAP)
@pytest.mark.parametrize("bottleneck", [False, True])
def test_online_diagonal_is_exact_where_vmap_is_wrong(name: str, mode: str, bottleneck: bool) -> None:
    network = WRONG_UNDER_VMAP[name]().double()
    if bottleneck:  # where columns are merged
        network = nn.Sequential(network, nn.Linear(3, 1), nn.PReLU(), nn.Linear(1, 30)).double()
    outputs = 30 if bottleneck else 3
    for B in (3, 5, outputs):
        case = Case(network, real(B, 3), real(B, outputs), Gaussian(0.5))
        found = BatchDiagonal(network, choose_subset(network, case.x, "all"), case.likelihood, mode)(case.x, case.y)
        torch.testing.assert_close(found, oracles.ggn(case).diagonal(), rtol=1e-9, atol=1e-9)


def test_loop_instead_of_vmap_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    network = prelu().double()
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        fit_curvature(network, [(real(3, 3), torch.tensor([0, 1, 2]))] * 3, curvature="empirical_fisher")
    assert sum("vmap gives wrong gradients" in message for message in caplog.messages) == 1


def every_kind(recurrent: bool) -> nn.Module:
    """An embedding, a convolution, a norm, linear layers on positions and on examples, and parameters without a rule,
    with vmap or without."""

    def forward(s: Any, tokens: Tensor) -> Tensor:
        h = s.norm(s.conv(s.table(tokens).mT)).tanh().mT
        h = s.inner(h) * s.scale
        return s.head((s.cell(h)[0] if recurrent else h).mean(1))

    return Wired(
        forward,
        table=nn.Embedding(6, 4, padding_idx=0),
        conv=nn.Conv1d(4, 4, 2, groups=2),
        norm=nn.GroupNorm(2, 4),
        inner=nn.Linear(4, 3),
        scale=nn.Parameter(torch.rand(3)),
        cell=nn.LSTM(3, 3, batch_first=True),
        head=nn.Linear(3, 3),
    ).double()


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_memory_is_flat_over_batches(structure: str, recurrent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same live tensors, and no longer graphs behind them, after 60 batches as after 40, for every kind of block. A
    full matrix replaces the rows of the first batches."""
    monkeypatch.setattr(input_sum, "FULL", 1)  # no inputs of small batches are kept for a larger product
    x, y = torch.randint(6, (3, 4)), torch.tensor([0, 1, 2])
    live = []

    def loader() -> Iterator[Any]:
        for n in range(61):
            if n in (40, 60):
                live.append(live_tensors())
            yield x, y

    network = every_kind(recurrent)
    gc.collect()
    gc.freeze()  # what lives now is left out
    try:
        fitted = fit_curvature(network, loader(), structure=structure)
    finally:
        gc.unfreeze()
    assert live[0] == live[1]
    assert live[0][0] > 0
    assert not fitted.structure.diagonal().requires_grad


def live_tensors() -> tuple[int, int, int]:
    """Their number, the bytes behind them, and the operations in their graphs."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors), sum(_graph_size(t) for t in tensors)


def _graph_size(t: Tensor) -> int:
    seen, open_nodes = set(), [t.grad_fn] if t.grad_fn is not None else []
    while open_nodes:
        node = open_nodes.pop()
        if node not in seen:
            seen.add(node)
            open_nodes += [n for n, _ in node.next_functions if n is not None]
    return len(seen)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("name", ["lstm", "bare_parameters", "norm_layer"])
def test_posterior_has_no_graph_and_can_be_copied(name: str, structure: str) -> None:
    case = CASES[name]()
    posterior = case.laplace(2, 2, structure=structure)
    assert not posterior.log_marginal_likelihood().requires_grad
    expected = posterior.functional(case.x)
    for found in (copy.deepcopy(posterior), posterior):
        torch.testing.assert_close(found.functional(case.x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_tensors_that_are_stored_transposed_change_nothing(structure: str) -> None:
    """Parameters and buffers in another order of memory, as some weight loaders leave them."""
    plain = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 2), nn.Flatten()
    ).double()
    network = nn.Sequential(plain, Wired(lambda s, x: x @ s.w + s.b, w=nn.Parameter(real(2, 3)), b=real(3)))
    network[1].register_buffer("table", real(2, 3))
    strided = copy.deepcopy(network)
    for module in strided.modules():
        for name, t in [*module._parameters.items(), *module._buffers.items()]:
            if t is not None and t.ndim > 1:
                order = list(reversed(range(t.ndim)))
                t.data = t.data.permute(order).contiguous().permute(order)
                assert not getattr(module, name).is_contiguous()
    x, y = real(5, 3), torch.tensor([0, 1, 2, 1, 0])
    expected, found = (fit_laplace(n.eval(), [(x, y)], structure=structure) for n in (network, strided))
    close(found.precision.to_dense(), expected.precision.to_dense())
    close(found.functional(x), expected.functional(x))
