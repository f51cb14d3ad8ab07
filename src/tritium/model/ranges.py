"""The ranges and nulls of a model's input columns, over the rows of its training (driver)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.tables import table_of
from tritium.data.types import columns_of, is_spark, spark_column
from tritium.errors import BadSetting
from tritium.model.signature import Signature


def learnt(signature: Signature, df: Any) -> dict[str, dict[str, Any]]:
    """Return column → its range [least, largest] and share of nulls, over the rows of a DataFrame, in one job."""
    if not is_spark(df):
        table = table_of_inputs(signature, df)
        rows = max(1, len(table))
        by_column = {}
        for name in signature.columns:
            numbers = _numbers_in(table.column(name))
            range_ = None if numbers is None else pc.min_max(pc.filter(numbers, pc.is_finite(numbers))).as_py()
            by_column[name] = (None if range_ is None else list(range_.values()), table.column(name).null_count / rows)
    else:
        from pyspark.sql import functions as F

        measures: dict[str, Any] = {"rows": F.count(F.lit(1))}
        for i, name in enumerate(signature.columns):
            column = spark_column(df.schema, name)
            measures[f"n{i}"] = F.count_if(column.isNull())
            if (bounds := bounds_of(df.schema, name)) is not None:
                least, largest = (F.when(F.abs(bound) < float("inf"), bound) for bound in bounds)
                measures |= {f"a{i}": F.min(least), f"b{i}": F.max(largest)}
        row = df.select(*(measure.alias(name) for name, measure in measures.items())).first().asDict()
        rows = max(1, row["rows"])
        by_column = {
            name: ([row.get(f"a{i}"), row.get(f"b{i}")], row[f"n{i}"] / rows)
            for i, name in enumerate(signature.columns)
        }
    return {
        name: {"nulls": nulls} | ({"range": list(map(float, bounds))} if bounds and None not in bounds else {})
        for name, (bounds, nulls) in by_column.items()
    }


def bounds_of(schema: Any, name: str) -> tuple[Any, Any] | None:
    """Return the least and the largest number in a row of a column, as doubles; None where it holds no numbers."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    kind, column = columns_of(schema)[name], spark_column(schema, name)
    leaf, depth = kind.leaf()
    if kind.name == "vector":
        column = vector_to_array(column)
    elif leaf.name not in ("number", "decimal") or depth > 1 or leaf.dtype == "bool":
        return None
    elif depth == 0:
        return column.cast("double"), column.cast("double")
    array = column.cast("array<double>")
    return F.array_min(array), F.array_max(array)


def table_of_inputs(signature: Signature, frame: Any) -> pa.Table:
    """Return a pandas DataFrame or an Arrow table as a table with the model's input columns."""
    table = table_of(frame, "check", signature.columns)
    if missing := [name for name in signature.columns if name not in table.column_names]:
        raise BadSetting(
            f"There is no column {missing[0]!r} to check, as of a struct: check= takes Spark's DataFrames."
        )
    return table


def _numbers_in(column: pa.ChunkedArray) -> Any:
    """Return the numbers of a column as float64; None where it holds no numbers."""
    kind, depth = column.type, 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind, depth, column = kind.value_type, depth + 1, pc.list_flatten(column)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return column.cast(pa.float64(), safe=False) if number and depth < 2 else None
