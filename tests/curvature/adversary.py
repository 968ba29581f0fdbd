"""Random networks on sequences `[B, T, D]`: a front, a few blocks, a pooling and a head, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from helpers.untouched import assert_same, snapshot
from networks import Case, Doubled, Wired, moved
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_bayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood

D = 4  # features
TOKENS = 7
OUTPUTS = 2


def over_time(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer on `[B, D, T]`."""
    return lambda: Wired(lambda s, h: s.layer(h.mT).mT, layer=layer())


def tied() -> nn.Module:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def module_with_two_names() -> nn.Module:
    inner = nn.Linear(D, D)
    return Wired(lambda s, h: s.two(s.one(h).tanh() * s.scale), one=inner, two=inner, scale=nn.Parameter(torch.rand(D)))


def attention_time_first() -> nn.Module:
    def forward(s: Any, h: Tensor) -> Tensor:
        h = h.transpose(0, 1)
        return s.inner(h, h, h)[0].transpose(0, 1)

    return Wired(forward, inner=nn.MultiheadAttention(D, 2, add_bias_kv=True))


def attention_by_hand() -> nn.Module:
    def forward(s: Any, h: Tensor) -> Tensor:
        q, k, v = s.qkv(h).unflatten(2, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)  # [B, heads, T, D / heads]
        return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return Wired(forward, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D))


def cell_in_a_loop() -> nn.Module:
    def forward(s: Any, h: Tensor) -> Tensor:
        state, states = h.new_zeros(len(h), D), []
        for t in range(h.shape[1]):
            state = s.norm(s.cell(torch.cat([h[:, t], state], 1))).tanh()
            states.append(state)
        return torch.stack(states, 1)

    return Wired(forward, cell=nn.Linear(2 * D, D), norm=moved(nn.LayerNorm(D)))


def merged_time_first() -> nn.Module:
    def forward(s: Any, h: Tensor) -> Tensor:
        rows = h.transpose(0, 1).reshape(-1, D)
        return s.norm(s.inner(rows).tanh()).reshape(h.shape[1], h.shape[0], D).transpose(0, 1)

    return Wired(forward, inner=nn.Linear(D, D), norm=moved(nn.GroupNorm(2, D)))


def sorted_and_back() -> nn.Module:
    def forward(s: Any, h: Tensor) -> Tensor:
        order = h.detach().sum((1, 2)).argsort()
        return s.norm(s.inner(h[order])).tanh()[order.argsort()]

    return Wired(forward, inner=nn.Linear(D, D), norm=moved(nn.LayerNorm(D)))


def packed_rows() -> nn.Module:
    """Only the rows whose first feature is positive, as a ragged set."""

    def forward(s: Any, h: Tensor) -> Tensor:
        mask = h[..., 0].detach() > 0
        rows = s.norm(s.inner(h[mask])).tanh()
        return h + h.new_zeros(len(h), D).index_add(0, mask.nonzero()[:, 0], rows).unsqueeze(1)

    return Wired(forward, inner=nn.Linear(D, D), norm=moved(nn.LayerNorm(D)))


def experts() -> nn.Module:
    """Top one of two, by row."""

    def forward(s: Any, h: Tensor) -> Tensor:
        route = h.detach()[..., :2].argmax(2)
        mixed = torch.zeros_like(h)
        for e, expert in enumerate((s.one, s.two)):
            chosen = torch.where(route == e)
            if len(chosen[0]):
                mixed = mixed.index_put(chosen, expert(h[chosen]).tanh())
        return mixed

    return Wired(forward, one=nn.Linear(D, D), two=nn.Linear(D, D))


def experts_by_example() -> nn.Module:
    """A whole example goes to one expert, which is called also with no row."""

    def forward(s: Any, h: Tensor) -> Tensor:
        route = h.detach().sum((1, 2)) > 0
        parts = torch.cat([s.one(h[route]), s.two(h[~route])])
        order = torch.cat([route.nonzero()[:, 0], (~route).nonzero()[:, 0]])
        return parts[order.argsort()]

    return Wired(forward, one=nn.Linear(D, D), two=nn.Sequential(nn.Linear(D, D), moved(nn.LayerNorm(D))))


