"""A shard that Spark cuts short is never accepted as complete, in whichever order its rows come."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import clusters
import tritium as tr
from tritium.errors import IncompleteShard, RankFailed

pytestmark = pytest.mark.parametrize("cluster", ["local-cluster"], indirect=True)
SHUFFLES = pytest.mark.parametrize("shuffle", ["full", "stream"])
SECONDS = 60.0  # Spark itself asks three times, 5 s apart, for a file that another executor lost


def take_all(place: str) -> int:
    """Write down what a user's function considers complete: each count, and the sum of an epoch."""
    shard = tr.world().shard("train")
    taken = 0
    for epoch in shard.epochs(1, batch_size=4096):
        for batch in epoch:
            taken += batch.rows
    with Path(place, f"{os.getpid()}-{threading.get_native_id()}").open("w") as file:
        json.dump({"rows": shard.rows, "taken": taken, "counts": shard.counts}, file)
    return taken


@SHUFFLES
def test_an_executor_that_holds_map_output_is_killed_while_its_output_is_read(
    cluster: Any, shuffle: str, tmp_path: Path
) -> None:
    spark = cluster.spark
    with Accomplice(lambda: gang_stage(spark), lambda stage: kill_others(spark, stage, tmp_path / "run")) as killer:
        fail(spark, wide(spark), shuffle, tmp_path, ranks=1)
    assert killer.done == 1, "it was another executor than the gang's own that was to be killed"
    succeed(spark, shuffle, tmp_path)


@SHUFFLES
def test_shuffle_files_are_deleted_between_the_map_stage_and_the_read(
    cluster: Any, shuffle: str, tmp_path: Path
) -> None:
    spark, scratch = cluster.spark, os.environ["SPARK_LOCAL_DIRS"]
    clusters.wait(lambda: settled(spark), "both executors are there")

    def lose(batches: Iterator[Any]) -> Iterator[Any]:
        """Remove, once, in the task that starts last, the files of the tasks that have ended."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.partitionId() == 7 and not tmp_path.joinpath("lost").exists():
            lost = [file for file in Path(scratch).rglob("shuffle_*.data") if file.stat().st_size]
            for file in lost:
                file.unlink()
            tmp_path.joinpath("lost").write_text(str(len(lost)))
        yield from batches

    frame = spark.range(0, 80_000, 1, 8).mapInArrow(lose, "id long")
    attempts(spark, frame, shuffle, tmp_path, rows=80_000)
    assert int(tmp_path.joinpath("lost").read_text()) >= 6


@SHUFFLES
def test_the_gangs_own_executor_is_killed_while_it_reads(cluster: Any, shuffle: str, tmp_path: Path) -> None:
    spark = cluster.spark
    clusters.wait(lambda: settled(spark), "both executors are there")
    with Accomplice(lambda: reported(tmp_path / "run"), kill_own) as killer:
        attempts(spark, wide(spark), shuffle, tmp_path, rows=100_000)
    assert killer.done == 1


# --- what goes wrong


class Accomplice:
    """A thread that acts once, as soon as its condition holds."""

    def __init__(self, look: Callable[[], Any], act: Callable[[Any], int]) -> None:
        self.done = 0
        self._look = look
        self._act = act
        self._thread = threading.Thread(target=self._run)
        self._over = threading.Event()

    def _run(self) -> None:
        while not self._over.wait(0.002):  # Spark and the run directory notify nobody
            if (found := self._look()) is not None:
                self.done = self._act(found)
                return

    def __enter__(self) -> Accomplice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def gang_stage(spark: Any) -> int | None:
    """Return the stage of a gang of one, once its task runs: no other stage here has one task."""
    tracker = spark.sparkContext.statusTracker()
    for stage in tracker.getActiveStageIds():
        info = tracker.getStageInfo(stage)
        if info is not None and info.numTasks == 1 and executors_of(spark, stage):
            return int(stage)
    return None


def executors_of(spark: Any, stage: int) -> set[str]:
    """Return the ids of the executors that run this stage's tasks."""
    tasks = spark.sparkContext._jsc.sc().statusStore().taskList(stage, 0, 10)
    return {tasks.apply(i).executorId() for i in range(tasks.size())}


def reported(run_dir: Path) -> psutil.Process | None:
    """Return the first rank process whose supervisor has reported."""
    found = events(run_dir, "reported")
    return psutil.Process(found[0]["pid"]) if found else None


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    file = run_dir / "events.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [event for event in map(json.loads, whole.splitlines()) if event["kind"] == kind]


