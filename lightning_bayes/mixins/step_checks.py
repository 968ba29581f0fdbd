"""What is wrong with a training step, noted on the device: a look at a number makes the host wait.

Each step notes whether an output is NaN, a target impossible, or the returned loss not the mean negative log-likelihood
of the outputs. The notes are looked at in the first step, every `EVERY` steps, and at the end of an epoch. Until then
a step with which something is wrong has a gradient of zero, so that weights stay as good as they were. What only the
loss's graph shows is checked in the steps with a look: that the loss depends on parameters through the outputs alone,
and on the outputs as the likelihood does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_bayes.arguments import format_names
from lightning_bayes.jacobian.checks import EVERY, FirstWrong, check_fit, wrong_in
from lightning_bayes.likelihoods import Likelihood
from lightning_bayes.likelihoods.outputs import LikelihoodError
from lightning_bayes.trainer.loss_check import SAME_SCALE, compare_gradients, explain, mean_nll


class StepError(RuntimeError):
    """A `training_step` that cannot be made variational as it is; the message says what to change."""


class StepChecks:
    """The outputs, targets and losses of the steps of one process."""

    def __init__(self, module: nn.Module, likelihood: Likelihood) -> None:
        self._module, self._likelihood = module, likelihood
        self._n_steps = 0
        self._wrong, self._outputs = FirstWrong(), torch.empty(0, device="cpu")  # of no example

    @property
    def looks_now(self) -> bool:
        """Whether the step that runs is one in which numbers are looked at."""
        return self._n_steps % EVERY == 0

    def add(self, f: Tensor, y: Tensor, loss: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the targets, zero where they are wrong, and whether anything is. `loss` is to be the mean NLL."""
        check_fit(self._likelihood, f, y)
        if self.looks_now:
            self.look()  # at earlier steps
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
        if self.looks_now:
            self.look()
        self._n_steps += 1
        return y, is_wrong

    def look(self) -> None:
        """Raise what was wrong with the first bad step since the last look."""
        numbers = self._wrong.look()
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
            f"{nll:.6g}: return that mean (over examples, constants included); or check variational's 'likelihood' (a "
            "regression's noise too) and 'network'; or set variational={'loss': 'likelihood'} to train on the "
            "likelihood whatever the step returns (a mean squared error, a mean over outputs)"
            + explicitly(self._module)
        )

    def check_graph(self, loss: Tensor, returned: Tensor, read: Callable[[Tensor], Tensor], y: Tensor) -> None:
        """The loss must reach parameters through what the network `returned` alone, from which the outputs are `read`,
        and its gradient in them must be the mean NLL's."""
        around = {id(leaf) for leaf in _reached_around(loss, returned)}
        parameters = {name: p for name, p in self._module.named_parameters() if id(p) in around}
        names = _with_direct_gradient(loss, returned, parameters)
        if names:
            raise StepError(
                f"the loss of training_step depends on {format_names(names)} beside the network's outputs, through "
                "which alone a variational step trains: put all that maps x to f into the module that "
                f"variational={{'network': …}} names, and the rest into weight decay{explicitly(self._module)}"
            )
        fit = compare_gradients(self._likelihood, loss, [returned], y, 1.0, read)
        if fit is None:  # which says nothing
            return
        if not fit.fits:
            raise StepError(explain(fit, self._likelihood, read(returned.detach())) + explicitly(self._module))
        if fit.scale is not None and not math.isclose(fit.scale, 1, rel_tol=SAME_SCALE):
            raise StepError(
                f"the gradient of the loss of training_step is {fit.scale:.4g} times that of the mean negative "
                f"log-likelihood: return that mean, without label smoothing or other factors{explicitly(self._module)}"
            )


def explicitly(module: nn.Module) -> str:
    return "; a step of another form can return self.vl_loss(f, y)" if hasattr(module, "vl_loss") else ""


def _reached_around(loss: Tensor, returned: Tensor) -> list[Tensor]:
    """The leaves on paths of the graph that do not go through `returned`."""
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
    """Those in which the loss has a gradient that does not come through `returned`; that of `0 * p.sum()` is zero."""
    if not parameters or not returned.requires_grad:
        return []
    θ = list(parameters.values())
    of_returned, *whole = torch.autograd.grad(loss, [returned, *θ], retain_graph=True, allow_unused=True)
    if of_returned is None:  # of a compiled step the graph says nothing
        return []
    through = torch.autograd.grad(returned, θ, of_returned, retain_graph=True, allow_unused=True)
    names = []
    for name, g, t in zip(parameters, whole, through, strict=True):
        expected = torch.zeros_like(g) if t is None else t
        if (g - expected).norm() > 1e-3 * expected.norm():
            names.append(name)
    return names
