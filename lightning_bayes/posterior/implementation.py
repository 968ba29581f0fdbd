"""The registry of posterior methods that a higher layer implements, such as `predict` and `tune_prior`.

Imports point one way, so `posterior` never imports `evidence` or `predictive`. The posterior declares the method with
its signature and documentation, and the higher layer registers the function that does the work:

    @implements("predict")                                     # predictive/predict.py
    def predict(posterior, x, ...): ...

    class GaussianPosterior:                                   # posterior/gaussian.py
        def predict(self, x, ...):
            return implementation("predict")(self, x, ...)

`import lightning_bayes` imports every layer, so each method has its implementation. A function that works on the shards
of a sharded network says so with `sharded=True`; all others raise an error for a sharded posterior.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def implements(method: str, sharded: bool = False) -> Callable[[Function], Function]:
    """Register the decorated function as the implementation of a posterior's `method`."""

    def register(function: Function) -> Function:
        @wraps(function)
        def of_whole(posterior: Any, *args: Any, **options: Any) -> Any:
            posterior.check_whole(method)
            return function(posterior, *args, **options)

        _IMPLEMENTATIONS[method] = function if sharded else of_whole
        return function

    return register


def implementation(method: str) -> Callable[..., Any]:
    return _IMPLEMENTATIONS[method]
