"""Arrays that leave the JVM as bytes arrive as those that leave it number by number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F

import tritium as tr
from clusters import set_to
from tritium.data.exchange import Exchange
from tritium.data.schema import Data
from tritium.errors import BadRow
from tritium.model.signature import Input, Output, Signature
from tritium.predict.spark import score
from tritium.spark import inside
from tritium.spark.inside import jvm_bytes

from .received import receive

SETTINGS = {
    "as it is": {},
    "planned otherwise": {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.execution.arrow.useLargeVarTypes": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "7",
    },
    "interpreted": {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"},
}
KINDS = {
    "boolean": "% 2 = 0",
    "tinyint": "% 100",
    "smallint": "",
    "int": "",
    "bigint": "",
    "float": "/ 3",
    "double": "/ 7",
}

ON, OFF = "", "-jvm_bytes"


@pytest.fixture(autouse=True)
def _as_bytes(spark: Any) -> Iterator[None]:
    with set_to(spark, **{inside.SETTING: ON}):  # whatever this run's TRITIUM_TEST_CONF says
        yield


def both(spark: Any, data: dict[str, Any], **more: Any) -> list[Any]:
    """Return what the ranks have received as bytes, after a comparison with what they receive as numbers."""
    found = []
    for way in (ON, OFF):
        with set_to(spark, **{inside.SETTING: way}):
            exchange = Exchange(data, 2)
            assert (exchange.as_arrays is None) == (way == ON), exchange.as_arrays
            kinds = {f.dataType.simpleString() for s in exchange.frame.schema.fields[2:] for f in s.dataType.fields}
            assert any("array" in kind for kind in kinds) == (way == OFF)
            found.append(receive(exchange, **more))
    for ours, theirs in zip(*found, strict=True):
        assert ours["rows"] == theirs["rows"]
        assert ours["parts"] == theirs["parts"]
        for name, columns in ours["columns"].items():
            order, other = (np.argsort(each["columns"][name]["_id"]) for each in (ours, theirs))
            for column, values in columns.items():
                np.testing.assert_array_equal(values[order], theirs["columns"][name][column][other])
    return found[0]


def frame_of(spark: Any, rows: int, partitions: int = 3) -> Any:
    """Return arrays of every dtype, a matrix, a vector, arrays of varying length and scalars, some of them null."""
    from pyspark.ml.functions import array_to_vector

    frame = spark.range(0, rows, 1, partitions)
    item = "cast((id * 31 + i) {} as {})"
    columns = [
        F.expr(f"transform(sequence(0, 66), i -> {item.format(how, kind)})").alias(kind) for kind, how in KINDS.items()
    ]
    return frame.select(
        "id",
        *columns,
        F.expr("transform(sequence(1, 3), i -> array(cast(id as float), cast(i as float)))").alias("matrix"),
        array_to_vector(F.expr("array(cast(id as double), 0.5d)")).alias("vector"),
        F.expr("if(id % 5 = 0, null, slice(array(id, null, id + 2), 1, cast(id % 4 as int)))").alias("ragged"),
        F.expr("array(date_add(date'1970-01-01', cast(id as int)))").alias("date"),
        *[F.expr(f"if(id % 7 = {n}, null, cast(id * {n} as {kind}))").alias(f"s{n}") for n, kind in enumerate(KINDS)
          if kind != "boolean"],
    )  # fmt: skip


def data_of(frame: Any) -> Data:
    names = [*KINDS, "matrix", "vector", "date", "id"]
    scalars = [name for name in frame.columns if name[0] == "s" and name[1:].isdigit()]
    columns = {name: name for name in names} | {"padded": "ragged", "scalars": scalars}
    return Data(frame, columns=columns, pad={"padded": (4, -1)}, nulls={"padded": "mask", "scalars": "mask"},
                dtype={"scalars": "float64", "double": "float32"})  # fmt: skip


@pytest.mark.parametrize("name", list(SETTINGS))
def test_both_ways_give_the_same_whatever_spark_does(spark: Any, name: str) -> None:
    with set_to(spark, **SETTINGS[name]):
        ranks = both(spark, {"train": data_of(frame_of(spark, 100))})
    found = ranks[0]["columns"]["train"]
    assert found["float"].shape[1:] == (67,)
    assert found["matrix"].shape[1:] == (3, 2)
    for own, row, padded in zip(found["id"], found["float"], found["padded"], strict=True):
        assert row[1] == np.float32((own * 31 + 1) / 3)
        assert padded.tolist() == ([0] * 4 if own % 5 == 0 else [own, 0, own + 2, -1][: own % 4] + [-1] * (4 - own % 4))


def test_sources_of_every_kind(spark: Any, tmp_path: Any) -> None:
    frame = frame_of(spark, 40)
    frame.write.parquet(str(tmp_path / "rows"))
    parquet = spark.read.parquet(str(tmp_path / "rows"))
    cached = parquet.persist()
    joined = frame.join(spark.range(0, 40, 2), "id")
    wide = spark.range(50).select(*[(F.col("id") + n).cast("float").alias(f"f{n}") for n in range(230)])
    data = {
        "parquet": parquet, "cached": cached, "united": frame.unionAll(parquet), "sorted": frame.orderBy("float"),
        "joined": joined, "empty": frame.where("id < 0"),
    }  # fmt: skip
    both(
        spark, {name: data_of(each) for name, each in data.items()} | {"wide": Data(wide, columns={"x": wide.columns})}
    )
    cached.unpersist()
    with Exchange({"train": data_of(frame)}, 2).persist() as kept:
        assert [sum(rank["rows"]["train"] for rank in receive(kept)) for _ in range(2)] == [40, 40]
        assert "binary" in kept.frame.schema["train"].dataType.simpleString()


@pytest.mark.parametrize("seed", range(3))
def test_random_arrays(spark: Any, seed: int) -> None:
    draw = random.Random(seed)
    kind = draw.choice([k for k in KINDS if k != "boolean"])
    width = draw.choice([0, 1, 63, 64, 65])
    sql = f"array_repeat(cast(id as {kind}), if(rand({seed}) < 0.3, {width}, cast(rand({seed + 1}) * {width} as int)))"
    frame = spark.range(0, draw.choice([0, 1, 200]), 1, draw.choice([1, 5])).select("id", F.expr(sql).alias("x"))
    both(
        spark,
        {
            "train": Data(frame, pad={"x": width or 1}, nulls={"x": "mask"}),
            "other": Data(frame.select("id", F.array("id"))),
        },
    )


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("if(id = 33, array(1f), array(1f, 2f))", "of length 1, where 2 was expected"),
        ("array(1f, if(id = 33, null, 2f))", "an array with a null in it"),
        ("array(1f, if(id = 33, float('nan'), 2f))", "NaN"),
        ("if(id = 33, null, array(1f))", "is null"),
        ("if(id = 33, array(array(1), array(2, 3)), array(array(1, 2), array(3, 4)))", "is of length 1"),
    ],
)
def test_a_bad_row_is_named_the_same(spark: Any, sql: str, message: str) -> None:
    frame = spark.range(0, 50, 1, 1).select(F.expr(sql).alias("x"))
    said = []
    for way in (ON, OFF):
        with set_to(spark, **{inside.SETTING: way}), pytest.raises(Exception, match=message) as failed:
            receive(Exchange({"train": frame}, 1))
        said.append(next(line for line in str(failed.value).splitlines() if message in line))
    assert said[0] == said[1]
    assert "in row 33 " in said[0]


def test_a_session_in_which_the_probe_fails_sends_arrays(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = spark.range(3).select(F.array(F.col("id").cast("float")).alias("x"))
    monkeypatch.setattr(inside, "_probed", {})
    monkeypatch.setattr(jvm_bytes, "UNSAFE_ARRAY", "org.apache.spark.sql.catalyst.Elsewhere")
    exchange = Exchange({"train": frame}, 1)
    assert "ClassNotFoundException" in (exchange.as_arrays or "")
    assert sorted(receive(exchange)[0]["columns"]["train"]["x"][:, 0].tolist()) == [0, 1, 2]


def test_the_probe_compares_every_dtype(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jvm_bytes.probe(spark) is None
    monkeypatch.setattr(jvm_bytes, "_VALUES", (1, 1, 0, 1))
    assert jvm_bytes.probe(spark) is None
    monkeypatch.setattr(jvm_bytes.unsafe, "lists", lambda column, dtype, depth: column)
    assert "arrays of bool are laid out differently" in (jvm_bytes.probe(spark) or "")


class Summary(torch.nn.Module):
    """Returns `[rows, 3]`: a weighted sum of each row, its first and its last number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1).view(len(x), -1).double()  # `view` needs rows that lie side by side
        weights = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64)
        return torch.stack([(flat * weights).sum(1), flat[:, 0], flat[:, -1]], 1)


