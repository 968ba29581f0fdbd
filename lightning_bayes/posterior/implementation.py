"""How a posterior offers what a layer above it does: `predict`, `tune_prior`, `conformalize` and others.

Imports point one way, so `posterior` never imports `evidence` or `predictive`. A posterior declares such a method with
its signature and documentation, and the module above registers the function that does the work:

    @implements("predict")                                     # predictive/predict.py
    def predict(posterior, x, ...): ...

    class GaussianPosterior:                                   # posterior/gaussian.py
        def predict(self, x, ...):
            return implementation("predict")(self, x, ...)

`import lightning_bayes` imports every layer, so each method has its implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def implements(method: str) -> Callable[[Function], Function]:
    """Register the decorated function as what a posterior's `method` calls."""

    def register(function: Function) -> Function:
        _IMPLEMENTATIONS[method] = function
        return function

    return register


def implementation(method: str) -> Callable[..., Any]:
    return _IMPLEMENTATIONS[method]
