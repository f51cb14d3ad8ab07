"""What Spark has since 4.1, by what 4.0 has: exact placement of rows, and functions of Arrow columns (driver).

Both are public interfaces with the same results. Decision 042.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tritium.errors import WrongVersion
from tritium.spark.inside.unsafe import SQL_TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SEED = 42  # Of the hash by which Spark's `repartition` chooses a partition.
_TYPES = {**{sql: pa.type_for_alias(travel) for travel, sql in SQL_TYPES.items()}, "string": pa.string()}
_TYPES["binary"] = pa.binary()
"""Spark's simple types that a function gets or returns, as SQL names them → Arrow's."""


def numbers(version: str) -> tuple[int, ...]:
    """Return a version of Spark as (major, minor); a vendor's may go on with words: "4.0.2-amzn-1"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def lacks(spark: Any) -> bool:
    """Return whether this session's Spark, or its pyspark, is older than 4.1."""
    from pyspark.sql import DataFrame

    return numbers(spark.version) < (4, 1) or not hasattr(DataFrame, "repartitionById")


def dealt(rows: DataFrame, ranks: int, rank: Column) -> DataFrame:
    """Return `rows` in `ranks` partitions, each row in that of its number.

    rank : an int column, 0 to ranks - 1.
    """
    if lacks(rows.sparkSession):
        return dealt_by_hash(rows, ranks, rank)
    return rows.repartitionById(ranks, rank)


def dealt_by_hash(rows: DataFrame, ranks: int, rank: Column) -> DataFrame:
    """Do the same as `dealt` by the hash of a key that falls on the partition."""
    from pyspark.sql import functions as F

    # As one expression in SQL: a call of the JVM for each key takes a third of a millisecond.
    by_rank = F.expr(f"array({', '.join(map(str, keys(ranks)))})")
    return rows.repartition(ranks, F.element_at(by_rank, rank + 1))


def keys(partitions: int) -> list[int]:
    """Return the smallest number that Spark's `repartition(partitions, number)` puts into each partition, in order."""
    key_of: dict[int, int] = {}
    for key in itertools.count():
        key_of.setdefault(_hashed(key) % partitions, key)
        if len(key_of) == partitions:
            return [key_of[partition] for partition in range(partitions)]
    raise AssertionError


def _hashed(value: int) -> int:
    """Return what `F.hash` gives for an int column: Murmur3 (x86, 32 bits) of its 4 bytes, signed."""

    def rotated(bits: int, by: int) -> int:
        return (bits << by | bits >> 32 - by) & 0xFFFFFFFF

    word = rotated(value * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    bits = (rotated(_SEED ^ word, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF) ^ 4
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ bits >> shift) * factor & 0xFFFFFFFF
    bits ^= bits >> 16
    return bits - (1 << 32) if bits >> 31 else bits


def through_pandas(frame: DataFrame, call: Callable[[Any], Any], kind: Any, columns: Sequence[Column]) -> Column:
    """Return what `computed` of the same arguments does, by `pandas_udf`.

    Numbers travel as text, both ways: pandas tells no null from NaN, and makes floats of integers with nulls.
    Raises WrongVersion for columns and results of other types than numbers, strings, bytes, and arrays of these.
    """
    import pandas as pd  # type: ignore[import-untyped]
    from pyspark.sql import types as sql
    from pyspark.sql.pandas.functions import pandas_udf

    types = [column.dataType for column in frame.select(*columns).schema]
    if any(isinstance(one, sql.StructType) for one in types):
        raise WrongVersion("A function of whole rows (tr.http_transformer) needs Spark 4.1 or newer.", needed="4.1")
    read = [(_arrow(_text(one)), _arrow(one)) for one in types]
    written = _text(kind)
    arrow_result = _arrow(written)
    whole = isinstance(kind, sql.StructType)

    def run(batches: Any) -> Any:  # It is pickled by value, so it imports all that it needs.
        import pandas
        import pyarrow

        def arrays() -> Any:
            for batch in batches:
                series = batch if isinstance(batch, tuple) else (batch,)
                pairs = zip(series, read, strict=True)
                columns = tuple(pyarrow.Array.from_pandas(one, type=text).cast(exact) for one, (text, exact) in pairs)
                yield columns if isinstance(batch, tuple) else columns[0]

        for array in call(arrays()):
            values = array.cast(arrow_result).to_pylist()
            # No row of a data frame, as which pandas_udf takes a struct, can be null; an array around a struct can.
            values = [value if value is None else [value] for value in values] if whole else values
            yield pandas.Series(values, dtype=object)

    series: Any = pd.Series if len(columns) == 1 else tuple[pd.Series, ...]
    run.__annotations__ = {"batches": Iterator[series], "return": Iterator[pd.Series]}
    run.__module__ = "__main__"  # Hence it is pickled by value.
    make: Any = pandas_udf  # Its stubs require the deprecated functionType.
    function = make(run, sql.ArrayType(written) if whole else written).asNondeterministic()
    result: Column = function(*(column.cast(_text(one)) for column, one in zip(columns, types, strict=True)))
    return (result.getItem(0) if whole else result).cast(kind)


def _text(kind: Any) -> Any:
    """Return a Spark type with strings in place of numbers."""
    from pyspark.sql import types as sql

    if isinstance(kind, sql.ArrayType):
        return sql.ArrayType(_text(kind.elementType))
    if isinstance(kind, sql.StructType):
        return sql.StructType([sql.StructField(one.name, _text(one.dataType)) for one in kind])
    return sql.StringType() if isinstance(kind, sql.NumericType) else kind


def _arrow(kind: Any) -> pa.DataType:
    """Return the Arrow type of a Spark type."""
    from pyspark.sql import types as sql

    if isinstance(kind, sql.ArrayType):
        return pa.list_(_arrow(kind.elementType))
    if isinstance(kind, sql.StructType):
        return pa.struct([(one.name, _arrow(one.dataType)) for one in kind])
    name = kind.simpleString()
    if name not in _TYPES:
        raise WrongVersion(f"A function of columns of type {name} needs Spark 4.1 or newer.", needed="4.1")
    return _TYPES[name]
