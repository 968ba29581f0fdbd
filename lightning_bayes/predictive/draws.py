"""Functions drawn from a posterior: a weight sample `θ_s ~ q(θ)`, and the network with these weights at any `x`.

A draw of the network itself is `f(x; θ_s)`. A draw of the linearised network is `f(x; θ*) + J(x)(θ_s − θ*)` (GLM paper,
eq. (10)), computed by Jacobian products, without forming the Jacobian (see `jacobian.products`). Thompson sampling next
evaluates the optimum of such a draw (Thompson 1933, "On the likelihood that one unknown probability exceeds another in
view of the evidence of two samples").

**Many classes.** If the `m` likeliest classes `L` have nearly all of the predictive probability, only their outputs
need an exact covariance `Σ` `[m, m]`, from `m` backward passes. The other classes follow the mean of the leading ones,
with their residual variance:

    f_L ~ N(m_L, Σ),    f_c = m_c + mean_L(f_L − m_L) + √v ε_c,    v = (tr Σ − 1ᵀΣ1/m) / (m − 1).

This is exact up to `v/m` if all outputs have the covariance `τ² 11ᵀ + vI`. If the leading classes have at least a
probability of `MASS`, the total variation distance between these draws and the exact predictive is .001 to .01, less
than with 100 drawn functions. For other inputs all outputs are drawn, for one input at a time if the structure allows
it, because this needs fewer random numbers than weights (see `jacobian.output_draws`).

The weight samples also give the moments of an **autoencoder** in its latent and output space (Laplacian autoencoders,
figure 2), for any module with submodules `encoder` and `decoder`. Each sample `θ_s = (ψ_s, φ_s)` is an encoder `e_ψ`
with its decoder `d_φ`:

    z_s = e_ψ_s(x),    f_s = d_φ_s(z_s),    mean = Σ_s f_s / S,    variance = Σ_s (f_s − mean)² / S,

and the same for `z`. The squared error of a sampled network, averaged over samples, is the squared error of the mean
plus the variance. The module's own `forward` is not called. Weights outside the posterior keep the network's values:
with a posterior of the decoder alone, the latent variance is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, flag, word
from lightning_bayes.jacobian.output_draws import output_draws
from lightning_bayes.jacobian.output_gaussian import selected_covariances
from lightning_bayes.jacobian.products import Jacobian
from lightning_bayes.likelihoods.outputs import check_generator, draw_gaussian, gaussian_nodes
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import call_with, copied_generator, generator_on, preserved_rng
from lightning_bayes.network.input_graph import check_differentiable
from lightning_bayes.network.output import network_name
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import at_mean, unflatten
from lightning_bayes.posterior.gaussian import NEEDS_WHOLE, implements
from lightning_bayes.predictive.prediction import TensorFields

CHUNK, MOST_CHUNK = 2**28, 2**30  # bytes of the samples that go through the network together
SHARED = 2**30  # bytes of weight samples that batches share, and of draws of many classes
EXAMPLES = 2**24  # layer outputs of the examples whose outputs are drawn together
LEADING = 16  # classes with an exact covariance
MASS = 0.97  # the probability that the leading classes must have


def sample_functions(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None = None,
    linearised: bool = True,
    differentiable: bool = False,
) -> Tensor:
    """`n` functions drawn from the posterior, evaluated at `x`. All inputs share each weight sample, so the draws are
    smooth in x.  # [n, B, ...]"""
    count("n", n)
    check_generator(generator)
    flag("linearised", linearised)
    if flag("differentiable", differentiable):
        check_differentiable(x)
    draws: list[Tensor] = []
    each_function(posterior, x, n, generator, linearised, draws.append, differentiable)
    return torch.stack(draws)


def each_function(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None,
    linearised: bool,
    consume: Callable[[Tensor], None],
    differentiable: bool = False,
) -> None:
    """Like `sample_functions`, but pass the draws `[B, ...]` to `consume` one by one."""
    if linearised and posterior.is_sharded:
        raise PosteriorError(f"the linearised network {NEEDS_WHOLE}: use linearised=False")
    with at_mean(posterior, x, differentiable) as x:
        jacobian = Jacobian(posterior.network, posterior.subset, x, differentiable=differentiable)
        few = _samples_together(posterior, x) if linearised and not differentiable else 1
        for start in range(0, n, few):
            moves = [draw_move(posterior, generator) for _ in range(min(few, n - start))]
            if linearised and len(moves) > 1:
                for f in jacobian.linearised_many(torch.stack(moves)):
                    consume(f)
            else:
                consume(jacobian.linearised(moves[0]) if linearised else jacobian.at(moves[0]))


