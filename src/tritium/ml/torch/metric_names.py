"""The metrics of a training by the names that they have in its history (any process)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tritium.arguments import name_of
from tritium.ml import history


def are_metrics(given: Any) -> bool:
    """Return whether `given` is a mapping, a sequence or a MetricCollection."""
    return (isinstance(given, Mapping | Sequence) and not isinstance(given, str)) or _is_collection(given)


def metric_pairs(given: Any) -> list[tuple[str, Any]]:
    """Return names and metrics, those of a MetricCollection by its names for them. Two may have the same name."""
    given = [given] if _is_collection(given) else given
    pairs = given.items() if isinstance(given, Mapping) else [(metric_name(metric), metric) for metric in given]
    return [
        one
        for name, metric in pairs
        for one in (metric.items(keep_base=False) if _is_collection(metric) else [(name, metric)])
    ]


def metric_problems(given: Any) -> Iterator[str]:
    """Yield what is wrong with `metrics`."""
    if not are_metrics(given):
        yield f"metrics={given!r} must be a mapping from names to metrics, a list of metrics, or a MetricCollection."
        return
    pairs = metric_pairs(given)
    for name, metric in pairs:
        if not callable(metric) or isinstance(metric, type):
            yield f"the metric {name!r} is {metric!r}, neither a torchmetrics Metric nor a function of two."
        if name in history.NAMES:
            yield f"a metric is called {name!r}, as the history calls something else; choose another name."
    names = [name for name, _ in pairs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two metrics are called {name!r}; give a mapping from names to metrics."


def metric_name(metric: Any) -> str:
    """Return a metric's name in the history: MeanAbsoluteError() → mean_absolute_error."""
    name = name_of(metric)
    starts = [i and c.isupper() and not name[i - 1].isupper() for i, c in enumerate(name)]
    return "".join(f"_{c}" if start else c for c, start in zip(name, starts, strict=True)).lower()


def _is_collection(metrics: Any) -> bool:
    """Return whether `metrics` is a torchmetrics MetricCollection, a module that holds others by name."""
    return hasattr(metrics, "compute_groups") and hasattr(metrics, "items")
