"""The plan of batch columns: settings and types are checked before anything starts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from tritium.data.plan import plan
from tritium.data.schema import Data, Field
from tritium.data.types import columns_of, dtype_of, path_of
from tritium.errors import BadData

SPARK = T.StructType(
    [
        T.StructField("i8", T.ByteType()),
        T.StructField("i64", T.LongType()),
        T.StructField("f32", T.FloatType()),
        T.StructField("f64", T.DoubleType()),
        T.StructField("flag", T.BooleanType()),
        T.StructField("cent", T.DecimalType(12, 2)),
        T.StructField("long_decimal", T.DecimalType(38, 10)),
        T.StructField("day", T.DateType()),
        T.StructField("moment", T.TimestampType()),
        T.StructField("wall", T.TimestampNTZType()),
        T.StructField("vector", VectorUDT()),
        T.StructField("array", T.ArrayType(T.DoubleType())),
        T.StructField("matrix", T.ArrayType(T.ArrayType(T.FloatType()))),
        T.StructField("word", T.StringType()),
        T.StructField("image", T.BinaryType()),
        T.StructField("map", T.MapType(T.StringType(), T.IntegerType())),
        T.StructField("inner", T.StructType([T.StructField("a", T.IntegerType()), T.StructField("b", T.DateType())])),
        T.StructField("records", T.ArrayType(T.StructType([T.StructField("a", T.IntegerType())]))),
    ]
)


def problems(**settings: Any) -> list[str]:
    with pytest.raises(BadData) as caught:
        plan(SPARK, Data(None, **settings), "train")
    assert 'data "train" can\'t be read' in str(caught.value)
    return list(caught.value.problems)


def planned(columns: Any, **settings: Any) -> dict[str, Field]:
    return {field.name: field for field in plan(SPARK, Data(None, columns, **settings), "train")}


@pytest.mark.parametrize(
    ("column", "dtype", "shape", "depth"),
    [
        ("i8", "int8", (), 0),
        ("i64", "int64", (), 0),
        ("f32", "float32", (), 0),
        ("flag", "bool", (), 0),
        ("cent", "float64", (), 0),
        ("day", "int32", (), 0),
        ("moment", "int64", (), 0),
        ("wall", "int64", (), 0),
        ("vector", "float64", None, 1),
        ("array", "float64", None, 1),
        ("matrix", "float32", None, 2),
    ],
)
def test_the_fate_of_a_type(column: str, dtype: str, shape: Any, depth: int) -> None:
    (field,) = plan(SPARK, Data(None, [column]), "train")
    assert (field.kind, field.dtype, field.shape, field.depth) == ("fixed", dtype, shape, depth)
    assert (field.name, field.sources, field.packed, field.mask) == (column, (column,), False, False)


def test_scalars_pack_without_losing_a_digit() -> None:
    assert planned({"x": ["f32", "i8", "flag"]})["x"].travel == "float32"
    assert planned({"x": ["f32", "day"]})["x"].dtype == "float64"
    assert planned({"x": ["i8", "i64"]})["x"].dtype == "int64"
    assert planned({"x": ["flag"]})["x"].shape == (1,)
    field = planned({"x": ["f64", "i64"]}, dtype={"x": "float32"})["x"]
    assert (field.dtype, field.travel, field.shape, field.packed) == ("float32", "float32", (2,), True)
    (problem,) = problems(columns={"x": ["f64", "i64"]})
    assert "'i64'" in problem
    assert "dtype={'x': 'float64'}" in problem


def test_one_dtype_for_all_means_packed_and_floating_columns() -> None:
    fields = planned(
        {"x": ["f64", "i8"], "v": "vector", "a": "array", "c": "cent", "k": "i64", "d": "day"}, dtype="float32"
    )
    assert {name: field.dtype for name, field in fields.items()} == {
        "x": "float32", "v": "float32", "a": "float32", "c": "float32", "k": "int64", "d": "int32",
    }  # fmt: skip
    assert fields["v"].travel == fields["a"].travel == "float32"  # half the bytes through the shuffle


def test_every_column_by_default_and_structs_by_dotted_name() -> None:
    schema = T.StructType([SPARK["f32"], SPARK["inner"]])
    assert [field.name for field in plan(schema, Data(None), "t")] == ["f32", "inner.a", "inner.b"]
    assert set(planned({"s": "inner"})) == {"s.a", "s.b"}
    assert planned({"x": ["inner.a", "f32"]})["x"].sources == ("inner.a", "f32")
    assert planned("f32")["f32"].shape == ()
    assert planned({"x": ["vector"]})["x"].shape is None  # a list of one vector is that vector


def test_a_column_called_like_a_path_wins() -> None:
    inner = T.StructType([T.StructField("b", T.FloatType())])
    schema = T.StructType([T.StructField("a", inner), T.StructField("a.b", T.LongType())])
    assert columns_of(schema)["a.b"].dtype == "int64"
    assert path_of(schema, "a.b") == ("a.b",)
    assert path_of(SPARK, "inner.a") == ("inner", "a")


def test_a_dot_in_a_name_makes_no_field_of_a_struct() -> None:
    schema = T.StructType([T.StructField(name, T.DoubleType()) for name in ("x", "x.1", "y.z")])
    assert [field.name for field in plan(schema, Data(None), "t")] == ["x", "x.1", "y.z"]
    table = pa.schema([(name, pa.float64()) for name in ("x", "x.1")])
    assert [field.sources for field in plan(table, Data(None), "t")] == [("x",), ("x.1",)]


def test_a_column_and_a_field_of_one_name_are_not_read_as_one() -> None:
    inner = T.StructType([T.StructField("b", T.FloatType())])
    schema = T.StructType([T.StructField("a", inner), T.StructField("a.b", T.LongType())])
    with pytest.raises(BadData, match=r"'a\.b' is a column, and also a field of struct 'a'"):
        plan(schema, Data(None), "t")
    assert plan(schema, Data(None, ["a.b"]), "t")[0].dtype == "int64"


def test_a_setting_for_a_source_column_leaves_the_batch_column_of_that_name_alone() -> None:
    schema = pa.schema([(name, pa.float64()) for name in ("height", "weight", "w")])
    columns = {"features": ["height", "weight"], "weight": "w"}
    found = plan(schema, Data(None, columns, nulls={"weight": 70}), "t")
    assert [field.nulls for field in found] == [(None, 70), (None,)]
    found = plan(schema, Data(None, columns, nulls={"w": "mask"}), "t")
    assert [field.nulls for field in found] == [(None, None), ("mask",)]
    swapped = pa.schema([("a", pa.list_(pa.int64())), ("b", pa.list_(pa.int64()))])
    found = plan(swapped, Data(None, {"a": "b", "b": "a"}, pad={"a": 3, "b": 5}), "t")
    assert {field.sources[0]: field.pad for field in found} == {"a": (3, 0), "b": (5, 0)}


def test_where_names_do_not_collide_a_setting_goes_by_either() -> None:
    schema = pa.schema([("a", pa.float64()), ("b", pa.float64()), ("words", pa.string())])
    for nulls in ({"x": 1}, {"a": 1, "b": 1}):
        (field,) = plan(schema, Data(None, {"x": ["a", "b"]}, nulls=nulls), "t")
        assert field.nulls == (1, 1)
    assert plan(schema, Data(None, {"x": ["a", "b"]}, nulls={"x": 1, "b": 2}), "t")[0].nulls == (1, 2)
    for name in ("words", "w"):
        assert plan(schema, Data(None, {"w": "words"}, hash_buckets={name: 7}), "t")[0].buckets == 7
    assert plan(schema, Data(None, {"w": "words"}, hash_buckets={"words": 7, "w": 9}), "t")[0].buckets == 9


@pytest.mark.parametrize(("digits", "scale", "fits"), [(18, 0, True), (19, 0, False), (20, 2, True), (20, 1, False)])
def test_a_decimal_beyond_int64_is_not_read_as_integers(digits: int, scale: int, fits: bool) -> None:
    for kind in (T.DecimalType(digits, scale), T.ArrayType(T.DecimalType(digits, scale))):
        schema = T.StructType([T.StructField("d", kind)])
        assert plan(schema, Data(None, dtype={"d": "float64"}), "t")[0].travel == "float64"
        if fits:
            assert plan(schema, Data(None, dtype={"d": "int64"}), "t")[0].travel == "int64"
            continue
        for dtype in ("int64", "int32", "uint64"):
            with pytest.raises(BadData, match=rf"decimal\({digits},{scale}\).* beyond int64.*'float64'"):
                plan(schema, Data(None, dtype={"d": dtype}), "t")


def test_every_problem_is_listed_at_once() -> None:
    found = problems(
        columns={
            "x": "f46",
            "m": "map",
            "w": "word",
            "d": "long_decimal",
            "r": "records",
            "mix": ["f32", "word"],
            "e": [],
        },
        dtype={"x": "flot32", "nothing": "int8"},
        nan="maybe",
        shuffle="half",
    )
    text = "\n".join(found)
    for expected in [
        "there is no column 'f46'. Did you mean",
        "'e' has no source column",
        "column 'map' has type map<string,int>, which can't be put in a batch",
        "`map_keys`",
        "column 'word' is a string: give its values, vocabulary={'w': [...]}",
        "decimal(38,10), and float64 holds only 15 digits",
        "column 'records' has type array<struct<a:int>>",
        "can't be packed with others into 'mix'",
        "dtype names 'nothing', which is not read",
        "nan='maybe' is unknown",
        "shuffle='half' is unknown",
    ]:
        assert expected in text, expected


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"columns": ["f32"], "dtype": {"f32": "flot32"}}, "dtype 'flot32' of batch column 'f32' is unknown. Did you"),
        ({"columns": ["f32"], "dtype": {"f32": "bool"}}, "not cast to bool"),
        ({"columns": ["image"], "dtype": {"image": "float32"}}, "decode={'image': function} decides its dtype"),
        ({"columns": ["image"], "nulls": {"image": 0}}, "a null in it can't be filled"),
        ({"columns": ["f32"], "decode": {"f32": len}}, "only columns of bytes, strings and integers are decoded"),
        ({"columns": ["word"], "vocabulary": {"word": []}}, "vocabulary is empty"),
        ({"columns": ["word"], "vocabulary": {"word": ["a", "a"]}}, "holds a value twice"),
        ({"columns": ["word"], "hash_buckets": {"word": 0}}, "hash_buckets=0"),
        ({"columns": ["word"], "hash_buckets": {"word": 9}, "vocabulary": {"word": ["a"]}}, "Choose one"),
        ({"columns": ["word"], "vocabulary": {"word": ["aa"]}, "nulls": {"word": "ab"}}, "is not in its vocabulary"),
        ({"columns": ["f32"], "nulls": {"f32": "zero"}}, "give a number, or 'mask'"),
        ({"columns": ["i8"], "nulls": {"i8": 300}}, "nulls=300 for 'i8' does not fit its dtype int8"),
        ({"columns": ["i8"], "nulls": {"i8": 0.5}}, "does not fit"),
        ({"columns": ["i8"], "nulls": {"i88": 0}}, "nulls names 'i88', which is not read. Did you mean 'i8'"),
        ({"columns": ["matrix"], "pad": {"matrix": 3}}, "only arrays of one dimension are padded"),
        ({"columns": ["vector"], "pad": {"vector": 3}}, "only arrays of one dimension are padded"),
        ({"columns": ["array"], "pad": {"array": 0}}, "the length must be a whole number of at least 1"),
        ({"columns": {"f32": "f32", "f32_mask": "flag"}, "nulls": {"f32": "mask"}}, "would be called f32_mask"),
    ],
)
def test_a_wrong_setting(settings: dict[str, Any], text: str) -> None:
    (problem,) = problems(**settings)
    assert text in problem


def test_columns_of_one_name() -> None:
    with pytest.raises(BadData, match="there are 2 columns called 'i8'"):
        plan(T.StructType([SPARK["i8"], SPARK["f32"], SPARK["i8"]]), Data(None, ["f32"]), "t")


def test_no_columns_at_all() -> None:
    with pytest.raises(BadData, match="it has no columns"):
        plan(T.StructType([]), Data(None), "t")


def test_a_field_survives_json() -> None:
    fields = plan(
        SPARK,
        Data(
            None,
            {"x": ["f32", "i8"], "a": "array", "w": "word", "image": "image", "v": "vector"},
            vocabulary={"w": ["a", "b"]},
            pad={"a": (3, -1.5)},
            nulls={"f32": "mask", "i8": 7},
        ),
        "train",
    )
    assert [Field.from_json(json.loads(json.dumps(field.to_json()))) for field in fields] == list(fields)
    assert fields[0].nulls == ("mask", 7)
    assert fields[0].mask


def test_spark_and_arrow_plan_the_same() -> None:
    arrow = pa.schema(
        [
            ("i8", pa.int8()), ("i64", pa.int64()), ("f32", pa.float32()), ("f64", pa.float64()),
            ("flag", pa.bool_()), ("cent", pa.decimal128(12, 2)), ("day", pa.date32()),
            ("moment", pa.timestamp("us", "UTC")), ("wall", pa.timestamp("us")), ("array", pa.list_(pa.float64())),
            ("matrix", pa.list_(pa.list_(pa.float32()))), ("word", pa.string()), ("image", pa.binary()),
            ("inner", pa.struct([("a", pa.int32()), ("b", pa.date32())])),
        ]
    )  # fmt: skip
    data = Data(None, arrow.names, hash_buckets={"word": 10})
    assert plan(arrow, data, "t") == plan(SPARK, data, "t")


def test_what_only_arrow_has() -> None:
    arrow = pa.schema(
        [
            ("u8", pa.uint8()),
            ("f16", pa.float16()),
            ("fixed", pa.list_(pa.float32(), 3)),
            ("map", pa.map_(pa.string(), pa.int8())),
        ]
    )
    fields = plan(arrow, Data(None, ["u8", "f16", "fixed"]), "t")
    assert [(field.dtype, field.shape) for field in fields] == [("uint8", ()), ("float16", ()), ("float32", (3,))]
    with pytest.raises(BadData, match=r"map<string, int8>.*map_keys"):
        plan(arrow, Data(None), "t")


NUMBERS = ("bool", "float16", "float32", "float64", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)))


@pytest.mark.parametrize("name", NUMBERS)
def test_the_dtype_of_numbers_needs_no_pandas(name: str) -> None:
    assert dtype_of(pa.type_for_alias(name)) == np.dtype(name)
