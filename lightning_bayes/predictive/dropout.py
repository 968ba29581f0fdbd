"""MC dropout: the network at its trained weights, with random masks of its dropout layers (Gal & Ghahramani 2016,
"Dropout as a Bayesian approximation: representing model uncertainty in deep learning").

Dropping the inputs of a layer with a mask `z`, `zᵢ ~ Bernoulli(1 − p)`, is a draw `W diag(z)/(1 − p)` of its weights.
All inputs share a draw, as they share a weight sample: each dropout layer has one mask for all examples, so an input
has the same prediction in any batch. The positions of a sequence have different masks.

Only the dropout modules of `torch.nn` get masks: `Dropout`, `Dropout1d` to `Dropout3d`, `AlphaDropout` and
`FeatureAlphaDropout`. They stay in eval mode, as all other layers do, and a hook applies the mask to their output.
Dropout that is not such a module stays off: `F.dropout`, the dropout inside `nn.MultiheadAttention` and `nn.LSTM`, and
timm's `DropPath`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import instance
from lightning_bayes.likelihoods import Likelihood, resolve
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import check_network, copied_generator
from lightning_bayes.network.output import network_name, read_as
from lightning_bayes.network.processes import uniforms
from lightning_bayes.options.fit import Network, output_option
from lightning_bayes.options.predictive import ConformalScore, Dropout, PredictiveOption, PredictiveWord
from lightning_bayes.options.predictive import predictive_option as resolve_predictive
from lightning_bayes.posterior import GaussianPosterior, PosteriorError
from lightning_bayes.posterior.at_mean import at_mean
from lightning_bayes.posterior.gaussian import implementation, point_posterior
from lightning_bayes.predictive.mixture import Predictor
from lightning_bayes.predictive.prediction import Prediction

if TYPE_CHECKING:
    from lightning_bayes.predictive.conformal import Conformal

KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
SELU_MINIMUM = -1.7580993408473766  # the value of a unit that alpha dropout drops


def dropout_layers(network: nn.Module) -> dict[str, nn.Module]:
    """The dropout modules that drop anything, by name. Raise an error if there is none."""
    layers: dict[str, Any] = {name: layer for name, layer in network.named_modules() if isinstance(layer, KINDS)}
    layers = {name: layer for name, layer in layers.items() if layer.p > 0}
    if not layers:
        raise PosteriorError(
            f"{network_name(network)} has no dropout layer with p > 0, so predictive='dropout' would be the plain "
            "network: use an nn.Dropout module instead of F.dropout, or another predictive"
        )
    return layers


def each_masked(
    posterior: GaussianPosterior,
    x: Any,
    n: int,
    generator: torch.Generator | None,
    consume: Callable[[Tensor], None],
    differentiable: bool = False,
) -> None:
    """Pass the outputs `[B, ...]` of the network with `n` draws of all masks to `consume` one by one."""
    network = posterior.network
    layers = dropout_layers(network)
    with at_mean(posterior, x, differentiable) as x, ExitStack() as stack:
        generator = copied_generator(posterior.device) if generator is None else generator
        masks = Masks()
        for number, layer in enumerate(layers.values()):
            stack.callback(layer.register_forward_hook(masks.hook(number), prepend=True).remove)
        for seed in torch.randint(2**62, (n,), generator=generator, device=generator.device).tolist():
            masks.draw(seed)
            f = inputs.call(network, x)
            if not masks.calls:
                raise PosteriorError(
                    f"the network does not call its dropout layers ({', '.join(layers)}), so their masks have no "
                    "effect: call them as modules, or use another predictive"
                )
            consume(f)


class Masks:
    """The masks of one draw: a function of its seed, the layer, and the number of the layer's call."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}  # of each layer
        self._seed = 0

    def draw(self, seed: int) -> None:
        self.calls, self._seed = {}, seed

    def hook(self, number: int) -> Callable[..., Tensor]:
        def mask(layer: Any, args: Any, x: Tensor) -> Tensor:
            call = self.calls[number] = self.calls.get(number, 0) + 1
            single = isinstance(layer, (nn.Dropout, nn.AlphaDropout))  # the others drop whole channels
            shape = x.shape[1:] if single else x.shape[1:2] + torch.Size([1] * (x.ndim - 2))
            layers = torch.full((1,), number, dtype=torch.long, device=x.device)
            kept = uniforms(self._seed, call, layers, shape, torch.float32) > layer.p  # [1, ...]
            return _dropped(layer, x, kept.to(x.dtype))

        return mask


