"""Options as words, as dictionaries of plain values, and as objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lightning_bayes.arguments import keywords, plain_values, word

T = TypeVar("T")


def resolve(name: str, value: Any, kinds: Mapping[str, type[T]]) -> T:
    """The option of one of several `kinds` that an argument means: an object, a word, or `to_plain` of an object."""
    if type(value) in kinds.values():
        return value
    if isinstance(value, Mapping):
        plain = plain_values(value)
        return from_mapping(name, plain, kinds[word(f"kind of {name}", plain.pop("kind", None), tuple(kinds))])
    return kinds[word(name, value, tuple(kinds))]()


def from_mapping(name: str, value: Mapping[str, Any], kind: type[T]) -> T:
    """The option with these fields."""
    plain = plain_values(value)
    keywords(name, plain, [field.name for field in fields(kind)])  # type: ignore[arg-type]
    return kind(**plain)


def to_plain(option: Any) -> dict[str, Any]:
    """The option as a dictionary that `resolve` reads, for checkpoints and files."""
    values = {field.name: getattr(option, field.name) for field in fields(option)}
    return {"kind": option.kind, **values}
