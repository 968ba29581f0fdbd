"""The user's `training_step`, run as it is, while the one call of the network in it is noted down.

The loss that the step returns must be the mean negative log-likelihood of the output that was seen, so that what is
added to it (a squared gradient, a KL divergence) has the right scale. The call can be repeated at other weights: with
the same inputs, the same random numbers and the same buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_bayes.mixins.gaussian_weights import GaussianWeights
from lightning_bayes.mixins.step_checks import StepError, explicitly
from lightning_bayes.network import inputs
from lightning_bayes.network.borrowed import Buffers, RandomState, kept_buffers, preserved_rng, refuse_recomputation
from lightning_bayes.network.output import Output
from lightning_bayes.trainer.loss_check import mean_nll
from lightning_bayes.trainer.module import call_step, split_batch


@dataclass
class ForwardCall:
    """One call of the network: what went in and came out, and the state that it started from."""

    network: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]  # of the input tensors
    rng: RandomState
    buffers: Buffers
    returned: Any = None
    read_as: Output = field(default_factory=Output)
    x: Any = None  # what the batch says that the input is

    @property
    def output(self) -> Any:
        return self._read(self.returned)

    @property
    def tensor(self) -> Tensor:
        """The one among what was returned that holds the outputs."""
        tensor = self.read_as.select(self.returned)
        assert tensor is not None
        return tensor

    def read(self, tensor: Tensor) -> Tensor:
        """The outputs in it; or, in its gradient, theirs."""
        f = self.read_as.arranged(tensor)
        return self.x.rows(f) if isinstance(self.x, inputs.Container) else f

    def _read(self, returned: Any) -> Any:
        f = self.read_as(returned)
        return self.x.rows(f) if isinstance(self.x, inputs.Container) else f

    @property
    def input_requires_grad(self) -> bool:
        return any(t.requires_grad for t in inputs.tensors((self.args, self.kwargs)))

    @contextmanager
    def repeated(self) -> Iterator[Any]:
        """The output of the same call now; random state and buffers are as they were when the context is left, which
        must be after the backward pass, because that may look at buffers."""
        if self.versions != _versions(self.args, self.kwargs):
            raise StepError(
                f"{type(self.network).__name__} overwrites its input in place, so that its forward pass cannot be "
                "repeated: set variational={'method': 'exact'}"
            )
        with preserved_rng(self.rng.device), kept_buffers(self.network):
            self.rng.restore()
            self.buffers.restore()
            yield self._read(self.network(*self.args, **self.kwargs))


@dataclass
class Step:
    """What the user's step did: what it returned, and the one call of the network in it."""

    returned: Any
    loss: Tensor  # the mean NLL of the true labels
    call: ForwardCall
    f: Tensor
    y: Tensor  # without those that are wrong
    is_wrong: Tensor  # whether the step may not count

    def with_loss(self, loss: Tensor) -> Any:
        return {**self.returned, "loss": loss} if isinstance(self.returned, dict) else loss


def run_step(q: GaussianWeights, step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
    """Run the user's own step: a `Step`, or, where there is nothing to add, what it returned."""
    module, options = q.module, q.options
    q.called_vl_loss = False
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise StepError("a training_step that takes a dataloader_iter hides its batch: take the batch itself")
    # Only `backward()` sees into it: to `torch.autograd.grad` the parameters inside have no gradient.
    hidden = StepError(
        "reentrant activation checkpointing hides the layers inside from the gradients that a variational step "
        "computes: give torch.utils.checkpoint.checkpoint use_reentrant=False"
    )
    with watching(q.network) as calls, refuse_recomputation(hidden, reentrant_only=True):
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
    f, takes_returned, looks_now = call.output, options.loss == "returned", q.checks.looks_now
    y, is_wrong = q.checks.add(f.detach(), y, loss if takes_returned else None)
    if not takes_returned:
        loss = mean_nll(options.likelihood, f, y)
    elif looks_now and loss.requires_grad:
        q.checks.check_graph(loss, call.tensor, call.read, y)
    return Step(returned, loss, call, f, y, is_wrong)


@contextmanager
def watching(network: nn.Module) -> Iterator[list[ForwardCall]]:
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

    # First in, last out: the user's own hooks belong to the network.
    first = network.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    with first, network.register_forward_hook(after, with_kwargs=True):
        yield calls


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [t._version for t in inputs.tensors((args, kwargs)) if not t.is_inference()]


def _loss_of(returned: Any) -> Tensor | None:
    """The loss among what a step returns; None if it skips the batch."""
    if returned is None:
        return None
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise StepError(f"training_step must return the loss, a number, or a dict with it as 'loss', got {kind}")
    return loss.reshape(())


def _one_call(calls: list[ForwardCall], module: nn.Module, path: str | None, output: Output) -> ForwardCall:
    if len(calls) == 1:
        if output.select(calls[0].returned) is None:
            raise StepError(
                f"the network must return one tensor of outputs, but it returned {type(calls[0].returned).__name__}: "
                "name the submodule that does with variational={'network': …}, or the entry with 'output'"
            )
        return calls[0]
    children = ", ".join(name for name, _ in module.named_children() if name != "log_sigma") or "none"
    what = f"the network {path!r}" if path else f"{type(module).__name__}.forward (the network, by default)"
    raise StepError(
        f"training_step called {what} {len(calls)} times, not once: {'' if path else 'call self(x) once in it, or '}"
        f"name the submodule that maps x to f with variational={{'network': …}} ({children}){explicitly(module)}"
    )
