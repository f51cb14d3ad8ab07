"""The run directory of a streaming query that scores: real queries over files, as `tritium ui` reads them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from torch import nn

import tritium as tr
from tritium.errors import BadSetting
from tritium.events import MicroBatchScored
from tritium.gang.driver.told import told
from tritium.model.signature import Input, Output, Signature
from tritium.observe.run_directory import EVENTS, OLDER_EVENTS
from tritium.predict import following, query_run, weights
from tritium.predict.query_run import QueryRun
from tritium.ui import prometheus
from tritium.ui.folder import RunFolder
from tritium.ui.runs import Runs, RunView

SIGNATURE = Signature((Input("features", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),), "regression")


def net() -> nn.Linear:
    return nn.Linear(2, 1)


TRUSTED = f"{__name__}:net"
EVERYWHERE = pytest.mark.parametrize("cluster", ["local", "connect"], indirect=True)


def parts_of(run_dir: Path) -> dict[str, Any]:
    return RunView(RunFolder(str(run_dir)), told).whole()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return the event that is set when the end of a query is recorded: Spark tells of it in a thread of its own."""
    done, ended = threading.Event(), QueryRun.ended

    def record(run: QueryRun, exception: str | None) -> None:
        ended(run, exception)
        done.set()

    monkeypatch.setattr(QueryRun, "ended", record)
    return done


class Query:
    """A query over files that scores with a model."""

    def __init__(self, spark: Any, transform: Callable[[Any], Any], folder: Path) -> None:
        self.source = folder / "source"
        self.source.mkdir(exist_ok=True)
        stream = spark.readStream.schema("id long, a double, b double").json(str(self.source))
        writer = transform(stream).writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
        self.query = writer.start()

    def batch(self, number: int, a: float | None = 1.0) -> None:
        """Score ten rows in a micro-batch; the first has this `a`."""
        frame = pd.DataFrame({"id": range(10), "a": 1.0, "b": 2.0})
        frame["a"] = frame["a"].astype(object)
        frame.loc[0, "a"] = a
        hidden = self.source / f".{number}"
        frame.to_json(hidden, orient="records", lines=True)
        hidden.rename(self.source / f"{number}.json")
        self.query.processAllAvailable()


@EVERYWHERE
def test_a_query_is_on_the_page_with_its_versions_and_bad_rows(
    cluster: Any, tmp_path: Path, ends: threading.Event, saved_elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "GRACE", 0.2)
    models, run_dir = str(tmp_path / "models"), tmp_path / "runs" / "bikes"
    published = tr.Model(net(), SIGNATURE, origin=TRUSTED)
    tr.publish(published, models)
    model = published.follow(models, every=0.1, trusted=TRUSTED)
    model.setParams(on_error="null", run_dir=str(run_dir))
    query = Query(cluster.spark, model.transform, tmp_path)
    try:
        query.batch(1, None)
        tr.publish(published, models)
        number = 2
        while '"model_version": 2' not in (run_dir / EVENTS).read_text() if (run_dir / EVENTS).exists() else True:
            query.batch(number)
            number += 1
            assert number < 300
        parts = parts_of(run_dir)
        metrics = prometheus.text(Runs([str(run_dir)], told))
    finally:
        query.query.stop()
        model.stop_following()
    assert parts["head"]["status"] == "running"
    assert "model version 2, micro-batch" in parts["head"]["phase"]
    last, window = parts["scored"]
    assert (last["rows"], last["bad rows"], last["model version"]) == (10, 0, 2)
    assert (window["rows"], window["bad rows"]) == (10 * window["last micro-batches"], 1)
    assert 0 < window["p50 s"] <= window["p99 s"]
    assert 0 < last["model ms p50"] <= last["model ms p99"]
    assert last["rows/s"] == pytest.approx(10 / last["p50 s"], rel=0.01)
    assert {name for name in parts if name.startswith("scored ")} >= {"scored rows/s", "scored model ms: p99"}
    assert any(entry["text"] == f"version 2 of {models} is taken" for entry in parts["events"])
    assert [(one["kind"], one["name"], one["dtype"], one["shape"]) for one in parts["model"]] == [
        ("input", "features", "float32", [2]),
        ("output", "y", "float32", [1]),
    ]
    run = parts["head"]["run"]
    assert f'tritium_query_model_version{{run="{run}"}} 2\n' in metrics
    assert f'tritium_query_bad_rows{{run="{run}"}} 1\n' in metrics
    assert ends.wait(60)
    assert parts_of(run_dir)["head"]["status"] == "succeeded"
    assert "a query that scores, bikes" in (run_dir / "report.html").read_text()
    assert json.loads((run_dir / "report.json").read_text())["ok"]


