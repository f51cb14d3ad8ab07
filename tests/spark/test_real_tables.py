"""Real tables on Spark: words, images, nulls, and rows that a model can not take, in batches and streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.errors import PythonException
from pyspark.sql import functions as F
from torch import nn

import tritium as tr
from tritium.ml import TorchEstimator, TorchModel
from tritium.model.signature import Input, Output, Signature

FEATURES = Input("features", ("a", "b", "c"), "float32", (3,))


def table(spark: Any, count: int = 200) -> Any:
    return spark.range(0, count, 1, 2).select(
        "id",
        (F.col("id") / 7).alias("a"),
        F.sin("id").cast("float").alias("b"),
        (F.col("id") % 5).cast("int").alias("c"),
        F.concat(F.lit("secret-"), "id").alias("other"),
    )


class Words(nn.Module):
    """A model of two numbers, the index of a word, and the mean of an image."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(words, 2), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, city: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, self.words(city), image.mean((1, 2))[:, None]], 1))


def real_table(spark: Any, rows: int = 120) -> Any:
    """Return rows of which every tenth has a null, a NaN, an unknown word, or an image that can't be decoded."""
    bad = F.when(F.col("id") % 10 == 3, F.col("id") % 4).otherwise(-1)
    city = F.element_at(F.array(*map(F.lit, ["Rome", "Oslo", "Rome", "Lima"])), (F.col("id") % 4 + 1).cast("int"))
    return spark.range(0, rows, 1, 3).select(
        "id",
        F.when(bad == 0, F.lit(None)).when(bad == 1, F.lit(float("nan"))).otherwise(F.sin("id")).alias("a"),
        F.cos("id").alias("b"),
        F.when(bad == 2, "Bonn").otherwise(city).alias("city"),
        F.when(bad == 3, F.lit(b"??"))
        .otherwise(F.expr("cast(repeat(char(id % 90 + 33), 4) as binary)"))
        .alias("image"),
        (bad == -1).alias("good"),
        (F.col("id") % 2).alias("label"),
    )


def test_a_real_table_needs_no_preparation(spark: Any, tmp_path: Path) -> None:
    """Words are learnt in Spark, images decoded in ranks and executors, and rows that can't be used do no harm."""
    rows = real_table(spark)
    estimator = TorchEstimator(
        model=lambda vocabulary: Words(len(vocabulary["city"])),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda module: torch.optim.Adam(module.parameters(), 0.01),
        feature_cols={"x": ["a", "b"], "city": "city", "image": "image"},
        label_cols="label",
        vocabulary=["city"],
        decode={"image": lambda content: np.frombuffer(content, np.uint8).reshape(2, 2).astype(np.float32) / 255},
        prediction_col="class",
        probability_col="chance",
        handle_invalid="keep",
        ranks=2,
        verbose=False,
        progress=False,
        output="none",
    )
    model = estimator.fit(rows.where("good").drop("good"))
    assert model.signature.inputs[1].codec["vocabulary"] == ("Rome", "Lima", "Oslo")
    found = model.transform(rows).orderBy("id").toPandas()
    assert (found["class"].notna() == found["good"]).all()
    assert (found["chance"].notna() == found["good"]).all()
    alone = model.transform(rows.where("good").toPandas())
    np.testing.assert_array_equal(found.loc[found["good"], "class"], alone["class"])
    skipping = model.copy().setParams(handle_invalid="skip")
    assert skipping.transform(rows).where(~F.col("good")).count() == 0
    assert skipping.transform(rows).count() == int(found["good"].sum())
    with pytest.raises(PythonException, match="handle_invalid='skip'"):
        model.copy().setParams(handle_invalid="error").transform(rows).collect()

    model.write().save(str(tmp_path / "model"))
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = TorchModel.load(str(tmp_path / "model"))
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    assert again.getOrDefault("handle_invalid") == "keep"
    np.testing.assert_array_equal(again.transform(rows).orderBy("id").toPandas()["class"], found["class"])

    rows.coalesce(1).write.parquet(str(tmp_path / "stream"))
    stream = again.transform(spark.readStream.schema(rows.schema).parquet(str(tmp_path / "stream")))
    query = stream.writeStream.format("memory").queryName("real_table").outputMode("append").start()
    try:
        query.processAllAvailable()
        streamed = spark.table("real_table").orderBy("id").toPandas()
    finally:
        query.stop()
        spark.catalog.dropTempView("real_table")
    np.testing.assert_array_equal(streamed["class"], found["class"])


@pytest.mark.parametrize("many", [False, True])
def test_arrays_of_predictions_for_rows_that_can_and_can_not_be_used(spark: Any, many: bool) -> None:
    """One output of several numbers, and several outputs: null arrays, and null in each column."""
    outputs = (Output("y", shape=(2,)), Output("z", shape=(1,))) if many else (Output("y", shape=(2,)),)
    module: nn.Module = TwoOutputs() if many else nn.Linear(3, 2)
    model = TorchModel(tr.Model(module, Signature((FEATURES,), outputs)), handle_invalid="keep")
    df = table(spark).withColumn("a", F.when(F.col("id") % 3 == 0, None).otherwise(F.col("a")))
    names = ["y", "z"] if many else ["prediction"]
    found = (model.setOutputCols(names) if many else model).transform(df).orderBy("id").toPandas()
    for name in names:
        assert (found[name].isna() == (found["id"] % 3 == 0)).all()
    assert model.setParams(handle_invalid="skip").transform(df).count() == int(found["a"].notna().sum())
    empty = model.transform(df.where("a is null"))
    assert empty.count() == 0
    assert (
        model.setParams(handle_invalid="keep").transform(df.where("a is null")).where(f"{names[0]} is null").count()
        == 67
    )


class TwoOutputs(nn.Module):
    """A module that returns a vector and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.line(x), self.line(x)[:, :1]
