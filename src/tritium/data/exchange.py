"""The exchange: several DataFrames as one Spark DataFrame with a partition for each rank (driver).

The frame is a union of nullable structs, one per name, with an id for each row, distributed to the ranks by Spark's own
shuffle. It uses the DataFrame API only, so that it is the same on Spark Connect, and sets no configuration.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from tritium.data.idset import HALF, PARTITION_BITS, POSITION
from tritium.data.plan import plan
from tritium.data.schema import DENSE_BYTES, Data, Field, Shapes, as_data
from tritium.data.types import IMAGE_SIZE, SourceType, columns_of, may_exceed_int64, spark_column
from tritium.errors import BadData, BadSetting, IncompleteShard
from tritium.spark.inside import end_of_stream, jvm_bytes, older
from tritium.spark.inside.jvm_bytes import as_bytes
from tritium.spark.inside.unsafe import SQL_TYPES


class Exchange:
    """The rows of named DataFrames, distributed to `ranks`. Nothing is computed until a gang reads `frame`.

    Where it is persisted to serve several gangs, use it as a context manager, or call `unpersist()`.
    """

    def __init__(self, data: Mapping[str, Data | Any], ranks: int, *, spark: Any = None) -> None:
        """Plan the columns.

        Raises BadSetting, and BadData with all problems of a frame.
        """
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise BadSetting(f"ranks={ranks!r}: a gang has at least one rank")
        self.ranks = ranks
        self.data = {name: as_data(value) for name, value in data.items()}
        for name, value in self.data.items():
            _check_name(name)
            check_frame(name, value.frame)
        if spark is None and not self.data:
            raise BadSetting("an exchange without data needs spark=, the session whose tasks the ranks become")
        self.plan: dict[str, tuple[Field, ...]] = {
            name: plan(value.frame.schema, value, name) for name, value in self.data.items()
        }
        self.spark = spark if spark is not None else next(iter(self.data.values())).frame.sparkSession
        streams = any(value.shuffle == "stream" for value in self.data.values())
        self.sorted = not streams and not end_of_stream.used(self.spark)
        self.persisted = False
        self._lock = threading.Lock()
        self._readers = 0
        self._begun = False
        """Whether a gang has read from the persisted rows, perhaps not all of them."""
        self._fingerprint: Mapping[str, Any] | None = None
        """That of the persisted rows, once a gang has read them all."""
        self._shapes: Shapes = {}

    @cached_property
    def frame(self) -> Any:
        """A Spark DataFrame of `ranks` partitions: `_id` long, `_anchor` int (null for a data row), a struct per name.

        Each partition has one anchor row, whose id is its highest. Where `sorted` (Spark's version gives no other proof
        that a shard is complete), rows come in the order of their ids, the anchor last.
        """
        from pyspark.sql import functions as F

        rows = {}
        for name, fields in self.plan.items():
            schema = self.data[name].frame.schema
            rows[name] = F.struct(*(pack(field, schema).alias(f"c{i}") for i, field in enumerate(fields)))
        partition, position = F.shiftright("_id", PARTITION_BITS), F.col("_id").bitwiseAND(F.lit(POSITION))
        rank = F.pmod(partition + position, F.lit(self.ranks)).cast("int")
        home = ["_home"] if self._goes_together else []
        rank = F.coalesce(F.col("_anchor"), *home, rank)
        dealt = older.dealt(self.numbered(rows), self.ranks, rank).drop("_home")
        dealt = dealt.sortWithinPartitions("_id") if self.sorted else dealt
        if not self._has_arrays or self.as_arrays is not None:
            return dealt
        rows_of = (_rows_as_bytes(self.spark, name, fields) for name, fields in self.plan.items())
        return dealt.select("_id", "_anchor", *rows_of)

    @property
    def _goes_together(self) -> bool:
        return any(data.together is not None for data in self.data.values())

    def numbered(self, rows: Mapping[str, Any]) -> Any:
        """Return the rows of all frames with their ids, before they are dealt.

        rows : name → the struct of a row of its frame.
        """
        from pyspark.sql import functions as F

        halves = _halves(self.data)
        packed = {name: self._packed(name, halves.get(name), rows) for name in self.plan if name not in halves.values()}
        home = ["_home"] if self._goes_together else []
        kinds = {
            field.name: field.dataType for frame in packed.values() for field in frame.schema if field.name != "_home"
        }
        types = {name: kinds[name] for name in self.plan}
        anchors = self.spark.range(0, self.ranks, 1, 1)
        anchor = F.col("id").cast("int").alias("_anchor")
        united = None
        for first, frame in packed.items():
            in_frame = (first, halves.get(first))
            columns = [F.col(name) if name in in_frame else F.lit(None).cast(kind) for name, kind in types.items()]
            part = frame.select(F.lit(None).cast("int").alias("_anchor"), *home, *_named(columns, types))
            united = part if united is None else united.unionAll(part)
        nulls = [F.lit(None).cast(kind) for kind in types.values()]
        last = anchors.select(anchor, *(F.lit(None).cast("int").alias(h) for h in home), *_named(nulls, types))
        united = last if united is None else united.unionAll(last)
        return united.select(_numbers(list(halves.values())).alias("_id"), "*")

    @cached_property
    def as_arrays(self) -> str | None:
        """Why arrays leave the JVM number by number; None where they leave it as bytes, or there are none."""
        return jvm_bytes.used.why_not(self.spark) if self._has_arrays else None

    @property
    def row_bytes(self) -> int | None:
        """The most bytes of a row of `frame` in Arrow; None where arrays or strings may have any length.

        Of persisted rows that a gang has read, the shapes are known.
        """
        shapes = self._shapes if self._fingerprint is not None else {}
        sizes = [most_bytes(fields, shapes.get(name, {})) for name, fields in self.plan.items()]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def _has_arrays(self) -> bool:
        return any(takes_bytes(field) for fields in self.plan.values() for field in fields)

    def _packed(self, name: str, half: str | None, rows: Mapping[str, Any]) -> Any:
        """Return the frame of `name` as one struct column of that name.

        half : the name that takes the rows of this frame which are not those of `name`, in a column of its own.

        The last column `_home` is the rank of a row that goes with others, else null: Spark computes what is selected.
        """
        from pyspark.sql import functions as F

        data = self.data[name]
        frame, schema = data.frame, data.frame.schema
        if data.where is not None and half is None:
            frame = frame.where(_chosen(schema, *data.where))
        if keys := data.keys:
            frame = frame.sortWithinPartitions(*(spark_column(schema, key) for key in keys))
        columns = []
        for taken in filter(None, (name, half)):
            where = self.data[taken].where if half is not None else None
            row = rows[taken] if where is None else F.when(_chosen(schema, *where), rows[taken])
            columns.append(row.alias(taken))
        home = F.lit(None)
        if (key := data.together) is not None:
            home = F.pmod(F.xxhash64(spark_column(schema, key)), F.lit(self.ranks))
        return frame.select(*columns, home.cast("int").alias("_home"))

    def persist(self) -> Exchange:
        """Keep the distributed rows in Spark's block storage, so that further gangs don't recompute the source."""
        if not self.persisted:
            from pyspark.storagelevel import StorageLevel

            self.frame.persist(StorageLevel.MEMORY_AND_DISK)
            self.persisted = True
        return self

    def unpersist(self) -> None:
        """Free the block storage. Does nothing where nothing was persisted."""
        if self.persisted:
            self.persisted = False
            self.frame.unpersist()
            self._begun, self._fingerprint = False, None

    @contextmanager
    def read(self) -> Iterator[None]:
        """Count a reader of `frame` in this block. Drops persisted rows that an earlier gang did not read to the end.

        Such rows may come from two evaluations: Spark persists a rank's rows where that rank ran, and when that
        executor is lost, recomputes these rows alone from the source. If they then have other ids, some rows would come
        twice and some not at all.
        """
        with self._lock:
            if self.persisted and self._begun and self._fingerprint is None and not self._readers:
                self.unpersist()
                self.persist()
            self._begun = True
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def verify(self, fingerprint: Mapping[str, Any], shapes: Shapes | None = None) -> IncompleteShard | None:
        """Compare the fingerprint of all rows that a gang has read with that of the rows that were persisted.

        shapes : of the rows of all ranks, where they are known.

        Returns the error to raise where they differ, else None.
        """
        if not self.persisted or self._fingerprint in (None, fingerprint):
            self._fingerprint = fingerprint
            self._shapes = shapes or self._shapes
            return None
        self._fingerprint = None
        return IncompleteShard(
            "A part of the rows that were kept was lost, with its executor perhaps, and Spark has computed it again, "
            "alone, with other row ids: some rows would come twice, and some not at all. "
            "Launch again, and all rows are recomputed; Data(row_key=…) keeps the ids."
        )

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpersist()


def pack(field: Field, schema: Any) -> Any:
    """Return the pyspark Column in which a Field leaves the JVM, for a DataFrame with this schema (a StructType).

    A row that can't be packed is replaced by a mark, so that the receiver can name column and row: for a wide sparse
    vector an array that begins with null, as no vector does; for packed scalars see `_marked`.
    """
    from pyspark.sql import functions as F

    columns = columns_of(schema)
    if field.packed:
        row = F.array(*(_scalar(spark_column(schema, name), columns[name], field.travel) for name in field.sources))
        return _marked(row, field, schema) if field.marked else row
    source = field.sources[0]
    column, kind = spark_column(schema, source), columns[source]
    if field.content == "image":
        size = F.concat_ws(",", *(column.getField(name) for name in IMAGE_SIZE))
        return F.concat(F.encode(F.concat(size, F.lit(";")), "utf-8"), column.getField("data"))
    if field.kind == "bytes":  # An integer travels as its digits, as with ANSI Spark casts none to bytes.
        return column if kind.name == "binary" else column.cast("string").cast("binary")
    if kind.name == "vector":
        from pyspark.ml.functions import vector_to_array

        inner, number = F.unwrap_udt(column), SQL_TYPES[field.travel]
        wide = (inner["type"] == 0) & (inner["size"] > DENSE_BYTES // np.dtype(field.travel).itemsize)
        mark = F.array(F.lit(None).cast(number), F.size(inner["indices"]).cast(number), inner["size"].cast(number))
        return F.when(column.isNotNull(), F.when(wide, mark).otherwise(vector_to_array(column, field.travel)))
    leaf, depth = kind.leaf()
    if leaf.name == "decimal" or (leaf.name == "number" and leaf.dtype != field.travel):
        return column.cast("array<" * depth + SQL_TYPES[field.travel] + ">" * depth)
    return column


def takes_bytes(one: Field) -> bool:
    """Return whether this Field leaves the JVM as arrays of numbers, which may be sent as bytes."""
    return one.kind == "fixed" and one.depth > 0 and one.vocabulary is None and one.buckets is None


def most_bytes(fields: Iterable[Field], shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the most bytes of a row of these Fields in Arrow; None where an array or a string may have any length.

    shapes : column → the shape of one row, of arrays whose rows have been seen and are all alike.
    """
    total = 64  # For ids, offsets, and the bits of nulls.
    for field in fields:
        known = (len(field.sources),) if field.packed or not field.depth else shapes.get(field.name)
        words = field.vocabulary is not None or field.buckets is not None
        if known is None or words or field.kind != "fixed" or field.pad is not None:
            return None
        total += 64 + 9 * math.prod(known) + 24 * math.prod(known[:-1])
    return total


