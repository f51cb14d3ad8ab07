"""`submit` on Spark, classic and Connect: result, cancel, events, and what the run's thread inherits."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from bounds import timed
from clusters import wait
from tritium.errors import JobFailed, NotEnoughSlots, RunCancelled
from tritium.events import GangFormed, GangStarted, Logged, Note, RunEnded

QUIET: dict[str, Any] = {"progress": False, "output": "none", "start_timeout": 120, "retries": 0}
GONE_SECONDS = 5.0


def sums() -> int:
    world = tr.world()
    world.log(step=0, rank_number=world.rank)
    return sum(world.gather(world.rank + 1))


def sleeps(folder: Path) -> Any:
    def train() -> None:
        world = tr.world()
        Path(folder, f"{world.rank}.part").write_text(str(os.getpid()))
        Path(folder, f"{world.rank}.part").rename(Path(folder, str(world.rank)))
        time.sleep(600)

    return train


def pids(folder: Path) -> list[int]:
    wait(lambda: all(Path(folder, str(k)).exists() for k in range(2)), "every rank runs", 150)
    return [int(Path(folder, str(k)).read_text()) for k in range(2)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cancelled(spark: Any, folder: Path) -> None:
    """Cancel a run whose ranks work; they are gone soon, and the session launches again."""
    with tr.submit(sleeps(folder), ranks=2, spark=spark, **QUIET) as run:
        ranks = pids(folder)
        with timed("job cancelled"):
            run.cancel()
            with pytest.raises(RunCancelled):
                run.result(60)
        wait(lambda: not any(map(alive, ranks)), "the ranks are gone", GONE_SECONDS)
        assert run.status == "cancelled"
    assert tr.launch(sums, ranks=2, spark=spark, **QUIET) == [3, 3]


def test_result_events_and_cancel(spark: Any, tmp_path: Path) -> None:
    with tr.submit(sums, ranks=2, spark=spark, **QUIET) as run:
        events = list(run.events())
        assert run.result(60) == [3, 3]
    kinds = [type(event) for event in events]
    assert kinds.index(GangStarted) < kinds.index(GangFormed) < kinds.index(Logged) < kinds.index(RunEnded)
    assert {event.rank for event in events if isinstance(event, Logged)} == {0, 1}
    cancelled(spark, tmp_path)


def test_its_job_is_in_the_group_of_the_thread_that_submits(spark: Any, tmp_path: Path) -> None:
    context = spark.sparkContext
    context.setJobGroup("my-group", "training", interruptOnCancel=False)
    try:
        run = tr.submit(sleeps(tmp_path), ranks=2, spark=spark, **QUIET)
        pids(tmp_path)
        context.cancelJobGroup("my-group")
        with pytest.raises(JobFailed, match="was cancelled"):
            run.result(60)
        assert run.status == "failed"
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)


def test_ctrl_c_while_its_events_are_read_cancels_nothing_of_the_session(spark: Any, tmp_path: Path) -> None:
    with tr.submit(sleeps(tmp_path), ranks=2, spark=spark, **QUIET) as run:
        pids(tmp_path)
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(run.events())
        timer.join()
        with pytest.raises(TimeoutError):
            run.result(1)


def test_one_that_waits_for_slots_is_cancelled_at_once(spark: Any, tmp_path: Path) -> None:
    waits = threading.Event()
    with tr.submit(sleeps(tmp_path), ranks=2, spark=spark, **QUIET):
        pids(tmp_path)
        second = tr.submit(sums, ranks=2, spark=spark, **QUIET)
        for event in second.events():
            if isinstance(event, Note) and "waiting for slots" in event.text:
                waits.set()
                break
        assert waits.is_set()
        second.cancel()
        with timed("job cancelled"), pytest.raises(RunCancelled):
            second.result(60)
    with pytest.raises(NotEnoughSlots):
        tr.submit(sums, ranks=64, spark=spark, **QUIET).result(60)


@pytest.mark.parametrize("cluster", ["connect"], indirect=True)
def test_on_connect(cluster: Any, tmp_path: Path) -> None:
    assert tr.submit(sums, ranks=2, spark=cluster.spark, **QUIET).result(120) == [3, 3]
    cancelled(cluster.spark, tmp_path)
