"""Scorings that are killed at seeded moments, driver or executor, end with every row exactly once.

A chain is one scoring that is killed up to KILLS times, and started again. A moment is a number of rows that the model
was called with.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from pyspark.find_spark_home import _find_spark_home
from torch import nn

import clusters
import tritium as tr
from broker import jars
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature
from tritium.predict.ledger import Ledger

ROUNDS = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "1"))
KILLS = 4
CHAINS = [("parquet", seed) for seed in range(max(1, ROUNDS // KILLS))] + [("delta", 100)] * (ROUNDS > 1)
ROWS, PARTITIONS, BATCH = 3200, 32, 20
SIGNATURE = Signature((Input("x", ("a",), "float32", (1,)),), (Output("y", shape=(1,)),), "regression")
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
}
CODE = """
import sys
sys.path[:0] = {path!r}
import test_score_killed
test_score_killed.drive({place!r}, {into!r}, {conf!r})
"""


class Slow(nn.Module):
    """A model that takes 50 ms a call, and writes down how many rows it was called with."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.line = nn.Linear(1, 1)
        with torch.no_grad():
            self.line.weight.fill_(2.0)
            self.line.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(os.path.join(self.place, f"rows-{os.getpid()}"), "a") as file:
            file.write(f"{len(x)}\n")
        time.sleep(0.05)
        return self.line(x)


def drive(place: str, into: str, conf: dict[str, str]) -> None:
    """Score in the process that will be killed."""
    clusters.COMMON.update(conf)
    with clusters.session("local-cluster") as spark:
        Path(place, "application").write_text(spark.sparkContext.applicationId)
        model = TorchModel(tr.Model(Slow(place), SIGNATURE), batch_size=BATCH)
        df = spark.range(0, ROWS, 1, PARTITIONS).selectExpr("id", "CAST(id AS FLOAT) a")
        model.score(df, into=into, resume=f"{place}/resume", verbose=False)
        kind = into.partition(":")[0]
        written = spark.read.format(kind).load(f"{place}/scored")
        Path(place, "done").write_text(json.dumps([[row.id, row.prediction] for row in written.collect()]))


def called_rows(place: Path) -> int:
    return sum(sum(map(int, file.read_text().split())) for file in place.glob("rows-*"))


def unfinished_rows(place: Path) -> int:
    parts = Ledger(f"{place}/resume").parts() if place.joinpath("resume").exists() else []
    return sum(part.count for part in parts if part.fingerprint is None) * (ROWS // PARTITIONS)


@contextmanager
def running(place: Path, into: str, conf: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    code = CODE.format(path=[str(Path(__file__).parent), *sys.path], place=str(place), into=into, conf=conf)
    place.joinpath("application").unlink(missing_ok=True)
    with place.joinpath("stderr").open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=place, stderr=stderr)
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        process.wait()
        psutil.wait_procs(children, 30)
        if place.joinpath("application").exists():  # Spark leaves it in its own home.
            work = Path(_find_spark_home(), "work", place.joinpath("application").read_text())
            shutil.rmtree(work, ignore_errors=True)


def killed(process: subprocess.Popen[bytes], victim: str) -> bool:
    """Kill the driver, alone or with all that it has started, or an executor. Return whether the driver is dead."""
    children = psutil.Process(process.pid).children(recursive=True)
    if victim == "executor":
        executors = [one for one in children if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline())]
        if executors:
            executors[0].kill()
        return False
    process.kill()
    for child in children if victim == "cluster" else ():
        child.kill()
    process.wait()
    psutil.wait_procs(children, 30)
    return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "seed"), CHAINS)
def test_every_row_exactly_once(tmp_path: Path, kind: str, seed: int) -> None:
    draw = random.Random(seed)
    conf = {**DELTA, "spark.jars": ",".join(map(str, jars("delta").glob("*.jar")))} if kind == "delta" else {}
    into = f"{kind}:{tmp_path}/scored"
    victims = [draw.choice(["driver", "cluster", "executor"]) for _ in range(KILLS)]
    victims[draw.randrange(KILLS)] = "driver"  # A chain of executors alone would not resume.
    moments = sorted(draw.randrange(1, ROWS) for _ in range(KILLS))
    plan = list(zip(victims, moments, strict=True))
    lost, tasks, left = 0, 0, list(plan)
    while True:
        with running(tmp_path, into, conf) as process:
            while process.poll() is None and left:
                clusters.wait(
                    lambda: called_rows(tmp_path) >= left[0][1] or process.poll() is not None, "a moment", 300
                )
                if process.poll() is not None:
                    break
                victim, _ = left.pop(0)
                if killed(process, victim):
                    lost += unfinished_rows(tmp_path)
                    break
                tasks += 1
            else:
                process.wait(600)
        if tmp_path.joinpath("done").exists():
            break
        assert process.returncode == -9, f"{plan}: {tmp_path.joinpath('stderr').read_text()[-4000:]}"
    rows = sorted(map(tuple, json.loads(tmp_path.joinpath("done").read_text())))
    assert rows == [(number, 2.0 * number) for number in range(ROWS)], plan
    called = called_rows(tmp_path)
    print(f"\n{kind} seed {seed}: {plan}, {called - ROWS} of {ROWS} rows computed twice, at most {lost} in flight")
    # An executor has one core here: one task, and one that Spark had given it.
    assert called <= ROWS + lost + tasks * 2 * (ROWS // PARTITIONS), plan
    assert not list(tmp_path.glob("scored/_tritium*"))
