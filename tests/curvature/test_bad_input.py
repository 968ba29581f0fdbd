"""Bad input gets one clear sentence that names the culprit, before anything is computed in vain."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import CASES, Apply, Wired, real
from torch import Tensor, nn

from lightning_bayes.curvature import fit_curvature
from lightning_bayes.likelihoods import LikelihoodError
from lightning_bayes.network import CurvatureError, DataError

STRUCTURES = ["full", "diag", "kron", "ekfac"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


X, Y = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3), torch.tensor([0, 1, 2, 0])
R = X.clone()  # real targets in the shape of the outputs


def test_batch_without_examples() -> None:
    for batches in ([(X[:0], Y[:0])], [(X, Y), (X[:0], Y[:0])]):
        with pytest.raises(DataError, match=r"no examples"):
            fit_curvature(mlp(), batches)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("row", [0, 1, 3])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_nan_in_the_inputs_is_blamed_on_the_inputs(row: int, bad: float, subset: str) -> None:
    x = X.clone()
    x[row, 1] = bad
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with pytest.raises(DataError, match="batch 0: the network's output is not finite; its input has NaN or infinite"):
        fit_curvature(network, [(x, Y)], subset=subset)
    with pytest.raises(DataError, match="batch 1: the network's output is not finite; its input has NaN or infinite"):
        fit_curvature(network, [(X, Y), (x, Y)], subset=subset)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_input_that_the_output_hides_is_blamed_where_the_curvature_shows_it(bad: float, structure: str) -> None:
    """In a later batch, which the error names; missing values that the network itself replaces are no error."""
    x = X.clone()
    x[3, 1] = bad
    network = nn.Sequential(
        nn.Linear(3, 4), Apply(lambda h: h.nan_to_num(0, 0, 0)), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    with pytest.raises(
        DataError, match=r"^batch 1: its input has NaN or infinite.* curvature of 0\.weight is not finite"
    ):
        fit_curvature(network, [(X, Y), (x, Y), (X, Y)], structure=structure)
    network = nn.Sequential(Apply(lambda x: x.nan_to_num(0, 0, 0)), *network)
    fit_curvature(network, [(X, Y), (x, Y)], structure=structure)


MIXING: dict[str, Any] = {
    "after a layer": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh(), nn.Linear(4, 3)
    ),
    "before every layer": lambda: nn.Sequential(
        nn.BatchNorm1d(3, affine=False, track_running_stats=False), nn.Linear(3, 3)
    ),
    "with its own scale only": lambda: nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("which", MIXING)
def test_batch_norm_without_statistics_is_named(which: str, structure: str) -> None:
    network = MIXING[which]().double()
    name = next(name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm1d))
    with pytest.raises(CurvatureError, match=rf"depends on another example.*\({name}: batch norm without running"):
        fit_curvature(network, [(X.tanh() + torch.eye(4, 3), Y)], structure=structure)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "mix", [lambda h: h - h.mean(0), lambda h: torch.softmax(h @ h.mT, 1) @ h], ids=["centred", "attention"]
)
def test_examples_that_see_each_other_are_refused(mix: Any, structure: str) -> None:
    for network in (nn.Sequential(nn.Linear(3, 3), Apply(mix)), nn.Sequential(Apply(mix), nn.Linear(3, 3))):
        with pytest.raises(CurvatureError, match="for one example depends on another example of the batch"):
            fit_curvature(network.double(), [(X + torch.eye(4, 3), Y)], structure=structure)


def overwrites(s: Any, x: Tensor) -> Tensor:
    h = s.body(x).tanh() * 1
    z = s.head(h)
    h.mul_(2)
    return z


@pytest.mark.parametrize("structure", STRUCTURES)
def test_layer_input_that_is_overwritten_is_named(structure: str) -> None:
    network = Wired(overwrites, body=nn.Linear(3, 4), head=nn.Linear(4, 3)).double()
    with pytest.raises(CurvatureError, match=r"^head\.weight: the layer's input was overwritten in place"):
        fit_curvature(network, [(X, Y)], structure=structure)


def test_bias_alone_needs_no_input() -> None:
    """Overwriting the input of a layer whose weight is not in the subset does no harm."""
    network = Wired(overwrites, body=nn.Linear(3, 4), head=nn.Linear(4, 3)).double()
    found = fit_curvature(network, [(X, Y)], structure="full", subset=["head.bias"]).structure.to_dense()
    p = network(X).softmax(1).detach()
    torch.testing.assert_close(found, torch.diag(p.sum(0)) - p.mT @ p)


class Overflow(torch.autograd.Function):
    """Fine forwards; the gradient is infinite where the mark is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Tensor) -> Tensor:
        ctx.save_for_backward(mark)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return torch.where(ctx.saved_tensors[0], torch.full_like(g, torch.inf), g), None


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("row", [0, 3])
def test_infinite_curvature_names_the_layer(structure: str, row: int) -> None:
    parts = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 4), "head": nn.Linear(4, 3)}

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.second(s.first(x).tanh())
        return s.head(Overflow.apply(h, x[:, :1] > 5))

    x = X.clone()
    x[row, 0] = 6.0
    network = Wired(forward, **parts).double()
    with pytest.raises(CurvatureError, match=r"^(first|second)\.weight: the curvature is not finite"):
        fit_curvature(network, [(x, Y)], structure=structure)
    fine = fit_curvature(network, [(x, Y)], structure=structure, subset="last_layer")
    assert fine.structure.diagonal().isfinite().all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_infinite_curvature_names_the_bare_parameter(structure: str) -> None:
    network = Wired(
        lambda s, x: s.head(Overflow.apply(x * s.scale, x[:, :1] > 5)),
        scale=nn.Parameter(torch.ones(3)),
        head=nn.Linear(3, 3),
    ).double()
    x = X.clone()
    x[3, 0] = 6.0
    with pytest.raises(CurvatureError, match=r"^scale: the curvature is not finite"):
        fit_curvature(network, [(x, Y)], structure=structure)


def test_known_cases_are_fine() -> None:
    """The checks refuse nothing that is right: every network of the zoo passes them in every structure."""
    for name in ("transformer", "norm_batch_2d", "tied_embedding", "lstm", "positional_embedding"):
        case = CASES[name]()
        fitted = case.fit("kron", 2, 2)
        assert fitted.structure.diagonal().min() >= 0
    assert real(1).dtype == torch.float64


@pytest.mark.parametrize("bad", [5, 70])
@pytest.mark.parametrize(
    ("likelihood", "wrong", "said"),
    [
        ("classification", 7, r"Categorical got the target 7, but the network has 3 outputs"),
        ("classification", -3, r"Categorical got the target -3"),
        ("binary", 0.5, r"Bernoulli needs targets that are 0 or 1, got 0\.5"),
        ("regression", torch.nan, r"Gaussian got the target nan"),
    ],
)
def test_a_wrong_target_of_a_late_batch_is_told(likelihood: str, wrong: float, said: str, bad: int) -> None:
    """Nothing is read from a batch while the next is run: what is wrong is told some batches later."""
    seen = []

    def batches() -> Iterator[Any]:
        for n in range(150):
            seen.append(n)
            y = torch.tensor([0, 1]) if likelihood == "classification" else torch.ones(2, 3)
            if n == bad:
                y = y.to(torch.long if likelihood == "classification" else torch.float)
                y[-1] = wrong
            yield torch.randn(2, 4), y

    with pytest.raises(LikelihoodError, match=said):
        fit_curvature(nn.Linear(4, 3), batches(), likelihood, "diag")
    assert bad < len(seen) <= bad + 66
