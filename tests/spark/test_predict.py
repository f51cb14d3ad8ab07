"""A model over DataFrames: what leaves the JVM, what is returned, and how often the model runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from torch import nn

import clusters
import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting, SignatureMismatch, UntrustedModel
from tritium.ml import TorchEstimator, TorchModel
from tritium.model.engines.torch_weights import Tensors
from tritium.model.signature import Input, Output, Signature
from tritium.spark import inside

FEATURES = Input("features", ("a", "b", "c"), "float32", (3,))
NUMBER = Signature((FEATURES,), (Output("y", shape=(1,)),), "regression")


class Witness(nn.Module):
    """A model that writes to a file of its process what it was called with, and when it was loaded."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.line = nn.Linear(3, 1)
        with torch.no_grad():  # the sine of the id: above zero for about half of the rows
            self.line.weight.copy_(torch.tensor([[0.0, 1.0, 0.0]]))
            self.line.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.say(f"rows {len(x)} threads {torch.get_num_threads()} grad {torch.is_grad_enabled()}")
        maps = Path("/proc/self/smaps").read_text().split("tritium-")[1:]
        for part in maps:
            dirty = re.search(r"Private_Dirty: +(\d+)", part)
            self.say(f"map {part.split()[0]} {dirty and dirty[1]}")
        return self.line(x)

    def say(self, text: str) -> None:
        with open(os.path.join(self.place, str(os.getpid())), "a") as file:
            file.write(text + "\n")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.say("loaded")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    # It stays until pytest ends: a worker of a task that Spark has ended still writes there when the test is over.
    return str(tmp_path_factory.mktemp("place"))


def said(place: str) -> dict[str, list[str]]:
    return {file.name: file.read_text().splitlines() for file in Path(place).iterdir()}


def rows(place: str) -> list[int]:
    return [int(line.split()[1]) for lines in said(place).values() for line in lines if line.startswith("rows")]


def table(spark: Any, count: int = 200) -> Any:
    return spark.range(0, count, 1, 2).select(
        "id",
        (F.col("id") / 7).alias("a"),
        F.sin("id").cast("float").alias("b"),
        (F.col("id") % 5).cast("int").alias("c"),
        F.concat(F.lit("secret-"), "id").alias("other"),
    )


def regression(module: nn.Module | None = None, **settings: Any) -> TorchModel:
    return TorchModel(
        tr.Model(module or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), NUMBER), **settings
    )


def test_the_same_numbers_on_every_cluster(cluster: Any) -> None:
    df = table(cluster.spark)
    model = regression(batch_size=64)
    found = model.transform(df).orderBy("id").toPandas()
    assert model.transform(df).schema["prediction"].dataType.simpleString() == "double"
    assert list(found.columns) == [*df.columns, "prediction"]
    np.testing.assert_allclose(found.prediction, model.model.predict(found), rtol=1e-5, atol=1e-6)
    classes = TorchModel(
        tr.Model(nn.Linear(3, 2), Signature((FEATURES,), (Output("y", shape=(2,)),), "classification"))
    )
    first = classes.transform(df).orderBy("id").first()
    expected = classes.model.predict(found.head(1))
    assert isinstance(expected, dict)
    np.testing.assert_allclose(first.probability.toArray(), expected["probability"][0], rtol=1e-5)


def plan_of(df: Any) -> str:
    return str(df._jdf.queryExecution().executedPlan().toString())


def test_only_the_packed_features_leave_the_jvm(spark: Any) -> None:
    model = regression()
    with clusters.set_to(spark, **{inside.SETTING: ""}):  # else Spark computes the features there, of `id`
        plan = plan_of(model.transform(table(spark)).select("other", "prediction"))
    calls = re.findall(r"ArrowEvalPython \[(.*)\], \[", plan)
    assert len(calls) == 1
    assert set(re.findall(r"\b(\w+)#", calls[0])) - {"predict"} == {"a", "b", "c"}
    assert "secret" in plan
    assert "secret" not in calls[0]