OVER_TIME: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv1d(D, D, 3, padding=1),
    "conv_groups": lambda: nn.Conv1d(D, D, 3, padding=1, groups=2),
    "conv_depthwise": lambda: nn.Conv1d(D, D, 2, padding="same", groups=D),
    "conv_dilated": lambda: nn.Conv1d(D, D, 2, padding=1, dilation=2),
    "conv_stride": lambda: nn.Conv1d(D, D, 2, stride=2, padding=1),
    "conv_circular": lambda: nn.Conv1d(D, D, 3, padding=1, padding_mode="circular"),
    "conv_without_bias": lambda: nn.Conv1d(D, D, 1, bias=False),
    "conv_transposed": lambda: nn.ConvTranspose1d(D, D, 2, stride=2),
    "conv_transposed_groups": lambda: nn.ConvTranspose1d(D, D, 3, groups=2, padding=1),
    "group_norm": lambda: moved(nn.GroupNorm(2, D)),
    "batch_norm": lambda: moved(nn.BatchNorm1d(D)),
    "instance_norm": lambda: moved(nn.InstanceNorm1d(D, affine=True, track_running_stats=True)),
    "prelu_by_channel": lambda: nn.PReLU(D),
}
BLOCKS: dict[str, Callable[[], nn.Module]] = {  # their order belongs to the seeds
    "linear": lambda: nn.Linear(D, D),
    "linear_without_bias": lambda: nn.Linear(D, D, bias=False),
    "layer_norm": lambda: moved(nn.LayerNorm(D)),
    "rms_norm": lambda: moved(nn.RMSNorm(D)),
    "weight_normed": lambda: weight_norm(nn.Linear(D, D)),
    "prelu": nn.PReLU,
    "two_layers_in_place": lambda: nn.Sequential(nn.Linear(D, 3), nn.ReLU(inplace=True), nn.Linear(3, D)),
    "transformer": lambda: nn.TransformerEncoderLayer(D, 2, 5, batch_first=True),
    "transformer_norm_first": lambda: nn.TransformerEncoderLayer(D, 2, 5, batch_first=True, norm_first=True),
    **{name: over_time(layer) for name, layer in OVER_TIME.items()},
    "residual": lambda: Wired(lambda s, h: h + s.inner(F.gelu(h)), inner=nn.Linear(D, D)),
    "used_twice": lambda: Wired(lambda s, h: s.inner(s.inner(h).tanh()), inner=nn.Linear(D, D)),
    "used_on_two_shapes": lambda: Wired(
        lambda s, h: s.inner(h) + s.inner(h.mean(1)).unsqueeze(1), inner=nn.Linear(D, D)
    ),
    "tied": tied,
    "module_with_two_names": module_with_two_names,
    "penalised": lambda: Wired(lambda s, h: s.inner(h) * s.inner.weight.norm(), inner=nn.Linear(D, D)),
    "matrix": lambda: Wired(
        lambda s, h: h @ s.w + s.b, w=nn.Parameter(torch.randn(D, D)), b=nn.Parameter(torch.randn(D))
    ),
    "functional_linear": lambda: Wired(lambda s, h: F.linear(h, s.w), w=nn.Parameter(torch.randn(D, D))),
    "gated": lambda: Wired(lambda s, h: h * s.gate(h.mean(1, keepdim=True)).sigmoid(), gate=nn.Linear(D, D)),
    "bilinear": lambda: Wired(lambda s, h: s.inner(h.contiguous(), h.flip(1).contiguous()), inner=nn.Bilinear(D, D, D)),
    "prototypes": lambda: Wired(lambda s, h: -torch.cdist(h, s.centres), centres=nn.Parameter(torch.randn(D, D))),
    "places": lambda: Wired(lambda s, h: h + s.table(torch.arange(h.shape[1])), table=nn.Embedding(16, D)),
    "attention": lambda: Wired(
        lambda s, h: s.inner(h, h, h, need_weights=False)[0], inner=nn.MultiheadAttention(D, 2, batch_first=True)
    ),
    "attention_time_first": attention_time_first,
    "attention_by_hand": attention_by_hand,
    "lstm": lambda: Wired(lambda s, h: s.inner(h)[0], inner=nn.LSTM(D, D, batch_first=True)),
    "gru": lambda: Wired(
        lambda s, h: s.inner(h.transpose(0, 1))[0].transpose(0, 1), inner=nn.GRU(D, 2, bidirectional=True)
    ),
    "cell_in_a_loop": cell_in_a_loop,
    "merged_positions": lambda: Wired(
        lambda s, h: s.norm(s.inner(h.reshape(-1, D)).tanh()).reshape(h.shape),
        inner=nn.Linear(D, D),
        norm=moved(nn.LayerNorm(D)),
    ),
    "merged_time_first": merged_time_first,
    "merged_convolution": lambda: Wired(
        lambda s, h: s.inner(h.reshape(-1, 1, D)).mean(1).reshape(h.shape).tanh(), inner=nn.Conv1d(1, 2, 3, padding=1)
    ),
    "sorted_and_back": sorted_and_back,
    "packed_rows": packed_rows,
    "experts": experts,
    "experts_by_example": experts_by_example,
    "checkpointed": lambda: Wired(
        lambda s, h: checkpoint(lambda t: s.inner(t).tanh(), h, use_reentrant=False), inner=nn.Linear(D, D)
    ),
    "custom_function": lambda: Wired(
        lambda s, h: Doubled.apply(s.inner(h)) * s.scale, inner=nn.Linear(D, D), scale=nn.Parameter(torch.rand(D))
    ),
}
FRONTS: dict[str, Callable[[], nn.Module]] = {
    "real": lambda: nn.Identity(),
    "tokens": lambda: nn.Embedding(TOKENS, D, padding_idx=0),
    "unique_tokens": lambda: Wired(
        lambda s, x: (lambda tokens, places: s.table(tokens)[places])(*x.unique(return_inverse=True)),
        table=nn.Embedding(TOKENS, D),
    ),
}
POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(1),
    "last": lambda h: h[:, -1],
    "largest": lambda h: h.amax(1),
    "attended": lambda h: (h.softmax(1) * h).sum(1),
}
LIKELIHOODS: list[Callable[[], Likelihood]] = [
    Categorical,
    Bernoulli,
    lambda: Gaussian(torch.tensor([0.5, 2.0], dtype=torch.float64)),
    HeteroscedasticGaussian,
]


