"""The loss that a training step returns, compared with the likelihood that a posterior assumes.

A posterior knows the loss by its dependence on the network's outputs `f` alone. So what is compared is the gradient:
a loss that is `c` times the mean negative log-likelihood, whatever constants and weight penalties it adds, has

    ∂ loss / ∂fₙ = −(c/B) rₙ,    rₙ = ∂ log p(yₙ | fₙ) / ∂fₙ,

at the very outputs that the step has computed, in its own mode and at its own weights. Where those were not seen (in a
compiled step, or if the step does not call the network as a module), the values are compared, with more tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.network import inputs
from lightning_bayes.network.accumulation import in_float64
from lightning_bayes.network.errors import is_out_of_memory
from lightning_bayes.network.output import Output, output_of, unwrap_output
from lightning_bayes.posterior.l2m import default_loss_scale

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of a gradient; 16-bit outputs have 2e-2
_FLAT = 1e-3  # a residual below this is mostly rounding
SAME_SCALE = 0.01  # relative
FAR_OFF = 0.25  # of a value, which penalties, augmentation and noise change too


@dataclass(frozen=True)
class LossFit:
    """How a loss relates to the mean negative log-likelihood of the same outputs."""

    loss: float
    nll: float  # a mean over all targets, as torch's losses are
    scale: float | None  # `c`, where the loss is `c` times the NLL but for terms that do not depend on the outputs
    fits: bool  # False where the loss is surely that of another likelihood


def mean_nll(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """`−(1/B) Σₙ log p(yₙ | fₙ)`."""
    return -likelihood.log_likelihood(f, y) / len(f)


def compare_gradients(
    likelihood: Likelihood,
    loss: Tensor,
    outputs: list[Tensor],
    y: Tensor,
    scale: float,
    reading: Callable[[Tensor], Tensor],
) -> LossFit | None:
    """A `LossFit` from the graph of `loss` (times `scale`), in which `outputs` are as the network returned them; None
    where that says nothing."""
    try:
        gradients = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    except RuntimeError as error:  # the graph cannot be walked twice, or not by `autograd.grad`
        if is_out_of_memory(error):
            raise
        return None
    used = [(reading(f), reading(g)) for f, g in zip(outputs, gradients, strict=True) if g is not None]
    if not used:
        return None
    with torch.no_grad():
        detached = [f.detach() for f, _ in used]
        g = torch.cat([_before_normalisation(likelihood, f, g).flatten() * scale for f, g in used])
        r = torch.cat([-likelihood.residual(f, y).flatten() / len(f) for f in detached])
        g, r = in_float64(g), in_float64(r)
        total = -float(sum(likelihood.log_likelihood(f, y) for f in detached))
        nll = total / len(used) / max(1, int(likelihood.n_targets(y)))
    if not (g.norm().isfinite() and r.norm().isfinite() and r.norm() * len(y) > _FLAT * r.numel() ** 0.5):
        return None
    c = float(g @ r / (r @ r)) * len(used)  # of the mean over several calls, at samples of the weights
    apart = (g - c / len(used) * r).norm() / g.norm()
    fits = c > 0 and bool(apart <= _TOLERANCE.get(detached[0].dtype, 2e-2))
    return LossFit(float(loss.detach()) * scale, nll, c if fits else None, fits)


def _before_normalisation(likelihood: Likelihood, f: Tensor, g: Tensor) -> Tensor:
    """The gradient; for log-probabilities, which a loss may read without normalising them, that of their logits."""
    f, g = widen(f), widen(g)
    if not likelihood.chooses_one_class or f.logsumexp(1).abs().max() > 1e-3:
        return g
    return g - f.softmax(1) * g.sum(1, keepdim=True)


def compare_values(likelihood: Likelihood, loss: Tensor, f: Tensor, y: Tensor, scale: float) -> LossFit | None:
    """A `LossFit` from the numbers alone; None where a likelihood is not one of ours."""
    if not type(likelihood).__module__.startswith("lightning_bayes."):
        return None
    value, B = float(loss.detach()) * scale, len(y)
    total = -float(likelihood.log_likelihood(f, y))
    observed = int(likelihood.n_targets(y))
    candidates = [
        (s * B / over, s * part / over)
        for s in likelihood.loss_scales
        for over in (B, y.numel(), max(1, observed), 1)
        for part in (total, total - likelihood.constant(y))
    ]
    apart = [abs(value - expected) / max(abs(expected), 1e-3) for _, expected in candidates]
    least = min(apart)
    c = candidates[apart.index(least)][0] if least <= _TOLERANCE[torch.float32] else None
    return LossFit(value, total / max(1, observed), c, least <= FAR_OFF)


def explain(fit: LossFit, likelihood: Likelihood, f: Tensor | None) -> str:
    """A loss that is not the likelihood's, and what is usually the cause."""
    cause = (
        "usual causes are a softmax or sigmoid in the network, another likelihood=, a network= that is not the one "
        "whose outputs the loss is computed from, label smoothing, class weights, or targets that the step mixes"
    )
    if f is not None and likelihood.chooses_one_class and bool((f >= 0).all()):
        ones = widen(f).sum(1)
        if torch.allclose(ones, torch.ones_like(ones), atol=1e-2):
            cause = "the outputs of the network are probabilities, but logits are expected: leave the softmax out of it"
    return (
        f"the loss of the training step, {fit.loss:.6g} for the first batch, does not depend on the network's outputs "
        f"as the negative log-likelihood of {type(likelihood).__name__} does, whose mean over all targets is "
        f"{fit.nll:.6g}. The posterior assumes this likelihood; {cause}"
    )


