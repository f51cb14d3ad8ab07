"""The fingerprint: the same for any order and any cutting, different for any change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.data.fingerprint import Fingerprint
from tritium.data.spool import Ragged


def of(ids: np.ndarray, columns: dict[str, object], cuts: list[int] | None = None) -> dict[int, tuple[int, int, int]]:
    found = Fingerprint()
    edges = [0, *sorted(cuts or []), len(ids)]
    for start, stop in itertools.pairwise(edges):
        found.add(ids[start:stop], {name: _cut(column, start, stop) for name, column in columns.items()})
    return found.parts


def _cut(column: object, start: int, stop: int) -> object:
    if not isinstance(column, Ragged):
        return column[start:stop]  # type: ignore[index]
    ends = np.concatenate([[0], np.cumsum(column.lengths)])
    return Ragged(column.values[ends[start] : ends[stop]], column.lengths[start:stop])


@given(st.integers(0, 2**32), st.lists(st.integers(0, 60), max_size=4))
def test_order_of_delivery_and_segments_do_not_matter(seed: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.arange(30), (3 << 33) + np.arange(30)])
    columns = {
        "x": rng.normal(size=(60, 5)).astype("float32"),
        "y": rng.integers(0, 9, 60),
        "b": rng.random((60, 3)) < 0.5,
    }
    shuffled = rng.permutation(60)
    whole = of(ids, columns)
    assert {part: rows for part, (rows, _, _) in whole.items()} == {0: 30, 3: 30}
    assert of(ids[shuffled], {name: column[shuffled] for name, column in columns.items()}, cuts) == whole


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "int8", "bool"])
@pytest.mark.parametrize("width", [(), (1,), (2,), (3,), (2, 4), (64,)])
def test_any_changed_value_shows(dtype: str, width: tuple[int, ...]) -> None:
    ids = np.arange(50)
    column = np.random.default_rng(0).integers(0, 2, (50, *width)).astype(dtype)
    before = of(ids, {"x": column})
    for place in range(0, column.size, 7):
        changed = column.copy()
        changed.reshape(-1)[place] = not changed.reshape(-1)[place]
        assert of(ids, {"x": changed}) != before


def test_flipped_signs_and_swapped_values_and_rows_show() -> None:
    ids = np.arange(2)
    column = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    before = of(ids, {"x": column})
    for dtype in ("float64", "float32"):
        start = of(ids, {"x": column.astype(dtype)})
        for signs in ([-1, -1, 1, 1], [-1, 1, -1, 1], [1, -1, 1, -1], [-1, -1, -1, -1]):
            assert of(ids, {"x": (column * signs).astype(dtype)}) != start
    assert of(ids, {"x": column[:, [1, 0, 2, 3]]}) != before
    assert of(ids, {"x": column[::-1]}) != before  # the same rows under other ids
    assert of(ids, {"z": column}) != before
    assert of(ids, {"x": column, "y": column}) != of(ids, {"x": column, "z": column})
    assert of(ids, {"y": column[:, 0], "x": column}) == of(ids, {"x": column, "y": column[:, 0]})


def test_bytes_count_with_their_boundaries() -> None:
    ids = np.arange(3)
    values = np.frombuffer(b"abcdef", np.uint8)
    before = of(ids, {"x": Ragged(values, np.array([1, 2, 3]))})
    assert of(ids, {"x": Ragged(values, np.array([1, 2, 3]))}, [1, 2]) == before
    assert of(ids, {"x": Ragged(values, np.array([2, 1, 3]))}) != before
    assert of(ids, {"x": Ragged(np.frombuffer(b"abcdeF", np.uint8), np.array([1, 2, 3]))}) != before
    assert of(ids[:0], {"x": Ragged(values[:0], np.array([], np.int64))}) == {}


def test_a_view_with_strides_counts_like_its_copy() -> None:
    column = np.arange(24, dtype=np.float32).reshape(6, 4)[:, ::2]
    assert of(np.arange(6), {"x": column}) == of(np.arange(6), {"x": column.copy()})