@pytest.mark.parametrize("kind", ["regression", "classification", "several"])
def test_a_filter_on_the_prediction_runs_the_model_once(spark: Any, place: str, kind: str) -> None:
    df = table(spark)
    if kind == "regression":
        scored = regression(Witness(place)).transform(df).where("prediction > 0 AND id > 3")
    elif kind == "classification":
        signature = Signature((FEATURES,), (Output("y", shape=(1,)),), "classification")
        scored = TorchModel(tr.Model(Witness(place), signature)).transform(df).where("prediction = 1")
    else:
        two = nn.Sequential(Witness(place), Twice())
        signature = Signature((FEATURES,), (Output("one", shape=(1,)), Output("two", shape=(1,))))
        scored = TorchModel(tr.Model(two, signature), output_cols=["x", "y"]).transform(df).where("x > 0 AND y > 0")
    assert len(re.findall(r"ArrowEvalPython", plan_of(scored))) == 1
    assert 0 < len(scored.collect()) < 200
    assert sum(rows(place)) == 200


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, 2 * x


def test_batches_inside_and_the_session_left_alone(spark: Any, place: str) -> None:
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    regression(Witness(place), batch_size=16).transform(table(spark, 100)).toPandas()
    assert sorted(rows(place)) == [2, 2, *[16] * 6]
    lines = [line for lines in said(place).values() for line in lines if line.startswith("rows")]
    assert all(line.endswith("threads 1 grad False") for line in lines)
    assert spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == before


def test_one_file_of_weights_for_all_workers(spark: Any, place: str) -> None:
    model = regression(Witness(place))
    for _ in range(2):  # the second job reuses the workers
        model.transform(table(spark).repartition(4)).toPandas()
    told = said(place)
    assert all(lines.count("loaded") == 1 for lines in told.values())
    name = f"{Tensors.of(model.module()).digest()}.safetensors"
    maps = {line for lines in told.values() for line in lines if line.startswith(f"map {name}")}
    assert maps == {f"map {name} 0"}  # 0 kB of it belong to one worker alone
    scratch = Path(os.environ["SPARK_LOCAL_DIRS"])
    assert len(list(scratch.glob(f"blockmgr-*/tritium-{name}"))) == 1  # Spark removes this directory at its end
    assert not list(scratch.glob("blockmgr-*/*.part"))


def test_several_inputs_and_outputs(spark: Any) -> None:
    class Several(nn.Module):
        def forward(self, v: torch.Tensor, m: torch.Tensor, k: torch.Tensor) -> Any:
            return v.sum(1), m * 2, k[:, None].repeat(1, 2)

    data = [(Vectors.dense(1, 2), [[1.0, 2.0], [3.0, 4.0]], 3), (Vectors.sparse(2, [1], [5]), [[0.0] * 2] * 2, 4)]
    df = _typed(spark, data)
    inputs = (
        Input("v", ("v",), "float32", (2,)),
        Input("m", ("m",), "float32", (2, 2)),
        Input("k", ("k",), "int64", ()),
    )
    outputs = (Output("s"), Output("m", shape=(2, 2)), Output("k", "int64", (2,)))
    model = TorchModel(tr.Model(Several(), Signature(inputs, outputs)))
    scored = model.transform(df)
    kind = scored.schema["prediction"].dataType.simpleString()
    assert kind == "struct<s:double,m:array<array<float>>,k:array<bigint>>"
    first, second = scored.select("prediction.*").collect()
    assert (first.s, first.m, first.k) == (3.0, [[2.0, 4.0], [6.0, 8.0]], [3, 3])
    assert second.s == 5.0
    apart = model.copy().setOutputCols(["x", "y", "z"]).transform(df)
    assert [f.dataType.simpleString() for f in apart.schema[-3:]] == ["double", "array<array<float>>", "array<bigint>"]
    with pytest.raises(BadSetting, match=r"gives 3 .*name 1 or 3"):
        model.setOutputCols(["x", "y"])


