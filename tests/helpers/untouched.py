"""Everything about a user's module, and about the process, that a call must not change."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@contextmanager
def untouched(*networks: nn.Module) -> Iterator[None]:
    """Check that the code inside does not change the networks and random states, also when it raises."""
    before = [snapshot(network) for network in networks]
    try:
        yield
    finally:
        assert_same(before, [snapshot(network) for network in networks])


@contextmanager
def refused(network: nn.Module, error: type[Exception], match: str) -> Iterator[None]:
    """Check that the code inside raises `error`, and that no weight has changed."""
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    with pytest.raises(error, match=match):
        yield
    for name, p in network.named_parameters():  # the Trainer may have changed the dtype
        assert torch.equal(p.to(before[name].dtype), before[name]), name


def snapshot(network: nn.Module) -> dict[str, Any]:
    parameters = dict(network.named_parameters())
    return {
        "weights": {name: p.detach().clone() for name, p in parameters.items()},
        "identity": {name: id(p) for name, p in parameters.items()},
        "pointer": {name: p.data_ptr() for name, p in parameters.items()},
        "version": {name: p._version for name, p in parameters.items()},
        "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
        "grad": {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        "buffers": {name: b.clone() for name, b in network.named_buffers()},
        "modes": {name: m.training for name, m in network.named_modules()},
        "hooks": {name: [list(getattr(m, kind).items()) for kind in _HOOKS] for name, m in network.named_modules()},
        "gradient hooks": {
            name: [list((hooks or {}).items()) for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
            for name, p in parameters.items()
        },
        "attributes": {name: sorted(vars(m)) for name, m in network.named_modules()},
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),  # noqa: NPY002
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "attention": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
    }


def assert_same(before: Any, after: Any, where: str = "") -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key in before:
            assert_same(before[key], after[key], f"{where}/{key}")
    elif isinstance(before, (tuple, list)):
        assert len(before) == len(after), where
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            assert_same(a, b, f"{where}/{i}")
    elif isinstance(before, Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, numpy.ndarray):
        assert numpy.array_equal(before, after), where
    else:
        assert before == after, where
