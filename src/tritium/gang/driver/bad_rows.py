"""Names a row that can't be used in the user's terms, and counts nulls and NaN in all columns (driver).

It reads the data once more, which only a launch that has failed does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.fingerprint import Table
from tritium.data.idset import HALF, PARTITION_BITS, POSITION, place
from tritium.data.schema import Data, Field
from tritium.data.tables import column_of, table_of
from tritium.data.types import SourceType, columns_of, is_spark, spark_column
from tritium.errors import BadRow
from tritium.gang.driver.attempt import Attempt
from tritium.spark.job import TaggedJob
from tritium.spark.session import Session

LOOK_SECONDS = 60.0
"""The limit of the Spark job. A source that takes longer is left alone."""
_FILE = ("file_path", "row_index", "file_block_start")


@dataclass(frozen=True)
class Look:
    """The result of the search for a row."""

    key: Mapping[str, Any]
    """The values of `row_key` in the row."""
    where: str
    """The place of the row: its file, or its number in the user's table; "" where that is not known."""
    rows: int
    missing: Mapping[tuple[str, str], int]
    """(Column, "null" or "NaN") → number of rows."""


def located(error: BadRow, attempt: Attempt) -> BadRow:
    """Return the error with the row as the user knows it, and with all columns of the data that hold nulls or NaN."""
    from tritium.data.plan import plan

    name, row_id = error.name, error.row_id
    frames = attempt.data if attempt.exchange is None else attempt.exchange.data
    if name is None or name not in frames or row_id is None:
        return error
    data = frames[name]
    try:
        if is_spark(data.frame):
            attempt.recorder.note(f"the data is read once more, for up to {LOOK_SECONDS:g} s, to name the row")
            look = _within(LOOK_SECONDS, data.frame.sparkSession, lambda: _in_spark(error, attempt))
        else:
            table = table_of(data.frame, name)
            look = _in_table(row_id & (HALF - 1), table, data, plan(table.schema, data, name))
    except Exception as problem:  # noqa: BLE001 - the row's own error must reach the user, whatever this one is
        attempt.recorder.note(f"the row could not be looked up: {problem!r:.200}")
        return error
    if look is None:
        return error
    key = ", ".join(f"{column}={value!r}" for column, value in look.key.items())
    told = f"the row with {key}{f' ({look.where})' if look.where else ''}" if key else look.where
    text = str(error).replace(place(row_id), told, 1) if told else str(error)
    if look.missing:
        listed = ", ".join(f"{column!r} is {what} in {count:,}" for (column, what), count in look.missing.items())
        text += f" Of its {look.rows:,} rows {listed}."
    if not key and place(row_id) in text:
        text += " row_key= with a column that differs in every row names the row."
    if error.skippable:
        text += " on_error='skip' (of tr.Data in a launch, of the estimator) leaves out such rows."
    return BadRow(text, **{**error.__dict__, "row_key": dict(look.key)})


def _checked(fields: tuple[Field, ...], columns: Mapping[str, SourceType]) -> list[tuple[str, str]]:
    """Return the pairs of a source column and "null" or "NaN", where that would be an error in it."""
    pairs = []
    for field in fields:
        for source, fill in zip(field.sources, field.nulls, strict=True):
            pairs += [(source, "null")] if fill is None else []
            floating = columns[source].name == "number" and columns[source].dtype.startswith("float")
            pairs += [(source, "NaN")] if floating and field.nan == "error" else []
    return list(dict.fromkeys(pairs))


def _in_table(row: int, table: pa.Table, data: Data, fields: tuple[Field, ...]) -> Look:
    numbers = np.arange(table.num_rows)
    if data.where is not None:
        chosen = column_of(table, data.where[0]).to_numpy(zero_copy_only=False) == data.where[1]
        numbers = numbers[chosen]
    if data.keys:
        keys = pa.table({key: column_of(table, key) for key in data.keys}).take(numbers)
        numbers = numbers[pc.sort_indices(keys, [(key, "ascending") for key in data.keys]).to_numpy()]
    missing = {}
    for source, what in _checked(fields, columns_of(table.schema)):
        column = column_of(table, source).take(pa.array(numbers))
        count = column.null_count if what == "null" else pc.sum(pc.is_nan(column.cast(pa.float64()))).as_py() or 0
        missing[source, what] = count
    number = int(numbers[row])
    key = {name: column_of(table, name)[number].as_py() for name in data.keys}
    return Look(key, f"row {number}", len(numbers), {k: count for k, count in missing.items() if count})


