"""Rows that can't be read are left out where `on_error="skip"` says so, and counted."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tritium as tr
from tritium.data.codec import invalid, read
from tritium.data.plan import plan
from tritium.data.receiver import Receiver
from tritium.data.schema import Data, Field
from tritium.data.spool import Spool, SpoolReader
from tritium.data.tables import Tables
from tritium.errors import BadData, BadRow


def received(data: Data) -> tuple[dict[str, Any], int, str]:
    """Return the columns of "t", how many rows were left out, and what was wrong with the first of them."""
    tables = Tables({"t": data}, 1)
    with ExitStack() as opened:
        spools = {"t": opened.enter_context(closing(Spool(tables.plan["t"])))}
        receiver = Receiver(tables.plan, spools, sorted=True)
        for batch in tables.batches(0):
            receiver.take(batch)
        receipt = receiver.finish(confirmed=False)
        reader = SpoolReader(receipt.columns["t"], receipt.rows["t"])
        columns = {name: np.array(reader.column(name)).tolist() for name in reader.names if receipt.rows["t"]}
        return columns, receipt.skipped.get("t", 0), receipt.first.get("t", "")


CASES: dict[str, tuple[Any, dict[str, Any], list[int]]] = {
    "null": (pa.array([1.0, None, 3.0]), {}, [1]),
    "NaN and infinity": (pa.array([float("nan"), 2.0, float("inf")]), {}, [0, 2]),
    "NaN that is kept": (pa.array([float("nan"), None, 3.0]), {"nan": "keep"}, [1]),
    "a null that is filled, beside NaN": (pa.array([None, float("nan"), 3.0]), {"nulls": {"x": 7}}, [1]),
    "beyond float32": (pa.array([1e300, 2.0, 3.0]), {"dtype": "float32"}, [0]),
    "beyond an integer": (pa.array([1.0, 300.0, float("nan")]), {"dtype": {"x": "int8"}}, [1, 2]),
    "an unknown word": (pa.array(["a", "b", "c"]), {"vocabulary": {"x": ["a", "c"]}}, [1]),
    "a null word": (pa.array(["a", None, "c"]), {"vocabulary": {"x": ["a", "c"]}}, [1]),
    "another length": (pa.array([[1.0], [2.0, 3.0], [4.0]]), {}, [1]),
    "no length at first": (pa.array([None, [2.0], [4.0, 5.0]]), {}, [0, 2]),
    "a null in an array": (pa.array([[1.0], [None], [4.0]]), {}, [1]),
    "longer than its pad": (pa.array([[1.0], [2.0, 3.0], []]), {"pad": {"x": 1}}, [1]),
    "every row": (pa.array([None, None, None], pa.float64()), {}, [0, 1, 2]),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_row_that_is_refused_is_left_out(name: str, packed: bool) -> None:
    column, settings, bad = CASES[name]
    if packed and not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        packed = False  # the other kinds are no scalars
    table = pa.table({"k": [0, 1, 2], "x": column})
    read: Any = {"k": "k", "x": ["x"] if packed else "x"}
    with pytest.raises(BadRow):
        received(Data(table, read, **settings))
    columns, skipped, first = received(Data(table, read, **settings, on_error="skip"))
    left = [row for row in range(3) if row not in bad]
    assert columns.get("k", []) == left
    assert skipped == len(bad)
    assert "column 'x' is " in first
    if left:
        assert repr(columns) == repr(received(Data(table.take(left), read, **settings))[0])  # NaN is equal to none


def test_numbers_that_an_integer_cant_hold_are_left_out_with_the_column_that_has_them() -> None:
    table = pa.table({"a": [1, 2, 3, 4], "b": [1.0, float("nan"), 1e300, 4.0]})
    columns, skipped, first = received(Data(table, {"x": ["a", "b"]}, dtype="int64", on_error="skip"))
    assert columns == {"x": [[1, 1], [4, 4]]}
    assert skipped == 2
    assert first.startswith("column 'b'")


def test_a_null_that_is_filled_stays_beside_a_number_that_an_integer_cant_hold() -> None:
    table = pa.table({"a": pa.array([1, None, 3]), "b": [float("nan"), 2.0, 3.0]})
    columns, skipped, _ = received(Data(table, {"x": ["a", "b"]}, dtype="int64", nulls={"a": 7}, on_error="skip"))
    assert columns == {"x": [[7, 2], [3, 3]]}
    assert skipped == 1


MANY = (
    "an unknown word",
    "a null word",
    "longer than its pad",
    "a null in an array",
    "beyond float32",
    "beyond an integer",
)


@pytest.mark.parametrize("name", MANY)
def test_rows_of_which_there_may_be_many_are_found_at_once(name: str) -> None:
    """Not by reading them one by one."""
    column, settings, bad = CASES[name]
    (field,) = plan(pa.schema([("x", column.type)]), Data(pa.table({"x": column}), **settings), "t")
    assert np.flatnonzero(invalid(field, column)).tolist() == bad


@given(
    st.lists(
        st.sampled_from([0.0, -1.5, 300.0, -129.0, 70_000.0, 2.0**24, 2.0**31, 1e300, float("inf"), float("nan")])
    ),
    st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "uint64"]),
    st.sampled_from(["float64", "int64", "int32"]),
    st.sampled_from(["error", "keep"]),
    st.booleans(),
)
def test_of_numbers_exactly_those_that_are_refused_are_found(
    values: list[float], dtype: str, travel: str, nan: Any, exact: bool
) -> None:
    if travel != "float64":
        values = [value for value in values if abs(value) < 2**31]
    column = pa.array(np.array(values, travel))
    only = (True,) if exact and travel != "float64" and dtype.startswith("float") else ()
    settings: dict[str, Any] = {"sources": ("x",), "kind": "fixed", "shape": (), "travel": travel, "exact": only}
    field = Field(name="x", dtype=dtype, nan=nan, **settings)
    refused = []
    for row in range(len(values)):
        try:
            read(field, column.slice(row, 1), np.array([row]))
        except BadRow:
            refused.append(row)
    assert np.flatnonzero(invalid(field, column)).tolist() == refused


def test_arrays_of_another_length_are_found_at_once() -> None:
    column = pa.array([[[1.0, 2.0]], [[1.0]], [], [[3.0, 4.0], [5.0, 6.0]], [[7.0, 8.0]]])
    field = Field(name="x", sources=("x",), kind="fixed", dtype="float64", depth=2, travel="float64", shape=(1, 2))
    assert np.flatnonzero(invalid(field, column)).tolist() == [1, 2, 3]


@given(st.lists(st.sampled_from([0.0, 1.0, None, float("nan")]), min_size=1, max_size=30), st.integers(0, 3))
def test_random_rows(values: list[float | None], every: int) -> None:
    table = pa.table(
        {
            "k": range(len(values)),
            "x": pa.array(values, pa.float64()),
            "w": ["u" if i % 4 == every else "v" for i in range(len(values))],
        }
    )
    data = Data(table, {"k": "k", "x": ["x"], "w": "w"}, vocabulary={"w": ["v"]}, on_error="skip")
    columns, skipped, _ = received(data)
    good = [i for i, value in enumerate(values) if value in (0.0, 1.0) and i % 4 != every]
    assert columns.get("k", []) == good
    assert skipped == len(values) - len(good)


def test_another_value_is_refused() -> None:
    with pytest.raises(BadData, match=r"on_error='null' is unknown\. Use 'fail' or 'skip'"):
        Tables({"t": Data(pa.table({"x": [1.0]}), on_error="null")}, 1)


@pytest.mark.processes
def test_a_launch_says_how_many_rows_were_left_out(tmp_path: Any) -> None:
    frame = pa.table({"x": pa.array([None if i % 5 == 0 else float(i) for i in range(40)])})

    def rows() -> int:
        return int(tr.world().shard("train").rows)

    data = {"train": tr.Data(frame, on_error="skip")}
    assert sum(tr.launch(rows, ranks=2, on="driver", data=data, run_dir=str(tmp_path), progress=False)) == 32
    text = next(tmp_path.rglob("report.json")).read_text()
    assert "data 'train': 8 of 40 rows are left out, as on_error='skip' says. The first: column 'x' is null" in text
