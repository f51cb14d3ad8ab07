"""Arrays leave the JVM as bytes: the expressions that make them, and the probe that it holds in this Spark (driver).

Spark writes an array to Arrow number by number, and bytes by one copy of memory. What it takes for an array after a
shuffle is an `UnsafeArrayData`, whose elements lie side by side (`unsafe.py`). Decision 020.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.spark.inside import Inside, catalyst, unsafe
from tritium.spark.inside.catalyst import EXPRESSIONS, UNSAFE_ARRAY
from tritium.spark.inside.unsafe import SQL_TYPES

_VALUES = (1, None, 0, 1)


def probe(spark: Any) -> str | None:
    """Return why arrays travel number by number in this session; None where they can travel as bytes.

    Compares both ways for every dtype, by a row that Spark's code for expressions makes on the driver, without a job.
    """
    if sys.byteorder != "little":
        return "this machine is big-endian"
    jvm = spark._jvm
    kinds = {travel: f"array<{sql}>" for travel, sql in SQL_TYPES.items()}
    values = ", ".join("null" if value is None else str(value) for value in _VALUES)
    expressions = [f"cast(array({values}) as {kind})" for kind in kinds.values()]
    expressions.append("array(array(1f, 2f, 3f), array(4f, 5f, 6f))")
    written = spark.range(1).selectExpr(*expressions)._jdf.queryExecution().analyzed().projectList()
    create = catalyst.singleton(jvm, f"{EXPRESSIONS}.UnsafeProjection").create
    some = catalyst.java(jvm, "scala.Some")  # `map`: a call of py4j's own confuses compiled classes of one name
    row = some(catalyst.singleton(jvm, "org.apache.spark.sql.catalyst.InternalRow").empty()).map(create(written)).get()
    reference = catalyst.java(jvm, f"{EXPRESSIONS}.BoundReference")
    arrays = [reference(i, written.apply(i).dataType(), True) for i in range(len(expressions))]
    converted = [*(_expression(jvm, array) for array in arrays), _is_unsafe(jvm, arrays[0])]
    result = some(row).map(create(catalyst.sequence(jvm, converted))).get()
    for index, travel in enumerate(kinds):
        column = pa.array([bytes(result.getBinary(index))], pa.binary())
        if unsafe.lists(column, np.dtype(travel), 1).to_pylist() != [list(_VALUES)]:
            return f"arrays of {travel} are laid out differently"
    if not result.getBoolean(len(expressions)):
        return "an array is not of the expected class"
    nested = pa.array([bytes(result.getBinary(len(kinds)))], pa.binary())
    view = unsafe.matrix(nested, np.dtype(np.float32), 2)
    if view is None or view.tolist() != [[[1, 2, 3], [4, 5, 6]]]:
        return "arrays of arrays are laid out differently"
    return None


used = Inside("jvm_bytes", probe)


def as_bytes(spark: Any, column: Any) -> Any:
    """Return a pyspark Column of the bytes of an array column, null where that is null.

    The column must be an `UnsafeArrayData` where it is computed, as it is after a shuffle, else the job fails.
    """
    jvm = spark._jvm
    return catalyst.column(jvm, _expression(jvm, catalyst.expression_of(jvm, column)))


def as_bytes_or_array(spark: Any, column: Any) -> tuple[Any, Any]:
    """Return two Columns of an array column: its bytes, or no bytes, and an empty array, or the array without bytes.

    What an array is where it is computed depends on the plan: what is read is an `UnsafeArrayData`, what an expression
    makes of it may not be. Both are null where the column is, and only there: an array column of nulls is slow to write
    (decision 020).
    """
    from pyspark.sql import functions as F

    jvm = spark._jvm
    is_unsafe = catalyst.column(jvm, _is_unsafe(jvm, catalyst.expression_of(jvm, column)))
    rows_as_bytes = F.when(is_unsafe, as_bytes(spark, column)).when(~is_unsafe, F.lit(b""))
    return rows_as_bytes, F.when(is_unsafe, F.slice(column, 1, 0)).when(~is_unsafe, column)


def _expression(jvm: Any, array: Any) -> Any:
    """Return Catalyst's expression for the bytes of an array expression."""
    copied = catalyst.invoke(jvm, array, "copy", catalyst.type_of_class(jvm, UNSAFE_ARRAY))
    return catalyst.invoke(jvm, copied, "getBaseObject", catalyst.type_of(jvm, "Binary"))


def _is_unsafe(jvm: Any, array: Any) -> Any:
    """Return Catalyst's expression for whether an array is an `UnsafeArrayData`; null where the array is."""
    of = catalyst.literal_class(jvm, UNSAFE_ARRAY)
    return catalyst.invoke(jvm, of, "isInstance", catalyst.type_of(jvm, "Boolean"), [array])
