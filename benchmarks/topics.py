"""The topics of `python -m benchmarks`, in the order of their tables.

A topic is a module with `TITLE`, a docstring that describes the measurement, `jobs(quick)`, and, if values follow from
several rows, `derived(rows)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import (
    cost,
    curvature,
    dense,
    diagonal,
    distributed,
    evidence,
    first_draw,
    growth,
    input_gradients,
    ivon,
    l2m,
    lora,
    many_classes,
    on_top,
    online_step,
    predictive,
    resnet18,
    subnetwork,
    swag,
    variational,
)
from benchmarks.rows import Row

TOPICS: dict[str, Any] = {
    module.__name__.rsplit(".", 1)[-1]: module
    for module in (
        *(curvature, resnet18, cost, predictive, many_classes, distributed, variational, ivon, online_step, diagonal),
        *(l2m, swag, on_top),
        *(first_draw, growth),
        *(dense, evidence, input_gradients, subnetwork, lora),
    )
}
TITLES = {name: (topic.TITLE, topic.__doc__ or "") for name, topic in TOPICS.items()}


def derived(rows: Sequence[Row]) -> list[Row]:
    """Insert each topic's derived rows, which have no date, after its rows."""
    complete: dict[str, Row] = {}
    for name, topic in TOPICS.items():
        of_topic = [row for row in rows if row.topic == name and row.date]
        complete |= {row.name: row for row in of_topic}
        if of_topic and hasattr(topic, "derived"):
            complete |= {row.name: row for row in topic.derived(of_topic)}
    return list(complete.values())
