"""TorchEstimator among Spark ML's own stages, tuners and evaluators."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from tritium.errors import BadData, BadSetting, RankFailed, TrainingDiverged, UntrustedModel
from tritium.ml import TorchEstimator, TorchModel
from tritium.ml.fitting import prepare
from tritium.ml.torch.backend import TorchBackend
from tritium.ml.torch.module import make_module

pytestmark = pytest.mark.timeout(400)
# pyspark's tuners leave their thread pools to the garbage collector.
POOL_OF_SPARK = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False}


@pytest.fixture(scope="module", autouse=True)
def _torch_settled(spark: SparkSession) -> None:
    """Make a first optimizer, for which torch sets an environment variable and a cache directory."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)


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


def regression(**changes: Any) -> TorchEstimator:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": nn.MSELoss(),
        "optimizer": lambda p: torch.optim.Adam(p, 0.1),
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "epochs": 6,
        "batch_size": 16,
    }
    return TorchEstimator(**(settings | QUIET | changes))


def kept(spark: SparkSession) -> int:
    """Return the number of datasets in Spark's block storage."""
    return int(spark.sparkContext._jsc.getPersistentRDDs().size())


def test_two_ranks_fit_a_line(rows: DataFrame, tmp_path: Path) -> None:
    model = regression(ranks=2, validation="held", run_dir=str(tmp_path / "run")).fit(rows)
    assert isinstance(model, TorchModel)
    assert model.history[-1]["validation_loss"] < 0.1
    assert [entry["rows"] for entry in model.history] == [300] * 6
    assert [taken.columns for taken in model.signature.inputs] == [("a", "b")]
    assert isinstance(model.module(), nn.Linear)
    scored = model.transform(rows)
    assert dict(scored.dtypes)["prediction"] == "double"
    assert RegressionEvaluator(labelCol="y", metricName="r2").evaluate(scored) > 0.9
    assert (tmp_path / "run" / "weights.safetensors").exists()


def test_fits_on_every_cluster_while_the_shuffle_is_read(cluster: Any) -> None:
    rows = cluster.spark.range(0, 100, 1, 3).selectExpr("id % 2 == 0 as even", "sin(id) as a", "2 * sin(id) - 1 as y")
    model = regression(
        ranks=2,
        feature_cols=["a"],
        model=lambda: nn.Linear(1, 1),
        epochs=3,
        shuffle="stream",
        seed=1,
        validation="even",
    ).fit(rows)
    assert [entry["rows"] for entry in model.history] == [50] * 3
    losses = [entry["validation_loss"] for entry in model.history]
    assert losses == sorted(losses, reverse=True)
    scored = model.transform(rows).toPandas()
    assert ((scored.prediction - scored.y)[scored.even] ** 2).mean() == pytest.approx(losses[-1], rel=1e-5)


def test_a_pipeline_of_assembler_indexer_and_classifier(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    indexer = StringIndexer(inputCol="kind", outputCol="label")
    classifier = regression(
        model=lambda: nn.Linear(2, 2),
        loss=nn.CrossEntropyLoss(),
        feature_cols="features",
        label_cols="label",
        task="classification",
    )
    fitted = Pipeline(stages=[assembler, indexer, classifier]).fit(rows)
    scored = fitted.transform(rows)
    assert {"prediction": "double", "probability": "vector"}.items() <= dict(scored.dtypes).items()
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.9
    fitted.write().save(str(tmp_path / "pipeline"))
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = PipelineModel.load(str(tmp_path / "pipeline"))
        first = [row.prediction for row in again.transform(rows).orderBy("id").limit(20).collect()]
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    assert first == [row.prediction for row in scored.orderBy("id").limit(20).collect()]


@POOL_OF_SPARK
def test_a_cross_validator_whose_gangs_take_every_slot(
    spark: SparkSession, rows: DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator = regression(ranks=2, epochs=2, run_dir=str(tmp_path / "run"), progress=True, verbose=True)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 6]).build()
    before = kept(spark)
    best = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y", metricName="rmse"),
        numFolds=2,
        parallelism=1,
        seed=1,
    ).fit(rows)
    assert best.avgMetrics[1] < best.avgMetrics[0]
    assert len(best.bestModel.history) == 6
    assert kept(spark) == before
    folders = {str(file.parent.relative_to(tmp_path / "run")) for file in tmp_path.rglob("params.json")}
    assert folders == {"epochs=1/1", "epochs=1/2", "epochs=6/1", "epochs=6/2", "epochs=6/3"}, "two folds, then all rows"
    assert json.loads((tmp_path / "run/epochs=6/3/params.json").read_text()) == {"epochs": "6"}
    lines = capsys.readouterr().out.splitlines()
    for fold in (1, 2):
        assert any(line.startswith(f"tritium fold {fold}/2 training 2/2: param map epochs=6") for line in lines)
        assert any(line.startswith(f"tritium fold {fold}/2 training 2/2: epoch 6/6, step ") for line in lines)
    assert any(line.startswith("tritium best: epoch 6/6") for line in lines)


