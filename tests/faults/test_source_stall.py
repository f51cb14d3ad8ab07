"""A source that moves no count before the gang can start is reported, and ends the run when that lasts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from clusters import wait
from tritium.errors import Stalled
from tritium.spark import sources

LIMIT = 1.0
QUIET: dict[str, Any] = {"ranks": 2, "progress": False, "output": "none", "stall_timeout": LIMIT, "retries": 0}


@pytest.fixture(autouse=True)
def _executors_tell_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HEARTBEATS", 0.1)


def stalls(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == "stalled"]


def test_a_udf_that_waits_for_ever_is_reported_and_ends_the_run(spark: Any, tmp_path: Path) -> None:
    def wait_for_ever(batches: Iterator[Any]) -> Iterator[Any]:
        threading.Event().wait()
        yield from batches

    # Of one partition: a second task may wait for a slot that the end of another test's job still takes.
    frame = spark.range(0, 100, 1, 1).mapInArrow(wait_for_ever, "id long")
    with pytest.raises(Stalled) as caught:
        tr.launch(lambda: 1, spark=spark, data={"train": frame}, run_dir=str(tmp_path), **QUIET)
    assert str(caught.value).startswith(f"The source makes no progress: in stage {caught.value.stage} of Spark's, ")
    assert caught.value.tasks == 1
    assert 10 * LIMIT < caught.value.seconds < 20 * LIMIT
    (report,) = stalls(tmp_path)
    assert LIMIT <= report["seconds"] < 5 * LIMIT, "long before the end"
    assert report["stage"] == caught.value.stage
    assert spark.range(3).count() == 3


def test_a_udf_that_computes_for_longer_than_the_limit_does_not_end_the_run(spark: Any, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"

    def compute(batches: Iterator[Any]) -> Iterator[Any]:
        while not (events.exists() and '"stalled"' in events.read_text()):  # The run ends if it is never reported.
            sum(range(100_000))
        yield from batches

    frame = spark.range(0, 100, 1, 1).mapInArrow(compute, "id long")
    assert tr.launch(lambda: 1, spark=spark, data={"train": frame}, run_dir=str(tmp_path), **QUIET) == [1, 1]
    assert len(stalls(tmp_path)) == 1


def test_a_source_whose_tasks_end_makes_progress(spark: Any, tmp_path: Path) -> None:
    spark.range(0, 16, 1, 16).write.parquet(str(tmp_path / "rows"))

    def wait_a_little(batches: Iterator[Any]) -> Iterator[Any]:
        time.sleep(0.4 * LIMIT)
        yield from batches

    frame = spark.read.parquet(str(tmp_path / "rows")).repartition(16).mapInArrow(wait_a_little, "id long")
    run = tmp_path / "run"
    assert tr.launch(lambda: 1, spark=spark, data={"train": frame}, run_dir=str(run), **QUIET) == [1, 1]
    assert not stalls(run)


def test_it_can_be_reported_only(spark: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def wait_at_the_gate(batches: Iterator[Any]) -> Iterator[Any]:
        gate.read_text()
        yield from batches

    def open_it() -> None:
        try:
            wait(lambda: bool(stalls(tmp_path / "run")), "it is reported", 60)
        finally:
            gate.write_text("open")

    opener = threading.Thread(target=open_it)
    opener.start()
    frame = spark.range(0, 100, 1, 1).mapInArrow(wait_at_the_gate, "id long")
    try:
        results = tr.launch(
            lambda: 1, spark=spark, data={"train": frame}, run_dir=str(tmp_path / "run"), on_stall="report", **QUIET
        )
    finally:
        opener.join()
    assert results == [1, 1]
    assert len(stalls(tmp_path / "run")) == 1, "once"