def kill_others(spark: Any, stage: int, run_dir: Path) -> int:
    """SIGKILL every executor but the one that runs this stage. Return their number.

    They are stopped from the stage's start on, so that what they hold is still unread when its gang has formed.
    """
    processes = executors()
    for process in processes.values():
        process.suspend()
    own = executors_of(spark, stage)
    for executor in own:
        processes[executor].resume()
    clusters.wait(lambda: bool(events(run_dir, "formed")), "the gang has formed")
    for executor in processes.keys() - own:
        processes[executor].kill()
    return len(processes) - len(own)


def kill_own(rank: psutil.Process) -> int:
    """SIGKILL the executor that this rank's supervisor belongs to."""
    own = {parent.pid for parent in rank.parents()}
    killed = [process for process in executors().values() if process.pid in own]
    for process in killed:
        process.kill()
    return len(killed)


def executors() -> dict[str, psutil.Process]:
    """Return executor id → its JVM."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            command = child.cmdline()
            if any("CoarseGrainedExecutorBackend" in word for word in command):
                found[command[command.index("--executor-id") + 1]] = child
    return found


# --- what must hold


def wide(spark: Any) -> Any:
    """Return 26 MB that don't compress, half of them on the other executor: far more than is in flight at once."""
    from pyspark.sql import functions as F

    packed = F.array(*(F.xxhash64("id", F.lit(column)) for column in range(32)))
    return spark.range(0, 100_000, 1, 8).select("id", packed.alias("x"))


def fail(spark: Any, frame: Any, shuffle: str, tmp_path: Path, *, ranks: int) -> BaseException:
    """Assert a clear error in time, that no rank accepted its shard as complete, and that the session answers."""
    records = tmp_path / "records"
    records.mkdir()
    clusters.wait(lambda: settled(spark), "both executors are there")
    began = time.monotonic()
    with pytest.raises((IncompleteShard, RankFailed)) as raised:
        tr.launch(
            take_all,
            ranks=ranks,
            args=(str(records),),
            data={"train": tr.Data(frame, shuffle=shuffle)},
            run_dir=str(tmp_path / "run"),
            retries=0,
            spark=spark,
        )
    assert time.monotonic() - began < SECONDS
    assert not list(records.iterdir()), "a rank took its shard for complete"
    text = str(raised.value)
    assert len(text.split("\n\n")[0]) < 800, text
    report = json.loads(tmp_path.joinpath("run", "report.json").read_text())
    assert not report["ok"]
    assert not report["fingerprint"]
    if isinstance(raised.value, IncompleteShard):
        assert "Spark ended the rows of this rank early" in text or "Spark lost map output of the exchange" in text
        assert "aunch again" in text
    else:
        assert "was lost" in text
    print(f"{type(raised.value).__name__} after {time.monotonic() - began:.1f} s: {text}")
    assert spark.range(1000).count() == 1000
    return raised.value


def attempts(spark: Any, frame: Any, shuffle: str, tmp_path: Path, *, rows: int) -> None:
    """Assert success at the second attempt, with every row once, and that no rank of the first accepted its shard."""
    records, run = tmp_path / "records", tmp_path / "run"
    records.mkdir()
    data = {"train": tr.Data(frame, shuffle=shuffle)}
    began = time.monotonic()
    taken = tr.launch(take_all, ranks=2, args=(str(records),), data=data, run_dir=str(run), spark=spark, progress=False)
    assert time.monotonic() - began < 2 * SECONDS
    assert sum(taken) == rows
    found = [json.loads(file.read_text()) for file in records.iterdir()]
    assert [sorted(record["counts"]) for record in found] == [sorted(record["rows"] for record in found)] * 2
    report = json.loads(run.joinpath("report.json").read_text())
    (retry,) = report["retries"]
    assert any("from the beginning: no checkpoint yet" in note for note in report["notes"])
    words = ("Spark ended the rows of this rank early", "Spark lost map output of the exchange", "was lost: ")
    assert any(word in retry["reason"] for word in words), retry["reason"]
    assert len(retry["reason"]) < 800
    assert spark.range(1000).count() == 1000


def succeed(spark: Any, shuffle: str, tmp_path: Path) -> None:
    """Assert success of the same function in the same session over a complete shard."""
    clusters.wait(lambda: settled(spark), "Spark has replaced what was killed")
    records = tmp_path / "whole"
    records.mkdir()
    data = {"train": tr.Data(spark.range(0, 9000, 1, 3), shuffle=shuffle)}
    assert sum(tr.launch(take_all, ranks=2, args=(str(records),), data=data, spark=spark)) == 9000
    found = [json.loads(file.read_text()) for file in records.iterdir()]
    assert sum(record["rows"] for record in found) == sum(record["taken"] for record in found) == 9000


def settled(spark: Any) -> bool:
    """Return whether Spark's executors are those that live, both of them."""
    ids = spark.sparkContext._jsc.sc().getExecutorIds()
    known = {ids.apply(i) for i in range(ids.size())}
    return len(known) == 2 and known == executors().keys()
