"""The package uses private names of torch in `network/private.py` alone, and each name exists."""

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.autograd_functions import Cubed
from helpers.private_names import ROOT, defined_names, foreign_names, private_names, read
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR
from torch.utils import checkpoint

from lightning_bayes.network import private

FENCE = ROOT / "network" / "private.py"
OF_TORCH = {
    name
    for thing in (
        nn.Conv2d(1, 1, 1),
        torch.Tensor,
        torch,
        module_hooks,
        torch.ones(1, requires_grad=True).exp().grad_fn,
    )
    for name in dir(thing)
    if name.startswith("_") and not name.startswith("__")
}


def test_private_names_of_torch_are_behind_one_fence() -> None:
    sources = read(".", without=FENCE)
    del sources["trainer/private.py"]  # the fence around Lightning's
    ours = {name for source in sources.values() for name in defined_names(ast.parse(source))}
    ours |= {"_plot"}  # of torchmetrics, whose metrics call it to be drawn
    assert foreign_names(sources, ours - OF_TORCH) == []


def checkpointed(reentrant: bool) -> Any:
    x = torch.ones(2, requires_grad=True)
    return checkpoint.checkpoint(torch.exp, x, use_reentrant=reentrant)


FOREACH = (
    *("add_", "addcmul_", "clamp_max_", "clamp_min_", "copy_", "div_", "lerp_", "mul", "mul_", "reciprocal", "sqrt_"),
    "sub_",
)
EXISTS: dict[str, Callable[[], Any]] = {
    "_pytree": lambda: private.pytree.tree_map,
    "_ConvNd": lambda: nn.modules.conv._ConvNd,
    "_BatchNorm": lambda: nn.modules.batchnorm._BatchNorm,
    "_InstanceNorm": lambda: nn.modules.instancenorm._InstanceNorm,
    "_conv_forward": lambda: nn.Conv2d(1, 1, 1)._conv_forward,
    "_schedulers": lambda: ChainedScheduler([ConstantLR(SGD([torch.zeros(1)]))])._schedulers,
    "_orig_mod": lambda: torch.compile(nn.Linear(1, 1))._orig_mod,
    "_parameters": lambda: nn.Linear(1, 1)._parameters["weight"],
    "_buffers": lambda: nn.BatchNorm1d(1)._buffers["running_mean"],
    "_version": lambda: torch.ones(1)._version,
    **{f"_foreach_{name}": lambda name=name: getattr(torch, f"_foreach_{name}") for name in FOREACH},
    "_global_backward_hooks": lambda: module_hooks._global_backward_hooks,
    "_global_backward_pre_hooks": lambda: module_hooks._global_backward_pre_hooks,
    "_backward_hooks": lambda: (nn.Linear(1, 1)._backward_hooks, nn.Parameter()._backward_hooks),
    "_backward_pre_hooks": lambda: nn.Linear(1, 1)._backward_pre_hooks,
    "_post_accumulate_grad_hooks": lambda: nn.Parameter()._post_accumulate_grad_hooks,
    "_C": lambda: torch._C,
    "_disabled_torch_function_impl": lambda: torch._C._disabled_torch_function_impl,
    "_make_wrapper_subclass": lambda: torch.Tensor._make_wrapper_subclass,  # type: ignore[attr-defined]
    "_schema": lambda: torch.ops.aten.add_.Tensor._schema.is_mutable,
    "_input_metadata": lambda: torch.ones(1, requires_grad=True).exp().grad_fn._input_metadata,  # type: ignore[union-attr]
    "_forward_cls": lambda: type(Cubed.apply(torch.ones(1, requires_grad=True)).grad_fn)._forward_cls,
}


@pytest.mark.parametrize("name", EXISTS)
def test_each_private_name_exists(name: str) -> None:
    EXISTS[name]()


def test_every_private_name_is_known_to_exist() -> None:
    assert {name for _, name in private_names(ast.parse(FENCE.read_text(encoding="utf-8")))} == set(EXISTS)


@pytest.mark.parametrize(
    ("name", "operation", "value"),
    [
        ("training", lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)), False),
        ("normalized_shape", lambda x: F.layer_norm(x, (3,)), (3,)),
        ("pad", lambda x: F.pad(x, (1, 0)), (1, 0)),
        ("dim", lambda x: x.softmax(1), 1),
    ],
)
def test_values_that_operations_save(name: str, operation: Callable[[torch.Tensor], torch.Tensor], value: Any) -> None:
    node = operation(torch.ones(2, 3, requires_grad=True)).grad_fn
    assert node is not None
    assert private.saved(node, name) == value
    assert private.result_shape(node, 0) == operation(torch.ones(2, 3)).shape
    assert private.result_shape(node, 9) == ()


@pytest.mark.parametrize(
    ("reentrant", "reentrant_only", "refused"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_checkpointing_is_refused_inside_the_context_only(reentrant: bool, reentrant_only: bool, refused: bool) -> None:
    with private.refuse_recomputation(ArithmeticError("refused"), reentrant_only):
        if refused:
            with pytest.raises(ArithmeticError, match="refused"):
                checkpointed(reentrant)
        else:
            checkpointed(reentrant)
    assert torch.equal(checkpointed(reentrant), torch.ones(2).exp())
