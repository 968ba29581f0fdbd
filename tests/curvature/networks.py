"""Networks that curvature must get right, each tiny, in float64, with a few examples and at least two outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from helpers.networks import Wired
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_bayes import LaplacePosterior, fit_laplace
from lightning_bayes.curvature import Curvature, fit_curvature
from lightning_bayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood

N = 4  # examples


@dataclass
class Case:
    network: nn.Module
    x: Any
    y: Tensor
    likelihood: Likelihood

    def loader(self, *sizes: int) -> list[tuple[Any, Tensor]]:
        """Batches of the given sizes; one with everything by default."""
        batches, start = [], 0
        for size in sizes or (len(self.y),):
            part = slice(start, start + size)
            if isinstance(self.x, dict):
                x: Any = {key: value[part] for key, value in self.x.items()}
            else:
                x = tuple(value[part] for value in self.x) if isinstance(self.x, tuple) else self.x[part]
            batches.append((x, self.y[part]))
            start += size
        assert start == len(self.y)
        return batches

    def fit(self, structure: Any, *sizes: int, **options: Any) -> Curvature:
        """The curvature of batches of these sizes."""
        return fit_curvature(self.network, self.loader(*sizes), self.likelihood, structure, **options)

    def laplace(self, *sizes: int, **options: Any) -> LaplacePosterior:
        return fit_laplace(self.network, self.loader(*sizes), self.likelihood, **options)


CASES: dict[str, Callable[[], Case]] = {}
OUTPUTS = 3


def case(make: Callable[[], Any]) -> Callable[[], Case]:
    """Register under the function's name; a bare `(network, x)` gets class labels over its last layer's outputs."""

    def seeded() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(make.__name__))
            made = make()
            if not isinstance(made, Case):
                network, x = made
                made = Case(network, x, torch.randint(OUTPUTS, (N,)), Categorical())
            made.network.double()
            return made

    CASES[make.__name__] = seeded
    return seeded


def cases(variants: dict[str, Callable[[], Any]], prefix: str = "") -> None:
    for name, make in variants.items():
        make.__name__ = prefix + name
        case(make)


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def mlp(width: int = 4, outputs: int = OUTPUTS, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width, bias=bias), nn.Tanh(), nn.Linear(width, outputs, bias=bias))


# Convolutions: (layer, input shape); a tanh, a mean over pixels and a linear layer follow.
def convolutional(layer: nn.Module, *shape: int) -> Any:
    x = real(N, *shape)
    channels = layer(x.float()).shape[1]
    return nn.Sequential(layer, nn.Tanh(), Apply(lambda h: h.flatten(2).mean(2)), nn.Linear(channels, OUTPUTS)), x


CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "1d": lambda: convolutional(nn.Conv1d(2, 3, 3), 2, 6),
    "1d_stride_dilation": lambda: convolutional(nn.Conv1d(2, 2, 3, stride=2, padding=2, dilation=2), 2, 7),
    "1d_circular": lambda: convolutional(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), 2, 5),
    "1d_same_dilation": lambda: convolutional(nn.Conv1d(2, 2, 4, padding="same", dilation=2), 2, 5),
    "1d_same_even_kernel": lambda: convolutional(nn.Conv1d(2, 2, 4, padding="same"), 2, 5),  # one zero more after
    "2d": lambda: convolutional(nn.Conv2d(2, 3, 3, padding=1), 2, 4, 5),
    "2d_no_bias": lambda: convolutional(nn.Conv2d(2, 3, 2, bias=False), 2, 4, 3),
    "2d_1x1": lambda: convolutional(nn.Conv2d(3, 2, 1), 3, 2, 3),
    "2d_stride": lambda: convolutional(nn.Conv2d(2, 2, 3, stride=2, padding=1), 2, 5, 4),
    "2d_stride_in_one_dimension": lambda: convolutional(
        nn.Conv2d(2, 2, (2, 3), stride=(1, 2), padding=(0, 1)), 2, 4, 5
    ),
    "2d_dilation": lambda: convolutional(nn.Conv2d(2, 2, (3, 2), dilation=(2, 1), padding=(2, 1)), 2, 5, 3),
    "2d_wide_padding": lambda: convolutional(nn.Conv2d(1, 2, 3, padding=(3, 2)), 1, 2, 3),
    "2d_groups": lambda: convolutional(nn.Conv2d(4, 6, 2, groups=2), 4, 3, 3),
    "2d_depthwise": lambda: convolutional(nn.Conv2d(3, 6, 2, padding=1, groups=3), 3, 3, 2),
    "2d_same": lambda: convolutional(nn.Conv2d(2, 2, (3, 2), padding="same", dilation=(1, 2)), 2, 4, 3),
    "2d_valid": lambda: convolutional(nn.Conv2d(2, 2, 2, padding="valid"), 2, 3, 3),
    "2d_reflect": lambda: convolutional(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), 2, 3, 4),
    "2d_circular_stride": lambda: convolutional(
        nn.Conv2d(1, 2, 3, stride=2, padding=1, padding_mode="circular"), 1, 4, 5
    ),
    "3d": lambda: convolutional(nn.Conv3d(1, 2, 2, padding=1), 1, 2, 2, 3),
    "3d_stride_groups_dilation": lambda: convolutional(
        nn.Conv3d(2, 4, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(1, 1, 2), groups=2), 2, 2, 3, 3
    ),
}
TRANSPOSED: dict[str, Callable[[], Any]] = {
    "1d": lambda: convolutional(nn.ConvTranspose1d(2, 3, 3), 2, 4),
    "1d_stride_output_padding": lambda: convolutional(
        nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), 2, 3
    ),
    "2d_all_options": lambda: convolutional(
        nn.ConvTranspose2d(
            4, 2, (2, 3), stride=(2, 3), padding=(0, 2), output_padding=(1, 0), groups=2, dilation=(3, 1)
        ),
        *(4, 2, 2),
    ),
    "2d_no_bias": lambda: convolutional(nn.ConvTranspose2d(2, 3, 2, bias=False), 2, 2, 3),
    "2d_much_padding": lambda: convolutional(nn.ConvTranspose2d(1, 2, 2, stride=2, padding=2), 1, 4, 4),
    "3d": lambda: convolutional(nn.ConvTranspose3d(2, 2, 2, stride=(1, 2, 1), padding=(0, 1, 0), groups=2), 2, 2, 2, 1),
    "3d_dilation": lambda: convolutional(
        nn.ConvTranspose3d(1, 2, 2, stride=2, output_padding=(1, 0, 1), dilation=(1, 2, 1)), 1, 2, 1, 2
    ),
}
cases(CONVOLUTIONS, "conv_")
cases(TRANSPOSED, "transposed_")


def inner_and_head(forward: Callable[..., Tensor], x: Tensor, **parts: Any) -> Any:
    """The first layer maps three inputs to four unless it is given."""
    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, OUTPUTS), **parts}
    return Wired(forward, **parts), x


cases(
    {
        "mlp": lambda: (mlp(), real(N, 3)),
        "mlp_without_bias": lambda: (mlp(bias=False), real(N, 3)),
        "deep_cnn": lambda: (
            nn.Sequential(
                *(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 2, stride=2), nn.ReLU()),
                *(nn.Flatten(), nn.Linear(8, OUTPUTS)),
            ),
            real(N, 1, 6, 6),
        ),
        "linear_on_sequences": lambda: (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Apply(lambda h: h.mean(1)), nn.Linear(4, OUTPUTS)),
            real(N, 5, 3),
        ),
        "linear_on_grids": lambda: inner_and_head(
            lambda s, x: s.head(s.inner(x).tanh().mean((1, 2))), real(N, 2, 3, 3)
        ),
        "time_first": lambda: inner_and_head(
            lambda s, x: s.head(s.inner(x.transpose(0, 1)).tanh().sum(0)), real(N, 5, 3)
        ),
        "merged_batch_time": lambda: inner_and_head(
            lambda s, x: s.head(s.inner(x.reshape(-1, 3)).tanh().reshape(len(x), -1, 4).sum(1)), real(N, 5, 3)
        ),
        "merged_time_batch": lambda: inner_and_head(
            lambda s, x: s.head(s.inner(x.transpose(0, 1).reshape(-1, 3)).tanh().reshape(-1, len(x), 4).sum(0)),
            real(N, 5, 3),
        ),
        # `[T₁, B, T₂]` flattened, of which only the first row of T₁ reaches the output: it looks like `[B, T]`.
        "merged_with_the_batch_in_the_middle": lambda: inner_and_head(
            lambda s, x: s.head(s.inner(x.transpose(0, 1).reshape(-1, 3)).tanh().reshape(2, len(x), 2, 4)[0].sum(1)),
            real(N, 2, 2, 3),
        ),
        # Frames of a video, merged into the batch.
        "merged_convolution": lambda: inner_and_head(
            lambda s, x: s.head(s.inner(x.flatten(0, 1)).tanh().mean((2, 3)).reshape(len(x), -1, 2).sum(1)),
            real(N, 3, 1, 3, 3),
            inner=nn.Conv2d(1, 2, 2),
            head=nn.Linear(2, OUTPUTS),
        ),
        # A convolution of width one as a linear layer over everything: the batch lies in its spatial dimension.
        "batch_among_the_pixels": lambda: inner_and_head(
            lambda s, x: s.head(s.inner(x.mT.unsqueeze(0)).tanh().squeeze(0).mT), real(N, 3), inner=nn.Conv1d(3, 4, 1)
        ),
    }
)


def looked_up(table: nn.Embedding, tokens: list[Any]) -> Any:
    """The sum of an embedding over the tokens of an example."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.table(x).tanh()
        return s.head(h.sum(1) if x.ndim > 1 else h)

    return Wired(forward, table=table, head=nn.Linear(table.embedding_dim, OUTPUTS)), torch.tensor(tokens)


