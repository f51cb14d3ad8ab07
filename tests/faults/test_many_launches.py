"""Launch after launch on one session leaves nothing behind: nothing grows, on the driver or on executors.

`TRITIUM_FAULT_LAUNCHES` launches (100 under `make faults`), after a few that fill caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pytest

import tritium as tr
from clusters import wait
from tritium.errors import RankFailed

LAUNCHES = int(os.environ.get("TRITIUM_FAULT_LAUNCHES", "12"))
ENDINGS = ("returns", "raises", "is killed")
ENDED = int(os.environ.get("TRITIUM_FAULT_LAUNCHES", len(ENDINGS)))  # launches that end in one of these ways
WARM_UP = 5
MEMORY = 8 << 20  # bytes that a process's own memory may move by, besides
CLOSING = 5.0  # seconds
SPANS = 3  # a leak grows in each, an allocator's fragments in one
PER_LAUNCH = 64 << 10  # what the allocator and the caches of libraries were seen to take for one, and twice that


def train() -> float:
    world = tr.world()
    total = 0.0
    for epoch in world.shard("train").epochs(1, batch_size=100):
        for batch in epoch:
            total += float(batch["x"][: batch.rows].sum())
    world.log(step=0, loss=total)
    world.store(f"{world.rank}.bin", [bytes(1 << 20)])
    return sum(world.gather(total))


def launches(count: int, **settings: Any) -> None:
    for _ in range(count):
        assert tr.launch(train, ranks=2, progress=False, output="none", **settings) == [499_500.0] * 2


def own(process: psutil.Process) -> dict[str, int]:
    """Return what a process holds: file descriptors, threads, and bytes of memory that are its own."""
    return {
        "file descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "memory": process.memory_full_info().uss,
    }


def grown(before: dict[str, int], after: dict[str, int], launches: int) -> dict[str, tuple[int, int]]:
    most = dict.fromkeys(before, 0) | {"memory": MEMORY + launches * PER_LAUNCH}
    return {name: (before[name], after[name]) for name in before if after[name] > before[name] + most[name]}


def grows(launch: Callable[[], None], look: Callable[[], dict[Any, dict[str, int]]], rounds: int) -> dict[str, Any]:
    """Return what the processes hold more of after the launches, and again after as many more, `SPANS` times."""
    before, found, after = look(), dict[str, Any](), dict[Any, dict[str, int]]()

    def nothing_more() -> bool:
        nonlocal after, found
        after = look()
        spans = {name: grown(before[name], after[name], rounds) for name in after if name in before}
        found = {str(name): more for name, more in spans.items() if more}
        return not found

    for _ in range(SPANS):
        launch()
        with contextlib.suppress(TimeoutError):  # a worker may still be closing what it had
            wait(nothing_more, "nothing has grown", CLOSING)
            break
        before = after
    return found


def files() -> list[str]:
    """Return the files where Tritium writes: temporary files, and the spools' scratch. Spark cleans up its own."""
    places = {os.environ["TMPDIR"], *os.environ["SPARK_LOCAL_DIRS"].split(",")}
    return sorted(
        str(path) for place in places for path in Path(place).rglob("*tritium*") if "pytest-of-" not in str(path)
    )


def me() -> dict[str, int]:
    gc.collect()
    pa.default_memory_pool().release_unused()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but kept for later, is no growth
    return {**own(psutil.Process()), "threads of Python": threading.active_count()}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rounds", [LAUNCHES])
def test_on_the_driver(rounds: int) -> None:
    settings = {"on": "driver", "data": {"train": pd.DataFrame({"x": np.arange(1000.0)})}}
    launches(WARM_UP, **settings)
    there, children = files(), set(psutil.Process().children(recursive=True))
    assert not grows(lambda: launches(rounds, **settings), lambda: {"driver": me()}, rounds)
    assert files() == there
    assert set(psutil.Process().children(recursive=True)) <= children  # idle workers of Spark may have ended