@dataclass
class Drawn:
    kind: str
    network: nn.Module
    batches: list[Case]  # of several sizes and lengths


def draw(seed: int) -> Drawn:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        choice = random.Random(seed)
        front, pooling = choice.choice(list(FRONTS)), choice.choice(list(POOLINGS))
        names = [choice.choice(list(BLOCKS)) for _ in range(choice.choice([1, 2, 2, 3]))]
        likelihood = choice.choice(LIKELIHOODS)()
        blocks = [layer for name in names for layer in (BLOCKS[name](), nn.Tanh())]
        width = 2 * OUTPUTS if isinstance(likelihood, HeteroscedasticGaussian) else OUTPUTS
        network = Wired(
            lambda s, x: s.head(POOLINGS[pooling](s.blocks(s.front(x)))),
            front=FRONTS[front](),
            blocks=nn.Sequential(*blocks),
            head=nn.Linear(D, width),
        )
        batches = []
        for _ in range(3):
            B, T = choice.randint(1, 5), choice.randint(2, 5)
            x = torch.randn(B, T, D).double() if front == "real" else torch.randint(TOKENS, (B, T))
            if front != "real" and pooling == "largest":  # equal tokens would share the largest value
                x = (x[:, :1] + torch.arange(T)) % TOKENS
            batches.append(Case(network.double().eval(), x, _targets(likelihood, B), likelihood))
    kind = f"{front} → {' → '.join(names)} → {pooling} → {type(likelihood).__name__}"
    return Drawn(kind, network, batches)


@contextmanager
def hooked(network: nn.Module) -> Iterator[None]:
    """With hooks that spoil the gradients of every parameter and module; on leaving, they must be where they were."""
    handles = [p.register_hook(lambda g: 2 * g + 1) for p in network.parameters()]
    for module in network.modules():
        handles.append(module.register_full_backward_hook(lambda m, g, _: tuple(None if t is None else -t for t in g)))
        handles.append(
            module.register_full_backward_pre_hook(lambda m, g: tuple(None if t is None else 3 * t for t in g))
        )
    before = snapshot(network)
    try:
        yield
        assert_same(before, snapshot(network))
    finally:
        for handle in handles:
            handle.remove()


def _targets(likelihood: Likelihood, B: int) -> Tensor:
    if isinstance(likelihood, Categorical):
        return torch.randint(OUTPUTS, (B,))
    if isinstance(likelihood, Bernoulli):
        return torch.randint(2, (B, OUTPUTS)).double()
    return torch.randn(B, OUTPUTS).double()
