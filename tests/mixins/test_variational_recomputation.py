"""Activation checkpointing runs layers again in the backward pass: with the weights and the noise that they had."""

from typing import Any

import pytest
import torch
from helpers.untouched import refused
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from variational_cases import Lit, gradients, images, options, spread, targets

from lightning_bayes.mixins import StepError, VariationalInferenceMixin, VariationalLaplaceMixin


class Checkpointed(Lit):
    """Two parts of the network are run again in the backward pass, the last one first."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.net[:2], x, use_reentrant=self.reentrant)  # type: ignore[index]
        return self.net[5:](checkpoint(self.net[2:5], x, use_reentrant=self.reentrant))  # type: ignore[index]


class CheckpointedWhole(Lit):
    """The network itself is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.nll(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])  # type: ignore[arg-type]


class Dropped(Lit):
    """Random numbers of torch's own between the layers."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.net[2] = nn.Dropout(0.5)  # type: ignore[index, operator]


class CheckpointedDropped(Checkpointed, Dropped):
    pass


def made(base: type, **more: Any) -> Any:
    return spread(type("Bayes", (VariationalInferenceMixin, base), {})(variational=options(**more)).double().train())


@pytest.mark.parametrize("more", [{}, {"train_samples": 3}], ids=["one sample", "three samples"])
@pytest.mark.parametrize("local", [False, True], ids=["weights", "outputs"])
@pytest.mark.parametrize(
    ("plain", "again", "network"),
    [(Lit, Checkpointed, None), (Lit, CheckpointedWhole, "net"), (Dropped, CheckpointedDropped, None)],
)
def test_activation_checkpointing_changes_nothing(
    plain: type, again: type, network: str | None, local: bool, more: dict[str, Any]
) -> None:
    """A layer that is run again in the backward pass has the noise that it had."""
    found = []
    for base in (plain, again):
        module = made(base, local_reparameterization=local, network=network if base is again else None, **more)
        torch.manual_seed(3)
        loss = module.training_step((images(6), targets("classification", 6)), 0)
        found.append({"loss": loss.detach(), **gradients(module, loss)})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


class Recurrent(Lit):
    """One layer, twice in a forward pass."""

    again = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.net = nn.ModuleList([nn.Linear(32, 4), nn.Linear(4, 4), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.net  # type: ignore[misc]
        x = first(x.flatten(1))
        for _ in range(2):
            x = torch.tanh(checkpoint(middle, x, use_reentrant=False) if self.again else middle(x))
        return last(x)


def test_a_layer_of_several_calls_cannot_be_run_again_with_its_noise() -> None:
    batch = images(6), targets("classification", 6)
    module = made(Recurrent, local_reparameterization=True)
    hooks = [len(m._forward_hooks) for m in module.modules()]
    with pytest.raises(StepError, match=r"the noise of net.1.weight, net.1.bias .* runs several times"):
        module.training_step(batch, 0)
    assert [len(m._forward_hooks) for m in module.modules()] == hooks
    once = made(Recurrent, local_reparameterization=True)
    once.again = False
    weights = gradients(once, once.training_step(batch, 0))["log_sigma.net/1/weight"]
    assert weights.abs().amin() > 0
    made(Recurrent).training_step(batch, 0)  # with sampled weights there is nothing to tell apart


@pytest.mark.parametrize("trained_input", [False, True])
@pytest.mark.parametrize("mixin", [VariationalInferenceMixin, VariationalLaplaceMixin])
def test_reentrant_checkpointing_is_refused_and_nothing_is_left_behind(mixin: type, trained_input: bool) -> None:
    """Without a refusal, the layers inside would silently have no gradient but that of the KL divergence."""
    module = type("Bayes", (mixin, Checkpointed), {})(variational=options()).double()
    module.reentrant = True
    apply = CheckpointFunction.apply
    with refused(module, StepError, r"reentrant activation checkpointing hides its layers.*entrant=False"):
        module.training_step((images(6).requires_grad_(trained_input), targets("classification", 6)), 0)
    assert not any(m._forward_hooks for m in module.modules())
    assert CheckpointFunction.apply == apply
    module.nll(module(images(6).requires_grad_()), targets("classification", 6)).backward()  # outside it is torch's
    assert module.net[3].weight.grad.any()