@EVERYWHERE
@pytest.mark.parametrize("good", [0, 2])
def test_the_error_of_a_query_is_told_also_of_its_first_micro_batch(
    cluster: Any, tmp_path: Path, ends: threading.Event, good: int
) -> None:
    run_dir = tmp_path / "bikes"
    model = tr.Model(net(), SIGNATURE).transformer().setParams(run_dir=str(run_dir))
    query = Query(cluster.spark, model.transform, tmp_path)
    for number in range(good):
        query.batch(number)
    with pytest.raises(StreamingQueryException):
        query.batch(good, None)
    assert ends.wait(60)
    head = parts_of(run_dir)["head"]
    assert head["status"] == "failed"
    assert head["failure"].startswith("The query failed: ")
    assert "column 'a'" in head["failure"], head["failure"]
    assert "Traceback" in head["whole"]
    assert len(parts_of(run_dir)["scored"]) == min(good, 2)


@pytest.mark.parametrize("cluster", ["connect"], indirect=True)
def test_weights_that_a_query_of_connect_can_not_carry_are_refused_and_its_batches_score(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CARRIED_BYTES", 100)
    model = tr.Model(nn.Linear(2, 64), replace(SIGNATURE, outputs=(Output("y", shape=(64,)),))).transformer()
    with pytest.raises(BadSetting, match=r"foreachBatch\(…\), whose DataFrames are batches"):
        Query(cluster.spark, model.transform, tmp_path)

    scored = str(tmp_path / "scored")

    def score(batch: Any, _: int) -> None:
        model.transform(batch).write.mode("append").parquet(scored)

    (tmp_path / "source").mkdir(exist_ok=True)
    pd.DataFrame({"a": [1.0], "b": 2.0}).to_json(tmp_path / "source" / "1.json", orient="records", lines=True)
    stream = cluster.spark.readStream.schema("a double, b double").json(str(tmp_path / "source"))
    query = stream.writeStream.foreachBatch(score).trigger(availableNow=True)
    begun(query.option("checkpointLocation", str(tmp_path / "checkpoint"))).awaitTermination()
    assert cluster.spark.read.parquet(scored).count() == 1


def begun(query: Any) -> Any:
    """Start it. Spark gives the Python process of foreachBatch 10 s to start, which has no setting: on a busy machine
    that is too short at times."""
    while True:
        try:
            return query.start()
        except SparkConnectGrpcException as error:
            if "Python worker failed to connect back" not in str(error):
                raise
        workers = [process for process in psutil.process_iter(["cmdline"]) if is_of_batches(process)]
        assert not psutil.wait_procs(workers, 60)[1]


def is_of_batches(process: psutil.Process) -> bool:
    return "pyspark.sql.connect.streaming.worker.foreach_batch_worker" in (process.info["cmdline"] or ())


def test_another_query_that_fails_is_not_taken_for_it(spark: Any, tmp_path: Path, ends: threading.Event) -> None:
    run_dir = tmp_path / "bikes"
    model = tr.Model(net(), SIGNATURE).transformer().setParams(run_dir=str(run_dir))
    (tmp_path / "other").mkdir()
    query = Query(spark, model.transform, tmp_path)
    other = Query(spark, lambda df: df.selectExpr("raise_error('no') AS id"), tmp_path / "other")
    with pytest.raises(StreamingQueryException):
        other.batch(0)
    query.batch(0)
    query.query.stop()
    assert ends.wait(60)
    assert parts_of(run_dir)["head"]["status"] == "succeeded"


def test_events_of_months_take_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_run, "EVENTS_BYTES", 20_000)
    run = QueryRun(str(tmp_path), "bikes", SIGNATURE)
    view = RunView(RunFolder(str(tmp_path)), told)
    for batch in range(1000):
        time = datetime.fromtimestamp(batch, timezone.utc).isoformat()
        run.event(MicroBatchScored(time=time, metrics="bikes", query="q", batch=batch, rows=batch, seconds=0.5))
        if batch % 10 == 0:  # The page goes on where a file is replaced.
            assert view.whole()["scored"][0]["rows"] == batch
    sizes = [(tmp_path / name).stat().st_size for name in (EVENTS, OLDER_EVENTS)]
    assert max(sizes) < 21_000
    afresh = parts_of(tmp_path)
    assert len(afresh["scored rows/s"]["y"]) > 50
    assert afresh["head"]["unread"] == 0
    run.ended(None)
    assert view.whole()["head"]["status"] == "succeeded"


@pytest.mark.parametrize("run_dir", ["s3://bucket/runs", "/dev/null/runs"])
def test_a_directory_that_can_not_be_written_is_refused(spark: Any, run_dir: str, tmp_path: Path) -> None:
    model = tr.Model(net(), SIGNATURE).transformer().setParams(run_dir=run_dir)
    with pytest.raises(BadSetting, match="run_dir="):
        model.transform(spark.readStream.schema("a double, b double").json(str(tmp_path)))
