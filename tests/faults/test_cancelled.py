"""Ctrl-C, a job that is cancelled, a session that is stopped: every rank is gone in 5 s, and the driver continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from bounds import timed, within
from clusters import COMMON, wait
from tritium.errors import JobFailed

SECONDS = 5.0


def launch(spark: Any, fn: Callable[[], Any], **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "progress": False, "output": "none", "start_timeout": 120, "retries": 0}
    return tr.launch(fn, spark=spark, **{**quiet, **settings})


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sleeper(folder: Path) -> Callable[[], None]:
    """Return a function whose ranks write down their pids and then sleep."""

    def train() -> None:
        world = tr.world()
        Path(folder, f"{world.rank}.part").write_text(str(os.getpid()))
        Path(folder, f"{world.rank}.part").rename(Path(folder, str(world.rank)))
        world.barrier()
        time.sleep(600)

    return train


def pids(folder: Path, ranks: int = 2) -> list[int]:
    wait(lambda: all(Path(folder, str(k)).exists() for k in range(ranks)), "every rank runs", 150)
    return [int(Path(folder, str(k)).read_text()) for k in range(ranks)]


class TestAJob:
    @pytest.mark.parametrize("how", ["all jobs", "the user's own tag", "the user's own group"])
    def test_that_is_cancelled_ends_all_ranks_and_says_so(self, spark: Any, how: str, tmp_path: Path) -> None:
        context = spark.sparkContext
        if how == "the user's own tag":
            context.addJobTag("mine")
        if how == "the user's own group":
            context.setJobGroup("my-group", "training", interruptOnCancel=False)
        cancel = {
            "all jobs": context.cancelAllJobs,
            "the user's own tag": lambda: context.cancelJobsWithTag("mine"),
            "the user's own group": lambda: context.cancelJobGroup("my-group"),
        }[how]
        gone: list[float] = []

        def watch() -> None:
            ranks = pids(tmp_path)
            began = time.monotonic()
            cancel()
            wait(lambda: not any(map(alive, ranks)), "the ranks are gone", 30)
            gone.append(time.monotonic() - began)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(JobFailed, match=r"was cancelled; all its ranks have been ended\. Spark says: Job") as e:
                launch(spark, sleeper(tmp_path))
        finally:
            watcher.join()
            context.clearJobTags()
            for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
                context.setLocalProperty(name, None)
        assert e.value.spark_error is not None
        within("job cancelled", gone[0])
        assert launch(spark, lambda: 1) == [1, 1]


@pytest.mark.parametrize("cluster", ["connect"], indirect=True)
@pytest.mark.parametrize("how", ["everything", "the user's own tag"])
def test_interrupting_on_connect_ends_all_ranks_too(cluster: Any, how: str, tmp_path: Path) -> None:
    spark = cluster.spark
    if how == "the user's own tag":
        spark.addTag("mine")

    def interrupt() -> None:
        pids(tmp_path)
        spark.interruptAll() if how == "everything" else spark.interruptTag("mine")

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(JobFailed, match="was cancelled; all its ranks have been ended"):
            launch(spark, sleeper(tmp_path))
    finally:
        interrupter.join()
        spark.clearTags()
    with timed("job cancelled"):
        wait(lambda: not any(map(alive, pids(tmp_path))), "the ranks are gone", SECONDS)
    assert launch(spark, lambda: 1) == [1, 1]


# ---- drivers of their own: what is done to them, no other test would survive

DRIVER = """
import json, os, re, sys, threading, time, urllib.request
from pathlib import Path
import psutil
import tritium as tr
from pyspark.sql import SparkSession

folder = sys.argv[1]

def session():
    builder = SparkSession.builder.master("local[2]")
    for pair in sys.argv[2:]:
        builder = builder.config(*pair.split("=", 1))
    return builder.getOrCreate()

def launch(fn, *args):
    return tr.launch(fn, ranks=2, spark=spark, args=args, progress=False, output="none")

def train(name):
    world = tr.world()
    Path(folder, f"{name}{world.rank}.part").write_text(str(os.getpid()))
    Path(folder, f"{name}{world.rank}.part").rename(Path(folder, f"{name}{world.rank}"))
    world.barrier()
    time.sleep(600)

