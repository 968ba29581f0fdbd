"""The user's `training_step` inside a variational one: it runs unchanged, its loss is checked, and the loss gets
another gradient.

One forward pass of the network is recorded. It can be repeated at other weights with the same inputs, random numbers
and buffers. The returned loss must be the mean negative log-likelihood (NLL) of the recorded outputs, so that a squared
gradient or a KL divergence can be added at the right scale.

The checks of a step stay on the device, because reading a value forces a device sync. Their results are read in the
first step, every `CHECK_INTERVAL` steps, and at the end of an epoch. Until an error is raised, a bad step has a
gradient of zero, so it does not change the weights. Two checks need the graph of the loss and run only in the steps
that read results: the loss must depend on parameters only through the network's outputs, and its gradient with respect
to the outputs must be that of the NLL.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_bayes.arguments import format_names
from lightning_bayes.jacobian.checks import CHECK_INTERVAL, FirstWrong, check_fit, wrong_in
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import LikelihoodError
from lightning_bayes.network import inputs, private
from lightning_bayes.network.borrowed import Buffers, RandomState, kept_buffers, preserved_rng
from lightning_bayes.network.output import Output
from lightning_bayes.network.private import refuse_recomputation
from lightning_bayes.trainer.dry_run import SAME_SCALE, compare_gradients, explain, mean_nll
from lightning_bayes.trainer.module import call_step, split_batch

if TYPE_CHECKING:
    from lightning_bayes.mixins.gaussian_weights import GaussianWeights

Gradients = dict[nn.Parameter, Tensor]


class StepError(RuntimeError):
    """A `training_step` that cannot be made variational; the message says what to change."""


# -- running the step --------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """The result of the user's step, and the recorded call of the network."""

    returned: Any
    loss: Tensor  # the mean NLL of the true labels
    call: ForwardCall
    f: Tensor
    y: Tensor  # the targets, with zeros in place of wrong targets
    is_wrong: Tensor  # whether the step failed a check and must have no effect on the weights

    def with_loss(self, loss: Tensor) -> Any:
        return {**self.returned, "loss": loss} if isinstance(self.returned, dict) else loss


def run_step(q: GaussianWeights, step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
    """Run the user's step. Returns a `Step`. If the variational loss needs nothing more (the step skipped the batch, or
    called `vl_loss` itself), this returns what the user's step returned."""
    module, options = q.module, q.options
    q.called_vl_loss = False
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise StepError("training_step takes a dataloader_iter, which hides the batch: take the batch itself")
    # Reentrant activation checkpointing works only with `backward()`: `torch.autograd.grad` finds no gradient for the
    # parameters inside.
    hidden = StepError(
        "reentrant activation checkpointing hides its layers from the gradients of a variational step: call "
        "torch.utils.checkpoint.checkpoint with use_reentrant=False"
    )
    with recorded_calls(q.network) as calls, refuse_recomputation(hidden, reentrant_only=True):
        returned = call_step(step, batch, batch_idx=batch_idx)
    if q.called_vl_loss:
        return returned
    if not module.automatic_optimization:
        raise StepError(
            "under manual optimization your own training_step differentiates the loss: use self.vl_loss(f, y) there"
        )
    loss = _loss_of(returned)
    if loss is None:
        return returned
    call = _one_call(calls, module, options.network.name, q.read_as)
    x, y = split_batch(module, batch)
    if isinstance(y, Tensor):
        q.read_as = q.read_as.with_targets(call.returned, y, options.likelihood.chooses_one_class)
    call.read_as, call.x = q.read_as, inputs.contained(q.network, x, y)
    f, takes_returned, is_due = call.output, options.loss == "returned", q.checks.is_due
    y, is_wrong = q.checks.add(f.detach(), y, loss if takes_returned else None)
    if not takes_returned:
        loss = mean_nll(options.likelihood, f, y)
    elif is_due and loss.requires_grad:
        q.checks.check_graph(loss, call.tensor, call.read, y)
    return Step(returned, loss, call, f, y, is_wrong)


@dataclass
class ForwardCall:
    """One call of the network: its inputs and outputs, and the random state and buffers before the call."""

    network: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]  # version counters of the input tensors, which reveal changes in place
    rng: RandomState
    buffers: Buffers
    returned: Any = None
    read_as: Output = field(default_factory=Output)
    x: Any = None  # the inputs x of the batch

    @property
    def tensor(self) -> Tensor:
        """The tensor in `returned` with the outputs."""
        return self._select(self.returned)

    @property
    def output(self) -> Tensor:
        return self.read(self.tensor)

    def read(self, tensor: Tensor) -> Tensor:
        """Extract the outputs from a returned tensor, or their gradients from its gradient."""
        f = self.read_as.arranged(tensor)
        return self.x.rows(f) if isinstance(self.x, inputs.Container) else f

    def _select(self, returned: Any) -> Tensor:
        tensor = self.read_as.select(returned)
        assert tensor is not None
        return tensor

    @property
    def input_requires_grad(self) -> bool:
        return any(t.requires_grad for t in inputs.tensors((self.args, self.kwargs)))

    @contextmanager
    def repeated(self) -> Iterator[Tensor]:
        """Repeat the call at the current weights and yield its output. Leaving the context restores random state and
        buffers, so the backward pass, which may read buffers, must end inside."""
        if self.versions != _versions(self.args, self.kwargs):
            raise StepError(
                f"{type(self.network).__name__} overwrites its input in place, so its forward pass cannot be repeated: "
                "set variational={'method': 'exact'}"
            )
        with preserved_rng(self.rng.device), kept_buffers(self.network):
            self.rng.restore()
            self.buffers.restore()
            yield self.read(self._select(self.network(*self.args, **self.kwargs)))