FREQUENT = [[0, 0], [1, 0], [2, 3], [1, 1]]
cases(
    {
        "embedding": lambda: looked_up(
            nn.Embedding(6, 3, padding_idx=0), [[1, 1, 0, 4], [2, 3, 2, 2], [0, 0, 0, 0], [4, 1, 2, 1]]
        ),
        "embedding_of_one_token": lambda: looked_up(nn.Embedding(5, 2, padding_idx=-1), [0, 3, 3, 4]),
        # `scale_grad_by_freq` makes autograd's gradient another one than the derivative.
        "embedding_scaled_by_frequency": lambda: looked_up(nn.Embedding(5, 2, scale_grad_by_freq=True), FREQUENT),
        "sparse_embedding": lambda: looked_up(nn.Embedding(5, 2, sparse=True), FREQUENT),
    }
)


@case
def positional_embedding() -> Any:
    """A table that is looked up at the same places for every example."""
    parts = {"table": nn.Embedding(5, 3), "places": nn.Embedding(3, 3), "head": nn.Linear(3, OUTPUTS)}

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head((s.table(x) + s.places(torch.arange(x.shape[1]))).tanh().mean(1))

    return Wired(forward, **parts), torch.tensor([[1, 1, 0], [2, 3, 2], [0, 4, 0], [4, 1, 2]])


