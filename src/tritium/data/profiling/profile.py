"""`profile`: what an exchange of a DataFrame's rows will do, measured in one Spark job before it is done (driver)."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tritium import ship
from tritium.data.exchange import check_frame, pack
from tritium.data.few import is_many
from tritium.data.plan import draft, unfit_together
from tritium.data.profiling.measure import HOME, WHERE_IS_NULL, FieldFigures, PartitionFigures, measured
from tritium.data.schema import Data, Field, as_data
from tritium.data.tables import BATCH_ROWS, column_of, packed_field, ranks_of, table_of
from tritium.data.types import SourceType, columns_of, is_spark, spark_column
from tritium.errors import BadData, BadRow, BadSetting
from tritium.observe.page import section, table
from tritium.spark.python import drivers_python

_SKEW = 2.0
"""A source partition with so many times the mean is named."""
_STEP_BYTES = 16 << 10
"""A step over fewer bytes takes about as long as one over no row: Python and an average over ranks take their time."""
_SEED = 0


@dataclass(frozen=True)
class ColumnProfile:
    """A source column; counts are of the rows that were measured.

    batch    : the batch column that it goes into, with its dtype and the shape of a row.
    nulls    : rows with a null in it. nan : rows with NaN, an infinity, or a number beyond the column's dtype.
    range    : the least and the largest of the other numbers (dates, times); None without any.
    lengths  : the shortest and the longest array, or string that is decoded (bytes); None for others.
    """

    name: str
    type: str
    batch: str
    nulls: int
    nan: int
    range: tuple[Any, Any] | None
    lengths: tuple[int, int] | None


@dataclass(frozen=True)
class Profile:
    """What an exchange will do with the rows of a DataFrame; `str()` and a notebook show it.

    rows        : those that were measured: all of them, or with `fraction` a sample.
    fraction    : the share of the rows that was measured.
    partitions  : rows of each source partition, of those measured.
    columns     : the source columns that can be read.
    problems    : everything that would be refused: settings, types, and for each column the first of its rows.
    refused     : rows of those measured with a value that would be refused.
    row_bytes   : bytes of a row on the disk of its rank. sent_bytes : in Arrow, as Spark sends it.
    rank_rows   : rows of each rank, estimated from a sample with `fraction`; () without `ranks`.
    steps       : steps of an epoch; None without `ranks` and `batch_size`.
    seconds     : that this measurement took. longest : of the slowest source partition, to compute and check its rows.
    rank_seconds: that a rank is expected to take until its rows are on its disk: its source, and its share of the
                  checks. The network's time is not in it. None without `ranks`.
    hints       : what may make the training slower than it needs to be.
    """

    rows: int
    fraction: float
    partitions: tuple[int, ...]
    columns: tuple[ColumnProfile, ...]
    problems: tuple[str, ...]
    refused: int
    row_bytes: float
    sent_bytes: float
    rank_rows: tuple[int, ...]
    steps: int | None
    seconds: float
    longest: float
    rank_seconds: float | None
    hints: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing would be refused, of what was measured."""
        return not self.problems

    @property
    def skew(self) -> float:
        """The rows of the largest source partition, divided by the mean; 1.0 without rows."""
        return max(self.partitions) * len(self.partitions) / self.rows if self.rows else 1.0

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """The bytes on the disk of each rank."""
        return tuple(round(rows * self.row_bytes) for rows in self.rank_rows)

    def __str__(self) -> str:
        parts = ["\n".join(self._summary())]
        if self.columns:
            rows = [_COLUMNS, *self._cells()]
            widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
            lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
            parts.append("\n".join(lines))
        for title, texts in (("would be refused", self.problems), ("hints", self.hints)):
            if texts:
                parts.append("\n".join([f"{title}:", *(f"  - {text}" for text in texts)]))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return "".join(
            [
                table(("", ""), [tuple(line.split(": ", 1)) for line in self._summary()]),
                table(_COLUMNS, self._cells()),
                section("Would be refused", table(("",), [(text,) for text in self.problems])),
                section("Hints", table(("",), [(text,) for text in self.hints])),
            ]
        )

    def _summary(self) -> list[str]:
        sample = f", a sample of {self.fraction:g} of them" if self.fraction < 1 else ""
        count = len(self.partitions)
        least, most = (min(self.partitions), max(self.partitions)) if count else (0, 0)
        lines = [
            f"rows: {self.rows:,}{sample}",
            f"source partitions: {count:,}, of {least:,} to {most:,} rows; the largest has {self.skew:.1f} times the "
            "mean",
            f"bytes a row: {self.row_bytes:,.0f} on the disk of its rank, {self.sent_bytes:,.0f} as Spark sends it",
        ]
        if self.rank_rows:
            most, least = max(self.rank_rows), min(self.rank_rows)
            shown = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            lines.append(f"ranks: {len(self.rank_rows)}, each with {shown} rows, {_size(max(self.rank_bytes))} on disk")
        if self.steps is not None:
            lines.append(f"steps of an epoch: {self.steps:,}")
        expected = "" if self.rank_seconds is None else f"; a rank has its rows after about {self.rank_seconds:.1f} s"
        lines.append(
            f"time: {self.seconds:.1f} s for this, {self.longest:.1f} s for the slowest source partition{expected}"
        )
        lines.append(f"refused rows: {self.refused:,}")
        return lines

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (c.name, c.type, f"{c.nulls:,}", f"{c.nan:,}", _between(c.range), _between(c.lengths), c.batch)
            for c in self.columns
        ]


