"""A driver that is killed ends everything with it: ranks, supervisors and executors, within 10 s."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pyspark.find_spark_home import _find_spark_home

import tritium as tr
from bounds import timed
from clusters import session, wait

SECONDS = 10.0
CODE = """
import sys
sys.path[:0] = {path!r}
import test_driver_killed
test_driver_killed.drive({place!r})
"""


def drive(place: str) -> None:
    """Launch in the process that will be killed."""
    with session("local-cluster") as spark:
        Path(place, "application").write_text(spark.sparkContext.applicationId)
        frame = spark.range(0, 20_000, 1, 4)
        tr.launch(train, ranks=2, args=(place,), data={"train": frame}, spark=spark, run_dir=f"{place}/run")


def train(place: str) -> None:
    """Take rows, so that there is a spool, and stay."""
    world = tr.world()
    for epoch in world.shard("train").epochs(1, batch_size=1000):
        for _ in epoch:
            pass
    Path(place, f"pid-{os.getpid()}").touch()
    while world.gather(True):
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_with_spark(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = CODE.format(path=[str(Path(__file__).parent), *sys.path], place=str(tmp_path))
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(scratch), "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", code]
    with tmp_path.joinpath("stderr").open("wb") as stderr:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=stderr)
    try:
        wait(lambda: len(list(tmp_path.glob("pid-*"))) == 2 or process.poll() is not None, "both ranks run", 120)
        assert process.poll() is None, tmp_path.joinpath("stderr").read_text()[-4000:]
        everyone = psutil.Process(process.pid).children(recursive=True)
        ranks = {int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")}
        assert ranks <= {child.pid for child in everyone}
        listening = {
            connection.laddr.port
            for connection in psutil.Process(process.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening, "the coordinator listens"
    finally:
        process.kill()
        process.wait()
        if tmp_path.joinpath("application").exists():  # Spark leaves it in its own home
            application = tmp_path.joinpath("application").read_text()
            shutil.rmtree(Path(_find_spark_home(), "work", application), ignore_errors=True)
    with timed("driver killed, local-cluster"):
        _, left = psutil.wait_procs(everyone, SECONDS)
    assert not left
    ports = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not ports & listening
    assert not [path for path in scratch.rglob("*tritium*") if path.name != "run"]
