"""Detect device syncs: reading a value of a tensor (`.item()`, `bool(t)`, `float(t)`)."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_bayes

PACKAGE = str(Path(lightning_bayes.__file__).parent)
TESTS = str(Path(__file__).parents[1])  # where a user's own code is


class HostSynchronised(AssertionError):
    """A device sync happened."""


class NoSynchronisation(TorchDispatchMode):
    """Raise on a device sync, from any code or only from the package's."""

    def __init__(self, only_package: bool = False) -> None:
        super().__init__()
        self.only_package, self._copies = only_package, _NoCopies(self)

    def __enter__(self) -> Any:
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.refuse()
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        place = next(place for place in _callers() if place.startswith((PACKAGE, TESTS)))
        if place.startswith(PACKAGE) or not self.only_package:
            raise HostSynchronised(f"a number was read from a tensor inside the loop over batches, in {place}")


class _NoCopies(TorchFunctionMode):
    """Copies to the host, which a dispatch mode does not see on the CPU."""

    def __init__(self, owner: NoSynchronisation) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self._owner.refuse()
        return func(*args, **(kwargs or {}))


def _callers() -> list[str]:
    """The lines of the call stack, innermost first."""
    frame, places = sys._getframe(3), []
    while frame is not None:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return places
