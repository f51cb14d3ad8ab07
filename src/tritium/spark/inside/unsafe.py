"""Arrays as the bytes in which Spark's JVM holds them, read without a copy where all rows have one shape (any process).

An `UnsafeArrayData` is the number of its elements (int64), a bit for each element that is set where it is null (8 bytes
for every 64), and the elements side by side, padded to 8 bytes, in the machine's byte order. An element that is an
array itself stands there as its place (offset << 32 | size, in bytes from the start of the array around it), and its
own bytes follow.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.errors import BadData

Array = np.ndarray[Any, Any]
SQL_TYPES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
}
"""The types of elements, by numpy dtype, as SQL names them."""
_WORD = 8
_SIZE = 0xFFFFFFFF


def is_bytes(column: pa.Array) -> bool:
    """Return whether a column of values came as bytes."""
    return bool(pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type))


def matrix(column: pa.Array, dtype: np.dtype[Any], depth: int) -> Array | None:
    """Return the rows as a view of Arrow's buffer, `[rows, *shape]`, with a stride that skips what is no element.

    column : binary `[rows]`. dtype : of the elements. depth : how many arrays are around an element.

    None where there are no rows, a null, or rows of different shapes: `lists` reads those.
    """
    if not len(column) or column.null_count:
        return None
    offsets = _offsets(column)
    size = int(offsets[1] - offsets[0])
    if size < _WORD or size % _WORD or (np.diff(offsets) != size).any():
        return None
    words = _words(column, offsets).reshape(len(column), size // _WORD)
    return _view(words, dtype, depth)


def lists(column: pa.Array, dtype: np.dtype[Any], depth: int) -> pa.Array:
    """Return the same rows as an Arrow list array, nested `depth` times, as Spark would send it.

    Raises BadData where the bytes are no such arrays.
    """
    absent = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    rows = column.drop_null() if column.null_count else column
    if not len(rows):
        starts = sizes = words = np.zeros(0, np.int64)
    else:
        offsets = _offsets(rows)
        if ((offsets - offsets[0]) % _WORD).any() or (np.diff(offsets) < _WORD).any():
            raise BadData(_NOT_ARRAYS)
        words = _words(rows, offsets)
        starts, sizes = (offsets[:-1] - offsets[0]) // _WORD, np.diff(offsets) // _WORD
    return _lists(words, starts, sizes, absent, dtype, depth)


def flat(rows: Array) -> tuple[pa.Array, list[Array]]:
    """Return the values of rows `[rows, *shape]`, and the lengths of the arrays around them, outermost first."""
    counts = [np.full(math.prod(rows.shape[:n]), rows.shape[n], np.int64) for n in range(1, rows.ndim)]
    return pa.array(np.ascontiguousarray(rows).reshape(-1)), counts


def merged(given: pa.Array, arrays: pa.Array, dtype: np.dtype[Any], depth: int) -> pa.Array:
    """Return `given`, the bytes of rows, where all rows came as bytes, else an Arrow list array of all rows.

    given  : without bytes for the rows that did not come as bytes; null for those that are null.
    arrays : these rows, with anything in the others' places.
    """
    without = pc.equal(pc.binary_length(given), 0)
    if not pc.any(without).as_py():
        return given
    if pc.all(without).as_py():
        return arrays
    return pc.coalesce(lists(pc.if_else(without, None, given), dtype, depth).cast(arrays.type), arrays)


_NOT_ARRAYS = (
    "an array left the JVM in bytes that are not laid out as Spark's arrays are. Please report it with the version of "
    "Spark and its plugins; spark.conf.set('spark.tritium.inside', '-jvm_bytes') sends arrays number by number"
)


def _offsets(column: pa.Array) -> Array:
    """Return where the bytes of each row begin, and where those of the last one end."""
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column) + 1]


def _words(column: pa.Array, offsets: Array) -> Array:
    count = int(offsets[-1] - offsets[0]) // _WORD
    return np.frombuffer(column.buffers()[2], np.int64, count, int(offsets[0]))


def _view(words: Array, dtype: np.dtype[Any], depth: int) -> Array | None:
    """Return the elements of the arrays `words[..., :]` as `[..., *shape]`; None where they are not all alike."""
    width = words.shape[-1]
    count = int(words.flat[0])
    first = 1 + -(-count // 64)
    if count < 0 or first > width or (words[..., 0] != count).any() or words[..., 1:first].any():
        return None
    if depth == 1:
        if first + -(-count * dtype.itemsize // _WORD) != width:
            return None
        elements: Array = words[..., first:].view(dtype)[..., :count]
        return elements
    places = words[..., first : first + count]
    if not count or first + count > width or (places != places.reshape(-1, count)[0]).any():
        return None
    inner, rest = divmod(width - first - count, count)
    expected = ((first + count + np.arange(count) * inner) << 32 | inner) * np.int64(_WORD)
    if rest or not inner or (places.reshape(-1, count)[0] != expected).any():
        return None
    return _view(words[..., first + count :].reshape(*words.shape[:-1], count, inner), dtype, depth - 1)


def _lists(
    words: Array, starts: Array, sizes: Array, absent: Array | None, dtype: np.dtype[Any], depth: int
) -> pa.Array:
    """Return the arrays of `sizes` at `starts` of `words`, with nulls between them at `absent` of all positions."""
    counts = words[starts]
    heads = 1 + -(-counts // 64)
    room = counts if depth > 1 else -(-counts * dtype.itemsize // _WORD)
    if (counts < 0).any() or (room > sizes - heads if depth > 1 else room != sizes - heads).any():
        raise BadData(_NOT_ARRAYS)
    holes = _nulls(words[_spans(starts + 1, heads - 1)], heads - 1, counts)
    if depth > 1:
        places = words[_spans(starts + heads, counts)]
        around, ends = np.repeat(starts, counts), np.repeat(starts + sizes, counts)
        if holes is not None:
            places, around, ends = places[~holes], around[~holes], ends[~holes]
        inner, inner_sizes = around + (places >> 32) // _WORD, (places & _SIZE) // _WORD
        if (places % _WORD).any() or (inner_sizes < 1).any() or (inner + inner_sizes > ends).any():
            raise BadData(_NOT_ARRAYS)
        values = _lists(words, inner, inner_sizes, holes, dtype, depth - 1)
    else:
        numbers = words.view(dtype)[_spans((starts + heads) * (_WORD // dtype.itemsize), counts)]
        values = pa.array(numbers, mask=holes)
    lengths = counts
    if absent is not None:
        lengths = np.zeros(len(absent), np.int64)
        lengths[~absent] = counts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    mask = None if absent is None else pa.array(absent)
    if ends[-1] < 2**31:
        return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values, mask=mask)
    return pa.LargeListArray.from_arrays(pa.array(ends), values, mask=mask)


def _nulls(bits: Array, words: Array, counts: Array) -> Array | None:
    """Return which elements are null, from the words of their bits, `words` of them for each array; None: none is."""
    if not bits.any():
        return None
    set_bits = np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_)
    is_null: Array = set_bits[_spans((np.cumsum(words) - words) * 64, counts)]
    return is_null


def _spans(begins: Array, counts: Array) -> Array:
    """Return the positions from each of `begins` on, as many as `counts` says, one span after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(begins - before, counts) + np.arange(int(counts.sum()))
