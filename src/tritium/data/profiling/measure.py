"""Measures the rows of one source partition as ranks would read them (Spark's Python worker, driver)."""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.codec import read
from tritium.data.idset import PARTITION_BITS, place
from tritium.data.receiver import readable
from tritium.data.schema import Field
from tritium.data.spool import Ragged
from tritium.errors import BadRow

Array = np.ndarray[Any, Any]
HOME, WHERE_IS_NULL = "_home", "_where"
"""Columns beside those of the fields: the rank of a row that goes with others, and whether its `where` is null."""


@dataclass
class SourceFigures:
    """The figures of a source column; all counts are of rows.

    nulls         : rows that are null, or have a null in their array.
    nan           : rows with NaN, an infinity, or a number beyond the dtype in which the column travels.
    least, most   : the least and the largest finite number, as they travel; None without one.
    shortest, longest : of arrays (outermost), and bytes of strings and binary columns; None for scalars.
    """

    nulls: int = 0
    nan: int = 0
    least: float | None = None
    most: float | None = None
    shortest: int | None = None
    longest: int | None = None

    def add(self, other: SourceFigures) -> None:
        """Take the figures of other rows, too."""
        self.nulls += other.nulls
        self.nan += other.nan
        for name, choose in (("least", min), ("most", max), ("shortest", min), ("longest", max)):
            both = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            setattr(self, name, choose(both) if both else None)


@dataclass
class FieldFigures:
    """The figures of a batch column: rows that would be refused, the text for the first of them, and its sources."""

    sources: list[SourceFigures]
    refused: int = 0
    first: str = ""
    shape: tuple[int, ...] | None = None


@dataclass
class PartitionFigures:
    """The figures of a source partition.

    homes      : rank → rows that go to it by `together`.
    sent       : bytes of its rows in Arrow. spooled : on a rank's disk, with the id of each row.
    waited     : seconds until its source had given all rows. checked : seconds of checks, as a rank makes them.
    """

    partition: int
    rows: int = 0
    refused: int = 0
    where_nulls: int = 0
    homes: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    spooled: int = 0
    waited: float = 0.0
    checked: float = 0.0
    fields: list[FieldFigures] = field(default_factory=list)


def in_task(payload: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the figures of this task's partition as one row with the column `figures`.

    payload : JSON of the fields, whose columns `c0`, `c1`, … come first in a batch.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    fields = [Field.from_json(plain) for plain in json.loads(payload)]
    figures = measured(fields, context.partitionId(), batches)
    yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(figures)], pa.binary())], names=["figures"])


def measured(fields: Sequence[Field], partition: int, batches: Iterable[pa.RecordBatch]) -> PartitionFigures:
    """Return the figures of a partition's rows, as the exchange packs them."""
    figures = PartitionFigures(partition)
    figures.fields = [FieldFigures([SourceFigures() for _ in one.sources]) for one in fields]
    known, mark = list(fields), time.perf_counter()
    for batch in batches:
        begun = time.perf_counter()
        figures.waited += begun - mark
        _add(figures, known, batch)
        mark = time.perf_counter()
        figures.checked += mark - begun
    figures.waited += time.perf_counter() - mark
    for one, now in zip(figures.fields, known, strict=True):
        one.shape = now.shape
    return figures


def _add(figures: PartitionFigures, known: list[Field], batch: pa.RecordBatch) -> None:
    """Take the rows of a batch; `known` gets the shapes that they show."""
    names = batch.schema.names
    if WHERE_IS_NULL in names:
        chosen = batch.column(names.index(WHERE_IS_NULL))
        figures.where_nulls += chosen.true_count
        batch = batch.filter(pc.invert(chosen))
    if not batch.num_rows:
        return
    if HOME in names:
        figures.homes.update(batch.column(names.index(HOME)).to_pylist())
    ids = (figures.partition << PARTITION_BITS) + figures.rows + np.arange(batch.num_rows)
    valid = np.ones(batch.num_rows, np.bool_)
    figures.spooled += ids.nbytes
    for number, one in enumerate(known):
        column = batch.column(number)
        figures.sent += column.nbytes
        of_field = figures.fields[number]
        for total, source in zip(of_field.sources, _sources(one, column), strict=True):
            total.add(source)
        rows, (known[number],) = readable([one], [column], ids)
        fit = np.isin(np.arange(len(ids)), rows)
        if not fit.all():
            of_field.refused += int((~fit).sum())
            of_field.first = of_field.first or _first(known[number], column, ids, int(np.argmin(fit)))
        valid &= fit
        figures.spooled += _bytes(known[number], column, ids, rows, len(ids))
    figures.refused += int((~valid).sum())
    figures.rows += batch.num_rows


