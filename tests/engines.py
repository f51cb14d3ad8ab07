"""The cases of the contract of all engines: a classifier of two numbers into three classes by each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator

import tritium as tr
from tritium.model.signature import Input, Output, Signature

NAMES = ("torch", "keras", "lightgbm", "onnx", "function")
_PACKAGES = {"torch": "torch", "keras": "keras", "lightgbm": "lightgbm", "onnx": "onnxruntime", "function": "numpy"}
WORDS = {"wine": ["white", "rose", "red"]}
_WEIGHTS = np.array([[1.0, -2.0, 0.5], [0.25, 1.0, -1.0]], np.float32)
_BIAS = np.array([0.1, -0.2, 0.3], np.float32)


@dataclass
class Case:
    """An engine's model, and its own framework's scores `[rows, 3]` of numbers `[rows, 2]`."""

    name: str
    module: Any
    scores: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    activation: Any = "softmax"

    def model(self) -> tr.Model:
        """Return the model of the classes."""
        signature = Signature(
            (Input("x", ("a", "b"), "float32", (2,)),),
            (Output("scores", "float64" if self.name == "lightgbm" else "float32", (3,)),),
            task="classification",
            activation=self.activation,
            label_words=WORDS,
        )
        return tr.Model(self.module, signature)

    def words(self, frame: pd.DataFrame) -> list[str]:
        """Return the word of each row by the framework alone."""
        scores = self.scores(frame[["a", "b"]].to_numpy(np.float32))
        return [WORDS["wine"][index] for index in scores.argmax(1)]


def rows(count: int = 300) -> pd.DataFrame:
    """Return rows of two numbers."""
    random = np.random.default_rng(11)
    return pd.DataFrame({"id": np.arange(count), "a": random.normal(size=count), "b": random.normal(size=count)})


def case_of(name: str) -> Case:
    """Return the case of an engine; skip the test where its package is missing."""
    if find_spec(_PACKAGES[name]) is None:
        pytest.skip(f"{_PACKAGES[name]} is not installed: make setup")
    made: Case = globals()[f"_{name}"]()
    return made


def onnx_file(
    weights: np.ndarray[Any, Any] = _WEIGHTS,
    bias: np.ndarray[Any, Any] = _BIAS,
    rows: Any = "rows",
    more: Sequence[str] = (),
) -> bytes:
    """Return an ONNX file of x @ weights + bias. `more`: further outputs, each the same."""
    from onnx import TensorProto, helper, numpy_helper

    outputs = ["scores", *more]
    nodes = [helper.make_node("Gemm", ["x", "weights", "bias"], [name]) for name in outputs]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, weights.shape[0]])
    returned = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, weights.shape[1]]) for name in outputs]
    held = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(bias, "bias")]
    graph = helper.make_graph(nodes, "linear", [given], returned, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    content: bytes = model.SerializeToString()
    return content


def _torch() -> Case:
    import torch

    net = torch.nn.Linear(2, 3)
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(_WEIGHTS.T))
        net.bias.copy_(torch.from_numpy(_BIAS))
    return Case("torch", net, lambda x: net(torch.from_numpy(x)).detach().numpy())


def _keras() -> Case:
    import keras

    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    net.layers[0].set_weights([_WEIGHTS, _BIAS])
    return Case("keras", net, lambda x: net.predict(x, verbose=0))


def _lightgbm() -> Case:
    import lightgbm

    frame = rows(600)
    x = frame[["a", "b"]].to_numpy(np.float32)
    parameters = {"objective": "multiclass", "num_class": 3, "verbose": -1, "num_threads": 1, "deterministic": True}
    booster = lightgbm.train(parameters, lightgbm.Dataset(x, (x @ _WEIGHTS + _BIAS).argmax(1)), 5)
    return Case("lightgbm", booster, booster.predict, activation="none")


def _onnx() -> Case:
    import onnxruntime

    from tritium.model.engines.onnx import ONNXFile

    content = onnx_file()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return Case("onnx", ONNXFile(content), lambda x: session.run(None, {"x": x})[0])


def _linear(batch: Any) -> Any:
    return batch["x"] @ _WEIGHTS + _BIAS


def _function() -> Case:
    return Case("function", _linear, lambda x: _linear({"x": x}))


def check_on_spark(spark: Any, case: Case, tmp_path: Path) -> None:
    """Check that a batch, a stream and an evaluator have the numbers and words of the framework."""
    frame = rows(60).assign(wine=lambda rows: case.words(rows))
    frame.loc[7, "a"] = float("nan")
    df = spark.createDataFrame(frame).repartition(2)
    model = case.model().transformer(label_index_col="wine_index", on_error="column")
    words = dict(zip(frame.id, frame.wine, strict=True)) | {7: None}
    scored = model.transform(df)
    assert {row.id: row.prediction_label for row in scored.collect()} == words
    good = scored.where("prediction_error IS NULL")
    assert MulticlassClassificationEvaluator(labelCol="wine_index", metricName="accuracy").evaluate(good) == 1
    PipelineModel([model]).write().overwrite().save(str(tmp_path / "pipeline"))
    spark.conf.set("spark.tritium.trustModels", "true")
    try:
        (again,) = PipelineModel.load(str(tmp_path / "pipeline")).stages
    finally:
        spark.conf.unset("spark.tritium.trustModels")
    assert type(again) is type(model)
    df.write.parquet(str(tmp_path / "rows"))
    stream = again.transform(spark.readStream.schema(df.schema).parquet(str(tmp_path / "rows")))
    query = stream.writeStream.format("memory").queryName(f"words_{case.name}").start()
    try:
        query.processAllAvailable()
        found = spark.table(f"words_{case.name}").collect()
    finally:
        query.stop()
        spark.catalog.dropTempView(f"words_{case.name}")
    assert {row.id: row.prediction_label for row in found} == words
