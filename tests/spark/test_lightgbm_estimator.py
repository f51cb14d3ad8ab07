"""The LightGBM estimators on Spark: what is theirs beside the contract of all estimators."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tritium as tr
from tritium.errors import BadRow, BadSetting
from tritium.ml import EarlyStopping, LightGBMClassifier, LightGBMModel, LightGBMRanker, LightGBMRegressor

pytestmark = pytest.mark.timeout(400)
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False, "num_iterations": 15}
QUIET["native_params"] = {"num_threads": 1}


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Return 600 rows with a number, a kind of three and groups of 10 that a and b decide; b is null in some."""
    return (
        spark.range(0, 600, 1, 2)
        .withColumn("a", F.sin(F.col("id") * 1.7))
        .withColumn("b", F.when(F.col("id") % 11 > 0, F.cos(F.col("id") * 0.9)))
        .withColumn("y", 3 * F.col("a") - 2 * F.coalesce("b", F.lit(0.0)))
        .withColumn("kind", F.when(F.col("y") > 1, "high").when(F.col("y") > -1, "middle").otherwise("low"))
        .withColumn("q", (F.col("id") * 7 % 60).cast("int"))
        .withColumn("grade", F.greatest(F.lit(0), F.floor("y")).cast("int"))
    )


def regressor(**settings: Any) -> LightGBMRegressor:
    return LightGBMRegressor(**{"feature_cols": ["a", "b"], "label_cols": "y", **QUIET, **settings})


