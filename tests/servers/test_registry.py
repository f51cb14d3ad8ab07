"""A query follows an alias of MLflow's registry, on a real server."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import mlflow
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient

import clusters
import tritium as tr
import tritium.mlflow
from mlflow_server import answering
from tritium.errors import BadSetting
from tritium.events import ModelVersion
from tritium.model.signature import Input, Output, Signature
from tritium.predict import following

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow"),
    pytest.mark.timeout(900),
]
SECONDS = 120.0


def adding(bias: float, columns: tuple[str, ...] = ("a", "b")) -> tr.Model:
    """Return a model that adds two columns and a bias."""
    module = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.constant_(module.bias, bias)
    return tr.Model(
        module, Signature((Input("x", columns, "float32", (2,)),), (Output("y", shape=(1,)),), "regression")
    )


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    """Yield a client of a real server, with a registry of its own."""
    database, artifacts = f"sqlite:///{tmp_path}/registry.db", str(tmp_path / "artifacts")
    server = ["server", "--backend-store-uri", database, "--artifacts-destination", artifacts]
    monkeypatch.delenv("_MLFLOW_TELEMETRY_SESSION_ID", raising=False)  # MLflow removes it while it works.
    with answering(server, "/health", tmp_path) as url:
        mlflow.set_tracking_uri(url)
        mlflow.set_experiment("bikes")
        yield MlflowClient()
        mlflow.set_tracking_uri(None)
        for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):  # What these calls have set.
            os.environ.pop(name, None)


def test_a_query_follows_an_alias(
    spark: Any, registry: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "GRACE", 0.2)
    events: queue.Queue[ModelVersion] = queue.Queue()

    def name_champion(version: int) -> None:
        registry.set_registered_model_alias("bikes", "champion", str(version))

    with mlflow.start_run():
        for model in (adding(10), adding(20), adding(30, ("a", "c"))):
            tritium.mlflow.log_model(model, registered_model_name="bikes")
        mlflow.pyfunc.log_model(
            name="other",
            python_model=lambda model_input: model_input,
            pip_requirements=[],
            registered_model_name="bikes",
        )
    name_champion(1)
    alias = "models:/bikes@champion"
    frame = pd.DataFrame({"a": [1.0], "b": [2.0]})
    assert adding(0).transformer().follow(alias).transform(frame).prediction.tolist() == [13.0]
    with pytest.raises(BadSetting, match="has no alias"):
        adding(0).transformer().follow("models:/bikes/1")
    stream = spark.readStream.format("rate").option("rowsPerSecond", 20).load().selectExpr("1.0D a", "2.0D b", "value")
    with pytest.raises(BadSetting, match="spool="):
        adding(0).transformer().follow(alias).transform(stream)
    follower = adding(0).transformer().follow(alias, every=0.2, spool=str(tmp_path / "spool"))
    with tr.listen(events.put):
        scored = follower.transform(stream)
    query = scored.writeStream.format("memory").queryName("followed_alias").start()

    def newest_is(version: int, prediction: float) -> bool:
        rows = spark.sql("SELECT model_version, prediction FROM followed_alias ORDER BY value DESC LIMIT 1").collect()
        assert query.exception() is None
        return [tuple(row) for row in rows] == [(version, prediction)]

    try:
        clusters.wait(lambda: newest_is(1, 13.0), "the first version scores", SECONDS)
        name_champion(2)
        assert events.get(timeout=SECONDS) == ModelVersion(path=alias, version=2, time=ANY)
        clusters.wait(lambda: newest_is(2, 23.0), "the second version scores", SECONDS)
        for version, reason in ((3, "its inputs are"), (4, "none of Tritium's")):
            name_champion(version)
            assert reason in str(events.get(timeout=SECONDS).refused)
        name_champion(1)  # Back, by the alias alone.
        assert events.get(timeout=SECONDS).version == 1
        clusters.wait(lambda: newest_is(1, 13.0), "the first version scores again", SECONDS)
        versions = [row[0] for row in spark.sql("SELECT DISTINCT model_version FROM followed_alias").collect()]
        assert sorted(versions) == [1, 2]
    finally:
        query.stop()
        follower.stop_following()
        spark.sql("DROP VIEW followed_alias")
    assert not tmp_path.joinpath("spool").exists()
