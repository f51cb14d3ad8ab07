"""The exchange without a JVM: the same rows, ids and ranks, from pandas and Arrow."""

from __future__ import annotations

import datetime
import decimal
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.data.receiver import Receiver
from tritium.data.schema import Data
from tritium.data.spool import Spool, SpoolReader
from tritium.data.tables import BATCH_ROWS, Tables, table_of
from tritium.errors import BadData, BadRow, BadSetting


def received(data: Any, ranks: int = 1) -> list[dict[str, dict[str, np.ndarray]]]:
    """Return per rank and name the columns, read back from real spools."""
    tables, found = Tables(data, ranks), []
    for rank in range(ranks):
        with ExitStack() as opened:
            spools = {name: opened.enter_context(closing(Spool(fields))) for name, fields in tables.plan.items()}
            receiver = Receiver(tables.plan, spools, sorted=True)
            for batch in tables.batches(rank):
                receiver.take(batch)
            receipt = receiver.finish(confirmed=False)
            columns = {}
            for name, fields in tables.plan.items():
                reader = SpoolReader(receipt.columns[name], receipt.rows[name])
                columns[name] = {"_id": np.array(reader.ids)}
                if receipt.rows[name]:
                    columns[name] |= {f.name: np.array(reader.column(f.name)) for f in fields}
            found.append(columns)
    return found


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 5))
def test_every_row_once_balanced_and_by_the_rule_of_the_jvm(counts: list[int], ranks: int) -> None:
    data = {f"n{i}": pa.table({"k": pa.array(range(count), pa.int64())}) for i, count in enumerate(counts)}
    found = received(data, ranks)
    for partition, (name, count) in enumerate(zip(data, counts, strict=True)):
        ids = [columns[name]["_id"] for columns in found]
        assert sorted(np.concatenate(ids).tolist()) == [(partition << 33) + i for i in range(count)]
        assert max(map(len, ids)) - min(map(len, ids)) <= 1
        for rank, own in enumerate(ids):
            assert (((own >> 33) + (own & ((1 << 33) - 1))) % ranks == rank).all()
            assert found[rank][name].get("k", np.zeros(0)).tolist() == (own - (partition << 33)).tolist()


def test_tables_longer_than_a_batch() -> None:
    count = 2 * BATCH_ROWS + 17
    (columns,) = received({"t": pa.table({"k": np.arange(count), "x": np.arange(count) / 2})})
    assert columns["t"]["k"].tolist() == list(range(count))
    tables = Tables({"t": pa.table({"k": np.arange(count)})}, 2)
    batches = [tables.batches(rank) for rank in range(2)]
    assert [sum(batch.num_rows for batch in rank) for rank in batches] == [BATCH_ROWS + 9 + 1, BATCH_ROWS + 8 + 1]


def test_pandas_columns() -> None:
    frame = pd.DataFrame(
        {
            "f": np.array([0.5, 1.5], "float32"),
            "i": [1, 2],
            "flag": [True, False],
            "when": pd.to_datetime(["1970-01-01 00:00:01", "1970-01-02 00:00:00"]),
            "word": pd.Categorical(["b", "a"]),
            "list": [[1.0, 2.0], np.array([3.0, 4.0])],
            "text": ["a", "b"],
        }
    )
    (columns,) = received({"t": Data(frame, vocabulary={"word": ["a", "b"], "text": ["a", "b"]})})
    got = columns["t"]
    assert got["f"].dtype == "float32"
    assert got["when"].tolist() == [1_000_000, 86_400_000_000]
    assert got["word"].tolist() == [1, 0]
    assert got["list"].tolist() == [[1, 2], [3, 4]]
    assert got["flag"].tolist() == [True, False]
    assert got["text"].tolist() == [0, 1]


