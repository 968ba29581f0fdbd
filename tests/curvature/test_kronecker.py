"""Kronecker curvature: exact where theory says so, `G ⊗ A` by definition elsewhere, exact blocks for the rest."""

import copy
import logging
import re
from typing import Any

import oracles
import pytest
import torch
from networks import CASES, CONVOLUTIONS, OUTPUTS, TRANSPOSED, Attention, Case, Wired, real
from oracles import close
from torch import Tensor, nn

from lightning_bayes import Kron
from lightning_bayes.likelihoods import Categorical, Gaussian
from lightning_bayes.structures import BlockDiagonal, Dense, Diagonal, Kronecker

SHARED = [
    *(f"conv_{name}" for name in CONVOLUTIONS),
    *(f"transposed_{name}" for name in TRANSPOSED),
    *("deep_cnn", "linear_on_sequences", "linear_on_grids", "time_first", "merged_batch_time", "merged_time_batch"),
    *("merged_convolution", "embedding", "embedding_of_one_token", "used_twice", "used_twice_on_different_shapes"),
    *("mlp", "mlp_without_bias", "residual", "two_inputs", "in_place_relu", "norm_batch_2d", "dropout_in_train_mode"),
    *("bernoulli_one_logit", "bernoulli_labels", "gaussian_noise_per_output", "heteroscedastic"),
    *("segmentation", "tagging", "image_to_image", "heteroscedastic_image", "checkpointed", "custom_function"),
]
ONE_POSITION = [
    *("mlp", "mlp_without_bias", "residual", "two_inputs", "in_place_relu", "norm_batch_1d", "norm_layer", "frozen"),
    *("embedding_of_one_token", "bernoulli_one_logit", "bernoulli_labels", "gaussian_noise_per_output"),
    *("heteroscedastic", "checkpointed", "custom_function", "bare_parameters", "weight_normed"),
    "view_after_the_last_layer",
]


def fit(case: Case, *sizes: int, structure: Any = "kron", **options: Any) -> BlockDiagonal:
    fitted = case.fit(structure, *sizes, **options).structure
    assert isinstance(fitted, BlockDiagonal)
    return fitted


def first_example(case: Case) -> Case:
    return Case(case.network, oracles.example(case.x, 0), case.y[:1], case.likelihood)


def layer_blocks(network: nn.Module, H: Tensor) -> Tensor:
    """`H` with everything between two layers (modules that own parameters) set to zero, in named_parameters order."""
    owners = [name.rpartition(".")[0] or name for name, p in network.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in network.parameters() if p.requires_grad]
    index = torch.repeat_interleave(torch.tensor([owners.index(owner) for owner in owners]), torch.tensor(sizes))
    return torch.where(index.unsqueeze(-1) == index, H, 0)


@pytest.mark.parametrize("name", ONE_POSITION)
def test_one_datum_at_one_position_gives_the_exact_blocks(name: str) -> None:
    case = first_example(CASES[name]())
    if name == "bare_parameters":  # at one position
        case.network.inner.requires_grad_(False)
    found, H = fit(case).to_dense(), layer_blocks(case.network, oracles.ggn(case))
    if name in ("weight_normed", "norm_batch_1d", "norm_layer", "checkpointed"):
        # Parameters without a Kronecker form have a block each, or one per norm; compare what the blocks hold.
        kept = found != 0
        assert kept.diagonal()[H.diagonal() != 0].all()
        close(found[kept], H[kept])
    else:
        close(found, H)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, (2, 3)),
        nn.Conv2d(4, 6, (2, 3), groups=2),
        nn.ConvTranspose2d(2, 3, 1),
        nn.ConvTranspose2d(4, 6, 1, groups=2),
    ],
    ids=str,
)
def test_one_datum_in_a_convolution_with_one_pixel_gives_the_exact_blocks(layer: Any) -> None:
    network = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(layer.out_channels, OUTPUTS)).double()
    size = (2, 3) if isinstance(layer, nn.Conv2d) else (1, 1)
    case = Case(network, real(1, layer.in_channels, *size), torch.tensor([1]), Categorical())
    H = layer_blocks(network, oracles.ggn(case))
    if layer.groups > 1:  # groups are independent products
        places, _ = oracles.kfac(case)["0"]
        blocks = torch.arange(len(places)) * layer.groups // len(places)
        group = torch.full((len(H),), -1)
        group[places] = blocks
        H = torch.where(group.unsqueeze(-1) == group, H, 0)
    close(fit(case).to_dense(), H)


@pytest.mark.parametrize("noise", [0.7, torch.tensor([0.5, 2.0], dtype=torch.float64)])
def test_deep_linear_network_with_squared_loss_gives_the_exact_blocks_for_many_data(noise: Any) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    case = Case(network, real(7, 3), real(7, 2), Gaussian(noise))
    expected = layer_blocks(network, oracles.ggn(case))
    close(fit(case).to_dense(), expected)
    close(fit(case, 1, 4, 2).to_dense(), expected)


