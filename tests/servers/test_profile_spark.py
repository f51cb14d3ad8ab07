"""`tr.profile` of Spark's DataFrames: one job, numbers as those of pandas, ranks as the exchange deals them."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tritium as tr
from tritium.errors import BadData


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Random rows in 3 partitions, of which the last is the largest."""
    frame = spark.range(0, 6000, 1, 3).where("id < 500 or id % 2 = 0 and id < 2500 or id > 3990")
    draw = F.rand(3)
    return frame.select(
        "id",
        F.when(draw < 0.1, None).when(draw < 0.2, F.lit(float("nan"))).otherwise(F.rand(5) * 100).alias("x"),
        (F.col("id") % 7).cast("decimal(9,2)").alias("cents"),
        F.timestamp_micros(F.col("id") * 1_000_000).alias("t"),
        array_to_vector(F.array(F.col("id").cast("double"), F.lit(2.0))).alias("v"),
        (F.col("id") % 11).cast("string").alias("word"),
    ).localCheckpoint()


def test_its_numbers_are_those_of_pandas_and_one_job_has_them(spark: SparkSession, rows: DataFrame) -> None:
    words = [str(number) for number in range(10)]
    data = tr.Data(rows, {"f": ["x", "cents"], "t": "t", "v": "v", "word": "word"}, vocabulary={"word": words})
    group = str(uuid.uuid4())
    spark.sparkContext.setJobGroup(group, "")
    profile = tr.profile(data, ranks=2, batch_size=64)
    spark.sparkContext._jsc.clearJobGroup()
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup(group)) == 1
    table = rows.select("id", "x", "cents", "t", "word", F.isnull("x").alias("absent")).toPandas()
    columns = {one.name: one for one in profile.columns}
    assert profile.rows == len(table)
    assert profile.partitions == tuple(
        row["count"] for row in rows.groupBy(F.spark_partition_id().alias("p")).count().orderBy("p").collect()
    )
    assert columns["x"].nulls == table.absent.sum()
    assert columns["x"].nan == table.x.isna().sum() - table.absent.sum()
    assert columns["x"].range == (table.x.min(), table.x.max())
    assert columns["cents"].range == (0.0, 6.0)
    assert columns["v"].range == (0.0, float(table.id.max()))
    assert columns["v"].lengths == (2, 2)
    assert columns["t"].range[1].timestamp() - columns["t"].range[0].timestamp() == table.id.max() - table.id.min()
    unknown = table.word == "10"
    assert profile.refused == (table.x.isna() | unknown).sum()
    assert [text.split(";")[0] for text in profile.problems] == [
        f"{n:,} rows" for n in (table.x.isna().sum(), unknown.sum())
    ]
    assert profile.skew == pytest.approx(max(profile.partitions) / np.mean(profile.partitions))


def counted() -> int:
    return tr.world().shard("train").rows


def test_ranks_get_the_rows_that_it_has_told(spark: SparkSession, rows: DataFrame) -> None:
    many = rows.select("id").unionAll(rows.select("id"))
    for frame, more in ((many, {}), (rows.select("id"), {"together": "id"})):
        data = tr.Data(frame, **more)  # type: ignore[arg-type]
        profile = tr.profile(data, ranks=2)
        assert profile.ok
        assert list(profile.rank_rows) == tr.launch(counted, ranks=2, data={"train": data}, progress=False)


def test_skew_gets_a_hint_and_a_sample_is_one(spark: SparkSession) -> None:
    frame = spark.range(0, 30_000, 1, 3).where("id < 10000 or id % 1000 = 0")
    profile = tr.profile(frame, ranks=2, fraction=0.5)
    assert profile.hints[0].startswith("source partition 0 has 100% of all rows")
    assert sum(profile.rank_rows) == pytest.approx(10_020, rel=0.05)


def test_arrays_whose_length_differs_between_partitions_are_refused(spark: SparkSession) -> None:
    frame = spark.range(0, 20, 1, 2).select(
        F.when(F.col("id") < 10, F.array("id")).otherwise(F.array("id", "id")).alias("v")
    )
    (problem,) = tr.profile(frame).problems
    assert "rows of the shapes (1,), (2,) in different source partitions" in problem
    assert "pad={'v': 2}" in problem


def test_a_stream_has_no_profile(spark: SparkSession) -> None:
    stream: Any = spark.readStream.format("rate").load()
    with pytest.raises(BadData, match="streaming DataFrame"):
        tr.profile(stream)
