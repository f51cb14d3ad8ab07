"""Stalls under Spark: a rank of a Spark task, a source that blocks, and a Spark that stops sending."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from clusters import wait
from tritium.errors import Stalled
from tritium.gang.driver import outcome as finish

LIMIT = 3.0


def launch(spark: Any, fn: Callable[..., Any], run_dir: Path, **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "progress": False, "output": "none", "run_dir": str(run_dir), "retries": 0}
    return tr.launch(fn, spark=spark, **{**quiet, "stall_timeout": LIMIT, **settings})


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def total() -> int:
    return sum(batch.rows for epoch in tr.world().shard("train").epochs(1, batch_size=1024) for batch in epoch)


class Accomplice:
    """A thread that causes the fault, and keeps its own error."""

    def __init__(self, deed: Callable[[], None]) -> None:
        self.problem: BaseException | None = None
        self._deed = deed
        self._thread = threading.Thread(target=self._do)

    def _do(self) -> None:
        try:
            self._deed()
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            self.problem = error

    def __enter__(self) -> Accomplice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        assert self.problem is None, self.problem


def test_a_frozen_rank_of_a_spark_task(spark: Any, tmp_path: Path) -> None:
    def train() -> None:
        world = tr.world()
        world.log(step=0)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()

    with pytest.raises(Stalled) as caught:
        launch(spark, train, tmp_path / "run")
    assert (caught.value.rank, caught.value.step) == (1, 1)
    assert "its process is stopped" in str(caught.value)
    assert "in train" in caught.value.stacks[0]  # a task of Spark's lets the signal through
    assert spark.range(3).count() == 3


def test_a_source_that_blocks_before_the_gang_can_start_is_said(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish, "FIRST_WORD_SECONDS", 3.0)
    run_dir, gate = tmp_path / "run", str(tmp_path / "gate")

    def blocks(frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            while not os.path.exists(gate):
                time.sleep(0.1)
            yield frame

    def said() -> str:
        return "\n".join(note["text"] for note in events(run_dir, "note"))

    def open_it() -> None:
        try:
            wait(lambda: "Spark still computes the source (" in said(), "it is said", 50)
        finally:
            Path(gate).touch()

    frame = spark.range(0, 8000, 1, 4).mapInPandas(blocks, "id long")
    with Accomplice(open_it):
        assert sum(launch(spark, total, run_dir, data={"train": frame}, start_timeout=60)) == 8000
    assert re.search(r"Spark still computes the source \(0 of \d+ tasks have ended, none in the last \d+ s", said())


@pytest.mark.parametrize("shuffle", ["full", "stream"])
def test_a_spark_that_stops_sending(spark: Any, shuffle: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    machine = next(p for p in psutil.Process().children(recursive=True) if p.name() == "java")

    def freeze() -> None:
        wait(lambda: events(run_dir, "rows"), "rows come", 60)
        machine.send_signal(signal.SIGSTOP)
        try:
            wait((run_dir / "stacks/rank-1.txt").exists, "the stall is told", 30)
        finally:
            machine.send_signal(signal.SIGCONT)

    from pyspark.sql import functions as F

    frame = spark.range(0, 3_000_000, 1, 4).select(*(F.rand(k).alias(f"c{k}") for k in range(16)))
    with Accomplice(freeze), pytest.raises(Stalled, match=r"^No rows came from the source for [\d.]+ s: rank \d on"):
        launch(spark, total, run_dir, data={"train": tr.Data(frame, shuffle=shuffle)})
    assert spark.range(3).count() == 3