def _rows_as_bytes(spark: Any, name: str, fields: Sequence[Field]) -> Any:
    """Return the struct column `name` of a shuffled frame, of the columns of `fields`, with its arrays as bytes."""
    from pyspark.sql import functions as F

    whole = F.col(name)
    children = []
    for index, one in enumerate(fields):
        child = whole.getField(f"c{index}")
        children.append((as_bytes(spark, child) if takes_bytes(one) else child).alias(f"c{index}"))
    return F.when(whole.isNotNull(), F.struct(*children)).alias(name)


def _marked(row: Any, field: Field, schema: Any) -> Any:
    """Return `row`, packed as int64, or in its place a longer array of the index of the source that does not fit.

    Spark's cast makes 0 of NaN and the nearest integer of 1e300, or with ANSI fails the job without a row's id.
    """
    from pyspark.sql import functions as F

    columns = columns_of(schema)
    marks = [
        # NaN counts as the largest number.
        F.when((value < float(-(2**63))) | (value >= float(2**63)), F.lit(index).cast("bigint"))
        for index, name in enumerate(field.sources)
        if may_exceed_int64(columns[name])
        for value in [spark_column(schema, name).cast("double")]
    ]
    mark = F.coalesce(*marks, F.lit(None).cast("bigint"))
    return F.when(mark.isNull(), row).otherwise(F.array_repeat(mark, len(field.sources) + 1))


