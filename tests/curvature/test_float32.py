"""Float32 fits of badly scaled problems have the prior, noise, evidence and variances of float64.

The default suite runs a few problems; `make test-slow` runs the others, with every structure and method of tuning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bayes import LaplacePosterior, fit_laplace
from lightning_bayes.network.messages import BayesWarning

pytestmark = [  # of searches that these problems do not end, in either precision
    pytest.mark.filterwarnings("ignore:MacKay's fixed point still moves"),
    pytest.mark.filterwarnings("ignore:the evidence is the same for all prior precisions"),
]
Problem = tuple[nn.Module, Tensor, Tensor, Tensor]  # a trained network in float64, x, y, and inputs to predict at
STRUCTURES = ["full", "kron", "diag", "ekfac", "lowrank"]
METHODS = ["auto", "marglik", "mackay", "linear"]


def inputs(n: int, seed: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(
    x: Tensor, y: Tensor, outputs: int, loss: Callable[[Tensor, Tensor], Tensor], hidden: int = 60
) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(400):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network


@cache
def regression(
    n: int = 40, of_x: float = 1.0, of_y: float = 1.0, shift: float = 0.0, repeats: int = 1, constant: bool = False
) -> Problem:
    """Trained on well-scaled data, whose scale the first and last layer then take over. Residuals are a few hundredths
    of the targets: with none, the noise would be that of float32."""
    x = inputs(n // repeats, seed=1).repeat(repeats, 1)
    y = torch.zeros(len(x), 2).double() if constant else torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)
    network = trained(x, y, 2, nn.functional.mse_loss)
    noise = torch.randn(len(x), 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = network(x).detach() + 0.05 * noise
    with torch.no_grad():
        network[0].bias -= network[0].weight.sum(1) * shift / of_x
        network[0].weight /= of_x
        for p in network[2].parameters():
            p *= of_y
    test = inputs(20, seed=3)
    return network, x * of_x + shift, y * of_y, test * of_x + shift


@cache
def classes(margin: float | None = None, missing: bool = False, of_x: float = 1.0) -> Problem:
    """Three classes; `margin` scales the logits until the smallest one is that large."""
    x = inputs(60, seed=4)
    y = (x[:, 0] > 0).long() if missing else (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    network = trained(x, y, 3, nn.functional.cross_entropy)
    with torch.no_grad():
        if margin is not None:
            top = network(x).topk(2).values
            for p in network[2].parameters():
                p *= margin / float((top[:, 0] - top[:, 1]).min())
        network[0].weight /= of_x
    return network, x * of_x, y, inputs(20, seed=5) * of_x


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "regression": regression,
    "inputs × 1e3": lambda: regression(of_x=1e3),
    "inputs × 1e-4": lambda: regression(of_x=1e-4),
    "targets × 1e3": lambda: regression(of_y=1e3),
    "targets × 1e4": lambda: regression(of_y=1e4),
    "targets × 1e-4": lambda: regression(of_y=1e-4),
    "inputs shifted": lambda: regression(shift=30.0),
    "five examples": lambda: regression(n=5),
    "duplicated rows": lambda: regression(repeats=2),
    "constant targets": lambda: regression(constant=True),
    "classes": classes,
    "classes, inputs × 1e3": lambda: classes(of_x=1e3),
    "margins of 20": lambda: classes(margin=20.0),
    "margins of 200": lambda: classes(margin=200.0),
    "a class missing": lambda: classes(missing=True),
}
QUICK = ["inputs × 1e3", "targets × 1e4", "targets × 1e-4", "five examples", "duplicated rows", "margins of 20"]

Tuned = tuple[str, str, str]  # a problem, a structure and a method of tuning
# A low rank has no linear model's optimum: that needs the curvature in all directions.
ALL: list[Tuned] = [case for case in product(PROBLEMS, STRUCTURES, METHODS) if case[1:] != ("lowrank", "linear")]
# Float32 loses eigenvalues of these low ranks, and a warning says so.
ROUNDED: set[Tuned] = {
    *product(["classes, inputs × 1e3", "inputs shifted"], ["lowrank"], ["auto", "marglik", "mackay"])
}
# The data determine no weights of these (γ < 0.05): a flat evidence leaves prior and noise anywhere.
WITHOUT_FULL, WITHOUT_LOW_RANK = ["kron", "diag", "ekfac"], ["full", "kron", "diag", "ekfac"]
UNDETERMINED: set[Tuned] = {
    *product(["regression", "inputs × 1e-4", "targets × 1e3", "targets × 1e4"], WITHOUT_FULL, ["linear"]),
    *product(["inputs shifted", "five examples", "constant targets"], WITHOUT_LOW_RANK, ["linear"]),
    *product(["classes", "a class missing"], ["diag"], ["auto", "linear"]),
    *product(["margins of 20"], WITHOUT_LOW_RANK, ["auto", "linear"]),
    *(case for case in ALL if case[0] == "margins of 200"),
    ("inputs × 1e-4", "diag", "marglik"),
    ("duplicated rows", "diag", "linear"),
    ("inputs shifted", "full", "auto"),
    ("five examples", "full", "auto"),
}


def cases(are_in: Callable[[Tuned], bool]) -> list[Any]:
    """The cases to parametrise with; most of them are slow."""

    def is_quick(case: Tuned) -> bool:
        return case[0] in QUICK and case[1] in ("full", "kron") and case[2] in ("auto", "linear")

    return [pytest.param(*case, marks=() if is_quick(case) else pytest.mark.slow) for case in ALL if are_in(case)]


def fitted(problem: str, structure: str, dtype: torch.dtype) -> tuple[LaplacePosterior, Tensor]:
    network, x, y, test = PROBLEMS[problem]()
    network, x, test = copy.deepcopy(network).to(dtype), x.to(dtype), test.to(dtype)
    y = y.to(dtype) if y.is_floating_point() else y
    likelihood = "regression" if y.is_floating_point() else "classification"
    batches = list(zip(x.split(7), y.split(7), strict=True))
    return fit_laplace(network, batches, likelihood, structure=structure), test


def numbers(problem: str, structure: str, method: str, dtype: torch.dtype) -> dict[str, Tensor]:
    posterior, test = fitted(problem, structure, dtype)
    tuned = posterior.tune_prior(method)
    variances = tuned.functional(test)[1].diagonal(dim1=1, dim2=2)
    noise = tuned.likelihood.noise_std
    known: dict[str, Any] = {
        "δ": tuned.prior_precision,
        "σ": 1.0 if noise is None else noise,
        "γ": tuned.effective_parameters,
        "evidence": tuned.log_marginal_likelihood(at="optimum" if method == "linear" else "weights") / tuned.n_data,
        "variances": variances,
    }
    return {name: torch.as_tensor(value).double() for name, value in known.items()}


def both(problem: str, structure: str, method: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In float64 and in float32."""
    exact, ours = (numbers(problem, structure, method, dtype) for dtype in (torch.float64, torch.float32))
    return exact, ours


