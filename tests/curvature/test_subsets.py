"""Parts of a network: their curvature is that part of the whole one, in `named_parameters` order."""

from typing import Any

import oracles
import pytest
import torch
from networks import CASES, OUTPUTS, Case, N, Wired, real
from oracles import close
from torch import Tensor, nn

from lightning_bayes.curvature import fit_curvature
from lightning_bayes.likelihoods import Categorical
from lightning_bayes.network import SubsetError

STRUCTURES = ["full", "diag", "kron"]
CURVATURES = ["ggn", "fisher_mc", "empirical_fisher"]
LAST = {
    "mlp": ["2.weight", "2.bias"],
    "mlp_without_bias": ["2.weight"],
    "deep_cnn": ["5.weight", "5.bias"],
    "transformer": ["2.weight", "2.bias"],
    "residual": ["head.weight", "head.bias"],  # registered after the block that runs before it
    "view_after_the_last_layer": ["head.weight", "head.bias"],
    "norm_batch_2d": ["4.weight", "4.bias"],
    "frozen": ["4.weight", "4.bias"],
    "segmentation": ["2.weight", "2.bias"],
    "image_to_image": ["2.weight", "2.bias"],
    "bernoulli_one_logit": ["2.weight", "2.bias"],
    "lstm": ["head.weight", "head.bias"],
    "dead_layer": ["head.weight", "head.bias"],
    "functional_and_matmul": ["head.weight", "head.bias"],
}


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", ["mlp", "deep_cnn", "transformer", "segmentation"])
def test_kronecker_last_layer_is_its_block_of_the_whole(name: str, curvature: str) -> None:
    case = CASES[name]()
    whole, last = (
        case.fit("kron", subset=subset, curvature=curvature).structure.to_dense() for subset in ("all", "last_layer")
    )
    rows = oracles.places(case.network, LAST[name])
    close(last, oracles.block(whole, rows))


def test_last_layer_is_found_behind_a_log_softmax() -> None:
    case = CASES["mlp"]()
    network = nn.Sequential(case.network, nn.LogSoftmax(1))
    fitted = fit_curvature(network, case.loader(), structure="full", subset="last_layer")
    assert fitted.subset.names == ("0.2.weight", "0.2.bias")
    # Normalised logits are the same model: same curvature.
    close(fitted.structure.to_dense(), oracles.ggn(case, ["2.weight", "2.bias"]))


def test_last_layer_is_the_last_one_that_the_output_depends_on() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        z = s.head(s.body(x).tanh())
        s.auxiliary(z)  # for some other loss
        return z

    network = Wired(forward, auxiliary=nn.Linear(3, 2), head=nn.Linear(4, 3), body=nn.Linear(3, 4)).double()
    fitted = fit_curvature(network, [(real(N, 3), torch.tensor([0, 1, 2, 0]))], subset="last_layer")
    assert fitted.subset.names == ("head.weight", "head.bias")


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise AssertionError("a gradient came to the body of the network")


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_last_layer_sends_no_gradient_into_the_rest(structure: str, curvature: str) -> None:
    case = CASES["mlp"]()
    first, _, head = case.network
    blocked = Wired(lambda s, x: s.head(NoWayBack.apply(s.first(x))), first=first, head=head)
    found = fit_curvature(blocked, case.loader(), structure=structure, subset="last_layer", curvature=curvature)
    features = first(case.x).tanh().detach()
    alone = fit_curvature(head, [(features, case.y)], structure=structure, curvature=curvature)
    close(found.structure.to_dense(), alone.structure.to_dense())


def test_network_without_a_layer_at_its_end_is_told_so() -> None:
    network = Wired(lambda s, x: x * s.scale, scale=nn.Parameter(torch.ones(3))).double()
    with pytest.raises(SubsetError, match=r"found no last layer in Wired.*name the parameters instead"):
        fit_curvature(network, [(real(N, 3), torch.tensor([0, 1, 2, 0]))], subset="last_layer")


