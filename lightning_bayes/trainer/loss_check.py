"""Compare the loss of a training step with the likelihood that a posterior assumes.

The posterior depends on the loss only through the network's outputs `f`, so the gradients are compared. If the loss is
`c` times the mean negative log-likelihood, plus any constants and weight penalties, then

    ∂ loss / ∂fₙ = −(c/B) rₙ,    rₙ = ∂ log p(yₙ | fₙ) / ∂fₙ,

at the outputs that the step has computed. If these were not recorded (in a compiled step, or if the step does not call
the network as a module), the values of the loss are compared instead, with a larger tolerance.
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

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative, of a gradient; 2e-2 for 16-bit outputs
_FLAT = 1e-3  # smaller residuals are mostly rounding
_FAR_OFF = 0.25  # relative, of a value, which penalties, augmentation and noise change as well
SAME_SCALE = 0.01  # relative


@dataclass(frozen=True)
class LossFit:
    """How a loss relates to the mean negative log-likelihood (NLL) of the same outputs."""

    loss: float
    nll: float  # a mean over all targets, as in torch's losses
    scale: float | None  # `c`, if the loss is `c` times the NLL up to terms that do not depend on the outputs
    fits: bool  # False if the loss belongs to another likelihood


def mean_nll(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """`−(1/B) Σₙ log p(yₙ | fₙ)`."""
    return -likelihood.log_likelihood(f, y) / len(f)


def compare_gradients(
    likelihood: Likelihood,
    loss: Tensor,
    outputs: list[Tensor],
    y: Tensor,
    scale: float,
    read: Callable[[Tensor], Tensor],
) -> LossFit | None:
    """Compare the gradients of `loss` times `scale` and of the NLL with respect to `outputs`, the tensors that the
    network returned; `read` turns such a tensor, or its gradient, into `f`. Returns None if the graph has no answer."""
    try:
        gradients = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    except RuntimeError as error:  # the graph supports one backward pass only, or no `autograd.grad`
        if is_out_of_memory(error):
            raise
        return None
    used = [(read(f), read(g)) for f, g in zip(outputs, gradients, strict=True) if g is not None]
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
    c = float(g @ r / (r @ r)) * len(used)  # the loss averages over several calls, at samples of the weights
    deviation = (g - c / len(used) * r).norm() / g.norm()
    fits = c > 0 and bool(deviation <= _TOLERANCE.get(detached[0].dtype, 2e-2))
    return LossFit(float(loss.detach()) * scale, nll, c if fits else None, fits)


def _before_normalisation(likelihood: Likelihood, f: Tensor, g: Tensor) -> Tensor:
    """The gradient; for log-probabilities, which a loss may use without normalising them, the one of their logits."""
    f, g = widen(f), widen(g)
    if not likelihood.chooses_one_class or f.logsumexp(1).abs().max() > 1e-3:
        return g
    return g - f.softmax(1) * g.sum(1, keepdim=True)


def compare_values(likelihood: Likelihood, loss: Tensor, f: Tensor, y: Tensor, scale: float) -> LossFit | None:
    """Compare the values only; None for a likelihood defined by the user."""
    if not type(likelihood).__module__.startswith("lightning_bayes."):
        return None
    value, B = float(loss.detach()) * scale, len(y)
    total = -float(likelihood.log_likelihood(f, y))
    observed = max(1, int(likelihood.n_targets(y)))
    candidates = [
        (s * B / over, s * part / over)
        for s in likelihood.loss_scales
        for over in (B, y.numel(), observed, 1)
        for part in (total, total - likelihood.constant(y))
    ]
    errors = [abs(value - expected) / max(abs(expected), 1e-3) for _, expected in candidates]
    smallest = min(errors)
    c = candidates[errors.index(smallest)][0] if smallest <= _TOLERANCE[torch.float32] else None
    return LossFit(value, total / observed, c, smallest <= _FAR_OFF)


def explain(fit: LossFit, likelihood: Likelihood, f: Tensor | None) -> str:
    """Describe a loss that does not belong to the likelihood, and the usual causes."""
    cause = (
        "Check for a softmax or sigmoid in the network, another likelihood=, a network= that is not the one whose "
        "outputs the loss uses, label smoothing, class weights, or mixed targets"
    )
    if f is not None and likelihood.chooses_one_class and bool((f >= 0).all()):
        sums = widen(f).sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
            cause = "The network's outputs are probabilities, but logits are expected: remove its softmax"
    return (
        f"the loss of the training step, {fit.loss:.6g} for the first batch, does not depend on the network's outputs "
        f"as the negative log-likelihood of {type(likelihood).__name__} does (mean {fit.nll:.6g}), which the posterior "
        f"assumes. {cause}"
    )


def recognise_scale(name: str, likelihood: Likelihood, c: float, given: float | None, n_targets: int) -> float | None:
    """The scale to use instead of the default, if the loss is a sum or mean over the targets of an example. Warns and
    returns None if `c` is neither `given` nor a scale of torch's losses."""
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
        f"{loss}, but loss_scale={assumed:.4g} is assumed, so the curvature is {(c / assumed) ** 2:.4g} "
        f"times its true value: pass loss_scale={c:.4g}, and return a mean over the examples of a batch"
    )
    return None


class OutputReader:
    """Turns what the network returned for `x` into its outputs `f`, and gradients likewise."""

    def __init__(self, network: nn.Module, x: Any) -> None:
        self._network, self._output, self._x = unwrap_output(network), output_of(network), x

    def select(self, module: nn.Module, returned: Any) -> Tensor | None:
        """The tensor of outputs in what the network, or a module inside it, returned."""
        return (self._output if module is self._network else Output()).select(returned)

    def __call__(self, t: Tensor) -> Tensor:
        t = self._output.arranged(t)
        return self._x.rows(t) if isinstance(self._x, inputs.Container) else t


class OutputRecorder:
    """Records the outputs of some modules until it is stopped; outputs of another `shape`, if given, are skipped."""

    def __init__(self, modules: Iterable[nn.Module], size: int, shape: torch.Size | None, read: OutputReader) -> None:
        self._size, self._shape, self.read = size, shape, read
        self._outputs: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
        self._handles = [module.register_forward_hook(self._record) for module in self._outputs]

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs of the first module that was called."""
        return next((outputs for outputs in self._outputs.values() if outputs), [])

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._outputs = [], {}

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = self.read.select(module, output)
        if tensor is None or not tensor.requires_grad or not tensor.ndim:
            return  # under DDP, a call of the module may also be one of its step
        shape = self.read(tensor).shape
        if shape == self._shape or (self._shape is None and shape[0] == self._size):
            self._outputs[module].append(tensor)
