"""The user's module is borrowed: after success and after any failure it is as it was, and so is every random state."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from helpers.untouched import assert_same, snapshot
from networks import CASES, Case, Wired, real
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import fit_laplace
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.likelihoods import Categorical, LikelihoodError
from lightning_bayes.network import DataError
from lightning_bayes.predictive.draws import sample_functions

STRUCTURES = ["full", "diag", "kron", "ekfac", "lowrank"]
SUBSETS: list[Any] = ["all", "last_layer", ["body.weight", "scale"]]


class Network(nn.Module):
    """Batch norm, dropout, a bare parameter, a frozen layer and buffers; fails where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 3)
        self.register_buffer("counter", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.drop(self.norm(self.body(x)))).relu_()
        if (x == 7).any():
            raise RuntimeError("the network gave up")
        return self.head(h * self.scale)


def make() -> Network:
    network = Network().double()
    network.norm.running_mean.normal_()
    network.train()
    network.norm.eval()
    network.frozen.eval()
    for p in network.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    network.scale.grad = None
    network.head.register_forward_hook(lambda m, args, z: None)
    network.norm.register_full_backward_hook(lambda m, g_in, g_out: None)
    for change in (lambda g: g.clamp(max=0.1), lambda g: 2 * g):
        network.scale.register_hook(change)
    network.body.weight.register_post_accumulate_grad_hook(lambda p: None)
    return network


def data(batches: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(real(4, 3), torch.randint(3, (4,))) for _ in range(batches)]


