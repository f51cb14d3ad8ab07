"""Arrow columns to numpy rows: values, fills and masks, and every row that is refused."""

from __future__ import annotations

import datetime
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.data.codec import read
from tritium.data.plan import plan
from tritium.data.schema import Data, Field
from tritium.errors import BadRow

IDS = np.array([5, 6, 7, (2 << 33) + 1], np.int64)


def field_of(column: pa.Array, **settings: Any) -> Field:
    (field,) = plan(pa.schema([("x", column.type)]), Data(None, **settings), "t")
    return field


def decoded(column: pa.Array, **settings: Any) -> Any:
    values, mask = read(field_of(column, **settings), column, np.arange(len(column)))
    assert mask is None
    return values


def refused(column: pa.Array, **settings: Any) -> BadRow:
    with pytest.raises(BadRow) as caught:
        read(field_of(column, **settings), column, IDS[: len(column)])
    assert "column 'x' is" in str(caught.value)
    return caught.value


def test_a_packed_column_is_a_view_of_the_arrow_buffer() -> None:
    values = np.arange(12, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), 3).cast(pa.list_(pa.float32()))
    found = decoded(column)
    assert found.shape == (4, 3)
    assert found.ctypes.data == column.values.buffers()[1].address
    part = column.slice(1, 2)
    assert np.array_equal(decoded(part), values.reshape(4, 3)[1:3])
    assert decoded(part).ctypes.data == column.values.buffers()[1].address + 12


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16", "float16", "float32", "float64", "bool"])
def test_numbers_and_slices_of_them(dtype: str) -> None:
    expected = np.array([0, 1, 1, 0, 1], dtype)
    column = pa.array(expected)
    assert decoded(column).dtype == dtype
    np.testing.assert_array_equal(decoded(column.slice(2)), expected[2:])


def test_dates_timestamps_and_matrices() -> None:
    days = pa.array([datetime.date(1970, 1, 1), datetime.date(1969, 12, 31)])
    assert decoded(days).tolist() == [0, -1]
    moments = pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("us"))
    assert decoded(moments).tolist() == [1_000_000]
    matrix = pa.array([[[1, 2], [3, 4], [5, 6]]] * 2, pa.list_(pa.list_(pa.int16())))
    assert decoded(matrix).shape == (2, 3, 2)
    assert decoded(pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2))).tolist() == [[1.0, 2.0]]


def test_strings_by_vocabulary_and_by_hash() -> None:
    column = pa.array(["b", "a", "b"])
    assert decoded(column, vocabulary={"x": ["a", "b"]}).tolist() == [0 + 1, 0, 1]
    assert decoded(column, hash_buckets={"x": 97}).tolist() == [zlib.crc32(w) % 97 for w in (b"b", b"a", b"b")]
    assert decoded(pa.array(["ü"]), hash_buckets={"x": 97}).tolist() == [zlib.crc32("ü".encode()) % 97]
    tokens = pa.array([["a"], ["b", "b"]])
    assert decoded(tokens, vocabulary={"x": ["a", "b"]}, pad={"x": (3, -1)}).tolist() == [[0, -1, -1], [1, 1, -1]]
    assert decoded(column, vocabulary={"x": ["a", "b"]}, dtype={"x": "int8"}).dtype == "int8"


def test_bytes_are_ragged() -> None:
    column = pa.array([b"ab", b"", b"c", b"defg"]).slice(1)
    found = decoded(column)
    assert [bytes(row) for row in found.rows()] == [b"", b"c", b"defg"]
    assert decoded(pa.array([b"xy"], pa.large_binary())).lengths.tolist() == [2]