class Attention(nn.Module):
    def __init__(self, batch_first: bool = True, need_weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)
        self.head = nn.Linear(4, OUTPUTS)
        self.batch_first, self.need_weights = batch_first, need_weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        if not self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        z, _ = self.attention(q, k, v, key_padding_mask=padding, need_weights=self.need_weights)
        return self.head(z.mean(1 if self.batch_first else 0))


def attend(T: int = 3, S: int = 4, kdim: int = 4, vdim: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return real(N, T, 4), real(N, S, kdim), real(N, S, vdim)


class SelfAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)


def two_attentions_with_one_projection() -> Any:
    first, second = nn.MultiheadAttention(4, 2, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
    second.in_proj_weight = first.in_proj_weight
    parts = {"first": first, "second": second, "head": nn.Linear(4, OUTPUTS)}

    def forward(s: Any, x: Tensor) -> Tensor:
        x = s.first(x, x, x)[0]
        return s.head(s.second(x, x, x)[0].mean(1))

    return Wired(forward, **parts), real(N, 3, 4)


def one_token_in_merged_frames() -> Any:
    """Over one token there is nothing to attend to: queries and keys have no gradient, which hides the batch."""
    parts = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, OUTPUTS)}

    def forward(s: Any, x: Tensor) -> Tensor:
        frames = x.flatten(0, 1)  # [B·2, 1, 4]
        return s.head(s.attention(frames, frames, frames)[0].reshape(len(x), 2, 4).sum(1))

    return Wired(forward, **parts), real(N, 2, 1, 4)