def test_forgotten_ranks_are_said_where_there_is_room(rows: DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    regression(epochs=1, progress=True).fit(rows)
    said = "tritium: one rank, as ranks= was not given, on a cluster with 2 slots: ranks=2 trains on all of them"
    assert said in capsys.readouterr().out.splitlines()
    regression(epochs=1, progress=True, ranks=1).fit(rows)
    assert "was not given" not in capsys.readouterr().out


@POOL_OF_SPARK
def test_a_train_validation_split_over_settings(rows: DataFrame, tmp_path: Path) -> None:
    estimator = regression(epochs=3, run_dir=str(tmp_path))
    grid = (
        ParamGridBuilder()
        .addGrid(estimator.optimizer, [lambda p: torch.optim.SGD(p, 1e-6), lambda p: torch.optim.Adam(p, 0.1)])
        .build()
    )
    best = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=RegressionEvaluator(labelCol="y"), seed=1, parallelism=2
    ).fit(rows)
    assert best.validationMetrics[1] < best.validationMetrics[0]
    numbers = sorted(sorted(os.listdir(place)) for place in tmp_path.glob("optimizer=_lambda_-*"))
    assert numbers == [["1"], ["1", "2"]], "the better one once more, on all rows"


def test_trainings_that_read_the_same_rows_compute_the_source_once(spark: SparkSession, rows: DataFrame) -> None:
    seen = spark.sparkContext.accumulator(0)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            seen.add(batch.num_rows)
            yield batch

    source = rows.select("a", "b", "y").mapInArrow(count, "a double, b double, y double")
    estimator = regression(epochs=1)
    maps = [{estimator.seed: 1}, {estimator.seed: 2}, {estimator.feature_cols: ["b", "a"]}]
    before = kept(spark)
    models = dict(estimator.fitMultiple(source, maps))
    assert sorted(models) == [0, 1, 2]
    assert models[0].history != models[1].history
    assert models[2].signature.columns == ("b", "a")
    assert seen.value == 2 * 400, "once for the two that read the same, once for the third"
    assert kept(spark) == before


def test_an_exchange_is_given_back_after_an_error(spark: SparkSession, rows: DataFrame) -> None:
    estimator = regression(epochs=1)
    wild = lambda p: torch.optim.SGD(p, 1e30)  # noqa: E731
    before = kept(spark)
    trainings = estimator.fitMultiple(rows, [{estimator.optimizer: wild}, {estimator.seed: 2}])
    with pytest.raises(TrainingDiverged):
        next(trainings)
    assert kept(spark) == before
    with pytest.raises(TrainingDiverged):
        next(trainings)


def test_rows_to_validate_on_are_chosen_in_three_ways(spark: SparkSession, rows: DataFrame) -> None:
    def parts(validation: Any, seed: int = 0) -> tuple[int, int]:
        data = prepare(TorchBackend(), rows, *regression(validation=validation, seed=seed).settings()).data
        frames = (
            one.frame if one.where is None else one.frame.where(F.col(one.where[0]) == one.where[1])
            for one in (data["train"], data["validation"])
        )
        train, held = (frame.count() for frame in frames)
        return train, held

    train, validation = parts(0.25)
    assert train + validation == 400
    assert 60 < validation < 140
    assert parts(0.25) == (train, validation)
    assert parts(0.25, seed=1) != (train, validation)
    assert parts("held") == (300, 100)
    assert parts(rows.where("held")) == (400, 100)


@pytest.mark.usefixtures("saved_elsewhere")
def test_the_estimator_is_saved_with_its_code_and_loaded_for_who_trusts_it(spark: SparkSession, tmp_path: Path) -> None:
    place = str(tmp_path / "estimator")
    estimator = regression(epochs=9, ranks=2, task="regression")
    estimator.save(place)
    with pytest.raises(UntrustedModel, match=r"holds loss, model, optimizer by value.*trustModels"):
        TorchEstimator.load(place)
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = TorchEstimator.load(place)
        assert Pipeline(stages=[estimator]).getStages()[0].uid == again.uid
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    assert (again.getEpochs(), again.getRanks(), again.getFeatureCols()) == (9, 2, ["a", "b"])
    assert isinstance(make_module(again.settings()[0]), nn.Linear)
    with pytest.raises(BadSetting, match="validation is a DataFrame"):
        regression(validation=spark.range(1)).write().overwrite().save(place)


def test_what_does_not_fit_is_refused_before_anything_starts(spark: SparkSession, rows: DataFrame) -> None:
    with pytest.raises(BadData, match=r"feature column 'A' is missing. Did you mean 'a'"):
        regression(feature_cols=["A", "b"]).fit(rows)
    with pytest.raises(BadData, match="'kind' is a string"):
        regression(feature_cols=["a", "kind"]).fit(rows)
    with pytest.raises(BadData, match=r"features \[batch, 3\] float32 of columns 'a', 'b', 'id'"):
        regression(feature_cols=["a", "b", "id"]).fit(rows)
    assembled = VectorAssembler(inputCols=["a", "b", "id"], outputCol="features").transform(rows)
    with pytest.raises(BadData, match=r"features \[batch, 3\] float32 of column 'features'"):
        regression(feature_cols="features").fit(assembled)
    with pytest.raises(BadSetting, match=r'on="here" takes pandas and Arrow tables'):
        regression(on="here").fit(rows)


def test_a_label_that_is_no_class_index_and_an_exception_of_the_user(rows: DataFrame) -> None:
    scores: dict[str, Any] = {"model": lambda: nn.Linear(2, 2), "loss": nn.CrossEntropyLoss()}
    with pytest.raises(Exception, match="must hold class indices, and holds"):
        regression(task="classification", **scores).fit(rows)

    def step(module: Any, batch: Any) -> Any:
        raise KeyError("my own mistake")

    with pytest.raises(RankFailed) as caught:
        regression(train_step=step).fit(rows)
    assert isinstance(caught.value.__cause__, KeyError)