def _bytes(one: Field, column: pa.Array, ids: Array, rows: Array, of: int) -> int:
    """Return the bytes that so many rows take in a rank's files, by those that can be read."""
    if not len(rows):
        return 0
    values, mask = read(one, column if len(rows) == of else column.take(pa.array(rows)), ids[rows])
    size = values.values.nbytes + values.lengths.nbytes if isinstance(values, Ragged) else values.nbytes
    return round((size + (0 if mask is None else mask.nbytes)) * of / len(rows))


def _first(one: Field, column: pa.Array, ids: Array, row: int) -> str:
    try:
        read(one, column.slice(row, 1), ids[row : row + 1])
    except BadRow as error:
        # Of a sample, or of rows that the exchange sorts, only the partition is the same.
        return str(error).replace(place(int(ids[row])), f"source partition {int(ids[row]) >> PARTITION_BITS}")
    return f"column {one.source_names} is refused in source partition {int(ids[row]) >> PARTITION_BITS}."


def _sources(one: Field, column: pa.Array) -> list[SourceFigures]:
    """Return the figures of each source of a batch column of these rows."""
    if one.kind == "bytes":
        return [_of_bytes(column)]
    if one.packed:
        return _of_packed(one, column)
    figures = SourceFigures(nulls=column.null_count)
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    column = column.drop_null()
    holes: set[int] = set()
    for level in range(one.depth):
        counts: Array = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        if not level and len(counts):
            figures.shortest, figures.longest = int(counts.min()), int(counts.max())
        rows, column = np.repeat(rows, counts), column.flatten()
    if column.null_count:
        holes.update(rows[column.is_null().to_numpy(zero_copy_only=False)].tolist())
        rows, column = rows[column.is_valid().to_numpy(zero_copy_only=False)], column.drop_null()
    figures.nulls += len(holes)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        _range(figures, _plain(column), rows)
    return [figures]


def _of_packed(one: Field, column: pa.Array) -> list[SourceFigures]:
    width = len(one.sources)
    whole = pc.equal(pc.list_value_length(column), width)
    marked = column.filter(pc.invert(whole))  # It holds the number of its source: see `exchange.pack`.
    leaf = column.filter(whole).flatten()
    absent: Array = leaf.is_null().to_numpy(zero_copy_only=False).reshape(-1, width)
    values = _plain(leaf.fill_null(False if pa.types.is_boolean(leaf.type) else 0)).reshape(-1, width)
    figures = []
    for number in range(width):
        of_source = SourceFigures(nulls=int(absent[:, number].sum()))
        present = values[~absent[:, number], number]
        _range(of_source, present, np.arange(len(present)))
        figures.append(of_source)
    for mark in marked.to_pylist():
        figures[mark[0]].nan += 1
    return figures


def _of_bytes(column: pa.Array) -> SourceFigures:
    lengths = pc.binary_length(column.drop_null()).to_numpy(zero_copy_only=False)
    figures = SourceFigures(nulls=column.null_count)
    if len(lengths):
        figures.shortest, figures.longest = int(lengths.min()), int(lengths.max())
    return figures


def _plain(leaf: pa.Array) -> Array:
    """Return numbers without nulls: of dates days, of timestamps microseconds since 1970."""
    if pa.types.is_date32(leaf.type):
        leaf = leaf.cast(pa.int32())
    elif pa.types.is_timestamp(leaf.type):
        leaf = leaf.cast(pa.int64())
    numbers: Array = leaf.to_numpy(zero_copy_only=False)
    return numbers


def _range(figures: SourceFigures, values: Array, rows: Array) -> None:
    """Add the range of the values `[k]` that are finite, and count the rows `[k]` of the others."""
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        figures.nan += len(np.unique(rows[~finite]))
        values = values[finite]
    if len(values):
        figures.least, figures.most = values.min().item(), values.max().item()