def _scalar(column: Any, kind: SourceType, travel: str) -> Any:
    """Return a scalar as the number that travels in a packed row: a date in days, a timestamp in µs since 1970."""
    from pyspark.sql import functions as F

    if kind.name == "date":
        column = F.unix_date(column)
    elif kind.name == "timestamp" and kind.zoned:
        column = F.unix_micros(column)
    elif kind.name == "timestamp":  # No function of Spark converts it without the session's time zone.
        days = F.unix_date(column.cast("date")).cast("bigint")
        minutes = (days * 24 + F.hour(column)) * 60 + F.minute(column)
        column = minutes * 60_000_000 + (F.date_part(F.lit("SECOND"), column) * 1_000_000).cast("bigint")
    return column.cast(SQL_TYPES[travel])


def _halves(data: Mapping[str, Data]) -> dict[str, str]:
    """Return the pairs of names that read the two halves of one frame, told apart by `where`."""
    pairs: dict[str, str] = {}
    alone: list[str] = []
    for name, one in data.items():
        other = next((first for first in alone if _is_other_half(data[first], one)), None)
        if other is None:
            alone.append(name)
        else:
            alone.remove(other)
            pairs[other] = name
    return pairs


def _is_other_half(one: Data, other: Data) -> bool:
    if one.where is None or other.where is None or one.frame is not other.frame:
        return False
    alike = (one.where[0], one.keys, one.together) == (other.where[0], other.keys, other.together)
    return alike and one.where[1] != other.where[1]