@pytest.mark.parametrize(
    ("kind", "settings", "shape"),
    [
        (pa.float32(), {}, (0,)),
        (pa.bool_(), {}, (0,)),
        (pa.list_(pa.float32(), 3), {}, (0, 3)),
        (pa.list_(pa.float32()), {"pad": {"x": 4}}, (0, 4)),
        (pa.string(), {"vocabulary": {"x": ["a"]}}, (0,)),
    ],
)
def test_no_rows(kind: pa.DataType, settings: Any, shape: tuple[int, ...]) -> None:
    assert decoded(pa.array([], kind), **settings).shape == shape
    assert len(decoded(pa.array([], pa.binary()))) == 0


def test_nulls_are_filled_or_marked() -> None:
    column = pa.array([1.0, None, 3.0])
    assert decoded(column, nulls={"x": -1}).tolist() == [1, -1, 3]
    values, mask = read(field_of(column, nulls={"x": "mask"}), column, np.arange(3))
    assert isinstance(values, np.ndarray)
    assert (values.tolist(), mask.tolist() if mask is not None else None) == ([1, 0, 3], [True, False, True])
    full = pa.array([1.0, 2.0])
    _, mask = read(field_of(full, nulls={"x": "mask"}), full, np.arange(2))
    assert mask is not None
    assert mask.tolist() == [True, True]
    words = pa.array(["a", None, "b"])
    assert decoded(words, vocabulary={"x": ["a", "b"]}, nulls={"x": "b"}).tolist() == [0, 1, 1]
    assert decoded(pa.array([True, None]), nulls={"x": 1}).tolist() == [True, True]
    assert decoded(pa.array([None, None], pa.string()), vocabulary={"x": ["a"]}, nulls={"x": 0}).tolist() == [0, 0]


@pytest.mark.parametrize("first", [[None], [None, "a"], ["a", None], [None, None]])
def test_an_unknown_word_after_a_null_is_refused(first: list[str | None]) -> None:
    caught = refused(pa.array([*first, "z"]), vocabulary={"x": ["a"]}, nulls={"x": "a"})
    assert (caught.value, caught.row_id) == ("z", int(IDS[len(first)]))
    inside = refused(pa.array([[None, "z"]]), vocabulary={"x": ["a"]}, nulls={"x": "a"})
    assert (inside.value, inside.row_id) == ("z", int(IDS[0]))


def test_null_rows_and_values_of_arrays() -> None:
    column = pa.array([None, [1, 2], [3, None]], pa.list_(pa.int64()))
    values, mask = read(field_of(column, nulls={"x": "mask"}), column, np.arange(3))
    assert isinstance(values, np.ndarray)
    assert mask is not None
    assert values.tolist() == [[0, 0], [1, 2], [3, 0]]
    assert mask.tolist() == [[False, False], [True, True], [True, False]]
    values, mask = read(field_of(column, nulls={"x": "mask"}, pad={"x": (3, -9)}), column, np.arange(3))
    assert isinstance(values, np.ndarray)
    assert mask is not None
    assert values[1:].tolist() == [[1, 2, -9], [3, 0, -9]]
    assert mask.tolist() == [[False] * 3, [True, True, False], [True, False, False]]
    assert "its length isn't known" in str(refused(pa.array([None], pa.list_(pa.int8())), nulls={"x": 0}))


def test_packed_scalars_name_the_source_of_a_null() -> None:
    schema = pa.schema([("a", pa.float32()), ("b", pa.float32())])
    column = pa.array([[1, 2], [3, None]], pa.list_(pa.float32()))
    (field,) = plan(schema, Data(None, {"x": ["a", "b"]}), "t")
    with pytest.raises(BadRow, match=r"column 'b' \(in batch column 'x'\) is null in row 6") as caught:
        read(field, column, IDS)
    assert (caught.value.column, caught.value.row_id, caught.value.value) == ("b", 6, None)
    (field,) = plan(schema, Data(None, {"x": ["a", "b"]}, nulls={"b": 7}), "t")
    assert np.array_equal(read(field, column, IDS)[0], [[1, 2], [3, 7]])
    with pytest.raises(BadRow, match="column 'a'"):
        read(field, pa.array([[None, None]], pa.list_(pa.float32())), IDS)