def test_vectors_of_spark_in_pandas() -> None:
    """As toPandas makes them of what VectorAssembler made: dense or sparse, row by row."""
    from pyspark.ml.linalg import Vectors

    column = [Vectors.dense([1.0, 2.0, np.nan]), Vectors.sparse(3, [1], [5.0]), Vectors.sparse(3, {})]
    frame = pd.DataFrame({"v": column})
    (columns,) = received({"t": Data(frame, dtype="float32", nan="keep")})
    np.testing.assert_array_equal(columns["t"]["v"], np.float32([[1, 2, np.nan], [0, 5, 0], [0, 0, 0]]))
    with_null = table_of(pd.DataFrame({"v": [None, column[1]]}), "t")
    assert with_null["v"].to_pylist() == [None, [0.0, 5.0, 0.0]]
    wide = pd.DataFrame({"v": [column[0], Vectors.sparse(100_000, [7], [1.0])]})
    with pytest.raises(BadRow, match="'v' is a sparse vector of 100,000 numbers, 1 of them set, in row 1") as caught:
        table_of(wide, "t")
    assert (caught.value.column, caught.value.row_id) == ("v", 1)
    with pytest.raises(BadData, match="'v' of dtype object does not become an Arrow column"):
        table_of(pd.DataFrame({"v": [column[0], "word"]}), "t")


def test_nan_in_pandas_stays_nan() -> None:
    frame = pd.DataFrame({"x": [1.0, float("nan")], "word": ["a", None]})
    table = table_of(frame, "t")
    assert table["x"].null_count == 0
    assert table["word"].null_count == 1
    (columns,) = received({"t": Data(frame, ["x"], nan="keep")})
    assert np.isnan(columns["t"]["x"][1])


def test_arrow_types_travel_as_those_of_spark() -> None:
    table = pa.table(
        {
            "cent": pa.array([decimal.Decimal("1234567.89"), decimal.Decimal("0.10")], pa.decimal128(12, 2)),
            "date64": pa.array([datetime.date(1970, 1, 2)] * 2, pa.date64()),
            "ms": pa.array([1, 2], pa.timestamp("ms", "UTC")),
            "fixed": pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float64(), 2)),
            "cents": pa.array([[decimal.Decimal("0.25")]] * 2, pa.list_(pa.decimal128(5, 2))),
            "large": pa.array([[1], [2]], pa.large_list(pa.int16())),
            "view": pa.array(["a", "b"], pa.string_view()),
            "s": pa.array([{"a": 1, "b": {"c": 2.0}}] * 2),
        }
    )
    (columns,) = received({"t": Data(table, dtype={"fixed": "float32"}, vocabulary={"view": ["a", "b"]})})
    got = columns["t"]
    assert got["cent"].tolist() == [1234567.89, 0.1]
    assert (got["date64"].tolist(), got["date64"].dtype) == ([1, 1], np.dtype("int32"))
    assert got["ms"].tolist() == [1000, 2000]
    assert (got["fixed"].tolist(), got["fixed"].dtype) == ([[1, 2]] * 2, np.dtype("float32"))
    assert got["cents"].tolist() == [[0.25]] * 2
    assert got["large"].tolist() == [[1], [2]]
    assert got["view"].tolist() == [0, 1]
    assert got["s.b.c"].tolist() == [2, 2]


@given(st.lists(st.decimals(-(10**9), 10**9, places=4), min_size=1, max_size=20))
def test_decimals_become_the_nearest_float(values: list[decimal.Decimal]) -> None:
    column = pa.array(values, pa.decimal128(15, 4))
    (columns,) = received({"t": pa.table({"x": column})})
    assert columns["t"]["x"].tolist() == [float(value) for value in values]


def test_packed_scalars_of_many_kinds() -> None:
    table = pa.table(
        {
            "i": pa.array([1, None], pa.int8()),
            "flag": pa.array([True, False]),
            "cent": pa.array([decimal.Decimal("0.10")] * 2, pa.decimal128(5, 2)),
            "day": pa.array([datetime.date(1970, 1, 3)] * 2),
            "ms": pa.array([5, 6], pa.timestamp("ms")),
        }
    )
    data = Data(table, {"x": table.column_names}, dtype={"x": "float64"}, nulls={"i": -1})
    (columns,) = received({"t": data})
    assert columns["t"]["x"].tolist() == [[1, 1, 0.1, 2, 5000], [-1, 0, 0.1, 2, 6000]]