def _typed(spark: Any, data: list[Any]) -> Any:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import ArrayType, DoubleType, IntegerType, StructField, StructType

    matrix = ArrayType(ArrayType(DoubleType()))
    fields = [StructField("v", VectorUDT()), StructField("m", matrix), StructField("k", IntegerType())]
    return spark.createDataFrame(data, StructType(fields))


def test_an_array_output_is_an_array(spark: Any) -> None:
    signature = Signature((FEATURES,), (Output("y", shape=(2,)),), "regression")
    scored = TorchModel(tr.Model(nn.Linear(3, 2), signature)).transform(table(spark))
    assert scored.schema["prediction"].dataType.simpleString() == "array<float>"
    assert len(scored.first().prediction) == 2


def test_every_difference_before_the_job_starts(spark: Any) -> None:
    df = table(spark).select("id", F.col("other").alias("a"), F.array("b").alias("c"))
    with pytest.raises(SignatureMismatch) as caught:
        regression().transform(df)
    assert len(caught.value.differences) == 3
    with pytest.raises(BadSetting, match=r"has a column 'prediction' already"):
        regression().transform(table(spark).withColumn("prediction", F.lit(1)))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("IF(id = 7, NULL, b)", "is null in row 7 of partition 0"),
        ("IF(id = 7, double('NaN'), b)", "is NaN in row 7 of partition 0"),
        ("IF(id = 7, 1e300D, b)", "is infinite, or beyond what the model computes in, in row 7 of partition 0"),
        ("IF(id = 7, 1700000001, id)", r".*is about 1,700,000,000, an integer beyond 16,777,215.* in row 7 "),
    ],
)
def test_what_a_model_can_not_take_names_the_column(spark: Any, value: str, what: str) -> None:
    df = table(spark).withColumn("b", F.expr(value))
    with pytest.raises(PythonException, match=f"BadRow: column 'b' {what}"):
        regression().transform(df.coalesce(1)).collect()


def test_rows_of_another_length(spark: Any) -> None:
    df = table(spark).withColumn("features", F.array("a", "b"))
    model = TorchModel(
        tr.Model(nn.Linear(3, 1), Signature((Input("x", ("features",), "float32", (3,)),), NUMBER.outputs))
    )
    with pytest.raises(PythonException, match=r"column 'features' .* of length 2, where 3 was expected"):
        model.transform(df.coalesce(1)).collect()


def test_a_gpu_that_is_not_there(spark: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(PythonException, match=r"device='cuda': torch sees 0 GPU"):
        regression(device="cuda").transform(table(spark).coalesce(1)).collect()
    with pytest.raises(BadSetting, match=r"no torch device"):
        regression(device="warp").transform(table(spark))


def add_by_optimizer(module: nn.Module) -> None:
    optimizer = torch.optim.SGD([module.get_parameter("2.bias")], lr=1.0)
    module.get_parameter("2.bias").grad = torch.tensor([-1.0])
    optimizer.step()


def add_by_state(module: nn.Module) -> None:
    state = module.state_dict()
    module.load_state_dict(state | {"2.bias": state["2.bias"] + 1})


def add_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("2.bias").add_(1)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "add_": add_in_place,
    ".data": lambda module: module.get_parameter("2.bias").data.add_(1),
    "numpy": lambda module: np.add(bias(module), 1, out=bias(module)),
    "np.copyto": lambda module: np.copyto(bias(module), bias(module) + 1),
    "load_state_dict": add_by_state,
    "optimizer": add_by_optimizer,
}


def bias(module: nn.Module) -> Any:
    return module.get_parameter("2.bias").detach().numpy()


def test_transform_uses_the_weights_of_now_however_they_were_written(spark: Any) -> None:
    model, df = regression(), table(spark, 2).where("id = 0")
    for number, write in enumerate(WRITES.values()):
        if not number:
            first = model.transform(df).first().prediction
        write(model.module())
        found = model.transform(df).first().prediction
        assert found == pytest.approx(first + number + 1, rel=1e-5), list(WRITES)[number]


def test_the_same_weights_are_sent_once(spark: Any) -> None:
    model, df = regression(), table(spark)
    model.transform(df)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tritium.predict.weights.send", lambda *given: pytest.fail("sent again"))
        model.transform(df)


