"""Mean and variance in the latent and in the output space of an autoencoder, from sampled networks (Laplacian
autoencoders, figure 2).

For any module that names two of its parts `encoder` and `decoder`: each weight sample `θ_s = (ψ_s, φ_s)` of the
posterior is an encoder `e_ψ` and the decoder `d_φ` that belongs to it,

    z_s = e_ψ_s(x),    f_s = d_φ_s(z_s),    mean = Σ_s f_s / S,    variance = Σ_s (f_s − mean)² / S,

and alike in `z`. These are the moments of what was drawn, so that the squared error of a sampled network, averaged over
the samples, is that of the mean plus the variance. `x` goes into `encoder`, and its output into `decoder`;
the module's own `forward` is not called. Weights that the posterior does not cover are as the network has them: with a
posterior of the decoder alone, the latent variance is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import count, flag
from lightning_bayes.likelihoods.outputs import check_generator
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import call_with
from lightning_bayes.network.output import network_name
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import at_mean
from lightning_bayes.posterior.gaussian import implements
from lightning_bayes.predictive.functions import draw_moves
from lightning_bayes.predictive.prediction import TensorFields

PARTS = {"encoder": "latent_", "decoder": ""}  # and how the fields of a reconstruction begin


@dataclass(frozen=True, eq=False)
class Reconstruction(TensorFields):
    """Moments over sampled networks. `encode` fills the latent ones, `decode` the others, `reconstruct` all of them;
    the samples themselves are kept on request."""

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
    """The output space: given latent points through sampled decoders."""
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
    """The spaces of the given parts: every sampled decoder reads what the encoder of the same sample wrote. The same
    generator draws the same networks for all parts, and for every batch."""
    count("samples", samples)
    check_generator(generator)
    flag("keep_samples", keep_samples)
    _check_parts(posterior.network)
    moments = {part: _Moments(part, keep_samples) for part in parts}
    with at_mean(posterior, x) as x:
        chain = _Chain(posterior.network, parts)
        mean = {name: p.detach() for name, p in posterior.subset.parameters(posterior.network).items()}
        for _ in range(samples):
            moves = draw_moves(posterior, generator)
            weights = {f"network.{name}": p + moves[name] for name, p in mean.items()}
            for moment, value in zip(moments.values(), call_with(chain, weights, (x,)), strict=True):
                moment.add(value)
    names = ("mean", "variance", "samples")
    return Reconstruction(**{PARTS[part] + name: getattr(moments[part], name) for part in parts for name in names})


def _check_parts(network: nn.Module) -> None:
    for name in PARTS:
        if not isinstance(getattr(network, name, None), nn.Module):
            children = ", ".join(child for child, _ in network.named_children()) or "none"
            raise PosteriorError(
                f"{network_name(network)} has no submodule {name!r} (its submodules are: {children}): name the two "
                "parts of an autoencoder `encoder` and `decoder`, or use predict, which needs no names"
            )


class _Chain(nn.Module):
    """Parts of a network in a row, as one `forward` that a functional call can run at other weights."""

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


class _Moments:
    """Welford's running mean and variance: as many samples as one likes in the memory of two."""

    def __init__(self, part: str, keep_samples: bool) -> None:
        self._part, self._n = part, 0
        self._kept: list[Tensor] | None = [] if keep_samples else None

    def add(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise PosteriorError(f"the {self._part} must return one tensor, but it returned a {type(value).__name__}")
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        self._n += 1
        if self._n == 1:
            self.mean, self._squares = wide.clone(), torch.zeros_like(wide)
        else:
            d = wide - self.mean
            self.mean += d / self._n
            self._squares += d * (wide - self.mean)
        if self._kept is not None:
            self._kept.append(value)

    @property
    def variance(self) -> Tensor:
        return self._squares / self._n

    @property
    def samples(self) -> Tensor | None:
        return None if self._kept is None else torch.stack(self._kept)  # [S, B, ...]
