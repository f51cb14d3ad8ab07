"""Numbers that the dtype of a batch can't hold: refused at their row on every way into a batch or a prediction."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.data.codec import read
from tritium.data.plan import plan
from tritium.data.schema import Data
from tritium.data.tables import Tables
from tritium.errors import BadData, BadRow
from tritium.ml import fit
from tritium.model.signature import Input, Output, Signature

HOUR, MINUTE = 1_700_000_001, 1_700_000_030  # equal as float32


def rows(data: Data) -> list[Any]:
    """Return the only batch column of a table, as the receiver decodes it."""
    tables = Tables({"train": data}, 1)
    (field,) = tables.plan["train"]
    found = []
    for batch in tables.batches(0):
        there = batch.column(2).drop_null()
        if len(there):
            found += read(field, there.field(0), batch.column(0).to_numpy()[: len(there)])[0].tolist()
    return found


def from_spark(values: list[Any], kind: pa.DataType, data: Data, schema: pa.Schema) -> Any:
    """Return a packed column as the JVM sends it: already in the dtype in which it travels."""
    (field,) = plan(schema, data, "train")
    return read(field, pa.array(values, pa.list_(kind)), np.arange(len(values)))[0]


TWO = {"features": ["a", "b"]}
FLOATS = {"a": [1.0, 2.0, 3.0], "b": [1.0, 1e300, 3.0]}


@pytest.mark.parametrize(
    ("columns", "settings", "value"),
    [
        (TWO, {"dtype": "float32"}, 1e300),
        (TWO, {"dtype": "float16"}, 1e300),
        (TWO, {"default_dtype": "float32"}, 1e300),
        (TWO, {"dtype": "float32", "nan": "keep"}, 1e300),
        (["b"], {"dtype": "float32"}, 1e300),
        (["b"], {"dtype": "float32", "nan": "keep"}, 1e300),
        (["b"], {"dtype": {"b": "float16"}}, 1e300),
    ],
)
def test_what_would_become_infinite_is_refused(columns: Any, settings: dict[str, Any], value: float) -> None:
    with pytest.raises(BadRow, match=r"column 'b'.* is 1e\+300, beyond float(32|16)") as caught:
        rows(Data(pd.DataFrame(FLOATS), columns, **settings))
    assert (caught.value.column, caught.value.row_id, caught.value.value) == ("b", 1, value)


def test_arrays_that_would_become_infinite_are_refused() -> None:
    frame = pa.table({"x": [[1.0, 2.0], [3.0, -1e300]]})
    for settings in ({"dtype": "float32"}, {"dtype": "float32", "nan": "keep"}):
        with pytest.raises(BadRow, match=r"column 'x' is .*beyond float32 .*in row 1") as caught:
            rows(Data(frame, **settings))
        assert caught.value.row_id == 1
    with pytest.raises(BadRow, match=r"column 'x' is 70000.0, beyond float16 \(up to 65504\), in row 0"):
        rows(Data(pa.table({"x": [[7e4]]}), dtype="float16"))


def test_an_infinity_is_as_bad_as_a_nan() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [0.5, -math.inf]})
    for columns, settings in ((TWO, {}), (TWO, {"dtype": "float32"}), (["b"], {}), (["b"], {"dtype": "float32"})):
        with pytest.raises(BadRow, match=r"column 'b'.* is infinite.* in row 1 .*nan='keep'") as caught:
            rows(Data(frame, columns, **settings))
        assert caught.value.value == -math.inf
        assert np.isneginf(np.ravel(rows(Data(frame, columns, nan="keep", **settings)))[-1])


def test_what_spark_sent_as_infinite_names_its_column() -> None:
    schema = pa.schema([("a", pa.float64()), ("b", pa.float64())])
    with pytest.raises(BadRow, match=r"column 'b'.* is infinite, or beyond float32 \(up to 3.40282e\+38\), in row 1"):
        from_spark([[1, 2], [3, math.inf]], pa.float32(), Data(None, TWO, dtype="float32"), schema)


def test_nothing_finite_is_refused() -> None:
    largest = float(np.finfo("float32").max)
    frame = pd.DataFrame({"a": [largest, 1e-300], "b": [-largest, 0.1]})
    assert rows(Data(frame, TWO, dtype="float32")) == [[largest, -largest], [0.0, float(np.float32(0.1))]]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1e300])
def test_a_float_that_is_no_integer_is_refused_where_it_is_packed_with_integers(value: float) -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": [1.0, value]})
    with pytest.raises(BadRow, match=r"column 'b'.* beyond the int64") as caught:
        rows(Data(frame, TWO, dtype={"features": "int64"}))
    assert (caught.value.column, caught.value.row_id) == ("b", 1)


def test_a_row_that_spark_could_not_pack_as_integers_names_its_column() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.float64())])
    data = Data(None, TWO, dtype={"features": "int64"})
    assert from_spark([[1, 2], [3, 4]], pa.int64(), data, schema).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(BadRow, match=r"column 'b'.* is NaN, infinite or beyond int64.* in row 2") as caught:
        from_spark([[1, 2], [3, 4], [1, 1, 1], [5, 6]], pa.int64(), data, schema)
    assert caught.value.column == "b"


def test_unsigned_integers_do_not_wrap_round() -> None:
    frame = pa.table({"a": pa.array([1, 2], pa.int64()), "b": pa.array([1, 2**63], pa.uint64())})
    with pytest.raises(BadRow, match=r"column 'b'.* is 9223372036854775808, beyond the int64"):
        rows(Data(frame, TWO, dtype={"features": "int64"}))


# --- integers in float32


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.uint32(), pa.decimal128(20, 0)])
def test_an_integer_that_float32_rounds_is_refused_unless_rounding_was_asked_for(kind: pa.DataType) -> None:
    times = pa.array([5, HOUR, MINUTE]).cast(kind)
    frame = pa.table({"a": [1.0, 2.0, 3.0], "b": times})
    with pytest.raises(
        BadRow, match=r"column 'b' .*an integer beyond 16,777,215, up to which float32 is exact"
    ) as caught:
        rows(Data(frame, TWO, default_dtype="float32"))
    assert (caught.value.column, caught.value.row_id) == ("b", 1)
    assert caught.value.value == HOUR
    assert "cast('float')" in str(caught.value)
    asked = rows(Data(frame, TWO, dtype="float32"))
    assert asked[1][1] == asked[2][1] == 1_700_000_000
    cast = frame.set_column(1, "b", pa.array([5, HOUR, MINUTE], pa.float64()).cast(pa.float32()))
    assert rows(Data(cast, TWO, default_dtype="float32")) == asked


def test_spark_has_rounded_it_already_and_it_is_refused() -> None:
    schema = pa.schema([("a", pa.float64()), ("b", pa.int64())])
    data = Data(None, TWO, default_dtype="float32")
    with pytest.raises(BadRow, match=r"column 'b'.* is about 1,700,000,000, an integer beyond 16,777,215") as caught:
        from_spark([[1e9, 2], [3e9, np.float32(MINUTE)]], pa.float32(), data, schema)
    assert caught.value.row_id == 1
    with pytest.raises(BadRow, match="column 'b'"):  # 2**24 + 1 arrives as 2**24
        from_spark([[1, 2**24]], pa.float32(), data, schema)
    with pytest.raises(BadRow, match="column 'b'"):
        from_spark([[1, -(2**24)]], pa.float32(), data, schema)
    assert from_spark([[1e9, 2**24 - 1]], pa.float32(), data, schema).tolist() == [[1e9, 2**24 - 1]]


def test_ordinary_integers_and_those_that_fit_by_type_need_no_thought() -> None:
    frame = pa.table(
        {
            "long": pa.array([1, 1_000_000], pa.int64()),
            "short": pa.array([-(2**15), 2**15 - 1], pa.int16()),
            "flag": [True, False],
            "day": pa.array([0, 20_000], pa.int32()).cast(pa.date32()),
            "cents": pa.array([decimal.Decimal("0.25")] * 2, pa.decimal128(12, 2)),
            "null": pa.array([None, 3], pa.int64()),
        }
    )
    columns = {"x": frame.column_names}
    found = rows(Data(frame, columns, default_dtype={"x": "float32"}, nulls={"null": -1}))
    assert found == [[1, -(2**15), 1, 0, 0.25, -1], [1_000_000, 2**15 - 1, 0, 20_000, 0.25, 3]]
    (field,) = plan(
        frame.select(["short", "flag", "day"]).schema,
        Data(None, default_dtype="float32", columns={"x": ["short", "flag", "day"]}),
        "t",
    )
    assert field.exact == ()


def test_a_default_is_for_floating_columns_and_leaves_integers_alone() -> None:
    schema = pa.schema([("f", pa.float64()), ("k", pa.int64()), ("g", pa.float32()), ("t", pa.timestamp("us"))])
    columns = {"f": "f", "k": "k", "ks": ["k", "k"], "mixed": ["f", "k"]}
    fields = {field.name: field for field in plan(schema, Data(None, columns, default_dtype="float32"), "t")}
    assert {name: field.dtype for name, field in fields.items()} == {
        "f": "float32", "k": "int64", "ks": "int64", "mixed": "float32",
    }  # fmt: skip
    (kept,) = plan(schema, Data(None, "f", default_dtype="float32", dtype="float64"), "t")
    assert kept.dtype == "float64"
    with pytest.raises(BadData, match=r"column 't' is a timestamp.*F.unix_timestamp"):
        plan(schema, Data(None, {"x": ["f", "t"]}, default_dtype="float32"), "t")
    with pytest.raises(BadData, match="default_dtype names 'nope'"):
        plan(schema, Data(None, default_dtype={"nope": "float32"}), "t")


# --- the estimator


HERE: dict[str, Any] = {"on": "here", "progress": False, "verbose": False}
LINEAR: dict[str, Any] = {
    "model": lambda: nn.Linear(2, 1), "loss": nn.MSELoss(), "optimizer": lambda p: torch.optim.SGD(p, 1e-30),
    "feature_cols": ["a", "b"], "label_cols": ["y"],
}  # fmt: skip


def frame(b: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": b, "y": [0.0, 1.0, 2.0]})


def test_a_column_of_times_is_refused_in_an_estimator_and_every_way_out_works() -> None:
    times = frame([5, HOUR, MINUTE])
    with pytest.raises(BadRow, match=r"column 'b'.* is 1,700,000,001, an integer beyond"):
        fit(times, **LINEAR, **HERE)
    fit(frame([5, 6, 1_000_000]), **LINEAR, **HERE)
    rounded = times.astype({"b": "float32"})
    model = fit(rounded, **LINEAR, **HERE)
    assert model.predict(rounded).shape == (3,)
    with pytest.raises(BadRow, match="column 'b'"):
        model.predict(times)  # the rule is the same where it is scored
    fit(frame([0, HOUR - HOUR, MINUTE - HOUR]), **LINEAR, **HERE)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(1, 1)

        def forward(self, numbers: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            assert b.dtype == torch.int64
            assert int(b.max()) in (0, MINUTE)  # the trial's zeros, and the rows
            return self.out(numbers)

    own = LINEAR | {"model": Net, "feature_cols": {"numbers": ["a"], "b": "b"}, "batch_size": 3}
    fit(times, **own, **(HERE | {"shuffle": False}))


def test_labels_and_weights_follow_the_same_rule() -> None:
    ones = pd.DataFrame({"a": [1.0], "b": [1.0], "y": [HOUR], "z": [1.0], "w": [HOUR]})
    with pytest.raises(BadRow, match="column 'y'"):
        fit(ones, **(LINEAR | {"label_cols": ["y", "z"], "model": lambda: nn.Linear(2, 2)}), **HERE)
    with pytest.raises(BadRow, match="column 'w'"):
        fit(ones, **(LINEAR | {"label_cols": ["z"]}), weight_col="w", **HERE)


# --- prediction


def regression(dtype: str = "float32") -> tr.Model:
    module = nn.Linear(2, 1).to(getattr(torch, dtype))
    return tr.Model(module, Signature((Input("x", ("a", "b"), dtype, (2,)),), (Output("y", dtype),), "regression"))


@pytest.mark.parametrize(
    ("b", "text"),
    [
        ([1.0, 1e300], r"column 'b'.* is 1e\+300, beyond float32"),
        ([1.0, math.inf], "column 'b' is infinite"),
        ([5, HOUR], "column 'b'.* is 1,700,000,001, an integer beyond 16,777,215"),
    ],
)
def test_a_prediction_refuses_what_a_training_does(b: list[Any], text: str) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": b})
    for given in (table, pa.Table.from_pandas(table), table.to_numpy(), torch.from_numpy(table.to_numpy())):
        with pytest.raises(BadRow, match=rf"{text}.* in row 1") as caught:
            regression().predict(given)
        assert (caught.value.column, caught.value.row_id) == ("b", 1)
    if isinstance(b[1], float) and math.isfinite(b[1]):
        assert np.isfinite(regression("float64").predict(table)).all()


def test_arrays_of_integers_do_not_wrap_round() -> None:
    module = nn.Embedding(3, 1)
    signature = Signature((Input("k", ("k",), "int32"),), (Output("y", "float32", (1,)),), "regression")
    with pytest.raises(BadRow, match=r"column 'k' is 4294967297, beyond the int32.* in row 1"):
        tr.Model(module, signature).predict(np.array([1, 2**32 + 1]))