def penalised_key_projection() -> Any:
    """One of three packed layers has no rule, whose bias lies in one tensor with the others'."""
    parts = {"inner": Attention(kdim=3, vdim=2)}
    return Wired(lambda s, *x: s.inner(*x) * s.inner.attention.k_proj_weight.norm(), **parts), attend(kdim=3, vdim=2)


cases(
    {
        "batch_first": lambda: (Attention(), attend()),
        "time_first": lambda: (Attention(batch_first=False), attend()),
        "self": lambda: (SelfAttention(), real(N, 3, 4)),
        "with_weights": lambda: (SelfAttention(need_weights=True), real(N, 3, 4)),
        "no_bias": lambda: (Attention(bias=False), attend()),
        "separate_projections": lambda: (Attention(kdim=3, vdim=2), attend(kdim=3, vdim=2)),
        "bias_kv": lambda: (Attention(add_bias_kv=True, add_zero_attn=True), attend()),
        "padding_mask": lambda: (
            Attention(),
            (
                *attend(),
                torch.tensor([[False, False, False, True], [False] * 4, [False, True, True, True], [False] * 4]),
            ),
        ),
        "one_token_in_merged_frames": one_token_in_merged_frames,
        "penalised_key": penalised_key_projection,
        "shared_projection": two_attentions_with_one_projection,
    },
    "attention_",
)


@case
def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, Apply(lambda h: h.mean(1)), nn.Linear(4, OUTPUTS)), real(N, 3, 4)


@case
def transformer_norm_first() -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.1, norm_first=True, activation="gelu")
    return nn.Sequential(
        Apply(lambda x: x.transpose(0, 1)), layer, Apply(lambda h: h.mean(0)), nn.Linear(4, OUTPUTS)
    ), real(N, 3, 4)


def moved(norm: Any) -> Any:
    """Running statistics and affine weights away from where they start."""
    for p in norm.parameters():
        nn.init.normal_(p, mean=1.0)
    if getattr(norm, "running_mean", None) is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    return norm