def _dropped(layer: Any, x: Tensor, kept: Tensor) -> Tensor:
    """The layer's output in training mode, with this mask."""
    p = float(layer.p)
    if p == 1:
        return torch.zeros_like(x)
    if not isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        return x * kept / (1 - p)
    a = ((1 - p) * (1 + p * SELU_MINIMUM**2)) ** -0.5  # keeps mean zero and variance one
    return a * (x * kept + SELU_MINIMUM * (1 - kept) - p * SELU_MINIMUM)


@dataclass(frozen=True, eq=False)
class MCDropout(Predictor):
    """A network that predicts by MC dropout; `mc_dropout` makes one."""

    posterior: GaussianPosterior = field(repr=False)  # without a spread of weights
    option: Dropout = field(default_factory=Dropout)

    def __post_init__(self) -> None:
        instance("posterior", self.posterior, GaussianPosterior, "a posterior")
        instance("option", self.option, Dropout, "a Dropout")

    @property
    def likelihood(self) -> Likelihood:
        return self.posterior.likelihood

    @property
    def device(self) -> torch.device:
        return self.posterior.device

    @property
    def network(self) -> nn.Module:
        return self.posterior.network

    def predict(
        self,
        x: Any,
        predictive: PredictiveWord | PredictiveOption = "dropout",
        *,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The predictive distribution at `x`, by "dropout" or "map"; see `GaussianPosterior.predict`."""
        return self.posterior.predict(x, self._option(predictive), generator=generator)

    def calibrate(self, loader: Iterable[Any], *, of: str = "outputs", seed: int = 0) -> MCDropout:
        """The same with a correction found on held-out data; see `GaussianPosterior.calibrate`."""
        return replace(self, posterior=self.posterior.calibrate(loader, self.option, of=of, seed=seed))

    def conformalize(
        self, loader: Iterable[Any], level: float = 0.9, method: ConformalScore = "aps", **options: Any
    ) -> Conformal:
        """Sets or intervals from held-out data; see `GaussianPosterior.conformalize`."""
        return implementation("conformalize")(self, loader, level, method, self.option, **options)

    def _option(self, predictive: PredictiveWord | PredictiveOption) -> PredictiveOption:
        if predictive == "dropout":
            return self.option
        option = resolve_predictive(predictive)
        if option.uses_prior:
            raise PosteriorError(
                f"mc_dropout has no covariance of the weights for predictive={option.kind!r}: use 'dropout' or 'map'"
            )
        return option


def mc_dropout(
    network: nn.Module,
    likelihood: str | Likelihood = "classification",
    *,
    samples: int = 100,
    output: str | int | Network | None = None,
) -> MCDropout:
    """MC dropout for a trained network, without a fit.

    Args:
        network: maps x to f, with dropout modules of `torch.nn`. Its weights must stay the same.
        likelihood: "classification", "binary" or "regression", or a `Likelihood`, such as `Gaussian(noise_std=0.3)`.
        samples: the number of masks of each layer.
        output: the key, attribute or index of f in the network's return value, or `Network(output, class_dim)`.
    """
    read = output_option(output)
    network = read_as(check_network(network), read.output, read.class_dim)
    dropout_layers(network)
    return MCDropout(point_posterior(network, resolve(likelihood)), Dropout(samples))
