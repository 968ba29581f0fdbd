"""Which rows of a layer belong to which example is found in every batch anew: batches of several shapes, packed sets,
routed rows and sorted examples have the curvature and the predictions of one example at a time."""

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from helpers.options import estimate_of, structure_of
from networks import Case, Wired, moved, real
from oracles import close
from torch import Tensor, nn

from lightning_bayes import fit_laplace
from lightning_bayes.curvature import choose_subset, fit_curvature
from lightning_bayes.curvature.diagonal import BatchDiagonal
from lightning_bayes.curvature.fit import Curvature
from lightning_bayes.jacobian.graph import keeps_rows, uses
from lightning_bayes.likelihoods import Categorical, Gaussian, LikelihoodError
from lightning_bayes.network import CurvatureError
from lightning_bayes.network.messages import BayesWarning
from lightning_bayes.structures import Kronecker

Batches = list[tuple[Any, Tensor]]


def labels(n: int) -> Tensor:
    return torch.randint(3, (n,))


def padded() -> tuple[nn.Module, list[Batches]]:
    """Sequences of two lengths whose positions are merged into the batch."""

    def forward(s: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 2)
        h = s.norm(s.inner(rows)).tanh()
        return s.head(h.reshape(*x.shape[:2], -1).mean(1))

    network = Wired(forward, inner=nn.Linear(2, 3), norm=moved(nn.LayerNorm(3)), head=nn.Linear(3, 3)).double()
    long, short = (real(4, 8, 2), labels(4)), (real(8, 4, 2), labels(8))
    return network, [[long, short], [short, long]]


def ragged() -> tuple[nn.Module, list[Batches]]:
    """Sets of points, packed; the row counts of any three sets at the beginning agree with two rows for each."""

    def forward(s: Any, points: Tensor, sizes: Tensor) -> Tensor:
        mask = torch.arange(points.shape[1]) < sizes.unsqueeze(1)
        owner = mask.nonzero()[:, 0]
        h = s.norm(s.phi(points[mask])).tanh()
        return s.head(h.new_zeros(len(points), 3).index_add(0, owner, h))

    network = Wired(forward, phi=nn.Linear(2, 3), norm=moved(nn.LayerNorm(3)), head=nn.Linear(3, 3)).double()
    batches = [
        ((real(len(sizes), 3, 2), torch.tensor(sizes)), labels(len(sizes)))
        for sizes in ([2, 2, 2, 1, 3, 2, 1, 3], [2, 2, 2, 2], [3, 1, 2])
    ]
    return network, [batches]


def experts() -> tuple[nn.Module, list[Batches]]:
    """The first input says which expert an example goes to; some batches do not need all of them."""

    def forward(s: Any, x: Tensor) -> Tensor:
        route = (x[:, 0] > 0).long()
        h = x.new_zeros(len(x), 3)
        for e, expert in enumerate((s.one, s.two)):
            if (route == e).any():
                h = h.index_put((torch.where(route == e)[0],), expert(x[route == e]).tanh())
        return s.head(s.norm(h))

    network = Wired(
        forward, one=nn.Linear(2, 3), two=nn.Linear(2, 3), norm=moved(nn.LayerNorm(3)), head=nn.Linear(3, 3)
    )
    x = real(9, 2)
    x[:, 0] = torch.tensor([1.0, -1, 2, -1, 1, -2, 3, 3, 3])
    y = labels(9)
    mixed, one = (x[:6], y[:6]), (x[6:], y[6:])
    return network.double(), [[mixed, one], [one, mixed]]


def sorted_by_length() -> tuple[nn.Module, list[Batches]]:
    def forward(s: Any, x: Tensor) -> Tensor:
        order = x[:, :, 0].sum(1).argsort()
        h = s.norm(s.inner(x[order])).tanh().sum(1)
        return s.head(h)[order.argsort()]

    network = Wired(forward, inner=nn.Linear(2, 3), norm=moved(nn.LayerNorm(3)), head=nn.Linear(3, 3)).double()
    return network, [[(real(5, 3, 2), labels(5)), (real(3, 2, 2), labels(3))]]


