"""`log σ` of the weights, a mapping from the weight's dotted name to a parameter of its shape; and name patterns.

`nn.ParameterDict` allows no dots in its keys. In a state dict they are slashes here, as in `log_sigma.net/0/weight`.
A pattern is `"net.0.weight"`, `"*.bias"`, or a module's name for all that it holds.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bayes.arguments import format_names

if TYPE_CHECKING:
    MixinBase = LightningModule
else:
    MixinBase = object  # a mixin stands before the user's own LightningModule
BELOW_PRIOR = 3.0  # log σ starts at log s − 3, section 5.1 of the Variational Laplace paper
Value = TypeVar("Value")


class PatternError(ValueError):
    """A pattern that fits no parameter."""


class LogSigma(nn.Module):
    """
    >>> import torch
    >>> log_sigma = LogSigma({"net.0.weight": torch.zeros(2, 3)})
    >>> log_sigma["net.0.weight"].shape, list(dict(log_sigma.named_parameters()))
    (torch.Size([2, 3]), ['net/0/weight'])
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._encoded = {name: encode(name) for name in values}
        for name, value in values.items():
            self.register_parameter(self._encoded[name], nn.Parameter(value))

    def __getitem__(self, name: str) -> nn.Parameter:
        if name not in self._encoded:
            raise KeyError(f"no log σ for {name!r}: it has no such parameter, or it is frozen or deterministic")
        return self.get_parameter(self._encoded[name])

    def __contains__(self, name: object) -> bool:
        return name in self._encoded

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)

    def keys(self) -> KeysView[str]:
        return self._encoded.keys()

    def values(self) -> ValuesView[nn.Parameter]:
        return dict(self.items()).values()

    def items(self) -> ItemsView[str, nn.Parameter]:
        return {name: self[name] for name in self._encoded}.items()


def encode(name: str) -> str:
    """A name without dots. A parameter of the top module gets a slash before it, or one that is called `values` would
    hide the method.

    >>> encode("net.0.weight"), encode("values")
    ('net/0/weight', '/values')
    """
    return name.replace(".", "/") if "." in name else f"/{name}"


def matches(name: str, pattern: str) -> bool:
    """
    >>> matches("net.0.weight", "*.weight"), matches("net.0.weight", "net.0"), matches("net.0.weight", "net")
    (True, True, True)
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def by_pattern(given: Mapping[str, Value], names: Iterable[str], argument: str) -> dict[str, Value]:
    """The value of each name that a pattern fits; where several do, that of the most specific one."""
    names = list(names)
    check_patterns(given, names, argument)
    most_specific_first = sorted(given, key=lambda pattern: len(re.sub(r"\[[^]]*\]|[*?]", "", pattern)), reverse=True)
    values = {name: next((given[p] for p in most_specific_first if matches(name, p)), None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_patterns(patterns: Iterable[str], names: Iterable[str], argument: str) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            known = format_names(names)
            raise PatternError(f"no parameter matches the pattern {pattern!r} of {argument}; their names are {known}")