def workers() -> dict[int, dict[str, int]]:
    """Return Spark's Python workers below this process, which it reuses."""

    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a task's child that has just ended
            if "pyspark.daemon" in " ".join(process.cmdline()):
                found[process.pid] = own(process)
    return found


def in_the_jvm(spark: Any) -> dict[str, int]:
    """Return what Spark keeps of jobs that have ended."""
    context = spark.sparkContext._jsc.sc()
    spark.sparkContext._jvm.System.gc()
    tags = context.getJobTags()
    return {"cached": context.getPersistentRDDs().size(), "tags": tags.size(), "files": context.listFiles().size()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [LAUNCHES])
def test_on_spark(spark: Any, rounds: int) -> None:
    jvm = next(p for p in psutil.Process().children(recursive=True) if p.name() == "java")
    frame = spark.range(0, 1000, 1, 2).selectExpr("cast(id as double) as x")
    settings = {"data": {"train": frame}, "start_timeout": 120}
    launches(WARM_UP, **settings)
    there, of_workers, kept, sockets = files(), workers(), in_the_jvm(spark), len(jvm.net_connections())
    assert not grows(lambda: launches(rounds, **settings), lambda: {"driver": me(), **workers()}, rounds)
    wait(lambda: files() == there, "no file is left")
    assert len(workers()) <= len(of_workers)
    assert in_the_jvm(spark) == kept
    wait(lambda: len(jvm.net_connections()) <= sockets, "every connection to the JVM is closed")


def leave(how: str, name: str) -> None:
    """Make named shared memory and a semaphore, as DataLoaders with spawned workers do, and end one way or another."""
    world = tr.world()
    multiprocessing.current_process()._config["semprefix"] = f"/{name}"  # type: ignore[attr-defined]
    kept = SharedMemory(f"{name}-{world.rank}", create=True, size=1 << 20), get_context("spawn").Lock()
    assert len(shared(name)) >= len(kept)
    world.barrier()
    if world.rank == 1 and how == "raises":
        raise LookupError(name)
    if world.rank == 1 and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "returns":
        world.barrier()


def shared(name: str) -> list[str]:
    return [entry for entry in os.listdir("/dev/shm") if name in entry]


def ended(how: str, **settings: Any) -> None:
    """Launch ranks that end so, and wait until nothing of theirs is left in shared memory."""
    name = f"tritium-{uuid.uuid4().hex}"
    errors = {"raises": "raised LookupError", "is killed": "was killed by SIGKILL"}
    outcome = pytest.raises(RankFailed, match=errors[how]) if how in errors else contextlib.nullcontext()
    with outcome:
        tr.launch(leave, args=(how, name), ranks=2, progress=False, output="none", retries=0, **settings)
    wait(lambda: not shared(name), f"nothing is left in /dev/shm by a rank that {how}")


def endings(count: int, **settings: Any) -> None:
    for number in range(count):
        ended(ENDINGS[number % len(ENDINGS)], **settings)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names in /dev/shm on Linux alone")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rounds", [ENDED])
def test_that_end_in_any_way_on_the_driver(rounds: int) -> None:
    endings(len(ENDINGS), on="driver")
    there, children = files(), set(psutil.Process().children(recursive=True))
    assert not grows(lambda: endings(rounds, on="driver"), lambda: {"driver": me()}, rounds)
    assert files() == there
    assert set(psutil.Process().children(recursive=True)) <= children


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names in /dev/shm on Linux alone")
@pytest.mark.timeout(800)
@pytest.mark.parametrize("rounds", [ENDED])
def test_that_end_in_any_way_on_spark(spark: Any, rounds: int) -> None:
    settings = {"spark": spark, "start_timeout": 120}
    endings(len(ENDINGS), **settings)
    there, of_workers = files(), workers()
    assert not grows(lambda: endings(rounds, **settings), lambda: {"driver": me(), **workers()}, rounds)
    wait(lambda: files() == there, "no file is left")
    assert len(workers()) <= len(of_workers)
