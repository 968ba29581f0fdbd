"""The dry run: errors of a later fit, raised on the first batch and before the first step of an optimizer.

The batch is split, the network runs on it, its outputs and targets are checked against the likelihood, and the callback
tries its fit on two examples. The dry run restores weights, gradients, buffers, modes and random numbers. It has no
collective operations, so an error on one process cannot deadlock the other processes.

Then the loss of the module's own step is compared with the likelihood. A posterior depends on the loss only through
the network's outputs `f`, so the gradients are compared. If the loss is `c` times the mean negative log-likelihood,
plus any constants and weight penalties, then

    ∂ loss / ∂fₙ = −(c/B) rₙ,    rₙ = ∂ log p(yₙ | fₙ) / ∂fₙ,

at the outputs that the step has computed. If these outputs were not recorded (in a compiled step, or if the step does
not call the network as a module), the values of the loss are compared instead, with a larger tolerance.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import widen
from lightning_bayes.network import CurvatureError, DataError, inputs
from lightning_bayes.network.borrowed import RandomState, borrowed, eager, kept_buffers, preserved_rng
from lightning_bayes.network.errors import OutputError, first_line, is_out_of_memory
from lightning_bayes.network.float64 import in_float64
from lightning_bayes.network.messages import inform, warn
from lightning_bayes.network.output import Output, network_name, output_of, unwrap_output
from lightning_bayes.network.processes import is_sharded
from lightning_bayes.posterior.moments import default_loss_scale
from lightning_bayes.trainer.data import as_list
from lightning_bayes.trainer.module import ModuleError, is_variational, split_batch
from lightning_bayes.trainer.private import forward_context, gradient_scale, is_compiled

if TYPE_CHECKING:
    from lightning_bayes.trainer.posterior_callback import PosteriorCallback

EXAMPLES = 2  # number of examples in the trial fit
_SPLIT = "give the module a method split_batch(self, batch) that returns (x, y)"


class DryRun:
    """The dry run of one callback on the first batch of a `fit`: `begin` before the step, `compare` before its backward
    pass, and `stop` after it."""

    def __init__(self, callback: PosteriorCallback) -> None:
        self._callback = callback
        self._has_begun = False
        self._recorder: OutputRecorder | None = None
        self.f: Tensor | None = None  # outputs before the step, in eval mode; None for a sharded network
        self._x: Any = None
        self._y: Any = None
        self._rng: RandomState | None = None  # the random state at the start of the batch

    def begin(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Before the first step: raise errors that would otherwise occur in the fit, and start recording the network's
        outputs in the step."""
        self.stop()
        if self._has_begun:
            return
        self._has_begun, callback = True, self._callback
        network = callback.network_in(module)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in network.parameters()):
            return  # lazy layers get their shapes only in the first step, so there is no dry run
        pair = split_training_batch(trainer, module, batch, callback.needs_targets)
        if pair is None:
            return
        x, y = pair
        if not isinstance(y, Tensor):
            inputs.batch_size(x)  # raises an error of its own if x has no tensor either
            raise DataError(f"the targets of a batch must be a tensor, but they are {type(y).__name__}: {_SPLIT}")
        x = inputs.contained(network, x, y)
        size, modules = inputs.batch_size(x), [network]
        if not is_sharded(network):  # the first forward pass of a sharded network must be that of training_step
            with preserved_rng(module.device), forward_context(trainer), kept_buffers(network):
                self.f, modules = _run(network, callback.network.name, x, size)
                callback.read_by_targets(module, x, y)
                before, network = output_of(network), callback.network_in(module)
                after = output_of(network)
                if (before.class_dim, before.squeeze) != (after.class_dim, after.squeeze):
                    self.f = after.arranged(self.f)
                callback.likelihood.check(self.f, y)
                examples = slice(EXAMPLES)
                callback.try_fit(network, inputs.take(network, x, examples), y[examples])
        if module.automatic_optimization and not is_compiled(module):
            shape = None if self.f is None else self.f.shape
            self._recorder = OutputRecorder(modules, size, shape, OutputReader(network, x))
        self._x, self._y, self._rng = x, y, RandomState.now(module.device)

    def compare(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> LossFit | None:
        """Before the backward pass: compare the loss with the likelihood. Returns None if no comparison is possible."""
        y, f, recorder, likelihood = self._y, self.f, self._recorder, self._callback.likelihood
        if y is None or not module.automatic_optimization or is_variational(module):  # the mixin compares its own loss
            return None
        # Lightning has divided the loss by the number of accumulated batches, and 16-bit precision has scaled it.
        scale = trainer.accumulate_grad_batches / gradient_scale(trainer)
        fit = None
        if recorder is not None and recorder.outputs:
            with torch.autocast(module.device.type, enabled=False):
                if f is None:
                    likelihood.check(recorder.read(recorder.outputs[0].detach()), y)
                fit = compare_gradients(likelihood, loss, recorder.outputs, y, scale, recorder.read)
        if fit is None and f is not None and self._rng is not None and self._callback.trains_at_its_weights:
            outputs = _training_outputs(self._callback.network_in(module), self._x, self._rng, trainer)
            if isinstance(outputs, Tensor) and outputs.shape == f.shape:
                fit = compare_values(likelihood, loss, outputs, y, scale)
        return fit

    def stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = self.f = self._x = self._y = None


def split_training_batch(trainer: Trainer, module: LightningModule, batch: Any, needed: bool = True) -> Any:
    """`(x, y)` of a training batch, without moving the global random state. Returns None if the batch cannot be split
    and x and y are not `needed`."""
    loaders = trainer.train_dataloader
    if isinstance(loaders, (dict, list, tuple)) and len(loaders) == 1:
        (batch,) = as_list(batch)
    with preserved_rng(module.device), torch.no_grad():
        try:
            return split_batch(module, batch)
        except ModuleError:
            if needed or hasattr(module, "split_batch"):
                raise
            return None


def _run(network: nn.Module, path: str | None, x: Any, size: int) -> tuple[Tensor, list[nn.Module]]:
    """The outputs in eval mode, and the modules that return this same tensor, starting with the network."""
    name = f"the network {path!r}" if path else f"the network {network_name(network)}"
    reader = OutputReader(network, x)
    returned: list[tuple[nn.Module, weakref.ref[Tensor]]] = []  # weak, because activations need not be kept

    def record(module: nn.Module, args: Any, output: Any) -> None:
        tensor = reader.select(module, output)
        if tensor is not None:
            returned.append((module, weakref.ref(tensor)))

    with borrowed(network, ()), torch.no_grad(), _no_warnings(), register_module_forward_hook(record):
        try:
            f = inputs.call(network, x)
        except Exception as error:  # the user's network may raise anything
            if is_out_of_memory(error) or isinstance(error, OutputError):
                raise
            shapes = ", ".join(str(list(t.shape)) for t in inputs.tensors(x))
            problem = f"{type(error).__name__}: {first_line(error) or 'no message'}"
            raise ModuleError(
                f"{name} cannot be run on the x of a batch, of shape {shapes} ({problem}): name the "
                f"submodule that maps x to f with network=, or {_SPLIT}"
            ) from error
    if not isinstance(f, Tensor):
        raise CurvatureError(
            f"{name} must return one tensor, but it returned {type(f).__name__}: name the submodule that does with "
            "network=, or the entry that is f with output="
        )
    if f.ndim == 0 or len(f) != size:
        raise CurvatureError(
            f"{name} must return one row per example, but {size} examples gave an output of shape {tuple(f.shape)}: "
            "name the submodule that does with network="
        )
    modules = {unwrap_output(network): None}
    for module, reference in reversed(returned):
        t = reference()
        if t is not None and t.data_ptr() == f.data_ptr() and t.numel() == f.numel():  # up to the order of dimensions
            modules[module] = None
    return f, [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _training_outputs(network: nn.Module, x: Any, rng: RandomState, trainer: Trainer) -> Any:
    """The outputs in training mode, from the random state at the start of the step; None if the network cannot run that
    way."""
    if any(isinstance(module, nn.SyncBatchNorm) and module.training for module in network.modules()):
        return None  # its forward pass would wait for all processes
    # Run on copies, because the graph of the step still needs the buffers.
    buffers = {name: b.detach().clone() for name, b in network.named_buffers()}
    with preserved_rng(rng.device), torch.no_grad(), eager(), forward_context(trainer), _no_warnings():
        rng.restore()
        try:
            return inputs.run(network, x, buffers)
        except Exception as error:  # not an error: the step may call the network in another way
            if is_out_of_memory(error):
                raise
            return None


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Silence the network's warnings, because the step itself will repeat them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_memory(structure: str, n_vectors: int, size: int, like: Tensor) -> None:
    """Raise if the device cannot hold `n_vectors` vectors of length `size`: the rows of a full matrix and its Cholesky
    factor, or the basis of a low-rank fit."""
    needed, device = n_vectors * size * torch.promote_types(like.dtype, torch.float32).itemsize, like.device
    available = _free_memory(device)
    if needed > available:
        smaller = "" if structure == "full" else "a smaller rank=, "
        raise CurvatureError(
            f"structure={structure!r} over {size} weights needs {needed / 1e9:.3g} GB, but {device} has "
            f"{available / 1e9:.3g} GB: use {smaller}structure='kron' or 'diag', or subset='last_layer'"
        )


def _free_memory(device: torch.device) -> float:
    """Free bytes of the device. For the CPU, and for devices that share its memory, all bytes of the machine."""
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        # Torch can reuse memory that it has reserved but not allocated
        return float(free + module.memory_reserved(device) - module.memory_allocated(device))
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # the size of the memory is unknown on this system
        return float("inf")


# -- the loss ----------------------------------------------------------------------------------------------------------


_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative error of a gradient; 2e-2 for 16-bit outputs
_FLAT = 1e-3  # residuals below this size are mostly rounding: the gradients cannot be compared
_FAR_OFF = 0.25  # largest relative error of a plausible loss value, which penalties, augmentation and noise also change
SAME_SCALE = 0.01  # scales within this relative error count as equal


@dataclass(frozen=True)
class LossFit:
    """How a loss relates to the mean negative log-likelihood (NLL) of the same outputs."""

    loss: float
    nll: float  # the NLL as a mean over all targets, as in torch's losses
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
    network returned; `read` converts such a tensor to `f`, or its gradient to the gradient of `f`. Returns None if the
    graph does not allow the comparison."""
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
    """The gradient `g` of the outputs. If the outputs are log-probabilities, which the loss does not normalise again,
    this returns the gradient of the logits."""
    f, g = widen(f), widen(g)
    if not likelihood.chooses_one_class or f.logsumexp(1).abs().max() > 1e-3:
        return g
    return g - f.softmax(1) * g.sum(1, keepdim=True)


def compare_values(likelihood: Likelihood, loss: Tensor, f: Tensor, y: Tensor, scale: float) -> LossFit | None:
    """Compare only the value of the loss with that of the NLL. Returns None for a likelihood defined by the user."""
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
    """The scale to use instead of the default, if the loss is a sum or mean over the targets of an example. Otherwise
    returns None, to keep the default or `given` scale, and warns if the measured scale `c` differs from it."""
    assumed = default_loss_scale(likelihood, n_targets) if given is None else given
    if math.isclose(c, assumed, rel_tol=SAME_SCALE):
        return None
    loss = f"{name}: the loss of the training step is {c:.4g} times the mean negative log-likelihood"
    known = {scale / over for scale in likelihood.loss_scales for over in (1, n_targets)}
    fitting = [scale for scale in known if math.isclose(c, scale, rel_tol=SAME_SCALE)]
    if given is None and fitting:
        inform(f"{loss}, as for a sum or mean over the {n_targets} targets of an example: using it as loss_scale=")
        return fitting[0]
    warn(
        f"{loss}, but loss_scale={assumed:.4g} is assumed, so the curvature is {(c / assumed) ** 2:.4g} "
        f"times its true value: pass loss_scale={c:.4g}, and return a mean over the examples of a batch"
    )
    return None


class OutputReader:
    """Converts what the network returned for `x`, or its gradient, to the layout of the outputs `f`."""

    def __init__(self, network: nn.Module, x: Any) -> None:
        self._network, self._output, self._x = unwrap_output(network), output_of(network), x

    def select(self, module: nn.Module, returned: Any) -> Tensor | None:
        """The tensor of outputs in what the network, or a module inside it, returned."""
        return (self._output if module is self._network else Output()).select(returned)

    def __call__(self, t: Tensor) -> Tensor:
        t = self._output.arranged(t)
        return self._x.rows(t) if isinstance(self._x, inputs.Container) else t


class OutputRecorder:
    """Records the outputs of `modules` until `stop` is called. If `shape` is given, outputs of other shapes are
    skipped."""

    def __init__(self, modules: Iterable[nn.Module], size: int, shape: torch.Size | None, read: OutputReader) -> None:
        self._size, self._shape, self.read = size, shape, read
        self._outputs: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
        self._handles = [module.register_forward_hook(self._record) for module in self._outputs]

    @property
    def outputs(self) -> list[Tensor]:
        """The recorded outputs of the first of the modules that was called at all."""
        return next((outputs for outputs in self._outputs.values() if outputs), [])

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._outputs = [], {}

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = self.read.select(module, output)
        if tensor is None or not tensor.requires_grad or not tensor.ndim:
            return  # not an output: under DDP, calling the module may run its training step
        shape = self.read(tensor).shape
        if shape == self._shape or (self._shape is None and shape[0] == self._size):
            self._outputs[module].append(tensor)
