"""A source that blocks before the gang can start is a stall; one that computes is none."""

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
from tritium.gang.driver import source_watch

LIMIT = 4.0
QUIET: dict[str, Any] = {"ranks": 2, "progress": False, "output": "none", "stall_timeout": LIMIT, "retries": 0}


@pytest.fixture(autouse=True)
def _executors_tell_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_watch, "HEARTBEATS", 0.1)


def test_a_udf_that_waits_for_ever_is_a_stall_that_says_where_it_stands(spark: Any, tmp_path: Path) -> None:
    def wait_for_ever(batches: Iterator[Any]) -> Iterator[Any]:
        threading.Event().wait()
        yield from batches

    # Of one partition: a second task may wait for a slot that the end of another test's job still takes.
    frame = spark.range(0, 100, 1, 1).mapInArrow(wait_for_ever, "id long")
    with pytest.raises(Stalled) as caught:
        tr.launch(lambda: 1, spark=spark, data={"train": frame}, run_dir=str(tmp_path), **QUIET)
    assert str(caught.value).startswith("The source makes no progress: in stage ")
    assert caught.value.tasks == 1
    assert LIMIT <= caught.value.seconds < 10 * LIMIT  # rounded to a tenth
    assert "Where Spark's Python workers on this machine are:\n  pid " in str(caught.value)
    assert "on executor driver: " in str(caught.value)
    assert spark.range(3).count() == 3


def test_a_udf_that_computes_for_longer_than_the_limit_is_none(spark: Any, tmp_path: Path) -> None:
    def compute(batches: Iterator[Any]) -> Iterator[Any]:
        deadline = time.monotonic() + 3 * LIMIT
        while time.monotonic() < deadline:
            sum(range(10_000))
        yield from batches

    frame = spark.range(0, 100, 1, 1).mapInArrow(compute, "id long")
    assert tr.launch(lambda: 1, spark=spark, data={"train": frame}, run_dir=str(tmp_path), **QUIET) == [1, 1]


def test_a_udf_that_asks_a_server_for_every_row_is_none(spark: Any, tmp_path: Path) -> None:
    def ask(batches: Iterator[Any]) -> Iterator[Any]:
        deadline = time.monotonic() + 3 * LIMIT
        while time.monotonic() < deadline:
            time.sleep(0.1)  # as a request that takes so long
        yield from batches

    frame = spark.range(0, 100, 1, 1).mapInArrow(ask, "id long")
    assert tr.launch(lambda: 1, spark=spark, data={"train": frame}, run_dir=str(tmp_path), **QUIET) == [1, 1]


def test_it_can_be_reported_only(spark: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def wait_at_the_gate(batches: Iterator[Any]) -> Iterator[Any]:
        gate.read_text()
        yield from batches

    def told() -> list[str]:
        path = tmp_path / "run" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event["kind"] for event in map(json.loads, lines) if event["kind"] == "stalled"]

    def open_it() -> None:
        try:
            wait(lambda: bool(told()), "it is told", 60)
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
    assert told() == ["stalled"], "once"