@pytest.mark.parametrize(
    ("column", "settings", "row", "value", "text"),
    [
        (pa.array([1, None]), {}, 6, None, "nulls={'x': 'mask'}"),
        (pa.array([1.0, float("nan")]), {}, 6, "nan", "nan='keep'"),
        (pa.array([[1.0], [float("nan")]]), {}, 6, "nan", "NaN"),
        (pa.array([[1], [2], [3, 4]]), {}, 7, 2, "pad={'x': 2}"),
        (pa.array([[1], [2], []], pa.list_(pa.int8())), {}, 7, 0, "of length 0, where 1 was expected"),
        (pa.array([[1], [2, 3, 4]]), {"pad": {"x": 2}}, 6, 3, "train with pad={'x': 3}"),
        (pa.array([[[1], [2]], [[3]]]), {}, 6, 1, "one shape"),
        (pa.array([[[1], [2]], [[3], [4, 5]]]), {}, 6, 2, "one shape"),
        (pa.array([[[1]], [None]], pa.list_(pa.list_(pa.int8()))), {}, 6, None, "a null array in it"),
        (pa.array([[1], [None]], pa.list_(pa.int8())), {}, 6, None, "an array with a null in it"),
        (pa.array([[1], None], pa.list_(pa.int8())), {}, 6, None, "null"),
        (pa.array([b"a", None]), {}, 6, None, "null"),
        (pa.array(["red", "blu"]), {"vocabulary": {"x": ["red", "blue"]}}, 6, "blu", "near 'blue'"),
        (pa.array(["red", None]), {"vocabulary": {"x": ["red"]}}, 6, None, "null"),
        (pa.array([1, 300]), {"dtype": {"x": "int8"}}, 6, 300, "beyond the int8"),
        (pa.array([1.0, 1e30]), {"dtype": {"x": "int64"}}, 6, 1e30, "beyond the int64"),
    ],
)
def test_a_refused_row_says_where_it_is_and_how_to_go_on(
    column: pa.Array, settings: Any, row: int, value: Any, text: str
) -> None:
    error = refused(column, **settings)
    assert text in str(error)
    assert (error.column, error.row_id) == ("x", row)
    assert str(error.value) == value if value == "nan" else error.value == value


def test_the_row_of_a_late_partition() -> None:
    error = refused(pa.array([1, 2, 3, None]))
    assert "row 1 of source partition 2" in str(error)


def test_casts_that_were_asked_for() -> None:
    assert decoded(pa.array([1.7, -1.7]), dtype={"x": "int32"}).tolist() == [1, -1]
    assert decoded(pa.array([1e30, 0.1]), dtype={"x": "float32"}).tolist() == [np.float32(1e30), np.float32(0.1)]
    assert decoded(pa.array([1, 0], pa.int8()), dtype={"x": "float64"}).dtype == "float64"
    assert np.isnan(decoded(pa.array([float("nan")]), nan="keep")[0])
    assert np.isinf(decoded(pa.array([float("inf"), -float("inf")]), nan="keep")).all()


@given(st.lists(st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=4), max_size=8), st.integers(0, 3))
def test_padded_rows_are_what_python_would_make_of_them(rows: list[list[int | None]], offset: int) -> None:
    column = pa.array(rows, pa.list_(pa.int32())).slice(offset)
    field = field_of(column, pad={"x": (4, 77)}, nulls={"x": "mask"})
    values, mask = read(field, column, np.arange(len(column)))
    assert isinstance(values, np.ndarray)
    assert mask is not None
    kept = rows[offset:]
    assert values.tolist() == [[v or 0 for v in row] + [77] * (4 - len(row)) for row in kept]
    assert mask.tolist() == [[v is not None for v in row] + [False] * (4 - len(row)) for row in kept]
