"""Where PyTorch has no rule, the slow path is exact and logged once, with the operator's name; out of memory is never
taken for a missing rule."""

import logging
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from helpers.autograd_functions import Cubed, Numpy
from networks import Case, Wired, real
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_bayes import fit_laplace
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.curvature.tape import Op
from lightning_bayes.likelihoods import Categorical, Gaussian
from lightning_bayes.network import inputs
from lightning_bayes.predictive.draws import sample_functions

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def custom(function: type[torch.autograd.Function]) -> nn.Module:
    return Wired(
        lambda s, x: s.outer(function.apply(s.inner(x))), inner=nn.Linear(3, 4), outer=nn.Linear(4, 3)
    ).double()


def case(network: nn.Module, B: int = 4) -> Case:
    return Case(network, real(B, 3), torch.randint(3, (B,)), Categorical())


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "exact but slow" in message]


def test_a_backward_pass_that_cannot_be_batched(caplog: pytest.LogCaptureFixture) -> None:
    example = case(custom(Numpy))
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        for _ in range(2):
            H = example.fit("full", 2, 2).structure.to_dense()
    (message,) = messages(caplog)
    assert "with Numpy" in message
    torch.testing.assert_close(H, oracles.ggn(example), **TIGHT)


def test_a_recurrent_layer_without_vmap(caplog: pytest.LogCaptureFixture) -> None:
    network = Wired(
        lambda s, x: s.head(s.cell(x.unsqueeze(1))[0].mean(1)),
        cell=nn.LSTM(3, 2, batch_first=True),
        head=nn.Linear(2, 3),
    ).double()
    example = case(network)
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        for _ in range(2):
            H = fit_curvature(network, example.loader(2, 2), structure="full").structure.to_dense()
    (message,) = messages(caplog)
    assert "cell.weight_ih_l0" in message
    torch.testing.assert_close(H, oracles.ggn(example), **TIGHT)


def make_op(function: Callable[[Tensor], Tensor]) -> Op:
    x = real(2, 3).requires_grad_()
    return Op(function, (x,), {}, "doubled", [function(x)], [0], [x], [], where=" in body (Body)")


def test_columns_through_an_operation_that_cannot_be_batched(caplog: pytest.LogCaptureFixture) -> None:
    op, S = make_op(Numpy.apply), real(5, 2, 3)
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        for _ in range(2):
            (columns,) = op.pull_many([S], op.tracked)
    (message,) = messages(caplog)
    assert "through doubled in body (Body)" in message
    torch.testing.assert_close(columns, 2 * S)


def test_an_operator_without_forward_mode(caplog: pytest.LogCaptureFixture) -> None:
    posterior = fit_laplace(custom(Cubed), [(real(4, 3), real(4, 3))], Gaussian(0.5), structure="diag")
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        for _ in range(2):
            sample_functions(posterior, real(4, 3), 2)
    (message,) = messages(caplog)
    assert "forward mode" in message
    assert "with Cubed" in message


def raise_out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def raise_out_of_cpu_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried …")


RAISERS = {"accelerator": raise_out_of_memory, "cpu": raise_out_of_cpu_memory}


@pytest.fixture(params=RAISERS)
def raiser(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return RAISERS[request.param]


def only_batched(raiser: Callable[..., Any]) -> Callable[..., Any]:
    plain = torch.autograd.grad
    return lambda *args, **kwargs: (raiser if kwargs.get("is_grads_batched") else plain)(*args, **kwargs)


def test_out_of_memory_in_a_batched_backward_pass(raiser: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    example, op = case(nn.Linear(3, 3).double()), make_op(torch.Tensor.tanh)
    monkeypatch.setattr(torch.autograd, "grad", only_batched(raiser))
    with pytest.raises(RuntimeError, match=r"out of memory|can't allocate"):
        example.fit("kron")
    with pytest.raises(RuntimeError, match=r"out of memory|can't allocate"):
        op.pull_many([real(5, 2, 3)], op.tracked)


def test_out_of_memory_in_vmap(raiser: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    example = case(Wired(lambda s, x: x * s.scale.exp(), scale=nn.Parameter(torch.rand(3, dtype=torch.float64))))
    monkeypatch.setattr("lightning_bayes.jacobian.gradients.vmap", raiser)
    with pytest.raises(RuntimeError, match=r"out of memory|can't allocate"):
        example.fit("kron")


@pytest.mark.parametrize("place", ["jvp", "torch.autograd.grad"])
def test_out_of_memory_in_a_linearised_network(
    place: str, raiser: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior = fit_laplace(custom(Cubed), [(real(4, 3), real(4, 3))], Gaussian(0.5), structure="diag")
    monkeypatch.setattr(f"lightning_bayes.jacobian.products.{place}", raiser)
    with pytest.raises(RuntimeError, match=r"^(CUDA out of memory|.*can't allocate)"):
        sample_functions(posterior, real(4, 3), 2)


def test_out_of_memory_while_asking_which_inputs_belong_to_examples(raiser: Callable[..., Any]) -> None:
    def forward(s: Any, x: Tensor, shared: Tensor) -> Tensor:
        return s.head(x) + shared.sum() if len(x) == 4 else raiser()

    network = Wired(forward, head=nn.Linear(3, 3)).double()
    with pytest.raises(RuntimeError, match=r"out of memory|can't allocate"):
        inputs.take(network, (real(4, 3), real(4, 3)), [0])


def test_a_network_may_refuse_inputs_that_do_not_fit_with_any_error() -> None:
    class Refused(Exception):
        pass

    def forward(s: Any, x: Tensor, table: Tensor) -> Tensor:
        if len(table) != 4:
            raise Refused
        return s.head(x) + table.sum()

    x = (real(4, 3), real(4, 3))
    taken = inputs.take(Wired(forward, head=nn.Linear(3, 3)).double(), x, [0])
    assert [len(leaf) for leaf in pytree.tree_leaves(taken)] == [1, 4]
