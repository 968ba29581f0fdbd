"""Messages to the user. There is one function for each of the three kinds:

| function | for | where it appears |
|---|---|---|
| `warn` | what the user should change | a `BayesWarning` at the line of the user's code that led here |
| `inform` | what was done, in one line | level `INFO` of the logger `lightning_bayes` |
| `detail` | how it was done | level `DEBUG` of the same logger, which is off by default |

Warnings and reports come from the first process only. If the program has not configured logging, reports are written
to stderr, as Lightning's are. Progress bars are `loaders.progress_bar`.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings

import torch.distributed as dist

logger = logging.getLogger("lightning_bayes")
if not logger.level:  # the program has not set a level
    logger.setLevel(logging.INFO)
_stderr = logging.StreamHandler()
_stderr.addFilter(lambda record: not logging.root.handlers)
logger.addHandler(_stderr)
detail = logger.debug  # how something was done, on every process

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # set by launchers, in Lightning's order
_NOT_THE_USERS = {"lightning_bayes", "lightning", "lightning_fabric", "pytorch_lightning", "torch"}


class BayesWarning(UserWarning):
    """The category of all warnings of this package, for `warnings.filterwarnings`."""


def warn(message: str, *values: object, from_all: bool = False) -> None:
    """Warn about something that the user should change. `values` fill the placeholders of `message`, as in `logging`.
    With `from_all`, every process warns, because the first one may not see the problem."""
    if not (from_all or _is_first_process()):
        return
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message % values if values else message, BayesWarning, stacklevel=level)


def inform(message: str, *values: object) -> None:
    """Report what was done."""
    if _is_first_process():
        logger.info(message, *values, stacklevel=2)


def _is_internal(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _NOT_THE_USERS or package in sys.stdlib_module_names


def _is_first_process() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"
