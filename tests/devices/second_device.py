"""A device that is not the CPU, on any machine: `second_device.cpp`, built once and kept for the user.

    with variant(float64=False): ...     # as Apple's MPS
    with variant(tf32=True): ...         # matrix products round as on a CUDA device with TF32

Its generators draw the numbers of a CPU generator of the same seed, so that results can be compared.
"""

from __future__ import annotations

import hashlib
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

NAME = "second"
_SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def load() -> str:
    """Register the device in this process; an empty string, or the reason why it cannot be."""
    from torch.utils import cpp_extension

    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "lightning_bayes_tests")
    library = folder / f"second_device_{key}.so"
    if library.exists():
        torch.ops.load_library(library)
    elif not cpp_extension.is_ninja_available():
        return "the second device needs ninja and a C++ compiler"
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as build:  # each process has its own: an interrupted one leaves no lock
            options = {"extra_cflags": ["-O1", "-w"], "build_directory": build, "is_python_module": False}
            try:
                cpp_extension.load("second_device", [str(_SOURCE)], **options)
            except (OSError, RuntimeError) as error:
                return f"the second device needs a C++ compiler ({str(error).splitlines()[0]})"
            os.replace(Path(build) / "second_device.so", library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    return ""


@contextmanager
def variant(float64: bool = True, tf32: bool = False) -> Iterator[None]:
    """What the package has learnt of the device before is forgotten."""
    from lightning_bayes.metrics.functional.statistics import accumulation_dtype
    from lightning_bayes.network.float64 import float64_device

    known = (float64_device, accumulation_dtype)
    torch.ops.second_device.set_variant(not float64, tf32)
    try:
        for each in known:
            each.cache_clear()
        yield
    finally:
        torch.ops.second_device.set_variant(False, False)
        for each in known:
            each.cache_clear()


class _Stream:
    """All work is done when a call returns."""

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


_STREAM = _Stream()
visible = True  # whether torch finds the device by itself, as `nn.DataParallel` does


def _module() -> types.ModuleType:
    """What `torch.cuda` is to CUDA."""
    module, ops = types.ModuleType(f"torch.{NAME}"), torch.ops.second_device
    functions = {
        "is_available": lambda: visible,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": nullcontext,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: _STREAM,
        "stream": nullcontext,
        "get_rng_state": lambda device=None: ops.get_rng_state(),
        "set_rng_state": lambda state, device=None: ops.set_rng_state(state),
        "manual_seed": ops.manual_seed,
        "manual_seed_all": ops.manual_seed,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    module.__dict__.update(functions)
    return module