def summaries(spark: Any, frame: Any, **settings: Any) -> list[tuple[Any, ...]]:
    """Return what a model gives for the column `x` of `frame`, by id, after a comparison of both ways."""
    example = np.array([row.x for row in frame.dropna().limit(1).select("x").collect()])
    kind = frame.schema["x"].dataType
    while kind.typeName() == "array":
        kind = kind.elementType
    dtype = {"boolean": "bool", "tinyint": "int8", "smallint": "int16", "int": "int32", "bigint": "int64",
             "float": "float32", "double": "float64"}[kind.simpleString()]  # fmt: skip
    signature = Signature((Input("x", ("x",), dtype, example.shape[1:]),), (Output("y", "float64", (3,)),))
    model = tr.Model(Summary(), signature)
    found = []
    for way in (ON, OFF):
        with set_to(spark, **{inside.SETTING: way}):
            scored = score(model, frame, output_cols=["y"], **settings)
            assert ("getBaseObject" in str(scored._jdf.queryExecution().toString())) == (way == ON)
            found.append(sorted((row.id, row.y) for row in scored.select("id", "y").collect()))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_model_is_given_the_same_whatever_spark_does(spark: Any, name: str, tmp_path: Any) -> None:
    frame = spark.range(0, 60, 1, 3)
    numbers = frame.select("id", *[(F.col("id") * n + 0.5).cast("float").alias(f"f{n}") for n in range(5)])
    packed = numbers.select("id", F.array(*[f"f{n}" for n in range(5)]).alias("x"))
    boxed = frame.select("id", F.expr("transform(sequence(1, 9), i -> cast(id * i as bigint))").alias("x"))
    packed.write.parquet(str(tmp_path / "rows"))
    parquet = spark.read.parquet(str(tmp_path / "rows"))
    with set_to(spark, **SETTINGS[name]):
        cached = packed.persist()
        expected = summaries(spark, packed)
        assert expected[7] == (7, [0.5 * 15 + 7 * (2 + 6 + 12 + 20), 0.5, 28.5])
        for source in (cached, parquet, packed.orderBy("id"), packed.join(frame.select("id"), "id")):
            assert summaries(spark, source) == expected
        assert len(summaries(spark, packed.unionAll(parquet))) == 120
        assert summaries(spark, boxed)[3] == (3, [3 * 285, 3, 27])
        cached.unpersist()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_is_given_arrays_of_every_dtype(spark: Any, kind: str) -> None:
    item = f"cast((id * 31 + i) {KINDS[kind]} as {kind})"
    rows = spark.range(0, 40, 1, 2).select("id", F.expr(f"transform(sequence(0, 66), i -> {item})").alias("x"))
    summaries(spark, rows.persist())
    matrix = rows.select("id", F.array("x", "x").alias("x"))
    summaries(spark, matrix)
    rows.unpersist()