def test_deep_linear_convolutional_network_with_one_pixel_gives_the_exact_blocks_for_many_data() -> None:
    network = nn.Sequential(nn.Conv1d(2, 3, 4), nn.ConvTranspose1d(3, 2, 1), nn.Flatten(), nn.Linear(2, 2)).double()
    case = Case(network, real(5, 2, 4), real(5, 2), Gaussian(0.4))
    close(fit(case).to_dense(), layer_blocks(network, oracles.ggn(case)))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", SHARED)
def test_blocks_of_linear_convolution_and_embedding_are_kfac(name: str, sharing: str) -> None:
    case = CASES[name]()
    H = fit(case, structure=Kron(weight_sharing=sharing)).to_dense()
    for places, block in oracles.kfac(case, sharing).values():
        close(oracles.block(H, places), block)


@pytest.mark.parametrize(
    "name", ["conv_2d", "linear_on_sequences", "conv_2d_groups", "frozen", "frozen_in_a_convolution", "used_twice"]
)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_part_of_a_layer_is_that_part_of_its_factors(name: str, sharing: str) -> None:
    """A weight without its bias, or a bias without its weight, drops rows and columns of `A` and nothing else."""
    case = CASES[name]()
    thawed = copy.deepcopy(case.network)
    thawed.requires_grad_(True)
    whole = fit(Case(thawed, case.x, case.y, case.likelihood), structure=Kron(weight_sharing=sharing)).to_dense()
    names = [n for n, _ in case.network.named_parameters()]
    for chosen in (names[::2], names[1::2], names[1:2] + names[2:3]):
        places = oracles.places(thawed, [n for n in names if n in chosen])
        part = fit(case, subset=chosen, structure=Kron(weight_sharing=sharing)).to_dense()
        close(part, oracles.block(whole, places))