_COLUMNS = ("column", "type", "nulls", "NaN", "range", "lengths", "in the batch")


def profile(
    data: Data | Any,
    *,
    ranks: int | None = None,
    batch_size: int | None = None,
    fraction: float = 1.0,
) -> Profile:
    """Measure what an exchange of these rows will do, in one Spark job: nothing is shuffled, and no rank starts.

    Every row is checked as a rank would check it, and all that would be refused is said at once: a wrong setting does
    not hide a null. Functions of `decode` are not called.

    data       : a DataFrame of Spark or pandas, an Arrow table, or a `tr.Data` of one.
    ranks      : of the training that it is for. None: rows, bytes and steps of a rank are not told.
    batch_size : rows of a step of a rank.
    fraction   : the share of the rows to measure, drawn at random; counts are then of these.

    Raises BadSetting, and BadData where `data` is no DataFrame.
    """
    _check(ranks, batch_size, fraction)
    one = as_data(data)
    data_ranks, begun = ranks or 1, time.perf_counter()
    if is_spark(one.frame):
        check_frame("data", one.frame)
        schema = one.frame.schema
        fields, problems = _fields(schema, one)
        parts = _in_spark(one, fields, data_ranks, fraction) if fields else []
    else:
        rows = table_of(one.frame, "data", one.nulls)
        schema = rows.schema
        fields, problems = _fields(schema, one)
        parts, fields, more = _in_table(rows, one, fields, data_ranks, fraction)
        problems += more
    seconds = time.perf_counter() - begun
    problems += _refusals(fields, parts)
    whole = sum(part.rows for part in parts)
    spooled = sum(part.spooled for part in parts) / max(1, whole)
    rank_rows = _rank_rows(parts, ranks, one, schema, fraction) if ranks else ()
    if ranks and parts and 0 in rank_rows:
        empty = sum(count == 0 for count in rank_rows)
        problems.append(f"{empty} of {ranks} ranks would have no rows, which is an EmptyShard. Ask for fewer ranks.")
    steps = math.ceil(max(rank_rows) / batch_size) if rank_rows and batch_size else None
    waited, checked = (sum(getattr(part, name) for part in parts) for name in ("waited", "checked"))
    source = seconds * waited / max(1e-9, waited + checked)
    result = Profile(
        rows=whole,
        fraction=fraction,
        partitions=tuple(part.rows for part in parts),
        columns=tuple(_columns(fields, parts, columns_of(schema))),
        problems=tuple(problems),
        refused=sum(part.refused for part in parts),
        row_bytes=spooled,
        sent_bytes=sum(part.sent for part in parts) / max(1, whole),
        rank_rows=rank_rows,
        steps=steps,
        seconds=seconds,
        longest=max((part.waited + part.checked for part in parts), default=0.0),
        rank_seconds=source + checked / fraction / ranks if ranks else None,
        hints=(),
    )
    return dataclasses.replace(result, hints=tuple(_hints(result, batch_size)))


