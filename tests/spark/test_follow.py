"""A streaming query takes newer versions of its model while it runs, and refuses those that don't fit."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pandas as pd
import pytest
from torch import nn

import tritium as tr
from tritium.events import Event, MicroBatchScored, ModelVersion
from tritium.model.signature import Input, Output, Signature
from tritium.predict import following

SIGNATURE = Signature((Input("features", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),), "regression")
SECONDS = 60.0
TRUSTED = f"{__name__}:net"


def net() -> nn.Linear:
    return nn.Linear(2, 1)


def adding(bias: float, columns: tuple[str, ...] = ("a", "b")) -> tr.Model:
    """Return a model that adds two columns and a bias."""
    module = net()
    nn.init.ones_(module.weight)
    nn.init.constant_(module.bias, bias)
    signature = Signature((Input("features", columns, "float32", (2,)),), (Output("y", shape=(1,)),), "regression")
    return tr.Model(module, signature, origin=TRUSTED)


@pytest.fixture(autouse=True)
def _a_short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "GRACE", 0.2)


class Events:
    """The events of queries, by kind."""

    def __init__(self) -> None:
        self.versions: queue.Queue[ModelVersion] = queue.Queue()
        self.batches: queue.Queue[MicroBatchScored] = queue.Queue()

    def put(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, ModelVersion):
            self.versions.put(event)
        elif isinstance(event, MicroBatchScored):
            self.batches.put(event)


@pytest.fixture
def events() -> Iterator[Events]:
    had = Events()
    with tr.listen(had.put):
        yield had


class Query:
    """A query over files, and the versions that scored each of its micro-batches."""

    def __init__(self, spark: Any, scored: Callable[[Any], Any], folder: Path) -> None:
        self.spark, self.source, self.sink = spark, folder / "source", folder / "sink"
        self.source.mkdir()
        self.rows = 0
        stream = spark.readStream.schema("id long, a double, b double").json(str(self.source))
        writer = scored(stream.repartition(2)).writeStream.format("parquet")
        self.query = writer.option("checkpointLocation", str(folder / "checkpoint")).start(str(self.sink))

    def batch(self) -> list[tuple[int, float]]:
        """Score ten rows more in one micro-batch, and return the versions in it with the bias of each row."""
        frame = pd.DataFrame({"id": range(self.rows, self.rows + 10), "a": 1.0, "b": 2.0})
        self.rows += 10
        frame.to_json(self.source / f".{self.rows}", orient="records", lines=True)
        (self.source / f".{self.rows}").rename(self.source / f"{self.rows}.json")
        self.query.processAllAvailable()
        rows = self.spark.read.parquet(str(self.sink)).where(f"id >= {self.rows - 10}").collect()
        assert len(rows) == 10
        return sorted({(row.model_version, row.prediction - 3) for row in rows})

    def until(self, version: int) -> tuple[int, float]:
        """Score micro-batches until one is scored by this version; each is scored by one."""
        deadline = time.monotonic() + SECONDS
        while True:
            (only,) = self.batch()
            if only[0] == version:
                return only
            assert time.monotonic() < deadline, only


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
def test_a_query_takes_newer_versions_and_refuses_what_does_not_fit(
    cluster: Any, tmp_path: Path, events: Events, saved_elsewhere: None
) -> None:
    path = str(tmp_path / "models")
    assert tr.publish(adding(10), path) == 1
    model = adding(0).follow(path, every=0.1, trusted=TRUSTED).setParams(metrics="bikes")
    query = Query(cluster.spark, model.transform, tmp_path)
    try:
        assert query.batch() == [(1, 10.0)]
        assert tr.publish(adding(20), path) == 2
        assert events.versions.get(timeout=SECONDS).version == 2
        assert query.until(2) == (2, 20.0)
        assert tr.publish(adding(30, ("a", "c")), path) == 3
        assert "its inputs are" in str(events.versions.get(timeout=SECONDS).refused)
        damaged = tmp_path / "damaged"
        adding(40).save(str(damaged))
        weights = (damaged / "model.safetensors").read_bytes()
        (damaged / "model.safetensors").write_bytes(weights[:-1] + b"!")
        shutil.move(damaged, tmp_path / "models" / "4")
        assert "damaged" in str(events.versions.get(timeout=SECONDS).refused)
        module = type("Own", (nn.Linear,), {})(2, 1)
        assert tr.publish(tr.Model(module, SIGNATURE), path) == 5
        assert "trusted" in str(events.versions.get(timeout=SECONDS).refused)
        assert query.batch() == [(2, 20.0)]
        assert tr.publish(f"{path}/1", path) == 6
        assert events.versions.get(timeout=SECONDS) == ModelVersion(path=path, version=6, time=ANY)
        assert query.until(6) == (6, 10.0)
        observed = [p["observedMetrics"]["bikes"] for p in query.query.recentProgress if p["numInputRows"]]
        assert {row["rows"] for row in observed} == {10}
        assert sorted({row["model_version"] for row in observed}) == [1, 2, 6]
        assert all(0 < row["model_ms_p50"] <= row["model_ms_p99"] < 1000 * SECONDS for row in observed)
        assert all(row["model_rows_per_second"] > 0 for row in observed)
        for row in observed:  # An event says the same of each micro-batch.
            event = events.batches.get(timeout=SECONDS)
            assert (event.metrics, event.query) == ("bikes", str(query.query.id))
            assert {name: getattr(event, name) for name in row.asDict()} == row.asDict()
    finally:
        query.query.stop()
        model.stop_following()
    assert sorted(file.name for file in Path(path).iterdir()) == ["1", "2", "3", "4", "5", "6"]
