"""The conversion of a Field's Arrow column to NumPy rows, checked value by value (any process)."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data import narrow
from tritium.data.idset import place
from tritium.data.narrow import ErrorAt
from tritium.data.schema import DENSE_BYTES, Field
from tritium.data.spool import Array, Ragged
from tritium.data.types import dtype_of
from tritium.errors import BadData, BadRow
from tritium.hints import nearest
from tritium.spark.inside import unsafe

Column = Array | Ragged


def read(field: Field, column: pa.Array, ids: Array) -> tuple[Column, Array | None]:
    """Return the rows of one Field, `[rows, *field.shape]` (Ragged for bytes), and its bool mask, or None.

    column : as `exchange.pack` or `Tables.batches` makes it; arrays also as the bytes that `jvm_bytes` makes of them.
    ids    : int64 `[rows]`.

    Where no value has to be changed the array is a view of Arrow's own buffer, with a stride where arrays came as
    bytes. A `shape` that is still None is taken from the first row. Raises BadRow for a null, a NaN, an unknown value,
    a ragged or too long row, or a number that the dtype can't hold.
    """
    if field.kind == "bytes":
        return _bytes(field, column, ids), None
    if field.mean:
        plain = dataclasses.replace(field, dtype="float64", mean=(), std=())
        values, present = read(plain, column, ids)
        assert isinstance(values, np.ndarray)
        return _normalized(field, values, present, ids), present
    rows = None
    if unsafe.is_bytes(column):
        rows = unsafe.matrix(column, np.dtype(field.travel), field.depth)
        if rows is None:
            column = unsafe.lists(column, np.dtype(field.travel), field.depth)
        elif _fits(field, rows):
            return rows, np.ones(rows.shape, np.bool_) if field.mask else None
    whole = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    if whole is not None and field.nulls[0] is None:
        raise bad_row(field, ids, int(np.argmin(whole)), None, "null", _FILL)
    owners = ids if whole is None or field.depth == 0 else ids[whole]
    leaf, lengths = _flatten(field, column, owners) if rows is None else unsafe.flat(rows)
    if field.marked:
        _check_marks(field, leaf, lengths[0], owners)
    values, present = _leaf(field, leaf, lengths, owners)
    values, present = _shaped(field, values, present, lengths, owners)
    if whole is not None and field.depth:
        values, present = _with_null_rows(field, values, present, whole, ids)
    if not field.mask:
        return values, None
    return values, np.ones(values.shape, np.bool_) if present is None else present


_OTHERWISE = "fill them with nulls={{{0!r}: value}}, or, with tr.Data, mark them: nulls={{{0!r}: 'mask'}}"
_ONE_LENGTH = "Give all rows one length"
_FILL = "Drop such rows (`df.dropna(subset=[{0!r}])`), " + _OTHERWISE
# The advice for arrays is longer, as dropna does not look inside them.
_DROP_ARRAYS = (
    "Drop such rows (with Spark `df.where(F.forall({inside}, lambda v: F.isnotnull(v)))`, with pandas "
    "`df[df[{{0!r}}].map(lambda v: all(x is not None for x in v))]`), "
)


def normalized(rows: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """Return (rows - mean) / std as float64 `[rows, *shape]`.

    mean, std : a number for each value of a row, or one for all.
    """
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    scaled: Array = ((flat - np.asarray(mean)) / np.asarray(std)).reshape(rows.shape)
    return scaled


def _normalized(field: Field, rows: Array, present: Array | None, ids: Array) -> Array:
    """Return normalised rows in the batch's dtype, 0 where the mask shows a null. Raises BadRow."""
    width = math.prod(rows.shape[1:])
    if len(rows) and len(field.mean) not in (1, width):
        raise bad_row(field, ids, 0, width, f"of {width} values, where {len(field.mean)} were normalised,", _ONE_LENGTH)
    with np.errstate(over="ignore", invalid="ignore"):  # Checked below, unless nan="keep".
        values = normalized(rows, field.mean, field.std).astype(field.dtype)
    if present is not None:
        values[~present] = 0
    if field.nan == "error" and not narrow.finite(values):
        row = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(axis=1)))
        what = f"normalised to a number beyond {field.dtype}"
        raise bad_row(field, ids, row, None, what, "Look at its standard deviation, or drop such rows")
    return values


