"""Parameters by name pattern: `"net.0.weight"`, `"*.bias"`, or a module's name for all that it holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

Value = TypeVar("Value")


class PatternError(ValueError):
    """A pattern that fits no parameter."""


def matches(name: str, pattern: str) -> bool:
    """
    >>> matches("net.0.weight", "*.weight"), matches("net.0.weight", "net.0"), matches("net.0.weight", "net")
    (True, True, True)
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def by_pattern(given: Mapping[str, Value], names: Iterable[str], argument: str) -> dict[str, Value]:
    """The value of each name that some pattern fits; where several do, of the one that says most."""
    names = list(names)
    check_patterns(given, names, argument)
    most_first = sorted(given, key=_letters, reverse=True)
    found = {name: next((given[p] for p in most_first if matches(name, p)), None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def check_patterns(patterns: Iterable[str], names: Iterable[str], argument: str) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            few = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise PatternError(f"no parameter matches the pattern {pattern!r} of {argument}; their names are {few}")


def _letters(pattern: str) -> int:
    """What a pattern says literally."""
    return len(re.sub(r"\[[^]]*\]|[*?]", "", pattern))
