"""What the query plan of a DataFrame tells about its rows before they are computed (driver; not with Connect)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tritium.spark.inside import Inside

_CHEAP = ("Project", "Range", "LocalRelation", "LocalLimit", "GlobalLimit", "Union")
_PRESENT = ("And", "IsNotNull", "AtLeastNNonNulls", "Literal", "AttributeReference")
"""What the condition of a filter that leaves out nulls is made of; another may leave out millions of rows."""
_FUNCTION = re.compile(r"\w+EvalPython\s\[([^(]+)|\b(\w+InPandas\w*|\w+InArrow|\w+InPySpark)\b")


def probe(spark: Any) -> str | None:
    """Return why plans can't be read in this session; None where they can."""
    kind = _kind(spark.range(1)._jdf.queryExecution().optimizedPlan())
    return None if kind == "Range" else f"the plan of a range is a {kind}"


used = Inside("plans", probe)


def is_at_hand(frame: Any) -> bool:
    """Return whether Spark has the first row of a DataFrame without reading much, or computing anything but columns.

    False where plans can't be read.
    """
    if frame.isStreaming or not used(frame.sparkSession):
        return False
    from py4j.protocol import Py4JError

    try:
        return _is_cheap(frame._jdf.queryExecution().optimizedPlan())
    except Py4JError:  # A vendor's Spark may have other plans: the ranks then see the first row.
        return False


def array_length(frame: Any, column: Any) -> int | None:
    """Return the number of values of a column that is made by `F.array(…)`, whatever the rows come from.

    None where it is made otherwise, or plans can't be read.
    """
    if not used(frame.sparkSession):
        return None
    from py4j.protocol import Py4JError

    try:
        plan = frame.select(column)._jdf.queryExecution().analyzed()
        (attribute,) = items(plan.output())
        aliases = {alias.exprId().id(): alias.child() for alias in _aliases(plan)}
        return _length(attribute.exprId().id(), aliases)
    except Py4JError:
        return None


def python_function(frames: Iterable[Any]) -> str | None:
    """Return the name of a Python function that one of these DataFrames calls, or of the operator that calls it."""
    for frame in frames:
        if used(frame.sparkSession) and (match := _FUNCTION.search(optimized(frame))):
            return match[1] or match[2]
    return None


def optimized(frame: Any) -> str:
    """Return the optimized plan of a DataFrame as text."""
    return str(frame._jdf.queryExecution().optimizedPlan().toString())


def items(sequence: Any) -> list[Any]:
    """Return the items of a Scala Seq."""
    return [sequence.apply(index) for index in range(sequence.size())]


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _is_cheap(node: Any) -> bool:
    kind = _kind(node)
    if kind == "InMemoryRelation":
        return bool(node.cacheBuilder().isCachedColumnBuffersLoaded())
    if kind == "LogicalRelation":
        return _kind(node.relation()) == "HadoopFsRelation"
    if kind == "DataSourceV2ScanRelation":
        return str(node.scan().getClass().getName()).startswith("org.apache.spark.sql.execution.datasources.v2.")
    if kind == "Filter" and not _leaves_out_nulls(node.condition()):
        return False
    if kind == "Project" and any(map(_calls_python, items(node.projectList()))):
        return False
    return kind in (*_CHEAP, "Filter") and all(map(_is_cheap, items(node.children())))


def _leaves_out_nulls(condition: Any) -> bool:
    return _kind(condition) in _PRESENT and all(map(_leaves_out_nulls, items(condition.children())))


def _calls_python(expression: Any) -> bool:
    """Return whether an expression is computed by code of the user's."""
    return "UDF" in _kind(expression) or any(map(_calls_python, items(expression.children())))


def _length(identifier: int, aliases: Mapping[int, Any]) -> int | None:
    while (expression := aliases.get(identifier)) is not None:
        while _kind(expression) == "Cast":
            expression = expression.child()
        kind = _kind(expression)
        if kind == "CreateArray":
            return int(expression.children().size())
        if kind != "AttributeReference":
            return None
        identifier = expression.exprId().id()
    return None


def _aliases(node: Any) -> Iterator[Any]:
    if _kind(node) == "Project":
        yield from (one for one in items(node.projectList()) if _kind(one) == "Alias")
    for child in items(node.children()):
        yield from _aliases(child)