def _in_spark(error: BadRow, attempt: Attempt) -> Look | None:
    """Read the row with this id, and count, in one job. None where Spark gave it another id this time."""
    from pyspark.sql import functions as F

    from tritium.data.exchange import Exchange

    name, row_id, column = error.name, error.row_id, error.column
    if name is None or row_id is None or column is None:
        return None
    exchange = attempt.exchange or Exchange(attempt.data, 1)
    data, schema = exchange.data[name], exchange.data[name].frame.schema
    checked = _checked(exchange.plan[name], columns_of(schema))
    columns = {source: spark_column(schema, source) for source, _ in checked}
    wrong = [columns[s].isNull() if what == "null" else F.isnan(columns[s].cast("double")) for s, what in checked]
    keys = [spark_column(schema, key) for key in data.keys]
    files = _file_columns(data.frame)
    known = [one.alias(f"k{i}") for i, one in enumerate(keys)] + [one.alias(part) for part, one in files.items()]
    bad = F.coalesce(_same(error.value, column, schema), F.lit(False)).alias("bad")
    counted = [F.coalesce(one, F.lit(False)).alias(f"w{i}") for i, one in enumerate(wrong)]
    rows = {other: F.struct(F.lit(1)) for other in exchange.plan} | {name: F.struct(bad, *known, *counted)}
    numbered = exchange.numbered(rows).where(F.col(name).isNotNull())
    number = _dealt_again(row_id, list(exchange.plan).index(name), (attempt.recorder.received or {}).get(name))
    if number is not None:
        ids = numbered.select("_id").orderBy("_id").offset(number).limit(1).collect()
    id_now = row_id if number is None else ids[0]._id if ids else -1
    row = F.first(F.when(F.col("_id") == id_now, F.col(name)), ignorenulls=True).alias("row")
    sums = [F.count_if(F.col(f"{name}.w{i}")).alias(f"n{i}") for i in range(len(wrong))]
    totals = numbered.agg(F.count(F.lit(1)).alias("rows"), row, *sums).head()
    if totals.row is None or not totals.row["bad"]:
        return None
    place_in_file = ", ".join(
        f"{'file' if part == 'file_path' else 'row' if part == 'row_index' else 'block at byte'} {totals.row[part]}"
        for part in files
        if totals.row[part] is not None
    )
    if files and "row_index" not in files:  # Text files, as CSV: Spark knows the file, not the row.
        place_in_file = f"{place(row_id)}, {place_in_file}"
    missing = {pair: totals[f"n{i}"] for i, pair in enumerate(checked) if totals[f"n{i}"]}
    key = {column: totals.row[f"k{i}"] for i, column in enumerate(data.keys)}
    return Look(key, place_in_file, totals["rows"], missing)


def _dealt_again(row_id: int, number: int, fingerprint: Table | None) -> int | None:
    """Return the place of a row in the order of Spark's ids where that is its id, as few rows have; else None.

    See `tritium.data.few`. number : of the row's name. fingerprint : of the rows that ranks have received, if any.
    """
    alone = [partition for partition, *_ in fingerprint or ()] == [number]
    return row_id & POSITION if alone and row_id >> PARTITION_BITS == number else None


def _same(refused: Any, column: str, schema: Any) -> Any:
    """Return a condition that the row of this id still holds the value that was refused, as far as that can be told."""
    from pyspark.sql import functions as F

    value, scalar = spark_column(schema, column), columns_of(schema)[column].item is None
    if refused is None and scalar:
        return value.isNull()
    if isinstance(refused, str) and scalar:
        return value == F.lit(refused)
    return F.isnan(value.cast("double")) if refused != refused and scalar else F.lit(True)


def _file_columns(frame: Any) -> dict[str, Any]:
    """Return the parts of Spark's hidden column `_metadata` on a row's place in a file, where the frame has it."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    if not frame.inputFiles():  # Without files pyspark would write a page to its log that the column is missing.
        return {}
    try:
        fields = frame.select("_metadata").schema[0].dataType.fieldNames()
    except AnalysisException:  # A join or an aggregation has made a row of several.
        return {}
    parts = [part for part in _FILE if part in fields]
    if "row_index" in parts:
        parts.remove("file_block_start")
    return {part: F.col(f"_metadata.{part}") for part in parts}


def _within(seconds: float, spark: Any, look: Callable[[], Look | None]) -> Look | None:
    """Return the result of `look`, which runs Spark jobs, or raise its error; None where it takes longer."""
    tag, what = f"tritium-look-{threading.get_ident()}", "Tritium: which row can't be used"
    job = TaggedJob(Session.of(spark), tag, what, look)
    job.start()
    try:
        job.join(seconds)
    finally:
        if not job.ended:
            job.cancel("the row that can't be used was not found in time")
    if job.problem is not None:
        raise job.problem
    return job.result