def bad_row(field: Field, ids: Array, row: int, value: Any, what: str, advice: str, source: int = 0) -> BadRow:
    """Return the error for one row: its column and place, what is wrong with it, and advice.

    row    : its position in `ids`, int64 [rows].
    advice : `{0!r}` in it stands for the name of the source column.
    source : the index of the source column.
    """
    column, number = field.sources[source], int(ids[row])
    used = "" if column == field.name else f" (in batch column {field.name!r})"
    return BadRow(
        f"column {column!r}{used} is {what} in {place(number)}. {advice.format(column)}.",
        reason=f"column {column!r}{used} is {what.removesuffix(',')}",
        column=column,
        row_id=number,
        value=value,
        batch_column=field.name,
    )


def _bytes(field: Field, column: pa.Array, ids: Array) -> Ragged:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise bad_row(field, ids, row, None, "null", "Drop such rows (`df.dropna(subset=[{0!r}])`)")
    if not len(column):  # Arrow may omit the buffers of an empty array.
        return Ragged(np.zeros(0, np.uint8), np.zeros(0, np.int64))
    wide = pa.types.is_large_binary(column.type)
    offset_type = np.dtype(np.int64 if wide else np.int32)
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, offset_type)[column.offset : column.offset + len(column) + 1]
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return Ragged(raw[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int64))


def _flatten(field: Field, column: pa.Array, ids: Array) -> tuple[pa.Array, list[Array]]:
    """Return the values of rows that are not null, and the lengths of the arrays around them, outermost first."""
    lengths: list[Array] = []
    for level in range(field.depth):
        if level and column.null_count:
            inner = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            row = _row_of(inner, lengths)
            advice = _DROP_ARRAYS.format(inside="{0!r}") + "or fill them"
            raise bad_row(field, ids, row, None, "an array with a null array in it", advice)
        if pa.types.is_fixed_size_list(column.type):
            count = len(column) - column.null_count
            lengths.append(np.full(count, column.type.list_size, np.int64))
        elif column.null_count:
            lengths.append(pc.list_value_length(column.drop_null()).to_numpy())
        else:
            lengths.append(np.diff(column.offsets.to_numpy()))
        column = column.flatten()
    return column, lengths


def _row_of(position: int, lengths: list[Array]) -> int:
    """Return the row of the value at `position` below the arrays of these lengths."""
    for counts in reversed(lengths):
        position = int(np.searchsorted(np.cumsum(counts), position, side="right"))
    return position


def _leaf(field: Field, leaf: pa.Array, lengths: list[Array], ids: Array) -> tuple[Array, Array | None]:
    """Return the checked values `[k]` in the batch's dtype, nulls filled, and a bool `[k]`: not null (None: all)."""
    absent = None
    if leaf.null_count:
        absent = leaf.is_null().to_numpy(zero_copy_only=False)
        _check_nulls(field, absent, lengths, ids)

    def at(position: int, value: Any, what: str, advice: str) -> BadRow:
        source = position % len(field.sources) if field.packed else 0
        return bad_row(field, ids, _row_of(position, lengths), value, what, advice, source)

    words = field.vocabulary is not None or field.buckets is not None
    raw = _index(field, leaf, at) if words else _numbers(leaf)
    if absent is not None:
        raw = np.where(absent, np.zeros((), raw.dtype), raw)
    values = narrow.cast(raw, np.dtype(field.dtype), at)
    narrow.check(values, raw, at, keep=field.nan == "keep", exact=field.exact, inside=_inside(field))
    if absent is None:
        return values, None
    _put_fills(field, values, absent)
    return values, ~absent


def _check_marks(field: Field, leaf: pa.Array, counts: Array, ids: Array) -> None:
    """Raise BadRow for the first row in whose place the JVM sent a mark: see `exchange.pack`."""
    if not field.packed:
        _check_sparse(field, leaf, counts, ids)
        return
    marks = counts != len(field.sources)
    if marks.any():
        row = int(np.argmax(marks))
        source = int(_numbers(leaf)[int(counts[:row].sum())])
        what = f"NaN, infinite or beyond {field.travel}, in which it is packed,"
        raise bad_row(field, ids, row, math.nan, what, _WHOLE, source)


