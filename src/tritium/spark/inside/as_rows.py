"""Rows, not columnar batches, as the input of the scoring function (driver).

Since Spark 4.2 a function of Arrow columns takes the columnar batches of a file's reader as its input. Where these are
not Arrow's own, Spark takes them apart row by row all the same, each value boxed, to join them with the results: from
Parquet that makes scoring up to twice as slow, and no array is an `UnsafeArrayData`. Decision 022.
"""

from __future__ import annotations

import functools
from typing import Any

from tritium.spark.inside import Inside, catalyst
from tritium.spark.inside.catalyst import UNSAFE_ARRAY

COLUMNAR_INPUT = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
"""Spark's setting; unknown to Spark 4.1."""
_ROWS = ("Range", "LocalRelation", "LogicalRDD", "OneRowRelation", "StreamingRelationV2")


def probe(spark: Any) -> str | None:
    """Return why such a filter is not made in this session; None where it is."""
    spark.conf.get(COLUMNAR_INPUT)  # Raises in Spark 4.1, which hands no columnar batches to functions.
    catalyst.column(spark._jvm, _never(spark._jvm))
    return None


used = Inside("as_rows", probe)


def as_rows(df: Any, column: Any) -> Any:
    """Return `df` behind a filter that every row passes, where Spark would hand columnar batches to a function of it.

    Spark computes a filter on rows. It can't tell that this one drops none, so it stays in the plan. A session that
    sets `COLUMNAR_INPUT` itself is left alone: its batches may be Arrow's own, which cost nothing to hand over.

    column : a Column of `df`. Without one, Spark would ask the filter of a partitioned table's partitions, in place of
             its rows, and hand columnar batches on.
    """
    spark = df.sparkSession
    if not used(spark):
        return df
    from py4j.protocol import Py4JError

    effective, explicit = spark.conf.get(COLUMNAR_INPUT), spark.conf.get(COLUMNAR_INPUT, "false")
    if effective != "true" or explicit == "true":
        return df
    try:
        query = df._jdf.queryExecution()
        if not _may_be_columnar(query.analyzed() if df.isStreaming else query.withCachedData()):
            return df
    except Py4JError:  # A vendor's Spark may have other plans: at worst it is slower.
        return df
    return df.where(~catalyst.column(spark._jvm, _never(spark._jvm)) | column.isNull())


def _may_be_columnar(plan: Any) -> bool:
    """Return whether a source of a logical plan may give columnar batches: a cache of arrays does not.

    A filter costs some 20 ms, and it copies each row.
    """
    leaves = plan.collectLeaves()
    return any(not _gives_rows(leaves.apply(index)) for index in range(leaves.length()))


def _gives_rows(leaf: Any) -> bool:
    kind = str(leaf.nodeName())
    if kind != "InMemoryRelation":
        return kind in _ROWS
    return not leaf.cacheBuilder().serializer().supportsColumnarOutput(leaf.schema())


@functools.lru_cache(8)
def _never(jvm: Any) -> Any:
    """Return an expression that is false (whether a class is an array's) and that Spark can't fold to a constant."""
    array = catalyst.literal_class(jvm, UNSAFE_ARRAY)
    above = catalyst.invoke(jvm, array, "getSuperclass", catalyst.type_of_class(jvm, "java.lang.Class"))
    return catalyst.invoke(jvm, above, "isArray", catalyst.type_of(jvm, "Boolean"))
