"""The exchange without a JVM: pandas and Arrow tables distributed to ranks in the same batches (driver)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data import narrow
from tritium.data.codec import bad_row
from tritium.data.idset import PARTITION_BITS
from tritium.data.plan import plan
from tritium.data.schema import DENSE_BYTES, Data, Field, as_data
from tritium.data.types import IMAGE_SIZE, SourceType, columns_of, path_of
from tritium.errors import BadData, BadRow, BadSetting

Array = np.ndarray[Any, Any]
BATCH_ROWS = 8192
_VECTORS = ("pyspark.ml.linalg", "pyspark.mllib.linalg")
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}  # Arrow can't take rows of views.


class Tables:
    """Named tables and their plan, the counterpart of Exchange. A table is one source partition."""

    def __init__(self, data: Mapping[str, Data | Any], ranks: int) -> None:
        """Plan the columns. Raises BadSetting, and BadData with all problems of a table."""
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise BadSetting(f"ranks={ranks!r}: a gang has at least one rank")
        self.ranks = ranks
        frames = {name: as_data(value) for name, value in data.items()}
        self._tables = {name: table_of(value.frame, name, _filled(value)) for name, value in frames.items()}
        self.plan: dict[str, tuple[Field, ...]] = {
            name: plan(self._tables[name].schema, value, name) for name, value in frames.items()
        }
        for name, value in frames.items():
            if value.where is not None:
                self._tables[name] = _where(self._tables[name], *value.where, name)
            if value.keys:
                self._tables[name] = _sorted(self._tables[name], value.keys)
        self._homes = {
            name: ranks_of(column_of(self._tables[name], value.together), ranks)
            for name, value in frames.items()
            if value.together is not None
        }
        self._types = {
            name: pa.struct([(f"c{i}", _arrow(field, table.schema)) for i, field in enumerate(self.plan[name])])
            for name, table in self._tables.items()
        }

    def batches(self, rank: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one rank in the order of their ids, its anchor last. Raises BadRow, BadData."""
        for partition, (name, table) in enumerate(self._tables.items()):
            first = (rank - partition) % self.ranks
            if name in self._homes:
                rows = np.flatnonzero(self._homes[name] == rank)
            else:
                rows = np.arange(first, table.num_rows, self.ranks, dtype=np.int64)
            for start in range(0, len(rows), BATCH_ROWS):
                chosen = rows[start : start + BATCH_ROWS]
                taken = table.take(pa.array(chosen)).combine_chunks()
                ids = (partition << PARTITION_BITS) + chosen
                columns = [packed_field(field, taken, name, ids) for field in self.plan[name]]
                struct = pa.StructArray.from_arrays(columns, fields=list(self._types[name]))
                yield self._batch(ids, None, name, struct)
        partition = len(self._tables) + rank
        yield self._batch(np.array([partition << PARTITION_BITS], np.int64), rank, None, None)

    def _batch(self, ids: Array, anchor: int | None, name: str | None, struct: Any) -> pa.RecordBatch:
        anchors = pa.nulls(len(ids), pa.int32()) if anchor is None else pa.array([anchor], pa.int32())
        columns = [struct if other == name else pa.nulls(len(ids), kind) for other, kind in self._types.items()]
        return pa.RecordBatch.from_arrays([pa.array(ids), anchors, *columns], names=["_id", "_anchor", *self._types])


def _filled(data: Data) -> set[str]:
    """Return the names of the source columns for whose nulls `data` has a value."""
    columns = data.columns if isinstance(data.columns, Mapping) else {}
    sources = [columns.get(name, name) for name in data.nulls]
    return {*data.nulls, *(name for source in sources for name in ([source] if isinstance(source, str) else source))}


def table_of(frame: Any, name: str, filled: Collection[str] = ()) -> pa.Table:
    """Return a pandas DataFrame, an Arrow table or batch as an Arrow table. NaN in a floating column stays NaN.

    filled : columns for whose nulls there is a value. NaN is null in them, as pandas has no other null for numbers.

    A pandas column of Spark's ml vectors, as `toPandas` makes it, becomes one of arrays; sparse ones are filled up.

    Raises BadData for anything else, and for a pandas column that Arrow can't hold.
    """
    if isinstance(frame, pa.RecordBatch):
        frame = pa.Table.from_batches([frame])
    if isinstance(frame, pa.Table):
        fields = [field.with_type(_VIEWS.get(field.type, field.type)) for field in frame.schema]
        return frame.cast(pa.schema(fields)).combine_chunks()
    kind = type(frame)
    if kind.__module__.partition(".")[0] != "pandas" or kind.__name__ != "DataFrame":
        raise BadData(
            f"data {name!r} is a {kind.__module__}.{kind.__qualname__}; without a cluster, data is a pandas DataFrame "
            "or a pyarrow Table (of a Spark DataFrame: df.toArrow())"
        )
    names, columns, problems = [], [], []  # Two columns may have one name, which the plan refuses.
    for label, series in frame.items():
        try:
            plain = isinstance(series.dtype, np.dtype) and series.dtype.kind == "f"
            column = _vectors(series, name) if series.dtype == object else None
            if column is None:
                nan_is_null = not plain or label in filled
                column = pa.array(series.to_numpy() if plain else series, from_pandas=nan_is_null)
            columns.append(column)
            names.append(str(label))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            problems.append(f"column {label!r} of dtype {series.dtype} does not become an Arrow column: {error}")
    if problems:
        raise BadData(f"data {name!r} can't be read: " + "; ".join(problems), name=name, problems=problems)
    return pa.Table.from_arrays(columns, names=names)


