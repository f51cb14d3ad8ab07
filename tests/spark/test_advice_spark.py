"""The Spark settings in messages and pages exist in this Spark, and the advice in errors of runs on Spark works."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.errors import PythonException
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import functions as F
from torch import nn

import advice
import tritium as tr
from tritium import errors
from tritium.ml import TorchModel, fit
from tritium.model.signature import Input, Output, Signature

# Objects whose creation registers Spark's settings (org.apache.spark.internal.config.ConfigEntry).
REGISTERS = (
    "org.apache.spark.internal.config.package$",
    "org.apache.spark.internal.config.Python$",
    "org.apache.spark.internal.config.Worker$",
    "org.apache.spark.sql.internal.SQLConf$",
    "org.apache.spark.deploy.k8s.Config$",
)

# Keys that Spark does not register as entries, and where they are documented or used.
UNREGISTERED = {
    "spark.tritium.trustModels": "ours: read by ModelReader and ParamsReader",
    "spark.tritium.inside": "ours: read by spark/inside/__init__.py",
    "spark.tritium.driver.host": "ours: read by gang/driver/address.py",
    "spark.tritium.driver.bindAddress": "ours: read by gang/driver/address.py",
    "spark.tritium.driver.port": "ours: read by gang/driver/address.py",
    "spark.tritium.ui": "ours: read by gang/driver/on_cluster.py",
    "spark.port.maxRetries": "https://spark.apache.org/docs/latest/configuration.html; read by Utils.portMaxRetries",
    "spark.worker.resource.gpu.discoveryScript": "https://spark.apache.org/docs/latest/spark-standalone.html",
    "spark.executor.resource.gpu.amount": "https://spark.apache.org/docs/latest/configuration.html",
    "spark.task.resource.gpu.amount": "https://spark.apache.org/docs/latest/configuration.html",
    "spark.task.resource": "in front of a resource's name: https://spark.apache.org/docs/latest/configuration.html",
    "spark.executorEnv": "in front of a variable's name: https://spark.apache.org/docs/latest/configuration.html",
    "spark.executorEnv.TRITIUM_ENVIRONMENTS": "ours: read by gang/supervisor/packages.py",
    "spark.executorEnv.TRITIUM_FETCHED": "ours: read by gang/rank/fetch.py",
    "spark.hadoop": "in front of Hadoop's own settings: https://spark.apache.org/docs/latest/configuration.html",
    "spark.local.dir": "https://spark.apache.org/docs/latest/configuration.html; read by Utils.getConfiguredLocalDirs",
}


def keys() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for texts in (advice.messages(), advice.in_pages()):
        for fragment, places in advice.fragments(texts)["spark"].items():
            if advice.config(fragment):
                found.setdefault(fragment, []).extend(places)
    return found


def registered(spark: Any, key: str) -> bool:
    jvm = spark._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in REGISTERS:
        jvm.java.lang.Class.forName(name, True, loader)
    return jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(key) is not None


def test_every_setting_of_spark_that_is_named_exists(spark: Any) -> None:
    named = keys()
    assert {"spark.task.cpus", "spark.driver.maxResultSize", "spark.tritium.trustModels"} <= set(named)
    unknown = {key: places for key, places in named.items() if key not in UNREGISTERED and not registered(spark, key)}
    assert unknown == {}


@pytest.mark.parametrize("key", ["spark.driver.maxResultsSize", "spark.local.dirs"])
def test_a_misspelt_setting_is_found(spark: Any, key: str) -> None:
    assert not registered(spark, key)


# --- what an error advises, taken from its text and done

QUIET: dict[str, Any] = {"progress": False}


class Words(nn.Module):
    """A model of two numbers and the index of a word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(1000, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, self.words(s)], 1))


FRAME = pd.DataFrame({"a": [0.0, 1.0, 2.0, 3.0], "b": [1.0, 0.0, 1.0, 0.0]})
MODEL = TorchModel(tr.Model(nn.Linear(2, 1), Signature((Input("x", ("a", "b"), shape=(2,)),), (Output("y"),))))


def rows() -> int:
    return tr.world().shard("train").rows


def followed(text: str, df: Any) -> Any:
    """Return the DataFrame that the text's own code makes of `df`."""
    (code,) = re.findall(r"df\.(?:where|dropna)\((?:[^()]|\([^()]*\))*\)|df\[df\[.*?\)\]", text)
    return eval(code, {**vars(F), "df": df})


def test_fewer_ranks_and_no_gpus(spark: Any) -> None:
    with pytest.raises(errors.NotEnoughSlots) as caught:
        tr.launch(lambda: 1, ranks=3, **QUIET)
    (ranks,) = re.findall(r"Ask for ranks=(\d+)", str(caught.value))
    with pytest.raises(errors.NotEnoughSlots, match=r"gpus=0 asks for them"):
        tr.launch(lambda: 1, ranks=1, gpus=1, **QUIET)
    assert tr.launch(lambda: 1, ranks=int(ranks), gpus=0, **QUIET) == [1, 1]


