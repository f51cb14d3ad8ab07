"""Arrays in the bytes of Spark's JVM: read like Arrow's lists, whatever their lengths and nulls."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.data.codec import read
from tritium.data.schema import Field
from tritium.errors import BadData, BadRow
from tritium.spark.inside import unsafe

FORMATS = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float32": "f", "float64": "d"}


def packed(value: Any, dtype: str, depth: int) -> bytes:
    """Return one array as `UnsafeArrayData` lays it out."""
    bits = bytearray(-(-len(value) // 64) * 8)
    for position, one in enumerate(value):
        if one is None:
            bits[position // 8] |= 1 << position % 8
    head = struct.pack("<q", len(value)) + bytes(bits)
    if depth == 1:
        body = b"".join(struct.pack(f"<{FORMATS[dtype]}", 0 if one is None else one) for one in value)
        return head + body + bytes(-len(body) % 8)
    at, places, tail = len(head) + 8 * len(value), b"", b""
    for one in value:
        inner = b"" if one is None else packed(one, dtype, depth - 1)
        places += struct.pack("<q", 0 if one is None else (at + len(tail)) << 32 | len(inner))
        tail += inner
    return head + places + tail


def as_bytes(rows: list[Any], dtype: str, depth: int = 1, kind: pa.DataType | None = None) -> pa.Array:
    column = [None if row is None else packed(row, dtype, depth) for row in rows]
    return pa.array([b"before", *column, b"after"], kind or pa.binary()).slice(1, len(rows))


def values(dtype: str) -> st.SearchStrategy[Any]:
    if dtype == "bool":
        return st.booleans()
    if dtype.startswith("float"):
        return st.floats(width=32)
    bits = int(dtype[3:])
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@st.composite
def columns(draw: Any) -> tuple[list[Any], str, int]:
    dtype, depth = draw(st.sampled_from(list(FORMATS))), draw(st.integers(1, 3))
    each = values(dtype)
    if draw(st.booleans()):
        each = each | st.none()
    fixed = draw(st.booleans())
    for _ in range(depth):
        width = draw(st.sampled_from([0, 1, 3, 8, 64, 65])) if fixed and depth == 1 else draw(st.integers(0, 3))
        each = st.lists(each, min_size=width if fixed else 0, max_size=width if fixed else 4)
        if not fixed:
            each |= st.none()
    return draw(st.lists(each, max_size=5)), dtype, depth


@given(columns(), st.booleans())
def test_the_values_are_those_of_arrows_lists(column: tuple[list[Any], str, int], large: bool) -> None:
    rows, dtype, depth = column
    given = as_bytes(rows, dtype, depth, pa.large_binary() if large else None)
    found = unsafe.lists(given, np.dtype(dtype), depth)
    np.testing.assert_equal(found.to_pylist(), rows)  # NaN included
    view = unsafe.matrix(given, np.dtype(dtype), depth)
    if view is not None:
        np.testing.assert_equal(view.tolist(), rows)


@given(columns())
def test_a_field_is_read_the_same_both_ways(column: tuple[list[Any], str, int]) -> None:
    rows, dtype, depth = column
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in range(depth):
        kind = pa.list_(kind)
    ids = np.arange(len(rows)) + (7 << 33)
    for settings in ({}, {"nan": "keep"}, {"nulls": ("mask",)}, {"dtype": "float16"}, {"pad": (3, 9), "shape": (3,)}):
        if "pad" in settings and depth > 1:
            continue
        plain = {"name": "x", "sources": ("x",), "kind": "fixed", "dtype": dtype, "shape": None, "travel": dtype}
        field = Field(**{**plain, "depth": depth, **settings})
        found = [outcome(field, each, ids) for each in (as_bytes(rows, dtype, depth), pa.array(rows, kind))]
        np.testing.assert_equal(*found)


def outcome(field: Field, column: pa.Array, ids: Any) -> Any:
    try:
        values, mask = read(field, column, ids)
    except BadRow as error:
        return str(error), error.row_id
    assert isinstance(values, np.ndarray)
    return values.dtype.name, values.shape, values.tolist(), None if mask is None else mask.tolist()


def test_rows_of_one_shape_are_a_view_of_arrows_buffer() -> None:
    rows = np.arange(130 * 5, dtype=np.float32).reshape(5, 130)
    column = as_bytes(rows.tolist(), "float32")
    view = unsafe.matrix(column, np.dtype(np.float32), 1)
    assert view is not None
    assert (view == rows).all()
    assert np.shares_memory(view, np.frombuffer(column.buffers()[2], np.uint8))
    cube = np.arange(24).reshape(2, 3, 4)
    inner = unsafe.matrix(as_bytes(cube.tolist(), "int64", 2), np.dtype(np.int64), 2)
    assert inner is not None
    assert (inner == cube).all()


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[1, None]], [[1], None], [], [[[1], [2, 3]], [[1, 2], [3]]], [[]]])
def test_other_rows_are_no_matrix(rows: list[Any]) -> None:
    depth = 2 if rows and rows[0] and isinstance(rows[0][0], list) else 1
    view = unsafe.matrix(as_bytes(rows, "int32", depth), np.dtype(np.int32), depth)
    assert view is None if rows != [[]] else view is not None and view.shape == (1, 0)


@pytest.mark.parametrize(
    "raw", [b"", b"1234567", b"\xff" * 16, struct.pack("<qqq", 1 << 40, 0, 0), struct.pack("<qqq", 3, 0, 0), bytes(9)]
)
def test_what_is_no_array_is_refused(raw: bytes) -> None:
    with pytest.raises(BadData, match="not laid out as Spark's arrays are"):
        unsafe.lists(pa.array([raw, raw + bytes(8)], pa.binary()), np.dtype(np.float32), 1)


@pytest.mark.parametrize("came_as_bytes", ["all", "none", "some"])
def test_rows_of_which_some_came_as_bytes(came_as_bytes: str) -> None:
    rows = [[1.0, 2.0], None, [], [3.0, None], [4.0]]
    some = {"all": [True] * 5, "none": [False] * 5, "some": [True, False, False, True, False]}[came_as_bytes]
    both = list(zip(rows, some, strict=True))
    given = [None if row is None else packed(row, "float32", 1) if there else b"" for row, there in both]
    arrays = [None if row is None else [] if there else row for row, there in both]
    found = unsafe.merged(
        pa.array(given, pa.binary()), pa.array(arrays, pa.list_(pa.float32())), np.dtype("float32"), 1
    )
    assert unsafe.is_bytes(found) == (came_as_bytes == "all")
    if unsafe.is_bytes(found):
        found = unsafe.lists(found, np.dtype("float32"), 1)
    assert found.to_pylist() == rows