def test_a_model_of_more_columns_than_spark_generates_code_for(spark: Any) -> None:
    columns = [(F.col("id") + n).cast("float").alias(f"f{n}") for n in range(230)]
    made = spark.range(0, 40, 1, 2).select("id", *columns)
    signature = Signature((Input("x", tuple(made.columns[1:]), shape=(230,)),), (Output("y", "float64", (3,)),))
    for arranged in (lambda frame: frame, lambda frame: frame.orderBy("f0"), lambda frame: frame.persist()):
        frame = arranged(made)
        for way in (ON, OFF):
            with set_to(spark, **{inside.SETTING: way}):
                rows = score(tr.Model(Summary(), signature), frame, output_cols=["y"]).collect()
            assert len(rows) == 40
            for row in rows:
                numbers = np.arange(230) + row.id
                assert row.y == [(numbers * np.arange(1, 231)).sum(), row.id, row.id + 229]
                assert row.f229 == row.id + 229
    made.unpersist()


BAD = ["null", "array(1f, null)", "array(1f)", "array(1f, 2f, 3f)", "array()", "array(1f, float('nan'))"]


def some_bad(spark: Any, bad: str) -> Any:
    """Return rows of two numbers, and every eleventh one that no model can use."""
    x = f"if(id % 11 = 3, cast({bad} as array<float>), array(cast(id as float), 1f))"
    return spark.range(0, 30, 1, 1).select("id", F.expr(x).alias("x"))


@pytest.mark.parametrize("bad", BAD)
def test_a_model_is_given_the_same_valid_rows(spark: Any, bad: str) -> None:
    made = some_bad(spark, bad)
    for frame in (made, made.repartition(1)):  # arrays that the plan makes, and that it reads
        found = summaries(spark, frame, on_error="skip")
        assert [row for row, _ in found] == [n for n in range(30) if n % 11 != 3]
        kept = summaries(spark, frame, on_error="null")
        assert [row for row, y in kept if y is None] == [3, 14, 25]


@pytest.mark.parametrize("bad", BAD[:3])
def test_a_row_that_no_model_can_use_is_named_the_same(spark: Any, bad: str) -> None:
    signature = Signature((Input("x", ("x",), shape=(2,)),), (Output("y", "float64", (3,)),))
    said = []
    for way in (ON, OFF):
        with set_to(spark, **{inside.SETTING: way}), pytest.raises(Exception, match="BadRow: ") as failed:
            score(tr.Model(Summary(), signature), some_bad(spark, bad), output_cols=["y"]).collect()
        said.append(next(line for line in str(failed.value).splitlines() if BadRow.__name__ in line))
    assert said[0] == said[1]


def test_a_model_is_given_nothing_of_no_rows(spark: Any) -> None:
    frame = spark.range(3).select("id", F.array(F.col("id").cast("float")).alias("x"))
    signature = Signature((Input("x", ("x",), shape=(1,)),), (Output("y", "float64", (3,)),))
    assert score(tr.Model(Summary(), signature), frame.where("id > 3"), output_cols=["y"]).collect() == []