def _chosen(schema: Any, name: str, value: bool) -> Any:
    """Return a condition for the rows in which a boolean column has this value; a null in it is an error."""
    from pyspark.sql import functions as F

    column = spark_column(schema, name)
    null = f"column {name!r} of where= holds a null; it must be True or False."
    return F.when(column.isNull(), F.raise_error(F.lit(null)).cast("boolean")).otherwise(column == F.lit(value))


def _numbers(halves: Sequence[str]) -> Any:
    """Return the id of each row: its source partition, and its position there.

    halves : columns that take a part of the rows of a frame. Their rows are counted on their own, in a branch that
             Spark evaluates for these rows alone, so that they are dealt as evenly as the other ones.
    """
    from pyspark.sql import functions as F

    number = F.monotonically_increasing_id()
    if not halves:
        return number
    is_half = functools.reduce(operator.or_, (F.col(name).isNotNull() for name in halves))
    return F.when(is_half, F.monotonically_increasing_id() + F.lit(HALF)).otherwise(number)


def _named(columns: list[Any], types: Mapping[str, Any]) -> list[Any]:
    return [column.alias(name) for column, name in zip(columns, types, strict=True)]


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise BadSetting(f"data={{{name!r}: ...}}: a name is a Python identifier that doesn't start with '_'")


def check_frame(name: str, frame: Any) -> None:
    """Raise BadData unless it is a DataFrame of Spark, and no stream."""
    if not hasattr(frame, "sparkSession"):
        raise BadData(
            f"data {name!r} is a {type(frame).__module__}.{type(frame).__qualname__}, and the cluster reads Spark "
            "DataFrames: spark.createDataFrame(...) makes one of a pandas or Arrow table, or launch with "
            'on="driver", where tables can stay as they are'
        )
    if frame.isStreaming:
        raise BadData(
            f"data {name!r} is a streaming DataFrame, which has no end to train to. Read a batch of it "
            "(spark.read, or foreachBatch)"
        )
