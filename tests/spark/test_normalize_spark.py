"""normalize= on Spark: means and deviations of scalars, arrays and vectors, as of a table, in batch and stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F
from torch import nn

from tritium.ml import TorchEstimator
from tritium.ml.columns import find_columns
from tritium.ml.normalize import with_means
from tritium.ml.torch.settings import TorchSettings

COLS: dict[str, Any] = {"x": ["a", "b", "d"], "vector": "vector", "matrix": "matrix", "alone": "a", "f": "f"}


def table(spark: Any) -> Any:
    df = spark.range(0, 60, 1, 3).select(
        "id",
        (F.sin("id") * 1000 + 1.7e9).alias("a"),
        F.expr("IF(id % 7 = 0, NULL, CAST(id AS INT))").alias("b"),
        (F.col("id") / 3).cast("decimal(10,2)").alias("d"),
        F.array(F.cos("id").cast("float"), F.lit(2.0).cast("float")).alias("f"),
        F.expr("array(array(id, id * id), array(-id, 1))").cast("array<array<double>>").alias("matrix"),
        (F.col("id") % 3 == 0).alias("held"),
        F.lit(0.0).alias("y"),
    )
    return VectorAssembler(inputCols=["a", "d"], outputCol="vector").transform(df)


def test_as_of_a_table(spark: Any) -> None:
    settings = TorchSettings(
        model=lambda: nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.0),
        feature_cols=COLS,
        label_cols=["y"],
        normalize=True,
        nulls={"b": 5},
    )
    df = table(spark)
    pandas = df.toPandas()
    pandas["d"] = pandas.d.astype(float)
    for column in ("f", "matrix", "vector"):
        pandas[column] = [np.array(list(row)).tolist() for row in pandas[column]]
    import pyarrow as pa

    rows = pa.Table.from_pandas(pandas, preserve_index=False)
    expected = with_means(rows, settings, find_columns(rows, settings)).values["normalize"]
    found = with_means(df, settings, find_columns(df, settings)).values["normalize"]
    assert found.keys() == expected.keys() == set(COLS)
    for name, pair in found.items():
        np.testing.assert_allclose(np.ravel(pair[0]), np.ravel(expected[name][0]), rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(np.ravel(pair[1]), np.ravel(expected[name][1]), rtol=1e-6, err_msg=name)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        parts = [value.reshape(len(value), -1).sum(1, keepdim=True) for value in inputs.values()]
        return sum(parts) + 0 * self.weight  # type: ignore[return-value]


@pytest.mark.timeout(300)
def test_batch_stream_and_pandas_are_normalised_by_the_rows_to_train_on(spark: Any, tmp_path: Path) -> None:
    df = table(spark).drop("vector")
    model = TorchEstimator(
        model=Sum,
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.0),
        feature_cols={"x": ["a", "d"], "f": "f"},
        label_cols=["y"],
        normalize=True,
        validation="held",
        progress=False,
        output="none",
        verbose=False,
    ).fit(df)
    rows = df.orderBy("id").toPandas()
    rows["d"] = rows.d.astype(float)
    rows["cos"] = [row[0] for row in rows.f]
    used = rows[~rows.held]
    expected = sum((rows[c] - used[c].mean()) / used[c].std(ddof=0) for c in ("a", "d", "cos"))
    found = model.transform(df).orderBy("id").toPandas().prediction
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(model.transform(rows).prediction, expected, atol=1e-5)
    df.coalesce(1).write.parquet(str(tmp_path / "in"))
    stream = model.transform(spark.readStream.schema(df.schema).parquet(str(tmp_path / "in")))
    query = stream.writeStream.format("memory").queryName("normalised").start()
    try:
        query.processAllAvailable()
        np.testing.assert_allclose(spark.table("normalised").orderBy("id").toPandas().prediction, expected, atol=1e-5)
    finally:
        query.stop()
        spark.catalog.dropTempView("normalised")