def recognise_scale(name: str, likelihood: Likelihood, c: float, given: float | None, n_targets: int) -> float | None:
    """The scale to use instead of the default: that of a sum or mean over the targets of an example. For any other `c`
    than the one that was `given`, or that torch's losses have, a warning and None."""
    assumed = default_loss_scale(likelihood, n_targets) if given is None else given
    if math.isclose(c, assumed, rel_tol=SAME_SCALE):
        return None
    loss = f"{name}: the loss of the training step is {c:.4g} times the mean negative log-likelihood"
    known = {scale / over for scale in likelihood.loss_scales for over in (1, n_targets)}
    fitting = [scale for scale in known if math.isclose(c, scale, rel_tol=SAME_SCALE)]
    if given is None and fitting:
        rank_zero_info(f"{loss}, a sum or mean over the {n_targets} targets of an example: taken as loss_scale=")
        return fitting[0]
    rank_zero_warn(
        f"{loss}, but loss_scale={assumed:.4g} is assumed, with which the curvature is {(c / assumed) ** 2:.4g} "
        f"times what it should be: pass loss_scale={c:.4g}, and return a mean over the examples of a batch"
    )
    return None


class Reading:
    """From a tensor that the network returned for `x` to its output `f`; the same of a gradient."""

    def __init__(self, network: nn.Module, x: Any) -> None:
        self._network, self._output, self._x = unwrap_output(network), output_of(network), x

    def select(self, module: nn.Module, returned: Any) -> Tensor | None:
        """Among what the network, or a module inside it, returned."""
        return (self._output if module is self._network else Output()).select(returned)

    def __call__(self, t: Tensor) -> Tensor:
        t = self._output.arranged(t)
        return self._x.rows(t) if isinstance(self._x, inputs.Container) else t


class Watch:
    """Notes the outputs of some modules, of a given shape if it is known, until it is stopped."""

    def __init__(self, modules: Iterable[nn.Module], size: int, shape: torch.Size | None, reading: Reading) -> None:
        self._size, self._shape, self.reading = size, shape, reading
        self._seen: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
        self._handles = [module.register_forward_hook(self._note) for module in self._seen]

    @property
    def outputs(self) -> list[Tensor]:
        """Those of the first module that was called."""
        return next((seen for seen in self._seen.values() if seen), [])

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], {}

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = self.reading.select(module, output)
        if tensor is None or not tensor.requires_grad or not tensor.ndim:
            return  # under DDP, a call of the module may also be that of its step
        shape = self.reading(tensor).shape
        if shape == self._shape or (self._shape is None and shape[0] == self._size):
            self._seen[module].append(tensor)
