"""The place where a Spark job fails decides the outcome of the run: the gang's stage, the user's source, or the JVM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from clusters import COMMON, wait
from tritium.errors import JobFailed

QUIET: dict[str, Any] = {"ranks": 2, "progress": False, "output": "none", "start_timeout": 120}
WORDS = "payment was cancelled: ExecutorLostFailure, FetchFailed, No space left on device, over maxResultSize"


def retries(run_dir: Path) -> list[dict[str, Any]]:
    return list(json.loads((run_dir / "report.json").read_text())["retries"])


def test_sparks_python_daemon_killed_while_the_gang_starts_is_tried_again(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
case "$*" in *pyspark.daemon*) [ -e {tmp_path}/died ] || {{ touch {tmp_path}/died; kill -9 $$; }} ;; esac
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    assert tr.launch(lambda: 1, spark=spark, run_dir=str(tmp_path / "run"), **QUIET) == [1, 1]
    (retry,) = retries(tmp_path / "run")
    assert "pyspark.daemon's stdout" in retry["reason"]


@pytest.mark.parametrize("cluster", ["local", "connect"], indirect=True)
def test_a_users_udf_that_raises_is_the_users_whatever_its_text_says(cluster: Any, tmp_path: Path) -> None:
    def decode(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            raise RuntimeError(WORDS)
        yield from ()

    frame = cluster.spark.range(0, 10, 1, 2).mapInArrow(decode, "id long")
    with pytest.raises(JobFailed) as caught:
        tr.launch(lambda: 1, spark=cluster.spark, data={"train": frame}, run_dir=str(tmp_path / "run"), **QUIET)
    assert str(caught.value).startswith(f"The source of the data failed in Spark: RuntimeError: {WORDS}")
    assert not caught.value.lost
    assert retries(tmp_path / "run") == []
    assert cluster.spark.range(3).count() == 3


def test_a_worker_of_the_sources_that_is_killed_is_a_loss(spark: Any, tmp_path: Path) -> None:
    def die_once(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    frame = spark.range(0, 10, 1, 1).mapInArrow(die_once, "id long")
    run = tmp_path / "run"
    assert tr.launch(lambda: 1, spark=spark, data={"train": frame}, run_dir=str(run), **QUIET) == [1, 1]
    (retry,) = retries(run)
    assert "a task of the source was lost: a Python worker of Spark's was killed or crashed" in retry["reason"]


# ---- the JVM

DRIVER = """
import os, sys, threading, time
import tritium as tr
from pathlib import Path
from pyspark.sql import SparkSession

folder, conf = sys.argv[1], sys.argv[2:]
builder = SparkSession.builder.master("local[2]")
for pair in conf:
    builder = builder.config(*pair.split("=", 1))
spark = builder.getOrCreate()

def train():
    Path(folder, str(tr.world().rank)).write_text(str(os.getpid()))
    time.sleep(600)

def blocks(batches):
    Path(folder, "0").write_text(str(os.getpid()))
    Path(folder, "1").write_text(str(os.getpid()))
    for batch in batches:
        time.sleep(600)
        yield batch

data = {"train": spark.range(0, 10, 1, 1).mapInArrow(blocks, "id long")} if os.environ["MOMENT"] == "source" else None
for again in range(2):
    try:
        tr.launch(train, ranks=2, spark=spark, data=data, progress=False, output="none")
    except tr.errors.JobFailed as error:
        print("FAILED", time.time(), error.__cause__ is not None, str(error).partition("\\n")[0], flush=True)
print([t.name for t in threading.enumerate() if "tritium" in t.name], flush=True)
print(tr.launch(lambda: tr.world().rank, ranks=2, on="driver", progress=False, output="none"), flush=True)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", ["training", "source"])
def test_a_jvm_that_is_killed_is_one_clear_error_and_python_goes_on(moment: str, tmp_path: Path) -> None:
    arguments = [f"{key}={value}" for key, value in COMMON.items()]
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, str(tmp_path), *arguments]
    env = {**os.environ, "MOMENT": moment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            wait(lambda: all((tmp_path / str(k)).exists() for k in range(2)), "both ranks run", 150)
            wait(lambda: bool((tmp_path / "1").read_text()), "it has written its pid", 10)
            (jvm,) = [child for child in psutil.Process(process.pid).children() if child.name() == "java"]
            killed = time.time()
            jvm.kill()
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    first, second, threads, results = output.splitlines()[-4:]
    moment_, cause, told = first.removeprefix("FAILED ").split(" ", 2)
    assert float(moment_) - killed < 15, first
    assert cause == "True", errors
    assert told.startswith(f"Spark's JVM, in which its driver runs (pid {jvm.pid}), was killed by SIGKILL"), told
    assert "Spark's JVM" in second, "the next launch says it too"
    assert threads == "[]"
    assert results == "[0, 1]", errors[-3000:]