@contextmanager
def recorded_calls(network: nn.Module) -> Iterator[list[ForwardCall]]:
    calls: list[ForwardCall] = []
    started: list[ForwardCall] = []
    device = inputs.device_of(network)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        rng = RandomState.now(device)
        started.append(ForwardCall(network, args, kwargs, _versions(args, kwargs), rng, Buffers(network)))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = started.pop()
        call.returned = output
        calls.append(call)

    # The hooks run before and after all hooks of the user, which count as part of the network.
    first = network.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    with first, network.register_forward_hook(after, with_kwargs=True):
        yield calls


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [private.write_count(t) for t in inputs.tensors((args, kwargs))]


def _loss_of(returned: Any) -> Tensor | None:
    """The loss in what a step returned; None if the step skips the batch."""
    if returned is None:
        return None
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise StepError(f"training_step must return the loss, a number, or a dict with it as 'loss', got {kind}")
    return loss.reshape(())


def _one_call(calls: list[ForwardCall], module: nn.Module, path: str | None, output: Output) -> ForwardCall:
    if len(calls) != 1:
        children = ", ".join(name for name, _ in module.named_children() if name != "log_sigma") or "none"
        name = f"the network {path!r}" if path else f"{type(module).__name__}.forward (the network, by default)"
        raise StepError(
            f"training_step called {name} {len(calls)} times, not once: "
            f"{'' if path else 'call self(x) once in it, or '}name the submodule that maps x to f with "
            f"variational={{'network': …}} ({children}){_or_vl_loss(module)}"
        )
    if output.select(calls[0].returned) is None:
        raise StepError(
            f"the network must return one tensor of outputs, but it returned {type(calls[0].returned).__name__}: "
            "name the submodule that does with variational={'network': …}, or the entry with 'output'"
        )
    return calls[0]


# -- checking the step -------------------------------------------------------------------------------------------------


