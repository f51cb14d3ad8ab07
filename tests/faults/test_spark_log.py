"""In a session with Spark's default logging, a failed gang leaves at most one line of Spark's on the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusters import COMMON

DRIVER = """
import sys
import tritium as tr
from pyspark.sql import SparkSession

builder = SparkSession.builder.master(sys.argv[1])
for pair in sys.argv[3:]:
    builder = builder.config(*pair.split("=", 1))
spark = builder.getOrCreate()
jobs = spark.sparkContext.statusTracker().getJobIdsForGroup
print("BEGIN", file=sys.stderr, flush=True)

def train():
    tr.world().barrier()
    if tr.world().rank == 1:
        raise ValueError("bad learning rate")
    tr.world().barrier()

try:
    tr.launch(train, ranks=2, spark=spark, progress=False, output="none", run_dir=sys.argv[2])
except tr.errors.RankFailed as error:
    print(error)
print("END", file=sys.stderr, flush=True)
(job,) = jobs()
print("JOB", spark.sparkContext.statusTracker().getJobInfo(job).status)
spark.stop()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_a_rank_that_raises_is_one_line_in_sparks_log(master: str, tmp_path: Path) -> None:
    conf = {key: value for key, value in COMMON.items() if key != "spark.log.level"}
    arguments = [f"{key}={value}" for key, value in conf.items()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, master, str(tmp_path / "run"), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "Rank 1 on" in done.stdout, done.stderr[-3000:]
    assert "raised ValueError: bad learning rate" in done.stdout
    assert "JOB FAILED" in done.stdout, "Spark's UI must not show it as a success"
    lines = done.stderr.partition("BEGIN\n")[2].partition("END\n")[0].splitlines()
    print(master, len(lines), *lines, sep="\n")
    lost = [line for line in lines if "Lost task" in line]
    assert len(lines) <= 2, lines  # Spark may also say that the task's code is large
    assert len(lost) <= 1
    assert all("because rank 1 on" in line and "raised ValueError: bad learning rate" in line for line in lost), lost