def draw_move(posterior: GaussianPosterior, generator: torch.Generator | None) -> Tensor:
    """A weight sample minus the network's weights. Each sample is drawn separately, so its numbers do not depend on how
    many samples the network evaluates together.  # [P]"""
    if isinstance(generator, SharedDraws):
        return generator.move(posterior)
    return _new_move(posterior, generator)


def _new_move(posterior: GaussianPosterior, generator: torch.Generator | None) -> Tensor:
    move = posterior.precision.sample(1, generator)[0]
    return move if posterior.shift is None else move + posterior.shift


class SharedDraws(torch.Generator):
    """A generator that keeps the weight samples drawn from it, up to `SHARED` bytes. If its state is set back to an
    earlier one, `move` returns the sample of that state without drawing it again. Batches then share their samples, and
    the numbers are the same as with any other generator:

        generator = SharedDraws(posterior.device)
        predictions = [posterior.predict(x, "bnn", generator=generator.manual_seed(0)) for x in batches]
    """

    def __new__(cls, device: torch.device) -> SharedDraws:
        return super().__new__(cls, generator_on(device).device)  # type: ignore[call-arg]

    def __init__(self, device: torch.device) -> None:
        self._size = 0
        # For each posterior and state: the posterior's tensors (so that ids stay unique), the sample, the next state.
        self._kept: dict[tuple[int, int, bytes], tuple[Any, Tensor, Tensor]] = {}

    def move(self, posterior: GaussianPosterior) -> Tensor:
        """`draw_move` of the posterior."""
        owner = (posterior.precision, posterior.mean)
        key = (id(owner[0]), id(owner[1]), self.get_state().numpy().tobytes())
        if key in self._kept:
            _, move, after = self._kept[key]
            self.set_state(after)
            return move
        move = _new_move(posterior, self)
        if self._size + move.nbytes <= SHARED:
            self._size += move.nbytes
            self._kept[key] = (owner, move, self.get_state())
        return move