cases(
    {
        "layer": lambda: (
            nn.Sequential(nn.Linear(3, 4), moved(nn.LayerNorm(4)), nn.Tanh(), nn.Linear(4, OUTPUTS)),
            real(N, 3),
        ),
        "layer_no_bias_first": lambda: (
            nn.Sequential(moved(nn.LayerNorm((2, 3), bias=False)), nn.Flatten(), nn.Linear(6, OUTPUTS)),
            real(N, 2, 3),
        ),
        "layer_on_time_first": lambda: (
            Wired(
                lambda s, x: s.head(s.norm(s.inner(x.transpose(0, 1))).tanh().mean(0)),
                inner=nn.Linear(3, 4),
                norm=moved(nn.LayerNorm(4)),
                head=nn.Linear(4, OUTPUTS),
            ),
            real(N, 5, 3),
        ),
        "group": lambda: (
            nn.Sequential(
                nn.Conv1d(2, 4, 2), moved(nn.GroupNorm(2, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(12, OUTPUTS)
            ),
            real(N, 2, 4),
        ),
        "instance": lambda: (
            nn.Sequential(
                moved(nn.InstanceNorm2d(2, affine=True)),
                nn.Conv2d(2, 2, 2),
                nn.Tanh(),
                nn.Flatten(),
                nn.Linear(8, OUTPUTS),
            ),
            real(N, 2, 3, 3),
        ),
        "instance_with_statistics": lambda: (
            nn.Sequential(
                moved(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)), nn.Flatten(), nn.Linear(6, OUTPUTS)
            ),
            real(N, 2, 3),
        ),
        "batch_1d": lambda: (
            nn.Sequential(nn.Linear(3, 4), moved(nn.BatchNorm1d(4)), nn.ReLU(), nn.Linear(4, OUTPUTS)),
            real(N, 3),
        ),
        "batch_2d": lambda: (
            nn.Sequential(
                nn.Conv2d(1, 3, 2, bias=False),
                moved(nn.BatchNorm2d(3)),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(12, OUTPUTS),
            ),
            real(N, 1, 3, 3),
        ),
        "rms": lambda: (
            nn.Sequential(nn.Linear(3, 4), moved(nn.RMSNorm(4)), nn.Tanh(), nn.Linear(4, OUTPUTS)),
            real(N, 3),
        ),
    },
    "norm_",
)


@case
def bare_parameters() -> Any:
    parts = {
        "inner": nn.Linear(3, 4),
        "scale": nn.Parameter(torch.randn(4)),
        "places": nn.Parameter(torch.randn(2, 3)),
        "head": nn.Linear(4, OUTPUTS),
    }
    return Wired(lambda s, x: s.head(s.inner(x + s.places).tanh().mean(1) * s.scale), **parts), real(N, 2, 3)


@case
def lstm() -> Any:
    parts = {"cell": nn.LSTM(2, 3, batch_first=True), "head": nn.Linear(3, OUTPUTS)}
    return Wired(lambda s, x: s.head(s.cell(x)[0][:, -1]), **parts), real(N, 3, 2)


@case
def gru() -> Any:
    parts = {"cell": nn.GRU(2, 2, bidirectional=True), "head": nn.Linear(4, OUTPUTS)}
    return Wired(lambda s, x: s.head(s.cell(x.transpose(0, 1))[0].sum(0)), **parts), real(N, 3, 2)


@case
def weight_normed() -> Any:
    return nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, OUTPUTS)), real(N, 3)


@case
def residual() -> Any:
    parts = {"block": nn.Linear(4, 4), "stem": nn.Linear(3, 4), "head": nn.Linear(4, OUTPUTS)}

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.head(h + s.block(F.gelu(h)))

    return Wired(forward, **parts), real(N, 3)


@case
def used_twice() -> Any:
    parts = {"stem": nn.Linear(3, 4), "block": nn.Linear(4, 4), "head": nn.Linear(4, OUTPUTS)}
    return Wired(lambda s, x: s.head(s.block(s.block(s.stem(x)).tanh()).tanh()), **parts), real(N, 3)


@case
def used_twice_on_different_shapes() -> Any:
    parts = {"block": nn.Linear(3, 3), "head": nn.Linear(3, OUTPUTS)}
    return Wired(lambda s, x: s.head(s.block(s.block(x).tanh().sum(1)).tanh()), **parts), real(N, 2, 3)


@case
def tied_linears() -> Any:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(3, OUTPUTS)), real(N, 3)


@case
def tied_embedding() -> Any:
    table, head = nn.Embedding(OUTPUTS, 2), nn.Linear(2, OUTPUTS)
    head.weight = table.weight
    return Wired(lambda s, x: s.head(s.table(x).sum(1).tanh()), table=table, head=head), torch.randint(OUTPUTS, (N, 4))