def test_a_pandas_frame_on_a_cluster(spark: Any) -> None:
    with pytest.raises(errors.SetupError, match=r'spark.createDataFrame\(.*\).*on="driver"'):
        tr.launch(rows, ranks=1, data={"train": FRAME}, **QUIET)
    assert tr.launch(rows, ranks=1, data={"train": spark.createDataFrame(FRAME)}, **QUIET) == [4]
    assert tr.launch(rows, ranks=1, data={"train": FRAME}, on="driver", **QUIET) == [4]


def test_a_spark_frame_without_a_cluster(spark: Any) -> None:
    df = spark.createDataFrame(FRAME)
    with pytest.raises(errors.BadData, match=r"df.toArrow\(\)"):
        tr.launch(rows, ranks=1, data={"train": df}, on="here", **QUIET)
    assert tr.launch(rows, ranks=1, data={"train": df.toArrow()}, on="here", **QUIET) == [4]
    settings = {
        "model": lambda: nn.Linear(1, 1), "loss": nn.MSELoss(), "optimizer": torch.optim.SGD, "feature_cols": ["a"],
        "label_cols": ["b"], "on": "here", "verbose": False, **QUIET,
    }  # fmt: skip
    with pytest.raises(errors.BadSetting, match=r"give df.toPandas\(\)"):
        fit(df, **settings)
    assert fit(df.toPandas(), **settings).history


@pytest.mark.parametrize("hole", ["NULL", "double('NaN')", "double('inf')"])
def test_rows_are_dropped_with_the_code_of_the_error(spark: Any, hole: str) -> None:
    df = spark.createDataFrame(FRAME).withColumn("b", F.expr(f"IF(a = 2, {hole}, b)"))
    with pytest.raises(errors.BadRow) as refused:
        tr.launch(rows, ranks=1, data={"train": df}, **QUIET)
    assert tr.launch(rows, ranks=1, data={"train": followed(str(refused.value), df)}, **QUIET) == [3]
    with pytest.raises(PythonException) as raised:
        MODEL.transform(df).collect()
    last = str(raised.value).splitlines()[-1]
    assert last.startswith("tritium.errors.BadRow: column 'b' is ")
    assert len(MODEL.transform(followed(last, df)).collect()) == 3


@pytest.mark.parametrize(
    ("column", "hole"),
    [
        ("array", "float('nan')"), ("array", "float('-inf')"), ("array", "null"), ("matrix", "float('inf')"),
        ("matrix", "null"), ("vector", "float('nan')"),
    ],
)  # fmt: skip
def test_rows_with_a_hole_in_an_array_are_dropped_with_the_code_of_the_error(
    spark: Any, column: str, hole: str
) -> None:
    df = spark.range(5).select(F.expr(f"array(1.0D, if(id = 3, double({hole.removeprefix('float')}), 2.0D)) AS array"))
    df = df.withColumn("matrix", F.expr("array(array(0.0D, 0.0D), array)"))
    df = df.withColumn("vector", array_to_vector("array")).select(column)
    with pytest.raises(errors.BadRow) as refused:
        tr.launch(rows, ranks=1, data={"train": df}, **QUIET)
    said = str(refused.value)
    for_spark, *for_pandas = re.findall(r"`(df.+?)`(?=[,)])", said)
    names = {**vars(F), "F": F, "vector_to_array": vector_to_array, "np": np}
    assert eval(for_spark, names, {"df": df}).count() == 4, for_spark
    if column == "array":
        frame = pd.DataFrame({"array": [[1.0, 2.0], [1.0, None if hole == "null" else eval(hole)]]})
        assert len(eval(for_pandas[0], names, {"df": frame})) == 1, for_pandas


def test_another_name_for_a_prediction(spark: Any) -> None:
    df = spark.createDataFrame(FRAME.assign(prediction=1.0))
    with pytest.raises(errors.BadSetting, match=r"or choose another name with setParams\(prediction_col=…\)"):
        MODEL.transform(df)
    assert "other" in MODEL.copy().setParams(prediction_col="other").transform(df).columns
    assert "prediction" in MODEL.transform(df.withColumnRenamed("prediction", "old")).columns


def test_columns_that_an_estimator_refuses_become_numbers(spark: Any) -> None:
    df = spark.createDataFrame(FRAME).select("b", F.lit("red").alias("s"), F.current_timestamp().alias("t"))
    settings = {
        "model": Words, "loss": nn.MSELoss(), "optimizer": torch.optim.SGD, "label_cols": ["b"],
        "on": "here", "verbose": False, **QUIET,
    }  # fmt: skip
    with pytest.raises(errors.BadData, match=r"vocabulary=\['s'\]") as caught:
        fit(df.toPandas(), feature_cols=["s", "t"], **settings)
    assert re.findall(r"F\.\w+", str(caught.value)) == ["F.hour", "F.dayofweek", "F.unix_timestamp"]
    numbers = df.withColumns({"h": F.hour("t"), "d": F.dayofweek("t")}).select("b", "s", "h", "d")
    features = {"x": ["h", "d"], "s": "s"}
    assert fit(numbers.toPandas(), feature_cols=features, vocabulary=["s"], **settings).history
    assert fit(numbers.toPandas(), feature_cols=features, hash_buckets={"s": 1000}, **settings).history
