"""The diagonal that is taken layer by layer, on a network that is whole: there it must be the ordinary one.

With sharded weights it runs in `tests/callbacks/test_fsdp_laplace.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.networks import Wired
from helpers.options import estimate_of
from helpers.synchronisation import NoSynchronisation
from torch import Tensor, nn

from lightning_bayes import Categorical, Gaussian
from lightning_bayes.curvature import fit_curvature
from lightning_bayes.curvature.sharded_diagonal import ShardedDiagonalSum, check_layers
from lightning_bayes.likelihoods import Likelihood, LikelihoodError
from lightning_bayes.network import Processes
from lightning_bayes.network.errors import CurvatureError

SIZES = (5, 1, 4)  # of batches


class Tokens(nn.Module):
    """An embedding, whose tokens repeat, and a linear layer that is shared over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 4, padding_idx=0), nn.LayerNorm(4)
        self.mix, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.norm(self.words(ids)))).mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    net[2].requires_grad_(False)
    net[4].bias.requires_grad_(False)
    return net


CASES: dict[str, Any] = {
    "a frozen layer": (frozen, lambda n: torch.randn(n, 3)),
    "convolutions": (convolutions, lambda n: torch.randn(n, 2, 8, 8)),
    "tokens": (Tokens, lambda n: torch.randint(7, (n, 6))),
}


def made(case: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(3)
    make, draw = CASES[case]
    inputs = [draw(n) for n in SIZES]
    return make().double(), [x.double() if x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.7)], ids=["classes", "numbers"])
@pytest.mark.parametrize("curvature", ["empirical_fisher", "fisher_mc"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_ordinary_diagonal(case: str, curvature: str, likelihood: Likelihood) -> None:
    net, inputs = made(case)
    classes = isinstance(likelihood, Categorical)
    targets = [torch.randint(3, (n,)) if classes else torch.randn(n, 3).double() for n in SIZES]
    batches = list(zip(inputs, targets, strict=True))
    estimate = estimate_of(curvature, 2)
    expected = fit_curvature(net, batches, likelihood, "diag", curvature=estimate, seed=4)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    grads = [p.requires_grad for p in net.parameters()]
    total = ShardedDiagonalSum(net, likelihood, curvature, 2, 4, Processes())
    for x, y in batches:
        total.add(x, y)
        total.add(x, y, counts=False)  # as a process does that has come to the end of its data
    curvature_sum = total.finish()
    assert curvature_sum.subset.names == expected.subset.names
    assert (curvature_sum.n_data, curvature_sum.n_outputs) == (expected.n_data, expected.n_outputs)
    torch.testing.assert_close(curvature_sum.structure.diagonal(), expected.structure.diagonal())
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert [p.requires_grad for p in net.parameters()] == grads
    assert net.training
    assert all(p.grad is None for p in net.parameters())


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    return net


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "same runs more than once for one input": (
        lambda: Wired(lambda s, x: s.same(torch.tanh(s.same(x))), same=nn.Linear(3, 3)),
        (4, 3),
    ),
    "mix has an input with 20 rows for 4 examples": (
        lambda: Wired(lambda s, x: s.mix(x.reshape(-1, 3)).reshape(len(x), -1, 3).mean(1), mix=nn.Linear(3, 3)),
        (4, 5, 3),
    ),
    # As many positions as examples, and those first.
    "mix has rows of several examples": (
        lambda: Wired(lambda s, x: s.mix(x.transpose(0, 1)).mean(0), mix=nn.Linear(3, 3)),
        (4, 4, 3),
    ),
    "scale belongs to a Wired, but a sharded network": (
        lambda: Wired(lambda s, x: s.head(x) * s.scale, head=nn.Linear(3, 3), scale=nn.Parameter(torch.ones(3))),
        (4, 3),
    ),
    "1.weight is the same parameter as 0.weight": (tied, (4, 3)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_rule_is_refused_by_name(message: str) -> None:
    make, shape = REFUSED[message]
    net = make()

    def fit() -> None:
        total = ShardedDiagonalSum(net, Categorical(), "empirical_fisher", 1, 0, Processes())
        total.add(torch.randn(shape), torch.randint(3, (4,)))

    with pytest.raises(CurvatureError, match=f"{message}.*L2MCallback"):
        fit()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_attention_is_refused_before_training() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    with pytest.raises(CurvatureError, match=r"1\.in_proj_weight belongs to a MultiheadAttention"):
        check_layers(net)
    net[1].requires_grad_(False)
    check_layers(net)


def test_a_wrong_target_of_a_later_batch_is_told_with_its_batch() -> None:
    """And no number of a batch is read before: the other processes would wait, too."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    total = ShardedDiagonalSum(net, Categorical(), "empirical_fisher", 1, 0, Processes())
    total.add(x, y)
    with NoSynchronisation():
        total.add(x, y)
        total.add(x, y.masked_fill(y == 1, 7))
    with pytest.raises(LikelihoodError, match="batch 2: Categorical got the target 7"):
        total.finish()