def _check(ranks: int | None, batch_size: int | None, fraction: float) -> None:
    for name, value in (("ranks", ranks), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadSetting(f"{name}={value!r}: it is a whole number of at least 1.", setting=name)
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise BadSetting(f"fraction={fraction!r}: it is the share of the rows to measure, above 0 and at most 1.")


def _fields(schema: Any, data: Data) -> tuple[tuple[Field, ...], list[str]]:
    """Return the batch columns that can be measured, and the problems of all others."""
    planned, problems = draft(schema, data)
    names = Counter(schema.names)
    clear = (field for field in planned if all(names[source.partition(".")[0]] < 2 for source in field.sources))
    return tuple(dataclasses.replace(field, skip=True) for field in clear), list(problems)


def _together(schema: Any, data: Data) -> str | None:
    return None if data.together is None or unfit_together(data.together, columns_of(schema)) else data.together


def _where(schema: Any, data: Data) -> tuple[str, bool] | None:
    kind = None if data.where is None else columns_of(schema).get(data.where[0])
    return data.where if kind is not None and kind.dtype == "bool" else None


def _in_spark(data: Data, fields: Sequence[Field], ranks: int, fraction: float) -> list[PartitionFigures]:
    """Return the figures of every source partition, in their order."""
    from pyspark.sql import functions as F

    frame, schema = data.frame, data.frame.schema
    frame = frame if fraction == 1 else frame.sample(float(fraction), seed=_SEED)
    columns = [pack(field, schema).alias(f"c{i}") for i, field in enumerate(fields)]
    if (where := _where(schema, data)) is not None:
        chosen = spark_column(schema, where[0])
        frame = frame.where(chosen.isNull() | (chosen == F.lit(where[1])))
        columns.append(chosen.isNull().alias(WHERE_IS_NULL))
    if (together := _together(schema, data)) is not None:
        home = F.pmod(F.xxhash64(spark_column(schema, together)), F.lit(ranks))
        columns.append(home.cast("int").alias(HOME))
    payload = json.dumps([field.to_json() for field in fields]).encode()
    with drivers_python(frame.sparkSession):
        entry = ship.entry("tritium.data.profiling.measure:in_task", payload)
        answers = frame.select(*columns).mapInArrow(entry, "figures binary").collect()
    parts: list[PartitionFigures] = [pickle.loads(answer.figures) for answer in answers]
    return sorted(parts, key=lambda part: part.partition)


def _in_table(
    rows: pa.Table, data: Data, fields: Sequence[Field], ranks: int, fraction: float
) -> tuple[list[PartitionFigures], tuple[Field, ...], list[str]]:
    """Return the figures of a table, which is one source partition, the fields that can be packed, and problems."""
    if fraction < 1:
        rows = rows.filter(pa.array(np.random.default_rng(_SEED).random(rows.num_rows) < fraction))
    more: dict[str, pa.Array] = {}
    if (where := _where(rows.schema, data)) is not None:
        chosen = column_of(rows, where[0])
        rows = rows.filter(pa.compute.equal(chosen, where[1]).fill_null(True))
        more[WHERE_IS_NULL] = column_of(rows, where[0]).is_null()
    if (together := _together(rows.schema, data)) is not None:
        more[HOME] = pa.array(ranks_of(column_of(rows, together), ranks))
    ids, problems, kept, columns = np.arange(rows.num_rows), [], [], []
    for field in fields:
        try:
            columns.append(packed_field(field, rows, "data", ids))
            kept.append(field)
        except (BadData, BadRow) as error:
            problems.append(str(error))
    names = [*(f"c{i}" for i in range(len(kept))), *more]
    batches = pa.Table.from_arrays([*columns, *more.values()], names=names).to_batches(BATCH_ROWS)
    return [measured(kept, 0, batches)], tuple(kept), problems


def _refusals(fields: Sequence[Field], parts: Sequence[PartitionFigures]) -> list[str]:
    """Return a sentence for each column with rows that would be refused."""
    problems = []
    if nulls := sum(part.where_nulls for part in parts):
        problems.append(f"the column of where= is null in {nulls:,} rows; it must be True or False.")
    for number, field in enumerate(fields):
        figures = [part.fields[number] for part in parts]
        if count := sum(one.refused for one in figures):
            first = next(one.first for one in figures if one.first)
            problems.append(f"{count:,} row{'s' * (count > 1)}; the first: {first}")
        shapes = sorted({one.shape for one in figures if one.shape is not None})
        if len(shapes) > 1:
            lengths = [shape[0] for shape in shapes if shape]
            pad = f", or pad={{{field.sources[0]!r}: {max(lengths)}}}" if field.depth == 1 else ""
            problems.append(
                f"column {field.source_names} has rows of the shapes {', '.join(map(str, shapes))} in different source "
                f"partitions, and a batch needs one. Give all rows one length{pad}."
            )
    return problems


def _columns(
    fields: Sequence[Field], parts: Sequence[PartitionFigures], types: dict[str, SourceType]
) -> list[ColumnProfile]:
    columns = []
    for number, field in enumerate(fields):
        total = FieldFigures([type(one)() for one in parts[0].fields[number].sources] if parts else [])
        for part in parts:
            for whole, figures in zip(total.sources, part.fields[number].sources, strict=True):
                whole.add(figures)
            total.shape = total.shape or part.fields[number].shape
        shape = "bytes, decoded" if field.kind == "bytes" else f"{field.dtype} {list(total.shape or field.shape or ())}"
        for source, figures in zip(field.sources, total.sources, strict=True):
            kind = types[source]
            low, high = (_value(bound, kind) for bound in (figures.least, figures.most))
            ends = None if figures.shortest is None else (figures.shortest, int(figures.longest or 0))
            columns.append(
                ColumnProfile(
                    name=source, type=kind.text, batch=f"{field.name}: {shape}", nulls=figures.nulls, nan=figures.nan,
                    range=None if low is None else (low, high), lengths=ends,
                )
            )  # fmt: skip
    return columns


def _value(bound: float | None, kind: SourceType) -> Any:
    """Return a bound as the user knows it: days since 1970 as a date, microseconds as a time in UTC."""
    if bound is None or kind.name not in ("date", "timestamp"):
        return bound
    if kind.name == "date":
        return datetime.date(1970, 1, 1) + datetime.timedelta(days=int(bound))
    return datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=int(bound))


