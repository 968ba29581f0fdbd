"""Where the host waits for the device: a look at one number of a tensor (`.item()`, `bool(t)`, `float(t)`)."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_bayes

PACKAGE = str(Path(lightning_bayes.__file__).parent)
TESTS = str(Path(__file__).parents[1])  # where a user's own code is


class HostSynchronised(AssertionError):
    """The host has waited for the device."""


class NoSynchronisation(TorchDispatchMode):
    """Refuse such a look: from anywhere, or from the package's own code alone, not a user's step."""

    def __init__(self, only_package: bool = False) -> None:
        super().__init__()
        self.only_package = only_package

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            place = next(place for place in _callers() if place.startswith((PACKAGE, TESTS)))
            if place.startswith(PACKAGE) or not self.only_package:
                raise HostSynchronised(f"a number was read from a tensor inside the loop over batches, in {place}")
        return func(*args, **(kwargs or {}))


def _callers() -> list[str]:
    """The lines that are being run, the innermost first."""
    frame, places = sys._getframe(2), []
    while frame is not None:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return places
