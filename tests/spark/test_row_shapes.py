"""The shapes of rows are known on the driver by Spark's plan, and by the first row where Spark has it at hand."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tritium.ml.columns import find_columns
from tritium.ml.row_shapes import with_shapes
from tritium.ml.torch.settings import TorchSettings
from tritium.spark.inside.plans import is_at_hand


def shape_of(frame: DataFrame, column: str) -> Any:
    settings = TorchSettings(model=lambda: None, loss=len, optimizer=len, feature_cols=column, label_cols="id")
    fields = {field.name: field for field in find_columns(frame, settings).fields(frame, "train")}
    return with_shapes(frame, fields, settings)["features"].shape


def jobs_of(spark: SparkSession, function: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a function returns, and how many jobs it has started."""
    context, group = spark.sparkContext, str(uuid.uuid4())
    context.setJobGroup(group, "")
    found = function()
    context._jsc.clearJobGroup()
    return found, len(context.statusTracker().getJobIdsForGroup(group))


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    return spark.range(0, 40, 1, 4).withColumn("a", F.rand(1))


def shuffled(frame: DataFrame) -> DataFrame:
    return frame.groupBy("id").agg(F.max("a").alias("a"))


@pytest.mark.parametrize("expensive", [False, True])
def test_of_an_array_of_columns_the_plan_has_it_whatever_the_rows_come_from(
    spark: SparkSession, rows: DataFrame, expensive: bool
) -> None:
    frame = shuffled(rows) if expensive else rows
    frame = frame.withColumn("x", F.array("a", F.col("a") * 2, F.lit(1.0)).cast("array<float>")).where("a > 0.5")
    frame = frame.withColumnRenamed("x", "y").select("id", F.col("y").alias("z"))
    assert jobs_of(spark, lambda: shape_of(frame, "z")) == ((3,), 0)


def test_of_local_rows_nothing_is_computed(spark: SparkSession) -> None:
    local = spark.sql("SELECT * FROM VALUES (1, array(1.0D, 2.0D)), (2, array(3.0D, 4.0D)) AS t(id, x)")
    assert jobs_of(spark, lambda: shape_of(local, "x")) == ((2,), 0)


def test_of_a_file_the_first_row_is_read(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    made = rows.select("id", F.array_repeat(F.array("a", "a"), 3).alias("x"), F.array("a").alias("v"))
    made.write.parquet(str(tmp_path / "rows"))
    file = spark.read.parquet(str(tmp_path / "rows")).dropna(subset=["x"])
    assert jobs_of(spark, lambda: shape_of(file, "x")) == ((3, 2), 1)
    assert shape_of(file.unionByName(file), "v") == (1,)


def test_of_vectors(spark: SparkSession, rows: DataFrame) -> None:
    make = F.udf(lambda a: Vectors.sparse(5, [1], [a]), VectorUDT())
    vectors = rows.select("id", make("a").alias("x")).persist()
    assert shape_of(vectors, "x") is None, "it is not cached yet"
    vectors.count()
    assert shape_of(vectors, "x") == (5,)
    assert shape_of(vectors.select("id", vector_to_array("x").alias("x")), "x") is None, "a function of the user's"
    vectors.unpersist(blocking=True)


def test_an_expensive_source_is_left_alone(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    rows.withColumn("x", F.split(F.lit("1,2"), ",").cast("array<float>")).write.parquet(str(tmp_path / "rows"))
    file = spark.read.parquet(str(tmp_path / "rows"))
    double = F.udf(lambda x: [2 * n for n in x], "array<float>")
    for frame in (
        file.where("a > 0.99"),
        file.groupBy("id").agg(F.first("x").alias("x")),
        file.orderBy("a"),
        file.join(rows.select("id"), "id"),
        file.withColumn("x", double("x")),
        file.repartition(3),
        spark.createDataFrame(file.rdd, file.schema),
        file.distinct(),
    ):
        assert not is_at_hand(frame)
        assert jobs_of(spark, lambda frame=frame: shape_of(frame, "x")) == (None, 0)  # type: ignore[misc]
