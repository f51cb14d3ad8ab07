"""What every estimator promises, whatever its framework: each file in `cases` is one estimator.

A case has `estimator(**settings)`, which learns y = 3a - 2b + 1 from two features; `RTOL`, how close N ranks come to
one; and for a tuner `GRID`, a setting with a poor and a good value. `PACKAGES` are what it needs.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from cases import case_of
from program_state import OF_TORCH, STATES, all_of
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml import EarlyStopping

ROWS = 160
# Of the same rows in other batches: float32 sums of terms of up to 4, which some processors add in another order.
SAME: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6}
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False, "retries": 0, "start_timeout": 150}
FEATURES: dict[str, Any] = {"feature_cols": ["a", "b"]}
CASES = sorted(path.stem for path in Path(__file__).parent.joinpath("cases").glob("*.py"))
# pyspark's tuners leave their thread pools to the garbage collector.
POOL_OF_SPARK = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
pytestmark = [
    pytest.mark.timeout(400),
    # Keras with NumPy 2.4; and torch, where TensorFlow has looked for a GPU before it.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:CUDA initialization:UserWarning"),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return case_of("estimators", request.param)


def rows() -> pd.DataFrame:
    ids = np.arange(ROWS)
    frame = pd.DataFrame({"id": ids, "a": np.sin(ids * 1.7), "b": np.cos(ids * 0.9)})
    frame["y"] = 3 * frame.a - 2 * frame.b + 1
    return frame


class KillsOnce(EarlyStopping):
    """A rule that never stops, and in which rank 1 is killed at its fourth value, once."""

    def better(self, value: float, best: float | None) -> bool:
        place = os.environ["KILLED"]
        seen = Path(f"{place}-{os.getpid()}")
        seen.write_text(seen.read_text() + "." if seen.exists() else ".")
        if tr.world().rank == 1 and len(seen.read_text()) == 4 and not os.path.exists(place):
            Path(place).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().better(value, best)


@pytest.mark.processes
def test_n_ranks_are_one_also_when_one_is_killed(case: Any, tmp_path: Path) -> None:
    """Two ranks of which one is killed, and which continue from the checkpoint, learn what one process learns."""
    frame = rows()
    one = case.estimator(**QUIET, **FEATURES, on="here").fit(frame)
    place = tmp_path / "killed"
    settings = {**QUIET, "retries": 1, "env": {"KILLED": str(place)}, "run_dir": str(tmp_path / "run")}
    rule = KillsOnce(monitor=None, patience=1000, restore_best=False)
    two = case.estimator(**settings, **FEATURES, on="driver", ranks=2, early_stopping=rule).fit(frame)
    assert place.exists()
    np.testing.assert_allclose(two.predict(frame), one.predict(frame), rtol=case.RTOL, atol=case.RTOL)
    assert len(two.history) == len(one.history)
    assert two.history[-1].keys() == one.history[-1].keys()
    assert np.mean((one.predict(frame) - frame.y) ** 2) < 0.2 * frame.y.var()


def test_rows_that_cant_be_used_are_left_out_and_counted(case: Any, tmp_path: Path) -> None:
    frame = rows()
    dirty = frame.astype({"y": "Float64"})  # which has nulls
    dirty.loc[[3, 70], "y"] = None
    dirty.loc[10, "b"] = 1e300  # beyond float32
    bad = [3, 10, 70]
    given: dict[str, Any] = {**QUIET, **FEATURES, "on": "here"}
    with pytest.raises(BadRow):
        case.estimator(**given, on_error="null").fit(dirty)
    clean = case.estimator(**given).fit(frame.drop(index=bad))
    found = case.estimator(**given, on_error="skip", run_dir=str(tmp_path)).fit(dirty)
    np.testing.assert_array_equal(found.predict(frame), clean.predict(frame))
    assert {entry["rows_skipped"] for entry in found.history} == {len(bad)}
    assert "rows_skipped" not in clean.history[-1]
    (report,) = (json.loads(path.read_text()) for path in tmp_path.rglob("report.json"))
    assert report["ranks"][0]["shards"]["train"]["skipped"] == len(bad)
    assert any("3 of 160 rows are left out, as on_error='skip' says" in note for note in report["notes"])


@pytest.mark.processes
def test_what_the_program_has_set_for_itself_changes_nothing(case: Any, tmp_path: Path) -> None:
    frame, settings = rows(), {**QUIET, **FEATURES, "run_dir": str(tmp_path / "run")}
    plain = case.estimator(**settings, on="here").fit(frame).predict(frame)
    # Keras recurses and warns, and Lightning looks where it is.
    with all_of(STATES, "little_recursion", "warnings_as_errors", "no_working_directory"), all_of(OF_TORCH):
        model = case.estimator(**{**settings, "run_dir": str(tmp_path / "again")}, on="here").fit(frame)
        model.model.save(str(tmp_path / "model"))
        loaded = tr.load(str(tmp_path / "model"), trusted=True)
    np.testing.assert_array_equal(model.predict(frame), plain)
    np.testing.assert_array_equal(loaded.predict(frame), plain)


def test_a_list_of_one_array_column_is_that_column(case: Any) -> None:
    frame = rows()
    frame["v"] = list(frame[["a", "b"]].to_numpy("float32"))
    one, listed = (case.estimator(**QUIET, feature_cols=given, on="here").fit(frame) for given in ("v", ["v"]))
    np.testing.assert_array_equal(listed.predict(frame), one.predict(frame))


def test_among_spark_mls_own_stages(spark: Any, case: Any, tmp_path: Path) -> None:
    """In a Pipeline, saved and loaded, over a batch, a stream and without Spark."""
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    frame = rows()
    df = spark.createDataFrame(frame).repartition(2)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    estimator = case.estimator(**QUIET, feature_cols="features", ranks=2)
    fitted = Pipeline(stages=[assembler, estimator]).fit(df)
    found = fitted.transform(df).orderBy("id").toPandas()
    assert np.mean((found.prediction - found.y) ** 2) < 0.2 * found.y.var()

    fitted.write().save(str(tmp_path / "pipeline"))
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = PipelineModel.load(str(tmp_path / "pipeline"))
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    model = again.stages[-1].setOutputCols(["predicted"])
    df.coalesce(1).write.parquet(str(tmp_path / "stream"))
    stream = again.transform(spark.readStream.schema(df.schema).parquet(str(tmp_path / "stream")))
    query = stream.writeStream.format("memory").queryName("contract").start()
    try:
        query.processAllAvailable()
        streamed = spark.table("contract").orderBy("id").toPandas()
    finally:
        query.stop()
        spark.catalog.dropTempView("contract")
    np.testing.assert_allclose(streamed.predicted, found.prediction, **SAME)

    model.model.save(str(tmp_path / "model"))
    alone = tr.load(str(tmp_path / "model"), trusted=True)
    vectors = pd.DataFrame({"features": list(frame[["a", "b"]].to_numpy())})
    np.testing.assert_allclose(alone.predict(vectors), found.prediction, **SAME)
    assert type(alone.transformer()) is type(model)


# Five trainings each, by what all estimators inherit: one whose setting is a dict, one of trees, one of epochs.
@POOL_OF_SPARK
@pytest.mark.parametrize("case", ["function", "lightgbm", "torch"], indirect=True)
def test_tuned_by_a_cross_validator(spark: Any, case: Any) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    df = spark.createDataFrame(rows()).repartition(2)
    name, (poor, good) = case.GRID
    tuned = case.estimator(**QUIET, **FEATURES)
    grid = ParamGridBuilder().addGrid(getattr(tuned, name), [poor, good]).build()
    evaluator = RegressionEvaluator(labelCol="y", metricName="rmse")
    best = CrossValidator(estimator=tuned, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2).fit(df)
    assert best.avgMetrics[1] < best.avgMetrics[0]
    assert evaluator.evaluate(best.transform(df)) < best.avgMetrics[0]


def test_params_are_kept_and_checked(spark: Any, case: Any, tmp_path: Path) -> None:
    estimator = case.estimator(**QUIET, **FEATURES, seed=7, prediction_col="p")
    assert estimator.getSeed() == 7
    assert "seed: Decides" in estimator.explainParams()
    copied = estimator.copy({estimator.seed: 8})
    assert (copied.getSeed(), estimator.getSeed()) == (8, 7)
    estimator.write().save(str(tmp_path / "estimator"))
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = type(estimator).load(str(tmp_path / "estimator"))
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    assert {p.name for p in again._paramMap} == {p.name for p in estimator._paramMap}
    assert (again.getSeed(), again.getOrDefault("prediction_col"), again.uid) == (7, "p", estimator.uid)
    with pytest.raises(BadSetting, match=r"There is no setting 'sead'\. Did you mean 'seed'\?"):
        case.estimator(**QUIET, **FEATURES, sead=1)
    with pytest.raises(BadData, match=r"feature column 'c' is missing"):
        case.estimator(**QUIET, feature_cols=["a", "c"], on="here").fit(rows())


def test_a_column_that_the_model_would_add_is_refused_before_the_training(case: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUIET, **FEATURES, "on": "driver", "run_dir": str(tmp_path / "run")}
    with pytest.raises(BadSetting, match=r"a column 'prediction' already.*prediction_col='another_prediction'"):
        case.estimator(**settings).fit(rows().assign(Prediction=0.0))
    assert not (tmp_path / "run").exists()


def words() -> pd.DataFrame:
    """Return rows of three words, of which "white" is the most frequent and "red" the rarest."""
    frame = rows()
    frame["wine"] = np.select([frame.y > 3, frame.y > 1], ["red", "rose"], "white")
    return frame


def test_the_words_of_a_label_come_back(case: Any, tmp_path: Path) -> None:
    """Classes are numbered by frequency, and words again in `transform` and `predict`, also after saving."""
    frame = words()
    held = frame.assign(held=frame.id % 5 == 0)
    settings = {**QUIET, **FEATURES, "label_cols": "wine", "vocabulary": ["wine"], "validation": "held", "on": "here"}
    model = case.classifier(3, **settings, label_index_col="wine_index").fit(held)
    assert model.label_words == {"wine": ["white", "rose", "red"]}
    found = model.transform(frame)
    right = {"white": 0.0, "rose": 1.0, "red": 2.0}
    assert list(found.columns)[-5:] == ["prediction", "probability", "rawPrediction", "prediction_label", "wine_index"]
    assert found.prediction_label.map(right).tolist() == found.prediction.tolist()
    assert found.wine_index.tolist() == frame.wine.map(right).tolist()
    assert (found.prediction_label == frame.wine).mean() > 0.6
    model.model.save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"), trusted=True)
    assert again.label_words == model.label_words
    unlabelled = frame[["a", "b"]]
    assert again.predict(unlabelled)["prediction_label"].tolist() == found.prediction_label.tolist()
    assert "wine_index" not in model.transform(unlabelled)
    plain = again.transformer(raw_prediction_col="", prediction_label_col="word").transform(unlabelled)
    assert list(plain.columns) == ["a", "b", "prediction", "probability", "word"]


@pytest.mark.processes
def test_features_of_other_scales_are_normalised(case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A feature in millions is learnt as one of 1 is, and predictions are normalised the same, also when loaded."""
    if case.__name__.endswith("lightgbm"):
        pytest.skip("trees need no normalisation, and normalize= is refused")
    frame = rows()
    scaled = frame.assign(a=frame.a * 1e6 + 3e6, b=frame.b * 1e-3)
    hint = "features of different scales: up to 0.001 in 'b', and up to 4e+06 in 'a'"
    if not case.__name__.endswith("function"):
        case.estimator(**{**QUIET, "progress": True, "verbose": True}, **FEATURES, on="here").fit(scaled)
        assert capsys.readouterr().out.count(hint) == 1
    settings = {**QUIET, **FEATURES, "progress": True, "verbose": True, "normalize": True}
    model = case.estimator(**settings, on="driver", ranks=2).fit(scaled)
    assert hint not in capsys.readouterr().out
    assert np.mean((model.predict(scaled) - frame.y) ** 2) < 0.2 * frame.y.var()
    model.model.save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"), trusted=True)
    np.testing.assert_array_equal(again.predict(scaled), model.predict(scaled))
    np.testing.assert_allclose(
        again.predict(scaled[["a", "b"]].to_numpy()), model.predict(scaled), rtol=1e-5, atol=1e-5
    )


class Pairs:
    """A map-style dataset beside the DataFrame."""

    def __init__(self) -> None:
        self.pairs = rows()[["a", "b"]].to_numpy("float32")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return self.pairs[index]


def pair(path: str) -> np.ndarray[Any, Any]:
    return np.array([float(number) for number in Path(path).read_text().split()], "float32")


def test_features_behind_paths_and_in_a_dataset(case: Any, tmp_path: Path) -> None:
    if case.__name__.endswith("lightgbm"):
        pytest.skip("LightGBM takes numbers as the DataFrame has them, and decode= is refused")
    frame = rows()
    for index, one, other in zip(frame.id, frame.a, frame.b, strict=True):
        (tmp_path / f"{index}").write_text(f"{one} {other}")
    frame["path"] = [str(tmp_path / f"{index}") for index in frame.id]
    plain = case.estimator(**QUIET, feature_cols=["a", "b"], on="here").fit(frame)
    for column, decode in (("path", pair), ("id", Pairs())):
        model = case.estimator(**QUIET, feature_cols=column, decode={column: decode}, on="here").fit(frame)
        np.testing.assert_allclose(model.predict(frame), plain.predict(frame), rtol=1e-5, atol=1e-6)
