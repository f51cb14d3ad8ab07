"""KerasEstimator among Spark ML's own stages and tuners, and its models over batches and streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tritium as tr
from tritium.errors import BadRow, UntrustedModel
from tritium.ml import KerasEstimator, KerasModel

_before = os.environ.get("KERAS_BACKEND")
os.environ["KERAS_BACKEND"] = "torch"
import keras  # noqa: E402 - it reads the variable

if _before is None:
    del os.environ["KERAS_BACKEND"]
else:
    os.environ["KERAS_BACKEND"] = _before

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on torch
]
# pyspark's tuners leave their thread pools to the garbage collector.
POOL_OF_SPARK = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False}


@pytest.fixture(scope="module", autouse=True)
def _keras_settled(spark: SparkSession) -> None:
    """Train a first model, for which Keras imports TensorFlow where it is there, and torch makes threads."""
    import h5py  # noqa: F401 - sets an environment variable
    import tensorflow  # noqa: F401 - sets several

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(keras.ops.zeros((2, 1)), keras.ops.zeros((2, 1)), verbose=0)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Return 400 rows of y = 3a - 2b + 1, with a kind ("low", "high") that a and b decide, and a part marked held."""
    return (
        spark.range(0, 400, 1, 3)
        .withColumn("a", F.sin(F.col("id") * 1.7))
        .withColumn("b", F.cos(F.col("id") * 0.9))
        .withColumn("y", 3 * F.col("a") - 2 * F.col("b") + 1)
        .withColumn("kind", F.when(F.col("y") > 1, "high").otherwise("low"))
        .withColumn("held", F.col("id") % 4 == 0)
    )


def line() -> Any:
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def regression(**changes: Any) -> KerasEstimator:
    settings: dict[str, Any] = {
        "model": line,
        "loss": "mse",
        "optimizer": keras.optimizers.Adam(0.1),
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "epochs": 6,
        "batch_size": 16,
    }
    return KerasEstimator(**(settings | QUIET | changes))


def test_two_ranks_fit_a_line_that_a_batch_and_a_stream_are_scored_by(
    spark: SparkSession, rows: DataFrame, tmp_path: Path
) -> None:
    model = regression(ranks=2, validation="held", run_dir=str(tmp_path / "run"), metrics=["mae"]).fit(rows)
    assert isinstance(model, KerasModel)
    assert isinstance(model.keras(), keras.Sequential)
    assert model.history[-1]["validation_mae"] < 0.3
    assert [entry["rows"] for entry in model.history] == [300] * 6
    scored = model.setOutputCols(["guess"]).transform(rows)
    assert dict(scored.dtypes)["guess"] == "double"
    assert RegressionEvaluator(labelCol="y", predictionCol="guess", metricName="r2").evaluate(scored) > 0.9
    source, sink = str(tmp_path / "source"), str(tmp_path / "sink")
    rows.select("id", "a", "b").repartition(2).write.json(source)
    events = spark.readStream.schema("id long, a double, b double").option("maxFilesPerTrigger", 1).json(source)
    writer = model.transform(events).writeStream.format("parquet").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start(sink)
    assert query.awaitTermination(120)
    assert query.exception() is None
    found = spark.read.parquet(sink).orderBy("id").toPandas()
    np.testing.assert_allclose(found.guess, model.predict(found), rtol=1e-5, atol=1e-6)
    model.write().save(str(tmp_path / "model"))
    again = KerasModel.load(str(tmp_path / "model"))
    assert again.getOutputCols() == ["guess"]
    alone = tr.load(str(tmp_path / "model" / "model"))
    np.testing.assert_allclose(alone.predict(found), again.predict(found))


@POOL_OF_SPARK
def test_a_pipeline_with_a_cross_validator_of_a_classifier(
    spark: SparkSession, rows: DataFrame, tmp_path: Path
) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    indexer = StringIndexer(inputCol="kind", outputCol="label")
    classifier = regression(
        model=lambda: keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, "softmax")]),
        loss="sparse_categorical_crossentropy",
        feature_cols="features",
        label_cols="label",
        task="classification",
        ranks=1,
    )
    grid = ParamGridBuilder().addGrid(classifier.epochs, [6]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuner = CrossValidator(estimator=classifier, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1)
    fitted = Pipeline(stages=[assembler, indexer, tuner]).fit(rows)
    assert len(fitted.stages[-1].bestModel.history) == 6
    fitted.stages[-1] = fitted.stages[-1].bestModel
    scored = fitted.transform(rows)
    assert {"prediction": "double", "probability": "vector"}.items() <= dict(scored.dtypes).items()
    assert evaluator.evaluate(scored) > 0.9
    fitted.write().save(str(tmp_path / "pipeline"))
    again = PipelineModel.load(str(tmp_path / "pipeline"))
    first = [row.prediction for row in again.transform(rows).orderBy("id").limit(20).collect()]
    assert first == [row.prediction for row in scored.orderBy("id").limit(20).collect()]


def test_an_array_of_unknown_length_is_checked_in_the_ranks(spark: SparkSession, rows: DataFrame) -> None:
    arrays = rows.select(F.array("a", "b").alias("x"), (F.col("id") % 3).alias("c"))
    few = keras.Sequential([keras.layers.Dense(2, "softmax")])  # not built before the rows tell the length
    with pytest.raises(BadRow, match="holds the class 2, and the model gives 2 scores a row"):
        regression(model=few, loss="sparse_categorical_crossentropy", feature_cols="x", label_cols="c").fit(arrays)


@pytest.mark.usefixtures("saved_elsewhere")
def test_the_estimator_is_saved_and_loaded_for_who_trusts_it(spark: SparkSession, tmp_path: Path) -> None:
    place = str(tmp_path / "estimator")
    regression(model=line(), epochs=9).save(place)
    with pytest.raises(UntrustedModel, match=r"holds model, optimizer by value.*trustModels"):
        KerasEstimator.load(place)
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = KerasEstimator.load(place)
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    assert (again.getEpochs(), again.getFeatureCols()) == (9, ["a", "b"])
    assert isinstance(again.settings()[0].make_model(), keras.Sequential)