def _check_sparse(field: Field, leaf: pa.Array, counts: Array, ids: Array) -> None:
    """Raise BadRow for the first sparse vector that would take too many bytes as a dense row."""
    if not leaf.null_count:
        return
    start = int(np.argmax(leaf.is_null().to_numpy(zero_copy_only=False)))
    set_numbers, size = (int(number) for number in _numbers(leaf)[start + 1 : start + 3])
    row_bytes = size * np.dtype(field.travel).itemsize
    what = (
        f"a sparse vector of {size:,} numbers, {set_numbers:,} of them set: dense, as a row of a batch is, it takes "
        f"{row_bytes:,} bytes, more than {DENSE_BYTES:,},"
    )
    raise bad_row(field, ids, _row_of(start, [counts]), size, what, _SPARSE)


_SPARSE = (
    "Make it narrower where it comes from (HashingTF(numFeatures=4096), CountVectorizer(vocabSize=4096)), or train a "
    "torch.nn.EmbeddingBag on its indices, an array column: F.unwrap_udt({0!r})['indices']"
)
_WHOLE = "Drop such rows, or give the column a batch column of its own"


def _check_nulls(field: Field, absent: Array, lengths: list[Array], ids: Array) -> None:
    """Raise BadRow for the first null for which there is no fill value."""
    positions = np.flatnonzero(absent)
    refused = np.array([fill is None for fill in field.nulls])
    holes = positions[refused[positions % len(field.nulls)]]
    if len(holes):
        row, source = _row_of(int(holes[0]), lengths), int(holes[0]) % len(field.nulls)
        inside = _inside(field)
        if inside is None:
            raise bad_row(field, ids, row, None, "null", _FILL, source)
        advice = _DROP_ARRAYS.format(inside=inside) + _OTHERWISE
        raise bad_row(field, ids, row, None, "an array with a null in it", advice, source)


def _inside(field: Field) -> str | None:
    """Return code that makes one Spark array of a column's arrays, for error messages; None where it has none."""
    if field.depth == 0 or field.packed:
        return None
    if field.marked:  # Of columns that are not packed, only vectors are.
        return "vector_to_array({0!r})"
    return "F.flatten(" * (field.depth - 1) + "{0!r}" + ")" * (field.depth - 1)


def _put_fills(field: Field, values: Array, absent: Array) -> None:
    fills = np.array([_fill(field, fill) for fill in field.nulls], values.dtype)
    positions = np.flatnonzero(absent)
    values[positions] = fills[positions % len(fills)]


def _fill(field: Field, fill: float | int | str | None) -> float | int:
    if fill is None or fill == "mask":
        return 0
    if isinstance(fill, str):
        return _code(field, fill, {word: i for i, word in enumerate(field.vocabulary or ())})
    return fill


def _code(field: Field, word: str, known: dict[str, int]) -> int:
    """Return the index of a word. Outside the vocabulary it is that of unknown words, or -1 if there is none."""
    if field.buckets is not None:
        return zlib.crc32(word.encode()) % field.buckets
    return known.get(word, len(known) if field.unknown else -1)


def _index(field: Field, leaf: pa.Array, at: ErrorAt) -> Array:
    """Return the indices of strings, int64 [k]. Each distinct word of the batch is looked up once."""
    encoded = leaf.dictionary_encode()
    known = {word: i for i, word in enumerate(field.vocabulary or ())}
    words = encoded.dictionary.to_pylist()
    codes = np.array([_code(field, word, known) for word in words], np.int64)
    where = _numbers(encoded.indices.fill_null(0))
    values = codes[where] if len(codes) else np.zeros(len(where), np.int64)
    if len(codes) and codes.min() < 0:
        unknown = values < 0
        if leaf.null_count:  # A null has the code of the first word, which may be an unknown one.
            unknown &= leaf.is_valid().to_numpy(zero_copy_only=False)
        if unknown.any():
            position = int(np.argmax(unknown))
            raise _unknown(field, words[where[position]], position, at)
    return values