def _rank_rows(
    parts: Sequence[PartitionFigures], ranks: int, data: Data, schema: Any, fraction: float
) -> tuple[int, ...]:
    """Return the rows of each rank, as the exchange deals them; estimated where a sample was measured."""
    counts, whole = np.zeros(ranks, np.int64), sum(part.rows for part in parts)
    if _together(schema, data) is not None:
        homes = sum((part.homes for part in parts), Counter[int]())
        counts += np.array([homes[rank] for rank in range(ranks)])
    elif data.shuffle != "stream" and fraction == 1 and not is_many(whole, sum(part.sent for part in parts)):
        counts += np.array([len(range(rank, whole, ranks)) for rank in range(ranks)])
    else:
        for part in parts:
            first = (np.arange(ranks) - part.partition) % ranks
            counts += np.maximum(0, -(-(part.rows - first) // ranks))
    return tuple(round(count / fraction) for count in counts)


def _hints(result: Profile, batch_size: int | None) -> list[str]:
    hints = []
    if result.skew >= _SKEW and len(result.partitions) > 1:
        number = int(np.argmax(result.partitions))
        share = max(result.partitions) / result.rows
        hints.append(
            f"source partition {number} has {share:.0%} of all rows, and the exchange waits for it: df.repartition(…), "
            "or more partitions where it is read, divides its work."
        )
    if not result.rank_rows or batch_size is None:
        return hints
    most, ranks, step = max(result.rank_rows), len(result.rank_rows), batch_size * result.row_bytes
    if batch_size >= most and most:
        hints.append(
            f"an epoch is one step: batch_size={batch_size:,} is no less than the {most:,} rows of a rank. A smaller "
            f"batch_size{' or fewer ranks' * (ranks > 1)} takes more steps."
        )
    elif 0 < step < _STEP_BYTES:
        pays = math.ceil(_STEP_BYTES / result.row_bytes)
        hints.append(
            f"a step of batch_size={batch_size:,} reads {_size(step)} a rank, less than it costs to begin one and to "
            f"average over ranks: batch_size={min(pays, most):,} takes {result.steps or 0:,} steps of an epoch down to "
            f"{math.ceil(most / min(pays, most)):,}" + (", or take fewer ranks." if ranks > 1 else ".")
        )
    return hints


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def _between(bounds: tuple[Any, Any] | None) -> str:
    if bounds is None:
        return ""
    low, high = (f"{one:g}" if isinstance(one, float) else f"{one}" for one in bounds)
    return low if low == high else f"{low} to {high}"