def looped() -> tuple[nn.Module, list[Batches]]:
    """As many calls as positions, and positions in another number in every batch."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = s.norm(s.cell(torch.cat([x[:, t], h], 1))).tanh()
        return s.head(h)

    network = Wired(forward, cell=nn.Linear(5, 3), norm=moved(nn.LayerNorm(3)), head=nn.Linear(3, 3)).double()
    return network, [[(real(3, 2, 2), labels(3)), (real(2, 4, 2), labels(2))]]


def unique_tokens() -> tuple[nn.Module, list[Batches]]:
    """A row for each token that occurs, which examples may share: in the first batch they share none."""

    def forward(s: Any, x: Tensor) -> Tensor:
        tokens, places = x.unique(return_inverse=True)
        h = s.norm(s.inner(s.table(tokens))).tanh()
        return s.head(h[places].sum(1))

    network = Wired(
        forward, table=nn.Embedding(9, 2), inner=nn.Linear(2, 3), norm=moved(nn.LayerNorm(3)), head=nn.Linear(3, 3)
    ).double()
    apart = torch.tensor([[0, 1], [2, 3], [4, 5]])
    return network, [[(apart, labels(3)), (torch.tensor([[0, 1], [1, 1], [7, 0], [8, 7]]), labels(4))]]


NETWORKS: dict[str, Callable[[], tuple[nn.Module, list[Batches]]]] = {
    f.__name__: f for f in (padded, ragged, experts, sorted_by_length, looped, unique_tokens)
}


def one_by_one(network: nn.Module, batches: Batches) -> list[Case]:
    return [
        Case(network, oracles.example(x, n), y[n : n + 1], Categorical()) for x, y in batches for n in range(len(y))
    ]


def fit(network: nn.Module, batches: Batches, structure: Any, curvature: str = "ggn", **options: Any) -> Curvature:
    estimate = estimate_of(curvature, 2)
    return fit_curvature(network, batches, structure=structure, curvature=estimate, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_batch_is_grouped_by_what_it_shows(name: str) -> None:
    network, orders = NETWORKS[name]()
    for batches in orders:
        cases = one_by_one(network, batches)
        singles = [(case.x, case.y) for case in cases]
        exact = {
            "ggn": sum(oracles.ggn(case) for case in cases),
            "empirical_fisher": sum(oracles.empirical_fisher(case)[0] for case in cases),
            # Labels belong to the example's number, so that these are the same in batches of one.
            "fisher_mc": fit(network, singles, "full", "fisher_mc").structure.to_dense(),
        }
        for curvature, H in exact.items():
            close(fit(network, batches, "full", curvature).structure.to_dense(), H)
            close(fit(network, batches, "diag", curvature).structure.diagonal(), H.diagonal())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_kronecker_blocks_are_those_of_one_example_at_a_time(name: str, sharing: str) -> None:
    """In batches of one there is nothing to group; the norm's block is exact."""
    network, orders = NETWORKS[name]()
    for batches in orders:
        cases = one_by_one(network, batches)
        singles = [(case.x, case.y) for case in cases]
        structure, options = structure_of("kron", weight_sharing=sharing), {"probe": batches[0][0]}
        for curvature in ("ggn", "fisher_mc"):
            found = fit(network, batches, structure, curvature, **options).structure
            expected = fit(network, singles, structure, curvature, **options).structure
            assert sum(isinstance(block, Kronecker) for block in found.blocks) >= 2
            close(found.to_dense(), expected.to_dense())
        exact = sum(oracles.ggn(case) for case in cases)
        structure = fit(network, batches, "kron", **options).structure
        norm = structure.names.index("norm.weight")
        places = structure.layouts[norm].gather(torch.arange(len(exact)))
        close(structure.blocks[norm].to_dense(), oracles.block(exact, places))


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "ekfac"])
@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_of_a_batch_are_those_of_its_examples(name: str, structure: str) -> None:
    network, orders = NETWORKS[name]()
    batches = orders[0]
    posterior = fit_laplace(network, batches, structure=structure)
    dense = posterior.precision.to_dense()
    for x, y in reversed(batches):
        parameters = dict(network.named_parameters())
        J = torch.stack([oracles.jacobian(network, oracles.example(x, n), parameters)[1] for n in range(len(y))])
        joint = J.flatten(0, 1) @ torch.linalg.solve(dense, J.flatten(0, 1).mT)
        covariance = posterior.functional(x)[1]
        blocks = torch.stack([joint[3 * n : 3 * n + 3, 3 * n : 3 * n + 3] for n in range(len(y))])
        close(covariance, blocks)
        close(posterior.functional(x, joint=True)[1], joint)
        marginal = posterior.functional_for([posterior.precision], x, "marginal")[1][0]
        close(marginal, blocks.diagonal(dim1=1, dim2=2))
    singles = [(oracles.example(x, n), y[n : n + 1]) for x, y in batches for n in range(len(y))]
    tuned, expected = (posterior.tune_prior("grid", loader=loader) for loader in (batches, singles))
    torch.testing.assert_close(tuned.prior_precision, expected.prior_precision)


