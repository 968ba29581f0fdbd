"""Statements of a paper, and whether a run confirms them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, whether it holds in this run, and the numbers behind it."""

    statement: str
    holds: bool
    numbers: str


def verdict(claims: Sequence[Claim], whose: str = "statements of the paper") -> str:
    """List the claims as Markdown."""
    lines = [f"- {'holds' if c.holds else 'does not hold'}: {c.statement} ({c.numbers})" for c in claims]
    kept = sum(c.holds for c in claims)
    return "\n".join([f"In this run, {kept} of {len(claims)} {whose} hold:", "", *lines])


def beats(name: str, values: Mapping[str, float], what: str, larger: bool = True) -> Claim:
    """The claim that a method is better than all others."""
    others = {other: v for other, v in values.items() if other != name}
    best = (max if larger else min)(others, key=lambda other: others[other])
    holds = values[name] > others[best] if larger else values[name] < others[best]
    return Claim(f"{name} has the best {what}", holds, f"{values[name]:.3f}; {best}: {others[best]:.3f}")
