"""A guard against activation checkpointing, where running a layer again in the backward pass would be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils import checkpoint


@contextmanager
def refuse_recomputation(error: Exception, reentrant_only: bool = False) -> Iterator[None]:
    """Raise `error` where a layer is checkpointed, in both of torch's forms or in the reentrant one only. Torch has no
    hook for this: the names that `checkpoint` itself looks up are replaced while the context lasts."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    with ExitStack() as stack:
        stack.enter_context(_replaced(checkpoint.CheckpointFunction, "apply", refuse))
        if not reentrant_only:
            stack.enter_context(_replaced(checkpoint, "_checkpoint_hook", refuse))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)  # a class may inherit it
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