def test_nanoseconds_that_would_be_lost() -> None:
    with pytest.raises(BadData, match=r"dt.floor\('us'\)"):
        received({"t": pa.table({"x": pa.array([1], pa.timestamp("ns"))})})


def test_what_is_no_table() -> None:
    with pytest.raises(BadData, match=r"builtins.list; without a cluster, data is a pandas DataFrame or a pyarrow"):
        Tables({"t": [1, 2]}, 1)
    with pytest.raises(BadData, match="column 'mixed' of dtype object does not become an Arrow column"):
        Tables({"t": pd.DataFrame({"mixed": [1, "a"]})}, 1)
    with pytest.raises(BadSetting, match="ranks=0"):
        Tables({"t": pa.table({"k": [1]})}, 0)


def test_no_data_still_gives_every_rank_its_anchor() -> None:
    tables = Tables({}, 3)
    assert [[batch.num_rows for batch in tables.batches(rank)] for rank in range(3)] == [[1], [1], [1]]


@pytest.mark.parametrize("labels", [["a", "a", "b"], [1, "1", "b"]])
def test_two_columns_of_a_name_are_refused_and_not_merged(labels: list[Any]) -> None:
    frame = pd.DataFrame([[1.0, 2.0, 3.0]], columns=labels)
    with pytest.raises(BadData, match=f"there are 2 columns called '{labels[0]}'"):
        received({"t": frame})


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.date32(), pa.dictionary(pa.int8(), pa.string())])
def test_rows_with_equal_values_go_to_one_rank(kind: pa.DataType) -> None:
    keys = np.random.default_rng(0).integers(0, 9, 60)
    plain = pa.array(keys, pa.int32()).cast(pa.string() if pa.types.is_dictionary(kind) else kind)
    rows = pa.table({"q": plain.cast(kind), "i": np.arange(60)})
    words = {"q": [str(i) for i in range(9)]} if "string" in str(kind) else {}
    found = received({"t": Data(rows, together="q", vocabulary=words)}, 3)
    assert sorted(np.concatenate([part["t"]["i"] for part in found]).tolist()) == list(range(60))
    for part in found:
        assert len(part["t"]["i"]) == np.isin(keys, keys[part["t"]["i"]]).sum() > 0, "all rows of each of its keys"


def test_what_rows_can_not_be_kept_together_by_is_said() -> None:
    rows = pa.table({"q": [1, 2], "x": [0.5, 1.0], "v": [[1.0], [2.0]]})
    for name, says in (
        ("w", "together names 'w', which is not there"),
        ("x", "together names 'x' of type double, and takes integers, strings, dates and timestamps. Cast the column"),
        ("v", "together names 'v' of type list"),
    ):
        with pytest.raises(BadData, match=says):
            Tables({"t": Data(rows, together=name)}, 2)
    with pytest.raises(BadData, match="together names 'q', which is not read"):
        Tables({"t": Data(rows, columns=["x"], together="q")}, 2)
    with pytest.raises(BadData, match=r"whose nulls are filled: .* Fill them before"):
        Tables({"t": Data(rows, together="q", nulls={"q": 0})}, 2)
    with pytest.raises(BadRow, match=r"column 'q' is null in row 1 of source partition 0"):
        received({"t": Data(pa.table({"q": [1, None], "x": [0.5, 1.0]}), together="q")}, 1)


def test_nan_of_pandas_is_null_where_nulls_has_a_value() -> None:
    """Pandas has no other null in a column of numbers, and makes NaN of Spark's."""
    frame = pd.DataFrame({"a": [1.0, np.nan], "b": [2.0, 4.0], "c": [5.0, np.nan]})
    columns = {"x": ["a", "b"], "c": "c"}
    for nulls, expected in (({"a": 7.0, "c": 9.0}, None), ({"x": 7.0, "c": 9.0}, None), ({}, "nan")):
        (rows, _) = Tables({"train": Data(frame, columns=columns, nulls=nulls, nan="keep")}, 1).batches(0)
        packed, alone = (rows.column(2).field(number).to_pylist() for number in range(2))
        last = [packed[1][0], alone[1]]  # which the receiver fills
        assert [value if value is None else str(value) for value in last] == [expected, expected]
