"""Spark checks the bytes of Arrow batches, except of rows that are too small to need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import functions as F

import tritium as tr
from clusters import set_to
from tritium.data.exchange import Exchange
from tritium.gang.supervisor.results import SPARK_SCHEMA
from tritium.spark.inside import batch_bytes
from tritium.spark.inside.batch_bytes import SETTING, UNCHECKED, out_of_reach


def limits() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that replaces rows by the limit that holds in this task, 0 for Spark's default."""

    def replace(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        limit = int(TaskContext.get().getLocalProperty(SETTING) or 0)
        for batch in batches:
            yield pa.record_batch({"limit": pa.array([limit] * batch.num_rows, pa.int64())})

    return replace


def seen() -> list[int]:
    (epoch,) = tr.world().shard("train").epochs(1, batch_size=4)
    return sorted({int(n) for batch in epoch for n in batch["limit"]})


def doubled(frame: Any) -> Any:
    return frame.select(F.udf(lambda n: n * 2, "long")("id").alias("id"))


def in_pandas(frame: Any) -> Any:
    return frame.mapInPandas(lambda parts: parts, "id long")


def columns(frame: Any) -> Any:
    return frame.select(*[(F.col("id") + n).alias(f"f{n}") for n in range(64)])


@pytest.mark.parametrize(
    ("source", "settings", "expected"),
    [
        (lambda frame: frame, {}, True),
        (columns, {"columns": {"x": [f"f{n}" for n in range(64)]}}, True),
        (lambda frame: frame.selectExpr("array(id) x"), {}, False),  # of any length, as far as Spark knows
        (lambda frame: frame.selectExpr("array(id) x"), {"columns": {"y": ["x"]}}, False),
        (lambda frame: frame.selectExpr("cast(id as string) x"), {"vocabulary": {"x": ["1", "2"]}}, False),
        (lambda frame: frame.selectExpr("cast(id as string) x"), {"hash_buckets": {"x": 7}}, False),
        (lambda frame: frame.selectExpr("cast(cast(id as string) as binary) x"), {}, False),
        (doubled, {}, False),
        (in_pandas, {}, False),
        (lambda frame: doubled(frame).groupBy("id").count(), {}, False),
    ],
)
def test_only_small_rows_of_known_size_that_spark_computes_itself_go_unchecked(
    spark: Any, source: Any, settings: dict[str, Any], expected: bool
) -> None:
    exchange = Exchange({"train": tr.Data(source(spark.range(8)), **settings)}, 2)
    job = exchange.frame.mapInArrow(lambda batches: batches, SPARK_SCHEMA)
    assert out_of_reach(job, exchange.row_bytes) is expected


@pytest.mark.parametrize(
    ("array", "settings", "after"),
    [
        ("array(id, 1)", {}, True),
        ("array(array(id, 1), array(1, id))", {}, True),
        ("array_repeat(id, 1000)", {}, False),  # 10,000 of them are more than a batch may hold
        ("array_repeat(1, cast(id as int))", {"pad": {"x": 8}}, False),
    ],
)
def test_of_persisted_rows_the_lengths_of_arrays_are_known_when_a_gang_has_read_them(
    spark: Any, array: str, settings: dict[str, Any], after: bool
) -> None:
    frame = spark.range(8).selectExpr(f"{array} x")
    with Exchange({"train": tr.Data(frame, **settings)}, 2).persist() as kept:
        job = kept.frame.mapInArrow(lambda batches: batches, SPARK_SCHEMA)
        assert not out_of_reach(job, kept.row_bytes)
        for _ in range(2):
            assert sum(tr.launch(lambda: tr.world().shard("train").rows, data=kept, ranks=2, progress=False)) == 8
            assert out_of_reach(job, kept.row_bytes) is after
    assert not out_of_reach(job, kept.row_bytes)


def test_what_is_cached_of_a_python_function_is_checked(spark: Any) -> None:
    cached = doubled(spark.range(8)).persist()
    exchange = Exchange({"train": cached}, 2)
    assert not out_of_reach(exchange.frame.mapInArrow(lambda batches: batches, SPARK_SCHEMA), exchange.row_bytes)
    cached.unpersist()


@pytest.mark.parametrize("records", ["0", "1000000"])
def test_batches_of_as_many_rows_as_there_are_go_checked(spark: Any, records: str) -> None:
    exchange = Exchange({"train": spark.range(8)}, 2)
    job = exchange.frame.mapInArrow(lambda batches: batches, SPARK_SCHEMA)
    with set_to(spark, **{"spark.sql.execution.arrow.maxRecordsPerBatch": records}):
        assert not out_of_reach(job, exchange.row_bytes)


def test_it_is_so_in_the_gangs_own_job_alone_and_the_users_setting_wins(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = spark.range(8).mapInArrow(limits(), "limit long")
    launch = {"data": {"train": source}, "ranks": 2, "progress": False}
    assert tr.launch(seen, **launch) == [[0], [0]]  # its source is computed in Python
    monkeypatch.setattr(batch_bytes, "out_of_reach", lambda job, row_bytes: row_bytes is not None)
    assert tr.launch(seen, **launch) == [[int(UNCHECKED)], [int(UNCHECKED)]]
    assert {row.limit for row in source.collect()} == {0}
    with set_to(spark, **{SETTING: "1000000"}):
        assert tr.launch(seen, **launch) == [[1000000], [1000000]]
    monkeypatch.setattr("tritium.spark.inside._probed", {})
    monkeypatch.setattr("py4j.clientserver.ClientServer", type(None))  # as if threads shared the JVM's
    assert tr.launch(seen, **launch) == [[0], [0]]