def _unknown(field: Field, word: str, position: int, at: ErrorAt) -> BadRow:
    near = nearest(word, field.vocabulary or ())
    meant = "" if near is None else f", near {near!r}"
    return at(
        position,
        word,
        f"{word!r}, which is not among the {len(field.vocabulary or ())} values of its vocabulary{meant},",
        "Map it to one of them, or train with it: add it to vocabulary={{{0!r}: [...]}}, with unknown_words='keep' for "
        "one more index that all other words have, or with hash_buckets",
    )


def _numbers(leaf: pa.Array) -> Array:
    """Return the raw values of a flat Arrow array, copied for booleans only; the value of a null is undefined."""
    kind = leaf.type
    if pa.types.is_boolean(kind):
        filled = leaf.fill_null(False) if leaf.null_count else leaf
        bits: Array = filled.to_numpy(zero_copy_only=False)
        return bits
    if pa.types.is_date32(kind):
        dtype: np.dtype[Any] = np.dtype(np.int32)
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        dtype = np.dtype(np.int64)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype = dtype_of(kind)
    else:
        raise BadData(f"a column arrived as Arrow {kind}, which is not one of the exchange's types")
    data = leaf.buffers()[1]
    if data is None:
        return np.zeros(len(leaf), dtype)
    return np.frombuffer(data, dtype, count=len(leaf), offset=leaf.offset * dtype.itemsize)


def _shaped(
    field: Field, values: Array, present: Array | None, lengths: list[Array], ids: Array
) -> tuple[Array, Array | None]:
    """Return values `[k]` as rows `[rows, *shape]`: padded, or checked to be all of one shape."""
    if not field.depth:
        return values.reshape(len(values), *field.shape) if field.shape else values, present
    if field.pad is not None:
        return _padded(field, values, present, lengths[0], ids)
    if field.shape is None and not len(lengths[0]):
        return values, present
    shape = []
    for level, counts in enumerate(lengths):
        width = int(counts[0]) if len(counts) and field.shape is None else (field.shape or (0,) * field.depth)[level]
        if len(counts) and not (counts == width).all():
            raise _ragged(field, width, counts, lengths[:level], ids)
        shape.append(width)
    rows = len(lengths[0])
    return values.reshape(rows, *shape), None if present is None else present.reshape(rows, *shape)


def _ragged(field: Field, width: int, counts: Array, above: list[Array], ids: Array) -> BadRow:
    position = int(np.argmin(counts == width))
    value = int(counts[position])
    what = f"of length {value}, where {width} was expected from the rows before it,"
    if field.depth > 1:
        advice = "Give the matrices of {0!r} one shape"
    else:
        advice = f"Give all rows one length, or train with pad={{{{{{0!r}}: {max(value, width)}}}}}"
    return bad_row(field, ids, _row_of(position, above), value, what, advice)


def _padded(
    field: Field, values: Array, present: Array | None, counts: Array, ids: Array
) -> tuple[Array, Array | None]:
    assert field.pad is not None
    length, fill = field.pad
    if len(counts) and counts.max() > length:
        row = int(np.argmax(counts))
        longest = int(counts[row])
        advice = f"Cut the array (`slice` in Spark), or train with pad={{{{{{0!r}}: {longest}}}}}"
        raise bad_row(field, ids, row, longest, f"of length {longest}, beyond its pad of {length},", advice)
    filled = np.arange(length) < np.asarray(counts)[:, None]
    rows = np.full(filled.shape, fill, values.dtype)
    rows[filled] = values
    if present is None and not field.mask:
        return rows, None
    mask = np.array(filled)
    if present is not None:
        mask[filled] = present
    return rows, mask


def _with_null_rows(
    field: Field, values: Array, present: Array | None, whole: Array, ids: Array
) -> tuple[Array, Array | None]:
    """Return the rows with the null ones put back, filled.

    whole : bool [rows]: whether a row was not null.
    """
    if field.shape is None and not whole.any():
        what = f"null in the first {len(ids)} rows, so its length isn't known; the first is"
        raise bad_row(field, ids, 0, None, what, "Fill them, or give the length: pad={{{0!r}: length}}")
    shape = values.shape[1:] if field.shape is None else field.shape
    rows = np.full((len(whole), *shape), _fill(field, field.nulls[0]), values.dtype)
    rows[whole] = values
    mask = np.zeros(rows.shape, np.bool_)
    mask[whole] = True if present is None else present
    return rows, mask