class PlainAttention(nn.Module):
    """`nn.MultiheadAttention` written out with four linear layers."""

    def __init__(self, attention: nn.MultiheadAttention, head: nn.Linear) -> None:
        super().__init__()
        E = attention.embed_dim
        for i, name in enumerate("qkv"):
            if attention.in_proj_weight is None:
                weight = getattr(attention, f"{name}_proj_weight")
            else:
                weight = attention.in_proj_weight[i * E : (i + 1) * E]
            layer = nn.Linear(weight.shape[1], E, dtype=weight.dtype)
            layer.weight.data.copy_(weight.data)
            layer.bias.data.copy_(attention.in_proj_bias.data[i * E : (i + 1) * E])
            setattr(self, name, layer)
        self.out, self.head, self.heads = attention.out_proj, head, attention.num_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.q, q), (self.k, k), (self.v, v))
        )
        z = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
        return self.head(self.out(z.transpose(1, 2).flatten(2)).mean(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["attention_batch_first", "attention_time_first", "attention_separate_projections"])
def test_attention_has_the_blocks_of_its_four_linear_layers(name: str, sharing: str) -> None:
    case = CASES[name]()
    network = case.network
    assert isinstance(network, Attention)
    nn.init.normal_(network.attention.in_proj_bias)
    plain = Case(PlainAttention(network.attention, network.head), case.x, case.y, case.likelihood)
    H = fit(case, structure=Kron(weight_sharing=sharing)).to_dense()
    seen = torch.zeros_like(H, dtype=torch.bool)
    for layer, (_, block) in oracles.kfac(plain, sharing).items():
        if layer in "qkv":
            i, E = "qkv".index(layer), 4
            stem = "attention.in_proj_weight" if network.attention.kdim == 4 else f"attention.{layer}_proj_weight"
            weight = oracles.positions_of(network, stem)
            weight = weight[i * E : (i + 1) * E] if network.attention.kdim == 4 else weight
            bias = oracles.positions_of(network, "attention.in_proj_bias")[i * E : (i + 1) * E]
        else:
            stem = "head" if layer == "head" else "attention.out_proj"
            weight = oracles.positions_of(network, f"{stem}.weight")
            bias = oracles.positions_of(network, f"{stem}.bias")
        places = torch.cat([weight, bias.unsqueeze(-1)], dim=1).flatten()
        close(oracles.block(H, places), block)
        seen[places.unsqueeze(-1), places] = True
    assert not H[~seen].any()


EXACT = {  # groups of parameters that share a block
    **{f"norm_{kind}": [["1.weight", "1.bias"]] for kind in ("layer", "group", "batch_1d", "batch_2d")},
    "norm_instance": [["0.weight", "0.bias"]],
    "norm_rms": [["1.weight"]],
    "bare_parameters": [["scale"], ["places"]],
    "lstm": [[f"cell.{part}_l0"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")],
    "gru": [["cell.weight_ih_l0"], ["cell.weight_hh_l0_reverse"], ["cell.bias_hh_l0"]],
    "weight_normed": [[f"0.parametrizations.weight.original{n}"] for n in (0, 1)] + [["0.bias"]],
    "attention_bias_kv": [["attention.bias_k"], ["attention.bias_v"]],
    "tied_linears": [["0.weight"], ["0.bias"], ["2.bias"]],
    "tied_embedding": [["table.weight"], ["head.bias"]],
    "functional_and_matmul": [["w"]],
    "penalised_weight": [["inner.weight"]],
    "attention_shared_projection": [["first.in_proj_weight"]],
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_without_kronecker_form_have_their_exact_block(name: str) -> None:
    case = CASES[name]()
    found, H = fit(case).to_dense(), oracles.ggn(case)
    for group in EXACT[name]:
        places = oracles.places(case.network, group)
        close(oracles.block(found, places), oracles.block(H, places))


@pytest.mark.parametrize(("size", "kind"), [(1024, Dense), (1025, Diagonal)])
def test_exact_block_is_dense_up_to_1024_and_diagonal_beyond(size: int, kind: type) -> None:
    parts = {"scale": nn.Parameter(torch.ones(size)), "head": nn.Linear(2, 2)}

    def forward(s: Any, x: Tensor) -> Tensor:
        h = x * s.scale
        return s.head(torch.stack([h[:, ::2].sum(1), h[:, 1::2].sum(1)], dim=1).tanh())

    case = Case(Wired(forward, **parts).double(), 0.02 * real(2, size), torch.tensor([0, 1]), Categorical())
    structure = fit(case)
    block = structure.blocks[structure.names.index("scale")]
    assert type(block) is kind
    H = oracles.ggn(case, ["scale"])
    close(block.to_dense(), H if kind is Dense else torch.diag(H.diagonal()))


def test_norm_beyond_1024_is_its_exact_diagonal() -> None:
    network = nn.Sequential(nn.LayerNorm(600), nn.Linear(600, 2)).double()
    case = Case(network, real(2, 600), torch.tensor([0, 1]), Categorical())
    structure = fit(case, subset=["0"])
    assert isinstance(structure.blocks[0], Diagonal)
    expected = oracles.ggn(case, ["0.weight", "0.bias"]).diagonal()
    close(structure.diagonal(), expected)


@pytest.mark.parametrize("name", CASES)
def test_one_log_line_names_the_block_of_every_parameter_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]()
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        structure = fit(case)
    messages = [record.getMessage() for record in caplog.records if record.name == "lightning_bayes"]
    lines = [message for message in messages if message.startswith("curvature blocks")]
    assert len(lines) == 1
    _, _, described = lines[0].partition("curvature blocks: ")
    said: dict[str, list[tuple[str, int]]] = {}  # parameter: [(block, rows)]
    shapes = dict(case.network.named_parameters())
    for part in described.split("; "):
        block, _, names = part.partition(": ")
        for entry in names.split(", "):
            parameter, start, stop = re.fullmatch(r"([^\[]+)(?:\[(\d+):(\d+)\])?", entry).groups()
            rows = (
                shapes[parameter].numel() if start is None else (int(stop) - int(start)) * shapes[parameter][0].numel()
            )
            said.setdefault(parameter, []).append((block, rows))
    trainable = {n: p.numel() for n, p in case.network.named_parameters() if p.requires_grad}
    assert {n: sum(rows for _, rows in parts) for n, parts in said.items()} == trainable
    label = {Kronecker: "Kronecker", Dense: "exact dense", Diagonal: "exact diagonal"}
    for block, owner in zip(structure.blocks, structure.names, strict=True):
        assert label[type(block)] in {kind for kind, _ in said[owner]}


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_log_line_of_full_and_diagonal_names_every_parameter(structure: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["transformer"]()
    with caplog.at_level(logging.DEBUG, "lightning_bayes"):
        case.fit(structure)
    (line,) = [record.getMessage() for record in caplog.records]
    for name, _ in case.network.named_parameters():
        assert re.search(rf"{re.escape(name)}(\[0:\d+\])?(,|;|$)", line)


KRONECKER = {
    "transformer": [
        *["0.self_attn.in_proj_weight"] * 3,
        *("0.self_attn.out_proj.weight", "0.linear1.weight", "0.linear2.weight", "2.weight"),
    ],
    "deep_cnn": ["0.weight", "2.weight", "5.weight"],
    "embedding": ["head.weight", "table.weight"],
    "attention_separate_projections": [
        *(f"attention.{part}_proj_weight" for part in "kqv"),
        *("attention.out_proj.weight", "head.weight"),
    ],
    # Shared positions are recognised wherever the batch lies.
    **{name: ["head.weight", "inner.weight"] for name in ("time_first", "merged_batch_time", "merged_time_batch")},
    "merged_convolution": ["head.weight", "inner.weight"],
}


@pytest.mark.parametrize("name", KRONECKER)
def test_every_kind_of_layer_gets_a_kronecker_block(name: str) -> None:
    """The fast paths are taken, not only the exact per-example gradients that are right for anything."""
    structure = fit(CASES[name]())
    blocks = zip(structure.names, structure.blocks, strict=True)
    assert sorted(owner for owner, block in blocks if isinstance(block, Kronecker)) == sorted(KRONECKER[name])


def test_kronecker_factors_of_a_prior_are_added_exactly() -> None:
    case = CASES["transformer"]()
    structure = fit(case)
    P = structure.add_prior(0.3).to_dense()
    close(P, structure.to_dense() + 0.3 * torch.eye(len(P), dtype=P.dtype))