def test_online_diagonal_of_packed_sets_behind_a_bottleneck() -> None:
    """Sets of one point in the first batch, which look like examples; forty outputs, for which columns are merged."""

    def forward(s: Any, points: Tensor) -> Tensor:
        mask = points[..., 0] > 0
        h = s.phi(points[mask]).tanh()
        h = h.new_zeros(len(points), 6).index_add(0, mask.nonzero()[:, 0], h)
        return s.head(s.narrow(h).tanh())

    network = Wired(forward, phi=nn.Linear(2, 6), narrow=nn.Linear(6, 1), head=nn.Linear(1, 40)).double()
    first, later = real(3, 3, 2), real(3, 3, 2)
    first[..., 0], later[..., 0] = torch.tensor([1.0, -1, -1]), torch.tensor([[1.0, 1, 1], [-1, -1, -1], [-1, -1, -1]])
    diagonal = BatchDiagonal(network, choose_subset(network, first, "all"), Gaussian(), "exact")
    for x in (first, later):
        case = Case(network, x, real(3, 40), Gaussian())
        close(diagonal(x, case.y), oracles.ggn(case).diagonal())


def test_rows_that_examples_share_are_told_once() -> None:
    network, ((apart, shared),) = unique_tokens()
    fit(network, [apart, apart], "full")
    with pytest.warns(BayesWarning, match="^batch 1: examples share rows of .*norm.weight") as said:
        fit(network, [apart, shared, shared], "full")
    assert len(said) == 1
    x, y = shared
    wrong = torch.full_like(y, 99)
    with pytest.raises(LikelihoodError, match="got the target"):  # of the batch, not of its last example
        fit(network, [apart, (x, torch.cat([wrong[:1], y[1:]]))], "full")


def test_parameter_that_a_later_batch_uses_without_a_rule_is_an_error() -> None:
    network = Wired(
        lambda s, x: s.head(s.body(x).tanh() if (x > 0).all() else (x @ s.body.weight.mT).tanh()),
        body=nn.Linear(3, 3),
        head=nn.Linear(3, 3),
    ).double()
    x, y = real(4, 3).abs(), labels(4)
    with pytest.raises(CurvatureError, match=r"^body\.weight: .* differently from the first examples"):
        fit_curvature(network, [(x, y), (-x, y)])


def square(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Wired(forward, a=nn.Linear(5, 5))


PLAIN: dict[str, nn.Module] = {
    "mlp": nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)),
    "cnn": nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(1), nn.Flatten()
    ),
    "residual": square(lambda s, x: x + s.a(x).relu() * 2),
}
MIXING: dict[str, nn.Module] = {
    "attention over examples": square(lambda s, x: (s.a(x) @ s.a(x).mT) @ s.a(x)),
    "mean over examples": square(lambda s, x: s.a(x) - s.a(x).mean(0)),
    "softmax over examples": square(lambda s, x: s.a(x).softmax(0)),
    "aligned from the last dimension": square(lambda s, x: s.a(x) + s.a(x)[:, 0]),
    "permuted": square(lambda s, x: s.a(x).flip(0).flip(0)),
    "transposed": square(lambda s, x: s.a(x).T.relu()),
    "weights from the data": square(lambda s, x: x @ s.a(x)),
}


@pytest.mark.parametrize("name", [*PLAIN, *MIXING])
def test_only_what_certainly_keeps_rows_is_taken_for_granted(name: str) -> None:
    """With five examples of five features, so that shapes give nothing away."""
    network = {**PLAIN, **MIXING}[name].eval()
    assert keeps_rows(uses(network(torch.randn(5, 5))), 5) == (name in PLAIN)