def same_evidence(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours["γ"], exact["γ"], rtol=1e-2, atol=0.05)
    torch.testing.assert_close(ours["evidence"], exact["evidence"], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("problem", "structure", "method"), cases(lambda case: case not in ROUNDED and case not in UNDETERMINED)
)
def test_float32_tunes_as_float64(problem: str, structure: str, method: str) -> None:
    exact, ours = both(problem, structure, method)
    assert exact["γ"] >= 0.05
    same_evidence(ours, exact)
    torch.testing.assert_close(ours["δ"], exact["δ"], rtol=2e-2, atol=0)
    torch.testing.assert_close(ours["σ"], exact["σ"], rtol=2e-2, atol=0)
    ratios = ours["variances"] / exact["variances"]
    assert 0.98 < float(ratios.median()) < 1.02
    assert ratios.min() > 0.9
    assert ratios.max() < 1.1


@pytest.mark.parametrize(("problem", "structure", "method"), cases(lambda case: case in UNDETERMINED))
def test_float32_has_the_evidence_of_float64_if_the_data_determine_nothing(
    problem: str, structure: str, method: str
) -> None:
    exact, ours = both(problem, structure, method)
    assert exact["γ"] < 0.05
    same_evidence(ours, exact)


@pytest.mark.parametrize(("problem", "structure", "method"), cases(lambda case: case in ROUNDED))
def test_a_low_rank_that_float32_rounds_warns(problem: str, structure: str, method: str) -> None:
    numbers(problem, structure, method, torch.float64)
    with pytest.warns(BayesWarning, match="from rounding errors in float32"):
        numbers(problem, structure, method, torch.float32)


def test_most_cases_are_compared_in_all_numbers() -> None:
    others = ROUNDED | UNDETERMINED
    assert others <= set(ALL)
    assert len(others) < len(ALL) / 4
