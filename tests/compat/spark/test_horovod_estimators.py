"""The estimators of horovod.spark on a Spark session: trained, applied, saved, loaded."""

from __future__ import annotations

import base64
import importlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import DataFrame, SparkSession

from tritium.compat.horovod.spark.common.backend import SparkBackend
from tritium.compat.horovod.spark.common.store import Store
from tritium.compat.horovod.spark.common.util import get_dataset_properties, prepare_data
from tritium.compat.horovod.spark.torch import TorchEstimator, TorchModel
from tritium.errors import BadData, BadSetting, ModelError, NotEnoughSlots

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _names() -> None:
    """Make the names of Horovod importable, in ranks too, for the time of a test."""
    importlib.import_module("tritium.compat")


@pytest.fixture
def df(spark: SparkSession) -> DataFrame:
    x = np.random.default_rng(0).uniform(-1, 1, (64, 2))
    rows = [(float(a), float(b), float(3 * a - b), int(a > 0), bool(b > 0.5)) for a, b in x]
    table = spark.createDataFrame(rows, ["a", "b", "y", "kind", "v"])
    return VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(table)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.last(x)
        return found[:, :1], found[:, 1:]


class InThisProcess:
    """A backend as somebody may have written it."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self) -> int:
        return 1


def kinds(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, label.reshape(-1).long())


def estimator(store: Any, **given: Any) -> Any:
    net = Two()
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
        loss=[torch.nn.MSELoss(), kinds],
        store=store,
        feature_cols=["x"],
        label_cols=["y", "kind"],
        input_shapes=[[-1, 2]],
        batch_size=8,
        epochs=2,
        verbose=0,
        **given,
    )


def test_a_training_its_model_and_the_store(df: DataFrame, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    one = estimator(store, backend=SparkBackend(2, verbose=0), validation="v", run_id="one")
    model = one.fit(df)
    assert [entry["epoch"] for entry in model.getHistory()] == [0, 1]
    assert "loss" in model.getHistory()[-1]["validation"]
    assert store.exists(store.get_checkpoint_path("one") + "/checkpoint")
    assert not (tmp_path / "store" / "intermediate_train_data").exists()
    assert not list((tmp_path / "store" / "runs" / "one").glob(".driver-*"))
    assert model.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)
    found = model.transform(df)
    assert [(f.name, f.dataType.typeName()) for f in found.schema.fields[-2:]] == [
        ("y__output", "double"),
        ("kind__output", "vectorudt"),
    ]
    row = found.select("x", "y__output", "kind__output").head()
    with torch.no_grad():
        expected, scores = model.getModel()(torch.tensor(row["x"].toArray(), dtype=torch.float32)[None])
    assert row["y__output"] == pytest.approx(expected.item(), rel=1e-5)
    assert row["kind__output"].toArray() == pytest.approx(scores[0].numpy(), rel=1e-5)
    model.setOutputCols(["p", "q"]).write().overwrite().save(str(tmp_path / "model"))
    again = TorchModel.load(str(tmp_path / "model"))
    assert again.getRunId() == "one"
    assert again.transform(df).select("p").head()["p"] == pytest.approx(row["y__output"], rel=1e-5)
    with pytest.raises(BadSetting, match="Output col 'a' exists"):
        model.setOutputCols(["a", "q"]).transform(df)
    with pytest.raises(BadData, match="feature_cols: the DataFrame has no column 'z'"):
        one.copy({one.feature_cols: ["z"]}).fit(df)
    with pytest.raises(NotEnoughSlots):
        one.copy({one.backend: SparkBackend(9, verbose=0)}).fit(df)


def test_prepared_data_and_a_backend_of_ones_own(df: DataFrame, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    with prepare_data(1, store, df, ["y", "kind"], ["x"], validation=0.25) as number:
        rows, validating, metadata, _ = get_dataset_properties(number)
        assert rows + validating == 64
        assert metadata["x"]["spark_data_type"].__name__ == "DenseVector"
        model = estimator(store, backend=InThisProcess(), validation=0.25).fit_on_parquet(dataset_idx=number)
    assert len(model.getHistory()) == 2
    assert estimator(store, backend=InThisProcess()).fit(df).transform(df).count() == 64


def test_equal_rows_are_drawn_one_by_one_and_each_is_written_once(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(0, 2000, 1, 3).selectExpr("id % 3 as x", "double(id % 2) as y", "id as n").repartition(4)
    store = Store.create(str(tmp_path))
    with prepare_data(1, store, rows, ["y"], ["x", "n"], validation=0.25) as number:
        train, held = map(spark.read.parquet, (store.get_train_data_path(number), store.get_val_data_path(number)))
        numbers = [sorted(row.n for row in part.collect()) for part in (train, held)]
        counts = {(row.x, row.y): row["count"] for row in held.groupBy("x", "y").count().collect()}
    assert sorted(numbers[0] + numbers[1]) == list(range(2000))
    assert abs(len(numbers[1]) - 500) < 100
    assert len(counts) == 6
    assert all(abs(count - 2000 / 24) < 45 for count in counts.values())
    assert held.columns == ["x", "n", "y"]


def test_a_model_that_real_horovod_saved(spark: SparkSession, tmp_path: Path) -> None:
    def text(value: Any) -> str:
        return base64.b64encode(pickle.dumps(value)).decode()

    def write(name: str, **params: str) -> str:
        metadata = {"class": "horovod.spark.torch.estimator.TorchModel", "timestamp": 0, "sparkVersion": "3.3.0"}
        metadata |= {"uid": f"TorchModel_{name}", "paramMap": params, "defaultParamMap": {}}  # type: ignore[dict-item]
        place = tmp_path / name / "metadata"
        place.mkdir(parents=True)
        (place / "part-00000").write_text(json.dumps(metadata) + "\n")
        return str(tmp_path / name)

    net = torch.nn.Linear(2, 1)
    good = write("good", model=text(net), label_columns=text(["y"]), history=text([{"epoch": 0}]), run_id=text("one"))
    model = TorchModel.load(good)
    assert (model.getHistory(), model.getRunId()) == ([{"epoch": 0}], "one")
    assert torch.equal(model.getModel().weight, net.weight)
    gone = base64.b64encode(b"cnothing.of.this.name\nClass\n.").decode()
    with pytest.raises(ModelError, match=r"saved with other versions of its libraries.*model: ModuleNotFoundError"):
        TorchModel.load(write("bad", model=gone))
    with pytest.warns(UserWarning, match="loss can't be read here, and is left out"):
        assert TorchModel.load(write("part", model=text(net), loss=gone)).getModel() is not None
