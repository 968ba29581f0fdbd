"""Argument checks. Each check returns the value, or raises an error that names the argument and says which values it
accepts. This module also reads options from words and mappings.

The module needs only Python, so every layer can use it. `name` is the name of the argument, `error` the exception type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


def format_value(value: Any) -> str:
    """Format a value for a message: short, and on one line.

    >>> format_value("ten"), format_value([1.0, 2.0])
    ("'ten'", '[1.0, 2.0]')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and len(value.shape):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    if text.startswith("<"):  # a repr with a memory address does not help
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def format_names(names: Sequence[str], most: int = 3) -> str:
    """List the first names for a message."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number. Excludes bool, str and NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def positive(name: str, value: Any, error: type[Exception] = ValueError) -> float:
    if not is_positive(value):
        raise error(f"{name} must be a positive, finite number, got {format_value(value)}")
    return value


def not_negative(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {format_value(value)}")
    return value


def between(
    name: str, value: Any, low: float, high: float, error: type[Exception] = ValueError, borders: bool = True
) -> float:
    if not is_number(value):
        raise error(f"{name} must be a number, got {format_value(value)}")
    if not (low <= value <= high if borders else low < value < high):
        raise error(
            f"{name} must be {'' if borders else 'strictly '}between {low:g} and {high:g}, got {format_value(value)}"
        )
    return value


def is_integer(value: Any) -> bool:
    """Whether `value` is a whole number. Excludes bool and float."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def count(name: str, value: Any, least: int = 1, error: type[Exception] = ValueError) -> int:
    if not is_integer(value) or value < least:
        raise error(f"{name} must be a whole number of at least {least}, got {format_value(value)}")
    return value


def integer(name: str, value: Any, error: type[Exception] = ValueError) -> int:
    if not is_integer(value):
        raise error(f"{name} must be a whole number, got {format_value(value)}")
    return value


def seed(name: str, value: Any) -> int:
    """A whole number that a `torch.Generator` accepts."""
    if count(name, value, 0) >= 2**63:
        raise ValueError(f"{name} must be less than 2**63, got {format_value(value)}")
    return value


def flag(name: str, value: Any, error: type[Exception] = ValueError) -> bool:
    """True or False. Strings are rejected, because any non-empty string is true."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {format_value(value)}")
    return value


def word(name: str, value: Any, known: Sequence[str | None], error: type[Exception] = ValueError) -> Any:
    if not (value is None or isinstance(value, str)) or value not in known:
        raise error(f"unknown {name} {format_value(value)}: use one of {', '.join(map(repr, known))}")
    return value


def text(name: str, value: Any, meaning: str, error: type[Exception] = ValueError) -> str:
    """A non-empty string; `meaning` describes it in the error message."""
    if not isinstance(value, str) or not value.strip():
        raise error(f"{name} must be {meaning}, got {format_value(value)}")
    return value


def instance(name: str, value: Any, kind: type | tuple[type, ...], meaning: str) -> Any:
    """An object of type `kind`; `meaning` describes it in the error message."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {meaning}, got {format_value(value)}")
    return value


def listed(name: str, value: Any, what: str) -> Any:
    """A list or another sequence that is not a string; `what` describes its items in the error message."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of {what}, got {format_value(value)}")
    return value


def register(kinds: dict[str, type], kind: type, attribute: str) -> None:
    """Register a class under the name in its `attribute`. An inherited name is ignored, a name in use is an error."""
    name = kind.__dict__.get(attribute)
    if name is None:
        return
    known = kinds.get(name, kind)  # a class that is defined again, as in a notebook, replaces its first version
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"the name {name!r} belongs to {known.__qualname__}: give {kind.__qualname__} another name")
    kinds[name] = kind


def plain_values(value: Any) -> Any:
    """Convert nested mappings to dictionaries and sequences to lists; tuples stay tuples.

    Configuration tools pass their own containers (Hydra's `DictConfig` and `ListConfig`), and a checkpoint that
    contains one cannot be loaded with `weights_only=True`.

    >>> plain_values({"prior_std": {"*": 1.0}, "deterministic": range(2)})
    {'prior_std': {'*': 1.0}, 'deterministic': [0, 1]}
    """
    if isinstance(value, Mapping):
        return {key: plain_values(v) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain_values, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain_values(v) for v in value]
    return value


def resolve_option(name: str, value: Any, kinds: Mapping[str, type[T]]) -> T:
    """Convert an argument to an option of one of `kinds`. The argument is an option already, a word, or a dictionary
    from `to_plain`."""
    if type(value) in kinds.values():
        return value
    if isinstance(value, Mapping):
        fields_of_kind = dict(value)
        kind = kinds[word(f"kind of {name}", fields_of_kind.pop("kind", None), tuple(kinds))]
        return read_option(name, fields_of_kind, kind, kind)
    return kinds[word(name, value, tuple(kinds))]()


def read_option(name: str, value: Any, kind: type[T], other: Callable[[Any], T]) -> T:
    """Convert an argument to an option of type `kind`: a mapping gives its fields, and `other` converts any other
    value."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        return other(value)
    plain = plain_values(value)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in plain:
        if key not in known:
            raise TypeError(f"{name} has no argument {key!r}: use any of {', '.join(map(repr, known))}")
    return kind(**plain)


def to_plain(option: Any) -> dict[str, Any]:
    """Convert an option to a dictionary for checkpoints and files. `resolve_option` reads it back."""
    return {"kind": option.kind, **{field.name: getattr(option, field.name) for field in fields(option)}}
