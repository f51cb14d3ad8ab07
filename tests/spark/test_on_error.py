"""Rows without a prediction, on Spark: `on_error`, in a batch, in a stream, and counted by an Observation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.errors import PythonException
from pyspark.sql import Observation
from pyspark.sql import functions as F
from torch import nn

import tritium as tr
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature

SIGNATURE = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),))


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x[:, 0] < 0).any():
            raise ValueError(f"no {x[:, 0].min():g}")
        return x.sum(1, keepdim=True)


def table(spark: Any) -> Any:
    """Return 40 rows: 5 has a null, and 11 and 30 make the model raise."""
    negative = F.when(F.col("id").isin(11, 30), -F.col("id")).otherwise(F.col("id"))
    return spark.range(0, 40, 1, 2).select(
        "id", F.when(F.col("id") != 5, negative.cast("double")).alias("a"), F.lit(0.5).alias("b")
    )


REASONS = {5: "column 'a' is null", 11: "ValueError: no -11", 30: "ValueError: no -30"}


def test_a_column_of_reasons(spark: Any) -> None:
    model = TorchModel(tr.Model(Picky(), SIGNATURE), on_error="column", batch_size=7)
    seen = Observation()
    scored = model.transform(table(spark)).observe(
        seen, F.count("prediction").alias("scored"), F.count("prediction_error").alias("bad")
    )
    assert scored.columns == ["id", "a", "b", "prediction", "prediction_error"]
    found = scored.collect()
    assert {row.id: row.prediction_error for row in found if row.prediction_error is not None} == REASONS
    assert all((row.prediction is None) == (row.id in REASONS) for row in found)
    assert all(row.prediction == row.id + 0.5 for row in found if row.id not in REASONS)
    assert seen.get == {"scored": 37, "bad": 3}
    here = model.transform(table(spark).toPandas()).sort_values("id")
    assert here.prediction_error.tolist() == [{**REASONS, 5: "column 'a' is NaN"}.get(i) for i in range(40)]
    assert model.setParams(on_error="null").transform(table(spark)).where("prediction is null").count() == 3
    assert model.setParams(on_error="skip").transform(table(spark)).count() == 37
    with pytest.raises(PythonException, match="no -"):
        model.setParams(on_error="fail").transform(table(spark).dropna()).collect()


def test_classes_words_and_several_outputs(spark: Any) -> None:
    class Classes(Picky):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.tensor([[0.0, 1.0]])

    class Both(Picky):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    words = {"w": ["no", "yes"]}
    classes = Signature(SIGNATURE.inputs, (Output("y", shape=(2,)),), "classification")
    model = TorchModel(tr.Model(Classes(), classes, label_words=words), on_error="column", error_col="why")
    for row in model.transform(table(spark)).collect():
        assert row.why == REASONS.get(row.id)
        assert (row.probability is None) == (row.rawPrediction is None) == (row.prediction is None)
        assert row.prediction_label == (None if row.why else "yes")
    both = Signature(SIGNATURE.inputs, (Output("y"), Output("x", shape=(2,))))
    model = TorchModel(tr.Model(Both(), both), on_error="column").setOutputCols(["sum", "same"])
    for row in model.transform(table(spark)).collect():
        assert row.prediction_error == REASONS.get(row.id)
        assert (row["sum"], row.same) == ((None, None) if row.prediction_error else (row.id + 0.5, [row.id, 0.5]))


def test_a_model_that_always_raises_ends_the_job(spark: Any) -> None:
    model = TorchModel(tr.Model(Picky(), SIGNATURE), on_error="column")
    with pytest.raises(PythonException, match="ValueError: no -1"):
        model.transform(table(spark).withColumn("a", F.lit(-1.0))).collect()


def test_a_stream_goes_on_and_counts_them_in_its_progress(spark: Any, tmp_path: Path) -> None:
    table(spark).write.parquet(str(tmp_path / "in"))
    model = TorchModel(tr.Model(Picky(), SIGNATURE), on_error="column")
    stream = model.transform(spark.readStream.schema(table(spark).schema).parquet(str(tmp_path / "in")))
    counted = stream.observe("scoring", F.count(F.lit(1)).alias("rows"), F.count("prediction_error").alias("bad"))
    query = counted.writeStream.format("memory").queryName("reasons").start()
    try:
        query.processAllAvailable()
        found = spark.table("reasons").collect()
        seen = [progress.observedMetrics["scoring"] for progress in query.recentProgress if progress.observedMetrics]
    finally:
        query.stop()
        spark.catalog.dropTempView("reasons")
    assert {row.id: row.prediction_error for row in found if row.prediction_error is not None} == REASONS
    assert (sum(row.rows for row in seen), sum(row.bad for row in seen)) == (40, 3)
    np.testing.assert_array_equal(
        sorted(row.prediction for row in found if row.prediction is not None),
        [i + 0.5 for i in range(40) if i not in REASONS],
    )


class Sizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) * 0 + len(x)


@pytest.mark.parametrize(("batch_size", "calls"), [(25, {25: 25, 5: 5, 20: 20}), ("auto", {50: 50})])
def test_batches_of_arrow_are_put_together_for_a_call(spark: Any, batch_size: Any, calls: dict[int, int]) -> None:
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
    try:
        df = spark.range(0, 50, 1, 1).select("id", F.lit(0.0).alias("a"), F.lit(0.0).alias("b"))
        found = TorchModel(tr.Model(Sizes(), SIGNATURE), batch_size=batch_size).transform(df).orderBy("id").collect()
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    assert [row.id for row in found] == list(range(50))
    assert {size: sum(row.prediction == size for row in found) for size in calls} == calls