@case
def functional_and_matmul() -> Any:
    parts = {"w": nn.Parameter(torch.randn(3, 3)), "head": nn.Linear(3, OUTPUTS)}
    return Wired(lambda s, x: s.head((F.linear(x, s.w) + (x @ s.w.T).tanh()).tanh()), **parts), real(N, 3)


@case
def matrix_products() -> Any:
    """Weights that are stored as (inputs, outputs): on sequences with the batch merged, as GPT-2's, and on rows."""
    parts = {"w": nn.Parameter(torch.randn(3, 4)), "b": nn.Parameter(torch.randn(4))}
    parts |= {"v": nn.Parameter(torch.randn(4, OUTPUTS)), "c": nn.Parameter(torch.randn(OUTPUTS))}

    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.addmm(s.b, x.reshape(-1, 3), s.w).tanh().reshape(*x.shape[:2], 4)
        return h.mean(1) @ s.v + s.c

    return Wired(forward, **parts), real(N, 2, 3)


@case
def added_biases() -> Any:
    parts = {"inner": nn.Linear(3, 4, bias=False), "b": nn.Parameter(torch.randn(4)), "c": nn.Parameter(torch.randn(4))}
    parts |= {"head": nn.Linear(4, OUTPUTS, bias=False), "d": nn.Parameter(torch.randn(OUTPUTS))}

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.b + s.inner(x)
        h += s.c
        return torch.add(s.head(h.tanh()), s.d).sum(1)

    return Wired(forward, **parts), real(N, 2, 3)


@case
def second_use_that_sleeps_on_the_first_examples() -> Any:
    """The other use of the weight has no gradient at all for the examples that a probe would look at."""
    parts = {"w": nn.Parameter(torch.randn(3, 3)), "head": nn.Linear(3, OUTPUTS)}
    x = real(N, 3)
    x[:2, 0], x[2:, 0] = -5.0, 2.0

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head((F.linear(x, s.w) + (x @ s.w.T) * x[:, :1].relu()).tanh())

    return Wired(forward, **parts), x


@case
def penalised_weight() -> Any:
    """A weight that enters the output by its norm as well."""
    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, OUTPUTS)}
    return Wired(lambda s, x: s.head(s.inner(x).tanh()) * s.inner.weight.norm(), **parts), real(N, 3)


@case
def in_place_relu() -> Any:
    return nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, OUTPUTS)
    ), real(N, 3)


@case
def frozen() -> Any:
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))
    network[0].requires_grad_(False)
    network[2].bias.requires_grad_(False)
    network[4].weight.requires_grad_(False)
    return network, real(N, 3)


@case
def frozen_in_a_convolution() -> Any:
    network, x = convolutional(nn.Conv2d(2, 3, 2), 2, 3, 3)
    network[0].weight.requires_grad_(False)
    network[3].bias.requires_grad_(False)
    return network, x


@case
def two_inputs() -> Any:
    parts = {"left": nn.Linear(2, 4), "right": nn.Linear(3, 4), "head": nn.Linear(4, OUTPUTS)}
    return Wired(lambda s, a, b: s.head((s.left(a) * s.right(b)).tanh()), **parts), (real(N, 2), real(N, 3))


@case
def named_inputs() -> Any:
    parts = {"left": nn.Linear(2, 4), "scale": nn.Parameter(torch.randn(4)), "head": nn.Linear(4, OUTPUTS)}
    return Wired(lambda s, *, image, words: s.head((s.left(image) * s.scale + words.mean(1)).tanh()), **parts), {
        "words": real(N, 3, 4),
        "image": real(N, 2),
    }


