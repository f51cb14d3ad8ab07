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
from tritium.ml.function.settings import FunctionSettings
from tritium.ml.vocabulary import with_words
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
        on_error="null",
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
    skipping = model.copy().setParams(on_error="skip")
    assert skipping.transform(rows).where(~F.col("good")).count() == 0
    assert skipping.transform(rows).count() == int(found["good"].sum())
    with pytest.raises(PythonException, match="on_error='skip'"):
        model.copy().setParams(on_error="fail").transform(rows).collect()

    model.write().save(str(tmp_path / "model"))
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = TorchModel.load(str(tmp_path / "model"))
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    assert again.getOrDefault("on_error") == "null"
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


def test_the_words_of_several_columns_are_learnt_as_from_a_table(spark: Any) -> None:
    """Columns of strings and of arrays of them, of which Spark numbers the elements."""
    rows = [("Rome", ["b", "a"], None), ("Oslo", ["c", "a", "b"], "x"), ("Rome", ["b"], "y"), (None, None, "y")]
    frame = spark.createDataFrame(rows, "city string, tags array<string>, kind string").coalesce(1)
    columns = ["city", "tags", "kind"]
    settings = FunctionSettings(train=print, predict=print, feature_cols={c: c for c in columns}, vocabulary=columns)
    learnt = with_words(frame, settings).words()
    assert learnt == {"city": ("Rome", "Oslo"), "tags": ("b", "a", "c"), "kind": ("y", "x")}
    assert with_words(frame.toArrow(), settings).words() == learnt


@pytest.mark.parametrize("many", [False, True])
def test_arrays_of_predictions_for_rows_that_can_and_can_not_be_used(spark: Any, many: bool) -> None:
    """One output of several numbers, and several outputs: null arrays, and null in each column."""
    outputs = (Output("y", shape=(2,)), Output("z", shape=(1,))) if many else (Output("y", shape=(2,)),)
    module: nn.Module = TwoOutputs() if many else nn.Linear(3, 2)
    model = TorchModel(tr.Model(module, Signature((FEATURES,), outputs)), on_error="null")
    df = table(spark).withColumn("a", F.when(F.col("id") % 3 == 0, None).otherwise(F.col("a")))
    names = ["y", "z"] if many else ["prediction"]
    found = (model.setOutputCols(names) if many else model).transform(df).orderBy("id").toPandas()
    for name in names:
        assert (found[name].isna() == (found["id"] % 3 == 0)).all()
    assert model.setParams(on_error="skip").transform(df).count() == int(found["a"].notna().sum())
    empty = model.transform(df.where("a is null"))
    assert empty.count() == 0
    assert model.setParams(on_error="null").transform(df.where("a is null")).where(f"{names[0]} is null").count() == 67


class TwoOutputs(nn.Module):
    """A module that returns a vector and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.line(x), self.line(x)[:, :1]


class Numbered:
    """A map-style dataset, of which each array tells its index."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.full(2, index / 120, np.float32)


class Beside(nn.Module):
    """A model of numbers, of what is in a file, and of a row of a dataset."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, both], 1))


def test_files_and_a_dataset_beside_the_dataframe_and_a_transform(spark: Any, tmp_path: Path) -> None:
    """Paths and indices are decoded, and inputs changed, in ranks, executors, streams, and without Spark."""
    for number in range(120):
        np.full(2, number, np.float32).tofile(tmp_path / f"{number}")
    path = F.concat(F.lit(f"{tmp_path}/"), F.col("id").cast("string"))
    rows = spark.range(0, 120, 1, 3).select(
        "id",
        F.sin("id").alias("a"),
        F.cos("id").alias("b"),
        F.when(F.col("id") == 7, F.lit("no/such")).otherwise(path).alias("path"),
        F.when(F.col("id") == 8, 500).otherwise(F.col("id") * 7 % 120).cast("int").alias("index"),
        (F.col("id") / 120).alias("y"),
    )

    def transform(inputs: Any, training: bool) -> Any:
        noise = torch.rand(()) / 100 if training else 0.0
        return {"x": inputs["x"] * 2 + noise, "both": torch.cat([inputs["file"] / 120, inputs["row"]], 1)}

    good = ~F.col("id").isin(7, 8)
    model = TorchEstimator(
        model=Beside,
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        feature_cols={"x": ["a", "b"], "file": "path", "row": "index"},
        label_cols=["y"],
        decode={"path": lambda path: np.fromfile(path, np.float32), "index": Numbered()},
        transform=transform,
        validation=0.2,
        on_error="null",
        ranks=2,
        verbose=False,
        progress=False,
        output="none",
    ).fit(rows.where(good))
    assert [taken.types for taken in model.signature.inputs] == [("number", "number"), ("string",), ("number",)]
    found = model.transform(rows).orderBy("id").toPandas()
    assert list(found["id"][found["prediction"].isna()]) == [7, 8]
    x = found[["a", "b"]].to_numpy(np.float32) * 2
    both = np.repeat(np.stack([found["id"], found["index"]], 1), 2, 1) / 120
    by_hand = model.module()(torch.tensor(x), torch.tensor(both, dtype=torch.float32)).detach().numpy()[:, 0]
    kept = found["prediction"].notna()
    np.testing.assert_allclose(found["prediction"][kept], by_hand[kept], rtol=1e-4, atol=1e-5)
    here = model.transform(rows.toPandas())
    np.testing.assert_allclose(here["prediction"], found["prediction"], rtol=1e-5)  # computed in other batches
    with pytest.raises(PythonException, match="index 500, and the dataset has 120 rows"):
        model.copy().setParams(on_error="fail").transform(rows.where("id > 7")).collect()

    model.write().save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model" / "model"), trusted=True)
    np.testing.assert_allclose(again.predict(rows.where(good).toPandas()), found["prediction"][kept], rtol=1e-5)

    rows.coalesce(1).write.parquet(str(tmp_path / "stream"))
    stream = model.transform(spark.readStream.schema(rows.schema).parquet(str(tmp_path / "stream")))
    query = stream.writeStream.format("memory").queryName("beside").outputMode("append").start()
    try:
        query.processAllAvailable()
        streamed = spark.table("beside").orderBy("id").toPandas()
    finally:
        query.stop()
        spark.catalog.dropTempView("beside")
    np.testing.assert_allclose(streamed["prediction"], found["prediction"], rtol=1e-5)