def left():
    names = [thread.name for thread in threading.enumerate() if "tritium" in thread.name]
    return names + [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]

spark = session()
"""


def driver(script: str, folder: Path, **conf: str) -> subprocess.Popen[str]:
    arguments = [f"{key}={value}" for key, value in {**COMMON, **conf}.items()]
    command = [sys.executable, "-W", "ignore", "-c", DRIVER + script, str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


INTERRUPTED = """
try:
    launch(train, "")
except KeyboardInterrupt:
    print("interrupted", [t.name for t in threading.enumerate() if "tritium" in t.name], flush=True)
    print(spark.range(7).count(), launch(lambda: 1), flush=True)
spark.stop()
"""


def test_ctrl_c_ends_the_run_and_the_session_lives(tmp_path: Path) -> None:
    with driver(INTERRUPTED, tmp_path) as process:
        try:
            ranks = pids(tmp_path)
            process.send_signal(signal.SIGINT)
            with timed("Ctrl-C"):
                wait(lambda: not any(map(alive, ranks)), "the ranks are gone", SECONDS)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert output == "interrupted []\n7 [1, 1]\n", errors


def test_a_driver_that_is_killed_leaves_no_rank(tmp_path: Path) -> None:
    with driver(INTERRUPTED, tmp_path) as process:
        try:
            ranks = pids(tmp_path)
        finally:
            process.kill()
        wait(lambda: not any(map(alive, ranks)), "the ranks are gone", SECONDS)


ENDED = """
def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

def until(what):
    deadline = time.monotonic() + 60
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)

def end(name, how):
    def watch():
        until(lambda: all(Path(folder, f"{name}{k}").exists() for k in range(2)))
        ranks = [int(Path(folder, f"{name}{k}").read_text()) for k in range(2)]
        began = time.monotonic()
        ending = threading.Thread(target=how)
        ending.start()
        until(lambda: not any(map(alive, ranks)))
        seconds.append(time.monotonic() - began)
        ending.join()

    before = left()  # pyspark listens, too
    seconds, watcher = [], threading.Thread(target=watch)
    watcher.start()
    try:
        launch(train, name)
    except tr.errors.JobFailed as error:
        watcher.join()
        print(json.dumps({"how": name, "text": str(error), "seconds": seconds[0],
            "left": [what for what in left() if what not in before]}), flush=True)

def click():
    (job,) = spark.sparkContext.statusTracker().getActiveJobsIds()
    port = spark.sparkContext.uiWebUrl.rpartition(":")[2]
    jobs = f"http://127.0.0.1:{port}/jobs"
    with urllib.request.urlopen(jobs + "/", timeout=30) as page:  # 4.2.1 wants the token of its own page
        token = re.search('csrfToken["\\\']?(?: +value=|=)["\\\']?([-\\w]+)', page.read().decode())
    form = f"id={job}" + (f"&csrfToken={token[1]}" if token else "")
    urllib.request.urlopen(f"{jobs}/job/kill/?{form}", data=b"", timeout=30).close()

end("UI", click)
print(json.dumps(launch(lambda: 1)))
end("session", lambda: spark.stop())
spark = session()
print(json.dumps(launch(lambda: 1)))
end("JVM", lambda: spark.sparkContext._jsc.stop())
spark = None
"""


@pytest.mark.timeout(200)
def test_a_job_killed_in_the_ui_and_a_session_that_is_stopped(tmp_path: Path) -> None:
    """Both while a run continues; after each, the same process launches again."""
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.log.level": "OFF"}
    with driver(ENDED, tmp_path, **conf) as process:
        try:
            output, errors = process.communicate(timeout=180)
        finally:
            process.kill()
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line for line in lines if isinstance(line, list)] == [[1, 1]] * 2, output + errors[-3000:]
    ends = {line["how"]: line for line in lines if isinstance(line, dict)}
    assert list(ends) == ["UI", "session", "JVM"], output + errors[-3000:]
    assert "Spark says: Job 0 cancelled killed via" in ends["UI"]["text"]
    within("job cancelled", ends.pop("UI")["seconds"])
    for end in ends.values():
        assert "was cancelled, because its SparkSession was stopped; all its ranks have been ended" in end["text"]
        within("session stopped", end["seconds"])
        assert end["left"] == [], end