@case
def dead_layer() -> Any:
    """No gradient reaches the first layer, and the second is never used."""
    parts = {"dead": nn.Linear(3, 3), "unused": nn.Linear(3, 3), "head": nn.Linear(3, OUTPUTS)}
    return Wired(lambda s, x: s.head((s.dead(x) - 100).relu() + x), **parts), real(N, 3)


class Doubled(torch.autograd.Function):
    """Without a batching rule, in the old style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * torch.from_numpy(1 - x.tanh().numpy() ** 2)


@case
def custom_function() -> Any:
    parts = {"inner": nn.Linear(3, 4), "scale": nn.Parameter(torch.randn(4)), "head": nn.Linear(4, OUTPUTS)}
    return Wired(lambda s, x: s.head(Doubled.apply(s.inner(x) * s.scale)), **parts), real(N, 3)


@case
def checkpointed() -> Any:
    parts = {"inner": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, OUTPUTS)}

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(checkpoint(lambda h: s.norm(s.inner(h)).tanh(), x, use_reentrant=False))

    return Wired(forward, **parts), real(N, 3)


@case
def dropout_in_train_mode() -> Any:
    network = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Dropout1d(0.5), nn.Linear(4, OUTPUTS))
    return network.train(), real(N, 3)


@case
def view_after_the_last_layer() -> Any:
    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, 2 * OUTPUTS)}
    return Wired(lambda s, x: s.head(s.inner(x).tanh()).view(-1, 2, OUTPUTS).log_softmax(2)[:, 0], **parts), real(N, 3)


# Other likelihoods.


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def labelled(y: list[float]) -> Tensor:
    return torch.tensor(y, dtype=torch.float64)


def one_logit(network: nn.Module) -> Case:
    return Case(network, real(N, 3), labelled([0, 1, 1, 0]), Bernoulli())


def segmentation() -> Case:
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, OUTPUTS, 1))
    y = torch.randint(OUTPUTS, (N, 2, 3))
    y[0, 0, :2], y[1] = 255, 255
    return Case(network, real(N, 1, 2, 3), y, Categorical(ignore_index=255))


def tagging() -> Case:
    """Class scores at every position of a sequence, `[B, C, T]`."""
    parts = {"inner": nn.Linear(2, 3), "head": nn.Linear(3, OUTPUTS), "shift": parameter(OUTPUTS)}
    network = Wired(lambda s, x: (s.head(s.inner(x).tanh()) + s.shift).transpose(1, 2), **parts)
    return Case(network, real(N, 4, 2), torch.randint(OUTPUTS, (N, 4)), Categorical())


def images(last: nn.Module, shape: tuple[int, ...], y: tuple[int, ...], likelihood: Likelihood) -> Case:
    return Case(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), last), real(N, *shape), real(N, *y), likelihood)


cases(
    {
        "bernoulli_one_logit": lambda: one_logit(nn.Sequential(*mlp(outputs=1), nn.Flatten(0))),
        "bernoulli_one_logit_bare": lambda: one_logit(
            Wired(lambda s, x: (x * s.w).sum(1) + s.b, w=parameter(3), b=parameter())
        ),
        "bernoulli_labels": lambda: Case(mlp(outputs=2), real(N, 3), torch.randint(2, (N, 2)).double(), Bernoulli()),
        "gaussian_noise_per_output": lambda: Case(
            mlp(outputs=2), real(N, 3), real(N, 2), Gaussian(labelled([0.3, 1.7]))
        ),
        "heteroscedastic": lambda: Case(mlp(outputs=4), real(N, 3), real(N, 2), HeteroscedasticGaussian()),
        "segmentation": segmentation,
        "tagging": tagging,
        "image_to_image": lambda: images(
            nn.ConvTranspose2d(2, 2, 2), (1, 2, 3), (2, 2, 3), Gaussian(labelled([0.5, 2.0]))
        ),
        "heteroscedastic_image": lambda: images(nn.Conv2d(2, 2, 1), (1, 3, 2), (1, 2, 1), HeteroscedasticGaussian()),
    }
)