@pytest.mark.parametrize("cluster", ["local-cluster"], indirect=True)
def test_trains_on_a_cluster_though_a_rank_is_killed_and_predicts_where_features_are_null(
    cluster: Any, tmp_path: Path
) -> None:
    class Kills(EarlyStopping):
        def better(self, value: float, best: float | None) -> bool:
            if tr.world().rank == 1 and not (tmp_path / "killed").exists():
                (tmp_path / "seen").open("a").write(".")
                if len((tmp_path / "seen").read_text()) == 9:
                    tr.world().checkpoint.wait()  # that of step 5 is written in the background
                    (tmp_path / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().better(value, best)

    rows = cluster.spark.range(0, 300, 1, 2).selectExpr(
        "id", "nullif(sin(id), sin(7)) as a", "cos(id) as b", "2 * sin(id) - cos(id) as y"
    )
    settings: dict[str, Any] = {"ranks": 2, "validation": 0.2, "seed": 1, "row_key": "id", "checkpoint_every": 5}
    rule = Kills(patience=99, monitor="validation_l2")
    model = regressor(**settings, early_stopping=rule, run_dir=str(tmp_path / "run")).fit(rows)
    assert (tmp_path / "killed").exists()
    assert "continues from the checkpoint of step 5" in (tmp_path / "run" / "events.jsonl").read_text()
    scored = model.transform(rows).toPandas().sort_values("id", ignore_index=True)
    assert scored.a.isna().sum() == 1
    assert len(model.history) == 15
    assert model.history[-1]["validation_l2"] < 0.3
    np.testing.assert_array_equal(scored.prediction, model.model.predict(scored))
    plain = lightgbm.train(
        {"verbosity": -1, "num_threads": 1},
        lightgbm.Dataset(scored[["a", "b"]].to_numpy(np.float32), scored.y),
        15,
    )
    assert np.abs(plain.predict(scored[["a", "b"]].to_numpy(np.float32)) - scored.prediction).mean() < 0.2


def test_a_pipeline_of_assembler_indexer_and_classifier(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    whole = rows.na.fill(0.0)
    classifier = LightGBMClassifier(feature_cols="features", label_cols="label", ranks=2, min_data_in_leaf=5, **QUIET)
    stages = [
        VectorAssembler(inputCols=["a", "b"], outputCol="features"),
        StringIndexer(inputCol="kind", outputCol="label"),
        classifier,
    ]
    fitted = Pipeline(stages=stages).fit(whole)
    scored = fitted.transform(whole)
    assert {"prediction": "double", "probability": "vector"}.items() <= dict(scored.dtypes).items()
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.9
    fitted.write().save(str(tmp_path / "pipeline"))
    again = PipelineModel.load(str(tmp_path / "pipeline"))  # no code is loaded, so nothing need be trusted
    first, second = (one.transform(whole).orderBy("id").select("probability").collect() for one in (fitted, again))
    assert first == second
    model = again.stages[-1]
    assert isinstance(model, LightGBMModel)
    assert model.setOutputCols(["kind_index", "chances"]).transform(scored).columns[-2:] == ["kind_index", "chances"]
    assert list(model.feature_importances()) == ["a", "b"], "as VectorAssembler names them"
    model.write().overwrite().save(str(tmp_path / "model"))
    table = fitted.stages[0].transform(whole.orderBy("id")).limit(5).toPandas()
    alone = tr.load(str(tmp_path / "model/model")).predict(np.stack([row.toArray() for row in table.features]))
    np.testing.assert_allclose(alone["probability"], [row.probability.toArray() for row in first[:5]])
    classifier.save(str(tmp_path / "estimator"))
    assert LightGBMClassifier.load(str(tmp_path / "estimator")).settings() == classifier.settings()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")  # of Spark's
def test_words_in_a_cross_validator(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    """The words of each fold are learnt, come back, and are what Spark's evaluators compare."""
    classifier = LightGBMClassifier(
        feature_cols=["a", "b"],
        label_cols="kind",
        vocabulary=["kind"],
        label_index_col="kind_index",
        min_data_in_leaf=5,
        ranks=2,
        **QUIET,
    )
    evaluator = MulticlassClassificationEvaluator(labelCol="kind_index", metricName="accuracy")
    grid = ParamGridBuilder().addGrid(classifier.num_iterations, [2, 15]).build()
    found = CrossValidator(estimator=classifier, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2).fit(rows)
    assert found.avgMetrics[1] > 0.9
    scored = found.transform(rows)
    assert scored.where("(kind = prediction_label) != (kind_index = prediction)").count() == 0
    assert scored.where("kind = prediction_label").count() / 600 == evaluator.evaluate(scored)
    words = [row.kind for row in rows.groupBy("kind").count().orderBy(F.desc("count"), "kind").collect()]
    assert found.bestModel.label_words == {"kind": words}
    found.bestModel.write().save(str(tmp_path / "model"))
    again = LightGBMModel.load(str(tmp_path / "model")).transform(rows.drop("kind")).orderBy("id")
    assert again.columns[-4:] == ["prediction", "probability", "rawPrediction", "prediction_label"]
    assert again.collect() == scored.drop("kind", "kind_index").orderBy("id").collect()


def test_a_ranker_keeps_groups_whole_and_refuses_one_that_is_null(rows: DataFrame) -> None:
    ranker = LightGBMRanker(
        feature_cols=["a", "b"], label_cols="grade", group_col="q", ranks=2, validation=0.2, eval_at=[3], **QUIET
    )
    model = ranker.fit(rows)
    assert model.history[-1]["validation_ndcg@3"] > 0.9
    scored = model.transform(rows).toPandas()
    ranks = scored.groupby("q")[["prediction", "grade"]].corr(method="spearman").iloc[0::2, 1]
    assert ranks.mean() > 0.8
    with pytest.raises(BadRow, match=r"column 'q' \(in batch column 'group'\) is null in row \d+"):
        ranker.fit(rows.withColumn("q", F.when(F.col("id") != 77, F.col("q"))))


def test_one_vector_or_array_in_a_list_and_the_names_that_the_assembler_gives(rows: DataFrame) -> None:
    kinds = rows.withColumn("kind", F.col("id") % 3)
    vectors = VectorAssembler(inputCols=["a", "kind"], outputCol="features").transform(kinds)
    settings: dict[str, Any] = {"monotone_constraints": {"a": 1}, "categorical_features": ["kind"]}
    named = regressor(feature_cols=["features"], **settings).fit(vectors)
    scalars = regressor(feature_cols=["a", "kind"], **settings).fit(kinds)
    assert named.feature_importances("gain") == scalars.feature_importances("gain")
    with pytest.raises(BadSetting, match=r"names 'kin'; of the column 'features' .*Did you mean 'kind'\?"):
        regressor(feature_cols=["features"], categorical_features=["kin"]).fit(vectors)

    arrays = kinds.withColumn("v", F.array("a", "kind"))  # whose length only the rows tell
    for given in ("v", ["v"]):
        model = regressor(feature_cols=given, monotone_constraints={0: 1}, categorical_features=[1]).fit(arrays)
        assert list(model.feature_importances("gain").values()) == list(scalars.feature_importances("gain").values())
    with pytest.raises(BadSetting, match="categorical_features names position 2, and 'v' has 2 numbers a row"):
        regressor(feature_cols=["v"], categorical_features=[2]).fit(arrays)


def test_words_as_groups_and_as_categories(rows: DataFrame) -> None:
    words = rows.withColumn("query", F.concat(F.lit("query "), "q"))
    settings: dict[str, Any] = {"feature_cols": ["a", "kind"], "label_cols": "grade", "eval_at": [3], **QUIET}
    settings |= {"vocabulary": ["kind"], "ranks": 2, "row_key": "id"}
    named, numbered = (LightGBMRanker(**settings, group_col=name).fit(words) for name in ("query", "q"))
    assert named.history[-1]["ndcg@3"] == pytest.approx(numbered.history[-1]["ndcg@3"], abs=0.1)
    assert named.feature_importances()["kind"] > 0
    scored = named.transform(words).toPandas()
    assert scored.groupby("kind").prediction.mean().idxmax() == "high"
    with pytest.raises(BadRow, match=r"column 'query' \(in batch column 'group'\) is null in the row with id=7"):
        LightGBMRanker(**settings, group_col="query").fit(
            words.withColumn("query", F.when(F.col("id") != 7, F.col("query")))
        )


def test_xgboosts_own_estimator_and_ours_live_in_one_session(rows: DataFrame) -> None:
    spark_of_xgboost = pytest.importorskip("xgboost.spark", reason="xgboost is not installed")
    whole = rows.na.fill(0.0)
    theirs = spark_of_xgboost.SparkXGBRegressor(
        features_col=["a", "b"], label_col="y", prediction_col="theirs", num_workers=1, n_estimators=15
    ).fit(whole)
    ours = regressor(ranks=2).fit(whole)
    both = theirs.transform(ours.transform(whole)).toPandas()
    assert np.corrcoef(both.prediction, both.theirs)[0, 1] > 0.95