def _vectors(series: Any, name: str) -> pa.Array | None:
    """Return a pandas column of Spark's vectors, dense or sparse, as arrays of float64; None for any other column.

    Raises BadRow for a sparse vector that would take too many bytes as an array.
    """
    vectors, present = series.to_numpy(), series.notna().to_numpy()
    if not present.any() or not all(type(vector).__module__ in _VECTORS for vector in vectors[present]):
        return None
    values, lengths = [], np.zeros(len(present), np.int64)
    for row in np.flatnonzero(present):
        vector = vectors[row]
        size = len(vector)
        if hasattr(vector, "indices") and size * 4 > DENSE_BYTES:
            raise BadRow(
                f"data {name!r}: column {series.name!r} is a sparse vector of {size:,} numbers, "
                f"{len(vector.indices):,} of them set, in row {row}: as a row of a batch it takes "
                f"{size * 4:,} bytes, more than {DENSE_BYTES:,}. Make it narrower where it "
                "comes from (HashingTF(numFeatures=4096), CountVectorizer(vocabSize=4096)).",
                column=str(series.name),
                row_id=int(row),
                value=size,
            )
        values.append(vector.toArray())
        lengths[row] = size
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ends = pa.array(offsets, mask=np.append(~present, False))
    return pa.LargeListArray.from_arrays(ends, pa.array(np.concatenate(values)))


def _where(table: pa.Table, column: str, value: bool, name: str) -> pa.Table:
    """Return the rows in which a boolean column has this value. Raises BadData where it holds a null."""
    chosen = column_of(table, column)
    if chosen.null_count:
        raise BadData(f"data {name!r}: column {column!r} of where= holds a null; it must be True or False.", name=name)
    return table.filter(chosen if value else pc.invert(chosen))


def _sorted(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    columns = pa.table({key: column_of(table, key) for key in keys})
    return table.take(pc.sort_indices(columns, [(key, "ascending") for key in keys])).combine_chunks()


def _arrow(field: Field, schema: pa.Schema) -> pa.DataType:
    """Return the Arrow type in which a Field travels."""
    if field.kind == "bytes":
        return pa.large_binary()
    if field.packed:
        return pa.list_(pa.from_numpy_dtype(field.travel))
    column = column_of(pa.Table.from_batches([], schema), field.sources[0])
    return _travelling(column.type, field.travel)


def _travelling(kind: pa.DataType, travel: str) -> pa.DataType:
    """Return the type that Spark would send for `kind`: no dictionaries, views, decimals or nanoseconds."""
    if pa.types.is_dictionary(kind):
        return _travelling(kind.value_type, travel)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_travelling(kind.value_type, travel), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_travelling(kind.value_type, travel))
    if pa.types.is_date(kind):
        return pa.date32()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.large_string()
    return pa.from_numpy_dtype(travel)


def packed_field(field: Field, rows: pa.Table, name: str, ids: Array) -> pa.Array:
    """Return one Field of these rows as `exchange.pack` makes it. Raises BadRow for a value that can't be packed."""
    if not field.packed:
        column = column_of(rows, field.sources[0])
        if field.kind == "bytes":
            return _as_bytes(field, column)
        return _converted(column, _travelling(column.type, field.travel), field.sources[0], name)
    count, width = rows.num_rows, len(field.sources)
    values = np.zeros((count, width), field.travel)
    absent = np.zeros((count, width), np.bool_)
    marks = np.full(count, -1)
    kinds = columns_of(rows.schema)
    for i, source in enumerate(field.sources):
        column = _scalar(column_of(rows, source), kinds[source], source, name)
        if column.null_count:
            absent[:, i] = column.is_null().to_numpy(zero_copy_only=False)
            column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
        raw = column.to_numpy(zero_copy_only=False)
        if field.skip:
            raw = _with_marks(field, i, raw, marks)
        values[:, i] = _narrowed(field, i, raw, name, ids)
    flat = pa.array(values.reshape(-1), mask=absent.reshape(-1) if absent.any() else None)
    lists = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(width)), flat)
    if (marks < 0).all():
        return lists
    marked = pa.array([None if mark < 0 else [mark] * (width + 1) for mark in marks.tolist()], lists.type)
    return pc.coalesce(marked, lists)