def test_a_stream_keeps_the_weights_that_it_was_started_with(spark: Any, tmp_path: Path) -> None:
    source = str(tmp_path / "in")
    table(spark, 2).coalesce(1).write.parquet(source)
    model = regression()
    stream = spark.readStream.schema(table(spark).schema).parquet(source)
    query = model.transform(stream).writeStream.format("memory").queryName("kept").start()
    try:
        query.processAllAvailable()
        add_in_place(model.module())
        table(spark, 2).coalesce(1).write.mode("append").parquet(source)
        query.processAllAvailable()
        found = [row.prediction for row in spark.table("kept").where("id = 0").collect()]
    finally:
        query.stop()
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_stream_that_ends_at_a_row_says_which(spark: Any, tmp_path: Path) -> None:
    table(spark, 8).coalesce(1).withColumn("b", F.expr("IF(id = 5, NULL, b)")).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(table(spark).schema).parquet(str(tmp_path / "in"))
    query = regression().transform(stream).writeStream.format("memory").queryName("ended").start()
    with pytest.raises(StreamingQueryException, match=r"BadRow: column 'b' is null in row 5 of partition 0"):
        query.processAllAvailable()


def test_sparks_evaluators_read_it(spark: Any) -> None:
    df = table(spark).withColumn("label", (F.col("a") > 10).cast("double"))
    scored = regression().transform(df)
    assert RegressionEvaluator(labelCol="label").evaluate(scored) > 0
    signature = Signature((FEATURES,), (Output("y", shape=(2,)),), "classification")
    classes = TorchModel(tr.Model(nn.Linear(3, 2), signature)).transform(df)
    assert 0 <= MulticlassClassificationEvaluator(labelCol="label").evaluate(classes) <= 1
    assert MulticlassClassificationEvaluator(labelCol="label", metricName="logLoss").evaluate(classes) > 0
    area = BinaryClassificationEvaluator(labelCol="label", rawPredictionCol="probability").evaluate(classes)
    assert BinaryClassificationEvaluator().evaluate(classes) == pytest.approx(area, abs=1e-12)
    assert dict(classes.dtypes)["rawPrediction"] == "vector"
    with_words = TorchModel(tr.Model(nn.Linear(3, 2), signature, label_words={"word": ["low", "high"]}))
    named = with_words.setParams(label_index_col="index").transform(
        df.withColumn("word", F.expr("IF(label = 1, 'high', 'low')"))
    )
    wrong = named.where("(word = prediction_label) != (label = prediction) or index != label").count()
    assert (wrong, named.where("prediction_label is null").count()) == (0, 0)
    assert 0 <= MulticlassClassificationEvaluator(labelCol="index").evaluate(named) <= 1


@pytest.mark.parametrize("classes", [1, 2, 17])
def test_the_raw_prediction_is_the_logarithm_of_the_probability(spark: Any, classes: int) -> None:
    """Also of a probability of 0, and null in a row that has no prediction."""
    df = table(spark, 8).withColumn("b", F.expr("IF(id = 5, NULL, b)"))
    module = nn.Linear(3, classes)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-300, 300, 3 * classes).reshape(classes, 3))
    signature = Signature((FEATURES,), (Output("y", shape=(classes,)),), "classification")
    model = TorchModel(tr.Model(module, signature), on_error="null")
    found = model.transform(df).orderBy("id").collect()
    for row in found:
        assert (row.rawPrediction is None) == (row.id == 5)
        if row.rawPrediction is not None:
            with np.errstate(divide="ignore"):
                np.testing.assert_allclose(row.rawPrediction.toArray(), np.log(row.probability.toArray()), rtol=1e-12)
    assert any(np.isinf(row.rawPrediction.toArray()).any() for row in found if row.rawPrediction is not None)
    here = model.transform(df.toPandas()).sort_values("id")
    for value, row in zip(here.rawPrediction, found, strict=True):
        assert (value is None) == (row.rawPrediction is None)
        assert value is None or np.allclose(value.toArray(), row.rawPrediction.toArray(), rtol=1e-12)