class StepChecks:
    """Checks of the outputs, targets and losses of the steps of one process."""

    def __init__(self, module: nn.Module, likelihood: Likelihood) -> None:
        self._module, self._likelihood = module, likelihood
        self._n_steps = 0
        self._wrong, self._outputs = FirstWrong(), torch.empty(0, device="cpu")  # empty until the first step

    @property
    def is_due(self) -> bool:
        """Whether the current step reads the checks."""
        return self._n_steps % CHECK_INTERVAL == 0

    def add(self, f: Tensor, y: Tensor, loss: Tensor | None) -> tuple[Tensor, Tensor]:
        """Check a step. `loss`, if given, must equal the mean NLL. Returns the targets, with zeros in place of wrong
        targets, and whether any check failed."""
        check_fit(self._likelihood, f, y)
        if self.is_due:
            self.raise_pending()  # raises the first error of the earlier steps
            self._likelihood.check(f, y)
        is_nan = f.isnan().any()
        wrong, is_impossible, target = wrong_in(self._likelihood, f, y)
        y, differs = y.masked_fill(wrong, 0), torch.zeros_like(is_nan)
        a = b = f.new_zeros(())
        if loss is not None:
            a, b = loss.detach(), mean_nll(self._likelihood, f, y)
            rounding = torch.finfo(f.dtype).eps ** 0.5 * b.abs().clamp_min(1)
            differs = ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= rounding))
        is_wrong = is_nan | is_impossible | differs
        self._wrong.note(is_wrong, is_nan, is_impossible, target, a, b)
        self._outputs = f.new_empty(0, *f.shape[1:])
        if self.is_due:
            self.raise_pending()
        self._n_steps += 1
        return y, is_wrong

    def raise_pending(self) -> None:
        """Raise the error of the first bad step since the last call."""
        numbers = self._wrong.read()
        if numbers is None:
            return
        is_nan, is_impossible, target, loss, nll = numbers
        if is_impossible:
            raise self._likelihood.wrong_target(target, self._outputs)
        if is_nan:
            raise LikelihoodError(
                f"{type(self._likelihood).__name__} got NaN in the network's output; check the inputs and the weights."
            )
        raise StepError(
            f"training_step returned {loss:.6g}, but the mean negative log-likelihood of the network's outputs is "
            f"{nll:.6g}. Return that mean over examples, including constants, check variational's 'likelihood' (for a "
            "regression, also its noise) and 'network', or set variational={'loss': 'likelihood'} to ignore the "
            f"returned loss{_or_vl_loss(self._module)}"
        )

    def check_graph(self, loss: Tensor, returned: Tensor, read: Callable[[Tensor], Tensor], y: Tensor) -> None:
        """Check that the loss depends on parameters only through the tensor that the network `returned`, and that its
        gradient with respect to this tensor equals that of the mean NLL. `read` extracts the outputs from
        `returned`."""
        around = {id(leaf) for leaf in _leaves_around(loss, returned)}
        parameters = {name: p for name, p in self._module.named_parameters() if id(p) in around}
        names = _with_direct_gradient(loss, returned, parameters)
        if names:
            raise StepError(
                f"the loss of training_step depends on {format_names(names)} besides the network's outputs, but a "
                "variational step trains only through the outputs: move everything that maps x to f into the module "
                f"that variational={{'network': …}} names, and penalties into weight decay{_or_vl_loss(self._module)}"
            )
        fit = compare_gradients(self._likelihood, loss, [returned], y, 1.0, read)
        if fit is None:
            return
        if not fit.fits:
            raise StepError(explain(fit, self._likelihood, read(returned.detach())) + _or_vl_loss(self._module))
        if fit.scale is not None and not math.isclose(fit.scale, 1, rel_tol=SAME_SCALE):
            raise StepError(
                f"the gradient of the loss of training_step is {fit.scale:.4g} times that of the mean negative "
                f"log-likelihood: return that mean, without label smoothing or other factors{_or_vl_loss(self._module)}"
            )


def _or_vl_loss(module: nn.Module) -> str:
    return "; a step of another form can return self.vl_loss(f, y)" if hasattr(module, "vl_loss") else ""


def _leaves_around(loss: Tensor, returned: Tensor) -> list[Tensor]:
    """The leaf tensors that the loss reaches by paths of the graph that do not pass through `returned`."""
    leaves: list[Tensor] = []
    visited, waiting = {returned.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _with_direct_gradient(loss: Tensor, returned: Tensor, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of the parameters that get a nonzero part of their gradient by a path around `returned`. A term such as
    `0 * p.sum()` does not count, because its gradient is zero."""
    if not parameters or not returned.requires_grad:
        return []
    θ = list(parameters.values())
    of_returned, *whole = torch.autograd.grad(loss, [returned, *θ], retain_graph=True, allow_unused=True)
    # The graph of a compiled step does not connect the loss with `returned`
    if of_returned is None:
        return []
    through = torch.autograd.grad(returned, θ, of_returned, retain_graph=True, allow_unused=True)
    names = []
    for name, g, t in zip(parameters, whole, through, strict=True):
        expected = torch.zeros_like(g) if t is None else t
        if (g - expected).norm() > 1e-3 * expected.norm():
            names.append(name)
    return names


# -- another gradient --------------------------------------------------------------------------------------------------


@torch.no_grad()
def without_wrong(gradients: Gradients, is_wrong: Tensor) -> Gradients:
    """The gradients, or zeros if `is_wrong`, without a device sync. Multiplying by zero would not work, because NaN
    times zero is NaN."""
    return {p: g.masked_fill(is_wrong, 0) for p, g in gradients.items()}


def with_known_gradient(value: Tensor, gradients: Gradients) -> Tensor:
    """A scalar equal to `value` whose gradients are the given ones. Parameters without a given gradient are not part of
    its graph.

    Lightning differentiates the result of `training_step`, with loss scaling, accumulation and the hooks of DDP. With
    this function, gradients that were computed inside the step get the same treatment.

    >>> w = nn.Parameter(torch.ones(2))
    >>> (3 * with_known_gradient(torch.tensor(5.0), {w: torch.tensor([1.0, 2.0])})).backward()
    >>> w.grad
    tensor([3., 6.])
    """
    loss: Tensor = _KnownGradient.apply(value.detach(), list(gradients.values()), *gradients)
    return loss


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *private.foreach_mul(ctx.gradients, cotangent))