def _fits(field: Field, rows: Array) -> bool:
    """Return whether rows without a null go into a batch as they are: nothing is to be cast, padded or refused."""
    shape = field.shape if field.pad is None else (field.pad[0],)
    if field.dtype != field.travel or any(field.exact) or shape not in (None, rows.shape[1:]):
        return False
    if field.packed and rows.shape[1] != len(field.sources):  # This is a mark: see `exchange.pack`.
        return False
    return field.nan == "keep" or narrow.finite(rows)


def mark_unreadable(read: Callable[[Array], Any], valid: Array, reasons: dict[int, str] | None = None) -> None:
    """Set to False in `valid`, bool `[rows]`, the rows for which `read(rows)` raises BadRow.

    The rows are halved until each such row is known. Those that `invalid` finds, which may be many, are marked before.
    With `reasons` it gets the reason of each row that is marked, by its position.
    """

    def find(rows: Array) -> None:
        try:
            read(rows)
        except BadRow as error:
            if len(rows) == 1:
                valid[rows] = False
                if reasons is not None:
                    reasons[int(rows[0])] = error.reason or str(error)
            else:
                for half in np.array_split(rows, 2):
                    find(half)

    find(np.flatnonzero(valid))


def invalid(field: Field, column: pa.Array) -> Array:
    """Return a bool `[rows]`: True for a row with a null, a number that can't be read, an unknown word, another length.

    Rows may be refused for other reasons, too.

    column : as `codec.read` takes it.
    """
    if field.kind != "bytes" and unsafe.is_bytes(column):
        column = unsafe.lists(column, np.dtype(field.travel), field.depth)
    wrong = np.zeros(len(column), np.bool_)
    refused = np.array([fill is None for fill in field.nulls])
    rows = np.arange(len(column))
    for level in range(1 if field.kind == "bytes" else field.depth):
        if column.null_count:
            nulls: Array = column.is_null().to_numpy(zero_copy_only=False)
            if level or refused[0]:
                wrong[rows[nulls]] = True
            rows, column = rows[~nulls], column.drop_null()
        if field.kind == "bytes":
            return wrong
        counts: Array = pc.list_value_length(column).to_numpy()
        fit = _fit(field, level, counts)
        if not fit.all():  # Marks, whose values belong to no source, go here, too: see `exchange.pack`.
            wrong[rows[~fit]] = True
            rows, counts, column = rows[fit], counts[fit], column.filter(pa.array(fit))
        rows = np.repeat(rows, counts)
        column = column.flatten()
    if column.null_count:
        holes = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        wrong[rows[holes[refused[holes % len(refused)]]]] = True
    if field.nan == "error" and pa.types.is_floating(column.type):
        values: Any = column.fill_null(0).to_numpy(zero_copy_only=False)
        wrong[rows[~np.isfinite(values)]] = True
    if not field.mean and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        numbers: Any = column.fill_null(0).to_numpy(zero_copy_only=False)
        wrong[rows[narrow.beyond(numbers, np.dtype(field.dtype), field.exact)]] = True
    if field.vocabulary is not None and not field.unknown:
        encoded, known = column.dictionary_encode(), {*field.vocabulary, None}
        unknown = np.array([word not in known for word in encoded.dictionary.to_pylist()], np.bool_)
        present = encoded.is_valid().to_numpy(zero_copy_only=False)
        wrong[rows[present][unknown[encoded.indices.drop_null().to_numpy()]]] = True
    return wrong


def _fit(field: Field, level: int, counts: Array) -> Array:
    """Return a bool `[k]`: whether arrays of these lengths, at this depth of a column, have the length of its rows."""
    if field.pad is not None:
        return counts <= field.pad[0]
    length = None if field.shape is None else field.shape[level]
    return np.ones(len(counts), np.bool_) if length is None else counts == length