def test_a_stream_has_the_words(spark: Any, tmp_path: Path) -> None:
    table(spark, 6).withColumn("b", F.expr("IF(id = 5, NULL, b)")).write.parquet(str(tmp_path / "in"))
    signature = Signature((FEATURES,), (Output("y", shape=(2,)),), "classification")
    model = TorchModel(tr.Model(nn.Linear(3, 2), signature, label_words={"w": ["low", "high"]}), on_error="skip")
    stream = model.transform(spark.readStream.schema(table(spark).schema).parquet(str(tmp_path / "in")))
    query = stream.writeStream.format("memory").queryName("words").start()
    try:
        query.processAllAvailable()
        found = spark.table("words").orderBy("id").collect()
    finally:
        query.stop()
        spark.catalog.dropTempView("words")
    assert [row.id for row in found] == [0, 1, 2, 3, 4]
    assert [row.prediction_label for row in found] == [("low", "high")[int(row.prediction)] for row in found]


# --- pandas


class Both(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.sum(1), x


def test_a_pandas_frame_needs_no_session() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [0.0, 1.0], "c": [3, 4]}, index=[7, 9])
    signature = Signature((FEATURES,), (Output("s"), Output("x", shape=(3,))))
    model = TorchModel(tr.Model(Both(), signature))
    found = model.transform(frame)
    assert found.prediction[9]["s"] == 7.0
    assert found.prediction[9]["x"].tolist() == [2, 1, 4]
    assert list(model.copy().setOutputCols(["p", "q"]).transform(frame).p) == [4.0, 7.0]
    with pytest.raises(BadRow, match=r"column 'b' is NaN in row 1"):
        model.transform(frame.assign(b=[0.0, None]))
    with pytest.raises(BadSetting, match=r"has a column 'prediction' already"):
        model.transform(frame.assign(prediction=1))
    with pytest.raises(SignatureMismatch, match=r"missing column 'b'"):
        model.transform(frame.drop(columns="b"))
    with pytest.raises(BadData, match=r"got a pyarrow.lib.Table.*model.model.predict"):
        model.transform(pa.Table.from_pandas(frame))