def _samples_together(posterior: GaussianPosterior, x: Any) -> int:
    """The number of samples that fit in the cache, but at least four if memory allows, because they share the network's
    own pass. The widest layer is assumed to be sixteen times as large as the input."""
    numbers = posterior.subset.full_size + 16 * sum(t.numel() for t in inputs.tensors(x))
    size = numbers * posterior.mean.element_size()
    return max(1, CHUNK // size, min(4, MOST_CHUNK // size))


def has_leading_classes(posterior: GaussianPosterior, x: Any, f: Tensor) -> bool:
    """Whether `class_draws` can draw these outputs."""
    is_one_label = posterior.likelihood.chooses_one_class and f.ndim == 2 and f.shape[1] > LEADING
    return is_one_label and not isinstance(x, inputs.WholeInput)


def class_draws(
    posterior: GaussianPosterior, x: Any, mean: Tensor, n: int, generator: torch.Generator | None
) -> Tensor:
    """`n` draws of the linearised network's logits by their leading classes. Inputs whose leading classes have too
    little probability, with or without the posterior, use `_drawn_outputs` instead.  # [n, B, C]"""
    leading = mean.topk(LEADING, dim=1).indices  # [B, m]
    plain = mean.softmax(1).gather(1, leading).sum(1)  # [B]
    draws = mean.new_empty(n, *mean.shape)
    sure = (plain >= MASS).nonzero()[:, 0].tolist()
    if sure:
        draws[:, sure], mass = _draws_by_leading(
            posterior, _rows(posterior, x, sure, len(mean)), mean[sure], leading[sure], n, generator
        )
        sure = [row for row, enough in zip(sure, (mass >= MASS).tolist(), strict=True) if enough]
    unsure = sorted(set(range(len(mean))) - set(sure))
    if unsure:
        of_unsure = _rows(posterior, x, unsure, len(mean))
        draws[:, unsure] = _drawn_outputs(posterior, of_unsure, mean[unsure], n, generator)
    return draws


def _rows(posterior: GaussianPosterior, x: Any, rows: list[int], B: int) -> Any:
    return x if len(rows) == B else inputs.take(posterior.network, x, rows)


def _draws_by_leading(
    posterior: GaussianPosterior, x: Any, mean: Tensor, leading: Tensor, n: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """`n` draws, and the mean probability of the leading classes in them.  # [n, B, C], [B]"""
    noise = _same_generator(generator, mean.device)  # drawn outputs get the same numbers, with or without these draws
    with posterior.linearised(x) as (plan, own):
        Σ = selected_covariances(posterior.network, plan, posterior.precision, own, leading)
    mean_L = mean.gather(1, leading)
    draws_L = gaussian_nodes(mean_L, Σ, n) if n > LEADING else draw_gaussian(mean_L, Σ, n, noise)
    v = (Σ.diagonal(dim1=1, dim2=2).sum(1) - Σ.sum((1, 2)) / LEADING) / (LEADING - 1)  # [B]
    draws = draw_gaussian(mean, v.clamp(min=0).unsqueeze(1).expand_as(mean), n, noise)
    draws += (draws_L - mean_L).mean(2, keepdim=True)
    index = leading.expand(n, -1, -1)
    draws.scatter_(2, index, draws_L)
    return draws, draws.softmax(2).gather(2, index).sum(2).mean(0)


def _drawn_outputs(
    posterior: GaussianPosterior, x: Any, mean: Tensor, n: int, generator: torch.Generator | None
) -> Tensor:
    """`n` draws of the linearised network's outputs, with the right law for each input. They come in pairs, `m ± Jv`,
    because the second of a pair costs nothing.  # [n, B, C]"""
    with posterior.linearised(x) as (plan, own):
        few = max(1, EXAMPLES // max(plan.n_activations, 1))
        parts = [slice(start, start + few) for start in range(0, len(mean), few)]
        draws = []
        for part in parts:
            outputs = output_draws(
                posterior.network, plan, posterior.precision, inputs.take(posterior.network, own, part)
            )
            if outputs is None:
                break
            together = max(1, CHUNK // (mean.element_size() * len(mean[part]) * plan.n_activations))
            noise = _same_generator(generator, mean.device)
            pairs = (n + 1) // 2
            numbers = (torch.randn(outputs.size, generator=noise, device=noise.device) for _ in range(pairs))
            moves = [outputs(torch.stack(list(islice(numbers, together))).to(mean)) for _ in range(0, pairs, together)]
            Jv = torch.cat(moves)
            draws.append(mean[part] + torch.cat([Jv, -Jv])[:n])
    return sample_functions(posterior, x, n, generator).to(mean) if len(draws) < len(parts) else torch.cat(draws, 1)


def _same_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A generator with the same state, or with PyTorch's own."""
    if generator is None:
        return copied_generator(device)
    same = generator_on(device)
    same.set_state(generator.get_state())
    return same


@dataclass(frozen=True, eq=False, repr=False)
class FunctionDraw:
    """`x ↦ f(x)` for a fixed weight sample: every call evaluates the same function.  # [B, ...], or of `n` samples
    [n, B, ...]

    It returns the network's outputs (logits or means), without noise or calibration. If `x` requires gradients and they
    are enabled, the outputs keep the graph to `x`, but not to the weights.
    """

    posterior: GaussianPosterior
    moves: Sequence[Tensor]  # [P] from the network's weights to each sample
    linearised: bool
    single: bool  # whether the outputs have no dimension for the samples

    def __call__(self, x: Any) -> Tensor:
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs.tensors(x))
        posterior = self.posterior
        with at_mean(posterior, x, differentiable) as x:
            jacobian = Jacobian(posterior.network, posterior.subset, x, differentiable=differentiable)
            draws = [jacobian.linearised(move) if self.linearised else jacobian.at(move) for move in self.moves]
        return draws[0] if self.single else torch.stack(draws)

    def __repr__(self) -> str:
        kind = "the linearised network" if self.linearised else "the network"
        return f"FunctionDraw({'one sample' if self.single else f'{len(self.moves)} samples'} of {kind})"


@implements("sample_function")
def draw_function(
    posterior: GaussianPosterior, generator: torch.Generator | None, predictive: str, n: int | None
) -> FunctionDraw:
    check_generator(generator)
    word("predictive", predictive, ("glm", "bnn"))
    if n is not None:
        count("n", n)
    posterior.check_weights()
    exact = torch.autocast(posterior.device.type, enabled=False)
    with preserved_rng(posterior.device), torch.inference_mode(False), torch.no_grad(), exact:
        moves = [draw_move(posterior, generator) for _ in range(n or 1)]
    return FunctionDraw(posterior, tuple(moves), predictive == "glm", n is None)


class RunningMoments:
    """Mean and variance by Welford's update (1962, "Note on a method for calculating corrected sums of squares and
    products"), which avoids cancellation: `m ← m + (mₙ − m)/n`, `s ← s + (mₙ − m_before)(mₙ − m_after)`."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, value: Tensor) -> None:
        self.n += 1
        if self.n == 1:
            self.mean, self._squares = value.clone(), torch.zeros_like(value)
            return
        move = value - self.mean
        self.mean.add_(move, alpha=1 / self.n)
        self._squares.addcmul_(move, value - self.mean)

    @property
    def variance(self) -> Tensor:
        return self._squares / self.n


PARTS = {"encoder": "latent_", "decoder": ""}  # each part's prefix in the fields of a Reconstruction


@dataclass(frozen=True, eq=False)
class Reconstruction(TensorFields):
    """Moments over sampled autoencoders. `encode` fills the latent moments, `decode` the moments of outputs, and
    `reconstruct` both. With `keep_samples`, the samples are stored too."""

    mean: Tensor | None = None  # [B, ...]
    variance: Tensor | None = None  # [B, ...]
    latent_mean: Tensor | None = None  # [B, ...]
    latent_variance: Tensor | None = None  # [B, ...]
    samples: Tensor | None = None  # [S, B, ...]
    latent_samples: Tensor | None = None  # [S, B, ...]


def decode(
    posterior: GaussianPosterior,
    z: Any,
    samples: int = 100,
    generator: torch.Generator | None = None,
    keep_samples: bool = False,
) -> Reconstruction:
    """The moments in output space of sampled decoders at the latent points `z`."""
    return reconstruct(posterior, z, samples, generator, keep_samples, parts=("decoder",))


@implements("reconstruct")
def reconstruct(
    posterior: GaussianPosterior,
    x: Any,
    samples: int = 100,
    generator: torch.Generator | None = None,
    keep_samples: bool = False,
    parts: Sequence[str] = tuple(PARTS),
) -> Reconstruction:
    """The moments of the latent variables, of the outputs, or of both. Each sampled decoder reads the latent variables
    of the encoder in the same sample. The same generator draws the same networks for all batches."""
    count("samples", samples)
    check_generator(generator)
    flag("keep_samples", keep_samples)
    for name in PARTS:
        if not isinstance(getattr(posterior.network, name, None), nn.Module):
            children = ", ".join(child for child, _ in posterior.network.named_children()) or "none"
            raise PosteriorError(
                f"{network_name(posterior.network)} has no submodule {name!r} (its submodules are: {children}): name "
                "the two parts of an autoencoder `encoder` and `decoder`, or use predict, which needs no names"
            )
    moments = {part: RunningMoments() for part in parts}
    kept: dict[str, list[Tensor]] = {part: [] for part in parts}
    with at_mean(posterior, x) as x:
        chain = _Chain(posterior.network, parts)
        mean = {name: p.detach() for name, p in posterior.subset.parameters(posterior.network).items()}
        for _ in range(samples):
            moves = unflatten(posterior, draw_move(posterior, generator))
            weights = {f"network.{name}": p + moves[name] for name, p in mean.items()}
            for part, value in zip(parts, call_with(chain, weights, (x,)), strict=True):
                if not isinstance(value, Tensor):
                    kind = type(value).__name__
                    raise PosteriorError(f"the {part} must return one tensor, but it returned a {kind}")
                moments[part].add(value.to(torch.promote_types(value.dtype, torch.float32)))
                if keep_samples:
                    kept[part].append(value)
    fields: dict[str, Tensor | None] = {}
    for part, prefix in PARTS.items():
        if part in moments:
            fields |= {f"{prefix}mean": moments[part].mean, f"{prefix}variance": moments[part].variance}
            fields[f"{prefix}samples"] = torch.stack(kept[part]) if keep_samples else None
    return Reconstruction(**fields)


class _Chain(nn.Module):
    """Several parts of a network in sequence, as one `forward` for functional calls with other weights."""

    def __init__(self, network: nn.Module, parts: Sequence[str]) -> None:
        super().__init__()
        self.network, self._names = network, parts
        self.training = network.training

    def forward(self, x: Any) -> list[Any]:
        values = []
        for name in self._names:
            x = inputs.call(getattr(self.network, name), x)
            values.append(x)
        return values