NAMED: dict[str, tuple[str, list[str], list[str]]] = {
    "weight without bias": ("mlp", ["0.weight"], ["0.weight"]),
    "bias without weight": ("mlp", ["2.bias"], ["2.bias"]),
    "any order": ("mlp", ["2.bias", "0.weight"], ["0.weight", "2.bias"]),
    "module": ("mlp", ["0"], ["0.weight", "0.bias"]),
    "module and one of its parameters": ("mlp", ["2", "2.bias", "0.bias"], ["0.bias", "2.weight", "2.bias"]),
    "nested module": (
        "transformer",
        ["0.self_attn"],
        [f"0.self_attn.{p}" for p in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")],
    ),
    "attention bias without weight": ("transformer", ["0.self_attn.in_proj_bias"], ["0.self_attn.in_proj_bias"]),
    "attention weight without bias": ("transformer", ["0.self_attn.in_proj_weight"], ["0.self_attn.in_proj_weight"]),
    "norm bias without weight": ("transformer", ["0.norm1.bias"], ["0.norm1.bias"]),
    "convolution bias without weight": ("deep_cnn", ["2.bias", "5.bias"], ["2.bias", "5.bias"]),
    "bare parameter": ("bare_parameters", ["scale"], ["scale"]),
    "one that is frozen": ("frozen", ["0.weight", "2.bias"], ["0.weight", "2.bias"]),
    "recurrent module": ("lstm", ["cell"], [f"cell.{p}_l0" for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]),
}


CHOSEN: dict[str, tuple[str, Any, list[str]]] = {
    **{f"last layer of {name}": (name, "last_layer", names) for name, names in LAST.items()},
    **NAMED,
}


@pytest.mark.parametrize("which", CHOSEN)
def test_chosen_parameters_are_their_part_of_the_whole(which: str) -> None:
    name, wanted, names = CHOSEN[which]
    case = CASES[name]()
    fitted = oracles.check_exact(case, oracles.ggn(case, names), subset=wanted)
    assert list(fitted.subset.names) == names


@pytest.mark.parametrize("which", NAMED)
def test_named_kronecker_blocks_are_those_of_the_whole(which: str) -> None:
    name, wanted, names = NAMED[which]
    case = CASES[name]()
    case.network.requires_grad_(True)
    whole, part = (case.fit("kron", subset=subset).structure.to_dense() for subset in ("all", wanted))
    rows = oracles.places(case.network, names)
    close(part, oracles.block(whole, rows))


def test_module_name_is_not_the_beginning_of_another() -> None:
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11))).double()
    case = Case(network, real(N, 2), torch.tensor([0, 1, 1, 0]), Categorical())
    assert fit_curvature(network, case.loader(), subset=["1"]).subset.names == ("1.weight", "1.bias")


SUBNETWORKS = ["mlp", "deep_cnn", "transformer", "embedding", "lstm", "bare_parameters", "frozen", "norm_batch_2d"]


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", SUBNETWORKS)
def test_subnetwork_is_its_rows_and_columns_of_the_whole(name: str, curvature: str) -> None:
    case = CASES[name]()
    whole = case.fit("full", curvature=curvature).structure.to_dense()
    mask = torch.rand(len(whole)) < 0.4
    index = mask.nonzero().squeeze(1)
    shuffled = torch.cat([index.flip(0), index[:2]])  # in no order, and some twice
    weights = torch.cat([p.detach().flatten() for p in case.network.parameters() if p.requires_grad])
    for chosen in (mask, index, shuffled):
        fitted = oracles.check_exact(case, oracles.block(whole, index), 1, 3, subset=chosen, curvature=curvature)
        assert torch.equal(fitted.subset.flatten(case.network), weights[mask])
        assert fitted.subset.size == len(index)


def test_subnetwork_of_one_layer_needs_no_gradient_of_the_others() -> None:
    case = CASES["mlp"]()
    first, _, head = case.network
    blocked = Wired(lambda s, x: s.head(NoWayBack.apply(s.first(x))), first=first, head=head)
    fitted = fit_curvature(blocked, case.loader(), structure="full", subset=torch.tensor([17, 30]))
    expected = oracles.ggn(case)[[17, 30]][:, [17, 30]]
    close(fitted.structure.to_dense(), expected)


def test_flat_vector_is_the_parameters_in_order() -> None:
    case = CASES["transformer"]()
    subset = case.fit("diag").subset
    named = dict(case.network.named_parameters())
    assert torch.equal(subset.flatten(case.network), torch.cat([p.detach().flatten() for p in named.values()]))
    owners = [subset.layers[i] for i in subset.layer_index.tolist()]
    assert owners == [name.rpartition(".")[0] for name, p in named.items() for _ in range(p.numel())]
    for name, start in subset.starts.items():
        assert torch.equal(subset.flatten(case.network)[start], named[name].detach().flatten()[0])


def test_parameters_that_the_output_does_not_depend_on_have_zero_curvature() -> None:
    case = CASES["dead_layer"]()
    for structure in STRUCTURES:
        H = case.fit(structure).structure.to_dense()
        dead = oracles.places(case.network, ["dead.weight", "dead.bias", "unused.weight", "unused.bias"])
        assert not H[dead].any()
        assert H[-OUTPUTS:, -OUTPUTS:].any()