OUTPUTS = {
    "one": (nn.Linear(3, 1), Signature((FEATURES,), (Output("y", shape=(1,)),)), None),
    "array": (nn.Linear(3, 2), Signature((FEATURES,), (Output("y", shape=(2,)),)), ["z"]),
    "classes": (nn.Linear(3, 2), Signature((FEATURES,), (Output("y", shape=(2,)),), "classification"), None),
    "class": (nn.Linear(3, 1), Signature((FEATURES,), (Output("y", shape=(1,)),), "classification"), ["kind"]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_pandas_frame_gets_the_columns_that_a_spark_one_gets(spark: Any, kind: str) -> None:
    module, signature, names = OUTPUTS[kind]
    model = TorchModel(tr.Model(module, signature), output_cols=names)
    frame = table(spark, 20).coalesce(1).toPandas()
    with clusters.set_to(spark, **{"spark.sql.execution.arrow.pyspark.enabled": "true"}):  # 4.2 does so by itself
        expected = model.transform(spark.createDataFrame(frame).coalesce(1)).toPandas()
    found = model.transform(frame)
    assert list(found.columns) == list(expected.columns)
    assert "prediction" not in frame.columns
    for name in found.columns[len(frame.columns) :]:
        assert type(found[name][0]) is type(expected[name][0])
        np.testing.assert_allclose(
            np.stack(found[name].to_numpy()), np.stack(expected[name].to_numpy()), rtol=1e-4, atol=1e-6
        )


# --- as a Spark ML model


def test_parameters_and_copies() -> None:
    model = regression(batch_size=7)
    assert 'batch_size: rows that the module is called with at once, or "auto"' in model.explainParams()
    assert "(default: 1024, current: 7)" in model.explainParams()
    copy = model.copy({model.batch_size: 9})
    assert (copy.getOrDefault("batch_size"), model.getOrDefault("batch_size")) == (9, 7)
    assert copy.module() is model.module()
    assert copy.uid == model.uid
    assert (model.signature, model.history) == (NUMBER, [])
    with pytest.raises(BadSetting, match=r"no parameter 'batchsize'"):
        model.setParams(batchsize=3)


@pytest.mark.usefixtures("saved_elsewhere")
def test_saved_in_a_pipeline(spark: Any, tmp_path: Path) -> None:
    df = table(spark)
    assembler = VectorAssembler(inputCols=["a", "b", "c"], outputCol="features")
    signature = Signature((Input("features", ("features",), "float32", (3,)),), NUMBER.outputs, "regression")
    model = TorchModel(tr.Model(nn.Linear(3, 1), signature, history=[{"epoch": 0}]), batch_size=50, output_cols=["y"])
    pipeline = Pipeline(stages=[assembler, model]).fit(df)
    expected = pipeline.transform(df).orderBy("id").toPandas().y
    path = str(tmp_path / "pipeline")
    pipeline.save(path)
    with pytest.raises(UntrustedModel, match=r"spark.tritium.trustModels=true"):
        PipelineModel.load(path)
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        loaded = PipelineModel.load(path)
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    last = loaded.stages[-1]
    assert (last.uid, last.getOrDefault("batch_size"), last.history) == (model.uid, 50, [{"epoch": 0}])
    assert (loaded.transform(df).orderBy("id").toPandas().y == expected).all()


def test_what_this_session_has_saved_is_loaded_without_more(spark: Any, tmp_path: Path) -> None:
    """A PipelineModel, and an estimator with its code."""
    model = TorchModel(tr.Model(nn.Sequential(nn.Linear(3, 1)), Signature((FEATURES,), NUMBER.outputs, "regression")))
    PipelineModel([model]).save(str(tmp_path / "pipeline"))
    frame = table(spark).toPandas()
    (loaded,) = PipelineModel.load(str(tmp_path / "pipeline")).stages
    assert (loaded.predict(frame) == model.predict(frame)).all()
    settings = {"feature_cols": ["a"], "label_cols": ["b"]}
    estimator = TorchEstimator(model=lambda: nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=torch.optim.Adam, **settings)
    estimator.save(str(tmp_path / "estimator"))
    assert TorchEstimator.load(str(tmp_path / "estimator")).getFeatureCols() == ["a"]


def test_saving_twice_and_reading_it_without_spark_ml(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    regression().save(path)
    with pytest.raises(BadSetting, match=r"overwrite"):
        regression().save(path)
    model = regression()
    model.write().overwrite().save(path)
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        again = TorchModel.load(path)
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    frame = table(spark).toPandas()
    alone = tr.load(path + "/model", trusted=True)
    assert (alone.predict(frame) == model.model.predict(frame)).all()
    assert (again.model.predict(frame) == model.model.predict(frame)).all()


@pytest.mark.usefixtures("saved_elsewhere")
def test_sparks_loaders_take_the_names_that_are_trusted(spark: Any, tmp_path: Path) -> None:
    signature = Signature((FEATURES,), (Output("y", shape=(3,)),))
    known = TorchModel(tr.Model(nn.Identity(), signature, origin=nn.Identity))
    known.save(str(tmp_path / "known"))
    assert TorchModel.load(str(tmp_path / "known")).model.origin == "torch.nn.modules.linear:Identity"
    ours = TorchModel(tr.Model(nn.Identity(), signature, origin="clusters:Net"))
    path = str(tmp_path / "ours")
    PipelineModel([ours]).save(path)
    with pytest.raises(UntrustedModel, match=r"spark.tritium.trustModels', 'clusters:Net'"):
        PipelineModel.load(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "Net", nn.Identity, raising=False)
        spark.conf.set("spark.tritium.trustModels", "ours.nets, clusters:Net")
        try:
            assert PipelineModel.load(path).stages[0].model.origin == "clusters:Net"
        finally:
            spark.conf.unset("spark.tritium.trustModels")
