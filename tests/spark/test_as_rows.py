"""A scoring function gets rows from Spark, never the columnar batches of a file's reader taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyspark.ml.feature import VectorAssembler

import tritium as tr
from clusters import set_to
from tritium.model.signature import Input, Output, Signature
from tritium.predict.spark import score
from tritium.spark.inside.as_rows import COLUMNAR_INPUT, _never


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().sum(1, keepdim=True)


def scored(frame: Any, *sources: str, width: int = 1) -> Any:
    signature = Signature((Input("x", sources, shape=(width,)),), (Output("y", "float64", (1,)),))
    return score(tr.Model(Sum(), signature), frame, output_cols=["y"], on_error="null")


def takes_batches(frame: Any) -> bool:
    """Return whether a Python function in the plan of `frame` has columnar batches as its input."""
    left, found = [frame._jdf.queryExecution().executedPlan()], []
    while left:
        node = left.pop()
        children = node.children()
        left.extend(children.apply(n) for n in range(children.length()))
        if node.nodeName() == "AdaptiveSparkPlan":
            left.append(node.executedPlan())
        if node.nodeName() == "ArrowEvalPython":
            found.append(node.child().supportsColumnar())
    assert found
    return any(found)


@pytest.fixture(params=["whole", "partitioned"])
def parquet(spark: Any, request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    columns = ["id", "if(id = 4, null, cast(id as float)) a", "cast(1 as float) b", "array(id, 1f) x", "id % 3 part"]
    frame = spark.range(0, 60, 1, 2).selectExpr(*columns, "struct(cast(id as float) c) s")
    writer = frame.write if request.param == "whole" else frame.write.partitionBy("part")
    writer.parquet(str(tmp_path / "rows"))
    return spark.read.parquet(str(tmp_path / "rows"))


@pytest.mark.parametrize("sources", [("x",), ("a", "b"), ("s.c", "b")])
def test_a_file_in_columns_is_read_as_rows_and_loses_none(spark: Any, parquet: Any, sources: tuple[str, ...]) -> None:
    frame = scored(parquet, *sources, width=2)
    assert not takes_batches(frame)
    found = {row.id: row.y for row in frame.select("id", "y").collect()}
    null = {4} if "a" in sources else set()
    assert found == {n: None if n in null else n + 1.0 for n in range(60)}
    assert {row.id for row in frame.where("id < 7").where(parquet["part"] == 1).collect()} == {1, 4}


def test_a_model_of_the_column_by_which_a_table_is_partitioned(parquet: Any) -> None:
    found = {row.id: row.y for row in scored(parquet, "part").collect()}
    assert found == {n: float(n % 3) for n in range(60)}


def test_a_stream_of_files_in_columns_is_read_as_rows(spark: Any, tmp_path: Any) -> None:
    """Spark 4.2 can't hand a columnar batch with a vector to a function at all."""
    rows = VectorAssembler(inputCols=["id"], outputCol="v").transform(spark.range(9))
    rows.write.parquet(str(tmp_path / "rows"))
    stream = scored(spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows")), "v")
    query = stream.writeStream.format("memory").queryName("vectors").start()
    try:
        query.processAllAvailable()
        assert {row.id: row.y for row in spark.table("vectors").collect()} == {n: float(n) for n in range(9)}
    finally:
        query.stop()
        spark.catalog.dropTempView("vectors")


def test_what_is_cached_in_columns_is_read_as_rows(parquet: Any) -> None:
    numbers = parquet.select("id", "a", "b").persist()
    frame = scored(numbers, "b", "a", width=2)
    assert not takes_batches(frame)
    assert frame.where("y is null").count() == 1
    numbers.unpersist()


def test_what_spark_gives_as_rows_is_left_alone(spark: Any, parquet: Any) -> None:
    cached = parquet.select("id", "a", "x").persist()  # of an array, Spark's cache makes no columnar batches
    for frame in (cached, cached.groupBy("id", "x").count(), spark.range(3).selectExpr("id", "array(id, 1f) x")):
        told = scored(frame, "x", width=2)
        assert "Filter (" not in told._jdf.queryExecution().toString()
        assert not takes_batches(told)
        assert {row.id: row.y for row in told.collect()} == {row.id: row.id + 1.0 for row in frame.collect()}
    united = scored(cached.unionAll(parquet.select("id", "b", "x")), "x", width=2)
    assert "Filter (" in united._jdf.queryExecution().toString()
    assert united.count() == 120
    cached.unpersist()


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_session_that_says_what_it_wants_has_its_plan_left_alone(spark: Any, parquet: Any, value: str) -> None:
    expected = sorted((row.id, row.y) for row in scored(parquet, "x", width=2).collect())
    with set_to(spark, **{COLUMNAR_INPUT: value}):
        told = scored(parquet, "x", width=2)
        assert "Filter (" not in told._jdf.queryExecution().toString()
        assert takes_batches(told) is (value == "true")
        assert sorted((row.id, row.y) for row in told.collect()) == expected


def test_a_spark_that_makes_expressions_otherwise_scores_as_well(parquet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sorted((row.id, row.y) for row in scored(parquet, "x", width=2).collect())
    _never.cache_clear()
    monkeypatch.setattr("tritium.spark.inside._probed", {})
    monkeypatch.setattr("tritium.spark.inside.as_rows.UNSAFE_ARRAY", "org.apache.spark.Elsewhere")
    otherwise = scored(parquet, "x", width=2)
    assert takes_batches(otherwise)
    assert sorted((row.id, row.y) for row in otherwise.collect()) == expected