def _with_marks(field: Field, source: int, raw: Array, marks: Array) -> Array:
    """Return values without those that an integer can't hold, in whose rows `marks` gets the index of the source.

    The receiver leaves such rows out: see `exchange.pack`. In a floating dtype it finds those to leave out by itself.
    """
    if raw.dtype.kind != "f" or np.dtype(field.travel).kind == "f":
        return raw
    beyond = ~((raw >= -(2.0**63)) & (raw < 2.0**63))
    marks[beyond & (marks < 0)] = source
    return np.where(beyond, 0, raw)


def _as_bytes(field: Field, column: pa.Array) -> pa.Array:
    """Return the values of a column that is decoded as bytes: of strings UTF-8, of integers their digits.

    Of an image they are its size and its bytes, as `exchange.pack` makes them.
    """
    if field.content == "image":
        numbers = [pc.struct_field(column, name).cast(pa.large_string()) for name in IMAGE_SIZE]
        size = pc.binary_join_element_wise(*numbers, pa.scalar(",", pa.large_string())).cast(pa.large_binary())
        data = pc.struct_field(column, "data").cast(pa.large_binary())
        return pc.binary_join_element_wise(size, data, pa.scalar(b";", pa.large_binary()))
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return (column.cast(pa.large_string()) if field.content == "integer" else column).cast(pa.large_binary())


def _narrowed(field: Field, source: int, raw: Array, name: str, ids: Array) -> Array:
    """Return one source of a packed row in the dtype in which it travels. Raises BadRow for a value it can't hold."""

    def at(row: int, value: Any, what: str, advice: str) -> BadRow:
        error = bad_row(field, ids, row, value, what, advice, source)
        return BadRow(f"data {name!r}: {error}", **error.__dict__, name=name)

    values = narrow.cast(raw, np.dtype(field.travel), at)
    if field.skip:
        return values
    narrow.check(values, raw, at, keep=field.nan == "keep", exact=field.exact[source : source + 1])
    return values


def _scalar(column: pa.Array, kind: SourceType, source: str, name: str) -> pa.Array:
    """Return a scalar column as numbers. Raises BadData as `_converted` does."""
    if kind.name == "decimal":
        return _converted(column, pa.float64(), source, name)
    if kind.name == "date":
        return _converted(column, pa.date32(), source, name).cast(pa.int32())
    if kind.name == "timestamp":
        return _converted(column, pa.timestamp("us", column.type.tz), source, name).cast(pa.int64())
    return column


def _converted(column: pa.Array, to: pa.DataType, source: str, name: str) -> pa.Array:
    """Return the column as Arrow type `to`. Raises BadData for a value that does not fit, as ns in µs."""
    if column.type == to:
        return column
    options = pc.CastOptions.safe(to)
    options.allow_float_truncate = True  # A double becomes a float only where dtype= asks for it.
    options.allow_decimal_truncate = True
    try:
        if pa.types.is_floating(_leaf(to)) and pa.types.is_decimal(_leaf(column.type)):
            column = column.cast(_with_leaf(to, pa.string()))  # Its own cast is off by a bit.
        return pc.cast(column, options=options)
    except pa.ArrowInvalid as error:
        raise BadData(
            f"column {source!r} of data {name!r} does not become {to}: {error}. For nanoseconds: "
            f"df[{source!r}].dt.floor('us')",
            name=name,
        ) from None


def _leaf(kind: pa.DataType) -> pa.DataType:
    return _leaf(kind.value_type) if pa.types.is_nested(kind) else kind


def _with_leaf(kind: pa.DataType, leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_with_leaf(kind.value_type, leaf), kind.list_size)
    return pa.large_list(_with_leaf(kind.value_type, leaf)) if pa.types.is_nested(kind) else leaf


def column_of(rows: pa.Table, source: str) -> pa.Array:
    """Return a column, or a field of a struct, as one array; null where a struct around it is null."""
    top, *below = path_of(rows.schema, source)
    chunked = rows.column(top)
    column = (
        chunked.chunk(0) if chunked.num_chunks == 1 else pa.concat_arrays(chunked.chunks or [pa.nulls(0, chunked.type)])
    )
    for child in below:
        column = pc.struct_field(column, child)
    return column


def ranks_of(column: pa.Array, ranks: int) -> np.ndarray[Any, Any]:
    """Return the rank of each row `[rows]` of a table: distinct values are dealt in the order of their first rows."""
    codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    ranks_of_rows: np.ndarray[Any, Any] = codes.indices.fill_null(0).to_numpy(zero_copy_only=False) % ranks
    return ranks_of_rows