class Noisy(TensorDataset):
    """Augmentation that draws from all the global generators."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + random.random() + np.random.rand() + torch.rand(()), y  # noqa: NPY002


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_nothing_is_changed_by_success(structure: str, subset: Any) -> None:
    network = make()
    x, y = torch.cat([x for x, _ in data()]), torch.randint(3, (12,))
    loader = DataLoader(Noisy(x, y), batch_size=5, shuffle=True)
    before = snapshot(network)
    curvature = "ggn" if structure in ("ekfac", "lowrank") else "fisher_mc"  # which needs the same order in each pass
    fit_curvature(network, loader, structure=structure, subset=subset, curvature=curvature)
    assert_same(before, snapshot(network))


FAILURES: dict[str, tuple[Callable[[list[Any]], Any], type[Exception], str]] = {
    "network raises": (lambda batches: batches[1][0][2, 1].fill_(7.0), RuntimeError, "the network gave up"),
    "NaN": (lambda batches: batches[1][0][2, 1].fill_(torch.nan), DataError, "batch 1: .*its input has NaN"),
    "label": (lambda batches: batches[1][1][2].fill_(9), LikelihoodError, "target 9"),
    "batch": (lambda batches: batches.insert(1, (*batches.pop(1), None)), DataError, "3 parts"),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS, ids=str)
@pytest.mark.parametrize("failure", FAILURES)
def test_nothing_is_changed_by_a_failure_in_the_second_batch(failure: str, subset: Any, structure: str) -> None:
    spoil, error, message = FAILURES[failure]
    network, batches = make(), data()
    spoil(batches)
    before = snapshot(network)
    with pytest.raises(error, match=message):
        fit_curvature(network, batches, structure=structure, subset=subset)
    assert_same(before, snapshot(network))


@pytest.mark.parametrize("method", ["check", "fisher_root", "log_likelihood_per_example"])
def test_nothing_is_changed_by_a_likelihood_that_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Categorical):
        pass

    def fail(self: Any, *args: Any) -> Any:
        raise ArithmeticError("the likelihood gave up")

    monkeypatch.setattr(Failing, method, fail)
    network, batches = make(), data()
    before = snapshot(network)
    with pytest.raises(ArithmeticError, match="gave up"):
        fit_curvature(network, batches, Failing())
    assert_same(before, snapshot(network))


def test_nothing_is_changed_by_a_loader_that_fails() -> None:
    def loader() -> Iterator[Any]:
        yield data()[0]
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        raise OSError("the disk gave up")

    network = make()
    before = snapshot(network)
    with pytest.raises(OSError, match="gave up"):
        fit_curvature(network, loader())
    assert_same(before, snapshot(network))


@pytest.mark.parametrize("structure", ["ekfac", "lowrank"])
def test_nothing_is_changed_by_a_loader_that_fails_in_the_second_pass(structure: str) -> None:
    batches, passes = data(), []

    class Broken:
        def __iter__(self) -> Iterator[Any]:
            passes.append(1)
            yield batches[0]
            if len(passes) == 2:
                raise OSError("the disk gave up")
            yield from batches[1:]

    network = make()
    before = snapshot(network)
    with pytest.raises(OSError, match="gave up"):
        fit_curvature(network, Broken(), structure=structure)
    assert_same(before, snapshot(network))


def test_nothing_is_changed_by_a_failure_in_the_first_pass() -> None:
    network, batches = make(), data()
    batches[0][0][0, 0] = 7.0
    before = snapshot(network)
    for subset in SUBSETS:
        with pytest.raises(RuntimeError, match="the network gave up"):
            fit_curvature(network, batches, subset=subset)
        assert_same(before, snapshot(network))


@pytest.mark.parametrize("name", ["norm_batch_1d", "norm_batch_2d", "norm_instance_with_statistics"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_batch_norm_is_used_in_eval_mode_and_its_statistics_stay(name: str, structure: str) -> None:
    case = CASES[name]()
    expected = fit_curvature(copy.deepcopy(case.network).eval(), case.loader(), structure=structure)
    case.network.train()
    before = snapshot(case.network)
    found = case.fit(structure)
    assert_same(before, snapshot(case.network))
    assert torch.equal(found.structure.to_dense(), expected.structure.to_dense())


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "parameter": lambda net: net.head.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "module": lambda net: net.act.register_full_backward_hook(lambda m, g_in, g_out: (0 * g_in[0],)),
    "before a module": lambda net: net.head.register_full_backward_pre_hook(lambda m, g_out: (3 * g_out[0],)),
    "every module": lambda net: register_module_full_backward_hook(
        lambda m, g_in, g_out: (2 * g_in[0],) if isinstance(m, nn.Tanh) else None
    ),
    "before every module": lambda net: register_module_full_backward_pre_hook(
        lambda m, g_out: (2 * g_out[0],) if isinstance(m, nn.Tanh) else None
    ),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_hooks_that_change_gradients_change_nothing(structure: str, hook: str) -> None:
    """They belong to the training; the curvature is that of the function."""
    network = Wired(
        lambda s, x: s.head(s.act(s.body(x)) * s.scale),
        body=nn.Linear(3, 4),
        act=nn.Tanh(),
        scale=nn.Parameter(torch.rand(4)),
        head=nn.Linear(4, 3),
    ).double()
    batches = data()
    x = batches[0][0]

    def gradients() -> Any:
        return torch.autograd.grad(network(x.clone().requires_grad_()).sum(), list(network.parameters()))

    plain, covariance = gradients(), fit_laplace(network, batches, structure=structure).functional(x)[1]
    handle = HOOKS[hook](network)
    try:
        before, hooked = snapshot(network), gradients()
        posterior = fit_laplace(network, batches, structure=structure)
        torch.testing.assert_close(posterior.functional(x)[1], covariance)
        assert_same(before, snapshot(network))
        assert_same(hooked, gradients())
        assert not all(torch.equal(g, h) for g, h in zip(plain, hooked, strict=True))
    finally:
        handle.remove()


def test_shuffling_loader_gives_the_same_order_as_without_us() -> None:
    """What comes after in the user's program is not moved by a pass in between."""
    network = make()
    loader = DataLoader(TensorDataset(real(6, 3), torch.randint(3, (6,))), batch_size=2, shuffle=True)
    torch.manual_seed(5)
    expected = [y for _, y in loader]
    torch.manual_seed(5)
    fit_curvature(network, loader, structure="diag")
    assert_same(expected, [y for _, y in loader])


def test_batches_are_not_written_to() -> None:
    network, batches = make(), data()
    copies = copy.deepcopy(batches)
    fit_curvature(network, batches)
    assert_same(copies, batches)


def test_compiled_module_is_untouched() -> None:
    network = torch.compile(Wired(lambda s, x: s.head(x), head=nn.Linear(3, 3)).double(), backend="eager")
    batches, before = data(), snapshot(network)
    fit_curvature(network, batches)
    assert_same(before, snapshot(network))


def test_module_with_two_names_keeps_its_weights() -> None:
    """Which PyTorch's functional calls do not see to; one parameter has no rule and takes such calls."""
    block = nn.Linear(3, 3)
    network = Wired(
        lambda s, x: s.head(s.two(s.one(x).tanh() * s.scale)),
        one=block,
        two=block,
        scale=nn.Parameter(torch.randn(3)),
        head=nn.Linear(3, 3),
    ).double()
    before = [*network.parameters()]
    x, y = real(4, 3), torch.tensor([0, 1, 2, 0])
    posterior = fit_laplace(network, [(x, y)], structure="full")
    torch.testing.assert_close(
        posterior.curvature.structure.to_dense(), oracles.ggn(Case(network, x, y, Categorical()))
    )
    posterior.predict(x)
    for linearised in (True, False):
        sample_functions(posterior, x, 2, linearised=linearised)
    assert all(p is q for p, q in zip(network.parameters(), before, strict=True))
